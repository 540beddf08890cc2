"""Makers of facts for the tests of this folder, and an engine that decodes at whatever rate the test says."""

from dataclasses import dataclass, field, replace
from typing import Any

from polykv_proxy.gate.facts import Arrival, EngineFacts, SessionFacts, State, Streams, TurnRequest
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.outcome import Admitted, Tick
from polykv_proxy.gate.policy import Policy, Ruling, parse_policy
from polykv_proxy.ids import PoolId, SessionId

POOL = PoolId(1)


def policy(floor: float = 15.0, **fields: Any) -> Policy:
    """Enforced unless the test says otherwise."""
    return parse_policy({"target_tps_per_session": floor, "mode": "enforced", **fields})


def arrival(name: str, given: Policy | None = None, pool: int = POOL, **fields: Any) -> Arrival:
    """``given`` None: no policy."""
    return Arrival(SessionId(name), PoolId(pool), Ruling(given, PoolId(pool)), **fields)


def turn(turn_id: int, name: str, given: Policy | None, since_s: float = 0.0, **fields: Any) -> TurnRequest:
    return TurnRequest(turn_id, SessionId(name), POOL, Ruling(given, POOL), since_s, **fields)


@dataclass
class Engine:
    """Sessions decode at the rate the test gives; readings go to the gate."""

    gate: Gate
    now_s: float = 100.0
    sessions: dict[str, SessionFacts] = field(default_factory=dict)
    n_prefilled: int = 0
    cells_total: int = 100_000
    cells_free: int = 90_000
    ctx_total: int | None = 16_384
    streams: Streams | None = None

    def put(self, name: str, state: State = "decoding", pool: int = POOL, **fields: Any) -> None:
        before = self.sessions.get(name) or SessionFacts(SessionId(name), PoolId(pool), PoolId(pool), ctx_used=1000)
        self.sessions[name] = replace(before, state=state, **fields)

    def facts(self) -> EngineFacts:
        return EngineFacts(
            self.now_s,
            list(self.sessions.values()),
            n_prefilled=self.n_prefilled,
            cells_total=self.cells_total,
            cells_used=self.cells_total - self.cells_free,
            cells_free=self.cells_free,
            ctx_total=self.ctx_total,
            streams=self.streams,
        )

    def read(self) -> Tick:
        return self.gate.observe(self.facts(), self.now_s)

    def run(self, seconds: float, tps: float, step_s: float = 0.5) -> list[Tick]:
        """All who decode do so at ``tps``."""
        ticks = []
        for _ in range(round(seconds / step_s)):
            self.now_s += step_s
            for name, s in self.sessions.items():
                if s.state == "decoding":
                    # Whole tokens, and none lost over the steps.
                    n = round(tps * self.now_s) - round(tps * (self.now_s - step_s))
                    self.sessions[name] = replace(s, n_decoded=s.n_decoded + n)
            ticks.append(self.read())
        return ticks

    def admit(self, name: str, given: Policy, **fields: Any) -> Admitted:
        """It comes in and decodes from now on."""
        decision, _ = self.gate.arrive(arrival(name, given, **fields), self.now_s)
        assert isinstance(decision, Admitted), decision
        self.put(name)
        return decision
