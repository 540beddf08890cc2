"""The gate under a virtual clock, whatever happens to it; and broken gates that the same checks must catch."""

import random
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from polykv_proxy.gate import entry as entry_module
from polykv_proxy.gate import verdict
from polykv_proxy.gate.entry import Entry
from polykv_proxy.gate.facts import Arrival, EngineFacts
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.measured import Measured
from polykv_proxy.gate.outcome import Decision, Tick, Wake
from polykv_proxy.gate.policy import Policy
from polykv_proxy.gate.queue import Line, Ticket
from polykv_proxy.gate.turns import Turns
from polykv_proxy.gate.verdict import Capacity, Question, Situation
from tests.gate.world import CELLS, PATHS, World

POOLS, TENANTS, OFTEN_FALSE = sorted(PATHS), ["red", "blue"], [False, False, False, True]
EXPECTED = [None, 10, 10, 200, 9000, CELLS + 1]
UNCACHED, SECONDS, FREE = [0, 50, 8000], [0.1, 0.5, 2.0, 7.0, 40.0], [0, 150, 5000, CELLS, CELLS]
FIELDS: dict[str, list[object]] = {
    "target_tps_per_session": [1.0, 14.0, 25.0, 25.0, 500.0],
    "mode": ["enforced", "enforced", "enforced", "advisory"],
    "on_saturation": ["reject", "warn", "queue", "queue"],
    "guarantee_min_sessions": [0, 1, 2],
    "settle_tokens": [0, 20, 48],
    "settle_max_ms": [0, 1000, 5000],
    "estimator": ["settled", "roofline"],
    "max_turn_hold_ms": [0, 4000, 30_000, 30_000],
    "max_queue": [0, 2, 64],
    "queue_timeout_ms": [1000, 30_000],
}
policies = st.builds(Policy, **{name: st.sampled_from(values) for name, values in FIELDS.items()})
picks = st.integers(0, 10**6)


class GateMachine(RuleBasedStateMachine, World):
    @initialize(first=policies, third=policies, fitted=st.booleans())
    def begin(self, first: Policy, third: Policy, fitted: bool) -> None:
        self.start(first, third, fitted)

    @rule(
        pool=st.sampled_from(POOLS),
        tenant=st.sampled_from(TENANTS),
        overcommit=st.sampled_from(OFTEN_FALSE),
        expected=st.sampled_from(EXPECTED),
    )
    def arrives(self, pool: int, tenant: str, overcommit: bool, expected: int | None) -> None:
        self.arrive(pool, tenant, overcommit, expected)

    @precondition(lambda self: self.clients)
    @rule(pick=picks)
    def comes_back(self, pick: int) -> None:
        self.come_back(pick)

    @precondition(lambda self: self.tickets)
    @rule(pick=picks, late=st.booleans())
    def gives_up(self, pick: int, late: bool) -> None:
        self.give_up(pick, late)

    @rule(pick=picks)
    def is_killed(self, pick: int) -> None:
        self.killed_after_its_grant(pick)

    @rule(pick=picks)
    def leaves(self, pick: int) -> None:
        self.goes_away(pick)

    @precondition(lambda self: self.clients)
    @rule(pick=picks, uncached=st.sampled_from(UNCACHED))
    def begins_turn(self, pick: int, uncached: int) -> None:
        self.begin_turn(pick, uncached)

    @precondition(lambda self: self.clients)
    @rule(pick=picks)
    def ends_turn(self, pick: int) -> None:
        self.end_turn(pick)

    @rule(seconds=st.sampled_from(SECONDS), reads=st.booleans())
    def waits(self, seconds: float, reads: bool) -> None:
        self.wait(seconds, reads=reads)

    @rule(cells_free=st.sampled_from(FREE))
    def reads(self, cells_free: int) -> None:
        self.read(cells_free)

    @rule(pool=st.sampled_from([1, 2, 3]), policy=st.none() | policies)
    def policy_changes(self, pool: int, policy: Policy | None) -> None:
        self.change_policy(pool, policy)

    @invariant()
    def all_is_well(self) -> None:
        self.check()

    def teardown(self) -> None:
        if hasattr(self, "gate"):
            self.end_of_storm()


class TestGateMachine(GateMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_gate_machine_deeply() -> None:
    run_state_machine_as_test(GateMachine, settings=settings(max_examples=2000, stateful_step_count=60, deadline=None))


def walk(seed: int, n_steps: int = 60) -> None:
    """The same world at random: many times as fast as a search that keeps what it needs to simplify a failure."""
    rng, world = random.Random(seed), World()

    def a_policy() -> Policy:
        return Policy(**{name: rng.choice(values) for name, values in FIELDS.items()})  # type: ignore[arg-type]

    def pick() -> int:
        return rng.randrange(10**6)

    happenings: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: world.arrive(*(rng.choice(v) for v in (POOLS, TENANTS, OFTEN_FALSE, EXPECTED)))),
        (1, lambda: world.come_back(pick())),
        (2, lambda: world.give_up(pick(), rng.random() < 0.5)),
        (1, lambda: world.killed_after_its_grant(pick())),
        (1, lambda: world.goes_away(pick())),
        (6, lambda: world.begin_turn(pick(), rng.choice(UNCACHED))),
        (3, lambda: world.end_turn(pick())),
        (3, lambda: world.wait(rng.choice(SECONDS), reads=rng.random() < 0.7)),
        (1, lambda: world.read(rng.choice(FREE))),
        (1, lambda: world.change_policy(rng.choice([1, 2, 3]), rng.choice([None, a_policy(), a_policy()]))),
    ]
    world.start(a_policy(), a_policy(), rng.random() < 0.5)
    for _ in range(n_steps):
        rng.choices([what for _, what in happenings], [weight for weight, _ in happenings])[0]()
        world.check()
    world.end_of_storm()


def storms(first: int, last: int) -> None:
    for seed in range(first, last):
        walk(seed)


def test_many_random_storms() -> None:
    storms(0, 100)


@pytest.mark.slow
def test_very_many_random_storms() -> None:
    storms(100, 5000)


# Broken gates ------------------------------------------------------------------------------------------------------

arrive, decide_purely, context_arm, end_of_turn = Entry.arrive, verdict.decide, verdict._context_arm, Turns.end


def forgets_to_pump_at_the_end_of_a_turn(gate: Gate, turn_id: int, now_s: float) -> list[Wake]:
    gate.turns.end(turn_id, now_s)
    return []


def forgets_to_pump_at_a_reading(gate: Gate, facts: EngineFacts, now_s: float) -> Tick:
    gate.measured.observe(facts)
    gate.turns.observe(facts)
    gate.entry.observe(now_s)
    return Tick()


def cancels_without_leaving_the_line(entry: Entry, ticket_id: int) -> bool:
    return ticket_id in entry.waiting


def says_cancelled_to_who_was_granted(gate: Gate, ticket_id: int, now_s: float) -> tuple[bool, list[Wake]]:
    gate.entry.cancel(ticket_id)
    return True, gate._pump(now_s)


def gates_continuations(entry: Entry, arrival: Arrival, now_s: float) -> Decision:
    return arrive(entry, replace(arrival, known=False), now_s)


def enforces_what_is_advisory(entry: Entry, arrival: Arrival, now_s: float) -> Decision:
    policy = arrival.ruling.policy
    if policy is None:
        return arrive(entry, arrival, now_s)
    ruling = replace(arrival.ruling, policy=replace(policy, mode="enforced"))
    return arrive(entry, replace(arrival, ruling=ruling), now_s)


def guarantees_nothing(question: Question, situation: Situation) -> Capacity:
    return decide_purely(question, replace(situation, n_pool_sessions=1000))


def overcommits_the_context(question: Question, facts: EngineFacts | None) -> str | None:
    return None if question.overcommit else context_arm(question, facts)


def keeps_a_held_turn_of_a_client_that_left(turns: Turns, turn_id: int, now_s: float) -> None:
    if turn_id in turns.running:
        end_of_turn(turns, turn_id, now_s)


def loses_count_of_bytes(line: Line, ticket_id: int) -> Ticket | None:
    return line._waiting.pop(ticket_id, None)


BROKEN: dict[str, tuple[object, str, object, str]] = {
    "lost wake-up, turn": (Gate, "end_turn", forgets_to_pump_at_the_end_of_a_turn, "lost wake-up"),
    "lost wake-up, reading": (Gate, "observe", forgets_to_pump_at_a_reading, "lost wake-up|in the past"),
    "granted and cancelled": (
        Entry,
        "cancel",
        cancels_without_leaving_the_line,
        "the lines are longer|other tickets wait|cancelled",
    ),
    "cancelled though granted": (Gate, "cancel", says_cancelled_to_who_was_granted, "cancelled and granted"),
    "continuation gated": (Entry, "arrive", gates_continuations, "a continuation was stopped"),
    "advisory enforced": (Entry, "arrive", enforces_what_is_advisory, "nothing enforces|nobody has"),
    "no guarantee": (entry_module, "decide", guarantees_nothing, "below the guarantee"),
    "overcommitted context": (verdict, "_context_arm", overcommits_the_context, "past the context arm"),
    "warned past the context": (verdict, "HARD", (), "past the context arm"),
    "hold without end": (Line, "expired", lambda _line, _now_s: [], "longer than its time|in the past"),
    "asks for no wake": (Gate, "next_wake_s", lambda _gate: None, "longer than its time"),
    "killed after grant": (
        Entry,
        "leave",
        lambda _entry, _session: None,
        "other sessions are granted|somebody is left",
    ),
    "stale is free": (Measured, "is_fresh", lambda _measured, _now_s: True, "stale facts"),
    "leaks held turns": (Turns, "end", keeps_a_held_turn_of_a_client_that_left, "other turns|something is left"),
    "leaks bytes": (Line, "_remove", loses_count_of_bytes, "other bytes wait|something is left"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_gate_is_caught(name: str) -> None:
    where, attribute, broken, said = BROKEN[name]
    with patch.object(where, attribute, broken), pytest.raises(AssertionError, match=said):
        storms(0, 100)
