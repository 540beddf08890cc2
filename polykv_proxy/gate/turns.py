"""The second level: turns of admitted sessions. A turn may be held, never refused.

Sessions wait for tools most of the time, so more of them fit than may decode at once; and an admission cannot be
undone before the episode ends, while a turn ends in seconds. So before a turn goes out, the rate with one more decoder
is predicted; below the floor it waits, at most ``max_turn_hold_ms``, then it goes.

Who goes next: expired holds; between tenants the least served; the oldest session, so new sessions come last. One who
does not fit does not keep others back: his own time limit sees to it that he goes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from polykv_proxy.gate.facts import EngineFacts, TurnRequest
from polykv_proxy.gate.outcome import Go, TurnWake
from polykv_proxy.gate.policy import Ruling
from polykv_proxy.gate.queue import Line, Service, Ticket
from polykv_proxy.ids import PoolId, SessionId

Predict = Callable[[TurnRequest, int], float | None]
"""The rate with this turn as the n-th decoder; None: unknown."""


@dataclass(slots=True)
class Turns:
    """``predict(turn, n)``."""

    predict: Predict
    service: Service
    now_s: float = float("-inf")
    """The present, for predictions."""
    running: dict[int, TurnRequest] = field(default_factory=dict)
    line: Line = field(init=False)
    _held: dict[int, TurnRequest] = field(default_factory=dict)
    _ended_s: dict[SessionId, float] = field(default_factory=dict)
    _n_others: int = 0

    def __post_init__(self) -> None:
        self.line = Line(self.service)

    @property
    def n_running(self) -> int:
        """Turns of ours, and decoders that no turn of ours stands for."""
        return len(self.running) + self._n_others

    @property
    def n_held(self) -> int:
        return len(self._held)

    def observe(self, facts: EngineFacts) -> None:
        ours = {t.session_id for t in self.running.values()}
        # Who ended after the reading still decodes in it.
        self._ended_s = {s: at for s, at in self._ended_s.items() if at >= facts.measured_s}
        self._n_others = sum(
            1 for s in facts.sessions if s.processing and s.session_id not in ours and s.session_id not in self._ended_s
        )

    def begin(self, turn: TurnRequest, now_s: float) -> bool:
        """True: it runs. False: it is held."""
        hold_s = _hold_s(turn.ruling)
        if hold_s == 0 or self.fits(turn):
            self.running[turn.turn_id] = turn
            return True
        self._held[turn.turn_id] = turn
        self.line.add(
            Ticket(turn.turn_id, turn.tenant, now_s, now_s + hold_s, rank=turn.session_since_s, n_bytes=turn.n_bytes)
        )
        return False

    def end(self, turn_id: int, now_s: float) -> None:
        """It ended, or its client left, running or held. A second time does nothing."""
        turn = self.running.pop(turn_id, None)
        if turn is not None:
            self._ended_s[turn.session_id] = now_s
        elif self._held.pop(turn_id, None) is not None:
            self.line.cancel(turn_id)

    def fits(self, turn: TurnRequest) -> bool:
        """Alone it harms nobody."""
        n = self.n_running + 1
        if n == 1:
            return True
        policy = turn.ruling.policy
        predicted = self.predict(turn, n)
        return policy is None or (predicted is not None and predicted >= policy.target_tps_per_session)

    def pump(self, now_s: float) -> list[TurnWake]:
        """Let go who may."""
        wakes = [self._go(ticket, now_s, expired=True) for ticket in self.line.expired(now_s)]
        while True:
            ticket = next((t for t in self.line.order(now_s) if self._may_go(t)), None)
            if ticket is None:
                return wakes
            wakes.append(self._go(ticket, now_s, expired=False))

    def _may_go(self, ticket: Ticket) -> bool:
        turn = self._held[ticket.ticket_id]
        return _hold_s(turn.ruling) == 0 or self.fits(turn)

    def _go(self, ticket: Ticket, now_s: float, *, expired: bool) -> TurnWake:
        self.line.take(ticket.ticket_id, now_s, granted=True)
        turn = self._held.pop(ticket.ticket_id)
        self.running[turn.turn_id] = turn
        return TurnWake(turn.turn_id, Go((now_s - ticket.arrived_s) * 1e3, expired))

    def rule_anew(self, resolve: Callable[[PoolId], Ruling]) -> None:
        """Policies changed: those who wait do so under the new one."""
        for held in (self._held, self.running):
            for turn_id, turn in held.items():
                held[turn_id] = replace(turn, ruling=resolve(turn.pool_id))
        for turn_id, turn in self._held.items():
            ticket = self.line.get(turn_id)
            if ticket is not None and (until_s := ticket.arrived_s + _hold_s(turn.ruling)) < ticket.deadline_s:
                self.line.cancel(turn_id)
                self.line.add(replace(ticket, deadline_s=until_s))

    def held(self) -> tuple[TurnRequest, ...]:
        return tuple(self._held.values())

    def sessions(self) -> Iterable[SessionId]:
        yield from (t.session_id for t in self.running.values())
        yield from (t.session_id for t in self._held.values())


def _hold_s(ruling: Ruling) -> float:
    policy = ruling.policy
    return policy.max_turn_hold_ms / 1e3 if policy is not None and policy.enforced else 0.0
