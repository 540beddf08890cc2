"""The settled scheme, through the gate, with figures of the run that it was made for: 38, 31.7, 21.7, 15.9."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from polykv_proxy.gate.facts import Streams
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.outcome import Admitted, Held, Refused, SessionWake, retry_after
from polykv_proxy.gate.policy import Policy
from polykv_proxy.gate.settle import Forecasts, Settling, project_measured, project_model
from polykv_proxy.ids import SessionId
from tests.gate.make import Engine, arrival, policy

PLAIN = policy()


def engine() -> Engine:
    return Engine(Gate())


def with_sessions(n: int, tps: float, given: Policy = PLAIN) -> Engine:
    """``n`` sessions decode at ``tps``, all settled; without any drop learned."""
    e = engine()
    for i in range(n):
        e.put(f"s{i}", own_cells=1000)
    e.read()
    e.gate.entry.scope(arrival("x", given).ruling)
    e.run(10, tps)
    return e


# Forecasts -----------------------------------------------------------------------------------------------------------


def test_the_models_forecast_of_the_seeds_run() -> None:
    """At 21.7 with four sessions it foretold 17.4; it became 15.9."""
    assert project_model(21.7, 4) == pytest.approx(17.36)
    assert project_model(None, 4) is None
    assert project_model(20.0, 0) is None


def test_drops_are_averaged_with_alpha_03() -> None:
    settling, given = Settling(), policy()
    means = [38.0, 31.7, 21.7, 15.9]
    for i, (before, after) in enumerate(pairwise(means)):
        at = 100.0 * i
        settling.admitted(SessionId(str(i)), at, n_decoded=0, mean=before, forecasts=Forecasts())
        record = settling.update(given, None, after, at + 5.0, at + 5.0)
        assert record is not None
        assert (record.mean_at_admit_tps, record.mean_tps) == (before, after)
    assert settling.drop_tps == pytest.approx(((6.3 + 0.3 * (10.0 - 6.3)) * 0.7) + 0.3 * 5.8)
    assert project_measured(15.9, settling.drop_tps) == pytest.approx(15.9 - 6.927)


def test_a_mean_that_rose_is_no_negative_drop() -> None:
    settling = Settling()
    settling.admitted(SessionId("a"), 0.0, n_decoded=0, mean=20.0, forecasts=Forecasts())
    settling.update(policy(), None, 25.0, 5.0, 5.0)
    assert settling.drop_tps == 0.0


def test_a_mean_from_before_the_admission_teaches_nothing() -> None:
    settling = Settling()
    settling.admitted(SessionId("a"), 10.0, n_decoded=0, mean=20.0, forecasts=Forecasts())
    record = settling.update(policy(), None, 20.0, 9.0, 15.0)
    assert record is not None
    assert record.mean_tps is None
    assert settling.drop_tps is None


def test_admissions_in_one_window_share_the_fall() -> None:
    settling = Settling()
    for i in range(3):
        settling.admitted(SessionId(str(i)), float(i), n_decoded=0, mean=38.0 - i, forecasts=Forecasts())
    settling.update(policy(), None, 20.0, 7.0, 7.0)
    assert settling.drop_tps == pytest.approx(6.0)


# The settle window ---------------------------------------------------------------------------------------------------


def test_the_pool_settles_when_the_new_session_has_decoded_its_tokens() -> None:
    e, given = engine(), policy(settle_tokens=48)
    e.admit("a", given)
    e.read()
    capacity = e.gate.capacity(arrival("next", given), e.now_s)
    assert (capacity.can_admit, capacity.reason, capacity.settling) == (False, "measurement settling", True)
    assert capacity.settle_remaining_ms == 5000
    e.run(1.0, 40.0)
    assert e.gate.capacity(arrival("next", given), e.now_s).settle_remaining_ms == 4000
    records = [r for t in e.run(0.5, 40.0) for r in t.records]
    assert [r.session_id for r in records] == ["a"]
    capacity = e.gate.capacity(arrival("next", given), e.now_s)
    assert (capacity.can_admit, capacity.settling, capacity.settle_remaining_ms) == (True, False, None)


def test_the_pool_settles_at_the_latest_after_settle_max() -> None:
    e, given = engine(), policy(settle_max_ms=2000)
    e.admit("a", given)
    e.put("a", "prefilling")
    e.run(1.5, 0)
    assert e.gate.capacity(arrival("next", given), e.now_s).settling
    e.run(0.5, 0)
    assert not e.gate.capacity(arrival("next", given), e.now_s).settling


def test_a_settling_pool_holds_instead_of_refusing_and_lets_one_in_after_the_other() -> None:
    e, given = engine(), policy(15.0)
    e.admit("a", given)
    e.read()
    held = [e.gate.arrive(arrival(name, given), e.now_s)[0] for name in ("b", "c")]
    assert [type(d) for d in held] == [Held, Held]
    assert [(d.place, d.until_s - e.now_s) for d in held] == [(1, 6.0), (2, 6.0)]
    ticks = e.run(1.5, 40.0)
    wakes = [w for t in ticks for w in t.wakes]
    assert [(w.ticket_id, type(w.decision)) for w in wakes] == [(held[0].ticket_id, Admitted)]
    assert wakes[0].decision.hold_ms == pytest.approx(1500)
    assert e.gate.n_waiting() == 1


def test_who_was_held_for_long_enough_is_judged_with_what_is_not_measured_yet() -> None:
    """Behind others in line: two admissions more than measured share 44 tokens per second."""
    e, given = engine(), policy(15.0, guarantee_min_sessions=0, settle_max_ms=4000)
    e.put("a")
    e.read()
    e.run(5, 44.0)
    assert isinstance(e.gate.arrive(arrival("b", given), e.now_s)[0], Admitted)
    held, _ = e.gate.arrive(arrival("c", given), e.now_s)
    e.run(3.5, 44.0)
    e.gate.arrive(arrival("d", given, overcommit=True), e.now_s)  # the window starts over
    (wake,) = [w for t in e.run(1.5, 44.0) for w in t.wakes]
    assert wake.ticket_id == held.ticket_id
    assert isinstance(wake.decision, Refused)
    assert wake.decision.reason == "projected mean tps below floor"
    assert wake.decision.capacity.projected_mean_tps_if_admitted == pytest.approx(44 / 4, rel=0.01)


def test_an_admission_that_did_not_take_place_leaves_no_trace() -> None:
    e, given = engine(), policy(guarantee_min_sessions=1)
    e.read()
    assert isinstance(e.gate.arrive(arrival("a", given), e.now_s)[0], Admitted)
    assert isinstance(e.gate.arrive(arrival("b", given), e.now_s)[0], Held)
    wakes = e.gate.leave(SessionId("a"), e.now_s)
    assert [type(w.decision) for w in wakes if isinstance(w, SessionWake)] == [Admitted]


# The floor -----------------------------------------------------------------------------------------------------------


def test_the_floor_arm_projects_with_the_model_until_a_drop_was_measured() -> None:
    e = with_sessions(4, 21.7)
    capacity = e.gate.capacity(arrival("next", policy(17.3)), e.now_s)
    assert (capacity.can_admit, capacity.reason) == (True, "ok")
    assert capacity.projected_mean_tps_if_admitted == pytest.approx(17.36, rel=0.01)
    assert capacity.forecasts.measured is None
    refused, _ = e.gate.arrive(arrival("next", policy(17.8)), e.now_s)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code, refused.reason) == (429, "pool_saturated", "projected mean tps below floor")


def test_the_floor_arm_projects_with_the_measured_drop_once_there_is_one() -> None:
    e = with_sessions(1, 38.0)
    given = policy(15.0)
    e.admit("b", given)
    e.run(10, 31.7)
    capacity = e.gate.capacity(arrival("next", given), e.now_s)
    # The window closed when the new session had its 48 tokens; the mean had not quite come down by then.
    assert capacity.drop_per_admit_ewma is not None
    assert 2.0 < capacity.drop_per_admit_ewma < 6.3
    assert capacity.projected_mean_tps_if_admitted == capacity.forecasts.measured
    assert capacity.forecasts.measured == pytest.approx(31.7 - capacity.drop_per_admit_ewma, rel=0.01)
    assert capacity.forecasts.model == pytest.approx(31.7 * 2 / 3, rel=0.01)


def test_warming_sessions_are_not_in_the_mean() -> None:
    e = with_sessions(2, 20.0)
    e.put("cold", "prefilling")
    e.read()
    capacity = e.gate.capacity(arrival("next", policy()), e.now_s)
    assert capacity.mean_active_tps == pytest.approx(20.0, rel=0.02)
    assert (capacity.n_active, capacity.n_warming) == (2, 1)


def test_between_turns_the_last_settled_mean_is_projected_as_long_as_it_is_fresh() -> None:
    e = with_sessions(3, 16.0)
    for name in list(e.sessions):
        e.put(name, "idle")
    e.run(20, 0)
    given = policy(15.0, guarantee_min_sessions=0)
    capacity = e.gate.capacity(arrival("next", given), e.now_s)
    assert capacity.projected_idle_estimate
    assert (capacity.can_admit, capacity.reason) == (False, "projected mean tps below floor (idle estimate)")
    assert capacity.projected_mean_tps_if_admitted == pytest.approx(16 * 3 / 4, rel=0.02)
    e.run(10, 0)
    capacity = e.gate.capacity(arrival("next", given), e.now_s)
    assert (capacity.can_admit, capacity.projected_idle_estimate) == (True, False)
    assert capacity.projected_mean_tps_if_admitted is None


def test_a_prefill_stall_is_not_taken_for_a_broken_floor() -> None:
    e = with_sessions(1, 40.0)
    for _ in range(4):
        e.n_prefilled += 512
        e.run(0.5, 0.0)
    capacity = e.gate.capacity(arrival("next", policy(15.0)), e.now_s)
    assert capacity.mean_active_tps is not None
    assert capacity.mean_active_tps < 20
    assert capacity.projected_mean_tps_if_admitted == pytest.approx(20.0, rel=0.02)
    assert capacity.can_admit


# The guarantee, overcommit, continuations ----------------------------------------------------------------------------


def saturated(**fields: Any) -> tuple[Engine, Policy]:
    given = policy(30.0, **fields)
    return with_sessions(4, 15.0, given), given


def test_a_pool_without_sessions_always_gets_its_first_one() -> None:
    e, given = saturated()
    e.cells_free = 10  # the KV arm is closed, too
    e.read()
    decision, _ = e.gate.arrive(arrival("first", given, pool=7, expected_tokens=10), e.now_s)
    assert isinstance(decision, Admitted)
    assert decision.capacity is not None
    assert (decision.capacity.reason, decision.capacity.guaranteed) == ("guaranteed minimum", True)


def test_two_at_once_do_not_both_get_the_guaranteed_place() -> None:
    e, given = saturated()
    first, _ = e.gate.arrive(arrival("first", given, pool=7), e.now_s)
    second, _ = e.gate.arrive(arrival("second", given, pool=7), e.now_s)
    assert isinstance(first, Admitted)
    assert isinstance(second, Held)
    assert second.capacity.n_pool_sessions == 1


def test_the_guarantee_stops_at_the_context_arm() -> None:
    e, given = saturated()
    e.cells_free = 10
    e.read()
    decision, _ = e.gate.arrive(arrival("first", given, pool=7, expected_tokens=11), e.now_s)
    assert isinstance(decision, Refused)
    assert decision.reason == "context headroom exhausted"


def test_overcommit_passes_floor_and_kv_but_not_the_context() -> None:
    e, given = saturated()
    e.cells_free = 500
    e.read()
    decision, _ = e.gate.arrive(arrival("more", given, overcommit=True, expected_tokens=500), e.now_s)
    assert isinstance(decision, Admitted)
    assert e.gate.counts.n_overcommitted == 1
    decision, _ = e.gate.arrive(arrival("most", given, overcommit=True, expected_tokens=501), e.now_s)
    assert isinstance(decision, Refused)
    assert decision.reason == "context headroom exhausted"


def test_a_continuation_is_never_gated() -> None:
    e, given = saturated()
    e.cells_free = 0
    e.read()
    decision, _ = e.gate.arrive(arrival("s0", given, known=True, expected_tokens=9999), e.now_s)
    assert isinstance(decision, Admitted)
    assert decision.capacity is not None
    assert decision.capacity.known_session
    assert e.gate.entry.granted == {}  # nothing was admitted, so nothing settles
    assert not e.gate.capacity(arrival("next", given), e.now_s).settling


# Cells ---------------------------------------------------------------------------------------------------------------


def test_headroom_goes_by_what_a_session_holds_on_its_own() -> None:
    """Not by a full context of 16,384, of which not even one would fit."""
    e = with_sessions(2, 100.0)
    e.cells_free = 7_900
    e.read()
    capacity = e.gate.capacity(arrival("next", policy(1.0)), e.now_s)
    assert capacity.headroom_sessions == 7
    assert capacity.kv_headroom_pct == pytest.approx(7.9)
    e.cells_free = 999
    e.read()
    capacity = e.gate.capacity(arrival("next", policy(1.0)), e.now_s)
    assert (capacity.can_admit, capacity.reason, capacity.headroom_sessions) == (False, "kv headroom exhausted", 0)


def test_headroom_ends_where_the_floor_does() -> None:
    e = with_sessions(2, 30.0)
    # 60 tokens per second carry 4 sessions at 15.
    assert e.gate.capacity(arrival("next", policy(14.9)), e.now_s).headroom_sessions == 2


def test_the_split_cache_counts_streams() -> None:
    e = with_sessions(2, 100.0)
    e.streams = Streams(4, 2, 4096)
    e.read()
    given = policy(1.0)
    capacity = e.gate.capacity(arrival("next", given, prefix_len=1000, expected_tokens=3096), e.now_s)
    assert (capacity.can_admit, capacity.headroom_sessions) == (True, 2)
    body = capacity.to_json()
    assert [body[f"kv_{k}"] for k in ("streams_total", "streams_free", "cells_per_stream")] == [4, 2, 4096]
    capacity = e.gate.capacity(arrival("next", given, prefix_len=1000, expected_tokens=3097), e.now_s)
    assert (capacity.can_admit, capacity.reason) == (False, "context headroom exhausted")
    e.streams = Streams(4, 0, 4096)
    e.read()
    capacity = e.gate.capacity(arrival("next", given, overcommit=True), e.now_s)
    assert (capacity.can_admit, capacity.reason) == (False, "no free stream (split cache)")


def test_compaction_pressure_is_the_nearer_of_both_walls() -> None:
    e = engine()
    e.cells_free = 25_000
    e.read()
    assert e.gate.capacity(arrival("next"), e.now_s).compaction_pressure == 0.0  # nobody is live
    e.put("a", "idle", ctx_used=4096)
    e.read()
    assert e.gate.capacity(arrival("next"), e.now_s).compaction_pressure == pytest.approx(0.5)
    e.put("a", "idle", ctx_used=12_288)
    e.read()
    assert e.gate.capacity(arrival("next"), e.now_s).compaction_pressure == pytest.approx(0.75)


# Modes ---------------------------------------------------------------------------------------------------------------


def test_advisory_reports_and_refuses_nobody() -> None:
    e = with_sessions(4, 15.0)
    given = policy(30.0, mode="advisory")
    assert not e.gate.capacity(arrival("next", given), e.now_s).can_admit
    decision, _ = e.gate.arrive(arrival("next", given), e.now_s)
    assert isinstance(decision, Admitted)
    assert e.gate.capacity(arrival("after", given), e.now_s).settling


def test_warn_lets_in_and_says_how_many_more() -> None:
    e, given = saturated(on_saturation="warn")
    decision, _ = e.gate.arrive(arrival("next", given), e.now_s)
    assert isinstance(decision, Admitted)
    assert (decision.warned, decision.sessions_remaining) == (True, 0)


def test_warn_does_not_pass_the_context_arm() -> None:
    e, given = saturated(on_saturation="warn")
    decision, _ = e.gate.arrive(arrival("next", given, expected_tokens=10**6), e.now_s)
    assert isinstance(decision, Refused)


def test_a_queued_session_comes_in_when_the_rate_allows() -> None:
    e, given = saturated(on_saturation="queue", guarantee_min_sessions=0)
    held, _ = e.gate.arrive(arrival("next", given), e.now_s)
    assert isinstance(held, Held)
    assert held.until_s == e.now_s + 30
    for name in ("s1", "s2", "s3"):
        del e.sessions[name]
    wakes = [w for t in e.run(10, 62.0) for w in t.wakes]
    assert [(w.ticket_id, type(w.decision)) for w in wakes] == [(held.ticket_id, Admitted)]


def test_a_queued_session_is_refused_when_its_time_is_over() -> None:
    e, given = saturated(on_saturation="queue", queue_timeout_ms=2000)
    held, _ = e.gate.arrive(arrival("next", given), e.now_s)
    assert e.gate.next_wake_s() == held.until_s
    assert [w for t in e.run(1.5, 15.0) for w in t.wakes] == []
    (wake,) = e.run(0.5, 15.0)[0].wakes
    assert isinstance(wake.decision, Refused)
    assert (wake.decision.code, wake.decision.hold_ms) == ("queue_timeout", 2000)


def test_the_queue_has_an_end() -> None:
    e, given = saturated(on_saturation="queue", max_queue=2)
    decisions = [e.gate.arrive(arrival(f"n{i}", given), e.now_s)[0] for i in range(3)]
    assert [type(d) for d in decisions] == [Held, Held, Refused]
    assert decisions[2].code == "queue_full"


def test_without_room_to_hold_it_a_settling_pool_does_what_it_does_when_saturated() -> None:
    for on_saturation, expected in (("reject", Refused), ("warn", Admitted)):
        e, given = engine(), policy(on_saturation=on_saturation, max_queue=0)
        e.admit("a", given)
        e.read()
        decision, _ = e.gate.arrive(arrival("b", given), e.now_s)
        assert isinstance(decision, expected)


def test_what_can_never_fit_does_not_wait() -> None:
    e, given = saturated(on_saturation="queue")
    decision, _ = e.gate.arrive(arrival("huge", given, expected_tokens=100_001), e.now_s)
    assert isinstance(decision, Refused)
    assert decision.reason == "context headroom exhausted"


def test_who_needs_too_many_cells_lets_others_pass_until_he_waited_for_half_his_time() -> None:
    e, given = saturated(on_saturation="queue", guarantee_min_sessions=0)
    big, _ = e.gate.arrive(arrival("big", given, expected_tokens=95_000), e.now_s)
    small, _ = e.gate.arrive(arrival("small", given, expected_tokens=100), e.now_s)
    for name in ("s1", "s2", "s3"):
        del e.sessions[name]
    wakes = [w for t in e.run(10, 62.0) for w in t.wakes]
    assert [w.ticket_id for w in wakes] == [small.ticket_id]
    e.put("small", own_cells=1000)
    e.run(6, 120.0)
    later, _ = e.gate.arrive(arrival("later", given, expected_tokens=100), e.now_s)
    assert [w for t in e.run(5, 120.0) for w in t.wakes] == []
    assert [e.gate.standing(t.ticket_id, e.now_s).place for t in (big, later)] == [1, 2]


def test_a_stale_reading_is_never_free_capacity() -> None:
    e = with_sessions(1, 100.0)
    given = policy(1.0)
    assert e.gate.capacity(arrival("next", given), e.now_s + 3.0).can_admit
    decision, _ = e.gate.arrive(arrival("next", given), e.now_s + 3.1)
    assert isinstance(decision, Refused)
    assert (decision.status, decision.reason) == (503, "measurement stale")
    # Without a policy nothing is stopped.
    assert isinstance(e.gate.arrive(arrival("other"), e.now_s + 100)[0], Admitted)


def test_without_a_policy_nothing_is_kept() -> None:
    e = engine()
    decision, wakes = e.gate.arrive(arrival("a"), e.now_s)
    assert (decision, wakes) == (Admitted(), [])
    assert (e.gate.entry.scopes, e.gate.entry.granted, e.gate.counts.n_admitted) == ({}, {}, 0)


def test_a_question_changes_nothing() -> None:
    e, given = saturated()
    before = repr((e.gate.entry.scopes, e.gate.entry.granted, e.gate.counts))
    first = e.gate.capacity(arrival("next", given), e.now_s)
    assert e.gate.capacity(arrival("next", given), e.now_s) == first
    assert repr((e.gate.entry.scopes, e.gate.entry.granted, e.gate.counts)) == before


def test_a_clients_own_retry_is_not_counted_as_another_refusal() -> None:
    e, given = saturated()
    e.gate.arrive(arrival("next", given), e.now_s)
    e.gate.arrive(arrival("next", given, is_retry=True), e.now_s)
    assert dict(e.gate.counts.refused) == {"projected mean tps below floor": 1}
    assert e.gate.counts.n_retries_refused == 1


def test_a_policy_that_goes_away_lets_in_who_waits_for_it() -> None:
    e, given = saturated(on_saturation="queue")
    held, _ = e.gate.arrive(arrival("next", given), e.now_s)
    wakes = e.gate.policies_changed(lambda pool: arrival("x", None, pool).ruling, e.now_s)
    assert [(w.ticket_id, type(w.decision)) for w in wakes] == [(held.ticket_id, Admitted)]


def test_a_window_does_not_outlive_its_policy() -> None:
    """What the rate did meanwhile, hours later, says nothing about that admission."""
    e = with_sessions(1, 40.0)
    given = policy(1.0)
    e.admit("b", given)
    e.gate.policies_changed(lambda pool: arrival("x", None, pool).ruling, e.now_s)
    e.run(20, 10.0)
    e.gate.policies_changed(lambda pool: arrival("x", given, pool).ruling, e.now_s)
    capacity = e.gate.capacity(arrival("next", given), e.now_s)
    assert (capacity.drop_per_admit_ewma, capacity.settling) == (None, False)
    e.run(1, 10.0)
    assert e.gate.capacity(arrival("next", given), e.now_s).drop_per_admit_ewma is None


def test_a_policy_nearer_to_the_pool_takes_over_who_waits() -> None:
    e, given = saturated(on_saturation="queue")
    held, _ = e.gate.arrive(arrival("next", given), e.now_s)
    lower = policy(1.0, on_saturation="queue")
    wakes = e.gate.policies_changed(lambda _: arrival("x", lower, 9).ruling, e.now_s)
    assert [(w.ticket_id, type(w.decision)) for w in wakes] == [(held.ticket_id, Admitted)]


@pytest.mark.parametrize(("timeout_ms", "waits_s"), [(2_000, 2), (60_000, 30)])
def test_who_waits_does_so_as_the_new_policy_says_but_no_longer_than_he_was_told(timeout_ms: int, waits_s: int) -> None:
    e, given = saturated(on_saturation="queue", queue_timeout_ms=30_000)
    held, _ = e.gate.arrive(arrival("next", given), e.now_s)
    since_s = e.now_s
    other = replace(given, queue_timeout_ms=timeout_ms)
    assert e.gate.policies_changed(lambda pool: arrival("x", other, pool).ruling, e.now_s + 1) == []
    assert e.gate.next_wake_s() == since_s + waits_s
    e.now_s = since_s + waits_s - 0.1
    assert e.read().wakes == ()
    e.now_s += 0.1
    (wake,) = e.read().wakes
    assert (wake.ticket_id, wake.decision.code) == (held.ticket_id, "queue_timeout")


@pytest.mark.parametrize(
    ("seconds", "u", "expected"),
    [
        (8.0, 0.5, (8, 8000)),
        (8.0, 0.0, (6, 6000)),
        (8.0, 1.0, (10, 10000)),
        (500.0, 0.5, (60, 60000)),
        (0.1, 0.5, (1, 1000)),
    ],
)
def test_retry_after_is_spread_and_bounded(seconds: float, u: float, expected: tuple[int, int]) -> None:
    assert retry_after(seconds, u) == expected


def test_the_answer_has_every_field() -> None:
    e, given = saturated()
    body = e.gate.capacity(arrival("next", given), e.now_s).to_json()
    assert set(body) >= {
        *("can_admit", "projected_mean_tps_if_admitted", "headroom_sessions", "kv_headroom_pct", "reason"),
        *("settling", "settle_remaining_ms", "n_warming", "n_pool_sessions", "guaranteed"),
        *("projected_mean_tps_model", "projected_mean_tps_measured", "drop_per_admit_ewma", "known_session"),
        *("projected_idle_estimate", "compaction_pressure"),
        *("kv_streams_total", "kv_streams_free", "kv_cells_per_stream"),
    }
    assert body["kv_streams_total"] is None
