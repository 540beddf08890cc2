"""The line before a pool's gate, under a clock of its own: no thread, no loop, no server."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.client import Capacity, PaceEvent, PoolSaturatedError
from polykv_proxy.client.asking import Call
from polykv_proxy.client.line import (
    HARD,
    Acquiring,
    Admission,
    Asking,
    Go,
    Line,
    Pause,
    Wait,
    acquire,
    decide,
    penalty_s,
)
from polykv_proxy.gate import verdict

OK = Capacity(can_admit=True, reason="ok", target_tps_per_session=10.0, n_warming=0, guaranteed=False)


def ok(**fields: Any) -> Capacity:
    return OK.model_copy(update=fields)


def settling(left_ms: float | None) -> Capacity:
    return ok(can_admit=False, reason="measurement settling", settling=True, settle_remaining_ms=left_ms)


def full(reason: str = "projected mean tps below floor") -> Capacity:
    return ok(can_admit=False, reason=reason)


# What is decided ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "overcommit", "decision"),
    [
        (ok(), False, Go(None, "ok")),
        (ok(guaranteed=True, reason="guaranteed minimum"), False, Go("guarantee", "guaranteed minimum")),
        (
            ok(guaranteed=True, reason="guaranteed minimum", settling=True, settle_remaining_ms=900, n_warming=2),
            False,
            Go("guarantee", "guaranteed minimum"),
        ),
        (settling(740), False, Wait("settle", "measurement settling", 0.74)),
        (settling(0), False, Wait("settle", "measurement settling", 0.02)),
        (settling(None), False, Wait("settle", "measurement settling")),
        (full(), False, Wait("saturated", "projected mean tps below floor")),
        (ok(n_warming=1), False, Wait("settle", "sessions without a rate yet")),
        (ok(n_warming=1, target_tps_per_session=None), False, Go(None, "ok")),
        (full(), True, Go("overcommit", "projected mean tps below floor")),
        (settling(740), True, Go("overcommit", "measurement settling")),
        (full("context headroom exhausted"), True, Wait("saturated", "context headroom exhausted")),
        (full("no free stream (split cache)"), True, Wait("saturated", "no free stream (split cache)")),
        (
            ok(guaranteed=True, can_admit=False, reason="no free stream (split cache)"),
            False,
            Wait("saturated", "no free stream (split cache)"),
        ),
    ],
)
def test_who_stands_first(found: Capacity, overcommit: bool, decision: Go | Wait) -> None:
    assert decide(found, overcommit=overcommit) == decision


def test_the_hard_reasons_are_the_gates_own() -> None:
    assert set(HARD) == set(verdict.HARD)


def test_a_penalty_is_never_shorter_than_what_was_asked() -> None:
    assert [penalty_s(8, 1.0, u) for u in (0.0, 1.0)] == [8.0, 10.0]
    assert penalty_s(None, 1.0, 0.0) == 1.0


# The line ----------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A clock, a server that answers ``capacity`` with what ``answer`` says, and those who want in."""

    answer: Callable[[str | None], Capacity] = lambda session_id: OK
    now_s: float = 100.0
    line: Line = field(default_factory=Line)
    events: list[PaceEvent] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    n_asked: int = 0

    def who(self, name: str | None = None, **asking: Any) -> "Someone":
        return Someone(self, name, asking)

    def reply(self, call: Call[Capacity]) -> Capacity:
        self.n_asked += 1
        session_id = call.query.get("session_id")
        if session_id in self.known:
            return ok(known_session=True, reason="continuation")
        return self.answer(session_id)


class Someone:
    """Stands in line as far as it comes without waiting."""

    def __init__(self, world: World, name: str | None, asking: dict[str, Any]):
        self.world, self.name = world, name
        wanted = Asking("p", session_id=name, on_event=world.events.append, **asking)
        self.acquiring: Acquiring = acquire(world.line, wanted, lambda: world.now_s, lambda: 0.5)
        self.pause: Pause | None = None
        self.until_s: float | None = None
        self.admission: Admission | None = None
        self.go()

    def go(self) -> "Someone":
        answer: Capacity | None = None
        try:
            while isinstance(wanted := self.acquiring.send(answer), Call):
                answer = self.world.reply(wanted)
        except StopIteration as done:
            self.admission, self.pause = done.value, None
            return self
        self.pause = wanted
        self.until_s = None if wanted.seconds is None else self.world.now_s + wanted.seconds
        return self

    @property
    def woken(self) -> bool:
        return self.pause is not None and self.world.line.version != self.pause.seen

    @property
    def waits_s(self) -> float | None:
        assert self.pause is not None
        return self.pause.seconds


def test_with_room_it_goes_at_once() -> None:
    world = World()
    assert world.who("a").admission is not None
    assert world.events == []
    assert world.who().pause is not None  # the one before it has not begun


def test_one_after_the_other_in_order_of_coming() -> None:
    world = World()
    first, second, third = world.who("a"), world.who("b"), world.who("c")
    assert first.admission is not None
    assert (second.waits_s, third.waits_s) == (1.0, None)  # the second looks, the third need not
    first.admission.accepted()
    assert second.woken
    assert third.woken
    third.go()
    assert third.admission is None
    second.go()
    assert second.admission is not None
    third.go()
    assert third.admission is None
    second.admission.abandon()
    assert third.go().admission is not None


def test_it_waits_for_as_long_as_it_settles_at_most() -> None:
    world = World(lambda session_id: settling(1250))
    someone = world.who("a", poll_interval_s=2.0)
    assert someone.waits_s == 1.25
    assert world.who("b", poll_interval_s=2.0).waits_s is None
    (event,) = world.events
    assert (event.kind, event.reason, event.wait_s, event.session_id) == ("settle", "measurement settling", 1.25, "a")
    world.answer = lambda session_id: settling(300)
    world.now_s += 1.25
    assert someone.go().waits_s == 0.3
    assert len(world.events) == 1  # it is still the same
    world.answer = lambda session_id: ok(guaranteed=True, reason="guaranteed minimum")
    world.now_s += 0.3
    assert someone.go().admission is not None
    assert [event.kind for event in world.events] == ["settle", "guarantee"]
    early = World(lambda session_id: settling(4900)).who("a", poll_interval_s=0.5)
    assert early.waits_s == 0.5  # it may be over before


def test_it_looks_again_while_there_is_no_room() -> None:
    world = World(lambda session_id: full())
    someone = world.who("a", poll_interval_s=2.0)
    assert someone.waits_s == 2.0
    assert (world.events[0].kind, world.events[0].reason) == ("saturated", "projected mean tps below floor")
    assert world.events[0].capacity == full()


def test_only_the_first_one_asks() -> None:
    world = World(lambda session_id: full())
    line = [world.who() for _ in range(5)]
    assert world.n_asked == 1
    for someone in line[1:]:
        someone.go()
    assert world.n_asked == 1


def test_an_admission_is_open_until_the_server_knows_the_session() -> None:
    world = World()
    first, second = world.who("a"), world.who("b")
    world.now_s += 1
    second.go()
    assert second.admission is None
    world.known.add("a")
    world.now_s += 1
    assert second.go().admission is not None
    assert first.admission is not None


def test_an_admission_that_nobody_uses_holds_up_nobody_for_ever() -> None:
    world = World()
    world.who("a")
    second = world.who("b", accept_s=60.0)
    world.now_s += 59
    assert second.go().admission is None
    world.now_s += 1
    assert second.go().admission is not None


def test_a_session_that_is_known_does_not_stand_in_line() -> None:
    world = World(lambda session_id: full())
    waiting = world.who("a")
    world.known.add("k")
    known = world.who("k")
    assert known.admission is not None
    assert known.admission.reason == "continuation"
    assert waiting.admission is None
    known.admission.abandon()
    assert world.who("b").waits_s is None


def test_a_refusal_holds_up_everybody() -> None:
    world = World()
    world.line.not_before(world.now_s + 5)
    someone = world.who("a")
    assert (someone.admission, someone.waits_s) == (None, 5.0)
    world.line.not_before(world.now_s + 1)  # never less
    world.now_s += 4
    assert someone.go().waits_s == 1.0
    world.now_s += 1
    assert someone.go().admission is not None


def test_who_waited_long_enough_is_told_why() -> None:
    world = World(lambda session_id: full())
    someone = world.who("a", max_wait_s=2.5)
    for _ in range(2):
        world.now_s += 1
        someone.go()
    assert someone.waits_s == 0.5
    world.now_s += 0.5
    with pytest.raises(PoolSaturatedError) as caught:
        someone.go()
    assert (caught.value.reason, caught.value.pool_id, caught.value.capacity) == (full().reason, "p", full())
    assert world.who("b").waits_s is not None  # it left the line


def test_who_leaves_wakes_the_next_one() -> None:
    world = World(lambda session_id: full())
    first, second = world.who("a"), world.who("b")
    assert second.waits_s is None
    first.acquiring.close()
    assert second.woken
    second.go()
    assert second.waits_s == 1.0


def test_a_failed_question_leaves_the_line() -> None:
    world = World()

    def fails(session_id: str | None) -> Capacity:
        raise OSError("gone")

    world.answer = fails
    someone = world.who
    with pytest.raises(OSError, match="gone"):
        someone("a")
    world.answer = lambda session_id: OK
    assert world.who("b").admission is not None


def test_who_looked_before_a_change_is_not_put_to_sleep() -> None:
    line, woken = Line(), []
    ticket = line.join()
    seen = line.look(ticket)[0]
    line.not_before(1.0)
    assert not line.wake_me(lambda: woken.append(1), seen)
    assert line.wake_me(lambda: woken.append(2), line.version)
    line.not_before(2.0)
    line.not_before(3.0)
    assert woken == [2]


def test_lines_are_one_for_each_proxy_and_pool() -> None:
    line = Line.shared("http://a", 3)
    assert Line.shared("http://a", "3") is line
    assert Line.shared("http://a", 4) is not line
    assert Line.shared("http://b", 3) is not line


# Against a toy gate ------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 4))
def test_nobody_is_forgotten_and_nobody_overtakes(seed: int, n: int, room: int) -> None:
    """Whatever the order of events: one admission at a time, first come first served, never more than there is room."""
    draw = random.Random(seed)
    live: set[str] = set()
    world = World(lambda session_id: ok() if len(live) < room else full())
    waiting = [world.who(f"s{i}") for i in range(n)]
    admitted: list[str] = []
    left: set[str] = set()
    for _ in range(400):
        for someone in waiting:
            if someone.admission is not None and someone.name not in admitted and someone.name is not None:
                admitted.append(someone.name)
                if someone.name not in left:
                    live.add(someone.name)
                    world.known.add(someone.name)
                    someone.admission.accepted()
        assert len(live) <= room
        act = draw.randrange(4)
        if act == 0 and live:
            live.remove(draw.choice(sorted(live)))
        elif act == 1 and draw.random() < 0.05:
            someone = draw.choice(waiting)
            if someone.admission is None and someone.pause is not None:
                someone.acquiring.close()
                someone.pause = None
                left.add(str(someone.name))
        else:
            world.now_s += draw.choice([0.1, 0.5, 1.0])
            for someone in draw.sample(waiting, len(waiting)):
                due = someone.until_s is not None and world.now_s >= someone.until_s
                if someone.pause is not None and (due or someone.woken):
                    someone.go()
        if len(admitted) + len(left) == n:
            break
    assert admitted == [f"s{i}" for i in range(n) if f"s{i}" not in left]
