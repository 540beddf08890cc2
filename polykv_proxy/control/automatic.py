"""Pools that nobody ordered: what prompts of several sessions begin with, and slots that were shared by their number.

They are listed as ``auto``, have no name, are never pinned, and are the first to give cells and sequences. Those that
nobody uses leave the cache like all others; in front of an engine that can save nothing the longest unused goes cold
when idle cells cost too much. What was not used for ``forget_after_s``, or is one too many, is taken off the tree,
leaves first: it is made again when two sessions begin so once more.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from polykv_proxy.control.endings import say_how_it_ended
from polykv_proxy.control.pools import PoolWork
from polykv_proxy.errors import JournalFailed, PoolHasChildren, PoolInUse, PrefixMismatch, SeqIdsExhausted
from polykv_proxy.ids import PoolId, SeqId, SlotId
from polykv_proxy.tree.pool import Pool, PoolPlan
from polykv_proxy.tree.prefix import Tokens, format_hash, hash_tokens, lcp_tokens
from polykv_proxy.upstream import Materialized

log = logging.getLogger("polykv.pools")

MAX_AUTO_POOLS = 256

MAX_IDLE_TAX = 0.05
"""Idle cells may slow everybody down so much before the longest unused of these pools goes cold for it."""


class AutomaticPools(PoolWork):
    """``idle_tax``: share of the decode steps' time that idle cells cost now; None: nobody knows, or nobody decodes."""

    def __init__(self, *, forget_after_s: float, idle_tax: Callable[[], float | None], **work: Any):
        super().__init__(**work)
        self._forget_after_s, self._idle_tax = forget_after_s, idle_tax
        self._of_slot: dict[SlotId, PoolId] = {}
        self._tending: asyncio.Task[None] | None = None

    # Of what several begin with --------------------------------------------------------------------------------------

    async def of_beginning(self, slot_id: SlotId, tokens: Tokens) -> Pool:
        """Make a pool of the first cells of a slot, also while the slot prefills or decodes what comes after them.

        A memory that cannot be cut there is prefilled from the last state before that point.

        Raises:  SessionNotResident (409) when the slot has fewer, PrefixMismatch (409) when it holds other tokens,
                 SeqIdsExhausted (503), UpstreamError and its heirs
        """
        await self._require_sharing()
        stats = self._watch.stats
        if stats is not None and stats.recurrent:
            return await self._behind_slot(slot_id, tokens) if stats.kv_unified else await self.prefilled(tokens)
        made = await self._residency.snapshot(slot_id, "auto", n_tokens=len(tokens))
        if made.tokens_hash != format_hash(hash_tokens(tokens)):
            await self._residency.give_back(SeqId(made.seq))
            raise PrefixMismatch(f"slot {slot_id} holds other tokens", divergence_pos=0)
        known = self._same(tokens)
        if known is not None:
            if known.residency in ("resident", "materializing"):
                await self._residency.give_back(SeqId(made.seq))
            else:
                await self._residency.adopt(known, made)
            return known
        plan = await self._plan_or_give_back(made, lambda: self._plan(tokens))
        return await self._commit_auto(plan, made)

    async def _behind_slot(self, slot_id: SlotId, tokens: Tokens) -> Pool:
        """The same for a memory that cannot be cut: prefilled behind a state that there is.

        That is the end of the pool above, when it is half of the way or more. Else the last one that the engine kept
        in the slot: how far that is from the end nobody tells, mostly less than a batch.
        """
        above = self._above(tokens)
        if above is not None and 2 * above.prefix_len >= len(tokens):
            return await self.prefilled(tokens)
        plan = self._plan(tokens)
        try:
            with self._dropped_on_failure(plan):
                made = await self._residency.materialize_from_slot(slot_id, tokens, plan.pool_id)
        except SeqIdsExhausted:
            return await self.prefilled(tokens)  # that takes one sequence, not two
        return await self._commit_auto(plan, made)

    async def prefilled(self, tokens: Tokens) -> Pool:
        """Have the engine prefill a beginning as a pool, for what no slot can be shared for.

        Raises:  as ``create``
        """
        await self._require_sharing()
        known = self._same(tokens)
        if known is not None:
            return known
        plan = self._plan(tokens)
        parent = self._tree.find(plan.parent)
        with self._dropped_on_failure(plan):
            made, shared = await self._residency.materialize(tokens, parent, plan.branch_pos, plan.pool_id)
        return await self._commit_auto(plan, made, made.branch_pos if shared else None)

    def _above(self, tokens: Tokens) -> Pool | None:
        """The longest pool that these tokens begin with, if it is in the cache."""
        match = self._tree.match_whole(tokens)
        above = self._tree.find(match.pool_id) if match is not None else None
        return above if above is not None and self._residency.held(above) is not None else None

    def _same(self, tokens: Tokens) -> Pool | None:
        match = self._tree.match(tokens)
        if match is None or not match.whole or match.prefix_n_tokens != len(tokens):
            return None
        return self._tree.find(match.pool_id)

    def _plan(self, tokens: Tokens) -> PoolPlan:
        """Below the longest pool that these tokens begin with, else a root."""
        above = self._tree.match_whole(tokens)
        return self._tree.plan_fork(above.pool_id, tokens) if above is not None else self._tree.plan_root(tokens)

    async def _commit_auto(self, plan: PoolPlan, made: Materialized, branch_pos: int | None = None) -> Pool:
        if branch_pos is not None:
            branch_pos = min(branch_pos, plan.branch_pos)
        pool = self._tree.commit(plan, now_s=self._clock(), branch_pos=branch_pos, auto=True)
        self._tree_changed()
        await self._residency.adopt(pool, made)
        await self._keep(pool)
        log.info("pool %s (auto): [%d, %d) in sequence %d", pool.label, pool.branch_pos, pool.prefix_len, made.seq)
        return pool

    # Ageing ----------------------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Called by the heartbeat, which does not wait: an engine in a long batch answers late, and the lease runs."""
        if self._tending is None or self._tending.done():
            self._tending = asyncio.create_task(self._tidy(), name="polykv-automatic-pools")
            self._tending.add_done_callback(
                say_how_it_ended(log, "automatic pools stay", "a bug in what is done about automatic pools")
            )

    async def stop(self) -> None:
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)

    async def _tidy(self) -> None:
        """The longest unused go first, one each time."""
        automatic = [pool for pool in self._tree if pool.auto]
        unused = sorted(self._unused(automatic), key=lambda pool: (pool.last_use_s, -pool.depth))
        if not unused:
            return
        if len(automatic) > MAX_AUTO_POOLS or unused[0].last_use_s <= self._clock() - self._forget_after_s:
            await self.let_go(unused[0].pool_id)
            return
        tax = self._idle_tax()
        if self._residency.saved.available or tax is None or tax <= MAX_IDLE_TAX:
            return
        resident = next((pool for pool in unused if pool.residency == "resident"), None)
        if resident is not None and self._residency.at_rest:
            log.info("pool %s (auto) leaves the cache: idle cells cost %.0f %%", resident.label, tax * 100)
            await self._residency.evict(resident)

    def _unused(self, automatic: list[Pool]) -> list[Pool]:
        """Leaves that no session and no order needs, and that nobody pinned or gave a policy."""
        if not automatic:
            return []
        in_use = self._residency.in_use()
        leaves = (pool for pool in automatic if not self._tree.children(pool.pool_id))
        return [pool for pool in leaves if pool.pool_id not in in_use and not self._is_wanted(pool)]

    def _is_wanted(self, pool: Pool) -> bool:
        """Somebody ordered something of it: that must not go without a word."""
        return pool.pin or self._policies.own(pool.pool_id) is not None

    # Of a slot's number ----------------------------------------------------------------------------------------------

    async def of_slot(self, slot_id: SlotId, prompts: Sequence[Tokens]) -> Pool | None:
        """The pool that is a slot's context right now: an existing one, else a new anonymous one (marked ``auto``).

        None when these prompts have nothing in common with it: then nothing is kept. A slot has one such pool at most.
        """
        made, tokens = await self._snapshots.of_slot(slot_id, "slot")
        match = self._tree.match(tokens)
        known = match is not None and match.whole and match.prefix_n_tokens == len(tokens)
        fits = all(lcp_tokens(tokens, prompt) for prompt in prompts)
        if known or not fits:
            await self._residency.give_back(SeqId(made.seq))
            return self._tree.find(match.pool_id) if match is not None and fits else None
        plan = await self._plan_or_give_back(made, lambda: self._tree.plan_root(tokens))
        pool = await self._commit_auto(plan, made)
        last, self._of_slot[slot_id] = self._of_slot.get(slot_id), pool.pool_id
        if last is not None:
            await self.let_go(last)
        return pool

    async def let_go(self, pool_id: PoolId) -> None:
        """Release an automatic pool, unless somebody needs it: then it stays until it is evicted."""
        pool = self._tree.find(pool_id)
        if pool is None or not pool.auto or self._is_wanted(pool):
            return
        if self._tree.children(pool_id) or pool_id in self._residency.in_use():
            return
        with contextlib.suppress(PoolInUse, PoolHasChildren):
            await self._take_off(pool_id)
            with contextlib.suppress(JournalFailed):  # the journal said so, and tries again
                await self._journal.pools_released([pool_id])
