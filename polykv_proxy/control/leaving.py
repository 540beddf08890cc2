"""Pools that nobody uses leave the cache, what lies high in it moves down, and where there is a disk all are written to
it. One of these per heartbeat, only at rest.

Every decode scans up to the highest used cell, so idle pools cost everybody's speed. After ``after_s`` without use they
are saved and freed: never a pinned one, never one in use, and never one whose cells somebody else holds too. That would
free nothing, and loading it later would have them twice; so leaves go first, and sessions before their pool.

Time takes nothing away: what cannot be saved stays until its cells are needed.
"""

import asyncio
import logging
from collections.abc import Callable

from polykv_proxy.control.endings import say_how_it_ended
from polykv_proxy.control.residency import Residency
from polykv_proxy.control.retention import Retention
from polykv_proxy.control.room import Room
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.ids import SeqId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import SlotBook
from polykv_proxy.tree.placement import is_sparse, plan_move
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree

log = logging.getLogger("polykv.pools")

_ended = say_how_it_ended(log, "nothing was done about idle pools", "a bug in what is done about idle pools")

LOOK_AGAIN_S = 10.0
"""Where everything lies is asked for so often while somebody lies high and nobody could be moved."""


class IdlePools:
    """``after_s``: 0 = time sends nobody away. ``may_change``: the engine is ours, and the tree that of its model."""

    def __init__(
        self,
        *,
        tree: PoolTree,
        watch: EngineWatch,
        residency: Residency,
        room: Room,
        retention: Retention,
        sessions: SessionBook,
        slots: SlotBook,
        may_change: Callable[[], bool],
        clock: Callable[[], float],
        after_s: float,
    ):
        self._tree, self._watch, self._residency, self._room = tree, watch, residency, room
        self._retention, self._sessions, self._slots = retention, sessions, slots
        self._may_change, self._clock, self._after_s = may_change, clock, after_s
        self._task: asyncio.Task[None] | None = None
        self._looked_at: tuple[str, int] | None = None
        self._looked_s = float("-inf")
        self.look_again_s = LOOK_AGAIN_S
        self.n_left = 0
        self.n_moved = 0

    def tend(self) -> None:
        """Called by the heartbeat, which does not wait: an engine in a long batch answers late, and the lease runs."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._tend(), name="polykv-idle-pools")
            self._task.add_done_callback(_ended)

    def leaves_at_s(self, pool: Pool) -> float:
        """When a pool leaves the cache if nobody uses it from now on."""
        return (
            pool.last_use_s + self._after_s if self._after_s > 0 and self._residency.saved.available else float("inf")
        )

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _tend(self) -> None:
        await self._residency.saved.tend()
        if self._residency.has_strangers and self._residency.saved.known:
            await self._residency.forget_strangers()
        if not self._residency.saved.available or not self._is_at_rest():
            return
        pool = self._longest_idle()
        if pool is not None:
            await self._send_away(pool)
        elif (unwritten := self._unwritten()) is not None:
            await self._write(unwritten)
        elif self._after_s > 0:
            await self._move_down()

    def _is_at_rest(self) -> bool:
        """No order is under way, and nobody stands in line."""
        stats = self._watch.stats
        if stats is None or not self._may_change() or self._watch.sleeping:
            return False
        busy = stats.service.state != "idle" or self._room.has_line or self._slots.n_waiting > 0
        return self._residency.at_rest and self._residency.books_true and not busy

    # Away ----------------------------------------------------------------------------------------------------------

    def _longest_idle(self) -> Pool | None:
        """Whose time has come, the longest unused first, then the deepest."""
        if self._after_s <= 0:
            return None
        until_s = self._clock() - self._after_s
        idle = [pool for pool in self._unused() if pool.last_use_s <= until_s and self._can_leave(pool)]
        return min(idle, key=lambda pool: (pool.last_use_s, -pool.depth, -pool.pool_id), default=None)

    def _unused(self) -> list[Pool]:
        staying = self._retention.pinned() | self._room.in_use()
        return [pool for pool in self._tree.residents() if pool.pool_id not in staying]

    def _can_leave(self, pool: Pool) -> bool:
        return (self._residency.can_save(pool) or self._residency.residency_without(pool) == "warm") and (
            not self._residency.ledger.is_shared(pool, self._residency.start_of(pool), self._slots_of_sessions())
        )

    def _slots_of_sessions(self) -> set[SlotId]:
        """Slots at work, and those that belong to a session which may go on. What others hold is nobody's."""
        stats = self._watch.stats
        busy = {SlotId(slot.id) for slot in stats.slots if not slot.idle} if stats is not None else set()
        return busy | {s.slot_id for s in self._sessions if s.slot_id is not None and not s.closed}

    async def _send_away(self, pool: Pool) -> None:
        if not await self._residency.save(pool, durable=True):
            return
        until_s = self._clock() - self._after_s
        if self._is_at_rest() and pool in self._unused() and pool.last_use_s <= until_s and self._can_leave(pool):
            log.info("pool %s leaves the cache: %s", pool.label, self._how_long_unused(pool))
            self.n_left += 1
            await self._residency.evict(pool)

    def _how_long_unused(self, pool: Pool) -> str:
        """Whoever used a pool below it used it, too."""
        now_s = self._clock()
        below = [other for other in self._tree.subtree(pool.pool_id) if other is not pool]
        last = max(below, key=lambda other: other.last_use_s, default=pool)
        if last.last_use_s <= pool.last_use_s:
            return f"unused for {now_s - pool.last_use_s:.0f} s"
        return (
            f"unused by itself for {now_s - pool.last_use_s:.0f} s, and below it, by pool {last.label}, for "
            f"{now_s - last.last_use_s:.0f} s"
        )

    # On disk -------------------------------------------------------------------------------------------------------

    def _unwritten(self) -> Pool | None:
        """A pool that a restart of the engine would cost a prefill: pinned ones first, then the last used."""
        return max(
            (pool for pool in self._tree.residents() if not self._residency.is_written(pool)),
            key=lambda pool: (pool.pin, not pool.auto, pool.last_use_s, -pool.depth),
            default=None,
        )

    async def _write(self, pool: Pool | None) -> None:
        while pool is not None and self._is_at_rest():
            await self._residency.write(pool)
            written, pool = pool, self._unwritten()
            if pool is written:
                return  # it failed, and is tried again with the next heartbeat

    # Down ----------------------------------------------------------------------------------------------------------

    async def _move_down(self) -> None:
        """Save, free and load the unused pool that lowers the highest used cell most. A pinned one stays resident."""
        stats = self._watch.stats
        if stats is None or stats.cells is None or stats.cells.hi is None:
            return
        if not is_sparse(stats.cells.used, stats.cells.hi):
            return
        seen = (stats.epoch, stats.cells.hi)
        if seen == self._looked_at and self._clock() - self._looked_s < self.look_again_s:
            return
        pool = await self._highest()
        if pool is None:
            self._looked_at, self._looked_s = seen, self._clock()
            return
        if not await self._residency.save(pool) or not self._is_at_rest() or not self._may_move(pool):
            return
        log.info("pool %s moves down: %d cells are used, up to cell %d", pool.label, stats.cells.used, stats.cells.hi)
        self.n_moved += 1
        await self._residency.evict(pool)
        await self._residency.ensure(pool)

    async def _highest(self) -> Pool | None:
        cells = await self._residency.cells()
        if cells is None or not self._is_at_rest():
            return None
        of_seq = {pool.seq_id: pool for pool in self._tree.residents()}
        pools = ((of_seq.get(SeqId(told.seq)), told) for told in cells.pools)
        lies = [(pool if pool is not None and pool.gen == told.gen else None, told.runs) for pool, told in pools]
        movable = {
            pool: (runs, self._residency.start_of(pool))
            for pool, runs in lies
            if pool is not None and self._may_move(pool)
        }
        others = [runs for pool, runs in lies if pool not in movable] + [told.runs for told in cells.slots]
        move = plan_move(movable, others)
        return move.who if move is not None else None

    def _may_move(self, pool: Pool) -> bool:
        """Nobody uses it, and it can be had back. Its state begins where its parent's range in the cache ends."""
        if pool.seq_id is None or pool.pool_id in self._room.in_use():
            return False
        parent = self._tree.find(pool.parent)
        if self._residency.start_of(pool) and (parent is None or parent.seq_id is None):
            return False
        return self._residency.can_return(pool)
