"""Ownership of cells, against a model that keeps every cell as a set member."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.tree.accounting import SessionCells, account, copied_cells, kv_bytes
from polykv_proxy.tree.tree import PoolTree
from tests.tree.make import add_root, extend, settle, toks

Cell = tuple[PoolId, int]


def session(pool_id: int | None, shared: int, suffix: int) -> SessionCells:
    return SessionCells(
        session_id=SessionId("s"),
        pool_id=None if pool_id is None else PoolId(pool_id),
        pool_n_tokens=shared,
        suffix_n_tokens=suffix,
    )


def cells_of(tree: PoolTree, pool_id: PoolId, n_tokens: int) -> set[Cell]:
    """Every cell of the first n tokens of a pool, by owner and position."""
    pool, cells = tree.get(pool_id), set()
    for pos in reversed(range(n_tokens)):
        while pos < pool.branch_pos:
            pool = tree.get(pool.parent)
        cells.add((pool.pool_id, pos))
    return cells


def test_pool_family_counts_every_cell_once() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(100)))
    task = extend(tree, root.pool_id, toks(range(40)))
    branch = extend(tree, root.pool_id, toks(range(30)), branch_pos=60)
    for seq, pool in enumerate((root, task, branch)):
        settle(tree, pool, "resident", seq)
    agents = [session(task.pool_id, 140, 10), session(task.pool_id, 140, 12), session(branch.pool_id, 90, 5)]
    accounts = account(list(tree), agents)
    assert accounts.own_cells == {root.pool_id: 100, task.pool_id: 40, branch.pool_id: 30}
    assert accounts.subtree_cells == {root.pool_id: 197, task.pool_id: 62, branch.pool_id: 35}
    assert accounts.total_cells == 197
    assert copied_cells(tree, agents) == 100 + 140 + 90 + 150 + 152 + 95


def test_cold_pool_owns_what_a_resident_descendant_holds() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(100)))
    branch = extend(tree, root.pool_id, toks(range(30)), branch_pos=60)
    assert account(list(tree)).total_cells == 0
    settle(tree, branch, "resident")
    assert account(list(tree)).own_cells == {root.pool_id: 60, branch.pool_id: 30}


def test_session_keeps_the_cells_of_an_evicted_pool() -> None:
    tree = PoolTree()
    root = add_root(tree, toks(range(100)))
    accounts = account(list(tree), [session(root.pool_id, 80, 7)])
    assert (accounts.own_cells[root.pool_id], accounts.total_cells) == (80, 87)


def test_session_without_a_pool_in_the_tree_is_counted_apart() -> None:
    accounts = account([], [session(None, 0, 9), session(77, 5, 1)])
    assert (accounts.unpooled_cells, accounts.total_cells) == (15, 15)


def test_unknown_bytes_stay_unknown() -> None:
    assert kv_bytes(10, None) is None
    assert kv_bytes(10, 46080.0) == 460800


@given(st.data())
def test_own_cells_are_the_union_of_what_sequences_hold(data: st.DataObject) -> None:
    tree = PoolTree()
    add_root(tree, toks(range(6)))
    for _ in range(data.draw(st.integers(0, 8))):
        parent = data.draw(st.sampled_from(list(tree)))
        own = toks(*data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
        extend(tree, parent.pool_id, own, branch_pos=data.draw(st.integers(1, parent.prefix_len)))
    held: set[Cell] = set()
    for pool in tree:
        if data.draw(st.booleans()):
            settle(tree, pool, "resident")
            held |= cells_of(tree, pool.pool_id, pool.prefix_len)
    agents = []
    for _ in range(data.draw(st.integers(0, 3))):
        pool = data.draw(st.sampled_from(list(tree)))
        shared = data.draw(st.integers(1, pool.prefix_len))
        agents.append(session(pool.pool_id, shared, data.draw(st.integers(0, 5))))
        held |= cells_of(tree, pool.pool_id, shared)
    accounts = account(list(tree), agents)
    for pool in tree:
        assert accounts.own_cells[pool.pool_id] == sum(owner == pool.pool_id for owner, _ in held)
        below = {p.pool_id for p in tree.subtree(pool.pool_id)}
        suffixes = sum(agent.suffix_n_tokens for agent in agents if agent.pool_id in below)
        assert accounts.subtree_cells[pool.pool_id] == suffixes + sum(owner in below for owner, _ in held)
    assert accounts.total_cells == len(held) + sum(agent.suffix_n_tokens for agent in agents)
