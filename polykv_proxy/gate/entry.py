"""The first level: sessions at the door. Who comes in, who waits, who is turned away.

One scope for each pool with a policy (and each root under the default policy), with its settle window, forecast and
line. An admission counts from the step in which it is decided: two at once never see the same free place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from polykv_proxy.gate.facts import Arrival, SessionFacts
from polykv_proxy.gate.measured import Measured
from polykv_proxy.gate.outcome import Admitted, Counts, Decision, Held, RefusalCode, Refused, SessionWake
from polykv_proxy.gate.policy import Policy, Ruling
from polykv_proxy.gate.queue import Line, Service, Standing, Ticket
from polykv_proxy.gate.settle import IDLE_FRESH_S, AdmitRecord, Settling
from polykv_proxy.gate.verdict import (
    GUARANTEED,
    OPEN_AT,
    OVERCOMMIT,
    SETTLING,
    STALE,
    Capacity,
    Question,
    Situation,
    decide,
)
from polykv_proxy.ids import PoolId, SessionId

HOLD_EXTRA_S = 1.0
"""A session waits for a measurement at most ``settle_max_ms`` and so much more."""
DEFAULT_RETRY_S = 5.0
MIN_RETRY_S = 1.0


@dataclass(slots=True)
class Scope:
    policy: Policy | None
    line: Line
    settling: Settling = field(default_factory=Settling)
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Granted:
    """Admitted, and not in a reading yet."""

    pool_id: PoolId
    scope: PoolId


class Entry:
    def __init__(self, measured: Measured, service: Service, counts: Counts):
        self._measured, self._service, self._counts = measured, service, counts
        self.scopes: dict[PoolId, Scope] = {}
        self.granted: dict[SessionId, Granted] = {}
        self.waiting: dict[int, Arrival] = {}
        self._verdicts: dict[int, Capacity] = {}
        """Of those who wait, as of the last look."""
        self._n_tickets = 0
        self._records: list[AdmitRecord] = []

    @property
    def n_live(self) -> int:
        return len(self.granted) + len(self._measured.sessions)

    def drop_tps(self, scope: PoolId) -> float | None:
        found = self.scopes.get(scope)
        return found.settling.drop_tps if found is not None else None

    def observe(self, now_s: float) -> None:
        """There is a new reading."""
        for session in self._measured.sessions:
            self.granted.pop(session.session_id, None)
        for scope in self.scopes.values():
            self._open_or_close(scope, now_s)

    def take_records(self) -> list[AdmitRecord]:
        """What has settled since the last time."""
        records, self._records = self._records, []
        return records

    def settle(self, now_s: float) -> None:
        """Close the windows whose time has come."""
        facts = self._measured.facts
        measured_s = facts.measured_s if facts is not None else float("-inf")
        for scope in self.scopes.values():
            if scope.policy is None:
                continue
            window = scope.settling.window
            session = self._measured.find(window.session_id) if window is not None else None
            record = scope.settling.update(
                scope.policy, session, self._measured.rates.mean_clear_tps, measured_s, now_s
            )
            if record is not None:
                self._records.append(record)

    def next_wake_s(self) -> float | None:
        times = []
        for scope in self.scopes.values():
            if not len(scope.line):
                continue
            times.append(scope.line.next_deadline_s())
            if scope.settling.window is not None and scope.policy is not None:
                times.append(scope.settling.window.admitted_s + scope.policy.settle_max_s)
        return min((t for t in times if t is not None), default=None)

    def arrive(self, arrival: Arrival, now_s: float) -> Decision:
        """``Held`` only says that it is in line: it may be the one whom the next ``pump`` lets in."""
        policy = arrival.ruling.policy
        if policy is None:
            return Admitted()
        self.settle(now_s)
        decision = self._decide(arrival, policy, now_s)
        self.settle(now_s)  # a window of no length is over at once
        return decision

    def _decide(self, arrival: Arrival, policy: Policy, now_s: float) -> Decision:
        scope = self.scope(arrival.ruling)
        capacity = self.decide(arrival, now_s)
        if arrival.known:
            return Admitted(capacity, sessions_remaining=capacity.headroom_sessions)
        passes_line = not len(scope.line) or capacity.reason in (GUARANTEED, OVERCOMMIT)
        if not policy.enforced or (capacity.can_admit and passes_line):
            return self._admit(arrival, capacity, now_s)
        waits = policy.on_saturation == "queue" or capacity.reason == SETTLING or capacity.can_admit
        if not waits or (capacity.is_hard and not self._may_fit_later(arrival)):
            return self._turn_away(arrival, capacity, now_s)
        if not scope.line.has_room(arrival.n_bytes, policy.max_queue):
            if policy.on_saturation == "queue":
                return self._refuse(arrival, capacity, "queue_full", now_s)
            return self._turn_away(arrival, capacity, now_s)
        return self._line_up(arrival, capacity, scope, policy, now_s)

    def leave(self, session_id: SessionId) -> None:
        granted = self.granted.pop(session_id, None)
        if granted is not None and granted.scope in self.scopes:
            self.scopes[granted.scope].settling.left(session_id)

    def cancel(self, ticket_id: int) -> bool:
        arrival = self.waiting.pop(ticket_id, None)
        self._verdicts.pop(ticket_id, None)
        return arrival is not None and self.scopes[arrival.ruling.scope].line.cancel(ticket_id)

    def pump(self, now_s: float) -> list[SessionWake]:
        """Answer everybody in line who can be answered."""
        self.settle(now_s)
        wakes = []
        for scope in list(self.scopes.values()):
            if len(scope.line):
                wakes += self._pump(scope, now_s)
        self.settle(now_s)
        return wakes

    def _pump(self, scope: Scope, now_s: float) -> list[SessionWake]:
        wakes = []
        is_blocked = False  # somebody ahead waits for the rate: then only the guarantee passes him
        for ticket in scope.line.order(now_s):
            arrival = self.waiting[ticket.ticket_id]
            is_over = ticket.deadline_s <= now_s
            capacity = self.decide(arrival, now_s, ignore_settling=is_over)
            self._verdicts[ticket.ticket_id] = capacity
            decision = self._answer(arrival, capacity, ticket, now_s, is_blocked=is_blocked)
            if decision is not None:
                scope.line.take(ticket.ticket_id, now_s, granted=isinstance(decision, Admitted))
                del self.waiting[ticket.ticket_id], self._verdicts[ticket.ticket_id]
                wakes.append(SessionWake(ticket.ticket_id, decision))
            elif not capacity.is_hard or ticket.is_overdue(now_s):
                is_blocked = True
        return wakes

    def _answer(
        self, arrival: Arrival, capacity: Capacity, ticket: Ticket, now_s: float, *, is_blocked: bool
    ) -> Admitted | Refused | None:
        """None: it waits on."""
        policy, hold_ms = arrival.ruling.policy, (now_s - ticket.arrived_s) * 1e3
        is_over = ticket.deadline_s <= now_s
        if policy is None or not policy.enforced:
            return self._admit(arrival, capacity, now_s, hold_ms=hold_ms)
        if capacity.can_admit:
            passes = capacity.guaranteed or is_over or not is_blocked
            return self._admit(arrival, capacity, now_s, hold_ms=hold_ms) if passes else None
        if policy.on_saturation == "queue":
            return self._refuse(arrival, capacity, "queue_timeout", now_s, hold_ms=hold_ms) if is_over else None
        if is_over or capacity.reason != SETTLING:
            return self._turn_away(arrival, capacity, now_s, hold_ms=hold_ms)
        return None

    def rule_anew(self, resolve: Callable[[PoolId], Ruling]) -> None:
        """Policies changed: those who wait do so under the new ones."""
        for pool_id, scope in self.scopes.items():
            ruling = resolve(pool_id)
            scope.policy = ruling.policy if ruling.scope == pool_id else None
            if scope.policy is None:
                scope.settling.window = None
        for ticket_id, arrival in list(self.waiting.items()):
            ruling = resolve(arrival.pool_id)
            old, new = self.scopes[arrival.ruling.scope], self.scope(ruling)
            self.waiting[ticket_id] = replace(arrival, ruling=ruling)
            ticket = old.line.get(ticket_id)
            if ticket is None:
                continue
            deadline_s = ticket.deadline_s
            if ruling.policy is not None:  # nobody waits longer than he was told
                deadline_s = min(deadline_s, ticket.arrived_s + _wait_s(ruling.policy))
            if new is not old or deadline_s != ticket.deadline_s:
                old.line.cancel(ticket_id)
                new.line.add(replace(ticket, deadline_s=deadline_s))

    def send_away(self, pool_id: PoolId) -> list[int]:
        """Nobody waits at this pool's door any longer. Gives their tickets, which get no answer."""
        tickets = [ticket_id for ticket_id, arrival in self.waiting.items() if arrival.pool_id == pool_id]
        for ticket_id in tickets:
            self.cancel(ticket_id)
        return tickets

    def forget(self, pool_id: PoolId) -> None:
        scope = self.scopes.get(pool_id)
        if scope is not None and not len(scope.line) and all(g.scope != pool_id for g in self.granted.values()):
            del self.scopes[pool_id]

    def scope(self, ruling: Ruling) -> Scope:
        scope = self.scopes.get(ruling.scope)
        if scope is None:
            scope = self.scopes[ruling.scope] = Scope(ruling.policy, Line(self._service))
        scope.policy = ruling.policy
        return scope

    # The verdict ---------------------------------------------------------------------------------------------------

    def decide(self, arrival: Arrival, now_s: float, *, ignore_settling: bool = False) -> Capacity:
        """Changes nothing."""
        question = Question(
            policy=arrival.ruling.policy,
            known=arrival.known,
            overcommit=arrival.overcommit,
            prefix_len=arrival.prefix_len,
            expected_tokens=arrival.expected_tokens,
            ignore_settling=ignore_settling,
        )
        return decide(question, self._situation(arrival, now_s))

    def _situation(self, arrival: Arrival, now_s: float) -> Situation:
        policy, scope_id = arrival.ruling.policy, arrival.ruling.scope
        scope = self.scopes.get(scope_id)
        settling = scope.settling if scope is not None else Settling()
        sessions, granted = self._measured.sessions, self.granted.values()
        of_scope = [s for s in sessions if s.scope == scope_id]
        return Situation(
            facts=self._measured.facts,
            fresh=self._measured.is_fresh(now_s),
            rates=self._measured.rates,
            n_pool_sessions=[
                *(s.pool_id for s in sessions),
                *(g.pool_id for g in granted),
            ].count(arrival.pool_id),
            n_scope_sessions=len(of_scope) + len([g for g in granted if g.scope == scope_id]),
            n_at_rest=sum(s.state == "idle" for s in of_scope),
            settle_remaining_ms=settling.remaining_ms(policy, now_s) if policy is not None else None,
            n_unsettled=settling.n_unsettled(),
            drop_tps=settling.drop_tps,
            idle_mean_tps=settling.settled_mean if now_s - settling.settled_s < IDLE_FRESH_S else None,
            marginal_cells=_mean_own_cells(of_scope or sessions),
            roofline=self._measured.project_sessions(policy, self.n_live, arrival.uncached_tokens),
            is_open=scope.is_open if scope is not None else True,
        )

    def _open_or_close(self, scope: Scope, now_s: float) -> None:
        policy = scope.policy
        project = self._measured.project_sessions(policy, self.n_live, 0)
        projected = project(1) if project is not None else None
        if policy is None or projected is None or not self._measured.is_fresh(now_s):
            return
        if projected < policy.target_tps_per_session:
            scope.is_open = False
        elif projected >= policy.target_tps_per_session * OPEN_AT:
            scope.is_open = True

    # Letting in and turning away -----------------------------------------------------------------------------------

    def _admit(
        self, arrival: Arrival, capacity: Capacity, now_s: float, *, hold_ms: float = 0.0, warned: bool = False
    ) -> Admitted:
        seen = self._measured.find(arrival.session_id)
        if arrival.ruling.policy is not None:
            self.scope(arrival.ruling).settling.admitted(
                arrival.session_id,
                now_s,
                n_decoded=seen.n_decoded if seen is not None else 0,
                mean=self._measured.rates.mean_clear_tps,
                forecasts=capacity.forecasts,
            )
        if seen is None:
            self.granted[arrival.session_id] = Granted(arrival.pool_id, arrival.ruling.scope)
        counts, headroom = self._counts, capacity.headroom_sessions
        counts.n_admitted += 1
        counts.n_warned += warned
        counts.n_guaranteed += capacity.guaranteed
        counts.n_overcommitted += capacity.reason == OVERCOMMIT
        return Admitted(capacity, warned, max(0, headroom - 1) if headroom is not None else None, hold_ms)

    def _turn_away(
        self, arrival: Arrival, capacity: Capacity, now_s: float, *, hold_ms: float = 0.0
    ) -> Admitted | Refused:
        """What the policy does when there is no room."""
        policy = arrival.ruling.policy
        if policy is not None and policy.on_saturation == "warn" and not capacity.is_hard:
            return self._admit(arrival, capacity, now_s, hold_ms=hold_ms, warned=True)
        return self._refuse(arrival, capacity, "pool_saturated", now_s, hold_ms=hold_ms)

    def _refuse(
        self, arrival: Arrival, capacity: Capacity, code: RefusalCode, now_s: float, *, hold_ms: float = 0.0
    ) -> Refused:
        if arrival.is_retry:
            self._counts.n_retries_refused += 1
        else:
            self._counts.refused[capacity.reason] += 1
        line = self.scopes[arrival.ruling.scope].line
        interval_s = line.interval_s(now_s)
        wait_s = interval_s * (len(line) + 1) if interval_s is not None else DEFAULT_RETRY_S
        wait_s = max(MIN_RETRY_S, wait_s, (capacity.settle_remaining_ms or 0) / 1e3)
        if capacity.reason == STALE:
            return Refused(capacity, 503, "upstream_unavailable", wait_s, hold_ms)
        return Refused(capacity, 429, code, wait_s, hold_ms)

    def _may_fit_later(self, arrival: Arrival) -> bool:
        """Whether waiting can help against the context arm: not when it is larger than all there is."""
        facts, n = self._measured.facts, arrival.expected_tokens or 0
        if facts is None:
            return False
        if facts.streams is not None and arrival.prefix_len + n > facts.streams.cells_per_stream:
            return False
        return facts.cells_total is None or n <= facts.cells_total

    def _line_up(self, arrival: Arrival, capacity: Capacity, scope: Scope, policy: Policy, now_s: float) -> Held:
        since_s = arrival.since_s if arrival.since_s is not None else now_s
        self._n_tickets += 1
        ticket = Ticket(self._n_tickets, arrival.tenant, since_s, since_s + _wait_s(policy), n_bytes=arrival.n_bytes)
        scope.line.add(ticket)
        self.waiting[ticket.ticket_id] = arrival
        self._verdicts[ticket.ticket_id] = capacity
        standing = self.standing(ticket.ticket_id, now_s)
        return Held(ticket.ticket_id, capacity, ticket.deadline_s, standing.place, standing.eta_s)

    def standing(self, ticket_id: int, now_s: float) -> Standing:
        arrival = self.waiting.get(ticket_id)
        return self.scopes[arrival.ruling.scope].line.standing(ticket_id, now_s) if arrival is not None else Standing()

    def verdict(self, ticket_id: int) -> Capacity | None:
        """Why it still waits, as of the last look; None: it does not."""
        return self._verdicts.get(ticket_id)


def _wait_s(policy: Policy) -> float:
    """How long a session waits in line at most."""
    return policy.queue_timeout_ms / 1e3 if policy.on_saturation == "queue" else policy.settle_max_s + HOLD_EXTRA_S


def _mean_own_cells(sessions: Sequence[SessionFacts]) -> float | None:
    own = [s.own_cells for s in sessions if s.own_cells > 0]
    return sum(own) / len(own) if own else None
