"""Which pools the engine holds now, and how one gets there: once, however many ask at the same time.

Rules it keeps:
    1. One flight per pool: everybody who needs it waits for the same materialization.
    2. A flight goes on while anybody waits for it; the last one who leaves calls it off, unless it was ordered. So does
       whoever releases its pool, and nobody waits for it any more.
    3. A lost answer is not a failed materialization: the engine goes on, so its tag is looked for.
    4. Residency is only what the engine said, within one epoch (``reconciling``).
    5. Every sequence that the engine holds belongs to a pool of the tree or to an operation under way.
    6. Before an order, what nobody uses gives cells and a sequence for it (``making``, ``room``, ``retention``);
       nothing that an order under way needs does.
    7. An engine that gets nowhere for a minute is given up: nobody waits for it for ever.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polykv_proxy.control.reconciling import PoolReconciler
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved import SavedStates
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import InvariantError, PoolNotFound, SeqIdsExhausted
from polykv_proxy.ids import PoolId, SeqId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, Materialized

log = logging.getLogger("polykv.residency")


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence that holds a pool's whole prefix: the pool's own, or that of somebody who starts with the same."""

    seq_id: SeqId
    gen: int
    epoch: str


@dataclass(slots=True)
class _Flight:
    """``called_off``: nobody waits for it any more, and it is giving back what it took. ``released``: its pool was."""

    task: "asyncio.Task[Held]"
    n_waiters: int = 0
    called_off: bool = False
    released: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def call_off(self) -> None:
        """The engine stops at its next batch, and frees the cells."""
        self.called_off = True
        self.task.cancel()


class Residency(PoolReconciler):
    """The only one who asks the engine for sequences or gives them back."""

    def __init__(
        self,
        tree: PoolTree,
        engine: EngineClient,
        watch: EngineWatch,
        room: Room,
        is_ours: Callable[[], bool],
        *,
        saved: SavedStates,
    ):
        super().__init__(tree, engine, watch, room, is_ours, saved=saved)
        room.sequences = self
        self._flights: dict[PoolId, _Flight] = {}

    # Making pools resident -----------------------------------------------------------------------------------------

    async def ensure(self, pool: Pool) -> Held:
        """Wait until the pool's prefix is in the cache.

        Raises:  PoolNotFound when it is released before, SeqIdsExhausted, KvExhausted, SharingUnsupported,
                 UpstreamError and its heirs
        """
        self._require(pool)
        while (flight := self._flights.get(pool.pool_id)) is not None and flight.called_off:
            await asyncio.wait([flight.task])  # who joined it now would be cancelled with it
            self._require(pool)
        held = self.held(pool)
        if held is not None:
            return held
        if flight is None:
            flight = _Flight(asyncio.create_task(self._bring(pool), name=f"polykv-bring-{pool.pool_id}"))
            self._flights[pool.pool_id] = flight
            flight.task.add_done_callback(lambda task: self._landed(pool, task))
        flight.n_waiters += 1
        try:
            ends: list[asyncio.Future[Any]] = [flight.task, flight.released]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not flight.task.done() or flight.task.cancelled():
                self._require(pool)
            return flight.task.result()
        finally:
            flight.n_waiters -= 1
            if not flight.n_waiters and not flight.task.done():
                flight.call_off()

    def released(self, pools: Sequence[Pool]) -> None:
        super().released(pools)
        for pool in pools:
            flight = self._flights.get(pool.pool_id)
            if flight is not None and not flight.released.done():
                flight.released.set_result(None)
                flight.call_off()

    def held(self, pool: Pool) -> Held | None:
        """A sequence that holds the pool's prefix now, without asking anybody."""
        epoch = self._watch.epoch
        if epoch is None or pool.pool_id not in self._tree:
            return None
        holder = self._tree.holder(pool.pool_id)
        if holder is None or holder.seq_id is None or holder.gen is None:
            return None
        stats = self._watch.stats
        if stats is not None and stats.recurrent and holder.prefix_len > pool.prefix_len:
            return None  # a state has one end, and who goes on from before it goes on from less
        return Held(holder.seq_id, holder.gen, epoch)

    def n_missing(self, pool: Pool) -> int:
        """Cells that it would take to make this pool resident; 0 when that is under way, or the pool was released."""
        if pool.pool_id not in self._tree or pool.residency == "materializing" or self.held(pool) is not None:
            return 0
        return pool.prefix_len - self.source_of(pool)[1]

    def working_on(self) -> set[PoolId]:
        """Pools that orders under way need, and those above them."""
        below = [pool_id for pool_id in {*self._flights, *self._needed} if pool_id in self._tree]
        return {*below, *(above.pool_id for pool_id in below for above in self._tree.ancestors(pool_id))}

    def named(self) -> set[PoolId]:
        """Pools whose own sequence an order under way may name to the engine."""
        return {*self._flights, *self._needed}

    @property
    def at_rest(self) -> bool:
        """Nobody waits for the engine to make a pool resident."""
        return not self._flights and not self._tags

    def in_use(self) -> set[PoolId]:
        return self._room.in_use()

    def _landed(self, pool: Pool, task: "asyncio.Task[Held]") -> None:
        self._flights.pop(pool.pool_id, None)
        if not task.cancelled():
            task.exception()  # whoever waited has it; with nobody left it is nobody's
        if pool.pool_id in self._tree and pool.residency == "materializing":
            self._tree.set_residency(pool.pool_id, self.residency_without(pool))

    async def _bring(self, pool: Pool) -> Held:
        self._require(pool)
        self._tree.set_residency(pool.pool_id, "materializing")
        made = await self.load(pool)
        if made is None:
            self._require(pool)
            try:
                made = await self._prefill_again(pool)
            except SeqIdsExhausted:
                held = self.held(pool)
                if held is None:
                    raise
                return held  # one below it came back meanwhile, in the last sequence
        return await self.adopt(pool, made)

    async def _prefill_again(self, pool: Pool) -> Materialized:
        away = [above for above in self._tree.ancestors(pool.pool_id) if self.held(above) is None]
        if self.n_free() > len(away):
            # Parents first, so that every token is prefilled by its owner and shared from there.
            for above in reversed(away):
                await self.ensure(above)
        elif away and away[0].residency == "warm" and self._n_sequences > 1:
            await self.ensure(away[0])  # a sequence that another pool gives up for it is cheaper than a prefill
        self._require(pool)
        self.missed(pool)
        parent = self._tree.find(pool.parent) if not pool.is_root else None
        made, _ = await self.materialize(self._tree.tokens(pool.pool_id), parent, pool.branch_pos, pool.pool_id)
        return made

    def _require(self, pool: Pool) -> None:
        if self._tree.find(pool.pool_id) is not pool:
            raise PoolNotFound(f"pool {pool.label} was released meanwhile")

    async def adopt(self, pool: Pool, made: Materialized) -> Held:
        """Record that a sequence now holds a pool of the tree. If the pool is gone meanwhile, it is given back."""
        if pool.pool_id not in self._tree:
            await self.give_back(SeqId(made.seq))
            raise PoolNotFound(f"pool {pool.label} was released while it was being brought back")
        if pool.residency == "resident":
            raise InvariantError(f"pool {pool.pool_id} became resident twice")
        self._tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(made.seq), gen=made.gen)
        self.made_anew(pool)
        self.ledger.book.claim(SeqId(made.seq), pool.pool_id, tree=self._tree)
        self._n_changes += 1
        if self._watch.epoch is None:
            raise InvariantError("a sequence without an epoch")
        return Held(SeqId(made.seq), made.gen, self._watch.epoch)

    async def stop(self) -> None:
        tasks = [*(flight.task for flight in self._flights.values()), *self._evictions, *self._saves.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
