"""The engine's speed as a function of its load: recursive least squares over windows of half a second.

    seconds per accepted token and session  =  a + b * n_decoding + c * kv_tokens + d * prefill_tokens_per_s

Fitted with forgetting 0.998. Coefficients below zero are set to zero and the others adjusted to that. Ready after 6
windows with 2 different numbers of decoders. A window further than 5 sigma off is skipped; three in a row mean that
the machine changed: then the fit starts to trust the new windows more than the old ones.

Windows are counted in wall time with everything in them, prompts of others included. So a stall is explained by its
prefill, and does not make the machine look as if it carried fewer sessions.

How long sessions decoded in a window is measured where it can be (``decoding_s``). Turns are often shorter than a
window: states at its ends alone would take a turn that ended inside for a whole one, and the fit would see a machine on
which each session costs as much as all there were. And who decodes shares with himself at least: ``n_decoding`` is
never below 1, also where the only session decoded for half of the window.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from polykv_proxy.gate.facts import EngineFacts, SessionFacts
from polykv_proxy.ids import SessionId

FORGETTING = 0.998
WINDOW_S = 0.5
MIN_WINDOWS = 6
OUTLIER_SIGMAS = 5.0
MAX_OUTLIERS = 3
MIN_DECODING_S = 0.1
"""A window with less than that is one with the next: of a few tokens no speed can be told."""
DISTINCT_N = 0.5
"""Two windows have different numbers of decoders when they are at least so far apart."""

SCALES = (1.0, 1.0, 1e4, 1e2)
"""Units of the four features, so that they are of about one size."""
INITIAL_VARIANCE = 100.0
REOPEN_VARIANCE = 1.0
MAX_VARIANCE = 1000.0
SIGMA_ALPHA = 0.05
PREFILL_TAU_S = 10.0

Vector = list[float]


@dataclass(slots=True)
class LeastSquares:
    """Recursive least squares with forgetting. ``theta`` may be negative; ``nonnegative`` is not."""

    n: int
    theta: Vector = field(default_factory=list)
    p: list[Vector] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.theta = [0.0] * self.n
        self.open(INITIAL_VARIANCE)

    def open(self, variance: float) -> None:
        """Forget how sure it was; keep what it thinks."""
        self.p = [[variance if i == j else 0.0 for j in range(self.n)] for i in range(self.n)]

    def update(self, x: Vector, y: float) -> None:
        px = [sum(row[j] * x[j] for j in range(self.n)) for row in self.p]
        s = FORGETTING + sum(x[i] * px[i] for i in range(self.n))
        gain = [value / s for value in px]
        error = y - sum(t * v for t, v in zip(self.theta, x, strict=True))
        self.theta = [t + g * error for t, g in zip(self.theta, gain, strict=True)]
        self.p = [[(self.p[i][j] - gain[i] * px[j]) / FORGETTING for j in range(self.n)] for i in range(self.n)]
        # Without variety in x the variance of what was not seen would grow for ever.
        top = max(self.p[i][i] for i in range(self.n))
        if top > MAX_VARIANCE:
            self.p = [[value * MAX_VARIANCE / top for value in row] for row in self.p]

    def nonnegative(self) -> Vector:
        """The most likely coefficients of which none is below zero: one after the other is fixed at zero."""
        theta, p = list(self.theta), [list(row) for row in self.p]
        fixed: set[int] = set()
        while True:
            below = [i for i in range(self.n) if i not in fixed and theta[i] < 0]
            if not below:
                return [0.0 if i in fixed else theta[i] for i in range(self.n)]
            i = min(below, key=lambda k: theta[k])
            column, variance, value = [row[i] for row in p], p[i][i], theta[i]
            if variance > 0:
                theta = [t - c / variance * value for t, c in zip(theta, column, strict=True)]
                p = [[p[r][k] - column[r] * column[k] / variance for k in range(self.n)] for r in range(self.n)]
            fixed.add(i)


@dataclass(slots=True)
class Roofline:
    """``prefill_tokens_per_s``: the recent average. ``n_windows``: windows folded in."""

    squares: LeastSquares = field(default_factory=lambda: LeastSquares(4))
    n_windows: int = 0
    n_skipped: int = 0
    prefill_tokens_per_s: float = 0.0
    _coefficients: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    _variance: float = 0.0
    _n_outliers: int = 0
    _n_low: float = math.inf
    _n_high: float = -math.inf
    _last: EngineFacts | None = None
    _before: dict[SessionId, SessionFacts] = field(default_factory=dict)
    _dt_s: float = 0.0
    _n_s: float = 0.0
    _kv_s: float = 0.0
    _tokens: int = 0
    _prefilled: int = 0

    @property
    def ready(self) -> bool:
        return self.n_windows >= MIN_WINDOWS and self._n_high - self._n_low >= DISTINCT_N

    @property
    def coefficients(self) -> tuple[float, ...]:
        """a, b, c, d in seconds per unit of each feature."""
        return self._coefficients

    def seconds_per_token(self, n: float, kv_tokens: float, prefill_tokens_per_s: float) -> float | None:
        """None: not ready. ``n``: decoders, with the one in question."""
        if not self.ready:
            return None
        a, b, c, d = self.coefficients
        return a + b * n + c * kv_tokens + d * prefill_tokens_per_s

    def tps(self, n: float, kv_tokens: float, prefill_tokens_per_s: float) -> float | None:
        seconds = self.seconds_per_token(n, kv_tokens, prefill_tokens_per_s)
        if seconds is None:
            return None
        return 1.0 / seconds if seconds > 0 else None

    def update(self, facts: EngineFacts) -> None:
        """Take in a reading; a window is folded in when it is full."""
        last = self._last
        if last is not None and last.epoch == facts.epoch and facts.measured_s <= last.measured_s:
            return
        now = {s.session_id: s for s in facts.sessions}
        if last is None or last.epoch != facts.epoch:
            self._clear()
        else:
            self._add(last, facts, now)
        self._last, self._before = facts, now

    def _add(self, last: EngineFacts, facts: EngineFacts, now: dict[SessionId, SessionFacts]) -> None:
        dt_s = facts.measured_s - last.measured_s
        n_prefilled = max(0, facts.n_prefilled - last.n_prefilled)
        weight = 1.0 - math.exp(-dt_s / PREFILL_TAU_S)
        self.prefill_tokens_per_s += weight * (n_prefilled / dt_s - self.prefill_tokens_per_s)
        self._dt_s += dt_s
        self._prefilled += n_prefilled
        for session_id, session in now.items():
            if (before := self._before.get(session_id)) is not None:
                decoding_s = _decoding_s(before, session, dt_s)
                self._n_s += decoding_s
                self._kv_s += decoding_s * (before.ctx_used + session.ctx_used) / 2
                self._tokens += max(0, session.n_decoded - before.n_decoded)
        if self._dt_s < WINDOW_S:
            return
        if self._tokens > 0 and self._n_s >= MIN_DECODING_S:
            n = max(1.0, self._n_s / self._dt_s)
            features = (1.0, n, n * self._kv_s / self._n_s, self._prefilled / self._dt_s)
            self.fold(features, self._n_s / self._tokens)
            self._clear()
        elif self._n_s <= 0 or not (self._tokens or self._prefilled):
            self._clear()  # nobody decoded, or nothing moved at all: no window
        # else: a stall, or a turn that just began; it belongs to the window in which the next tokens come

    def _clear(self) -> None:
        self._dt_s = self._n_s = self._kv_s = 0.0
        self._tokens = self._prefilled = 0

    def fold(self, features: Sequence[float], seconds_per_token: float) -> None:
        """One window. ``features``: 1, n_decoding, kv_tokens, prefill_tokens_per_s."""
        x = [value / scale for value, scale in zip(features, SCALES, strict=True)]
        error = seconds_per_token - sum(t * v for t, v in zip(self.squares.theta, x, strict=True))
        if self.ready and self._variance > 0 and abs(error) > OUTLIER_SIGMAS * math.sqrt(self._variance):
            self._n_outliers += 1
            if self._n_outliers < MAX_OUTLIERS:
                self.n_skipped += 1
                return
            self.squares.open(REOPEN_VARIANCE)
            self._variance = error * error
        self._n_outliers = 0
        if self.n_windows >= MIN_WINDOWS // 2:  # the first errors are those of a fit that knows nothing yet
            self._variance += SIGMA_ALPHA * (error * error - self._variance) if self._variance else error * error
        self.squares.update(x, seconds_per_token)
        self._coefficients = tuple(t / s for t, s in zip(self.squares.nonnegative(), SCALES, strict=True))
        self.n_windows += 1
        self._n_low, self._n_high = min(self._n_low, features[1]), max(self._n_high, features[1])


def _decoding_s(before: SessionFacts, after: SessionFacts, dt_s: float) -> float:
    """How long a session decoded between two readings."""
    if before.decoding_s is not None and after.decoding_s is not None:
        return max(0.0, after.decoding_s - before.decoding_s)
    return dt_s * ((before.state == "decoding") + (after.state == "decoding")) / 2


@dataclass(slots=True)
class Duty:
    """Which share of the live sessions wants to decode, on average over a minute. Held turns want to."""

    tau_s: float = 60.0
    sum: float = 0.0
    weight: float = 0.0
    _last_s: float | None = None

    @property
    def value(self) -> float:
        """1 until something was seen: everybody at once."""
        return min(1.0, self.sum / self.weight) if self.weight > 0 else 1.0

    def update(self, n_wanting: int, n_live: int, now_s: float) -> None:
        if self._last_s is not None and n_live > 0 and now_s > self._last_s:
            a = 1.0 - math.exp(-(now_s - self._last_s) / self.tau_s)
            self.sum += a * (n_wanting / n_live - self.sum)
            self.weight += a * (1.0 - self.weight)
        self._last_s = now_s


def demand(n_live: int, duty: float, z: float) -> float:
    """How many of the live sessions decode at once, at a quantile: z standard deviations above the mean."""
    return min(float(n_live), n_live * duty + z * math.sqrt(n_live * duty * (1.0 - duty)))
