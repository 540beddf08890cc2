"""Which pools the engine holds now, and how one gets there: once, however many ask at the same time.

Rules it keeps:
    1. One flight per pool: everybody who needs it waits for the same materialization.
    2. A flight goes on while anybody waits for it; the last one who leaves calls it off, unless it was ordered.
    3. A lost answer is not a failed materialization: the engine goes on, so its tag is looked for.
    4. Residency is only what the engine said, within one epoch. A new epoch drops it all at once.
    5. One prefill is with the engine at a time: it has one service slot, and what waits there cannot be called back.
    6. Every sequence that the engine holds belongs to a pool of the tree or to an operation under way; others are
       freed.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    InvariantError,
    PolyKVError,
    PoolNotFound,
    PrefixMismatch,
    SequenceGone,
    UpstreamError,
    UpstreamRestarted,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from polykv_proxy.ids import PoolId, SeqId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens, hash_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, Materialized, PoolList

log = logging.getLogger("polykv.residency")

LOOK_AGAIN_S = 0.2


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


class Residency:
    """The only one who asks the engine for sequences or gives them back."""

    def __init__(self, tree: PoolTree, engine: EngineClient, watch: EngineWatch):
        self._tree, self._engine, self._watch = tree, engine, watch
        self._flights: dict[PoolId, _Flight] = {}
        self._tags: set[str] = set()
        self._numbers = itertools.count(1)
        self._giving: set[SeqId] = set()
        self._reconciling = asyncio.Lock()
        # The engine prefills one pool at a time. Here the others wait where they can be seen and cancelled.
        self._service = asyncio.Lock()
        self._n_changes = 0
        self.unsure = True
        """The engine may hold sequences nobody owns, or have lost some of ours."""

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

    def _landed(self, pool: Pool, task: "asyncio.Task[Held]") -> None:
        self._flights.pop(pool.pool_id, None)
        if not task.cancelled():
            task.exception()  # whoever waited has it; with nobody left it is nobody's
        if pool.pool_id in self._tree and pool.residency == "materializing":
            self._tree.set_residency(pool.pool_id, "cold")

    async def _bring(self, pool: Pool) -> Held:
        self._tree.set_residency(pool.pool_id, "materializing")
        cold = [above for above in self._tree.ancestors(pool.pool_id) if self.held(above) is None]
        if self.n_free() > len(cold):
            # Parents first, so that every token is prefilled by its owner and shared from there.
            for above in reversed(cold):
                await self.ensure(above)
        if pool.pool_id not in self._tree:
            raise PoolNotFound(f"pool {pool.label} was released while it was being brought back")
        parent = self._tree.find(pool.parent) if not pool.is_root else None
        made, _ = await self.materialize(self._tree.tokens(pool.pool_id), parent, pool.branch_pos, pool.pool_id)
        return await self.adopt(pool, made)

    def source(self, parent: Pool | None, branch_pos: int) -> SeqId | None:
        """A sequence to share [0, D) from: the parent's, or anybody's that holds the same tokens."""
        if parent is None or branch_pos == 0 or parent.pool_id not in self._tree:
            return None
        holder = self._tree.holder(parent.pool_id, branch_pos)
        return holder.seq_id if holder is not None else None

    def n_free(self) -> int:
        n_max = self._watch.stats.max_pools if self._watch.stats is not None else 0
        return n_max - sum(1 for pool in self._tree if pool.seq_id is not None) - len(self._tags)

    async def adopt(self, pool: Pool, made: Materialized) -> Held:
        """Record that a sequence now holds a pool of the tree. If the pool is gone meanwhile, it is given back."""
        if pool.pool_id not in self._tree:
            await self.give_back(SeqId(made.seq))
            raise PoolNotFound(f"pool {pool.label} was released while it was being brought back")
        if pool.residency == "resident":
            raise InvariantError(f"pool {pool.pool_id} became resident twice")
        self._tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(made.seq), gen=made.gen)
        self._n_changes += 1
        if self._watch.epoch is None:
            raise InvariantError("a sequence without an epoch")
        return Held(SeqId(made.seq), made.gen, self._watch.epoch)

    # The engine's operations ---------------------------------------------------------------------------------------

    async def materialize(
        self, tokens: Tokens, parent: Pool | None, branch_pos: int, pool_id: PoolId
    ) -> tuple[Materialized, bool]:
        """Have the engine prefill a pool. Gives it, and whether it shares its parent's [0, branch_pos).

        The caller must adopt the sequence or give it back in the same step. When nobody holds the parent's range, all
        of [0, L) is prefilled.

        Raises:  as ``ensure``
        """
        tag = f"pool-{pool_id}.{next(self._numbers)}"
        self._tags.add(tag)
        try:
            for _ in range(3):
                async with self._service:
                    source = self.source(parent, branch_pos)
                    try:
                        return await self._materialize(tokens, source, branch_pos, tag), source is not None
                    except (SequenceGone, PrefixMismatch):
                        # The parent's cells went away, or another pool lives there, between the look and the order.
                        self.unsure = True
                await self._watch.refresh()
                await self.reconcile()
            raise UpstreamRestarted("the engine lost the parent's cells again and again")
        except BaseException:
            self.unsure = True
            raise
        finally:
            self._tags.discard(tag)
            self._n_changes += 1

    async def _materialize(self, tokens: Tokens, source: SeqId | None, branch_pos: int, tag: str) -> Materialized:
        """One order, followed to its end; believed only when the hash of what the engine holds is right."""
        epoch = self._watch.epoch
        try:
            made = await self._engine.materialize(
                tokens,
                tag=tag,
                parent_seq=-1 if source is None else source,
                branch_pos=0 if source is None else branch_pos,
            )
        except (UpstreamUnavailable, UpstreamTimeout) as e:
            made = await self._look_for(tag, e)
        if self._watch.sleeping:
            await self._watch.refresh()  # it is awake now, to a new epoch
        if made.epoch not in (None, self._watch.epoch) or epoch != self._watch.epoch:
            await self._watch.refresh()
            made = await self._look_for(tag, UpstreamRestarted("the engine was restarted meanwhile"))
        if int(made.tokens_hash, 16) != hash_tokens(tokens) or made.n_tokens != len(tokens):
            await self.give_back(SeqId(made.seq))
            raise UpstreamError("the engine holds other tokens than were ordered")
        return made

    async def snapshot(self, id_slot: int, what: str) -> Materialized:
        """Share all cells of a slot, and get their tokens. Adopt it or give it back in the same step.

        Raises:  SessionNotResident, SeqIdsExhausted, SharingUnsupported
        """
        tag = f"{what}-snapshot.{next(self._numbers)}"
        self._tags.add(tag)
        try:
            made = await self._engine.snapshot(id_slot, tag=tag, want_tokens=True)
        except BaseException:
            self.unsure = True
            raise
        finally:
            self._tags.discard(tag)
            self._n_changes += 1
        if made.epoch not in (None, self._watch.epoch):
            await self._watch.refresh()
        return made

    async def _look_for(self, tag: str, lost: PolyKVError) -> Materialized:
        """The answer got lost: the engine may still be at it. Follow its tag until it is ready or gone."""
        while True:
            listed = await self._engine.list_pools()
            if listed.epoch != self._watch.epoch:
                await self._watch.refresh()
                continue
            found = next((p for p in listed.pools if p.tag == tag and p.state != "free"), None)
            if found is None:
                raise lost
            if found.state == "ready" and found.tokens_hash:
                return Materialized(
                    seq=found.seq,
                    gen=found.gen,
                    epoch=listed.epoch,
                    n_tokens=found.n_tokens,
                    tokens_hash=found.tokens_hash,
                    parent_seq=found.parent_seq,
                    branch_pos=found.branch_pos,
                )
            await asyncio.sleep(LOOK_AGAIN_S)

    async def give_back(self, seq_id: SeqId) -> int | None:
        """Free a sequence. Gives the cells in use afterwards; None when the engine could not be asked (done later)."""
        self.claim([seq_id])
        return await self._free(seq_id)

    def claim(self, seq_ids: Iterable[SeqId]) -> None:
        """These will be given back by the caller, in this very step or right after: nobody else may free them.

        A sequence is freed by number, so freeing it twice could hit the next pool that lives in it.
        """
        self._giving.update(seq_ids)
        self._n_changes += 1

    async def give_back_claimed(self, seq_ids: Iterable[SeqId]) -> int | None:
        """Free what was claimed. Gives the cells in use after the last one."""
        used = None
        for seq_id in seq_ids:
            used = await self._free(seq_id)
        return used

    async def _free(self, seq_id: SeqId) -> int | None:
        try:
            freed = await self._engine.free(seq_id)
        except SequenceGone:
            return None
        except PolyKVError as e:
            self.unsure = True
            log.warning("sequence %d stays for now: %s", seq_id, e.message)
            return None
        finally:
            self._giving.discard(seq_id)
            self._n_changes += 1
        return freed.cells.used if freed.cells is not None else None

    # Keeping the books true ----------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """A new epoch: nothing that we knew of the engine's cache is true any more."""
        for pool in list(self._tree):
            if pool.residency == "resident":
                self._tree.set_residency(pool.pool_id, "cold")
        self._n_changes += 1
        self.unsure = True

    async def reconcile(self) -> None:
        """Compare with what the engine lists: pools it lost go cold, sequences nobody owns are freed.

        A listing during which anything changed proves nothing; then the next heartbeat tries again.
        """
        async with self._reconciling:
            listed = await self._list_undisturbed()
            if listed is None:
                return
            self.unsure = any(p.state == "busy" and p.tag not in self._tags for p in listed.pools)
            ready = {p.seq: p.gen for p in listed.pools if p.state == "ready"}
            owned: set[int] = set()
            for pool in list(self._tree):
                if pool.seq_id is None:
                    continue
                if ready.get(pool.seq_id) == pool.gen:
                    owned.add(pool.seq_id)
                else:
                    log.warning("the engine lost pool %s", pool.label)
                    self._tree.set_residency(pool.pool_id, "cold")
            strays = [
                SeqId(p.seq)
                for p in listed.pools
                if p.state == "ready" and p.seq not in owned and p.tag not in self._tags and p.seq not in self._giving
            ]
            self.claim(strays)
            if strays:
                log.info("freeing sequences nobody owns: %s", strays)
            await self.give_back_claimed(strays)

    async def _list_undisturbed(self) -> PoolList | None:
        for _ in range(5):
            before = self._n_changes
            listed = await self._engine.list_pools()
            if listed.sleeping:
                return None
            if listed.epoch != self._watch.epoch:
                await self._watch.refresh()
            elif self._n_changes == before:
                return listed
        return None

    async def settle(self) -> None:
        """Called by the heartbeat."""
        if self.unsure:
            await self.reconcile()

    async def stop(self) -> None:
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
