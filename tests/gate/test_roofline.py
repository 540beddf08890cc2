"""The fit of the machine's speed, and what both levels make of it."""

import random
from collections.abc import Sequence

import pytest

from polykv_proxy.gate.facts import EngineFacts, SessionFacts, State
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.outcome import Admitted, Go, Held, Refused, TurnHeld, TurnWake
from polykv_proxy.gate.policy import Policy
from polykv_proxy.gate.roofline import Duty, LeastSquares, Roofline, demand
from polykv_proxy.ids import PoolId, SessionId
from tests.gate.make import Engine, arrival, policy, turn

TRUE = (0.0143, 0.012, 4e-8, 3e-5)


def truth(n: float, kv: float, prefill: float) -> float:
    a, b, c, d = TRUE
    return a + b * n + c * kv + d * prefill


def fitted(n_windows: int = 400, noise: float = 0.0) -> Roofline:
    roofline, rng = Roofline(), random.Random(3)
    for _ in range(n_windows):
        n, kv, prefill = rng.randint(1, 6), rng.uniform(1e4, 2e5), rng.choice([0, 0, 100, 800])
        y = truth(n, kv, prefill) * rng.lognormvariate(0, noise)
        roofline.fold((1.0, n, kv, prefill), y)
    return roofline


def test_the_fit_finds_the_machine() -> None:
    found = fitted().coefficients
    assert found == pytest.approx(TRUE, rel=0.02)
    assert fitted().tps(4, 50_000, 0) == pytest.approx(1 / truth(4, 50_000, 0), rel=0.01)


def test_noise_of_eight_percent_leaves_forecasts_within_three() -> None:
    roofline = fitted(noise=0.08)
    for n in (1, 3, 5):
        assert roofline.tps(n, 80_000, 100) == pytest.approx(1 / truth(n, 80_000, 100), rel=0.03)


def test_it_is_ready_after_six_windows_with_two_numbers_of_decoders() -> None:
    roofline = Roofline()
    for _ in range(10):
        roofline.fold((1.0, 2, 1e4, 0), truth(2, 1e4, 0))
    assert not roofline.ready
    assert roofline.tps(3, 1e4, 0) is None
    roofline.fold((1.0, 3, 1e4, 0), truth(3, 1e4, 0))
    assert roofline.ready
    five = Roofline()
    for n in (1, 2, 1, 2, 1):
        five.fold((1.0, n, 1e4, 0), truth(n, 1e4, 0))
    assert not five.ready


def test_no_coefficient_is_below_zero() -> None:
    """More context made it faster, by chance: then context costs nothing, and the rest fits without it."""
    squares, rng = LeastSquares(2), random.Random(1)
    for _ in range(300):
        x = rng.uniform(0, 1)
        squares.update([1.0, x], 0.05 - 0.02 * x)
    assert squares.theta == pytest.approx([0.05, -0.02], abs=1e-4)
    a, b = squares.nonnegative()
    assert b == 0.0
    assert a == pytest.approx(0.04, abs=0.002)  # the best constant


def test_an_outlier_is_skipped_and_three_in_a_row_are_a_new_regime() -> None:
    roofline = fitted(noise=0.02)
    before, n_windows = roofline.coefficients, roofline.n_windows
    x = (1.0, 3, 8e4, 0)
    roofline.fold(x, 5 * truth(*x[1:]))
    assert (roofline.coefficients, roofline.n_windows, roofline.n_skipped) == (before, n_windows, 1)
    for i in range(60):
        x = (1.0, 1 + i % 5, 8e4, 0)
        roofline.fold(x, 1.6 * truth(*x[1:]))
    assert roofline.n_windows > n_windows + 50
    assert roofline.tps(3, 8e4, 0) == pytest.approx(1 / (1.6 * truth(3, 8e4, 0)), rel=0.05)


def test_single_outliers_now_and_then_are_never_taken_for_a_new_regime() -> None:
    roofline = fitted(noise=0.02)
    for i in range(30):
        x = (1.0, 1 + i % 5, 8e4, 0)
        roofline.fold(x, truth(*x[1:]) * (4 if i % 3 == 0 else 1))
    assert roofline.n_skipped == 10
    assert roofline.tps(3, 8e4, 0) == pytest.approx(1 / truth(3, 8e4, 0), rel=0.03)


def decoding(name: str, n_decoded: int, ctx: int = 1000) -> SessionFacts:
    return SessionFacts(SessionId(name), PoolId(1), PoolId(1), "decoding", 1, n_decoded, ctx)


class Windows(Roofline):
    """Keeps its windows instead of fitting them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[float, ...], float]] = []

    def fold(self, features: Sequence[float], seconds_per_token: float) -> None:
        self.seen.append((tuple(features), seconds_per_token))


def test_windows_of_half_a_second_are_made_of_readings() -> None:
    roofline = Windows()
    for i in range(6):
        t = i * 0.1
        roofline.update(EngineFacts(t, [decoding("a", i * 2, 4000), decoding("b", i, 2000)], n_prefilled=i * 10))
    ((features, seconds),) = roofline.seen
    assert features == pytest.approx((1.0, 2.0, 6000.0, 100.0))
    assert seconds == pytest.approx(0.5 * 2 / 15)  # 15 tokens for two sessions in half a second


def test_a_stall_belongs_to_the_window_in_which_tokens_come_again() -> None:
    roofline = Windows()
    for i, n in enumerate((0, 0, 0, 20)):
        roofline.update(EngineFacts(i * 0.5, [decoding("a", n)], n_prefilled=min(i, 2) * 1000))
    ((features, seconds),) = roofline.seen
    assert features[3] == pytest.approx(2000 / 1.5)
    assert seconds == pytest.approx(1.5 / 20)


def test_turns_shorter_than_a_window_count_as_long_as_they_took() -> None:
    """One session at 50 tokens per second, in turns of 0.6 s with pauses of 0.4 s: alone it decodes at 50 all the same,
    and the cost of one more is not taken from windows in which it was at work for a part only."""
    roofline, n_decoded, decoding_s = Windows(), 0, 0.0
    for i in range(101):
        at_s = round(i * 0.2 % 1.0, 3)
        state: State = "decoding" if 0 < at_s <= 0.6 else "idle"
        facts = SessionFacts(SessionId("a"), PoolId(1), PoolId(1), state, 1, n_decoded, 1000, decoding_s=decoding_s)
        roofline.update(EngineFacts(i * 0.2, [facts]))
        if at_s < 0.55:
            n_decoded, decoding_s = n_decoded + 10, decoding_s + 0.2
    assert len(roofline.seen) > 25
    assert {round(features[1], 6) for features, _ in roofline.seen} == {1.0}
    assert [seconds for _, seconds in roofline.seen] == pytest.approx([0.02] * len(roofline.seen))


def test_duty_is_the_share_that_wants_to_decode() -> None:
    duty = Duty()
    assert duty.value == 1.0
    for i in range(400):
        duty.update(3 if i % 2 else 1, 4, i * 0.5)
    assert duty.value == pytest.approx(0.5, abs=0.02)


def test_demand_is_a_quantile_of_how_many_decode_at_once() -> None:
    assert demand(6, 0.5, 0.0) == 3.0
    assert demand(6, 0.5, 1.0) == pytest.approx(3.0 + 1.5**0.5)
    assert demand(4, 1.0, 3.0) == 4.0
    assert demand(2, 0.9, 3.0) == 2.0  # never more than there are


# Both levels ---------------------------------------------------------------------------------------------------------


def busy(n: int, given: Policy, *, noise: float = 0.0) -> Engine:
    """A gate whose fit is good, with ``n`` sessions that decode all the time at the machine's rate."""
    engine = Engine(Gate(roofline=fitted(noise=noise)))
    for i in range(n):
        engine.put(f"s{i}", own_cells=1000)
    engine.gate.entry.scope(arrival("x", given).ruling)
    engine.read()
    engine.run(20, 1 / truth(n, n * 1000, 0))
    return engine


def test_a_session_is_admitted_up_to_the_floor_and_not_beyond() -> None:
    # 1 / truth(n): 27.4 at 2, 19.8 at 3, 15.9 at 4, 13.4 at 5.
    given = policy(15.5, estimator="roofline", max_turn_hold_ms=0)
    for n, comes_in in ((2, True), (3, True), (4, False)):
        engine = busy(n, given)
        capacity = engine.gate.capacity(arrival("next", given), engine.now_s)
        assert capacity.can_admit == comes_in, capacity
        assert capacity.projected_mean_tps_if_admitted == pytest.approx(1 / truth(n + 1, (n + 1) * 1000, 0), rel=0.03)
    assert capacity.reason == "projected mean tps below floor"


def test_closed_at_the_floor_it_opens_again_five_percent_above() -> None:
    given = policy(15.5, estimator="roofline", max_turn_hold_ms=0)
    engine = busy(4, given)
    assert not engine.gate.capacity(arrival("next", given), engine.now_s).can_admit
    del engine.sessions["s3"]
    engine.read()
    # 15.9 is above the floor of 15.5, but not by 5 %.
    assert not engine.gate.capacity(arrival("next", given), engine.now_s).can_admit
    del engine.sessions["s2"]
    engine.read()
    assert engine.gate.capacity(arrival("next", given), engine.now_s).can_admit
    engine.put("s2")
    engine.read()
    assert engine.gate.capacity(arrival("next", given), engine.now_s).can_admit


def test_an_attach_is_admitted_where_a_cold_prompt_is_not() -> None:
    given = policy(15.0, estimator="roofline", max_turn_hold_ms=0)
    engine = busy(3, given)
    warm = engine.gate.capacity(arrival("next", given, uncached_tokens=50), engine.now_s)
    cold = engine.gate.capacity(arrival("next", given, uncached_tokens=8000), engine.now_s)
    assert (warm.can_admit, cold.can_admit) == (True, False)


def test_until_the_fit_is_ready_the_settled_forecast_decides() -> None:
    given = policy(15.0, estimator="roofline", max_turn_hold_ms=0)
    engine = Engine(Gate())
    engine.put("a", own_cells=100)
    engine.read()
    engine.run(5, 28.0)
    assert not engine.gate.measured.roofline.ready
    capacity = engine.gate.capacity(arrival("next", given), engine.now_s)
    assert capacity.projected_mean_tps_if_admitted == pytest.approx(14.0, rel=0.02)
    assert not capacity.can_admit


def test_a_turn_is_held_below_the_floor_and_goes_when_another_ends() -> None:
    given = policy(15.0, estimator="roofline")
    engine = busy(0, given)
    for i in range(4):
        assert engine.gate.begin_turn(turn(i, f"s{i}", given, ctx_tokens=1000), engine.now_s) == Go()
    held = engine.gate.begin_turn(turn(4, "s4", given, ctx_tokens=1000), engine.now_s)
    assert isinstance(held, TurnHeld)
    assert (held.until_s, held.place) == (engine.now_s + 30, 1)
    assert held.predicted_tps == pytest.approx(1 / truth(5, 5000, 0), rel=0.02)
    engine.now_s += 2.0
    engine.read()
    assert engine.gate.end_turn(0, engine.now_s) == [TurnWake(4, Go(hold_ms=pytest.approx(2000), expired=False))]
    assert engine.gate.end_turn(0, engine.now_s) == []


def test_a_turn_is_held_as_long_as_the_new_policy_says() -> None:
    given = policy(15.0, estimator="roofline")
    engine = busy(0, given)
    for i in range(5):
        engine.gate.begin_turn(turn(i, f"s{i}", given, ctx_tokens=1000), engine.now_s)
    since_s = engine.now_s
    shorter = policy(15.0, estimator="roofline", max_turn_hold_ms=1000)
    assert engine.gate.policies_changed(lambda pool: arrival("x", shorter, pool).ruling, engine.now_s) == []
    assert engine.gate.next_wake_s() == since_s + 1
    engine.now_s += 1
    assert engine.gate.tick(engine.now_s).wakes == (TurnWake(4, Go(hold_ms=pytest.approx(1000), expired=True)),)


def test_between_tenants_the_one_that_decoded_less_goes_first() -> None:
    given = policy(1000.0, estimator="roofline")
    engine = busy(0, given)
    for i, tenant in ((0, "busy"), (1, "calm")):
        engine.gate.begin_turn(turn(i, f"s{i}", given, tenant=tenant), engine.now_s)
    engine.gate.end_turn(1, engine.now_s)
    engine.put("s0")
    engine.read()
    engine.run(5, 100.0)
    for i, tenant in ((2, "calm"), (3, "calm"), (4, "busy")):
        engine.gate.begin_turn(turn(i, f"s{i}", given, since_s=10.0 - i, tenant=tenant), engine.now_s)
    order = []
    for i in (0, 3, 2):
        order += [w.turn_id for w in engine.gate.end_turn(i, engine.now_s) if isinstance(w, TurnWake)]
        engine.put("s0", "idle")
        engine.read()
    assert order == [3, 2, 4]  # by age alone it would be 4, 3, 2


def test_a_hold_ends_in_service_at_the_latest_after_its_time() -> None:
    given = policy(1000.0, estimator="roofline", max_turn_hold_ms=3000)
    engine = busy(0, given)
    assert engine.gate.begin_turn(turn(0, "a", given), engine.now_s) == Go()  # alone it harms nobody
    assert isinstance(engine.gate.begin_turn(turn(1, "b", given), engine.now_s), TurnHeld)
    assert engine.gate.next_wake_s() == engine.now_s + 3
    engine.now_s += 2.9
    assert engine.gate.tick(engine.now_s).wakes == ()
    engine.now_s += 0.1
    assert engine.gate.tick(engine.now_s).wakes == (TurnWake(1, Go(hold_ms=pytest.approx(3000), expired=True)),)
    assert engine.gate.counts.n_turns_expired == 1


def test_the_oldest_session_goes_first() -> None:
    given = policy(1000.0, estimator="roofline")
    engine = busy(0, given)
    engine.gate.begin_turn(turn(0, "a", given), engine.now_s)
    for i, since_s in ((1, 90.0), (2, 10.0), (3, 50.0)):
        engine.gate.begin_turn(turn(i, f"s{i}", given, since_s), engine.now_s)
    order = []
    for i in (0, 2, 3):
        order += [w.turn_id for w in engine.gate.end_turn(i, engine.now_s) if isinstance(w, TurnWake)]
    assert order == [2, 3, 1]


def test_the_settled_estimator_delays_no_turn_unless_told_to() -> None:
    given = policy(1000.0)
    engine = busy(3, given)
    for i in range(5):
        assert engine.gate.begin_turn(turn(i, f"t{i}", given), engine.now_s) == Go()
    opted_in = policy(1000.0, max_turn_hold_ms=500)
    assert isinstance(engine.gate.begin_turn(turn(9, "t9", opted_in), engine.now_s), TurnHeld)


def test_advisory_holds_no_turn() -> None:
    given = policy(1000.0, mode="advisory", estimator="roofline")
    engine = busy(3, given)
    for i in range(5):
        assert engine.gate.begin_turn(turn(i, f"t{i}", given), engine.now_s) == Go()


def test_a_held_turn_whose_client_left_is_gone() -> None:
    given = policy(1000.0, estimator="roofline")
    engine = busy(0, given)
    engine.gate.begin_turn(turn(0, "a", given), engine.now_s)
    engine.gate.begin_turn(turn(1, "b", given), engine.now_s)
    assert engine.gate.end_turn(1, engine.now_s) == []
    assert engine.gate.end_turn(0, engine.now_s) == []
    assert (engine.gate.turns.n_running, engine.gate.turns.n_held) == (0, 0)


def test_decoders_that_nobody_announced_count_too() -> None:
    given = policy(15.0, estimator="roofline")
    engine = busy(4, given)
    assert isinstance(engine.gate.begin_turn(turn(0, "new", given, ctx_tokens=1000), engine.now_s), TurnHeld)


def test_a_turn_that_ended_after_it_was_measured_is_no_decoder_any_more() -> None:
    """Readings take a while to come in: this one still shows it at work."""
    given = policy(15.0, estimator="roofline")
    engine = busy(0, given)
    for i in range(4):
        engine.gate.begin_turn(turn(i, f"s{i}", given, ctx_tokens=1000), engine.now_s)
        engine.put(f"s{i}")
    engine.now_s += 0.5
    facts = engine.facts()
    engine.gate.end_turn(0, engine.now_s + 0.1)
    engine.gate.observe(facts, engine.now_s + 0.2)
    assert engine.gate.turns.n_running == 3
    assert engine.gate.begin_turn(turn(9, "s9", given, ctx_tokens=1000), engine.now_s + 0.2) == Go()


def test_without_a_fit_a_turn_is_judged_by_what_admissions_cost() -> None:
    """One decodes at 40; the model would say 20 for two, but the last admission took only 5."""
    for drop_tps, decision in ((None, TurnHeld), (5.0, Go)):
        given = policy(30.0, max_turn_hold_ms=1000)
        engine = Engine(Gate())
        engine.put("a")
        engine.read()
        engine.run(5, 40.0)
        engine.gate.entry.scope(arrival("x", given).ruling).settling.drop_tps = drop_tps
        assert isinstance(engine.gate.begin_turn(turn(0, "b", given), engine.now_s), decision)


def test_a_stale_reading_holds_a_turn_no_longer_than_allowed() -> None:
    given = policy(1.0, estimator="roofline", max_turn_hold_ms=2000)
    engine = busy(0, given)
    engine.gate.begin_turn(turn(0, "a", given), engine.now_s)
    assert engine.gate.begin_turn(turn(1, "b", given), engine.now_s) == Go()
    engine.now_s += 3.5
    assert isinstance(engine.gate.begin_turn(turn(2, "c", given), engine.now_s), TurnHeld)
    (wake,) = engine.gate.tick(engine.now_s + 2).wakes
    assert isinstance(wake, TurnWake)
    assert wake.go.expired


def test_sessions_settle_under_roofline_as_well() -> None:
    given = policy(5.0, estimator="roofline")
    engine = busy(1, given)
    assert isinstance(engine.gate.arrive(arrival("b", given), engine.now_s)[0], Admitted)
    assert isinstance(engine.gate.arrive(arrival("c", given), engine.now_s)[0], Held)


def test_records_tell_what_each_way_had_foretold() -> None:
    given = policy(5.0, estimator="roofline", max_turn_hold_ms=0)
    engine = busy(2, given)
    assert isinstance(engine.gate.arrive(arrival("c", given), engine.now_s)[0], Admitted)
    engine.put("c", own_cells=1000)
    (record,) = [r for t in engine.run(5, 1 / truth(3, 3000, 0)) for r in t.records]
    assert record.forecasts.roofline == pytest.approx(1 / truth(3, 3000, 0), rel=0.03)
    assert record.forecasts.model == pytest.approx(2 / 3 / truth(2, 2000, 0), rel=0.03)
    assert record.mean_tps is not None


def test_refused_without_room_for_another() -> None:
    given = policy(15.0, estimator="roofline", max_turn_hold_ms=0)
    engine = busy(5, given)
    assert isinstance(engine.gate.arrive(arrival("next", given), engine.now_s)[0], Refused)
