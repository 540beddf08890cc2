"""A higher floor, more load or more context never admits more; and the decision function that got it wrong."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from polykv_proxy.gate import verdict
from polykv_proxy.gate.facts import EngineFacts, SessionFacts, Streams
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.policy import Policy
from polykv_proxy.gate.rate import Rates
from polykv_proxy.gate.roofline import Roofline
from polykv_proxy.gate.verdict import Question, Situation, decide
from polykv_proxy.ids import PoolId, SessionId
from tests.gate.make import arrival, policy, turn

rates = st.one_of(
    st.builds(lambda m, n, w: Rates(m, m, n, w), st.floats(0.5, 60), st.integers(1, 8), st.integers(0, 3)),
    st.just(Rates()),
)
streams = st.none() | st.builds(Streams, st.just(4), st.integers(0, 4), st.just(4096))
facts = st.builds(
    lambda free, s: EngineFacts(0.0, cells_total=10_000, cells_used=10_000 - free, cells_free=free, streams=s),
    st.integers(0, 10_000),
    streams,
)
speeds = st.none() | st.builds(lambda s: lambda k: s / (3 + k), st.floats(10, 400))
situations = st.builds(
    Situation,
    facts=facts,
    fresh=st.sampled_from([True, True, True, False]),
    rates=rates,
    n_pool_sessions=st.integers(0, 4),
    n_scope_sessions=st.integers(0, 8),
    settle_remaining_ms=st.none() | st.floats(1, 5000),
    n_unsettled=st.integers(0, 3),
    drop_tps=st.none() | st.floats(0, 10),
    idle_mean_tps=st.none() | st.floats(1, 60),
    marginal_cells=st.none() | st.floats(1, 5000),
    roofline=speeds,
    is_open=st.booleans(),
)
questions = st.builds(
    Question,
    policy=st.builds(
        Policy,
        target_tps_per_session=st.floats(0.5, 60),
        guarantee_min_sessions=st.integers(0, 2),
        estimator=st.sampled_from(["settled", "roofline"]),
    ),
    overcommit=st.sampled_from([False, False, False, True]),
    prefix_len=st.sampled_from([0, 1000]),
    expected_tokens=st.none() | st.integers(0, 12_000),
    ignore_settling=st.booleans(),
)
factors = st.floats(1.0, 4.0)

Change = Callable[[Question, Situation, float], tuple[Question, Situation]]


def higher_floor(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    assert q.policy is not None
    return replace(q, policy=replace(q.policy, target_tps_per_session=q.policy.target_tps_per_session * by)), s


def slower(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    mean, idle, speed = s.rates.mean_clear_tps, s.idle_mean_tps, s.roofline
    slow = replace(s.rates, mean_clear_tps=mean / by, mean_active_tps=mean / by) if mean is not None else s.rates

    def slow_roofline(k: int) -> float | None:
        told = speed(k) if speed is not None else None
        return told / by if told is not None else None

    return q, replace(
        s,
        rates=slow,
        idle_mean_tps=idle / by if idle is not None else None,
        roofline=slow_roofline if speed is not None else None,
    )


def larger_drop(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    return q, replace(s, drop_tps=s.drop_tps * by if s.drop_tps is not None else None)


def more_unsettled(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    return q, replace(s, n_unsettled=s.n_unsettled + int(by))


def more_sessions(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    """In the pool itself; what they do to the rate is told by the rate."""
    return q, replace(s, n_pool_sessions=s.n_pool_sessions + int(by))


def more_context(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    return replace(q, expected_tokens=int((q.expected_tokens or 0) * by)) if q.expected_tokens is not None else q, s


def fewer_cells(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    assert s.facts is not None
    assert s.facts.cells_free is not None
    return q, replace(s, facts=replace(s.facts, cells_free=int(s.facts.cells_free / by)))


def larger_sessions(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    return q, replace(s, marginal_cells=s.marginal_cells * by if s.marginal_cells is not None else None)


def stale(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    return q, replace(s, fresh=False)


def closed(q: Question, s: Situation, by: float) -> tuple[Question, Situation]:
    return q, replace(s, is_open=False)


HARSHER = (
    higher_floor, slower, larger_drop, more_unsettled, more_sessions, more_context, fewer_cells, larger_sessions, stale,
    closed,
)  # fmt: skip


def never_admits_more(question: Question, situation: Situation, by: float) -> None:
    before = decide(question, situation)
    for change in HARSHER:
        after = decide(*change(question, situation, by))
        assert before.can_admit or not after.can_admit, f"{change.__name__}: {before.reason} became {after.reason}"
        if before.headroom_sessions is not None and after.headroom_sessions is not None and not after.guaranteed:
            assert after.headroom_sessions <= before.headroom_sessions, change.__name__


@settings(max_examples=400)
@given(question=questions, situation=situations, by=factors)
def test_harsher_never_admits_more(question: Question, situation: Situation, by: float) -> None:
    never_admits_more(question, situation, by)


@settings(max_examples=400)
@given(question=questions, situation=situations)
def test_the_verdict_keeps_its_order(question: Question, situation: Situation) -> None:
    """Stated anew, from the answer alone."""
    capacity, policy = decide(question, situation), question.policy
    assert policy is not None
    if decide(replace(question, known=True), situation).can_admit is not True:
        raise AssertionError("a continuation was stopped")
    hard = decide(replace(question, overcommit=True), situation)
    assert hard.can_admit == (hard.reason == "overcommit")
    if not hard.can_admit:
        assert (capacity.can_admit, capacity.reason) == (False, hard.reason)
    elif situation.n_pool_sessions < policy.guarantee_min_sessions:
        assert capacity.can_admit
    elif not situation.fresh and not question.overcommit:
        assert capacity.reason == "measurement stale"
    elif situation.settle_remaining_ms is not None and not question.ignore_settling and not question.overcommit:
        assert capacity.reason == "measurement settling"
    assert (
        capacity.headroom_sessions is None
        or (capacity.headroom_sessions > 0) == capacity.can_admit
        or (situation.facts is not None and situation.facts.streams is not None)
    )


@settings(max_examples=200)
@given(question=questions, situation=situations)
def test_without_a_policy_only_cells_count(question: Question, situation: Situation) -> None:
    capacity = decide(replace(question, policy=None), situation)
    assert capacity.reason in (
        "ok", "overcommit", "context headroom exhausted", "no free stream (split cache)", "kv headroom exhausted",
    )  # fmt: skip


project = verdict.Projection.tps


def slow_looks_fast(projection: verdict.Projection, k: int) -> float | None:
    told = project(projection, k)
    return 60.0 - told if told is not None else None


def context_arm_the_wrong_way_round(question: Question, facts: EngineFacts) -> str | None:
    return verdict.CONTEXT if (question.expected_tokens or 0) < (facts.cells_free or 0) else None


BROKEN: dict[str, tuple[object, str, object]] = {
    "slow looks fast": (verdict.Projection, "tps", slow_looks_fast),
    "context the wrong way round": (verdict, "_context_arm", context_arm_the_wrong_way_round),
    "closed is open": (verdict, "OPEN_AT", 0.5),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_verdict_is_caught(name: str) -> None:
    where, attribute, broken = BROKEN[name]

    @settings(max_examples=3000, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    @given(question=questions, situation=situations, by=factors)
    def check(question: Question, situation: Situation, by: float) -> None:
        never_admits_more(question, situation, by)

    with patch.object(where, attribute, broken), pytest.raises(AssertionError):
        check()


# Through the whole gate ----------------------------------------------------------------------------------------------


def gate_with(n: int, ctx: int, speed: float, n_windows: int) -> Gate:
    """A gate that has watched ``n`` sessions decode for 5 s."""
    roofline = Roofline()
    for i in range(n_windows):
        k, kv = 1 + i % 4, 1000.0 * (1 + i % 7)
        roofline.fold((1.0, k, kv, 0.0), (0.5 + k) / speed + 1e-7 * kv)
    gate = Gate(roofline=roofline)
    for i in range(11):
        sessions = [
            SessionFacts(
                SessionId(str(s)), PoolId(1), PoolId(1), "decoding", 1, round(i * 0.5 * speed / max(n, 1)), ctx, ctx
            )
            for s in range(n)
        ]
        used = n * ctx
        gate.observe(
            EngineFacts(i * 0.5, sessions, cells_total=40_000, cells_used=used, cells_free=40_000 - used), i * 0.5
        )
    return gate


def let_in(gate: Gate, given: Policy) -> bool:
    return gate.capacity(arrival("next", given), 5.0).can_admit


@settings(max_examples=60)
@given(
    n=st.integers(1, 5),
    ctx=st.integers(100, 6000),
    speed=st.floats(20, 200),
    floor=st.floats(1, 40),
    by=factors,
    estimator=st.sampled_from(["settled", "roofline"]),
    n_windows=st.sampled_from([0, 30]),
    hold_ms=st.sampled_from([0, 1000]),
)
def test_the_gate_never_admits_more_when_it_gets_harder(
    *, n: int, ctx: int, speed: float, floor: float, by: float, estimator: str, n_windows: int, hold_ms: int
) -> None:
    given = policy(floor, estimator=estimator, max_turn_hold_ms=hold_ms)
    gate = gate_with(n, ctx, speed, n_windows)
    before = let_in(gate, given)
    assert before or not let_in(gate, replace(given, target_tps_per_session=floor * by))
    assert before or not let_in(gate_with(n + 1, ctx, speed, n_windows), given)
    assert before or not let_in(gate_with(n, ctx * 2, speed, n_windows), given)
    for i, tokens in enumerate((0, 500, 5000)):
        request = turn(100 + i, f"new{i}", given, ctx_tokens=ctx, uncached_tokens=tokens)
        harder = turn(200 + i, f"new{i}", given, ctx_tokens=ctx * 2, uncached_tokens=tokens * 2)
        gate.turns.now_s = 5.0
        assert gate.turns.fits(request) or not gate.turns.fits(harder)
