"""The order of eviction, and the cells that pools hold."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.ids import PoolId, SeqId
from polykv_proxy.tree.eviction import choose_spare, choose_victim, held_cells, with_ancestors, with_holders
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree


def toks(*values: int) -> "array[int]":
    return array("i", values)


def add(tree: PoolTree, own: list[int], parent: Pool | None = None, at: int | None = None, **kw: object) -> Pool:
    """A resident pool."""
    if parent is None:
        plan = tree.plan_root(toks(*own))
    else:
        plan = tree.plan_fork_own(parent.pool_id, toks(*own), branch_pos=at)
    pool = tree.commit(plan, now_s=0.0, **kw)  # type: ignore[arg-type]
    tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(pool.pool_id), gen=1)
    return pool


def residents(tree: PoolTree) -> list[Pool]:
    return [pool for pool in tree if pool.seq_id is not None]


def evict_all(tree: PoolTree, in_use: tuple[PoolId, ...] = ()) -> list[int]:
    """Ids in the order in which they go."""
    order = []
    while (victim := choose_victim(tree, residents(tree), in_use)) is not None:
        tree.set_residency(victim.pool_id, "cold")
        order.append(int(victim.pool_id))
    return order


def test_leaves_go_before_parents_and_the_least_recently_used_first() -> None:
    tree = PoolTree()
    root = add(tree, [1, 2, 3])
    old, new = add(tree, [4], root), add(tree, [5], root)
    other = add(tree, [9, 9])
    root.last_access_s, old.last_access_s, new.last_access_s, other.last_access_s = 0.0, 1.0, 3.0, 2.0
    assert evict_all(tree) == [old.pool_id, other.pool_id, new.pool_id, root.pool_id]


def test_automatic_pools_go_first() -> None:
    tree = PoolTree()
    ordered, auto = add(tree, [1]), add(tree, [2], auto=True)
    ordered.last_access_s, auto.last_access_s = 0.0, 9.0
    assert evict_all(tree) == [auto.pool_id, ordered.pool_id]


def test_those_whose_grace_is_over_go_before_automatic_ones() -> None:
    tree = PoolTree()
    ordered, auto = add(tree, [1]), add(tree, [2], auto=True)
    assert choose_victim(tree, residents(tree), (), [ordered.pool_id]) is ordered
    assert choose_victim(tree, residents(tree), (), [ordered.pool_id, auto.pool_id]) is auto


def test_a_leaf_goes_before_a_parent_whose_grace_is_over() -> None:
    tree = PoolTree()
    root = add(tree, [1, 2, 3])
    leaf = add(tree, [4], root)
    assert choose_victim(tree, residents(tree), (), [root.pool_id]) is leaf


def test_the_last_use_counts_also_when_it_was_only_seen_in_use() -> None:
    tree = PoolTree()
    one, two = add(tree, [1]), add(tree, [2])
    one.last_access_s, one.used_s, two.last_access_s = 1.0, 9.0, 5.0
    assert choose_victim(tree, residents(tree), ()) is two


def test_a_pool_that_an_heir_holds_can_spare_its_sequence_unpinned_ones_first() -> None:
    tree = PoolTree()
    root = add(tree, [1, 2, 3], pin=True)
    middle = add(tree, [4], root)
    leaf = add(tree, [5], middle)
    assert choose_spare(tree, residents(tree), ()) is middle
    assert choose_spare(tree, residents(tree), [middle.pool_id]) is root
    tree.set_residency(leaf.pool_id, "cold")
    assert choose_spare(tree, residents(tree), ()) is root
    branch = add(tree, [9], leaf, at=3)  # holds all of the root, nothing of the middle's own
    assert choose_spare(tree, [root, branch], ()) is root
    assert choose_spare(tree, [middle, branch], ()) is None


def test_who_is_needed_is_needed_with_all_above_and_with_who_holds_it() -> None:
    tree = PoolTree()
    root = add(tree, [1, 2, 3])
    middle = add(tree, [4], root)
    leaf, other = add(tree, [5], middle), add(tree, [6], middle)
    assert with_ancestors(tree, [leaf.pool_id, PoolId(99)]) == {leaf.pool_id, middle.pool_id, root.pool_id}
    tree.set_residency(middle.pool_id, "cold")
    # The leaf holds what is above it: its sibling is not needed for that.
    assert with_holders(tree, with_ancestors(tree, [leaf.pool_id])) == {1, 2, 3}
    assert with_holders(tree, {middle.pool_id}) == {middle.pool_id, leaf.pool_id}
    tree.set_residency(leaf.pool_id, "cold")
    assert with_holders(tree, {middle.pool_id}) == {middle.pool_id, other.pool_id}


def test_a_pool_that_is_still_planned_counts_what_it_adds() -> None:
    tree = PoolTree()
    root = add(tree, [1, 2, 3])
    assert held_cells(tree, [], [(root.pool_id, 2, 7)]) == 2 + 5
    assert held_cells(tree, [root], [(root.pool_id, 2, 7), (PoolId(-1), 0, 4)]) == 3 + 5 + 4


def test_pinned_and_used_pools_stay() -> None:
    tree = PoolTree()
    add(tree, [1], pin=True)
    used = add(tree, [2])
    assert evict_all(tree, (used.pool_id,)) == []


def test_a_parent_goes_before_an_heir_in_use_only_when_that_frees_something() -> None:
    tree = PoolTree()
    root = add(tree, [1, 2, 3])
    extends = add(tree, [4], root)
    assert evict_all(tree, (extends.pool_id,)) == []
    tree.release(extends.pool_id)
    branches = add(tree, [4], root, at=1)
    assert evict_all(tree, (branches.pool_id,)) == [root.pool_id]
    assert held_cells(tree, residents(tree)) == 2


def test_cells_of_a_released_middle_are_counted_with_their_owners() -> None:
    tree = PoolTree()
    root = add(tree, [1, 2, 3])
    middle = add(tree, [4, 5], root)
    leaf = add(tree, [6], middle, at=4)
    assert held_cells(tree, residents(tree)) == 3 + 2 + 1
    assert held_cells(tree, [leaf]) == 3 + 1 + 1
    tree.set_residency(middle.pool_id, "cold")
    assert held_cells(tree, residents(tree)) == 3 + 1 + 1
    assert choose_victim(tree, residents(tree), ()) is leaf


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 4), st.booleans()), max_size=12))
def test_held_cells_are_the_size_of_the_union(steps: list[tuple[int, int, int, bool]]) -> None:
    tree = PoolTree()
    pools: list[Pool] = []
    for n, (i, at, n_own, resident) in enumerate(steps):
        parent = pools[i] if i < len(pools) else None
        at_pos = min(at, parent.prefix_len) if parent is not None else None
        pool = add(tree, [100 * n + k for k in range(n_own)], parent, at_pos)
        pools.append(pool)
        if not resident:
            tree.set_residency(pool.pool_id, "cold")

    def cells(pool: Pool) -> set[tuple[int, int]]:
        held, end, owner = set(), pool.prefix_len, pool
        while True:
            held |= {(int(owner.pool_id), p) for p in range(owner.branch_pos, end)}
            end = min(end, owner.branch_pos)
            if owner.is_root:
                return held
            owner = tree.get(owner.parent)

    left = residents(tree)
    assert held_cells(tree, left) == len(set().union(*(cells(pool) for pool in left)))
    while (victim := choose_victim(tree, residents(tree), ())) is not None:
        before = held_cells(tree, residents(tree))
        tree.set_residency(victim.pool_id, "cold")
        assert held_cells(tree, residents(tree)) < before
    assert residents(tree) == []
