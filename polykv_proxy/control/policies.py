"""Whose admission policy a pool follows: its own, the nearest ancestor's, or the default of the settings.

What was set is answered when it is in the journal, and holds from that step on; what cannot be written down does not
hold. Policies come back with their pools after a restart, wait with them while another model runs, and go with them
when they are released.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polykv_proxy.config import Settings
from polykv_proxy.errors import PoolNotFound, RequestError
from polykv_proxy.gate.policy import Policy, PolicyBook, Ruling, parse_policy
from polykv_proxy.ids import PoolId
from polykv_proxy.store import Journal
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree

log = logging.getLogger("polykv.policies")

FIELDS = tuple(Policy(target_tps_per_session=1).to_json())


def default_policy(settings: Settings) -> Policy | None:
    """What holds for pools without a policy of their own or inherited; None: nothing, they are not gated."""
    if settings.default_target_tps is None:
        return None
    return Policy(target_tps_per_session=settings.default_target_tps, mode=settings.default_mode or "advisory")


class Policies:
    """``on_changed``: another policy may hold for any pool. ``on_forgotten``: this pool is off the tree."""

    def __init__(self, *, tree: PoolTree, journal: Journal, settings: Settings):
        self._tree, self._journal = tree, journal
        self._book = PolicyBook(default_policy(settings))
        self._turn = asyncio.Lock()
        self.on_changed: Callable[[], None] = lambda: None
        self.on_forgotten: Callable[[PoolId], None] = lambda pool_id: None

    # Who follows what ----------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Nobody is gated: no pool has a policy, and there is no default."""
        return self._book.is_empty

    @property
    def n_own(self) -> int:
        """Pools that have a policy of their own."""
        return len(self._book)

    @property
    def default(self) -> Policy | None:
        return self._book.default

    def own(self, pool_id: PoolId) -> Policy | None:
        """The policy that was set for this very pool."""
        return self._book.own(pool_id)

    def resolve(self, pool_id: PoolId) -> Ruling:
        """What holds for a pool; for one that is off the tree, what holds for pools without a policy."""
        path = [pool_id]
        if pool_id in self._tree:
            path += [pool.pool_id for pool in self._tree.ancestors(pool_id)]
        return self._book.resolve(path)

    def get(self, ref: int | str) -> dict[str, Any]:
        """What holds for a pool, and whose it is. Raises PoolNotFound (404)."""
        return self._shown(self._tree.get(ref))

    # Changes -------------------------------------------------------------------------------------------------------

    async def set(self, ref: int | str, policy: Policy) -> dict[str, Any]:
        """Give a pool a policy of its own, in place of any that it had.

        Raises:  PoolNotFound (404); JournalFailed (503), then what held before still holds
        """
        return await self._change(self._tree.get(ref), policy)

    async def drop(self, ref: int | str) -> dict[str, Any]:
        """Take a pool's own policy away: from here on it follows its ancestors, or the default.

        Raises:  PoolNotFound (404); JournalFailed (503), then what held before still holds
        """
        return await self._change(self._tree.get(ref), None)

    async def _change(self, pool: Pool, policy: Policy | None) -> dict[str, Any]:
        async with self._turn:  # two at once: what is written last is what holds
            before = self._book.own(pool.pool_id)
            if policy is not None or before is not None:  # also when it is the same: the journal may have failed then
                await self._journal.policy_changed(pool.pool_id, policy.to_json() if policy is not None else None)
            if self._tree.find(pool.pool_id) is not pool:
                raise PoolNotFound(f"pool {pool.label} was released meanwhile")
            if policy is not None:
                self._book.set(pool.pool_id, policy)
            else:
                self._book.delete(pool.pool_id)
        if policy != before:
            log.info("pool %s: %s", pool.label, _told(policy))
            self.on_changed()
        return self._shown(pool) | {"changed": policy != before}

    def put_back(self, pool_id: PoolId, kept: Mapping[str, Any]) -> None:
        """A pool of an earlier run had this one."""
        try:
            self._book.set(pool_id, parse_policy(kept))
        except RequestError as e:
            log.error("pool %s has no policy now, the one in the journal is of no use here: %s", pool_id, e.message)
            return
        self.on_changed()

    def forget(self, pool_ids: Iterable[PoolId]) -> None:
        """These pools are off the tree. The journal forgets their policies with them, or keeps both."""
        had_one = False
        for pool_id in pool_ids:
            had_one |= self._book.delete(pool_id) is not None
            self.on_forgotten(pool_id)
        if had_one:
            self.on_changed()

    def _shown(self, pool: Pool) -> dict[str, Any]:
        ruling = self.resolve(pool.pool_id)
        policy = ruling.policy.to_json() if ruling.policy is not None else dict.fromkeys(FIELDS)
        return {
            "pool_id": pool.pool_id,
            "name": pool.name,
            "source": _source(ruling),
            "inherited_from": ruling.inherited_from,
            "scope": ruling.scope,
            **policy,
        }


def _source(ruling: Ruling) -> str:
    if ruling.policy is None:
        return "none"
    if ruling.inherited_from is None:
        return "own"
    return "default" if ruling.inherited_from == "default" else "inherited"


def _told(policy: Policy | None) -> str:
    if policy is None:
        return "no policy of its own any more"
    what = f", {policy.on_saturation}" if policy.enforced else ""
    return f"{policy.mode}{what}, {policy.target_tps_per_session:,.10g} tokens per second and session"
