"""Which pools the engine holds now, and how one gets there: once, however many ask at the same time.

Rules it keeps:
    1. One flight per pool: everybody who needs it waits for the same materialization.
    2. A flight goes on while anybody waits for it; the last one who leaves calls it off, unless it was ordered.
    3. A lost answer is not a failed materialization: the engine goes on, so its tag is looked for.
    4. Residency is only what the engine said, within one epoch. A new epoch drops it all at once.
    5. One prefill is with the engine at a time: it has one service slot, and what waits there cannot be called back.
    6. Every sequence that the engine holds belongs to a pool of the tree or to an operation under way; others are
       freed.
    7. Before an order, what nobody uses gives cells and a sequence for it (``room``, ``retention``); nothing that an
       order under way needs does.
    8. An engine that gets nowhere for a minute is given up: nobody waits for it for ever.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from polykv_proxy.control.ledger import Ledger
from polykv_proxy.control.room import Room
from polykv_proxy.control.sequences import EngineSequences
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    ContextLengthExceeded,
    InvariantError,
    KvExhausted,
    PoolNotFound,
    PrefixMismatch,
    SeqIdsExhausted,
    SequenceGone,
    UpstreamRestarted,
)
from polykv_proxy.ids import PoolId, SeqId, SlotId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, Materialized, PoolList

log = logging.getLogger("polykv.residency")

MIN_SHARED_TOKENS = 16
"""Less is not worth a look at whose it is."""


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


class Residency(EngineSequences):
    """The only one who asks the engine for sequences or gives them back."""

    def __init__(
        self, tree: PoolTree, engine: EngineClient, watch: EngineWatch, room: Room, is_ours: Callable[[], bool]
    ):
        super().__init__(engine, watch, is_ours)
        self._tree, self._room = tree, room
        self.ledger = Ledger(tree, watch)
        room.sequences = self
        self._flights: dict[PoolId, _Flight] = {}
        self._needed: Counter[PoolId] = Counter()
        self._evictions: set[asyncio.Task[int | None]] = set()
        self._n_evicted = 0
        self._before_loss: dict[PoolId, Held] = {}
        self._outdated: set[tuple[SeqId, int]] = set()
        self.compared = True
        """False after the lease was lost, until the engine's list was read under a new one."""
        self._reconciling = asyncio.Lock()
        # The engine prefills one pool at a time. Here the others wait where they can be seen and cancelled.
        self._service = asyncio.Lock()

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
        end = pool.branch_pos
        for above in self._tree.ancestors(pool.pool_id):
            if end and self._tree.holder(above.pool_id, end) is not None:
                return pool.prefix_len - end
            end = min(end, above.branch_pos)
        return pool.prefix_len

    @contextlib.contextmanager
    def using(self, pool: Pool) -> Iterator[None]:
        """For so long neither this pool nor what it inherits is evicted."""
        self._needed[pool.pool_id] += 1
        try:
            yield
        finally:
            self._needed[pool.pool_id] -= 1
            if not self._needed[pool.pool_id]:
                del self._needed[pool.pool_id]

    def working_on(self) -> set[PoolId]:
        """Pools that orders under way need, and those above them."""
        below = [pool_id for pool_id in {*self._flights, *self._needed} if pool_id in self._tree]
        return {*below, *(above.pool_id for pool_id in below for above in self._tree.ancestors(pool_id))}

    def named(self) -> set[PoolId]:
        """Pools whose own sequence an order under way may name to the engine."""
        return {*self._flights, *self._needed}

    def in_use(self) -> set[PoolId]:
        return self._room.in_use()

    async def evict(self, pool: Pool) -> None:
        """Give a pool's sequence back; the pool stays. Also when the caller leaves meanwhile."""
        await self.evict_all([pool])

    async def evict_all(self, pools: Sequence[Pool]) -> int | None:
        """Give the sequences of these pools back, at once for who looks at the tree.

        Gives the cells in use afterwards; None when the engine could not be asked.
        """
        seq_ids = [pool.seq_id for pool in pools if pool.seq_id is not None]
        if len(seq_ids) < len(pools):
            raise InvariantError("a pool without a sequence to give back")
        self.ledger.sync()
        self._n_evicted += len(seq_ids)
        self.claim(seq_ids)
        for pool in pools:
            self._tree.set_residency(pool.pool_id, "cold")
        task = asyncio.create_task(self.give_back_claimed(seq_ids), name="polykv-evict")
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)
        return await asyncio.shield(task)

    def _landed(self, pool: Pool, task: "asyncio.Task[Held]") -> None:
        self._flights.pop(pool.pool_id, None)
        if not task.cancelled():
            task.exception()  # whoever waited has it; with nobody left it is nobody's
        if pool.pool_id in self._tree and pool.residency == "materializing":
            self._tree.set_residency(pool.pool_id, "cold")

    async def _bring(self, pool: Pool) -> Held:
        self._require(pool)
        self._tree.set_residency(pool.pool_id, "materializing")
        cold = [above for above in self._tree.ancestors(pool.pool_id) if self.held(above) is None]
        if self.n_free() > len(cold):
            # Parents first, so that every token is prefilled by its owner and shared from there.
            for above in reversed(cold):
                await self.ensure(above)
        self._require(pool)
        parent = self._tree.find(pool.parent) if not pool.is_root else None
        tokens = self._tree.tokens(pool.pool_id)
        made, _ = await self.materialize(tokens, parent, pool.branch_pos, pool.pool_id, further=True)
        return await self.adopt(pool, made)

    def _require(self, pool: Pool) -> None:
        if pool.pool_id not in self._tree:
            raise PoolNotFound(f"pool {pool.label} was released meanwhile")

    def source(self, parent: Pool | None, branch_pos: int) -> Pool | None:
        """Whose sequence to share [0, D) from: the parent's, or anybody's that holds the same tokens."""
        if parent is None or branch_pos == 0 or parent.pool_id not in self._tree:
            return None
        return self._tree.holder(parent.pool_id, branch_pos)

    def _longest_held(self, tokens: Tokens) -> tuple[Pool | None, int]:
        """Who holds the most of these tokens but the last, and how many. Nobody for so few that it is not worth it."""
        match = self._tree.match(tokens)
        if match is None:
            return None, 0
        low, high, best = MIN_SHARED_TOKENS, min(match.prefix_n_tokens, len(tokens) - 1), None
        while low <= high:
            middle = (low + high + 1) // 2
            holder = self._tree.holder(match.pool_id, middle)
            if holder is None:
                high = middle - 1
            else:
                best, low = (holder, middle), middle + 1
        return best if best is not None else (None, 0)

    def n_free(self) -> int:
        n_max = self._watch.stats.max_pools if self._watch.stats is not None else 0
        return n_max - len(self._tree.residents()) - len(self._tags)

    async def adopt(self, pool: Pool, made: Materialized) -> Held:
        """Record that a sequence now holds a pool of the tree. If the pool is gone meanwhile, it is given back."""
        if pool.pool_id not in self._tree:
            await self.give_back(SeqId(made.seq))
            raise PoolNotFound(f"pool {pool.label} was released while it was being brought back")
        if pool.residency == "resident":
            raise InvariantError(f"pool {pool.pool_id} became resident twice")
        self._tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(made.seq), gen=made.gen)
        self.ledger.book.claim(SeqId(made.seq), pool.pool_id)
        self._n_changes += 1
        if self._watch.epoch is None:
            raise InvariantError("a sequence without an epoch")
        return Held(SeqId(made.seq), made.gen, self._watch.epoch)

    # The engine's operations ---------------------------------------------------------------------------------------

    async def materialize(
        self, tokens: Tokens, parent: Pool | None, branch_pos: int, pool_id: PoolId, *, further: bool = False
    ) -> tuple[Materialized, bool]:
        """Have the engine prefill a pool. Gives it, and whether it shares its parent's [0, branch_pos).

        The caller must adopt the sequence or give it back in the same step. When nobody holds the parent's range, all
        of [0, L) is prefilled. ``further``: share more than the parent's range if somebody holds it.

        Raises:  ContextLengthExceeded (400), and as ``ensure``
        """
        n_ctx = self._watch.stats.n_ctx_slot if self._watch.stats is not None else None
        if n_ctx is not None and len(tokens) >= n_ctx:
            raise ContextLengthExceeded(n_prompt_tokens=len(tokens), n_ctx=n_ctx)  # before anybody is evicted for it
        tag = f"pool-{pool_id}.{next(self._numbers)}"
        self._tags.add(tag)
        try:
            with self._using(parent):
                for _ in range(3):
                    async with self._service:
                        source, n_shared = self.source(parent, branch_pos), branch_pos
                        if further and (longest := self._longest_held(tokens))[1] > (branch_pos if source else 0):
                            source, n_shared = longest
                        with self._using(source):
                            made = await self._order_with_room(tokens, source, n_shared, tag, pool_id)
                    if made is not None:
                        return made, source is not None
                    await self._watch.refresh()
                    await self.reconcile()
            raise UpstreamRestarted("the engine lost the parent's cells again and again")
        except BaseException:
            self.unsure = True
            raise
        finally:
            self._room.settled()
            self._tags.discard(tag)
            self._n_changes += 1

    async def _order_with_room(
        self, tokens: Tokens, source: Pool | None, n_shared: int, tag: str, pool_id: PoolId
    ) -> Materialized | None:
        """Make room and order, again while that helps. None: the cells to share were not there any more."""
        n_cells = len(tokens) - (n_shared if source is not None else 0)
        for n_more_tries in reversed(range(3)):
            await self._make_sequence()
            await self._make_room(n_cells)
            seq_id = source.seq_id if source is not None else None
            if source is not None and seq_id is None:
                return None
            try:
                made = await self.prefill(tokens, seq_id, n_shared, tag)
            except (KvExhausted, SeqIdsExhausted) as e:
                if await self._made_more_room(e, n_cells) and n_more_tries:
                    continue
                raise
            except (SequenceGone, PrefixMismatch):
                # The parent's cells went away, or another pool lives there, between look and order.
                self.unsure = True
                return None
            self._room.kept(n_cells)
            n_real = made.branch_pos if seq_id is not None else 0
            self.ledger.book.filled(
                SeqId(made.seq), made.gen, made.n_tokens, pool_id=pool_id, source=seq_id, n_shared=n_real
            )
            return made
        return None

    @contextlib.contextmanager
    def _using(self, pool: Pool | None) -> Iterator[None]:
        with self.using(pool) if pool is not None else contextlib.nullcontext():
            yield

    async def _make_sequence(self) -> None:
        """Free a sequence for an order if all are taken. Whether there is one, the engine says."""
        stats = self._watch.stats
        if stats is not None and not self._watch.sleeping and len(self._tree.residents()) >= stats.max_pools:
            await self._watch.refresh()  # who shares what with whom, before it is not said any more
            await self._give_sequence()

    async def _give_sequence(self) -> None:
        pool = self._room.free_sequence_of()
        if pool is None:
            return
        log.info("pool %s gives its sequence", pool.label)
        await self.evict(pool)
        heir = self._tree.holder(pool.pool_id) if pool.pool_id in self._tree else None
        if heir is not None:
            heir.used_s = max(heir.used_s, pool.last_use_s)  # it is kept for both of them now

    async def _make_room(self, n_cells: int) -> None:
        """Evict for an order. Whether it was enough, the engine says."""
        if not self._room.fits(n_cells):
            await self._room.make(n_cells)
        self._room.promise(n_cells)

    async def _made_more_room(self, refused: KvExhausted | SeqIdsExhausted, n_cells: int) -> bool:
        """The engine refused an order. Gives whether something was evicted, so that it may try again."""
        before = self._n_evicted
        if isinstance(refused, SeqIdsExhausted):
            await self._give_sequence()
            if self._n_evicted == before:
                refused.message = (
                    "every sequence of the engine holds a pool that is pinned or in use: try again later, unpin or "
                    "release one, or start the engine with a larger --polykv-max-pools"
                )
        else:
            await self._room.make(n_cells)
            missing = refused.extra.get("cells_missing")
            if missing is not None:
                # What could go, and would not be enough, is still there.
                missing = refused.extra["cells_missing"] = max(1, missing - self._room.n_evictable())
                refused.message = (
                    f"the KV cache is full: this pool needs {n_cells} cells, {missing} are missing beside what is "
                    "pinned or in use: try again later, unpin or release a pool, or start the engine with a larger -c"
                )
        return self._n_evicted > before

    async def snapshot(self, id_slot: int, what: str) -> Materialized:
        """Share all cells of a slot, and get their tokens. Adopt it or give it back in the same step.

        Raises:  SessionNotResident, SeqIdsExhausted, SharingUnsupported
        """
        tag, period = f"{what}-snapshot.{next(self._numbers)}", self._period
        self._tags.add(tag)
        try:
            await self._make_sequence()
            self.ledger.sync()
            try:
                made = await self._engine.snapshot(id_slot, tag=tag, want_tokens=True)
            except SeqIdsExhausted as e:
                if not await self._made_more_room(e, 0):
                    raise
                made = await self._engine.snapshot(id_slot, tag=tag, want_tokens=True)
            self.require_period(period)
        except BaseException:
            self.unsure = True
            raise
        finally:
            self._tags.discard(tag)
            self._n_changes += 1
        self.ledger.book.snapshot(SeqId(made.seq), made.gen, made.n_tokens, SlotId(id_slot))
        self._room.kept(made.n_tokens)
        if made.epoch not in (None, self._watch.epoch):
            await self._watch.refresh()
        return made

    # Keeping the books true ----------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """A new epoch: nothing that we knew of the engine's cache is true any more."""
        self._forget_sequences()
        self.ledger.clear()

    def _forget_sequences(self) -> None:
        for pool in list(self._tree):
            if pool.residency == "resident":
                self._tree.set_residency(pool.pool_id, "cold")
        self._giving.clear()
        self._before_loss.clear()
        self._outdated.clear()
        self._n_changes += 1
        self.unsure, self.compared = True, True

    def lease_lost(self) -> None:
        """Another proxy may do with the sequences what it likes: none of them is ours until the engine was asked."""
        before = dict(self._before_loss)
        for pool in self._tree.residents():
            if pool.seq_id is not None and pool.gen is not None and self._watch.epoch is not None:
                before[pool.pool_id] = Held(pool.seq_id, pool.gen, self._watch.epoch)
        self._forget_sequences()
        self._before_loss = before
        self._period += 1
        self.compared = False

    def _find_again(self, listed: PoolList) -> None:
        """Pools whose sequence is what it was when the lease was lost, by number, generation and tokens."""
        ready = {(p.seq, p.gen): p.tokens_hash for p in listed.pools if p.state == "ready" and p.lora_current}
        for pool_id, held in self._before_loss.items():
            pool = self._tree.find(pool_id)
            tokens_hash = ready.get((held.seq_id, held.gen))
            if pool is None or pool.residency != "cold" or held.epoch != listed.epoch or not tokens_hash:
                continue
            if int(tokens_hash, 16) == pool.tokens_hash:
                self._tree.set_residency(pool_id, "resident", seq_id=held.seq_id, gen=held.gen)
        self._before_loss.clear()

    async def reconcile(self) -> None:
        """Compare with what the engine lists: pools it lost go cold, sequences nobody owns are freed.

        A listing during which anything changed proves nothing; then the next heartbeat tries again.
        """
        async with self._reconciling:
            listed = await self._list_undisturbed()
            if listed is None:
                return
            if not self._is_ours():
                return
            self._find_again(listed)
            self.compared = True
            self.unsure = any(p.state == "busy" and p.tag not in self._tags for p in listed.pools)
            ready = {p.seq: p.gen for p in listed.pools if p.state == "ready" and p.lora_current}
            self._outdated |= {(SeqId(p.seq), p.gen) for p in listed.pools if not p.lora_current}
            owned: set[int] = set()
            for pool in list(self._tree):
                if pool.seq_id is None:
                    continue
                if ready.get(pool.seq_id) == pool.gen:
                    owned.add(pool.seq_id)
                else:
                    if self.is_outdated(pool.seq_id, pool.gen):
                        log.warning("the adapters changed, pool %s must be made anew", pool.label)
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

    async def _free(self, seq_id: SeqId) -> int | None:
        if seq_id in self._giving:
            self.ledger.book.freed(seq_id)
        return await super()._free(seq_id)

    async def stop(self) -> None:
        tasks = [*(flight.task for flight in self._flights.values()), *self._evictions]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
