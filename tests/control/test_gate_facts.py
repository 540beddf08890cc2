"""When a reading was taken, by our clock."""

import pytest

from polykv_proxy.control.gate_facts import EngineClock


def test_late_answers_do_not_move_a_reading() -> None:
    clock, engine_ahead_s = EngineClock(), 1_700_000_000.0
    taken = [100.001, 100.5, 101.1, 101.5, 102.3]
    asked = [100.0, 100.4, 100.7, 101.45, 101.9]
    times = [clock.when("1", at + engine_ahead_s, asked_s, at + 0.2) for at, asked_s in zip(taken, asked, strict=True)]
    assert times == pytest.approx([at - 0.001 for at in taken], abs=1e-6)


def test_it_learns_from_an_answer_that_came_sooner() -> None:
    clock = EngineClock()
    assert clock.when("1", 50.0, 100.0, 100.3) == 100.0
    assert clock.when("1", 51.0, 101.2, 101.3) == 101.2  # taken at 101.2 at the earliest
    assert clock.when("1", 52.0, 101.9, 102.3) == pytest.approx(102.2)


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_a_clock_that_was_set_and_another_start(set_by_s: float) -> None:
    clock = EngineClock()
    assert clock.when("1", 50.0, 100.0, 100.3) == 100.0
    assert clock.when("1", 51.0 + set_by_s, 101.0, 101.3) == 101.0
    assert clock.when("2", 7.0, 103.0, 103.3) == 103.0
    assert clock.when("2", None, 104.0, 104.1) == 104.0
