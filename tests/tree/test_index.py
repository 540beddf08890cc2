"""The longest-prefix index: shape and cost. Its answers are held against a naive model in the state machine."""

import random

import pytest

from polykv_proxy.errors import InvariantError
from polykv_proxy.ids import PoolId
from polykv_proxy.tree import index as index_module
from polykv_proxy.tree import run as run_module
from polykv_proxy.tree.index import MAX_CHANGES, Key, PrefixIndex
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.tree.run import NOBODY
from tests.tree.make import toks


def key(pool_id: int, depth: int = 0, rank: int = 3) -> Key:
    return Key(rank, depth, PoolId(pool_id))


def add(index: PrefixIndex, pool_id: int, tokens: Tokens, depth: int = 0) -> int:
    return index.insert(key(pool_id, depth), tokens.tobytes(), parent=None, branch_pos=0)


def test_longest_stops_inside_a_run_and_names_the_pool() -> None:
    index = PrefixIndex()
    add(index, 1, toks(range(100)))
    found = index.longest(toks(range(40), 7, 7).tobytes())
    assert found is not None
    assert (found.pool_id, found.n_tokens, found.whole) == (1, 40, False)


def test_index_is_empty_again_after_everything_left() -> None:
    index = PrefixIndex()
    rng = random.Random(1)
    runs = [toks(*(rng.randrange(2) for _ in range(rng.randrange(1, 12)))) for _ in range(300)]
    for pool_id, tokens in enumerate(runs):
        add(index, pool_id, tokens)
    order = list(range(300))
    rng.shuffle(order)
    for pool_id in order:
        index.remove(PoolId(pool_id))
        assert PoolId(pool_id) not in index
    assert len(index) == 0
    assert index.longest(runs[0].tobytes()) is None


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are split and joined, and ways straightened, after a few pools."""
    monkeypatch.setattr(run_module, "BLOCK", 3)
    monkeypatch.setattr(index_module, "MAX_CHANGES", 2)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("layout", ["as_it_is", "short_runs"])
def test_random_orders_answer_like_a_search_from_end_to_end(
    layout: str, seed: int, request: pytest.FixtureRequest
) -> None:
    """Insert, re-rank and remove at random; ask at every position of every pool; look at the shape too."""
    if layout == "short_runs":
        request.getfixturevalue("short_runs")
    rng = random.Random(seed)
    index = PrefixIndex()
    known: dict[int, tuple[Tokens, Key]] = {}
    for pool_id in range(120):
        parent, branch_pos, inherited = None, 0, toks()
        if known and rng.random() < 0.5:
            parent = PoolId(rng.choice(list(known)))
            branch_pos = rng.randrange(1, len(known[parent][0]) + 1)
            inherited = known[parent][0][:branch_pos]
        own = toks(*(rng.randrange(2) for _ in range(rng.randrange(1, 9))))
        known[pool_id] = inherited + own, key(pool_id, rng.randrange(3))
        index.insert(known[pool_id][1], own.tobytes(), parent=parent, branch_pos=branch_pos)
        for _ in range(3):
            moved = rng.choice(list(known))
            known[moved] = known[moved][0], known[moved][1]._replace(rank=rng.randrange(4))
            index.rekey(known[moved][1])
        if rng.random() < 0.7:
            gone = rng.choice(list(known))
            del known[gone]
            index.remove(PoolId(gone))
        check_shape(index)
        for asked, (tokens, _) in known.items():
            for n in range(1, len(tokens) + 1):
                through = {k: len(t) == n for t, k in known.values() if t[:n] == tokens[:n]}
                whole = [k for k, ends in through.items() if ends]
                found = index.longest((tokens[:n] + toks(9)).tobytes())
                assert found is not None
                assert (found.pool_id, found.n_tokens, found.whole) == (min(whole or through).pool_id, n, bool(whole))
                assert index.best_through(PoolId(asked), n) == min(through)


def check_shape(index: PrefixIndex) -> None:
    """No node without a reason, every best the best, no heap that grows with what has passed."""
    n_nodes, waiting = 0, [index._trunk]
    while waiting:
        run = waiting.pop()
        nodes = [node for block in run.blocks for node in block.nodes]
        n_nodes += len(nodes)
        assert run.end == nodes[-1].end
        assert [node.end for node in nodes] == sorted({node.end for node in nodes})
        assert run.best == min(node.own for node in nodes)
        for block in run.blocks:
            assert block.run is run
            assert 0 < len(block.nodes) <= run_module.BLOCK
            assert block.best == min(node.own for node in block.nodes)
        for node in nodes:
            assert node is index._root or node.pools or len(node.sides) + (node is not nodes[-1]) > 1
            assert node.own == min([NOBODY, *node.pools, *(side.best for side in node.sides.values())])
            assert len(node.heap) <= 2 * len(node.sides) + 10
            for first, side in node.sides.items():
                assert (side.first, side.start, side.top) == (first, node.end, node)
                waiting.append(side)
    assert n_nodes <= 2 * len(index) + 1


def test_ten_thousand_pools_cost_a_look_up_no_more_than_ten() -> None:
    """A prompt passes one node per place where pools part, not one per pool."""
    shared = toks(range(500))
    steps = {}
    for n_pools in (10, 10_000):
        index = PrefixIndex()
        for pool_id in range(n_pools):
            add(index, pool_id, shared + toks(1000 + pool_id, range(20)))
        found = index.longest((shared + toks(1000 + 7, range(20), 5)).tobytes())
        assert found is not None
        assert (found.pool_id, found.n_tokens, found.whole) == (7, 521, True)
        steps[n_pools] = found.n_steps
    assert steps[10] == steps[10_000] == 2


def comb(index: PrefixIndex, order: list[int], path: Tokens) -> None:
    """Pool 0 is the path; the others leave it, each at another position."""
    add(index, 0, path)
    for pool_id, at in enumerate(order, 1):
        index.insert(key(pool_id, 1), toks(50_000 + pool_id, 7).tobytes(), parent=PoolId(0), branch_pos=at)


def zigzag(index: PrefixIndex, n: int, step: int) -> None:
    """Each pool goes ``step`` tokens further along one path than the one before, and leaves it."""
    for i in range(n):
        own = toks(range(i * step, (i + 1) * step), 50_000 + i, 7)
        index.insert(key(i, i), own.tobytes(), parent=PoolId(i - 1) if i else None, branch_pos=i * step)


@pytest.mark.parametrize("order", [range(1, 4000), range(3999, 0, -1), random.Random(3).sample(range(1, 4000), 3999)])
def test_pools_that_leave_one_long_path_cost_a_look_up_nothing(order: list[int]) -> None:
    index = PrefixIndex()
    path = toks(range(4000))
    comb(index, list(order), path)
    check_shape(index)
    for at in (1, 2, 1999, 3999):
        pool_id = list(order).index(at) + 1
        found = index.longest((path[:at] + toks(50_000 + pool_id, 7, 8)).tobytes())
        assert found is not None
        assert (found.pool_id, found.n_tokens, found.whole) == (pool_id, at + 2, True)
        assert found.n_steps == 2
    found = index.longest((path + toks(9)).tobytes())
    assert found is not None
    assert (found.pool_id, found.n_tokens, found.whole, found.n_steps) == (0, 4000, True, 1)


def test_a_path_that_nobody_went_first_is_made_one_run_now_and_then() -> None:
    """Every pool of a zigzag hangs on the last one's way; its own way may not change runs at each of them."""
    index = PrefixIndex()
    n, step = 3000, 3
    zigzag(index, n, step)
    check_shape(index)
    for i in (0, 1, n // 2, n - 2, n - 1):
        found = index.longest(toks(range((i + 1) * step), 50_000 + i, 7, 8).tobytes())
        assert found is not None
        assert (found.pool_id, found.n_tokens, found.whole) == (i, (i + 1) * step + 2, True)
        assert found.n_steps <= MAX_CHANGES + 2


@pytest.mark.parametrize("shape", ["comb", "zigzag"])
def test_changes_along_one_long_path_do_not_walk_it(shape: str) -> None:
    """Worst for the bests: each change is to the one that was or becomes the best of the whole path."""
    index = PrefixIndex()
    n = 4000
    if shape == "comb":
        comb(index, list(range(n - 1, 0, -1)), toks(range(n)))
    else:
        zigzag(index, n, 1)
    n_moved = sum(index.rekey(key(pool_id, rank=0)) for pool_id in range(n - 1, -1, -1))
    n_removed = sum(index.remove(PoolId(pool_id)) for pool_id in range(n))
    assert len(index) == 0
    at_most = 3 * (run_module.BLOCK + n // run_module.BLOCK)  # bests looked at for one change
    assert n_moved <= at_most * n
    assert n_removed <= at_most * n
    assert at_most < n / 8


def test_releasing_in_the_order_of_ids_stays_cheap_below_one_wide_node() -> None:
    """Always the best pool leaves: the next best must come out of a heap, not of a walk over all children."""
    index = PrefixIndex()
    n = 20_000
    inserted = sum(add(index, pool_id, toks(1, 1000 + pool_id, 3)) for pool_id in range(n))
    moved = sum(index.rekey(key(pool_id, rank=0)) for pool_id in range(n))
    removed = sum(index.remove(PoolId(pool_id)) for pool_id in range(n))
    assert inserted <= 5 * n
    assert moved <= 5 * n
    assert removed <= 8 * n


def test_insert_costs_the_own_range_not_the_prefix() -> None:
    """A child hung below a long chain touches the nodes at its branch position only."""
    index = PrefixIndex()
    add(index, 0, toks(range(50)))
    for depth in range(1, 2000):
        own = toks(range(depth, depth + 50))
        n_steps = index.insert(key(depth, depth), own.tobytes(), parent=PoolId(depth - 1), branch_pos=50 * depth)
        assert n_steps <= 5
    found = index.longest(toks(range(50), range(1, 51), range(2, 52), 0).tobytes())
    assert found is not None
    assert (found.pool_id, found.n_tokens, found.whole) == (2, 150, True)


def test_same_tokens_twice_prefer_the_smaller_key() -> None:
    index = PrefixIndex()
    add(index, 5, toks(1, 2), depth=1)
    add(index, 9, toks(1, 2), depth=0)
    for want in (9, 5):
        found = index.longest(toks(1, 2, 3).tobytes())
        assert found is not None
        assert found.pool_id == want
        index.remove(PoolId(want))


def test_best_through_sees_everybody_with_the_same_beginning() -> None:
    index = PrefixIndex()
    add(index, 1, toks(range(10)))
    add(index, 2, toks(range(6), 50))
    index.rekey(key(2, rank=0))
    assert index.best_through(PoolId(1), 6).pool_id == 2
    assert index.best_through(PoolId(1), 7).pool_id == 1


def test_impossible_orders_are_our_bug() -> None:
    index = PrefixIndex()
    add(index, 1, toks(1, 2))
    with pytest.raises(InvariantError):
        add(index, 1, toks(3))
    with pytest.raises(InvariantError):
        index.best_through(PoolId(1), 3)
