"""What idle cells cost those who decode, learned from the stats that the heartbeat reads anyway. Pure.

In a unified cache a decode step scans up to the highest used cell, so its time is taken to be ``a + b * hi``, with its
own a and b for each number of slots that decode together. Both are fitted by least squares over pairs of looks between
which nothing but decoding happened. Older pairs count less, since a machine gets busier and quieter.

The tax is the share of a step's time that is due to cells beyond those that the decoding slots hold themselves, pools
they share included. It is not known until ``hi`` has varied enough for a slope to be told from noise.

Units:   seconds per decode step (one token for each slot that decodes); cells
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polykv_proxy.upstream import Stats

MIN_STEPS = 8
"""Decode steps between two looks: fewer tell the pace of the looks rather than that of the steps."""
MIN_SAMPLES = 8
MIN_SPREAD_CELLS = 256
"""A decode scans in steps of so many cells: ``hi`` must have a standard deviation of as much."""
HALF_LIFE_SAMPLES = 256
MAX_RELATIVE_ERROR = 0.5
"""Of the slope. A worse one is not told, unless it is as good as none:"""
NO_TAX = 0.02
"""what ``hi`` did by so far changed the time of a step by less than this share of it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """``hi``: the mean of both looks."""

    n_decoding: int
    hi: float
    step_s: float


def take_sample(before: Stats, after: Stats) -> Sample | None:
    """What two looks say of the time of a decode step; None when more than decoding happened in between."""
    if before.epoch != after.epoch or before.ts is None or after.ts is None or before.cells is None:
        return None
    if after.cells is None or before.cells.hi is None or after.cells.hi is None or not after.kv_unified:
        return None
    if before.service.state != "idle" or after.service.state != "idle" or before.n_prompt_cum != after.n_prompt_cum:
        return None
    tasks = [{(s.id, s.id_task) for s in look.slots if not s.idle} for look in (before, after)]
    if tasks[0] != tasks[1] or not tasks[0]:
        return None
    if any(s.state != "generating" for look in (before, after) for s in look.slots if not s.idle):
        return None
    n_decoding, seconds = len(tasks[0]), after.ts - before.ts
    n_steps = (after.n_decoded_cum - before.n_decoded_cum) / n_decoding
    if n_steps < MIN_STEPS or seconds <= 0:
        return None
    return Sample(n_decoding, (before.cells.hi + after.cells.hi) / 2, seconds / n_steps)


class Line:
    """A weighted least squares fit of ``y = a + b * x`` that forgets."""

    def __init__(self) -> None:
        self._n = 0
        self._w = self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def add(self, x: float, y: float) -> None:
        keep = 0.5 ** (1 / HALF_LIFE_SAMPLES)
        self._n += 1
        self._w, self._x, self._y = keep * self._w + 1, keep * self._x + x, keep * self._y + y
        self._xx, self._xy, self._yy = keep * self._xx + x * x, keep * self._xy + x * y, keep * self._yy + y * y

    def fit(self) -> tuple[float, float] | None:
        """(a, b), or None while b is not known well."""
        if self._n < MIN_SAMPLES:
            return None
        mean_x, mean_y = self._x / self._w, self._y / self._w
        s_xx = self._xx - self._w * mean_x**2
        if s_xx < self._w * MIN_SPREAD_CELLS**2:
            return None
        s_xy, s_yy = self._xy - self._w * mean_x * mean_y, self._yy - self._w * mean_y**2
        b = s_xy / s_xx
        error = math.sqrt(max(0.0, s_yy - b * s_xy) / (self._w - 2) / s_xx)
        is_flat = (abs(b) + 2 * error) * math.sqrt(s_xx / self._w) <= NO_TAX * mean_y
        if not is_flat and error > MAX_RELATIVE_ERROR * b:
            return None
        b = max(0.0, b)
        return mean_y - b * mean_x, b


class IdleTax:
    """``note`` every look at the engine; ``estimate`` tells the tax of now."""

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}
        self._last: Stats | None = None

    def note(self, stats: Stats) -> None:
        if stats is self._last:
            return
        sample = take_sample(self._last, stats) if self._last is not None else None
        self._last = stats
        if sample is not None:
            self._lines.setdefault(sample.n_decoding, Line()).add(sample.hi, sample.step_s)

    def estimate(self, stats: Stats, n_busy_cells: int) -> float | None:
        """The share of a decode step's time, 0 to 1; None while it is not known, or nobody decodes.

        ``n_busy_cells``: cells that the slots at work hold, shared ones once.
        """
        n_decoding = sum(slot.state == "generating" for slot in stats.slots)
        return self.of(n_decoding, stats.cells.hi if stats.cells is not None else None, n_busy_cells)

    def of(self, n_decoding: int, hi: int | None, n_busy_cells: int) -> float | None:
        """The same for any number of slots that decode together."""
        line = self._lines.get(n_decoding)
        fitted = line.fit() if line is not None else None
        if fitted is None or hi is None:
            return None
        a, b = fitted
        step_s = a + b * hi
        return min(1.0, b * max(0, hi - n_busy_cells) / step_s) if step_s > 0 else None

    def known(self) -> Sequence[int]:
        """Numbers of decoding slots for which something is known."""
        return [n for n, line in sorted(self._lines.items()) if line.fit() is not None]
