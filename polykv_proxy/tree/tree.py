"""``PoolTree``: every pool there is, by id, name, parent and tokens.

The tree is the truth about pools; the engine only holds some of them for a while. A change that needs the engine is
planned here without changing anything, performed elsewhere, then committed or dropped.

Rules it keeps:
    1. A pool's tokens never change. [0, D) are its parent's, token for token; it owns at least one more.
    2. Ids start at 1, are never reused (also not those of dropped plans); names are unique, plans' names included.
    3. A parent outlives its children and the plans of children.
    4. The index holds exactly the pools of the tree, in the order of their residency.
"""

from polykv_proxy.errors import (
    InvariantError,
    NameTaken,
    PoolHasChildren,
    PoolInUse,
    PrefixMismatch,
    RequestError,
)
from polykv_proxy.ids import ROOT, PoolId, SeqId
from polykv_proxy.tree.index import PrefixIndex
from polykv_proxy.tree.lookup import PoolLookup, key_of
from polykv_proxy.tree.pool import RESIDENCIES, Pool, PoolPlan, Residency, check_name
from polykv_proxy.tree.prefix import Tokens, cumulative_hashes, make_tokens


class PoolTree(PoolLookup):
    """All pools, and how they change."""

    def __init__(self, *, next_id: int = 1) -> None:
        super().__init__()
        self._next_id = next_id
        self._plans: dict[PoolId, PoolPlan] = {}
        self._n_plans_of: dict[PoolId, int] = {}
        self._outdated: set[PoolId] = set()

    # Plan, commit, drop ---------------------------------------------------------------------------------------------

    def plan_root(self, tokens: Tokens, *, name: str | None = None) -> PoolPlan:
        """Plan a pool without a parent.

        Raises:  RequestError (400), NameTaken (409)
        """
        return self._reserve(ROOT, 0, make_tokens(tokens), name)

    def plan_fork(
        self, parent: PoolId, tokens: Tokens, *, branch_pos: int | None = None, name: str | None = None
    ) -> PoolPlan:
        """Plan a child from its FULL prefix [0, L). Without ``branch_pos`` it branches where it diverges.

        A smaller ``branch_pos`` than the divergence is kept: the child then owns tokens that the parent has too.

        Raises:  PrefixMismatch (409) when tokens[:branch_pos] are not the parent's, or nothing is shared at all;
                 RequestError (400) when the child would own nothing; NameTaken (409); PoolNotFound (404)
        """
        pool = self.get(parent)
        tokens = make_tokens(tokens)
        divergence = self.lcp(parent, tokens)
        if divergence == 0:
            raise PrefixMismatch(
                f"no common prefix with pool {pool.label}: create a root pool instead", divergence_pos=0, param="tokens"
            )
        if branch_pos is None:
            if divergence == len(tokens):
                raise RequestError(
                    f"all {len(tokens)} tokens are a prefix of pool {pool.label}, the fork would own nothing: "
                    "attach to that pool instead",
                    param="tokens",
                )
            branch_pos = divergence
        _check_branch_pos(branch_pos, pool, len(tokens))
        if branch_pos > divergence:
            raise PrefixMismatch(
                f"the tokens differ from pool {pool.label} at position {divergence}, before branch_pos {branch_pos}",
                divergence_pos=divergence,
                param="branch_pos",
            )
        return self._reserve(parent, branch_pos, tokens, name)

    def plan_fork_own(
        self, parent: PoolId, own_tokens: Tokens, *, branch_pos: int | None = None, name: str | None = None
    ) -> PoolPlan:
        """Plan a child from its OWN tokens [D, L) behind the parent's [0, D). Without ``branch_pos`` it extends.

        Raises:  RequestError (400), NameTaken (409), PoolNotFound (404)
        """
        pool = self.get(parent)
        own_tokens = make_tokens(own_tokens, param="own_tokens")
        if branch_pos is None:
            branch_pos = pool.prefix_len
        _check_branch_pos(branch_pos, pool, branch_pos + len(own_tokens))
        return self._reserve(parent, branch_pos, self.tokens(parent)[:branch_pos] + own_tokens, name)

    def commit(
        self,
        plan: PoolPlan,
        *,
        now_s: float,
        branch_pos: int | None = None,
        pin: bool = False,
        ttl_s: float | None = None,
        auto: bool = False,
    ) -> Pool:
        """Put a planned pool into the tree (cold). ``branch_pos``: where the engine really branched, never later.

        Units:   now_s, ttl_s seconds
        """
        real = plan.branch_pos if branch_pos is None else branch_pos
        if not 0 <= real <= plan.branch_pos:
            raise InvariantError(f"the engine branched at {real}, after the planned {plan.branch_pos}")
        self._settle(plan)
        own = plan.tokens[real:]
        hashes = cumulative_hashes(own, plan.tokens[:real])
        pool = Pool(
            pool_id=plan.pool_id,
            parent=plan.parent,
            branch_pos=real,
            prefix_len=plan.prefix_len,
            own=own,
            own_hashes=hashes,
            tokens_hash=hashes[-1],
            depth=0 if plan.parent == ROOT else self._pools[plan.parent].depth + 1,
            name=plan.name,
            pin=pin,
            ttl_s=ttl_s,
            auto=auto,
            created_s=now_s,
            last_access_s=now_s,
        )
        self._put(pool)
        return pool

    def drop(self, plan: PoolPlan) -> None:
        """Give up a plan: its name is free again, its parent may go."""
        if plan.pool_id in self._outdated:
            self._outdated.discard(plan.pool_id)
            return
        self._settle(plan)
        if plan.name is not None:
            del self._names[plan.name]

    # Another run's pools --------------------------------------------------------------------------------------------

    def restore(
        self,
        pool_id: PoolId,
        *,
        parent: PoolId,
        branch_pos: int,
        own: Tokens,
        tokens_hash: int,
        name: str | None,
        pin: bool,
        ttl_s: float | None,
        auto: bool,
        created_s: float,
        last_access_s: float,
    ) -> Pool:
        """Put a pool back that an earlier run had, under its id (cold). Parents come before children.

        ``tokens_hash`` is believed: whoever kept the pool has checked it.
        """
        known = pool_id in self._pools or pool_id in self._plans or (name is not None and name in self._names)
        if known or not own or (parent != ROOT and not 0 <= branch_pos <= self._pools[parent].prefix_len):
            raise InvariantError(f"pool {pool_id} cannot be put back")
        pool = Pool(
            pool_id=pool_id,
            parent=parent,
            branch_pos=branch_pos,
            prefix_len=branch_pos + len(own),
            own=own,
            own_hashes=None,
            tokens_hash=tokens_hash,
            depth=0 if parent == ROOT else self._pools[parent].depth + 1,
            name=name,
            pin=pin,
            ttl_s=ttl_s,
            auto=auto,
            created_s=created_s,
            last_access_s=last_access_s,
        )
        if name is not None:
            self._names[name] = pool_id
        self._put(pool)
        self._next_id = max(self._next_id, pool_id + 1)
        return pool

    def skip_ids(self, next_id: int) -> None:
        """Ids below this one were given before."""
        self._next_id = max(self._next_id, next_id)

    def clear(self) -> None:
        """Forget all pools, and plans as well: who made one may only drop it. Ids go on where they were."""
        self._outdated.update(self._plans)
        for forgotten in (self._pools, self._residents, self._names, self._plans, self._n_plans_of):
            forgotten.clear()
        self._children = {ROOT: {}}
        self._index = PrefixIndex()

    # Change ---------------------------------------------------------------------------------------------------------

    def set_residency(
        self, pool_id: PoolId, residency: Residency, *, seq_id: SeqId | None = None, gen: int | None = None
    ) -> None:
        """Record where a pool's cells are. Only a resident pool has a sequence."""
        if residency not in RESIDENCIES:
            raise InvariantError(f"unknown residency {residency!r}")
        if (residency == "resident") != (seq_id is not None):
            raise InvariantError(f"a {residency} pool with sequence {seq_id}")
        pool = self._pools[pool_id]
        pool._residency, pool.seq_id, pool.gen = residency, seq_id, gen
        if seq_id is not None:
            self._residents[pool_id] = None
        else:
            self._residents.pop(pool_id, None)
        self._index.rekey(key_of(pool))

    def rename(self, pool_id: PoolId, name: str | None) -> None:
        """Give a pool another name, or none. Raises NameTaken (409)."""
        pool = self._pools[pool_id]
        if name == pool.name:
            return
        if name is not None:
            self._check_name(name)
            self._names[name] = pool_id
        if pool.name is not None:
            del self._names[pool.name]
        pool.name = name

    def require_settled(self, pool_id: PoolId) -> list[Pool]:
        """A pool and everything below it, in the order of ``subtree``.

        Raises:  PoolNotFound (404), PoolInUse (409) while a fork below it is being made
        """
        pools = self.subtree(pool_id)
        if any(pool.pool_id in self._n_plans_of for pool in pools):
            raise PoolInUse(f"a fork below pool {self.get(pool_id).label} is being made")
        return pools

    def release(self, pool_id: PoolId, *, recursive: bool = False) -> list[Pool]:
        """Take a pool off the tree at once, with ``recursive`` everything below it too. Gives them, leaves first.

        Raises:  PoolNotFound (404), PoolHasChildren (409), PoolInUse (409) while a fork below it is being made
        """
        top = self.get(pool_id)
        if not recursive:
            n_children = len(self._children[pool_id]) + self._n_plans_of.get(pool_id, 0)
            if n_children:
                what = "child" if n_children == 1 else "children"
                raise PoolHasChildren(f"pool {top.label} has {n_children} {what}", n_children=n_children)
        released = self.require_settled(pool_id)[::-1]
        for pool in released:
            self._index.remove(pool.pool_id)
            self._residents.pop(pool.pool_id, None)
            del self._pools[pool.pool_id], self._children[pool.pool_id], self._children[pool.parent][pool.pool_id]
            if pool.name is not None:
                del self._names[pool.name]
        return released

    # Inside ---------------------------------------------------------------------------------------------------------

    def _put(self, pool: Pool) -> None:
        self._pools[pool.pool_id] = pool
        self._children[pool.pool_id] = {}
        self._children[pool.parent][pool.pool_id] = None
        parent = None if pool.is_root else pool.parent
        self._index.insert(key_of(pool), pool.own.tobytes(), parent=parent, branch_pos=pool.branch_pos)

    def _reserve(self, parent: PoolId, branch_pos: int, tokens: Tokens, name: str | None) -> PoolPlan:
        if name is not None:
            self._check_name(name)
        plan = PoolPlan(PoolId(self._next_id), parent, branch_pos, tokens, name)
        self._next_id += 1
        self._plans[plan.pool_id] = plan
        if name is not None:
            self._names[name] = plan.pool_id
        if parent != ROOT:
            self._n_plans_of[parent] = self._n_plans_of.get(parent, 0) + 1
        return plan

    def _check_name(self, name: str) -> None:
        """Raises RequestError (400), NameTaken (409)."""
        check_name(name)
        if name in self._names:
            raise NameTaken(
                f"a pool is named {name!r} already: use it, fork it or release it, or take another name",
                param="name",
            )

    def _settle(self, plan: PoolPlan) -> None:
        """End a plan, once."""
        if self._plans.pop(plan.pool_id, None) is not plan:
            raise InvariantError(f"plan of pool {plan.pool_id} was committed or dropped before")
        if plan.parent != ROOT:
            self._n_plans_of[plan.parent] -= 1
            if not self._n_plans_of[plan.parent]:
                del self._n_plans_of[plan.parent]


def _check_branch_pos(branch_pos: int, parent: Pool, prefix_len: int) -> None:
    if not 0 < branch_pos <= parent.prefix_len:
        raise RequestError(
            f"branch_pos {branch_pos} is outside 1 .. {parent.prefix_len}, the prefix of pool {parent.label}",
            param="branch_pos",
        )
    if branch_pos >= prefix_len:
        raise RequestError(
            f"branch_pos {branch_pos} leaves the fork no token of its own: its prefix has {prefix_len}",
            param="branch_pos",
        )
