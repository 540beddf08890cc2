"""Pools come back into the cache from their saved states, without a prefill.

A load does not wait for the service slot: it takes milliseconds, a prefill may take minutes. Both take a sequence and
cells, so they may refuse each other; the engine decides, and a load that finds none after room was made is a miss.
Any failure is a miss: then the pool is prefilled as if there were no tier.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from polykv_proxy.control.holdings import n_in_batch
from polykv_proxy.control.making import MIN_MORE_TOKENS
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved import SavedStates
from polykv_proxy.control.warmth import PoolWarmth, content_of
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    KvExhausted,
    PolyKVError,
    RequestError,
    SavedGone,
    SavingRefused,
    SavingUnsupported,
    SeqIdsExhausted,
    UpstreamError,
    UpstreamRestarted,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from polykv_proxy.ids import SeqId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, Materialized, SavedState

log = logging.getLogger("polykv.residency")


class PoolLoader(PoolWarmth, ABC):
    """Gives a sequence or None: then the pool must be prefilled."""

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
        self.empty_idle_slots: Callable[[int], Awaitable[None]] = _nothing_to_empty
        """A load clears no idle slots for its cells, as a prefill does: whoever knows them does."""
        self._cuts_nothing: str | None = None
        """The start of the engine that refused to load a part of a state."""

    @abstractmethod
    async def ensure(self, pool: Pool) -> Any:
        """Wait until the pool's prefix is in the cache."""

    @abstractmethod
    def doubt_cells(self) -> None:
        """Which cells a sequence or a slot holds is to be asked."""

    async def load(self, pool: Pool) -> Materialized | None:
        """Bring a pool back from what is saved of it; None = it must be prefilled.

        The caller must adopt the sequence in the same step.
        """
        for _ in range(2):
            epoch = self._watch.epoch
            try:
                await self._know_saved()
                made = await self._load_any(pool)
                if made is None and self.unsure:
                    await self._watch.refresh()
            except PolyKVError as e:
                log.info("pool %s is not loaded: %s", pool.label, e.message)  # the prefill will say what is wrong
                return None
            if made is not None or self._watch.epoch == epoch:
                return made  # else it was a state of the engine's last start: files are still there
        return None

    async def _load_any(self, pool: Pool) -> Materialized | None:
        stats = self._watch.stats
        if stats is not None and stats.n_ctx_slot is not None and pool.prefix_len >= stats.n_ctx_slot:
            return None  # of an engine with a larger context: this one loads it as little as it prefills it
        for state in self.saved.of_content(*content_of(pool)):
            if not await self._has_parent(pool, state) or self._tree.find(pool.pool_id) is not pool:
                continue
            source, n_shared = self._behind(pool, state)
            made = await self._load(pool, state, source, n_shared)
            if made is None and n_shared > state.start and not self._may_cut():
                made = await self._load(pool, state, *self._behind(pool, state))
            if made is not None:
                return made
        return None

    def _behind(self, pool: Pool, state: SavedState) -> tuple[Pool | None, int]:
        """Whom to load it behind, and how many tokens it shares then.

        What is in front of the saved range, or more if anybody holds more: that would else be in the cache twice.
        """
        if self._may_cut():
            source, n_shared = self.source_of(pool)
            if source is not None and n_shared >= state.start + MIN_MORE_TOKENS:
                return source, n_shared
        return self._tree.holder(pool.pool_id, state.start) if state.start else None, state.start

    def _may_cut(self) -> bool:
        """Whether the engine can load the end of a state behind somebody who holds its beginning."""
        stats = self._watch.stats
        if stats is None or stats.recurrent or self._cuts_nothing == self._watch.epoch:
            return False
        return stats.swa is None or stats.swa.n_swa == 0

    async def _know_saved(self) -> None:
        if self._watch.sleeping:
            # What is saved outlives the sleep, and is only told by an engine that is awake.
            await self._engine.render("/completion", {"prompt": [0]})
        await self._watch.refresh()  # the engine may have been started anew since the last heartbeat
        await self.saved.look()

    async def _has_parent(self, pool: Pool, state: SavedState) -> bool:
        """Have somebody in the cache who holds what is in front of the saved range, if that is worth it."""
        if self._tree.find(pool.pool_id) is not pool:
            return False
        if state.start == 0 or self._tree.holder(pool.pool_id, state.start) is not None:
            return True
        parent = self._tree.find(pool.parent)
        if parent is None or pool.branch_pos < state.start or self._n_sequences < 2:
            return False
        if not self.saved.of_content(*content_of(parent)) and self._n_to_prefill(parent) > self._n_to_prefill(pool):
            return False
        try:
            await self.ensure(parent)
        except PolyKVError as e:
            log.info("pool %s cannot be loaded behind its parent: %s", pool.label, e.message)
            return False
        return True

    @property
    def _n_sequences(self) -> int:
        return self._watch.stats.max_pools if self._watch.stats is not None else 0

    def _n_to_prefill(self, pool: Pool) -> int:
        return pool.prefix_len - self.source_of(pool)[1]

    async def _load(self, pool: Pool, state: SavedState, source: Pool | None, n_shared: int) -> Materialized | None:
        tag = state.tag
        if n_shared and source is None:
            return None
        if tag in self._tags:
            return None  # a pool with the same tokens is just being loaded: it will serve this one, too
        self._tags.add(tag)
        try:
            with self._using(source):
                return await self._load_with_room(pool, state, source, n_shared)
        except BaseException:
            self.unsure = True
            raise
        finally:
            self._room.settled()
            self._tags.discard(tag)
            self._n_changes += 1

    async def _load_with_room(
        self, pool: Pool, state: SavedState, source: Pool | None, n_shared: int
    ) -> Materialized | None:
        """Make room and load, a second time when that made some. None: a miss.

        For a moment there must be room for all that is saved, whatever is shared of it then.
        """
        n_cells = pool.prefix_len - state.start
        for is_last in (False, True):
            await self._make_way(n_cells, for_request=True)
            if not is_last and self._n_free_cells() < n_cells:
                await self._empty_idle_slots(n_cells)
            seq_id = source.seq_id if source is not None else None
            if source is not None and seq_id is None:
                return None
            try:
                made = await self._order_load(pool, state, seq_id, n_shared)
            except (KvExhausted, SeqIdsExhausted) as e:
                if not is_last and await self._made_room_to_load(e, n_cells):
                    continue
                log.info("pool %s is prefilled, its saved state finds no room: %s", pool.label, e.message)
                return None
            except (SavingRefused, SavingUnsupported, RequestError, UpstreamError) as e:
                log.info("pool %s is prefilled, its saved state is of no use now: %s", pool.label, e.message)
                if n_shared > state.start and isinstance(e, SavingRefused):
                    self._cuts_nothing = self._watch.epoch
                elif isinstance(e, SavingRefused | SavingUnsupported):
                    await self.saved.forget(state.tag)  # made with other adapters, or for another cache
                # Else its parent is gone, or the engine is: what it holds now must be looked at.
                self.unsure = self.unsure or not isinstance(e, SavedGone)
                return None
            self._room.kept(pool.prefix_len - n_shared)
            self.ledger.book.filled(
                SeqId(made.seq), made.gen, made.n_tokens, pool_id=pool.pool_id, source=seq_id, n_shared=n_shared
            )
            log.info("pool %s: [%d, %d) is back without a prefill", pool.label, n_shared, pool.prefix_len)
            return made
        return None

    async def _made_room_to_load(self, refused: KvExhausted | SeqIdsExhausted, n_cells: int) -> bool:
        made = await self._made_more_room(refused, n_cells, for_request=True)
        if isinstance(refused, SeqIdsExhausted):
            return made
        return await self._empty_idle_slots(n_cells) or made

    async def _empty_idle_slots(self, n_cells: int) -> bool:
        try:
            await self.empty_idle_slots(n_cells)
        except PolyKVError as e:
            log.info("idle slots keep their cells: %s", e.message)
            return False
        return True

    def _n_free_cells(self) -> int:
        """Cells that nothing lies in, by the last stats; a load takes no others."""
        stats = self._watch.stats
        if stats is None or stats.cells is None or not stats.cells.total:
            return 1 << 62
        return stats.cells.free - n_in_batch(stats)

    async def _order_load(self, pool: Pool, state: SavedState, source: SeqId | None, n_shared: int) -> Materialized:
        """One load, believed only when the hash of what the engine holds is right."""
        epoch, period = self._watch.epoch, self._period
        try:
            made = await self.saved.load_pool(state.tag, -1 if source is None else source, n_shared)
        except (UpstreamUnavailable, UpstreamTimeout) as e:
            made = await self._look_for(state.tag, e, besides=self._owned() | self._giving)
        if epoch != self._watch.epoch or made.epoch not in (None, epoch):
            await self._watch.refresh()
            raise UpstreamRestarted("the engine was restarted meanwhile")
        self.require_period(period)
        if (int(made.tokens_hash, 16), made.n_tokens) != content_of(pool):
            await self.give_back(SeqId(made.seq))
            await self.saved.forget(state.tag)
            raise UpstreamError("the engine loaded other tokens than were saved")
        if (made.parent_seq, made.branch_pos) != (-1 if source is None else source, n_shared):
            self.doubt_cells()  # an earlier load of it, of which nobody heard any more
        return made

    def _owned(self) -> set[SeqId]:
        return {pool.seq_id for pool in self._tree.residents() if pool.seq_id is not None}


async def _nothing_to_empty(n_cells: int) -> None:
    """Until somebody knows the slots."""
