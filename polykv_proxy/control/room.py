"""Cells of the unified cache: does it fit, who leaves, and who waits for whom.

A request is counted before it goes out, because an engine without room stops somebody. The order of the contract:

    1. It fits by the last stats and by what was let in since: nothing is asked. A roomy cache costs no call.
    2. Fresh stats say that it fits.
    3. What nobody uses is evicted, if that is enough (``tree.eviction`` says in which order).
    4. Wait, first come first served, while running requests may still give cells back.
    5. ``KvExhaustedForRequest``.

How many cells can be had is never known exactly, only from below, in two ways; the better one counts:

    what is free, and what idle slots hold alone (the engine purges them by itself);
    everything but what the resident pools and the busy slots hold.

Where the books are right both are the same (``holdings``), as long as nobody prefills. The first is less when an idle
slot is not in them as it is, and by what the batch under way may take; the second when a busy slot is not.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from polykv_proxy.control.forecast import (
    FIRST_CELLS,
    GROWTH_CELLS,
    Known,
    growth,
    n_free_or_idle,
    n_growing,
    n_of_started,
    running_slots,
    still_to_come,
)
from polykv_proxy.control.holdings import Holdings
from polykv_proxy.control.ledger import Ledger
from polykv_proxy.control.promises import Promises, this_task
from polykv_proxy.control.retention import Retention
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import KvExhaustedForRequest, PolyKVError
from polykv_proxy.ids import PoolId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import SlotBook
from polykv_proxy.tree.eviction import held_cells, with_ancestors, with_holders
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import Stats

log = logging.getLogger("polykv.room")

MAX_WAIT_S = 30.0
"""Clients of chat APIs give up after a minute or more; half of that is left for the answer itself."""

LOOK_AGAIN_S = 0.25
"""While somebody waits: requests that the proxy does not count (relayed unread) give cells back without a word."""

Idle = Literal["open", "live", "named", "none"]
"""Whose pools count as used between two turns: of all open sessions, of live ones, of live ones that a client named, of
nobody."""


class Sequences(Protocol):
    """Who holds the engine's sequences for the pools. ``books_true``: all that the engine holds are on the tree."""

    ledger: Ledger

    @property
    def books_true(self) -> bool: ...

    def working_on(self) -> set[PoolId]:
        """Pools that an order under way needs."""

    def named(self) -> set[PoolId]:
        """Pools whose own sequence an order under way may name to the engine."""

    async def evict(self, pool: Pool) -> None:
        """Give its sequence back; the pool stays, warm if it was saved, else cold."""

    def can_save(self, pool: Pool) -> bool:
        """Its state could be copied aside, and is not yet."""

    async def save(self, pool: Pool) -> bool:
        """Copy its state aside before it leaves. Gives whether it is saved."""


class Room(Promises):
    """``sequences`` and ``retention`` are set by who has them."""

    sequences: Sequences
    retention: Retention

    def __init__(
        self,
        *,
        tree: PoolTree,
        sessions: SessionBook,
        slots: SlotBook,
        watch: EngineWatch,
        clock: Callable[[], float],
    ):
        super().__init__(sessions, slots, watch)
        self._tree, self._clock = tree, clock
        self._kept: list[tuple[float, int]] = []
        self._making = asyncio.Lock()
        self._line = asyncio.Lock()
        self._n_in_line = 0
        self._known: Known | None = None
        self._dismissed: PolyKVError | None = None
        self.max_wait_s = MAX_WAIT_S

    def kept(self, n_cells: int) -> None:
        """A pool was made and keeps these cells, whether or not the last stats show it yet."""
        self._kept = [(at_s, n) for at_s, n in self._kept if at_s >= self._watch.asked_s]
        self._kept.append((time.monotonic(), n_cells))

    # Asking --------------------------------------------------------------------------------------------------------

    @property
    def n_total(self) -> int | None:
        """Cells of a cache that all slots share; None when there is nothing to count, or nobody to ask."""
        stats = self._watch.stats
        if stats is None or stats.cells is None or not stats.kv_unified:
            return None
        if self._watch.state != "ready" or self._watch.sleeping:
            return None
        return stats.cells.total or None  # a recurrent model has states instead of cells

    def fits(self, n_cells: int) -> bool:
        """Whether it fits by what is known, with a margin for what is not: no means that it must be looked at."""
        stats = self._watch.stats
        if self.n_total is None or stats is None:
            return True
        if self._known is None or self._known.stats is not stats:
            self._known = Known.read(stats, n_free_or_idle(stats, self._holdings(stats)))
        known = self._known
        n_spare = known.n_spare
        for at_s, n_kept in self._kept:
            if at_s >= self._watch.asked_s:
                n_spare -= n_kept
        # Mostly there is room even if all that was ever promised is still to come; else each is looked at.
        if n_spare - self._n_promised - GROWTH_CELLS * self._n_counted < n_cells:
            for task, promise in self._live():
                if promise.counted and not self._arrived(task, promise, known.running):
                    n_spare -= promise.n_cells + GROWTH_CELLS
        return n_spare >= n_cells

    async def fits_now(self, n_cells: int) -> bool:
        """Whether it fits by fresh stats, without evicting anything. The caller promises in the same step.

        Raises:  UpstreamError and its heirs
        """
        stats = await self._watch.refresh() if self.n_total is not None else None
        if stats is None or self.n_total is None:
            return True
        return self._n_room(stats) - n_growing(stats) >= n_cells

    @property
    def has_line(self) -> bool:
        """Somebody waits for cells, and nobody overtakes."""
        return self._n_in_line > 0

    async def make(
        self, n_cells: int, n_more: int = 0, *, for_request: bool = False, max_saves: int | None = None
    ) -> bool:
        """Make room, evicting what nobody uses. Gives whether ``n_cells`` fit now; ``n_more`` would be nice.

        ``for_request``: if nothing else is left, also what only sessions between two turns use.
        ``max_saves``: how many states are copied aside for it. None: one if a request waits for it, else all.

        The caller promises in the same step.

        Raises:  UpstreamError and its heirs
        """
        n_saves = (1 if for_request else 1 << 30) if max_saves is None else max_saves
        async with self._making:
            stats = await self._watch.refresh() if self.n_total is not None else None
            tried: set[PoolId] = set()
            while stats is not None and self.n_total is not None:
                n_room = self._n_room(stats)
                idle_too = for_request and n_room < n_cells
                victim = self._victim(idle_too=idle_too) if n_room < n_cells + n_more else None
                if victim is None or (n_room < n_cells and n_room + self.n_evictable(idle_too=idle_too) < n_cells):
                    return n_room >= n_cells
                if n_saves > 0 and victim.pool_id not in tried and self.sequences.can_save(victim):
                    n_saves -= 1
                    tried.add(victim.pool_id)
                    await self.sequences.save(victim)
                    continue  # somebody may use it by now
                log.info("evicting pool %s: %d cells are needed, %d are there", victim.label, n_cells, n_room)
                await self.sequences.evict(victim)
                stats = await self._watch.refresh()
            return True

    def n_needed(self) -> int | None:
        """Cells that should be free when this request goes out, unless idle slots are to be purged for it: its own, the
        beginning of its answer, and what others will take before the stats show it. None: it was not counted.
        """
        own, stats = self._promises.get(this_task()), self._watch.stats
        if own is None or not own.counted or stats is None or self.n_total is None:
            return None
        return own.n_cells + FIRST_CELLS + self._n_coming(stats)

    async def wait_for(self, options: Callable[[], Sequence[int]], n_first: int = 0, n_more: int = 0) -> int:
        """Wait until one of these numbers of cells fits, and give its place in the list; the first one is preferred.

        ``n_first`` cells besides are waited for while somebody at work may give them; ``n_more`` would be nice.
        The caller promises in the same step.

        Raises:  KvExhaustedForRequest (503), what ``dismiss`` was given, UpstreamError and its heirs
        """
        self.put_off()  # what it was promised before would else be waited for by whoever stands before it in the line
        self._n_in_line += 1
        since_s = self._clock()
        try:
            async with asyncio.timeout(self.max_wait_s), self._line:
                while True:
                    self._changed.clear()
                    if self._dismissed is not None:
                        raise self._dismissed
                    wanted = options()
                    for place, n_cells in enumerate(wanted):
                        if await self.make(n_cells + self._n_spared(n_cells, n_first), n_more, for_request=True):
                            return place
                    if not self._may_come(min(wanted)):
                        raise self._exhausted(min(wanted))
                    await self._change()
        except TimeoutError:
            for place, n_cells in enumerate(options()):
                if await self.make(n_cells, for_request=True):
                    return place  # only what was to be spared never came free
            raise self._exhausted(min(options())) from None
        finally:
            self._n_in_line -= 1
            self.waited(self._clock() - since_s)

    def dismiss(self, error: PolyKVError) -> None:
        """Everybody in line, now and from now on, gets ``error``."""
        self._dismissed = error
        self._changed.set()

    async def relieve(self) -> None:
        """Called by the heartbeat: running requests must not be cut short while pools lie there unused."""
        stats = self._watch.stats
        if stats is None or self.n_total is None:
            return
        n_cells = round(sum(growth(slot) for slot in stats.slots if not slot.idle))
        if n_cells and self._n_room(stats) < n_cells and self._victim() is not None:
            await self.make(0, n_cells)

    def free_sequence_of(self, *, for_request: bool = False) -> Pool | None:
        """Whose sequence may serve somebody who asks for one: a pool that can do without, else the victim for cells."""
        moving = {p.pool_id for _, p in self._live() if p.pool_id is not None} | self.sequences.named()
        return self.retention.spare(moving) or self._victim(idle_too=for_request)

    def free_sequence_above(self, pool: Pool) -> Pool | None:
        """Whose sequence a pool may take that comes back and finds no other: of a pool above it, unless that is pinned,
        or somebody else runs on it. The furthest first: it comes back behind the nearest.
        """
        if pool.pool_id not in self._tree:
            return None
        others = self.running() | self.sequences.named()
        named = {pool_id for pool_id in others if pool_id != pool.pool_id and pool_id in self._tree}
        staying = self.retention.pinned() | with_holders(self._tree, named)
        above = [p for p in self._tree.ancestors(pool.pool_id) if p.seq_id is not None and p.pool_id not in staying]
        return above[-1] if above else None

    def running(self) -> set[PoolId]:
        """Pools of requests under way."""
        # A turn that was not sent yet leaves its session's pool, or was promised it.
        of_turns = {turn.pool_id for turn in self._sessions.running.values() if turn.pool_id is not None}
        return of_turns | {p.pool_id for _, p in self._live() if p.pool_id is not None}

    def in_use(self, idle: Idle = "live") -> set[PoolId]:
        """Pools of requests and orders under way, of sessions besides as far as ``idle`` says, all above them, and who
        holds their cells. Automatic pools are nobody's between two turns.
        """
        used = self.running() | self.sequences.working_on()
        now_s = self._clock()
        for session in self._sessions:
            pool = self._tree.find(session.pool_id) if session.pool_id is not None and not session.closed else None
            if pool is None:
                continue
            counts = not pool.auto and idle != "none" and (session.named or idle != "named")
            live = idle == "open" or self._sessions.is_live(session.session_id, now_s)
            if counts and live:
                used.add(pool.pool_id)
        return with_holders(self._tree, with_ancestors(self._tree, used))

    # Counting ------------------------------------------------------------------------------------------------------

    def _victim(self, *, idle_too: bool = False) -> Pool | None:
        """The pool to give up first. Of those of idle sessions: the ones away for long, the anonymous, the others."""
        levels: tuple[Idle, ...] = ("open", "live", "named", "none") if idle_too else ("open", "live", "named")
        return next((pool for level in levels if (pool := self.retention.victim(self.in_use(level)))), None)

    def n_evictable(self, *, idle_too: bool = False) -> int:
        """Cells that evicting everything that may be evicted would give."""
        stats = self._watch.stats
        staying = self.retention.staying(self.in_use("none" if idle_too else "named"))
        return self._holdings(stats).n_freed(staying) if stats is not None else 0

    def n_available(self) -> int | None:
        """Cells that a new session could have, with what would be evicted for it. None: there is nothing to count."""
        stats = self._watch.stats
        if stats is None or self.n_total is None:
            return None
        return max(0, self._n_room(stats) + self.n_evictable(idle_too=True))

    def _n_room(self, stats: Stats) -> int:
        """Cells that can be had without evicting anything, after all that was promised."""
        if stats.cells is None:
            return 0
        holdings = self._holdings(stats)
        n_room = n_free_or_idle(stats, holdings)
        if self.sequences.books_true:
            n_room = max(n_room, stats.cells.total - holdings.n_held())
        else:  # what the service slot is at may be an order that was given up, and that nobody counts
            n_room -= max(0, stats.service.n_prompt - stats.service.n_tokens)
        return n_room - self._n_coming(stats)

    def _n_coming(self, stats: Stats) -> int:
        """Cells that were promised to others, or that their prompts have yet to take."""
        running = running_slots(stats)
        coming = [(task, p) for task, p in self._live() if not self._arrived(task, p, running)]
        n_cells = sum(p.n_cells for _, p in coming) + sum(still_to_come(slot) for slot in stats.slots)
        if not any(slot.state == "started" for slot in stats.slots):
            return n_cells
        sessions = [self._sessions.get(p.session) for _, p in coming if p.session is not None]
        promised = {turn.slot_id for session in sessions if session is not None for turn in session.turns.values()}
        return n_cells + n_of_started(stats, besides=promised)

    def _holdings(self, stats: Stats) -> Holdings:
        self.sequences.ledger.sync()
        return Holdings(stats, self._tree.residents(), self.sequences.ledger.book)

    def _n_spared(self, n_cells: int, n_first: int) -> int:
        """What this request must leave besides its own cells, as long as waiting can help."""
        stats = self._watch.stats
        n_spared = n_first + (n_growing(stats) if stats is not None else 0)
        return n_spared if self._may_come(n_cells + n_spared) else 0

    def _may_come(self, n_cells: int) -> bool:
        """Whether somebody is at work whose end could make this fit."""
        stats = self._watch.stats
        if stats is None or stats.cells is None:
            return False
        others = any(task is not this_task() for task, _ in self._live())
        if not others and all(slot.idle for slot in stats.slots):
            return False
        stay = self.retention.staying(())
        return stats.cells.total - held_cells(self._tree, stay) >= n_cells

    def _exhausted(self, n_cells: int) -> KvExhaustedForRequest:
        stats = self._watch.stats
        # What could go, and would not be enough, is still there.
        missing = max(1, n_cells - self._n_room(stats) - self.n_evictable()) if stats is not None else None
        return KvExhaustedForRequest(
            f"the KV cache is full: this request needs {n_cells} cells, {missing} are missing beside what is pinned or "
            "in use: try again later, send fewer requests at once, unpin or release a pool, or start the engine with a "
            "larger context (polykvctl up --ctx, llama-server -c)",
            cells_missing=missing,
        )

    async def _change(self) -> None:
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self._changed.wait()
        except TimeoutError:
            return
