"""Where sequences lie in the cache, and which of them is worth moving down. Pure.

Every decode scans up to the highest used cell, used or not. New tokens take the lowest free cells, and what is there
never moves: so one idle sequence on top of a hole costs as much as if the hole were full. Saved, freed and loaded it
lies in the lowest free cells again.

Shapes:  runs of (start, end, first cell): positions [start, end) lie in cells from the first one on
Units:   cells; ``hi`` is the highest used cell + 1
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

Runs = Sequence[tuple[int, int, int]]
Who = TypeVar("Who", bound=Hashable)

MIN_GAIN_CELLS = 32
"""Less is not worth two calls to the engine."""


class Move(NamedTuple, Generic[Who]):
    """``hi_after``: what the highest used cell + 1 is then."""

    who: Who
    hi: int
    hi_after: int


def is_sparse(n_used: int, hi: int) -> bool:
    """Whether the highest used cell is so far above the number of used cells that it is worth a look."""
    return hi > n_used + n_used // 4 + 256


def plan_move(movable: Mapping[Who, tuple[Runs, int]], others: Iterable[Runs]) -> Move[Who] | None:
    """Give the sequence that lowers the highest used cell most when it is saved, freed and loaded; None: nobody does.

    ``movable``: runs of each that may move, and from which position on it would: what is in front stays where it is.
    Who shares a cell of that with anybody else frees nothing, and does not move.
    """
    fixed = [_stretches(runs, 0) for runs in others]
    own = {who: _stretches(runs, start) for who, (runs, start) in movable.items()}
    front = {who: _stretches(_in_front(runs, start), 0) for who, (runs, start) in movable.items()}
    hi = _hi([*fixed, *own.values(), *front.values()])
    best: Move[Who] | None = None
    for who, mine in own.items():
        rest = _merged([*fixed, *front.values(), *(cells for other, cells in own.items() if other != who)])
        n_cells = sum(end - begin for begin, end in mine)
        if not n_cells or _meet(mine, rest):
            continue
        hi_after = max(_hi([rest]), _top_of_lowest_free(rest, n_cells))
        if hi - hi_after >= MIN_GAIN_CELLS and (best is None or hi_after < best.hi_after):
            best = Move(who, hi, hi_after)
    return best


Cells = list[tuple[int, int]]
"""Stretches [begin, end) of cells."""


def _stretches(runs: Runs, start: int) -> Cells:
    """The cells of positions from ``start`` on."""
    return [(cell + max(0, start - first), cell + end - first) for first, end, cell in runs if end > start]


def _in_front(runs: Runs, start: int) -> Runs:
    return [(first, min(end, start), cell) for first, end, cell in runs if first < start]


def _merged(parts: Iterable[Cells]) -> Cells:
    merged: Cells = []
    for begin, end in sorted(stretch for part in parts for stretch in part):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _hi(parts: Iterable[Cells]) -> int:
    return max((end for part in parts for _, end in part), default=0)


def _meet(some: Cells, merged: Cells) -> bool:
    return any(begin < end_2 and begin_2 < end for begin, end in some for begin_2, end_2 in merged)


def _top_of_lowest_free(merged: Cells, n_cells: int) -> int:
    """The highest cell + 1 when so many cells are taken from below."""
    at = 0
    for begin, end in merged:
        if begin - at >= n_cells:
            return at + n_cells
        n_cells -= begin - at
        at = end
    return at + n_cells
