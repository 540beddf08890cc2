"""``Gate``: the one object that holds the state of admission. Facts go in, decisions come out.

    observe     a reading of the engine                    -> who may go now, how past admissions went
    tick        nothing but time passed                    -> the same
    arrive      a session at the door of a pool            -> admitted, held or refused
    cancel      it does not wait any longer
    send_away   nobody waits at this pool's door any longer
    leave       it was admitted, and is gone before it was seen in a reading
    begin_turn  a turn of an admitted session              -> go or held
    end_turn    it ended, or its client left
    capacity    a question; changes nothing

Whoever calls delivers every wake to the one who waits for it, and calls again at ``next_wake_s`` at the latest. Every
ticket gets one answer, granted or refused, unless it is cancelled first; every running turn is owed one ``end_turn``.
"""

from collections.abc import Callable
from dataclasses import replace

from polykv_proxy.gate.entry import Entry
from polykv_proxy.gate.facts import Arrival, EngineFacts, TurnRequest
from polykv_proxy.gate.measured import Measured
from polykv_proxy.gate.outcome import (
    Admitted,
    Counts,
    Decision,
    Go,
    Held,
    SessionWake,
    Tick,
    TurnDecision,
    TurnHeld,
    Wake,
)
from polykv_proxy.gate.policy import Ruling
from polykv_proxy.gate.queue import Service, Standing
from polykv_proxy.gate.rate import RateBook
from polykv_proxy.gate.roofline import Roofline
from polykv_proxy.gate.turns import Turns
from polykv_proxy.gate.verdict import Capacity
from polykv_proxy.ids import PoolId, SessionId


class Gate:
    def __init__(self, *, rates: RateBook | None = None, roofline: Roofline | None = None):
        self.counts = Counts()
        self.measured = Measured(rates or RateBook(), roofline or Roofline())
        self._service = Service()
        self.entry = Entry(self.measured, self._service, self.counts)
        self.turns = Turns(self._predict, self._service)
        self._tenants: dict[SessionId, str] = {}

    # Facts ---------------------------------------------------------------------------------------------------------

    def observe(self, facts: EngineFacts, now_s: float) -> Tick:
        """Take in a reading of the engine."""
        self._charge(facts)
        self.measured.observe(facts)
        self.turns.observe(facts)
        self.measured.saw_wanting(self.turns.n_running + self.turns.n_held, self.entry.n_live, now_s)
        self.entry.observe(now_s)
        return self.tick(now_s)

    def tick(self, now_s: float) -> Tick:
        """Time passed: holds end, windows close."""
        wakes = self._pump(now_s)
        return Tick(tuple(wakes), tuple(self.entry.take_records()))

    def next_wake_s(self) -> float | None:
        """When ``tick`` has something to do at the latest; None: nobody waits for time to pass."""
        times = (self.turns.line.next_deadline_s(), self.entry.next_wake_s())
        return min((t for t in times if t is not None), default=None)

    # Sessions ------------------------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival, now_s: float) -> tuple[Decision, list[Wake]]:
        """A session asks to come in; a continuation always may."""
        decision = self.entry.arrive(arrival, now_s)
        if arrival.ruling.policy is not None and isinstance(decision, Admitted):
            self._tenants[arrival.session_id] = arrival.tenant
        if not isinstance(decision, Held):
            return decision, []
        wakes = self._pump(now_s)
        for wake in wakes:
            if isinstance(wake, SessionWake) and wake.ticket_id == decision.ticket_id:
                return wake.decision, [w for w in wakes if w is not wake]
        self.counts.n_held += 1
        standing = self.entry.standing(decision.ticket_id, now_s)
        return replace(decision, place=standing.place, eta_s=standing.eta_s), wakes

    def cancel(self, ticket_id: int, now_s: float) -> tuple[bool, list[Wake]]:
        """A held session does not wait any longer. False: it was answered before; if it was admitted, ``leave``."""
        return self.entry.cancel(ticket_id), self._pump(now_s)

    def send_away(self, pool_id: PoolId, now_s: float) -> tuple[list[int], list[Wake]]:
        """The pool was released. Gives the tickets of those who waited at its door: they get no answer."""
        return self.entry.send_away(pool_id), self._pump(now_s)

    def leave(self, session_id: SessionId, now_s: float) -> list[Wake]:
        """An admitted session is gone before it was seen in a reading: its place is free again."""
        self.entry.leave(session_id)
        return self._pump(now_s)

    def standing(self, ticket_id: int, now_s: float) -> Standing:
        return self.entry.standing(ticket_id, now_s)

    def verdict(self, ticket_id: int) -> Capacity | None:
        """Why it still waits, as of the last look; None: it does not."""
        return self.entry.verdict(ticket_id)

    def n_waiting(self) -> int:
        """Sessions in all lines."""
        return len(self.entry.waiting)

    def capacity(self, arrival: Arrival, now_s: float) -> Capacity:
        """The answer to ``GET …/capacity``. Changes nothing."""
        return self.entry.decide(arrival, now_s)

    # Turns ---------------------------------------------------------------------------------------------------------

    def begin_turn(self, turn: TurnRequest, now_s: float) -> TurnDecision:
        """A turn is about to be forwarded. One that is held is woken by a ``TurnWake``, always with a ``Go``."""
        self._tenants[turn.session_id] = turn.tenant
        self.turns.now_s = now_s
        runs = self.turns.begin(turn, now_s)
        self.measured.saw_turn(turn.uncached_tokens)
        if runs:
            return Go()
        self.counts.n_turns_held += 1
        ticket = self.turns.line.get(turn.turn_id)
        assert ticket is not None
        place = self.turns.line.place(turn.turn_id, now_s) or 1
        return TurnHeld(ticket.deadline_s, place, self._predict(turn, self.turns.n_running + 1))

    def end_turn(self, turn_id: int, now_s: float) -> list[Wake]:
        """It ended, running or held. A second time does nothing."""
        self.turns.end(turn_id, now_s)
        return self._pump(now_s)

    # Policies ------------------------------------------------------------------------------------------------------

    def policies_changed(self, resolve: Callable[[PoolId], Ruling], now_s: float) -> list[Wake]:
        """Those who wait do so under the new policies, never longer than under the old ones; who has none any more goes
        in. Books of scopes stay.
        """
        self.turns.rule_anew(resolve)
        self.entry.rule_anew(resolve)
        return self._pump(now_s)

    def forget(self, pool_id: PoolId) -> None:
        """The pool was released: its books go when nobody waits in them."""
        self.entry.forget(pool_id)

    # Inside --------------------------------------------------------------------------------------------------------

    def _pump(self, now_s: float) -> list[Wake]:
        """Answer everybody who can be answered. To be called after whatever may have made room."""
        self.turns.now_s = now_s
        of_sessions = self.entry.pump(now_s)
        of_turns = self.turns.pump(now_s)
        self.counts.n_turns_expired += sum(w.go.expired for w in of_turns)
        self.counts.turn_hold_ms += sum(w.go.hold_ms for w in of_turns)
        return [*of_sessions, *of_turns]

    def _predict(self, turn: TurnRequest, n: int) -> float | None:
        drop_tps = self.entry.drop_tps(turn.ruling.scope)
        return self.measured.predict_turn(turn, n, self.turns.running.values(), drop_tps, self.turns.now_s)

    def _charge(self, facts: EngineFacts) -> None:
        """What each tenant's sessions decoded since the last reading."""
        before = {s.session_id: s for s in self.measured.sessions}
        for session in facts.sessions:
            last = before.get(session.session_id)
            tenant = self._tenants.get(session.session_id)
            if last is not None and tenant is not None and session.n_decoded > last.n_decoded:
                self._service.charge(tenant, session.n_decoded - last.n_decoded)
        kept = {s.session_id for s in facts.sessions} | self.entry.granted.keys() | set(self.turns.sessions())
        for session_id in self._tenants.keys() - kept:
            del self._tenants[session_id]
