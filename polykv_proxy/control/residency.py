"""Which pools the engine holds now, and how one gets there: once, however many ask at the same time.

Rules it keeps:
    1. One flight per pool: everybody who needs it waits for the same materialization.
    2. A flight goes on while anybody waits for it; the last one who leaves calls it off, unless it was ordered.
    3. A lost answer is not a failed materialization: the engine goes on, so its tag is looked for.
    4. Residency is only what the engine said, within one epoch. A new epoch drops it all at once.
    5. Every sequence that the engine holds belongs to a pool of the tree or to an operation under way; others are
       freed.
    6. Before an order, what nobody uses gives cells and a sequence for it (``making``, ``room``, ``retention``);
       nothing that an order under way needs does.
    7. An engine that gets nowhere for a minute is given up: nobody waits for it for ever.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from polykv_proxy.control.loading import PoolLoader
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved import SavedStates
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import InvariantError, PoolNotFound, RequestError, SharingUnsupported
from polykv_proxy.ids import PoolId, SeqId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import CellMap, EngineClient, Materialized, PoolList

log = logging.getLogger("polykv.residency")


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence that holds a pool's whole prefix: the pool's own, or that of somebody who starts with the same."""

    seq_id: SeqId
    gen: int
    epoch: str


@dataclass(slots=True)
class _Flight:
    task: "asyncio.Task[Held]"
    n_waiters: int = 0


class Residency(PoolLoader):
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
        self._outdated: set[tuple[SeqId, int]] = set()
        self.compared = True
        """False before the engine's list was read for the first time, and again after the lease was lost."""
        self._reconciling = asyncio.Lock()
        self._doubts_cells = False

    @property
    def books_true(self) -> bool:
        """Every sequence that the engine holds is on the tree."""
        return not self.unsure and not self._giving

    # Making pools resident -----------------------------------------------------------------------------------------

    async def ensure(self, pool: Pool) -> Held:
        """Wait until the pool's prefix is in the cache.

        Raises:  SeqIdsExhausted, KvExhausted, SharingUnsupported, UpstreamError and its heirs
        """
        held = self.held(pool)
        if held is not None:
            return held
        flight = self._flights.get(pool.pool_id)
        if flight is None:
            flight = _Flight(asyncio.create_task(self._bring(pool), name=f"polykv-bring-{pool.pool_id}"))
            self._flights[pool.pool_id] = flight
            flight.task.add_done_callback(lambda task: self._landed(pool, task))
        flight.n_waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.n_waiters -= 1
            if not flight.n_waiters and not flight.task.done():
                flight.task.cancel()

    def held(self, pool: Pool) -> Held | None:
        """A sequence that holds the pool's prefix now, without asking anybody."""
        epoch = self._watch.epoch
        if epoch is None or pool.pool_id not in self._tree:
            return None
        holder = self._tree.holder(pool.pool_id)
        if holder is None or holder.seq_id is None or holder.gen is None:
            return None
        return Held(holder.seq_id, holder.gen, epoch)

    def is_outdated(self, seq_id: SeqId | None, gen: int | None) -> bool:
        """Whether this sequence was found to be made with other adapters than those in force."""
        return (seq_id, gen) in self._outdated

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
            made = await self._prefill_again(pool)
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
        self.ledger.book.claim(SeqId(made.seq), pool.pool_id)
        self._n_changes += 1
        if self._watch.epoch is None:
            raise InvariantError("a sequence without an epoch")
        return Held(SeqId(made.seq), made.gen, self._watch.epoch)

    # Keeping the books true ----------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """A new epoch: nothing that we knew of the engine's cache is true any more."""
        self._forget_sequences()
        self.ledger.clear()
        self.saved.lost()
        self.why_not_saved.clear()
        self._unwritable.clear()

    def _forget_sequences(self) -> None:
        for pool in list(self._tree):
            if pool.residency == "resident":
                self._tree.set_residency(pool.pool_id, self.residency_without(pool))
        self._giving.clear()
        self._outdated.clear()
        self._n_changes += 1
        self.unsure, self.compared = True, True

    def lease_lost(self) -> None:
        """Another proxy may do with the sequences what it likes: none of them is ours until the engine was asked."""
        self._forget_sequences()
        self._period += 1
        self.compared = False

    def found_engine(self) -> None:
        """An engine that this proxy sees for the first time may hold pools of an earlier run of it."""
        self.drop_all()
        self.compared = False

    def _adopt_listed(self, listed: PoolList) -> None:
        """Pools whose tokens a sequence holds that nobody owns, whoever had it made. Told by hash and length."""
        owned = {pool.seq_id for pool in self._tree.residents()}
        taken = owned | self._giving
        strays = [p for p in listed.pools if p.state == "ready" and p.lora_current and p.tokens_hash]
        strays = [p for p in strays if p.tag not in self._tags and p.seq not in taken]
        if not strays:
            return
        wanted = {(int(p.tokens_hash or "0", 16), p.n_tokens) for p in strays}
        cold: dict[tuple[int, int], list[Pool]] = {}
        for pool in self._tree:
            key = (pool.tokens_hash, pool.prefix_len)
            if key in wanted and pool.residency in ("cold", "warm"):
                cold.setdefault(key, []).append(pool)
        for stray in strays:
            pools = cold.get((int(stray.tokens_hash or "0", 16), stray.n_tokens))
            if pools:
                pool = pools.pop(0)
                log.info("pool %s is in sequence %d already", pool.label, stray.seq)
                self._tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(stray.seq), gen=stray.gen)

    async def reconcile(self) -> None:
        """Compare with what the engine lists: pools it lost go cold, sequences nobody owns are freed.

        A listing during which anything changed proves nothing; then the next heartbeat tries again.
        """
        async with self._reconciling:
            since = self.saved.mark()
            looked = await self._list_undisturbed()
            if looked is None:
                return
            if not self._is_ours():
                return
            listed, cells = looked
            self.saved.found(listed.saved, since)
            self._adopt_listed(listed)
            if cells is not None:
                self.ledger.found(cells)
            self._doubts_cells = False
            self.compared = True
            self.unsure = any(p.state == "busy" and p.tag not in self._tags for p in listed.pools)
            ready = {p.seq: p.gen for p in listed.pools if p.state == "ready" and p.lora_current}
            self._outdated |= {(SeqId(p.seq), p.gen) for p in listed.pools if not p.lora_current}
            owned: set[int] = set()
            outdated: list[Pool] = []
            for pool in list(self._tree):
                if pool.seq_id is None:
                    continue
                if ready.get(pool.seq_id) == pool.gen:
                    owned.add(pool.seq_id)
                else:
                    if self.is_outdated(pool.seq_id, pool.gen):
                        log.warning("the adapters changed, pool %s must be made anew", pool.label)
                        outdated.append(pool)
                    else:
                        log.warning("the engine lost pool %s", pool.label)
                    self._tree.set_residency(pool.pool_id, self.residency_without(pool))
            strays = [
                SeqId(p.seq)
                for p in listed.pools
                if p.state == "ready" and p.seq not in owned and p.tag not in self._tags and p.seq not in self._giving
            ]
            self.claim(strays)
            if strays:
                log.info("freeing sequences nobody owns: %s", strays)
            await self.give_back_claimed(strays)
            for pool in outdated:  # what is saved was made with the same adapters
                await self.forget_saved(pool)

    def doubt_cells(self) -> None:
        """A slot may hold something else than the books say: the engine's word for it got lost."""
        self._doubts_cells = self.unsure = True

    async def _list_undisturbed(self) -> tuple[PoolList, CellMap | None] | None:
        """The engine's list; with the first look at an engine, or in doubt, also where its sequences lie."""
        for _ in range(5):
            before = self._n_changes
            listed = await self._engine.list_pools()
            if listed.sleeping:
                return None
            cells = await self.cells() if self._doubts_cells or not self.compared else None
            if listed.epoch != self._watch.epoch:
                await self._watch.refresh()
            elif self._n_changes == before:
                return listed, cells
        return None

    async def cells(self) -> CellMap | None:
        """Which cells each sequence holds. None when the engine cannot tell."""
        try:
            return await self._engine.cells()
        except (SharingUnsupported, RequestError) as e:
            log.info("the engine does not tell which cells are shared: %s", e.message)
            return None

    async def settle(self) -> None:
        """Called by the heartbeat."""
        if self.unsure:
            await self.reconcile()

    async def stop(self) -> None:
        tasks = [*(flight.task for flight in self._flights.values()), *self._evictions]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
