"""Rates from counters: decode only, experienced and clear, kept between turns."""

import pytest

from polykv_proxy.gate.facts import EngineFacts, SessionFacts, State
from polykv_proxy.gate.rate import RateBook
from polykv_proxy.ids import PoolId, SessionId

A, B = SessionId("a"), SessionId("b")


def reading(t: float, *sessions: SessionFacts, n_prefilled: int = 0, epoch: str = "1") -> EngineFacts:
    return EngineFacts(t, sessions, n_prefilled=n_prefilled, epoch=epoch)


def one(session: SessionId, n: int, state: State = "decoding", n_turns: int = 1) -> SessionFacts:
    return SessionFacts(session, PoolId(1), PoolId(1), state, n_turns, n)


def test_a_steady_rate_is_told_from_the_first_interval_on() -> None:
    book = RateBook()
    for i in range(9):
        book.update(reading(i * 0.5, one(A, i * 10)))
        rate = book.get(A)
        assert rate is not None
        assert rate.tps == (None if i == 0 else pytest.approx(20.0))


@pytest.mark.parametrize(("tps", "time_constant_s"), [(20, 2.0), (512, 0.25)])
def test_the_window_is_two_seconds_or_128_tokens(tps: int, time_constant_s: float) -> None:
    """After one time constant at half the rate, 1 - 1/e of the way is gone."""
    book, step_s = RateBook(), 0.125
    for i in range(100):
        book.update(reading(i * step_s, one(A, round(i * tps * step_s))))
    n, t = 99 * tps * step_s, 99 * step_s
    rate = book.get(A)
    assert rate is not None
    for _ in range(round(time_constant_s / step_s)):
        n, t = n + tps * step_s / 2, t + step_s
        book.update(reading(t, one(A, round(n))))
    assert rate.tps == pytest.approx(tps / 2 + tps / 2 / 2.718, rel=0.06)


def test_prefill_and_pauses_do_not_count() -> None:
    book = RateBook()
    book.update(reading(0, one(A, 0)))
    book.update(reading(1, one(A, 20)))
    book.update(reading(5, one(A, 20, "idle")))
    book.update(reading(9, one(A, 20, "prefilling", 2)))
    book.update(reading(30, one(A, 21, "decoding", 2)))
    rate = book.get(A)
    assert rate is not None
    assert rate.tps == pytest.approx(20.0)


def test_a_turn_that_ended_and_another_that_began_are_no_interval() -> None:
    book = RateBook()
    book.update(reading(0, one(A, 0, n_turns=1)))
    book.update(reading(4, one(A, 8, n_turns=2)))
    rate = book.get(A)
    assert rate is not None
    assert rate.tps is None


def test_warming_is_who_never_had_a_sample() -> None:
    book = RateBook()
    book.update(reading(0, one(A, 0), one(B, 0, "prefilling")))
    assert book.read(reading(0, one(A, 0), one(B, 0, "prefilling"))).n_warming == 2
    now = reading(1, one(A, 30), one(B, 0, "prefilling"))
    book.update(now)
    rates = book.read(now)
    assert (rates.mean_active_tps, rates.n_active, rates.n_warming) == (pytest.approx(30.0), 1, 1)
    later = reading(2, one(A, 30, "prefilling", 2), one(B, 0, "prefilling"))
    book.update(later)
    rates = book.read(later)
    assert (rates.mean_active_tps, rates.n_active, rates.n_warming) == (None, 0, 1)


def test_who_has_not_decoded_a_token_between_two_readings_has_no_rate_yet() -> None:
    """Readings may be closer than tokens: a rate of 0 would drag the mean of all down. Then all of the time counts."""
    book = RateBook()
    for t in (0.0, 0.02, 0.04):
        book.update(reading(t, one(A, 3)))
        mean = book.read(reading(t, one(A, 3)))
        assert (mean.mean_active_tps, mean.n_active, mean.n_warming) == (None, 0, 1)
    book.update(reading(0.1, one(A, 5)))
    rate = book.get(A)
    assert rate is not None
    assert (rate.tps, rate.clear_tps) == (pytest.approx(20.0), pytest.approx(20.0))


def test_a_prefill_stall_is_marked_and_left_out_of_the_clear_rate() -> None:
    book = RateBook()
    for i in range(5):
        book.update(reading(i * 0.5, one(A, i * 10)))
    book.update(reading(2.5, one(A, 40), n_prefilled=512))
    book.update(reading(3.0, one(A, 40), n_prefilled=1024))
    rate = book.get(A)
    assert rate is not None
    assert rate.tps is not None
    assert rate.stalled
    assert rate.tps < 15
    assert rate.clear_tps == pytest.approx(20.0)
    book.update(reading(3.5, one(A, 50), n_prefilled=1024))
    assert not rate.stalled
    assert rate.stall_ms == pytest.approx(1000)  # 1.5 s for ten tokens that usually take half a second
    assert rate.clear_tps == pytest.approx(20.0)


def test_a_long_batch_with_a_prompt_in_it_is_a_stall_though_nothing_moves_meanwhile() -> None:
    """Ten readings per second; one batch of 2 s gives one token, and tells of its prompt tokens only at its end."""
    book = RateBook()
    other = one(B, 0, "prefilling")
    for i in range(30):
        book.update(reading(i * 0.1, one(A, i * 2), other))
    for i in range(20):
        book.update(reading(3.0 + i * 0.1, one(A, 58), other))
    rate = book.get(A)
    assert rate is not None
    assert rate.stalled
    book.update(reading(5.0, one(A, 59), other, n_prefilled=2048))
    assert not rate.stalled
    assert rate.stall_ms == pytest.approx(2050, rel=0.02)
    assert rate.clear_tps == pytest.approx(20.0)
    assert rate.tps is not None
    assert rate.tps < 10


def test_getting_nothing_without_any_prefill_is_slow_not_stalled() -> None:
    book = RateBook()
    for i in range(5):
        book.update(reading(i * 0.5, one(A, i * 10)))
    book.update(reading(3.0, one(A, 40)))
    rate = book.get(A)
    assert rate is not None
    assert rate.clear_tps is not None
    assert not rate.stalled
    assert rate.clear_tps < 15


def test_short_readings_without_a_token_are_no_stall() -> None:
    """At 10 readings per second a decoder of 8 tokens per second gets nothing in some of them."""
    book = RateBook()
    for i in range(100):
        book.update(reading(i * 0.1, one(A, int(i * 0.8)), n_prefilled=i * 5))
        rate = book.get(A)
        assert rate is not None
        assert not rate.stalled
    assert rate.clear_tps == pytest.approx(8.0, rel=0.15)


def test_a_new_start_of_the_engine_compares_nothing() -> None:
    book = RateBook()
    book.update(reading(0, one(A, 1000)))
    book.update(reading(1, one(A, 1020)))
    book.update(reading(2, one(A, 5000), epoch="2"))
    rate = book.get(A)
    assert rate is not None
    assert rate.tps == pytest.approx(20.0)


def test_who_is_not_live_is_forgotten() -> None:
    book = RateBook()
    book.update(reading(0, one(A, 0)))
    book.update(reading(1))
    assert book.get(A) is None


def test_what_a_reply_told_counts_until_something_is_measured() -> None:
    book = RateBook()
    told = SessionFacts(A, PoolId(1), PoolId(1), "decoding", 1, 0, reply_tps=12.0)
    book.update(reading(0, told))
    assert book.read(reading(0, told)).mean_active_tps == 12.0
    book.update(reading(1, one(A, 30)))
    assert book.read(reading(1, one(A, 30))).mean_active_tps == pytest.approx(30.0)


def test_stale_order_of_readings_changes_nothing() -> None:
    book = RateBook()
    book.update(reading(0, one(A, 0)))
    book.update(reading(1, one(A, 20)))
    book.update(reading(1, one(A, 99)))
    book.update(reading(0.5, one(A, 7)))
    rate = book.get(A)
    assert rate is not None
    assert rate.tps == pytest.approx(20.0)
