"""The longest-prefix index: shape and cost. Its answers are held against a naive model in the state machine."""

import random

import pytest

from polykv_proxy.errors import InvariantError
from polykv_proxy.ids import PoolId
from polykv_proxy.tree.index import Key, PrefixIndex
from polykv_proxy.tree.prefix import Tokens
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


@pytest.mark.parametrize("seed", range(8))
def test_random_orders_answer_like_a_search_from_end_to_end(seed: int) -> None:
    """Insert, re-rank and remove at random; ask at every position of every pool; look at the shape too."""
    rng = random.Random(seed)
    index = PrefixIndex()
    known: dict[int, tuple[Tokens, Key]] = {}
    for pool_id in range(120):
        tokens = toks(*(rng.randrange(2) for _ in range(rng.randrange(1, 9))))
        known[pool_id] = tokens, key(pool_id, rng.randrange(3))
        index.insert(known[pool_id][1], tokens.tobytes(), parent=None, branch_pos=0)
        for _ in range(3):
            moved = rng.choice(list(known))
            known[moved] = known[moved][0], known[moved][1]._replace(rank=rng.randrange(4))
            index.rekey(known[moved][1])
        if rng.random() < 0.7:
            gone = rng.choice(list(known))
            del known[gone]
            index.remove(PoolId(gone))
        check_shape(index)
        for tokens, _ in known.values():
            for n in range(1, len(tokens) + 1):
                through = {k: len(t) == n for t, k in known.values() if t[:n] == tokens[:n]}
                whole = [k for k, ends in through.items() if ends]
                found = index.longest((tokens[:n] + toks(9)).tobytes())
                assert found is not None
                assert (found.pool_id, found.n_tokens, found.whole) == (min(whole or through).pool_id, n, bool(whole))


def check_shape(index: PrefixIndex) -> None:
    """No node without a reason, no heap that grows with what has passed."""
    n_nodes, waiting = 0, [index._root]
    while waiting:
        node = waiting.pop()
        n_nodes += 1
        waiting += node.children.values()
        assert node is index._root or node.pools or len(node.children) > 1
        assert len(node.heap) <= 2 * len(node.children) + 8
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


def test_releasing_in_the_order_of_ids_stays_cheap_below_one_wide_node() -> None:
    """Always the best pool leaves: the next best must come out of a heap, not of a walk over all children."""
    index = PrefixIndex()
    n = 20_000
    inserted = sum(add(index, pool_id, toks(1, 1000 + pool_id, 3)) for pool_id in range(n))
    moved = sum(index.rekey(key(pool_id, rank=0)) for pool_id in range(n))
    removed = sum(index.remove(PoolId(pool_id)) for pool_id in range(n))
    assert inserted <= 5 * n
    assert moved <= 5 * n
    assert removed <= 5 * n


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
