"""What an operator orders about keeping: pin, unpin, evict, flush. Each runs in a task of its own (``core``)."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from polykv_proxy.control.residency import Residency
from polykv_proxy.control.retention import Retention
from polykv_proxy.control.room import Room
from polykv_proxy.control.views import Views, pool_answer
from polykv_proxy.errors import JournalFailed, PoolInUse, WarmUnavailable
from polykv_proxy.ids import PoolId
from polykv_proxy.store import Journal
from polykv_proxy.tree.eviction import with_holders
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree

log = logging.getLogger("polykv.pools")


class Keeping:
    """``require_sharing``: raises unless the engine can hold pools and is ours."""

    def __init__(
        self,
        *,
        tree: PoolTree,
        residency: Residency,
        room: Room,
        retention: Retention,
        views: Views,
        journal: Journal,
        require_sharing: Callable[[], Awaitable[None]],
    ):
        self._journal = journal
        self._tree, self._residency, self._room = tree, residency, room
        self._retention, self._views, self._require_sharing = retention, views, require_sharing

    async def pin(self, pool_id: PoolId) -> dict[str, Any]:
        """Keep a pool resident under pressure; a cold one is brought back first, or the error says why it cannot be.

        Raises:  PinBudget (409), PoolNotFound (404), SeqIdsExhausted (503), KvExhausted (507), UpstreamError and heirs
        """
        await self._require_sharing()
        pool = self._tree.get(pool_id)
        self._retention.check_pin(pool)
        await self._residency.ensure(pool)
        pool = self._tree.get(pool_id)
        self._retention.check_pin(pool)  # somebody else may have pinned another one meanwhile
        return self._answer(pool, changed=await self._set_pin(pool, True))

    async def unpin(self, pool_id: PoolId) -> dict[str, Any]:
        """Let a pool go under pressure again. What it holds stays until then. Raises JournalFailed (503)."""
        pool = self._tree.get(pool_id)
        return self._answer(pool, changed=await self._set_pin(pool, False))

    async def _set_pin(self, pool: Pool, pin: bool) -> bool:
        """Answered when it is in the journal; what cannot be written down is not done. Gives whether it was not so."""
        before, pool.pin = pool.pin, pin
        try:
            await self._journal.pool_changed(pool)
        except JournalFailed:
            pool.pin = before
            raise
        return before != pin

    async def evict(self, pool_id: PoolId, to: str | None) -> dict[str, Any]:
        """Drop a pool's sequence; the pool stays and comes back with the next attach. A pin does not refuse it.

        ``to``: ``warm`` saves its state first, ``cold`` also forgets what is saved; None: warm where that is possible.
        Of a pool that has none there is nothing to save: the answer says where it was and is.

        Raises:  PoolInUse (409), WarmUnavailable (501)
        """
        await self._require_sharing()
        if to == "warm" and not self._residency.saved.available:
            raise _no_warm_tier(self._residency.saved.why_off)
        pool = self._evictable(pool_id)
        was = self._residency_of(pool)
        if to != "cold" and self._residency.can_save(pool):
            await self._residency.save(pool, durable=True)
            pool = self._evictable(pool_id)
        if to == "warm" and pool.seq_id is not None and self._residency.residency_without(pool) != "warm":
            why = self._residency.why_not_saved_of(pool)
            raise _no_warm_tier(why.message if why is not None else "the engine did not save it")
        freed = await self._drop([pool])
        if to == "cold":
            await self._residency.forget_saved(pool)
        holder = self._tree.holder(pool.pool_id) if pool.pool_id in self._tree else None
        return pool_answer(pool) | {
            "seq_id": holder.seq_id if holder is not None else None,
            "residency": "resident" if holder is not None else pool.residency,
            "was": was,
            "held_by": holder.pool_id if holder is not None else None,
            "warm_bytes": self._views.saved_bytes(pool),
            "freed": freed,
        }

    def _evictable(self, pool_id: PoolId) -> Pool:
        pool = self._tree.get(pool_id)
        if pool_id in self._busy():
            raise PoolInUse(
                f"requests run on pool {pool.label}, or on one that its sequence holds, or an order needs it: "
                "evict it when they are done"
            )
        return pool

    async def flush(self, pool_id: PoolId) -> dict[str, Any]:
        """Evict what is neither pinned nor has running requests, of a pool and everything below it, leaves first.

        What can be saved is saved before.
        """
        await self._require_sharing()
        pinned, busy = self._retention.pinned(), self._busy()
        for pool in self._held_below(pool_id):
            if pool.pool_id not in pinned and pool.pool_id not in busy and self._residency.can_save(pool):
                await self._residency.save(pool, durable=True)
        pools = self._held_below(pool_id)
        pinned, busy = self._retention.pinned(), self._busy()
        kept = [
            {"pool_id": pool.pool_id, "reason": "pinned" if pool.pool_id in pinned else "in_use"}
            for pool in pools
            if pool.pool_id in pinned or pool.pool_id in busy
        ]
        evicted = [pool for pool in pools if pool.pool_id not in pinned and pool.pool_id not in busy]
        return {"evicted": [pool.pool_id for pool in evicted], "kept": kept, "freed": await self._drop(evicted)}

    def _held_below(self, pool_id: PoolId) -> list[Pool]:
        """Pools with a sequence, leaves first."""
        return [pool for pool in self._tree.subtree(self._tree.get(pool_id).pool_id)[::-1] if pool.seq_id is not None]

    async def _drop(self, pools: Sequence[Pool]) -> dict[str, Any]:
        """Free these pools' sequences. Gives what became free; None when the engine could not be asked."""
        for pool in pools:
            pool.sent_away_s = pool.last_use_s
        held = [pool for pool in pools if pool.seq_id is not None]
        if not held:
            return {"seq_ids": 0, "kv_cells": 0, "kv_bytes": 0}
        ledger = self._residency.ledger
        ledger.sync()
        before = ledger.accounts().total_cells
        used = await self._residency.evict_all(held)
        n_cells = before - ledger.accounts().total_cells if used is not None else None
        n_seqs = len(held) if used is not None else None
        return {"seq_ids": n_seqs, "kv_cells": n_cells, "kv_bytes": self._views.kv_bytes(n_cells)}

    def _busy(self) -> set[PoolId]:
        named = {pool_id for pool_id in self._room.running() | self._residency.named() if pool_id in self._tree}
        return with_holders(self._tree, named)

    def _residency_of(self, pool: Pool) -> str:
        return "resident" if self._tree.holder(pool.pool_id) is not None else pool.residency

    def _answer(self, pool: Pool, *, changed: bool) -> dict[str, Any]:
        held = self._residency.held(pool)
        return pool_answer(pool) | {
            "seq_id": held.seq_id if held is not None else None,
            "residency": self._residency_of(pool),
            "pinned": pool.pin,
            "changed": changed,
            "pinned_cells": self._retention.n_pinned_cells(),
            "budget_cells": self._retention.n_budget_cells(),
        }


def _no_warm_tier(why: str) -> WarmUnavailable:
    return WarmUnavailable(f"it cannot be saved: {why}. Evict with ?to=cold, the next attach prefills the pool again")
