"""Rates are what the engine's stats say, of the right session, or unknown: virtual stats, right values."""

from typing import Any

import pytest

from polykv_proxy.control.rates import STALE_S, Aggregate, Look, Rates
from polykv_proxy.ids import SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.turns import Session, Turn, Usage
from polykv_proxy.upstream import SlotStats, Stats
from polykv_proxy.upstream.wire import FinishedTask


def looks(aggregate: Aggregate, *given: tuple[float, int], off_s: float = 1000.0) -> float | None:
    """(seconds, tokens so far), seen at once by both clocks, which are ``off_s`` apart."""
    for at_s, n in given:
        aggregate.note(Look(at_s + off_s, n, at_s, at_s))
    return aggregate.tps()


def test_the_aggregate_is_what_the_counter_grew_by_over_the_engines_clock() -> None:
    assert looks(Aggregate(2.0), (0, 0), (1, 40), (2, 80), (3, 140), (4, 200)) == 60.0
    assert looks(Aggregate(2.0), *((i / 10, 3 * i) for i in range(100))) == pytest.approx(30.0)


def test_of_looks_that_are_not_a_window_apart_the_nearest_count() -> None:
    assert looks(Aggregate(2.0), (0, 0), (1.01, 10), (3, 100)) == pytest.approx(90 / 1.99)
    assert looks(Aggregate(0.1), (0, 0), (1, 50)) == 50.0, "a window shorter than the heartbeat"


def test_nobody_decoding_is_0_and_too_little_is_unknown() -> None:
    assert looks(Aggregate(2.0), (0, 7), (1, 7), (2, 7)) == 0.0
    assert looks(Aggregate(2.0)) is None
    assert looks(Aggregate(2.0), (0, 0)) is None
    assert looks(Aggregate(2.0), (0, 0), (0.1, 50)) is None, "two looks in a moment say nothing about a window"


def test_a_gap_is_not_a_window() -> None:
    aggregate = Aggregate(2.0)
    assert looks(aggregate, (0, 0), (1, 10), (60, 6000)) is None
    assert looks(aggregate, (61, 6020), (62, 6040)) == 20.0


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0, 1.0])
def test_a_clock_that_was_set_makes_no_rate(step_s: float) -> None:
    aggregate = Aggregate(2.0)
    assert looks(aggregate, (0, 0), (1, 40), (2, 80)) == 40.0
    assert looks(aggregate, (3, 120), off_s=1000 + step_s) is None
    assert looks(aggregate, (4, 160), (5, 200), off_s=1000 + step_s) == 40.0


def test_an_answer_that_took_long_is_no_reason_to_doubt_the_clock() -> None:
    aggregate = Aggregate(2.0)
    aggregate.note(Look(ts=100.0, n_decoded=0, asked_s=0.0, known_s=0.1))
    aggregate.note(Look(ts=103.9, n_decoded=78, asked_s=1.0, known_s=4.0))
    assert aggregate.tps() == pytest.approx(20.0)


def test_a_counter_that_was_read_while_it_moved_does_not_count() -> None:
    """A task that ends is counted twice for a moment."""
    assert looks(Aggregate(2.0), (0, 0), (1, 40), (2, 480), (2.1, 84), (3, 120)) == 40.0


# Whose rate it is ----------------------------------------------------------------------------------------------------


class Watch:
    """What ``Rates`` reads of ``EngineWatch``."""

    def __init__(self) -> None:
        self.state, self.hooks, self.sleeping = "ready", True, False
        self.epoch: str | None = "one"
        self.stats: Stats | None = None
        self.asked_s = 0.0


class Bench:
    """An engine with two slots, seen by hand; ``now_s`` is the time."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.book, self.watch = SessionBook(), Watch()
        self.rates = Rates(self.book, self.watch, lambda: self.now_s, window_ms=2000)  # type: ignore[arg-type]

    def begin(self, name: str = "a", slot: int | None = 0) -> Turn:
        turn = self.book.begin(self.book.name(SessionId(name), self.now_s), self.now_s)
        turn.sent(self.now_s, SlotId(slot) if slot is not None else None)
        return turn

    def see(self, *slots: dict[str, Any], asked_s: float | None = None, finished: Any = (), **more: Any) -> None:
        self.now_s += 1.0
        self.watch.asked_s = self.now_s if asked_s is None else asked_s
        shown = tuple(SlotStats(**({"id": i} | slot)) for i, slot in enumerate(slots))
        fields = {"epoch": "one", "ts": self.now_s, "n_ctx_slot": 4096} | more
        self.watch.stats = Stats(slots=shown, finished=tuple(finished), **fields)
        self.rates.note()

    def told(self, session: Session) -> tuple[str, float | None, int | None, int | None]:
        return (
            session.state,
            self.rates.tps_of(session),
            self.rates.n_decoded_of(session),
            self.rates.ctx_used_of(session),
        )


IDLE: dict[str, Any] = {"state": "idle", "id_task": -1}


def at(task: int, n_decoded: int, tps: float | None, n_prompt: int = 100, **more: Any) -> dict[str, Any]:
    state = "generating" if n_decoded else "prompt"
    return {"state": state, "id_task": task, "n_prompt": n_prompt, "n_decoded": n_decoded, "tps_ewma": tps} | more


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_turn_from_its_prompt_to_its_end(bench: Bench) -> None:
    turn = bench.begin()
    session = turn.session
    assert bench.told(session) == ("prefilling", None, None, None), "no stats at all yet"
    bench.see(at(7, 0, None), IDLE)
    assert bench.told(session) == ("prefilling", None, 0, 100)
    bench.see(at(7, 1, None), IDLE)
    assert bench.told(session) == ("decoding", None, 1, 101), "one token has no rate: warming"
    bench.see(at(7, 21, 20.0), IDLE)
    assert bench.told(session) == ("decoding", 20.0, 21, 121)
    bench.now_s += 0.5
    bench.book.end(turn, Usage(cache_n=60, prompt_n=40, predicted_n=31, tps=22.0), bench.now_s)
    assert bench.told(session) == ("idle", 22.0, 31, 131)
    bench.see({**IDLE, "tps_ewma": 24.0}, IDLE, finished=[done(7, 0, 31)])
    assert bench.told(session) == ("idle", 24.0, 31, 131), "the average as it was at the end"
    bench.see({**IDLE, "tps_ewma": 99.0}, IDLE, finished=[done(7, 0, 31), done(8, 0, 9)])
    assert bench.told(session)[1] == 24.0, "somebody else was in that slot"


def done(task: int, slot: int, n: int) -> FinishedTask:
    return FinishedTask(id_task=task, id_slot=slot, n_prompt=100, n_cached=0, n_decoded=n)


def test_a_slot_goes_on_showing_the_rate_of_whoever_had_it_before(bench: Bench) -> None:
    first = bench.begin("a")
    bench.see(at(7, 21, 20.0), IDLE)
    bench.book.end(first, Usage(predicted_n=30), bench.now_s)
    second = bench.begin("b")
    assert bench.told(second.session)[:2] == ("prefilling", None)
    bench.see(at(7, 30, 20.0), IDLE)
    assert bench.told(second.session)[:3] == ("prefilling", None, 0), "the engine closes a task after it answered"
    bench.see(at(8, 0, 20.0), IDLE)
    assert bench.told(second.session)[:3] == ("prefilling", None, 0)
    bench.see(at(8, 1, 20.0), IDLE)
    assert bench.told(second.session)[:3] == ("decoding", None, 1), "not before its own second token"
    bench.see(at(8, 5, 4.0), IDLE)
    assert bench.told(second.session)[:3] == ("decoding", 4.0, 5)
    assert bench.told(first.session)[:3] == ("idle", 20.0, 30)


def test_stats_that_were_asked_for_before_it_was_sent_say_nothing_of_it(bench: Bench) -> None:
    turn = bench.begin()
    bench.see(at(7, 50, 20.0), IDLE, asked_s=bench.now_s - 0.1)
    assert bench.told(turn.session) == ("prefilling", None, 0, None)


def test_a_rate_lives_on_between_turns_and_into_the_next(bench: Bench) -> None:
    session = bench.begin().session
    bench.see(at(7, 21, 20.0), IDLE)
    bench.book.end(next(iter(session.turns.values())), Usage(predicted_n=21), bench.now_s)
    bench.see(IDLE, IDLE)
    assert bench.told(session)[:2] == ("idle", 20.0)
    bench.begin()
    bench.see(at(8, 0, 20.0), IDLE)
    assert bench.told(session)[:3] == ("prefilling", 20.0, 21)
    bench.see(at(8, 1, None), IDLE)
    assert bench.told(session)[:3] == ("decoding", 20.0, 22)
    bench.see(at(8, 11, 10.0), IDLE)
    assert bench.told(session)[:3] == ("decoding", 10.0, 32)


def test_what_an_abandoned_turn_decoded_was_decoded(bench: Bench) -> None:
    turn = bench.begin()
    bench.see(at(7, 21, 20.0), IDLE)
    bench.book.end(turn, Usage(), bench.now_s)
    assert bench.told(turn.session) == ("idle", 20.0, 21, 121)


def test_a_list_of_prompts_is_one_task_after_the_other(bench: Bench) -> None:
    turn = bench.begin()
    bench.see(at(7, 21, 20.0), IDLE)
    bench.see(at(8, 5, 20.0), IDLE, finished=[done(7, 0, 30)])
    assert bench.rates.n_decoded_of(turn.session) == 35
    bench.see(at(9, 2, 20.0), IDLE, finished=[done(7, 0, 30), done(8, 0, 10)])
    assert bench.rates.n_decoded_of(turn.session) == 42


def test_while_somebody_waits_for_a_slot_it_is_not_sure_who_is_in_it(bench: Bench) -> None:
    turn = bench.begin()
    bench.see(at(7, 21, 20.0), IDLE, n_deferred=1)
    assert bench.told(turn.session)[:3] == ("prefilling", None, 0)
    turn.first_token(bench.now_s)
    bench.see(at(7, 41, 20.0), IDLE, n_deferred=1)
    assert bench.told(turn.session)[:3] == ("decoding", 20.0, 41)


def test_after_a_context_shift_the_slot_says_what_is_left(bench: Bench) -> None:
    turn = bench.begin()
    bench.see(at(7, 4090, 20.0, n_ctx=4096, n_tokens=2200), IDLE)
    assert bench.rates.ctx_used_of(turn.session) == 2200


@pytest.mark.parametrize("why", ["away", "loading", "asleep", "stale", "other start", "plain"])
def test_what_is_not_known_now_is_none_and_what_rests_stays(bench: Bench, why: str) -> None:
    rests, runs = bench.begin("rests", 1), bench.begin("runs", 0)
    bench.see(at(7, 21, 20.0), at(8, 11, 10.0), n_decoded_cum=0)
    bench.book.end(rests, Usage(cache_n=0, prompt_n=100, predicted_n=12), bench.now_s)
    bench.see(at(7, 41, 20.0), IDLE, n_decoded_cum=20)
    assert (bench.rates.is_live(), bench.rates.aggregate_tps()) == (True, 20.0)
    assert bench.told(runs.session) == ("decoding", 20.0, 41, 141)
    match why:
        case "away" | "loading":
            bench.watch.state = why
        case "asleep":
            bench.watch.sleeping = True
        case "stale":
            bench.now_s += STALE_S + 0.1
        case "other start":
            bench.watch.epoch = "two"
        case "plain":
            bench.watch.hooks = False
    bench.rates.note()
    assert (bench.rates.is_live(), bench.rates.aggregate_tps()) == (False, None)
    assert bench.told(runs.session) == ("decoding", None, None, None)
    assert bench.told(rests.session) == ("idle", 10.0, 12, 112)


def test_another_start_of_the_engine_begins_anew(bench: Bench) -> None:
    bench.see(IDLE, IDLE, n_decoded_cum=1000)
    bench.see(IDLE, IDLE, n_decoded_cum=1040)
    assert bench.rates.aggregate_tps() is not None
    bench.watch.epoch = "two"
    bench.see(IDLE, IDLE, epoch="two", n_decoded_cum=2000)
    assert bench.rates.aggregate_tps() is None
    bench.see(IDLE, IDLE, epoch="two", n_decoded_cum=2030)
    assert bench.rates.aggregate_tps() == 30.0


def test_a_turn_without_a_slot_of_its_own_has_no_rate(bench: Bench) -> None:
    """An ``id_slot`` that the client chose."""
    turn = bench.begin("a", None)
    bench.see(at(7, 21, 20.0), at(8, 21, 20.0))
    assert bench.told(turn.session)[:2] == ("prefilling", None)
