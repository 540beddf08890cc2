"""Fifty clients of two tenants at once, and a floor that carries five: everybody is served, and nothing is left."""

from collections import Counter
from dataclasses import dataclass

import pytest

from polykv_proxy.gate.facts import EngineFacts, SessionFacts, State
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.outcome import Admitted, Go, Held, SessionWake, TurnWake, Wake
from polykv_proxy.gate.policy import Policy
from polykv_proxy.ids import PoolId, SessionId
from tests.gate.make import POOL, arrival, policy, turn

SPEED, FLOOR, N, N_TURNS, N_TOKENS = 100.0, 20.0, 50, 3, 60


@dataclass
class Agent:
    name: str
    tenant: str
    state: State = "idle"
    turns_left: int = N_TURNS
    tokens_left: float = 0.0
    n_decoded: float = 0.0
    retry_s: float = 0.0
    admitted_s: float | None = None
    is_held: bool = False
    turn_id: int = 0


class Storm:
    def __init__(self, given: Policy):
        self.gate, self.given, self.now_s = Gate(), given, 0.0
        self.agents = [Agent(f"a{i}", "red" if i < 40 else "blue") for i in range(N)]
        self.inside: list[Agent] = []
        self.waiting: dict[int, Agent] = {}
        self.order: list[str] = []
        self.most = self.n_refused = 0

    def run(self) -> None:
        for _ in range(40_000):
            if not self.agents and not self.inside and not self.waiting:
                return
            for agent in [a for a in self.agents if a.retry_s <= self.now_s]:
                self.knock(agent)
            self.now_s += 0.1
            self.decode()
            self.read()
        pytest.fail(f"not done after {self.now_s:.0f} s: {len(self.waiting)} wait, {len(self.agents)} were refused")

    def knock(self, agent: Agent) -> None:
        decision, wakes = self.gate.arrive(arrival(agent.name, self.given, tenant=agent.tenant), self.now_s)
        if isinstance(decision, Admitted):
            self.enter(agent)
        elif isinstance(decision, Held):
            self.agents.remove(agent)
            self.waiting[decision.ticket_id] = agent
        else:
            self.n_refused += 1
            agent.retry_s = self.now_s + decision.retry_after_s
        self.deliver(wakes)

    def enter(self, agent: Agent) -> None:
        if agent in self.agents:
            self.agents.remove(agent)
        agent.admitted_s = self.now_s
        self.order.append(agent.tenant)
        self.inside.append(agent)
        self.begin(agent)

    def begin(self, agent: Agent) -> None:
        decision, _ = self.gate.arrive(arrival(agent.name, self.given, known=True), self.now_s)
        assert isinstance(decision, Admitted)
        agent.turn_id += N
        request = turn(agent.turn_id + int(agent.name[1:]), agent.name, self.given, agent.admitted_s or 0.0)
        agent.is_held = self.gate.begin_turn(request, self.now_s) != Go()
        agent.state, agent.tokens_left = "waiting" if agent.is_held else "decoding", N_TOKENS

    def decode(self) -> None:
        decoding = [a for a in self.inside if a.state == "decoding"]
        self.most = max(self.most, len(decoding))
        for agent in decoding:
            agent.tokens_left -= 0.1 * SPEED / len(decoding)
            agent.n_decoded += 0.1 * SPEED / len(decoding)
        for agent in decoding:
            if agent.tokens_left <= 0:
                agent.state = "idle"
                agent.turns_left -= 1
                self.deliver(self.gate.end_turn(agent.turn_id + int(agent.name[1:]), self.now_s))
                if agent.turns_left:
                    self.begin(agent)
                else:
                    self.inside.remove(agent)

    def read(self) -> None:
        sessions = [
            SessionFacts(SessionId(a.name), POOL, POOL, a.state, N_TURNS - a.turns_left, int(a.n_decoded))
            for a in self.inside
        ]
        facts = EngineFacts(self.now_s, sessions, cells_total=10**6, cells_used=0, cells_free=10**6)
        self.deliver(list(self.gate.observe(facts, self.now_s).wakes))

    def deliver(self, wakes: list[Wake]) -> None:
        for wake in wakes:
            if isinstance(wake, TurnWake):
                agent = next(a for a in self.inside if a.turn_id + int(a.name[1:]) == wake.turn_id)
                assert agent.is_held
                agent.is_held, agent.state = False, "decoding"
                continue
            assert isinstance(wake, SessionWake)
            agent = self.waiting.pop(wake.ticket_id)
            if isinstance(wake.decision, Admitted):
                self.enter(agent)
            else:
                self.n_refused += 1
                agent.retry_s = self.now_s + wake.decision.retry_after_s
                self.agents.append(agent)


@pytest.mark.parametrize("on_saturation", ["queue", "reject"])
@pytest.mark.parametrize("estimator", ["settled", "roofline"])
def test_everybody_is_served_and_nothing_is_left(on_saturation: str, estimator: str) -> None:
    storm = Storm(
        policy(FLOOR, on_saturation=on_saturation, estimator=estimator, queue_timeout_ms=3_600_000, settle_tokens=20)
    )
    storm.run()
    assert len(storm.order) == N
    assert 2 <= storm.most <= 5
    gate = storm.gate
    assert (gate.entry.granted, gate.entry.waiting, gate.turns.running, gate.turns.n_held) == ({}, {}, {}, 0)
    assert gate.next_wake_s() is None
    assert sum(len(s.line) + s.line.n_bytes for s in gate.entry.scopes.values()) == 0
    assert (storm.n_refused > 0) == (on_saturation == "reject")


def test_the_tenant_with_few_clients_is_not_behind_all_of_the_other() -> None:
    storm = Storm(policy(FLOOR, on_saturation="queue", queue_timeout_ms=3_600_000, settle_tokens=20))
    storm.run()
    # 40 red ones came first. Blue's ten alternate with them, so they are in with about the first twenty.
    assert Counter(storm.order[:24])["blue"] >= 9
    assert PoolId(1) in storm.gate.entry.scopes
