"""Which sequence moves down: the prediction against a cache of numbered cells that really does it."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.tree.placement import MIN_GAIN_CELLS, Move, is_sparse, plan_move


def test_a_sequence_on_top_of_a_hole_moves_into_it():
    movable = {"low": ([(0, 100, 0)], 0), "top": ([(0, 300, 1000)], 0)}
    assert plan_move(movable, []) == Move("top", 1300, 400)


def test_the_part_that_it_shares_stays_where_it_is():
    parent, child = [(0, 100, 0)], [(0, 60, 0), (60, 400, 900)]
    assert plan_move({"child": (child, 60)}, [parent]) == Move("child", 1240, 440)


def test_the_hole_that_it_leaves_itself_counts():
    assert plan_move({"a": ([(0, 500, 100)], 0)}, []) == Move("a", 600, 500)


def test_holes_are_filled_from_below_whatever_their_size():
    others = [[(0, 10, 50)], [(0, 10, 100)], [(0, 10, 150)]]
    assert plan_move({"a": ([(0, 135, 900)], 0)}, others) == Move("a", 1035, 165)


def test_nobody_moves_for_nothing():
    assert plan_move({}, []) is None
    assert plan_move({"a": ([(0, 500, 0)], 0)}, []) is None
    assert plan_move({"a": ([(0, 500, MIN_GAIN_CELLS - 1)], 0)}, []) is None
    assert plan_move({"a": ([(0, 500, MIN_GAIN_CELLS)], 0)}, []) is not None
    assert plan_move({"a": ([(0, 100, 500)], 0)}, [[(0, 10, 2000)]]) is None  # who is on top cannot move
    assert plan_move({"a": ([(0, 100, 500)], 0)}, [[(0, 50, 500)]]) is None  # somebody shares its cells
    assert plan_move({"a": ([(0, 100, 500)], 100)}, []) is None  # it owns nothing


def test_two_that_share_their_cells_do_not_move_each_other():
    runs = [(0, 100, 500)]
    assert plan_move({"a": (runs, 0), "b": (runs, 0)}, []) is None


def test_sparse_is_more_than_a_quarter_and_a_step_of_the_scan():
    assert [is_sparse(n, hi) for n, hi in ((0, 256), (0, 257), (1000, 1506), (1000, 1507))] == [
        False,
        True,
        False,
        True,
    ]


@given(st.lists(st.tuples(st.integers(1, 80), st.booleans()), min_size=1, max_size=8), st.integers(0, 2**32))
def test_the_prediction_is_what_happens(lengths, seed):
    """Sequences one after the other, some of which are gone; then the one that is named is taken out and put back."""
    at, lies, gone = 0, {}, []
    for who, (n, stays) in enumerate(lengths):
        (lies.__setitem__(who, [(0, n, at)]) if stays else gone.append(who))
        at += n
    fixed = {who for who in lies if (seed >> who) & 1}
    move = plan_move({who: (runs, 0) for who, runs in lies.items() if who not in fixed}, [lies[who] for who in fixed])
    used = {who: list(range(runs[0][2], runs[0][2] + runs[0][1])) for who, runs in lies.items()}
    hi = max((cells[-1] + 1 for cells in used.values()), default=0)

    def hi_after(who: int) -> int:
        taken = {cell for other, cells in used.items() if other != who for cell in cells}
        free = [cell for cell in range(1000) if cell not in taken][: len(used[who])]
        return max([*taken, *free]) + 1

    best = min((hi_after(who) for who in lies if who not in fixed), default=hi)
    if move is None:
        assert hi - best < MIN_GAIN_CELLS
    else:
        assert (move.hi, move.hi_after, hi_after(move.who)) == (hi, best, best)
