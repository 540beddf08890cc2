"""May one more session come in? The decision, from plain numbers, and the answer of ``GET …/capacity``.

In this order; the first that applies is the reason:

1.  a known session: continuation, always.
2.  the context arm: no free stream on a split cache, or ``expected_tokens`` do not fit. Nothing goes past it.
3.  overcommit: past everything below.
4.  guaranteed minimum: the pool has fewer sessions than it is guaranteed. Past everything below.
5.  measurement stale: with a policy, what is not known is never taken for free.
6.  measurement settling.
7.  the KV arm: less free than one more session holds on its own.
8.  the floor arm: the projected mean rate is below the floor.

Without a policy there is no floor: 4, 5, 6 and 8 do not apply.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polykv_proxy.gate.facts import EngineFacts
from polykv_proxy.gate.policy import Policy
from polykv_proxy.gate.rate import Rates
from polykv_proxy.gate.settle import Forecasts, project_measured, project_model

CONTINUATION = "continuation"
NO_STREAM = "no free stream (split cache)"
CONTEXT = "context headroom exhausted"
OVERCOMMIT = "overcommit"
GUARANTEED = "guaranteed minimum"
STALE = "measurement stale"
SETTLING = "measurement settling"
KV = "kv headroom exhausted"
FLOOR = "projected mean tps below floor"
FLOOR_IDLE = "projected mean tps below floor (idle estimate)"
OK = "ok"

HARD = (NO_STREAM, CONTEXT)
REFUSALS = (*HARD, STALE, SETTLING, KV, FLOOR, FLOOR_IDLE)

UNSEEN_SESSION_CELLS = 1024
"""What a session is taken to hold on its own while there is none to go by and none is expected."""
OPEN_AT = 1.05
"""Roofline: closed below the floor, open again from this multiple of it on."""
MAX_HEADROOM = 1024


@dataclass(frozen=True, slots=True)
class Question:
    """``ignore_settling``: who asks has waited for its measurement long enough; admissions that are not measured yet
    count in the projection instead.
    """

    policy: Policy | None
    known: bool = False
    overcommit: bool = False
    prefix_len: int = 0
    expected_tokens: int | None = None
    ignore_settling: bool = False


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known at the time.

    ``facts``: the last reading, ``fresh``: young enough to be believed. ``n_pool_sessions``: live in this pool,
    ``n_scope_sessions``: in all pools under its policy, both with those admitted since the reading.
    ``settle_remaining_ms`` None: settled. ``n_unsettled``: admissions that the mean does not have in it yet.
    ``idle_mean_tps``: the last settled mean, as long as it is fresh. ``marginal_cells``: what a session of this scope
    holds on its own, on average. ``roofline``: the rate with so many more sessions. ``is_open``: its hysteresis.
    """

    facts: EngineFacts | None = None
    fresh: bool = False
    rates: Rates = field(default_factory=Rates)
    n_pool_sessions: int = 0
    n_scope_sessions: int = 0
    settle_remaining_ms: float | None = None
    n_at_rest: int = 0
    """Of these between two turns."""
    n_unsettled: int = 0
    drop_tps: float | None = None
    idle_mean_tps: float | None = None
    marginal_cells: float | None = None
    roofline: Callable[[int], float | None] | None = None
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Capacity:
    """The verdict with everything it rests on. None: unknown."""

    can_admit: bool
    reason: str
    guaranteed: bool
    known_session: bool
    settling: bool
    settle_remaining_ms: int | None
    forecasts: Forecasts
    projected_mean_tps_if_admitted: float | None
    projected_idle_estimate: bool
    drop_per_admit_ewma: float | None
    mean_active_tps: float | None
    n_active: int
    n_warming: int
    n_pool_sessions: int
    headroom_sessions: int | None
    kv_headroom_pct: float | None
    compaction_pressure: float | None
    kv_streams_total: int | None
    kv_streams_free: int | None
    kv_cells_per_stream: int | None
    measured_s: float | None
    policy: Policy | None
    n_at_rest: int = 0
    """Sessions under its policy that are between two turns: they are counted on."""

    @property
    def is_hard(self) -> bool:
        """Refused by the context arm: neither a warning nor a longer wait makes it go in."""
        return not self.can_admit and self.reason in HARD

    def to_json(self) -> dict[str, Any]:
        policy = self.policy
        return {
            "can_admit": self.can_admit,
            "reason": self.reason,
            "projected_mean_tps_if_admitted": _rounded(self.projected_mean_tps_if_admitted),
            "projected_mean_tps_model": _rounded(self.forecasts.model),
            "projected_mean_tps_measured": _rounded(self.forecasts.measured),
            "projected_mean_tps_roofline": _rounded(self.forecasts.roofline),
            "projected_idle_estimate": self.projected_idle_estimate,
            "drop_per_admit_ewma": _rounded(self.drop_per_admit_ewma),
            "mean_active_tps": _rounded(self.mean_active_tps),
            "n_active": self.n_active,
            "n_warming": self.n_warming,
            "n_pool_sessions": self.n_pool_sessions,
            "guaranteed": self.guaranteed,
            "known_session": self.known_session,
            "settling": self.settling,
            "settle_remaining_ms": self.settle_remaining_ms,
            "headroom_sessions": self.headroom_sessions,
            "kv_headroom_pct": _rounded(self.kv_headroom_pct),
            "compaction_pressure": _rounded(self.compaction_pressure),
            "kv_streams_total": self.kv_streams_total,
            "kv_streams_free": self.kv_streams_free,
            "kv_cells_per_stream": self.kv_cells_per_stream,
            "target_tps_per_session": policy.target_tps_per_session if policy else None,
            "mode": policy.mode if policy else None,
            "estimator": policy.estimator if policy else None,
        }


def decide(question: Question, situation: Situation) -> Capacity:
    policy, rates, facts = question.policy, situation.rates, situation.facts
    projection = Projection(question, situation)
    projected = projection.tps(1)
    settling = situation.settle_remaining_ms is not None
    n_kv = _n_by_kv(question, situation)
    below_guarantee = policy is not None and situation.n_pool_sessions < policy.guarantee_min_sessions

    def of_new() -> tuple[bool, str]:
        hard = _context_arm(question, facts)
        if hard is not None:
            return False, hard
        if question.overcommit:
            return True, OVERCOMMIT
        if below_guarantee:
            return True, GUARANTEED
        if policy is not None and not situation.fresh:
            return False, STALE
        if policy is not None and settling and not (question.ignore_settling and projected is not None):
            return False, SETTLING
        if n_kv == 0:
            return False, KV
        if policy is not None and projected is not None and projected < projection.threshold:
            return False, FLOOR_IDLE if projection.is_idle else FLOOR
        return True, OK

    can_admit, reason = of_new()
    headroom = _headroom(projection, n_kv, can_admit=can_admit)
    if can_admit and reason == GUARANTEED and policy is not None:
        headroom = max(headroom or 0, policy.guarantee_min_sessions - situation.n_pool_sessions)
    if question.known:  # it takes no new place: how many others could come is told all the same
        can_admit, reason = True, CONTINUATION
    streams = facts.streams if facts is not None else None
    if streams is not None and headroom is not None:
        headroom = min(headroom, streams.n_free)
    return Capacity(
        can_admit=can_admit,
        reason=reason,
        guaranteed=reason == GUARANTEED,
        known_session=question.known,
        settling=settling,
        settle_remaining_ms=round(situation.settle_remaining_ms) if situation.settle_remaining_ms is not None else None,
        forecasts=projection.forecasts(1),
        projected_mean_tps_if_admitted=projected,
        projected_idle_estimate=projection.is_idle,
        drop_per_admit_ewma=situation.drop_tps,
        mean_active_tps=rates.mean_active_tps,
        n_active=rates.n_active,
        n_warming=rates.n_warming,
        n_pool_sessions=situation.n_pool_sessions,
        headroom_sessions=headroom,
        kv_headroom_pct=_kv_headroom_pct(facts),
        compaction_pressure=compaction_pressure(facts),
        kv_streams_total=streams.n_total if streams else None,
        kv_streams_free=streams.n_free if streams else None,
        kv_cells_per_stream=streams.cells_per_stream if streams else None,
        measured_s=facts.measured_s if facts is not None else None,
        policy=policy,
        n_at_rest=situation.n_at_rest,
    )


class Projection:
    """The mean rate with ``k`` more sessions, by the estimator of the policy.

    From those who decode now; when everybody is between turns, from the last settled mean (``is_idle``).
    """

    def __init__(self, question: Question, situation: Situation):
        policy = question.policy
        self._situation = situation
        rates = situation.rates
        self._mean, self._n = rates.mean_clear_tps, rates.n_active
        self.is_idle = self._mean is None and situation.n_scope_sessions > 0 and situation.idle_mean_tps is not None
        if self.is_idle:
            self._mean, self._n = situation.idle_mean_tps, situation.n_scope_sessions
        self._n_unseen = situation.n_unsettled if question.ignore_settling else 0
        self._uses_roofline = policy is not None and policy.estimator == "roofline" and situation.roofline is not None
        floor = policy.target_tps_per_session if policy is not None else 0.0
        closed = self._uses_roofline and not situation.is_open
        self.threshold = floor * OPEN_AT if closed else floor
        if self._uses_roofline:
            self.is_idle = False  # the fit needs no decoders to project from

    def forecasts(self, k: int) -> Forecasts:
        k += self._n_unseen
        roofline = self._situation.roofline
        return Forecasts(
            project_model(self._mean, self._n, k),
            project_measured(self._mean, self._situation.drop_tps, k),
            roofline(k - self._n_unseen) if roofline is not None else None,  # it counts sessions, not rates
        )

    def tps(self, k: int) -> float | None:
        forecasts = self.forecasts(k)
        if self._uses_roofline and forecasts.roofline is not None:
            return forecasts.roofline
        return forecasts.measured if forecasts.measured is not None else forecasts.model


def compaction_pressure(facts: EngineFacts | None) -> float | None:
    """0 to 1: how near the wall is, of the cache or of the longest conversation. 0 when nobody is live."""
    if facts is None:
        return None
    if not facts.sessions:
        return 0.0
    shares = [0.0]
    if facts.cells_total and facts.cells_used is not None:
        shares.append((facts.cells_used / facts.cells_total - 0.5) / 0.5)
    if facts.ctx_total:
        shares.append(max(s.ctx_used for s in facts.sessions) / facts.ctx_total)
    return min(1.0, max(shares))


def _context_arm(question: Question, facts: EngineFacts | None) -> str | None:
    """Cells are physical. What is unknown refuses nobody here: the engine has the last word."""
    if facts is None:
        return None
    n_expected, streams = question.expected_tokens, facts.streams
    if streams is not None:
        if streams.n_free <= 0:
            return NO_STREAM
        # A stream holds its own copy of the shared prefix.
        if n_expected is not None and question.prefix_len + n_expected > streams.cells_per_stream:
            return CONTEXT
    if n_expected is not None and facts.cells_free is not None and n_expected > facts.cells_free:
        return CONTEXT
    return None


def _n_by_kv(question: Question, situation: Situation) -> int | None:
    """How many more sessions the free cells carry, by what one holds on its own."""
    facts = situation.facts
    if facts is None or facts.cells_free is None:
        return None
    if situation.marginal_cells is not None:
        n_cells = max(situation.marginal_cells, question.expected_tokens or 0)
    else:
        n_cells = question.expected_tokens if question.expected_tokens is not None else UNSEEN_SESSION_CELLS
    return int(facts.cells_free // max(1.0, n_cells))


def _headroom(projection: Projection, n_kv: int | None, *, can_admit: bool) -> int | None:
    if not can_admit:
        return 0
    if n_kv is None:
        return None
    low, high = 0, min(n_kv, MAX_HEADROOM)
    while low < high:  # more sessions are never faster
        n = (low + high + 1) // 2
        projected = projection.tps(n)
        if projected is None or projected >= projection.threshold:
            low = n
        else:
            high = n - 1
    return max(1, low)


def _kv_headroom_pct(facts: EngineFacts | None) -> float | None:
    if facts is None or not facts.cells_total or facts.cells_free is None:
        return None
    return 100.0 * facts.cells_free / facts.cells_total


def _rounded(value: float | None) -> float | None:
    return round(value, 3) if value is not None else None
