"""Conversations without a slot: saved before their slot is given away, and loaded into any free one when they go on.

Rules it keeps:
    1. The engine compares tokens itself at the next turn, so a state that is not what it should be costs time, never an
       answer.
    2. A slot is let go when the engine is done with it, also when the client has left meanwhile.
    3. Any failure is a miss: the request goes out as it would have, and the engine prefills.
    4. What is shared with a pool is not saved. The state is loaded behind that pool, or any that begins the same.

When something is saved: before a request overwrites it; after ``after_s`` without a turn, and then the slot is emptied,
since every decode scans up to the highest cell in use; and before the engine purges it because cells are short. A
request waits for one of these at most, so when cells run low sessions are taken out between the turns.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from polykv_proxy.control.orders import AttachPlan
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved_books import session_tag
from polykv_proxy.control.slot_states import MIN_OWN_TOKENS, SlotStates, moment_of, slot_in
from polykv_proxy.errors import KvExhausted, PolyKVError
from polykv_proxy.ids import PoolId, SeqId, SessionId, SlotId
from polykv_proxy.slots import Displaced
from polykv_proxy.tree.placement import is_sparse, plan_move
from polykv_proxy.turns import Session
from polykv_proxy.upstream import SavedState

log = logging.getLogger("polykv.parking")

LOW_FRACTION = 1 / 8
"""Cells are low when fewer are free than this part of all, and than the largest conversation in a slot has."""

LEAVE_S = 5.0
"""So long sessions are saved when the proxy ends."""

SAVE_WAIT_S = 1.0
"""A request waits no longer for somebody else's state. The engine takes its orders one after the other, so the state is
saved all the same; what takes so long is the disk, when memory is full or the engine cannot write files later."""

LOOK_AGAIN_S = 10.0
"""Where slots lie is asked for so often while one lies high and could not be moved."""


class Parking(SlotStates):
    """``after_s``: 0 = time sends nobody away. ``sequence_of``: makes a pool resident and says where."""

    def __init__(self, *, room: Room, sequence_of: Callable[[PoolId], Awaitable[SeqId]], after_s: float, **slots: Any):
        super().__init__(**slots)
        self._room, self._sequence_of, self._after_s = room, sequence_of, after_s
        self._tending: asyncio.Task[None] | None = None
        self._looked_at: tuple[str, int] | None = None
        self._looked_s = float("-inf")
        self._sessions.on_forgotten = self._forgotten

    async def leave(self) -> None:
        """The proxy ends and the engine may go on: the next proxy does not know whose slots are whose, but ids."""
        try:
            async with asyncio.timeout(LEAVE_S):
                for slot_id, session in self._resting():
                    if session is None or not self._may_park(slot_id, session) or not self._is_unsaved(session):
                        continue
                    if self.on and self._slots.reserve(slot_id):
                        await self._save_alone(session, slot_id)
                await self._saved.finish_writing()
        except TimeoutError:
            log.warning("not all is saved within %.0f s: the rest prefills again if the engine ends, too", LEAVE_S)

    # Requests ------------------------------------------------------------------------------------------------------

    def leaving(self, displaced: Sequence[Displaced]) -> list[Displaced]:
        """These sessions have no slot any more. Gives those whose conversation is still in it, and may go on."""
        left: list[Displaced] = []
        for one in displaced:
            session = self._sessions.get(one.session)
            if session is not None and _was_there(session, one.slot_id):
                left.append(one)
        for one in displaced:  # one session may lose two slots, and its conversation is in one of them
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
        """Raises:  as ``SavedStates.load_slot``"""
        await self._watch.refresh()  # the engine may have been started anew since the request was decided
        await self._saved.look()
        state = self._state_for(session, plan)
        if state is None:
            return
        pool_id = plan.pool_id if plan is not None else None
        if (
            pool_id is not None
            and state.start
            and self._prefixes.is_warm(pool_id)
            and self._fits_behind(state, pool_id)
        ):
            await self._sequence_of(pool_id)
            await self._watch.refresh()
        try:
            try:
                loaded = await self._fill(slot_id, state, pool_id)
            except KvExhausted:
                await self._make_room(state.n_tokens - state.start, slot_id, n_saves=n_saves)
                loaded = await self._fill(slot_id, state, pool_id)
        finally:
            if session.saved and self._saved.find(state.tag) is None:
                self._sessions.set_saved(session, None)
        session.slot_id, session.held_n_tokens, session.held_s = slot_id, loaded.n_tokens, self._clock()
        log.debug("session %s is back in slot %d: %d tokens", session.session_id, slot_id, loaded.n_tokens)

    async def bring_back(self, session: Session) -> None:
        """Load what a session without a slot said into a free one, for who wants to have it besides.

        Without a state, a free slot or its pool it stays as it is.

        Raises:  UpstreamError and its heirs
        """
        async with self._alone(session.session_id):
            state = self._saved.find(session_tag(session.session_id))
            resting = sorted(self._resting(), key=lambda one: self._is_unsaved(one[1]))
            if state is None or not self.on or session.turns or session.slot_id is not None or not resting:
                return
            if state.start and session.pool_id is None:
                return
            if state.start and session.pool_id is not None:
                if not self._fits_behind(state, session.pool_id):
                    return
                await self._sequence_of(session.pool_id)
            slot_id, other = resting[0]
            if not self._slots.reserve(slot_id):
                return
            filled_for = None
            try:
                # The slot may still be down as its own: then there is nobody to be saved first.
                other = other if other is not session else None
                if other is None or not other.may_return or await self._save_alone(other, slot_id):
                    await self._watch.refresh()
                    loaded = await self._fill(slot_id, state, session.pool_id)
                    filled_for = session.session_id
                    if other is not None:
                        self._sessions.displaced(other.session_id)
                    session.slot_id, session.held_n_tokens, session.held_s = slot_id, loaded.n_tokens, self._clock()
            finally:
                self._deliver(self._slots.unreserve(slot_id, self._clock(), filled_for=filled_for))

    def _is_there(self, session: Session, slot_id: SlotId) -> bool:
        """Unless newer stats say that the engine took the cells of the session's own slot, it is."""
        stats, held = self._watch.stats, session.held_n_tokens
        if stats is None or held is None or self._watch.asked_s <= session.held_s:
            return True
        slot = slot_in(stats, slot_id)
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

    # Idle sessions -------------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Called by the heartbeat, and after a turn: sessions leave the cache that were idle for long.

        When cells are low, all that are idle: the next request should find room.
        """
        if self._tending is not None and not self._tending.done():
            return
        if self.on and (self._idle() or self._may_lower()):
            self._tending = self._start(self._tend())

    def _idle(self) -> list[tuple[SlotId, Session]]:
        """Whose time has come, longest unused first."""
        now_s, low = self._clock(), self._is_low()
        return [
            (slot_id, session)
            for slot_id, session in self._resting()
            if session is not None
            and (low or (0 < self._after_s <= now_s - session.last_s))
            and self._may_park(slot_id, session)
            and self._given_up.get(slot_id) != moment_of(session)
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
        if self._may_lower():
            await self._lower()

    # Down ----------------------------------------------------------------------------------------------------------

    def _may_lower(self) -> bool:
        """Somebody lies above a hole, and it was not looked at a short while ago."""
        stats = self._watch.stats
        if self._after_s <= 0 or stats is None or stats.cells is None or stats.cells.hi is None:
            return False
        if not is_sparse(stats.cells.used, stats.cells.hi) or not self._unkept():
            return False
        return self._looked_at != (stats.epoch, stats.cells.hi) or self._clock() - self._looked_s >= LOOK_AGAIN_S

    def _unkept(self) -> list[SlotId]:
        """Slots that rest for long with something that is not parked: most prompts are all there is, and some of their
        clients come back to the slot.
        """
        stats, until_s = self._watch.stats, self._clock() - self._after_s
        filled = {slot.id for slot in stats.slots if slot.idle and slot.n_tokens > 0} if stats is not None else set()
        resting = [slot_id for slot_id, _ in self._slots.resting() if self._slots.used_s(slot_id) <= until_s]
        return [slot_id for slot_id in resting if slot_id in filled]

    async def _lower(self) -> None:
        """Move the slot down that lowers the highest used cell most: what is loaded takes the lowest free cells."""
        stats = await self._watch.refresh()
        if stats is None or stats.cells is None or stats.cells.hi is None:
            return
        self._looked_at, self._looked_s = (stats.epoch, stats.cells.hi), self._clock()
        cells = await self._engine.cells()
        unkept, shared = self._unkept(), {slot.id: slot.n_pool_shared for slot in stats.slots}
        movable = {SlotId(told.id): (told.runs, shared[told.id]) for told in cells.slots if told.id in unkept}
        others = [told.runs for told in cells.slots if told.id not in movable] + [told.runs for told in cells.pools]
        move = plan_move(movable, others)
        if move is not None and await self._move(move.who):
            log.info("slot %d moves down: cells are used up to %d, not %d", move.who, move.hi_after, move.hi)

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


def _was_there(session: Session, slot_id: SlotId) -> bool:
    """Its last turn ran in this slot, and nobody else's since, by the book. And it may go on."""
    return session.slot_id == slot_id and session.may_return and not session.is_sent
