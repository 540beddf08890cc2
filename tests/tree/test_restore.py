"""Pools of an earlier run: put back under their ids, and forgotten together."""

from array import array
from typing import Any

import pytest

from polykv_proxy.errors import InvariantError
from polykv_proxy.ids import ROOT, PoolId
from polykv_proxy.tree.pool import Match, Pool
from polykv_proxy.tree.prefix import hash_tokens
from polykv_proxy.tree.tree import PoolTree
from tests.tree.make import add_fork, add_root, extend, toks


def kept(pool: Pool) -> dict[str, Any]:
    """What an earlier run kept of a pool."""
    fields = ("parent", "branch_pos", "own", "tokens_hash", "name", "pin", "ttl_s", "auto", "created_s")
    return {name: getattr(pool, name) for name in fields} | {"last_access_s": pool.last_access_s}


def again(tree: PoolTree) -> PoolTree:
    other = PoolTree()
    for pool in tree:
        other.restore(pool.pool_id, **kept(pool))
    return other


def test_a_tree_put_back_is_the_same_tree() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)), name="root")
    tree.release(add_root(tree, toks(50)).pool_id)
    branch = add_fork(tree, root.pool_id, toks(range(6), 90, 91))
    extend(tree, branch.pool_id, toks(92))
    other = again(tree)
    assert [pool.pool_id for pool in other] == [1, 3, 4]
    assert other.get("root").pool_id == 1
    for pool in tree:
        assert kept(other.get(pool.pool_id)) == kept(pool)
        assert other.tokens(pool.pool_id) == tree.tokens(pool.pool_id)
        assert other.get(pool.pool_id).depth == pool.depth
        for n in range(1, pool.prefix_len + 1):
            assert other.hash_at(pool.pool_id, n) == tree.hash_at(pool.pool_id, n)
    assert other.match(toks(range(6), 90, 91, 92, 7)) == Match(PoolId(4), 9, True)
    assert {pool.residency for pool in other} == {"cold"}
    assert add_root(other, toks(1)).pool_id == 5


def test_ids_of_pools_that_are_gone_are_not_given_again() -> None:
    tree = PoolTree()
    tree.skip_ids(8)
    assert add_root(tree, toks(1)).pool_id == 8
    tree.skip_ids(3)
    assert add_root(tree, toks(1)).pool_id == 9


def test_what_does_not_fit_the_tree_is_refused() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(1, 2, 3), name="root")
    child = {**kept(root), "parent": root.pool_id, "branch_pos": 3, "name": None}
    for pool_id, wrong in (
        (root.pool_id, child),
        (PoolId(2), child | {"name": "root"}),
        (PoolId(2), child | {"branch_pos": 4}),
        (PoolId(2), child | {"branch_pos": -1}),
        (PoolId(2), child | {"own": array("i")}),
    ):
        with pytest.raises(InvariantError):
            tree.restore(pool_id, **wrong)
    assert [pool.pool_id for pool in tree] == [1]
    assert tree.restore(PoolId(2), **child).parent == root.pool_id


def test_a_cleared_tree_has_nothing_and_a_plan_of_before_can_only_be_dropped() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(1, 2, 3), name="root")
    plan = tree.plan_fork(root.pool_id, toks(1, 2, 9), name="plan")
    tree.clear()
    assert (len(tree), tree.match(toks(1, 2)), tree.find("root"), tree.roots()) == (0, None, None, [])
    new = add_root(tree, toks(1, 2, 9), name="plan")
    assert new.pool_id == 3
    with pytest.raises(InvariantError):
        tree.commit(plan, now_s=0.0)
    tree.drop(plan)
    assert tree.get("plan") is new
    tree.restore(root.pool_id, **kept(root) | {"parent": ROOT})
    assert tree.hash_at(root.pool_id, 2) == hash_tokens(toks(1, 2))
