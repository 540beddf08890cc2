"""What slots hold, in and out of the engine's memory: saving it, loading it, emptying slots, and cells for all that.

Rules it keeps:
    1. A slot is held by whoever works on it: the request that it was granted to, or a reservation.
    2. Saved is what the book of slots says is the session's own, when the slot holds as many tokens as the session's
       last turn said.
    3. One at a time of each session: who comes back while it is being saved waits for that.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from polykv_proxy.control.endings import say_how_it_ended
from polykv_proxy.control.holdings import n_in_batch
from polykv_proxy.control.ledger import Ledger
from polykv_proxy.control.prefixes import Prefixes
from polykv_proxy.control.saved import SavedStates
from polykv_proxy.control.saved_books import session_tag
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    KvExhausted,
    PolyKVError,
    SavingRefused,
    SequenceGone,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from polykv_proxy.ids import PoolId, SeqId, SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import Grant, SlotBook
from polykv_proxy.turns import Session
from polykv_proxy.upstream import EngineClient, LoadedSlot, SavedState, SlotStats, Stats

log = logging.getLogger("polykv.parking")

_ended = say_how_it_ended(log, "sessions stay as they are", "a bug in parking; the request goes on without it")

Done = TypeVar("Done")

MIN_OWN_TOKENS = 32
"""Fewer are prefilled again as fast as two calls of the engine take."""


MAX_BEHIND = 10_000


class SlotStates:
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
        prefixes: Prefixes,
        may_change: Callable[[], bool],
        deliver: Callable[[list[Grant]], None],
        clock: Callable[[], float],
    ):
        self._engine, self._saved, self._watch, self._ledger = engine, saved, watch, ledger
        self._prefixes = prefixes
        self._sessions, self._slots, self._may_change = sessions, slots, may_change
        self._deliver, self._clock = deliver, clock
        self._locks: WeakValueDictionary[SessionId, asyncio.Lock] = WeakValueDictionary()
        self._working: set[asyncio.Task[Any]] = set()
        self._behind: dict[str, int | None] = {}
        """Hash of the tokens that a saved state begins behind, by its tag; None or missing: not known."""
        self._given_up: dict[SlotId, tuple[SessionId, int]] = {}
        self.doubt_cells: Callable[[], None] = lambda: None
        """Told when it is not known what a slot holds."""

    @property
    def on(self) -> bool:
        """States can be saved, and the engine is ours to change."""
        return self._saved.available and self._may_change()

    async def stop(self) -> None:
        working = list(self._working)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)

    # Cells ---------------------------------------------------------------------------------------------------------

    def _n_free(self) -> int:
        """Free cells by the last stats, less those that the batch under way and turns that ended later took."""
        stats = self._watch.stats
        if stats is None or stats.cells is None:
            return 0
        n_free = stats.cells.free - n_in_batch(stats)
        for slot_id, session in self._resting():
            if session is None or session.held_n_tokens is None or session.held_s <= self._watch.asked_s:
                continue
            slot = slot_in(stats, slot_id)
            n_free -= max(0, session.held_n_tokens - (slot.n_tokens if slot is not None else 0))
        return n_free

    async def make_room(self, n_cells: int) -> None:
        """Empty slots that rest until so many cells are free, for a pool that is to be loaded: that clears none.

        First those of sessions that will hardly go on: the engine would clear them for a prefill, too.
        """
        if not self.on:
            return
        await self._watch.refresh()
        for slot_id, session in self._resting():
            if self._n_free() >= n_cells:
                return
            leaves = session is not None and not session.may_return and self._holds_something(slot_id)
            if session is not None and leaves and await self._park(slot_id, None):
                self._sessions.displaced(session.session_id)
                await self._watch.refresh()
        await self._make_room(n_cells, None, n_saves=1)

    async def _make_room(self, n_cells: int, slot_id: SlotId | None, *, n_saves: int) -> None:
        """Empty slots that rest until so many cells are free: the engine would do it, with any slot, unsaved.

        First ``slot_id``, whose content nobody needs; then those that nobody owns, or that are saved; then sessions,
        longest unused first. At most ``n_saves`` of them, and one that cannot be saved is left to the engine.
        """
        await self._watch.refresh()
        n_free = self._n_free()
        if n_free < n_cells and slot_id is not None and self._holds_something(slot_id):
            n_free += await self._empty(slot_id) or 0
        for other_id, session in sorted(self._resting(), key=lambda one: self._is_unsaved(one[1])):
            if n_free >= n_cells:
                break
            if not self._holds_something(other_id):
                continue
            unsaved = self._is_unsaved(session)
            if (session is not None and not session.may_return) or (unsaved and n_saves <= 0):
                continue
            n_saves -= unsaved
            n_free += await self._park(other_id, session) or 0

    def _holds_something(self, slot_id: SlotId) -> bool:
        """By the last stats. What is empty gives no cells."""
        slot = slot_in(self._watch.stats, slot_id)
        return slot is None or slot.n_tokens > 0

    def _resting(self) -> list[tuple[SlotId, Session | None]]:
        """Free slots and whose they are, the longest unused first."""
        resting = self._slots.resting()
        return [(slot_id, self._sessions.get(owner) if owner is not None else None) for slot_id, owner in resting]

    def _is_unsaved(self, session: Session | None) -> bool:
        """What its slot holds is kept nowhere else."""
        if session is None:
            return False
        return session.saved_at != session.n_sent or self._saved.find(session_tag(session.session_id)) is None

    # One slot ------------------------------------------------------------------------------------------------------

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
                self._given_up[slot_id] = moment_of(session)
            elif session is not None and session.slot_id == slot_id:
                self._sessions.displaced(session.session_id)
        finally:
            self._deliver(self._slots.unreserve(slot_id, self._clock(), emptied=n_freed is not None))
        return n_freed

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
        moment = moment_of(session)
        stats = await self._watch.refresh()
        slot = slot_in(stats, slot_id)
        if slot is None or not slot.idle or not _holds(slot.n_tokens, session.held_n_tokens):
            return False
        self._ledger.sync()
        start = slot.n_pool_shared
        n_cells = slot.n_tokens - start
        if n_cells < MIN_OWN_TOKENS:
            return True  # not worth keeping, nor worth the cells that it and its pool would stay in for it
        behind = self._prefixes.hash_in(SeqId(slot.pool_seq), start)
        state = await self._saved.save(id_slot=slot_id, start=start, tag=tag, n_cells=n_cells, soon=True)
        if state.n_tokens != slot.n_tokens or self._sessions.get(session.session_id) is not session:
            await self._saved.forget(tag)
            self._sessions.set_saved(session, None)
            return False
        self._sessions.set_saved(session, moment[1])
        self._remember(tag, behind)
        log.debug("session %s is saved: [%d, %d)", session.session_id, state.start, state.n_tokens)
        return True

    async def _fill(self, slot_id: SlotId, state: SavedState, pool_id: PoolId | None) -> LoadedSlot:
        """Load a state into a slot, if it does not begin at 0 behind whoever holds the beginning of that pool.

        The caller has just refreshed the stats; what the engine would refuse by these is not asked for.

        Raises:  as ``SavedStates.load_slot``
        """
        stats = self._watch.stats
        slot = slot_in(stats, slot_id)
        if slot is not None and not slot.idle:
            raise SavingRefused(f"slot {slot_id} is busy")
        parent = SeqId(-1)
        if state.start > 0:
            held = self._prefixes.sequence_with(pool_id, state.start) if self._fits_behind(state, pool_id) else None
            if held is None:
                raise SequenceGone(
                    f"no pool is there that holds the {state.start} tokens which its state begins behind"
                )
            parent = held
        n_cells = state.n_tokens - state.start
        if stats is not None and stats.cells is not None and stats.cells.total and n_cells > stats.cells.free:
            raise KvExhausted("a saved state finds no cells", cells_missing=n_cells - stats.cells.free)
        return await self._load(slot_id, state, parent)

    def _remember(self, tag: str, behind: int | None) -> None:
        if len(self._behind) > MAX_BEHIND:
            self._behind = {known: at for known, at in self._behind.items() if self._saved.find(known) is not None}
        self._behind[tag] = behind

    def _fits_behind(self, state: SavedState, pool_id: PoolId | None) -> bool:
        """False when it is known that the state begins behind other tokens than this pool's."""
        behind = self._behind.get(state.tag)
        found = self._prefixes.hash_of(pool_id, state.start)
        return behind is None or found is None or behind == found

    async def _load(self, slot_id: SlotId, state: SavedState, parent: SeqId) -> LoadedSlot:
        self._ledger.sync()
        try:
            loaded = await self._saved.load_slot(state.tag, slot_id, parent, state.start)
        except (UpstreamUnavailable, UpstreamTimeout, asyncio.CancelledError):
            self.doubt_cells()
            raise
        source = parent if state.start > 0 else None
        self._ledger.book.refilled(slot_id, loaded.n_tokens, source=source, n_shared=loaded.branch_pos)
        return loaded

    async def _move(self, slot_id: SlotId) -> bool:
        """Save what a slot holds, load it into the same slot, and forget what was saved. It is not lost on the way.

        Nobody's state is forgotten for it.

        Raises:  UpstreamError and its heirs
        """
        if not self._slots.reserve(slot_id):
            return False
        tag = f"slot-{slot_id}"
        try:
            stats = await self._watch.refresh()
            slot = slot_in(stats, slot_id)
            if stats is None or slot is None or not slot.idle:
                return False
            n_cells, place = slot.n_tokens - slot.n_pool_shared, self._saved.writable()[:1]
            n_bytes = round(n_cells * (stats.kv_bytes_per_token or 0))
            if not n_cells or not place or not self._saved.has_room(place[0], n_bytes):
                return False
            parent = SeqId(slot.pool_seq) if slot.n_pool_shared > 0 else SeqId(-1)
            state = await self._saved.save(id_slot=slot_id, start=slot.n_pool_shared, tag=tag, only=place[0])
            try:
                await self._watch.refresh()
                await self._load(slot_id, state, parent)
            finally:
                await self._saved.forget(tag)
            return True
        finally:
            self._deliver(self._slots.unreserve(slot_id, self._clock(), emptied=False))

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
        task.add_done_callback(self._working.discard)
        task.add_done_callback(_ended)
        return task


def moment_of(session: Session) -> tuple[SessionId, int]:
    return session.session_id, session.n_sent


def slot_in(stats: Stats | None, slot_id: SlotId) -> SlotStats | None:
    return next((slot for slot in stats.slots if slot.id == slot_id), None) if stats is not None else None


def _holds(n_tokens: int, told: int | None) -> bool:
    """The last token decoded may not be in the cache yet. None: the turn did not say."""
    return told is None or -2 <= n_tokens - told <= 1
