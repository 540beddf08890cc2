"""The engine's sequences for pools: room for an order, the order, and giving sequences back.

One prefill is with the engine at a time: it has one service slot, and what waits there cannot be called back. Room is
made when the turn has come, cells and a sequence, and made again if the engine refuses: nobody overtakes.

When all sequences are taken, one comes from whoever is just giving it back, from nobody's, from the pool that is worth
least, and for a pool that comes back at last from whom it was to share with: it then holds those cells alone.

Whoever gets a sequence adopts it or gives it back in the same step. The ledger is told what each one shares.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from polykv_proxy.control.ledger import Ledger
from polykv_proxy.control.room import Room
from polykv_proxy.control.sequences import EngineSequences
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    ContextLengthExceeded,
    InvariantError,
    KvExhausted,
    PrefixMismatch,
    SeqIdsExhausted,
    SequenceGone,
    SessionNotResident,
    UpstreamRestarted,
)
from polykv_proxy.ids import PoolId, SeqId, SlotId
from polykv_proxy.tree.pool import Pool, Residency
from polykv_proxy.tree.prefix import Tokens, lcp_tokens, make_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, Materialized

log = logging.getLogger("polykv.residency")

MIN_MORE_TOKENS = 16
"""Fewer tokens beyond the parent's range are not worth looking for somebody who holds them."""


MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """A sequence that no pool has, for as long as another one is made of it."""

    seq_id: SeqId | None


class PoolMaker(EngineSequences, ABC):
    """Knows the tree, and changes in it only that what was evicted has no sequence any more."""

    def __init__(
        self, tree: PoolTree, engine: EngineClient, watch: EngineWatch, room: Room, is_ours: Callable[[], bool]
    ):
        super().__init__(engine, watch, is_ours)
        self._tree, self._room = tree, room
        self.ledger = Ledger(tree, watch)
        self._needed: Counter[PoolId] = Counter()
        self._evictions: set[asyncio.Task[int | None]] = set()
        self._n_evicted = 0
        # Orders wait here, where they can be seen and cancelled.
        self._service = asyncio.Lock()
        self.n_orders = 0
        """Prefills of pools that are under way or wait for the one that is."""

    @abstractmethod
    async def reconcile(self) -> bool:
        """Compare with what the engine lists. Gives whether sequences that nobody owns were freed."""

    @abstractmethod
    def residency_without(self, pool: Pool) -> Residency:
        """What a pool is as long as it has no sequence: cold, or warm."""

    @abstractmethod
    def can_save(self, pool: Pool) -> bool:
        """Its state could be copied aside, and is not yet."""

    @abstractmethod
    async def save(self, pool: Pool) -> bool:
        """Copy its state aside before it leaves. Gives whether it is saved."""

    # Orders --------------------------------------------------------------------------------------------------------

    async def materialize(
        self, tokens: Tokens, parent: Pool | None, branch_pos: int, pool_id: PoolId
    ) -> tuple[Materialized, bool]:
        """Have the engine prefill a pool. Gives it, and whether it shares its parent's [0, branch_pos).

        The caller must adopt the sequence or give it back in the same step. When nobody holds the parent's range, all
        of [0, L) is prefilled. A pool that is on the tree shares more than that range if anybody holds it, and may take
        the place of pools that only sessions between two turns use: those come back as it does. It also takes that of a
        pool above it rather than none.

        Raises:  ContextLengthExceeded (400), and as ``ensure``
        """
        stats = self._watch.stats
        if stats is not None and stats.n_ctx_slot is not None and len(tokens) >= stats.n_ctx_slot:
            raise ContextLengthExceeded(  # before anybody is evicted for it
                n_prompt_tokens=len(tokens), n_ctx=stats.n_ctx_slot, n_ctx_train=stats.model.n_ctx_train
            )
        tag = f"pool-{pool_id}.{next(self._numbers)}"
        self._tags.add(tag)
        self.n_orders += 1
        try:
            # A pool of the tree may do without its parent, and take its sequence.
            with self._using(parent if pool_id not in self._tree else None):
                for _ in range(MAX_TRIES):
                    async with self._service:
                        made, is_shared = await self._order_in_turn(tokens, parent, branch_pos, tag, pool_id)
                    if made is not None:
                        return made, is_shared
                    await self._watch.refresh()
                    await self.reconcile()
            raise UpstreamRestarted("the engine lost the parent's cells again and again")
        except BaseException:
            self.unsure = True
            raise
        finally:
            self._room.settled()
            self._tags.discard(tag)
            self.n_orders -= 1
            self._n_changes += 1

    async def materialize_from_slot(self, id_slot: SlotId, tokens: Tokens, pool_id: PoolId) -> Materialized:
        """Have the engine prefill a pool behind a slot that begins so, for a memory that cannot be cut where it ends.

        The slot's whole state is shared meanwhile, and with it those that the engine kept on the way there. It goes on
        from the last one before the pool's end, so only what comes after that is prefilled: all, if there is none.

        The caller must adopt the sequence or give it back in the same step.

        Raises:  SessionNotResident, PrefixMismatch (409) when the slot begins otherwise, and as ``materialize``
        """
        tag = f"pool-{pool_id}.{next(self._numbers)}"
        self._tags.add(tag)
        self.n_orders += 1
        try:
            async with self._service:
                whole = await self.snapshot(id_slot, "beginning")
                borrowed = _Borrowed(SeqId(whole.seq))
                self.claim([SeqId(whole.seq)])
                made = None
                try:
                    n_equal = lcp_tokens(make_tokens(list(whole.tokens or ())), tokens)
                    if n_equal < len(tokens):
                        raise PrefixMismatch(f"slot {id_slot} holds other tokens", divergence_pos=n_equal)
                    # The last token is left to the engine, which computes one at least.
                    made = await self._order_with_room(
                        tokens, borrowed, len(tokens) - 1, tag, pool_id, n_cells=len(tokens)
                    )
                finally:
                    returned = self._return_later([SeqId(whole.seq)])
                    if made is None:
                        await asyncio.wait([returned])  # whoever tries another way has that sequence for it
            if made is None:
                raise SessionNotResident(f"the engine lost what slot {id_slot} held")
            return made
        except BaseException:
            self.unsure = True
            raise
        finally:
            self._room.settled()
            self._tags.discard(tag)
            self.n_orders -= 1
            self._n_changes += 1

    async def _order_in_turn(
        self, tokens: Tokens, parent: Pool | None, branch_pos: int, tag: str, pool_id: PoolId
    ) -> tuple[Materialized | None, bool]:
        """Order behind whoever serves best. Gives what ``_order_with_room`` gives, and whether anything is shared."""
        n_more_tries = MAX_TRIES
        while True:
            known = self._tree.find(pool_id)
            planned = (self.source(parent, branch_pos), branch_pos)
            source, n_shared = self.source_of(known) if known is not None else planned
            try:
                with self._using(source):
                    return await self._order_with_room(tokens, source, n_shared, tag, pool_id), source is not None
            except SeqIdsExhausted:
                n_more_tries -= 1
                if known is None or not n_more_tries or not await self._give_up_sharing(known):
                    raise

    async def _order_with_room(
        self,
        tokens: Tokens,
        source: Pool | _Borrowed | None,
        n_shared: int,
        tag: str,
        pool_id: PoolId,
        *,
        n_cells: int | None = None,
    ) -> Materialized | None:
        """Make room and order, again while that helps. None: the cells to share were not there any more.

        ``n_cells``: to make room for, when it is not certain that ``n_shared`` can be shared.
        """
        if n_cells is None:
            n_cells = len(tokens) - (n_shared if source is not None else 0)
        comes_back = pool_id in self._tree
        for n_more_tries in reversed(range(MAX_TRIES)):
            await self._make_way(n_cells, for_request=comes_back)
            seq_id = source.seq_id if source is not None else None
            if source is not None and seq_id is None:
                return None
            try:
                made = await self.prefill(tokens, seq_id, n_shared, tag)
            except (KvExhausted, SeqIdsExhausted) as e:
                if await self._made_more_room(e, n_cells, for_request=comes_back) and n_more_tries:
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

    async def snapshot(self, id_slot: int, what: str, *, n_tokens: int | None = None) -> Materialized:
        """Share a slot's cells: all, and get their tokens, or the first ``n_tokens``. Adopt it or give it back in the
        same step.

        Raises:  SessionNotResident, SeqIdsExhausted, SharingUnsupported
        """
        tag, period = f"{what}-snapshot.{next(self._numbers)}", self._period
        self._tags.add(tag)
        try:
            n_evicted = self._n_evicted
            await self._make_sequence()
            if self._n_evicted > n_evicted:
                await self._watch.refresh()  # another turn may have begun in the slot meanwhile
            self.ledger.sync()
            n_shared = -1 if n_tokens is None else n_tokens
            try:
                made = await self._engine.snapshot(id_slot, tag=tag, n_tokens=n_shared, want_tokens=n_tokens is None)
            except SeqIdsExhausted as e:
                if not await self._made_more_room(e, 0):
                    raise
                await self._watch.refresh()
                self.ledger.sync()
                made = await self._engine.snapshot(id_slot, tag=tag, n_tokens=n_shared, want_tokens=n_tokens is None)
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

    def source(self, parent: Pool | None, branch_pos: int) -> Pool | None:
        """Whose sequence to share [0, D) from: the parent's, or anybody's that holds the same tokens."""
        if parent is None or branch_pos == 0 or parent.pool_id not in self._tree:
            return None
        return self._tree.holder(parent.pool_id, branch_pos)

    def source_of(self, pool: Pool) -> tuple[Pool | None, int]:
        """Whose sequence a pool that is not resident is best shared from, and how many of its tokens.

        Its parent's range, or more if anybody holds more: a child may hold most of it.
        """
        parent = self._tree.find(pool.parent)
        source = self.source(parent, pool.branch_pos)
        best = (source, pool.branch_pos if source is not None else 0)
        low, high = best[1] + MIN_MORE_TOKENS, pool.prefix_len - 1
        while low <= high:
            middle = (low + high + 1) // 2
            holder = self._tree.holder(pool.pool_id, middle)
            if holder is None:
                high = middle - 1
            else:
                best, low = (holder, middle), middle + 1
        return best

    def n_free(self) -> int:
        n_max = self._watch.stats.max_pools if self._watch.stats is not None else 0
        return n_max - len(self._tree.residents()) - len(self._tags)

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

    @contextlib.contextmanager
    def _using(self, pool: Pool | None) -> Iterator[None]:
        with self.using(pool) if pool is not None else contextlib.nullcontext():
            yield

    # Room for them -------------------------------------------------------------------------------------------------

    async def _make_way(self, n_cells: int, *, for_request: bool) -> None:
        """Free a sequence and cells for an order. A request waits for one state to be saved for it, not for more."""
        has_saved = await self._make_sequence(for_request=for_request)
        if not self._room.fits(n_cells):
            max_saves = int(not has_saved) if for_request else None
            await self._room.make(n_cells, for_request=for_request, max_saves=max_saves)
        self._room.promise(n_cells)

    async def _make_sequence(self, *, for_request: bool = False) -> bool:
        """Free a sequence for an order if all are taken. Whether there is one, the engine says.

        Gives whether a state was saved for it.
        """
        stats = self._watch.stats
        if stats is None or self._watch.sleeping or len(self._tree.residents()) < stats.max_pools:
            return False
        await self._watch.refresh()  # who shares what with whom, before it is not said any more
        return await self._give_sequence(for_request=for_request)

    async def _give_sequence(self, *, for_request: bool) -> bool:
        """Gives whether a state was saved for it."""
        _, has_saved = await self._take_sequence(partial(self._room.free_sequence_of, for_request=for_request))
        return has_saved

    async def _give_up_sharing(self, pool: Pool) -> bool:
        """For a pool that comes back, the one whose cells it was to share gives its sequence, or another one above it:
        it will hold these cells alone then. Gives whether one did.
        """

        def choose() -> Pool | None:
            return self._room.free_sequence_of(for_request=True) or self._room.free_sequence_above(pool)

        taken, _ = await self._take_sequence(choose)
        return taken is not None

    async def _take_sequence(self, choose: Callable[[], Pool | None]) -> tuple[Pool | None, bool]:
        """Have a pool give its sequence, saved first. Gives which one, and whether a state was saved for it."""
        pool = choose()
        has_saved = pool is not None and self.can_save(pool)
        if pool is not None and has_saved:
            await self.save(pool)
            pool = choose()  # somebody may use it by now
        if pool is None:
            return None, has_saved
        log.info("pool %s gives its sequence", pool.label)
        await self.evict(pool)
        heir = self._tree.holder(pool.pool_id) if pool.pool_id in self._tree else None
        if heir is not None:
            heir.used_s = max(heir.used_s, pool.last_use_s)  # it is kept for both of them now
        return pool, has_saved

    async def _made_more_room(
        self, refused: KvExhausted | SeqIdsExhausted, n_cells: int, *, for_request: bool = False
    ) -> bool:
        """The engine refused an order. Gives whether it may try again: something was evicted, or given back anyway."""
        before = self._n_evicted
        if isinstance(refused, SeqIdsExhausted):
            if await self.one_is_freed() or (self.unsure and await self.reconcile()):
                return True
            await self._give_sequence(for_request=for_request)
            if self._n_evicted == before:
                refused.message = (
                    "every sequence of the engine holds a pool that is pinned or in use: try again later, unpin or "
                    "release one, or start the engine with a larger --polykv-max-pools"
                )
        else:
            await self._room.make(n_cells, for_request=for_request)
            missing = refused.extra.get("cells_missing")
            if missing is not None:
                # What could go, and would not be enough, is still there.
                missing = refused.extra["cells_missing"] = max(
                    1, missing - self._room.n_evictable(idle_too=for_request)
                )
                refused.message = (
                    f"the KV cache is full: this pool needs {n_cells} cells, {missing} are missing beside what is "
                    "pinned or in use: try again later, unpin or release a pool, or start the engine with a larger -c"
                )
        return self._n_evicted > before

    async def evict(self, pool: Pool) -> None:
        """Give a pool's sequence back; the pool stays, and is warm if it was saved. Also when the caller leaves."""
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
            self._tree.set_residency(pool.pool_id, self.residency_without(pool))
        return await asyncio.shield(self._return_later(seq_ids))

    def _return_later(self, seq_ids: Sequence[SeqId]) -> "asyncio.Task[int | None]":
        """Free what was claimed, also when the caller leaves."""
        task = asyncio.create_task(self.give_back_claimed(seq_ids), name="polykv-evict")
        self._evictions.add(task)
        task.add_done_callback(self._evictions.discard)
        return task

    async def _free(self, seq_id: SeqId) -> int | None:
        if seq_id in self._giving:
            self.ledger.book.freed(seq_id)
        return await super()._free(seq_id)
