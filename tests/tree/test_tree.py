"""Planning, committing, forking and releasing pools, by name of the behaviour. The rest is in the state machine."""

import pytest

from polykv_proxy.errors import (
    InvariantError,
    NameTaken,
    PoolHasChildren,
    PoolInUse,
    PoolNotFound,
    PrefixMismatch,
    RequestError,
)
from polykv_proxy.ids import ROOT, PoolId, SeqId
from polykv_proxy.tree.prefix import hash_tokens
from polykv_proxy.tree.tree import PoolTree
from tests.tree.make import add_fork, add_root, extend, settle, toks


def test_fork_at_the_end_extends_and_before_it_branches() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)))
    longer = add_fork(tree, root.pool_id, toks(range(10), 70, 71))
    other = add_fork(tree, root.pool_id, toks(range(6), 80))
    assert (longer.branch_pos, longer.own_n_tokens) == (10, 2)
    assert (other.branch_pos, other.own_n_tokens) == (6, 1)
    assert tree.tokens(other.pool_id) == toks(range(6), 80)
    assert [pool.pool_id for pool in tree.ancestors(longer.pool_id)] == [root.pool_id]
    assert [pool.pool_id for pool in tree.roots()] == [root.pool_id]


def test_branch_pos_past_the_divergence_names_where_it_diverges() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)))
    with pytest.raises(PrefixMismatch) as caught:
        tree.plan_fork(root.pool_id, toks(range(6), 80, 81, 82), branch_pos=8)
    assert (caught.value.status, caught.value.divergence_pos) == (409, 6)
    assert caught.value.extra == {"divergence_pos": 6}


def test_fork_without_a_common_token_is_no_fork() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)))
    with pytest.raises(PrefixMismatch) as caught:
        tree.plan_fork(root.pool_id, toks(99, 1, 2))
    assert caught.value.divergence_pos == 0


@pytest.mark.parametrize("branch_pos", [-1, 0, 11, 10**9])
def test_branch_pos_outside_the_parent_is_refused(branch_pos: int) -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)))
    for plan in (tree.plan_fork, tree.plan_fork_own):
        with pytest.raises(RequestError) as caught:
            plan(root.pool_id, toks(range(12)), branch_pos=branch_pos)
        assert (caught.value.status, caught.value.param) == (400, "branch_pos")


def test_fork_that_lies_within_its_parent_is_refused() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)))
    for n in (3, 10):
        with pytest.raises(RequestError) as caught:
            tree.plan_fork(root.pool_id, toks(range(n)))
        assert caught.value.status == 400
    with pytest.raises(RequestError):
        tree.plan_fork(root.pool_id, toks(range(10)), branch_pos=10)


def test_lower_branch_pos_than_needed_is_kept_and_token_exact() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)))
    child = add_fork(tree, root.pool_id, toks(range(10), 70), branch_pos=4)
    assert (child.branch_pos, child.own) == (4, toks(range(4, 10), 70))
    assert tree.tokens(child.pool_id) == toks(range(10), 70)


def test_engine_may_branch_earlier_than_planned_but_never_later() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)))
    plan = tree.plan_fork_own(root.pool_id, toks(70, 71))
    with pytest.raises(InvariantError):
        tree.commit(plan, now_s=0.0, branch_pos=11)
    child = tree.commit(plan, now_s=0.0, branch_pos=0)
    assert (child.parent, child.branch_pos, child.own_n_tokens) == (root.pool_id, 0, 12)
    assert tree.hash_at(child.pool_id, 3) == hash_tokens(toks(0, 1, 2))


def test_plan_changes_nothing_but_reserves_name_and_parent() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)), name="system")
    plan = tree.plan_fork_own(root.pool_id, toks(70), name="task")
    assert len(tree) == 1
    assert tree.find("task") is None
    for taken in ("system", "task"):
        with pytest.raises(NameTaken):
            tree.plan_root(toks(1), name=taken)
    with pytest.raises(PoolHasChildren):
        tree.release(root.pool_id)
    with pytest.raises(PoolInUse):
        tree.release(root.pool_id, recursive=True)
    tree.drop(plan)
    assert tree.plan_root(toks(1), name="task").pool_id > plan.pool_id
    tree.release(root.pool_id)
    assert len(tree) == 0


def test_plan_is_settled_once() -> None:
    tree = PoolTree()
    plan = tree.plan_root(toks(1))
    tree.commit(plan, now_s=0.0)
    for again in (lambda: tree.commit(plan, now_s=0.0), lambda: tree.drop(plan)):
        with pytest.raises(InvariantError):
            again()


def test_refused_name_reserves_nothing() -> None:
    tree = PoolTree()
    with pytest.raises(RequestError):
        tree.plan_root(toks(1), name="42")
    assert tree.plan_root(toks(1)).pool_id == 1


def test_pool_is_found_by_id_by_digits_and_by_name() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(1), name="system")
    assert tree.get(root.pool_id) is tree.get(str(root.pool_id)) is tree.get("system") is root
    for unknown in (ROOT, 99, "99", "other", "-1", "9" * 5000, "²", ""):
        with pytest.raises(PoolNotFound):
            tree.get(unknown)


def test_release_takes_leaves_first_and_frees_names() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)), name="system")
    middle = extend(tree, root.pool_id, toks(1))
    leaf = extend(tree, middle.pool_id, toks(2))
    with pytest.raises(PoolHasChildren):
        tree.release(root.pool_id)
    assert tree.release(root.pool_id, recursive=True) == [leaf, middle, root]
    assert tree.find("system") is None
    assert tree.match(toks(range(10))) is None
    assert add_root(tree, toks(range(10)), name="system").pool_id > leaf.pool_id


def test_match_prefers_whole_then_resident_then_owner_then_oldest() -> None:
    tree = PoolTree()
    first = add_root(tree, toks(range(10)))
    twin = add_root(tree, toks(range(10)))
    heir = extend(tree, twin.pool_id, toks(70, 71))
    settle(tree, heir, "resident")

    def matched(*parts: int | range) -> tuple[int, int, bool]:
        match = tree.match(toks(*parts))
        assert match is not None
        return match.pool_id, match.prefix_n_tokens, match.whole

    assert matched(range(10), 99) == (first.pool_id, 10, True)  # whole beats the resident heir; oldest twin
    assert matched(range(8), 99) == (heir.pool_id, 8, False)  # nobody whole: the resident one
    settle(tree, heir, "warm")
    assert matched(range(8), 99) == (heir.pool_id, 8, False)
    settle(tree, twin, "warm")
    assert matched(range(8), 99) == (twin.pool_id, 8, False)  # owner before heir
    assert matched(range(10), 99) == (twin.pool_id, 10, True)
    assert matched(range(10), 70, 99) == (heir.pool_id, 11, False)


def test_only_a_resident_pool_has_a_sequence() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(1))
    with pytest.raises(InvariantError):
        tree.set_residency(root.pool_id, "resident")
    with pytest.raises(InvariantError):
        tree.set_residency(root.pool_id, "cold", seq_id=SeqId(6))
    tree.set_residency(root.pool_id, "resident", seq_id=SeqId(6), gen=3)
    assert (root.residency, root.seq_id, root.gen) == ("resident", 6, 3)
    tree.set_residency(root.pool_id, "cold")
    assert (root.residency, root.seq_id, root.gen) == ("cold", None, None)


def test_holder_is_any_resident_with_the_same_beginning() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(10)))
    deep = extend(tree, extend(tree, root.pool_id, toks(70)).pool_id, toks(71))
    branch = extend(tree, root.pool_id, toks(80), branch_pos=4)
    assert tree.holder(root.pool_id) is None
    settle(tree, branch, "resident")
    assert tree.holder(root.pool_id) is None
    assert tree.holder(root.pool_id, 4) is branch
    settle(tree, deep, "resident")
    assert tree.holder(root.pool_id) is deep
    settle(tree, root, "resident")
    assert tree.holder(root.pool_id) is root


def test_of_several_holders_all_name_the_same_one() -> None:
    """The nearest to the root, whoever became resident first; ``holders`` says what ``holder`` says of each."""
    tree = PoolTree()
    root = add_root(tree, toks(range(10)))
    twin = add_root(tree, toks(range(10)))
    middle = extend(tree, root.pool_id, toks(70))
    deep = extend(tree, middle.pool_id, toks(71))
    other = extend(tree, root.pool_id, toks(80))
    aside = extend(tree, root.pool_id, toks(90), branch_pos=4)
    for settled, of_root in ((deep, deep), (aside, deep), (other, other), (middle, middle)):
        settle(tree, settled, "resident")
        assert tree.holder(root.pool_id) is tree.holder(twin.pool_id) is of_root
        held = {pool.pool_id: holder for pool in tree if (holder := tree.holder(pool.pool_id)) is not None}
        assert tree.holders() == held
    assert tree.holders() == {
        root.pool_id: middle,
        twin.pool_id: middle,
        middle.pool_id: middle,
        deep.pool_id: deep,
        other.pool_id: other,
        aside.pool_id: aside,
    }


def test_depth_64_keeps_tokens_and_hashes() -> None:
    tree = PoolTree()
    pool = add_root(tree, toks(range(20)))
    full = toks(range(20))
    for level in range(63):
        own = toks(range(level, level + 7))
        pool = extend(tree, pool.pool_id, own)
        full += own
    assert tree.depth() == 64
    assert tree.tokens(pool.pool_id) == full
    assert tree.lcp(pool.pool_id, full + toks(1)) == len(full)
    assert tree.hash_at(pool.pool_id, 100) == hash_tokens(full[:100])
    assert [p.depth for p in tree.ancestors(pool.pool_id)] == list(reversed(range(63)))


def test_many_pools_are_matched_and_released() -> None:
    """12,000 pools in 200 families: every prompt finds its own pool, the tree empties again."""
    tree = PoolTree()
    for family in range(200):
        root = add_root(tree, toks(range(50), 1000 + family, range(50)))
        for member in range(59):
            extend(tree, root.pool_id, toks(5000 + member, 1, 2))
    assert len(tree) == 12_000
    for family in (0, 57, 199):
        match = tree.match(toks(range(50), 1000 + family, range(50), 5000 + 30, 1, 2, 3))
        assert match is not None
        assert (match.prefix_n_tokens, match.whole) == (104, True)
        assert match.pool_id == 1 + family * 60 + 31
    for root in tree.roots():
        assert len(tree.release(root.pool_id, recursive=True)) == 60
    assert len(tree) == 0
    assert tree.match(toks(range(50))) is None


def test_first_id_can_be_given() -> None:
    assert PoolTree(next_id=500).plan_root(toks(1)).pool_id == PoolId(500)
