"""Conversations without a slot: saved before their slot is given away, and loaded into any free one when they go on.

Rules it keeps:
    1. Saved is what the book of slots says is the session's own, when the slot holds as many tokens as the session's
       last turn said. The engine compares tokens itself at the next turn, so a state that is not what it should be
       costs time, never an answer.
    2. A slot is held by whoever works on it: the request that it was granted to, or the heartbeat's reservation. It is
       let go when the engine is done with it, also when the client has left meanwhile.
    3. One at a time of each session: who comes back while it is being saved waits for that.
    4. Any failure is a miss: the request goes out as it would have, and the engine prefills.
    5. What is shared with a pool is not saved. The state is loaded behind that pool, or any that begins the same.

When something is saved: before a request overwrites it; after ``after_s`` without a turn, and then the slot is emptied,
since every decode scans up to the highest cell in use; and before the engine purges it because cells are short. A
request waits for one of these at most, so when cells run low sessions are taken out between the turns.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from polykv_proxy.control.ledger import Ledger
from polykv_proxy.control.orders import AttachPlan
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved import SavedStates
from polykv_proxy.control.saved_books import session_tag
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import InvariantError, KvExhausted, PolyKVError, UpstreamTimeout, UpstreamUnavailable
from polykv_proxy.ids import SeqId, SessionId, SlotId
from polykv_proxy.sessions import Session, SessionBook
from polykv_proxy.slots import Displaced, Grant, SlotBook
from polykv_proxy.upstream import EngineClient, SavedState, SlotStats, Stats

log = logging.getLogger("polykv.parking")

Done = TypeVar("Done")

MIN_OWN_TOKENS = 32
"""Fewer are prefilled again as fast as two calls of the engine take."""

LOW_FRACTION = 1 / 8
"""Cells are low when fewer are free than this part of all, and than the largest conversation in a slot has."""

LEAVE_S = 5.0
"""So long sessions are saved when the proxy ends."""

SAVE_WAIT_S = 1.0
"""A request waits no longer for somebody else's state. The engine takes its orders one after the other, so the state is
saved all the same; what takes so long is the disk."""


class Parking:
    """``deliver``: whoever lets requests wait for slots takes the grants that come of letting a slot go."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        saved: SavedStates,
        sessions: SessionBook,
        slots: SlotBook,
        watch: EngineWatch,
        ledger: Ledger,
        room: Room,
        may_change: Callable[[], bool],
        deliver: Callable[[list[Grant]], None],
        clock: Callable[[], float],
        after_s: float,
    ):
        self._engine, self._saved, self._watch, self._ledger = engine, saved, watch, ledger
        self._sessions, self._slots, self._room, self._may_change = sessions, slots, room, may_change
        self._deliver, self._clock, self._after_s = deliver, clock, after_s
        self._locks: WeakValueDictionary[SessionId, asyncio.Lock] = WeakValueDictionary()
        self._working: set[asyncio.Task[Any]] = set()
        self._tending: asyncio.Task[None] | None = None
        self.doubt_cells: Callable[[], None] = lambda: None
        """Told when it is not known what a slot holds."""
        self._given_up: dict[SlotId, tuple[SessionId, int]] = {}
        sessions.on_forgotten = self._forgotten

    @property
    def on(self) -> bool:
        return self._after_s > 0 and self._saved.available and self._may_change()

    async def leave(self) -> None:
        """The proxy ends and the engine may go on: the next proxy does not know whose slots are whose, but ids."""
        try:
            async with asyncio.timeout(LEAVE_S):
                for slot_id, session in self._resting():
                    if session is None or not self._may_park(slot_id, session) or not self._is_unsaved(session):
                        continue
                    if self.on and self._slots.reserve(slot_id):
                        await self._save_alone(session, slot_id)
        except TimeoutError:
            log.warning("not all sessions are saved within %.0f s: those prefill again", LEAVE_S)

    async def stop(self) -> None:
        working = list(self._working)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)

    # Requests ------------------------------------------------------------------------------------------------------

    def leaving(self, displaced: Sequence[Displaced]) -> list[Displaced]:
        """These sessions have no slot any more. Gives those whose conversation is still in it, and may go on."""
        left = [one for one in displaced if self._was_there(one)]
        for one in displaced:
            self._sessions.displaced(one.session)
        return left

    def prepare(
        self,
        session: Session,
        slot_id: SlotId,
        left: Sequence[Displaced],
        plan: AttachPlan | None,
        *,
        own: bool,
        reuses: bool,
    ) -> "asyncio.Task[None] | None":
        """Before a request goes out to its slot: save what others left there, load what its session said before.

        ``own``: it is the slot that the session had. ``reuses``: the request can go on with what a slot holds.
        None: there is nothing to do. The slot must be kept until the task is done.
        """
        if not self.on:
            return None
        own = own and self._is_there(session, slot_id)
        comes_back = reuses and not own
        if comes_back and self._saved.known and session.session_id not in self._locks:
            comes_back = self._state_for(session, plan) is not None
        n_cells = self._n_needed(session, plan, own=own)
        if not left and not comes_back and n_cells <= self._n_free():
            return None
        return self._start(self._prepare(session, slot_id, left, plan, n_cells, own=own, comes_back=comes_back))

    async def _prepare(
        self,
        session: Session,
        slot_id: SlotId,
        left: Sequence[Displaced],
        plan: AttachPlan | None,
        n_cells: int,
        *,
        own: bool,
        comes_back: bool,
    ) -> None:
        for one in left:
            other = self._sessions.get(one.session)
            if other is not None:
                await asyncio.wait([self._start(self._save_alone(other, one.slot_id))], timeout=SAVE_WAIT_S)
        try:
            if n_cells > self._n_free():
                await self._make_room(n_cells, None if own else slot_id, n_saves=0 if left else 1)
            if comes_back:
                async with self._alone(session.session_id):
                    await self._come_back(session, slot_id, plan, n_saves=0 if left else 1)
        except PolyKVError as e:
            log.info("session %s is prefilled: %s", session.session_id, e.message)

    async def _come_back(self, session: Session, slot_id: SlotId, plan: AttachPlan | None, *, n_saves: int) -> None:
        await self._saved.look()
        state = self._state_for(session, plan)
        if state is None:
            return
        try:
            await self._load(session, slot_id, plan, state, n_saves=n_saves)
        finally:
            if session.saved and self._saved.find(state.tag) is None:
                self._sessions.set_saved(session, None)

    def _was_there(self, one: Displaced) -> bool:
        """Its last turn ran in this slot, and nobody else's since, by the book."""
        session = self._sessions.get(one.session)
        if session is None or session.is_sent or not session.may_return:
            return False
        return session.slot_id == one.slot_id

    def _is_there(self, session: Session, slot_id: SlotId) -> bool:
        """Unless newer stats say that the engine took the cells of the session's own slot, it is."""
        stats, held = self._watch.stats, session.held_n_tokens
        if stats is None or held is None or self._watch.asked_s <= session.held_s:
            return True
        slot = _slot_in(stats, slot_id)
        return slot is None or slot.n_tokens >= held - 2

    def _state_for(self, session: Session, plan: AttachPlan | None) -> SavedState | None:
        """The session's state, if it can be put behind the pool that the request attaches to, and is worth it."""
        state = self._saved.find(session_tag(session.session_id))
        if state is None:
            return None
        n_shared = plan.prefix_n_tokens if plan is not None and plan.pool_id is not None else 0
        if state.start > n_shared or state.n_tokens - n_shared < MIN_OWN_TOKENS:
            return None
        return state

    # Cells ---------------------------------------------------------------------------------------------------------

    def _n_needed(self, session: Session, plan: AttachPlan | None, *, own: bool) -> int:
        """Cells that should be free when this request goes out; 0 when nobody counts them."""
        n_cells = self._room.n_needed() or 0
        if own and session.held_n_tokens is not None:
            n_shared = plan.prefix_n_tokens if plan is not None and plan.pool_id is not None else 0
            n_cells -= max(0, session.held_n_tokens - n_shared)
        return n_cells

    def _n_free(self) -> int:
        """Free cells by the last stats, less those that turns took which ended later."""
        stats = self._watch.stats
        if stats is None or stats.cells is None:
            return 0
        n_free = stats.cells.free
        for slot_id, session in self._resting():
            if session is None or session.held_n_tokens is None or session.held_s <= self._watch.asked_s:
                continue
            slot = _slot_in(stats, slot_id)
            n_free -= max(0, session.held_n_tokens - (slot.n_tokens if slot is not None else 0))
        return n_free

    async def make_room(self, n_cells: int) -> None:
        """Empty slots that rest until so many cells are free, for a pool that is to be loaded: that clears none."""
        if self.on:
            await self._make_room(n_cells, None, n_saves=1)

    async def _make_room(self, n_cells: int, slot_id: SlotId | None, *, n_saves: int) -> None:
        """Empty slots that rest until so many cells are free: the engine would do it, with any slot, unsaved.

        First ``slot_id``, whose content nobody needs; then those that nobody owns, or that are saved; then sessions,
        longest unused first. At most ``n_saves`` of them, and one that cannot be saved is left to the engine.
        """
        await self._watch.refresh()
        n_free = self._n_free()
        if n_free < n_cells and slot_id is not None:
            n_free += await self._empty(slot_id) or 0
        for other_id, session in sorted(self._resting(), key=lambda one: self._is_unsaved(one[1])):
            if n_free >= n_cells:
                break
            unsaved = self._is_unsaved(session)
            if (session is not None and not session.may_return) or (unsaved and n_saves <= 0):
                continue
            n_saves -= unsaved
            n_free += await self._park(other_id, session) or 0

    def _resting(self) -> list[tuple[SlotId, Session | None]]:
        """Free slots and whose they are, the longest unused first."""
        resting = self._slots.resting()
        return [(slot_id, self._sessions.get(owner) if owner is not None else None) for slot_id, owner in resting]

    def _is_unsaved(self, session: Session | None) -> bool:
        """What its slot holds is kept nowhere else."""
        if session is None:
            return False
        return session.saved_at != session.n_sent or self._saved.find(session_tag(session.session_id)) is None

    # Idle sessions -------------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Called by the heartbeat, and after a turn: sessions leave the cache that were idle for long.

        When cells are low, all that are idle: the next request should find room.
        """
        if self._tending is not None and not self._tending.done():
            return
        if self.on and self._idle():
            self._tending = self._start(self._tend())

    def _idle(self) -> list[tuple[SlotId, Session]]:
        """Whose time has come, longest unused first."""
        now_s, low = self._clock(), self._is_low()
        return [
            (slot_id, session)
            for slot_id, session in self._resting()
            if session is not None
            and (low or now_s - session.last_s >= self._after_s)
            and self._may_park(slot_id, session)
            and self._given_up.get(slot_id) != _moment(session)
        ]

    def _may_park(self, slot_id: SlotId, session: Session) -> bool:
        return session.may_return and not session.turns and session.slot_id == slot_id

    def _is_low(self) -> bool:
        stats = self._watch.stats
        if stats is None or stats.cells is None or not stats.cells.total:
            return False
        largest = max((slot.n_tokens for slot in stats.slots), default=0)
        return self._n_free() < min(largest, stats.cells.total * LOW_FRACTION)

    async def _tend(self) -> None:
        await self._watch.refresh()
        while idle := self._idle():
            if self._slots.n_waiting or not self.on:
                return  # somebody needs the slots now
            await self._park(*idle[0])
            await self._watch.refresh()

    async def _park(self, slot_id: SlotId, session: Session | None) -> int | None:
        """Take what rests in a slot out of the cache; a session's is saved before. Gives how many cells came free.

        None: it stays there.
        """
        if not self._slots.reserve(slot_id):
            return None
        n_freed = None
        try:
            if session is None or await self._save_alone(session, slot_id):
                n_freed = await self._empty(slot_id)
            if session is not None and n_freed is None:
                self._given_up[slot_id] = _moment(session)
            elif session is not None and session.slot_id == slot_id:
                self._sessions.displaced(session.session_id)
        finally:
            self._deliver(self._slots.unreserve(slot_id, self._clock(), emptied=n_freed is not None))
        return n_freed

    # The engine ----------------------------------------------------------------------------------------------------

    async def _save_alone(self, session: Session, slot_id: SlotId) -> bool:
        async with self._alone(session.session_id):
            try:
                return await self._save(session, slot_id)
            except PolyKVError as e:
                log.info("session %s is not saved: %s", session.session_id, e.message)
                return False

    async def _save(self, session: Session, slot_id: SlotId) -> bool:
        """Gives whether the slot may be emptied: what it holds of this session is kept, or is soon prefilled again.

        Raises:  UpstreamError and its heirs
        """
        tag = session_tag(session.session_id)
        if not self._is_unsaved(session):
            return True
        moment = _moment(session)
        stats = await self._watch.refresh()
        slot = _slot_in(stats, slot_id)
        if slot is None or not slot.idle or not _holds(slot.n_tokens, session.held_n_tokens):
            return False
        self._ledger.sync()
        start = slot.n_pool_shared
        if slot.n_tokens - start < MIN_OWN_TOKENS:
            return True  # not worth keeping, nor worth the cells that it and its pool would stay in for it
        state = await self._saved.save(id_slot=slot_id, start=start, tag=tag)
        if state.n_tokens != slot.n_tokens or self._sessions.get(session.session_id) is not session:
            await self._saved.forget(tag)
            self._sessions.set_saved(session, None)
            return False
        self._sessions.set_saved(session, moment[1])
        log.debug("session %s is saved: [%d, %d)", session.session_id, state.start, state.n_tokens)
        return True

    async def _load(
        self, session: Session, slot_id: SlotId, plan: AttachPlan | None, state: SavedState, *, n_saves: int
    ) -> None:
        """Put a state into the slot, behind the sequence that the request attaches to.

        Raises:  as ``SavedStates.load_slot``
        """
        parent = plan.seq_id if plan is not None and plan.seq_id is not None and state.start > 0 else SeqId(-1)
        await self._watch.refresh()
        self._ledger.sync()
        try:
            try:
                loaded = await self._saved.load_slot(state.tag, slot_id, parent, state.start)
            except KvExhausted:
                await self._make_room(state.n_tokens - state.start, slot_id, n_saves=n_saves)
                loaded = await self._saved.load_slot(state.tag, slot_id, parent, state.start)
        except (UpstreamUnavailable, UpstreamTimeout, asyncio.CancelledError):
            self.doubt_cells()
            raise
        source = parent if state.start > 0 else None
        self._ledger.book.refilled(slot_id, loaded.n_tokens, source=source, n_shared=loaded.branch_pos)
        session.slot_id, session.held_n_tokens, session.held_s = slot_id, loaded.n_tokens, self._clock()
        log.debug("session %s is back in slot %d: %d tokens", session.session_id, slot_id, loaded.n_tokens)

    async def _empty(self, slot_id: SlotId) -> int | None:
        """Drop what a slot holds. Gives how many cells came free; None when it holds it still."""
        try:
            cleared = await self._engine.clear_slot(slot_id)
        except PolyKVError as e:
            if isinstance(e, UpstreamUnavailable | UpstreamTimeout):
                self.doubt_cells()
            log.info("slot %d is not emptied: %s", slot_id, e.message)
            return None
        self._ledger.book.refilled(slot_id, 0)
        return cleared.n_cells_freed

    # ---------------------------------------------------------------------------------------------------------------

    def _forgotten(self, session: Session) -> None:
        """Nothing is known of the session any more: its state is nobody's."""
        tag = session_tag(session.session_id)
        if self._saved.find(tag) is not None or session.session_id in self._locks:
            self._start(self._forget(session.session_id, tag))

    async def _forget(self, session_id: SessionId, tag: str) -> None:
        async with self._alone(session_id):
            if self._sessions.get(session_id) is None and self._saved.find(tag) is not None:
                await self._saved.forget(tag)

    @asynccontextmanager
    async def _alone(self, session_id: SessionId) -> AsyncIterator[None]:
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        async with lock:
            yield

    def _start(self, work: Coroutine[Any, Any, Done]) -> "asyncio.Task[Done]":
        """It ends when the engine is done, whoever waits for it."""
        task = asyncio.create_task(work, name="polykv-parking")
        self._working.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._working.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PolyKVError) and not isinstance(error, InvariantError):
            log.info("sessions stay as they are: %s", error.message)
        else:
            log.error("a bug in parking; the request goes on without it", exc_info=error)


def _moment(session: Session) -> tuple[SessionId, int]:
    return session.session_id, session.n_sent


def _slot_in(stats: Stats | None, slot_id: SlotId) -> SlotStats | None:
    return next((slot for slot in stats.slots if slot.id == slot_id), None) if stats is not None else None


def _holds(n_tokens: int, told: int | None) -> bool:
    """The last token decoded may not be in the cache yet. None: the turn did not say."""
    return told is None or -2 <= n_tokens - told <= 1
