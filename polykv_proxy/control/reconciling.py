"""Keeping the books of sequences true, by what the engine lists.

Residency is only what the engine said, within one epoch: a new one drops it all at once. Every sequence that the engine
holds belongs to a pool of the tree or to an operation under way; others are freed.
"""

import asyncio
import logging
from abc import ABC
from collections.abc import Callable

from polykv_proxy.control.loading import PoolLoader
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved import SavedStates
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import RequestError, SharingUnsupported
from polykv_proxy.ids import SeqId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import CellMap, EngineClient, PoolList

log = logging.getLogger("polykv.residency")

LOOK_AFTER_S = 10.0
"""So long an order whose answer got lost may wait behind a batch, and be carried out after all."""


class PoolReconciler(PoolLoader, ABC):
    """``reconcile`` compares with the engine; the rest says when nothing is certain any more."""

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
        self._outdated: set[tuple[SeqId, int]] = set()
        self.compared = True
        """False before the engine's list was read for the first time, and again after the lease was lost."""
        self._reconciling = asyncio.Lock()
        self._doubts_cells = False

    @property
    def books_true(self) -> bool:
        """Every sequence that the engine holds is on the tree."""
        return not self.unsure and not self._giving

    def is_outdated(self, seq_id: SeqId | None, gen: int | None) -> bool:
        """Whether this sequence was found to be made with other adapters than those in force."""
        return (seq_id, gen) in self._outdated

    def drop_all(self) -> None:
        """A new epoch: nothing that we knew of the engine's cache is true any more."""
        self._forget_sequences()
        self.ledger.clear()
        self.saved.engine_lost(keeps_memory=self._watch.sleeping or self._watch.woke_up)
        self.why_not_saved.clear()
        self._only_here.clear()

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

    def _adopt_listed(self, listed: PoolList) -> bool:
        """Pools whose tokens a sequence holds that nobody owns, whoever had it made. Told by hash and length.

        Gives whether there were any: which cells they share is not in the books.
        """
        owned = {pool.seq_id for pool in self._tree.residents()}
        taken = owned | self._giving
        strays = [p for p in listed.pools if p.state == "ready" and p.lora_current and p.tokens_hash]
        strays = [p for p in strays if p.tag not in self._tags and p.seq not in taken]
        if not strays:
            return False
        wanted = {(int(p.tokens_hash or "0", 16), p.n_tokens) for p in strays}
        cold: dict[tuple[int, int], list[Pool]] = {}
        for pool in self._tree:
            key = (pool.tokens_hash, pool.prefix_len)
            if key in wanted and pool.residency in ("cold", "warm"):
                cold.setdefault(key, []).append(pool)
        adopted = False
        for stray in strays:
            pools = cold.get((int(stray.tokens_hash or "0", 16), stray.n_tokens))
            if pools:
                pool, adopted = pools.pop(0), True
                log.info("pool %s is in sequence %d already", pool.label, stray.seq)
                self._tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(stray.seq), gen=stray.gen)
        return adopted

    async def reconcile(self) -> bool:
        """Compare with what the engine lists: pools it lost go cold, sequences nobody owns are freed.

        A listing during which anything changed proves nothing; then the next heartbeat tries again. Gives whether
        sequences that nobody owns were freed.
        """
        async with self._reconciling:
            looked = await self._list_undisturbed()
            if looked is None or not self._is_ours():
                return False
            listed, cells, since = looked
            self.saved.found(listed.saved, since)
            adopted = self._adopt_listed(listed)
            if cells is not None:
                self.ledger.found(cells)
            self._doubts_cells = False
            self.compared = True
            self.unsure = any(p.state == "busy" and p.tag not in self._tags for p in listed.pools)
            if adopted and cells is None:
                self.doubt_cells()
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
            return bool(strays)

    def doubt_cells(self) -> None:
        """A slot may hold something else than the books say: the engine's word for it got lost."""
        self._doubts_cells = self.unsure = True

    async def _list_undisturbed(self) -> tuple[PoolList, CellMap | None, int] | None:
        """The engine's list; with the first look at an engine, or in doubt, also where its sequences lie.

        And the mark of what was known of saved states when it was asked for.
        """
        for _ in range(5):
            before, since = self._n_changes, self.saved.mark()
            listed = await self._engine.list_pools()
            if listed.sleeping:
                return None
            cells = await self.cells() if self._doubts_cells or not self.compared else None
            if listed.epoch != self._watch.epoch:
                await self._watch.refresh()
            elif self._n_changes == before:
                return listed, cells, since
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
        if self.unsure or asyncio.get_running_loop().time() - self._lost_s < LOOK_AFTER_S:
            await self.reconcile()
