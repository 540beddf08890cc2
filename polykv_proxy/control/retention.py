"""What stays in the cache and what may go: grace, pins and their budget, and who is given up for whom.

Pressure evicts, time does not: a pool whose grace is over is the first choice when cells or sequences are needed, and
stays where it is until then. Grace begins when the last session on it or below it is gone; ``touch``, called with
every heartbeat, notes until when that was.

Pinned cells are the cells of all pinned pools with all that they inherit, each counted once. A pool that is still being
made pinned counts from the moment it was planned, so that two at a time do not both get the last of the budget.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator

from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import PinBudget
from polykv_proxy.ids import PoolId
from polykv_proxy.tree.eviction import choose_spare, choose_victim, held_cells, with_holders
from polykv_proxy.tree.pool import Pool, PoolPlan
from polykv_proxy.tree.tree import PoolTree


class Retention:
    def __init__(
        self,
        *,
        tree: PoolTree,
        watch: EngineWatch,
        clock: Callable[[], float],
        grace_ttl_s: float,
        pin_max_fraction: float,
    ):
        self._tree, self._watch, self._clock = tree, watch, clock
        self.grace_ttl_s, self.pin_max_fraction = grace_ttl_s, pin_max_fraction
        self._plans: dict[PoolId, PoolPlan] = {}

    # Grace ---------------------------------------------------------------------------------------------------------

    def touch(self, in_use: Collection[PoolId]) -> None:
        """These pools are in use at this moment."""
        now_s = self._clock()
        for pool_id in in_use:
            pool = self._tree.find(pool_id)
            if pool is not None:
                pool.used_s = now_s

    def grace_end_s(self, pool: Pool) -> float:
        """From when on this pool is given up before any whose grace still runs, if nobody uses it."""
        return pool.last_use_s + (pool.ttl_s if pool.ttl_s is not None else self.grace_ttl_s)

    def _expired(self, residents: Collection[Pool]) -> set[PoolId]:
        now_s = self._clock()
        return {pool.pool_id for pool in residents if self.grace_end_s(pool) <= now_s}

    # Who goes ------------------------------------------------------------------------------------------------------

    def pinned(self) -> set[PoolId]:
        """Pools that a pin keeps resident: the pinned ones, and who holds the cells for one without a sequence."""
        pins = [pool.pool_id for pool in self._tree if pool.pin]
        return with_holders(self._tree, pins)

    def staying(self, in_use: Collection[PoolId]) -> list[Pool]:
        """Resident pools that no pressure takes away."""
        pinned = self.pinned()
        return [pool for pool in self._tree.residents() if pool.pool_id in pinned or pool.pool_id in in_use]

    def victim(self, in_use: Collection[PoolId]) -> Pool | None:
        """The pool whose cells are worth least; None when all are pinned or in use."""
        residents = self._tree.residents()
        return choose_victim(self._tree, residents, self.pinned().union(in_use), self._expired(residents))

    def spare(self, moving: Collection[PoolId]) -> Pool | None:
        """A pool that can do without its own sequence, because another one's holds all of it."""
        known = {pool_id for pool_id in moving if pool_id in self._tree}
        return choose_spare(self._tree, self._tree.residents(), with_holders(self._tree, known))

    # Pins ----------------------------------------------------------------------------------------------------------

    def n_pinned_cells(self) -> int:
        """Cells of all pinned pools, what they inherit included, each once."""
        return held_cells(self._tree, [pool for pool in self._tree if pool.pin], self._planned(()))

    def check_pin(self, pool: Pool) -> None:
        """Check that this pool may be pinned too. Raises PinBudget (409)."""
        if not pool.pin:
            self._check([pool], ())

    @contextlib.contextmanager
    def pinning(self, plan: PoolPlan, pin: bool) -> Iterator[None]:
        """Keep part of the budget for a pool that is being made pinned, until it is committed or dropped.

        Raises:  PinBudget (409)
        """
        if not pin:
            yield
            return
        self._check((), [plan])
        self._plans[plan.pool_id] = plan
        try:
            yield
        finally:
            self._plans.pop(plan.pool_id, None)

    def n_budget_cells(self) -> int | None:
        """How many cells may be pinned; None while the engine's number is not known."""
        stats = self._watch.stats
        n_total = stats.cells.total if stats is not None and stats.cells is not None else None
        return int(self.pin_max_fraction * n_total) if n_total else None

    def _check(self, pools: Collection[Pool], plans: Collection[PoolPlan]) -> None:
        n_budget = self.n_budget_cells()
        if n_budget is None:
            return  # an engine without cells, or never seen: nothing to have a share of
        pinned = [pool for pool in self._tree if pool.pin]
        n_before = held_cells(self._tree, pinned, self._planned(()))
        n_after = held_cells(self._tree, [*pinned, *pools], self._planned(plans))
        if n_after > n_budget:
            raise PinBudget(
                f"{n_before} cells are pinned, this pin would make it {n_after}, and the budget is {n_budget} "
                f"(POLYKV_PIN_MAX_FRACTION {self.pin_max_fraction:g}): unpin or release another pool first",
                param="pin",
                pinned_cells=n_before,
                pinned_cells_after=n_after,
                budget_cells=n_budget,
            )

    def _planned(self, more: Collection[PoolPlan]) -> list[tuple[PoolId, int, int]]:
        plans = {**self._plans, **{plan.pool_id: plan for plan in more}}
        known = (plan for plan in plans.values() if plan.branch_pos == 0 or plan.parent in self._tree)
        return [(plan.parent, plan.branch_pos, plan.prefix_len) for plan in known]
