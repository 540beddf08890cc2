"""A world around the gate: clients, turns, a machine and a clock; and what must always hold in it.

Pools 1 (a policy), 2 (below 1, inherits it), 3 (a policy of its own), 9 (none). The machine decodes at ``SPEED / n``
per session. Every method is something that happens; it asserts what must hold about the answer, and ``check`` the rest:

 1. A ticket gets one answer: granted, refused or cancelled, also when two happen in one step.
 2. No lost wake-up: nobody waits who could go.
 3. A continuation is admitted at once.
 4. Below its guarantee a pool gets its session, unless the context arm refuses.
 5. Nobody passes the context arm, not by overcommit, guarantee or a warning.
 6. Nobody waits longer than his time; a held turn ends in service.
 7. What is stale is not free.
 8. Without a policy, and in advisory mode, everybody passes at once.
 9. Nothing leaks: the books are those of the world, and empty after the storm.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from polykv_proxy.gate.facts import Arrival, EngineFacts, SessionFacts, State, TurnRequest
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.measured import STALE_AFTER_S
from polykv_proxy.gate.outcome import Admitted, Go, Held, Refused, SessionWake, TurnHeld, Wake
from polykv_proxy.gate.policy import Policy, PolicyBook, Ruling
from polykv_proxy.ids import PoolId, SessionId

SPEED = 60.0
CELLS = 10_000
PATHS = {1: [1], 2: [2, 1], 3: [3], 9: [9]}
EPS_MS = 1e-3


@dataclass
class Client:
    """A session of the world. ``state`` as in the facts once it is admitted."""

    session_id: SessionId
    pool: int
    tenant: str
    since_s: float
    admitted: bool = False
    seen: bool = False
    counted: bool = False
    """By the gate, from its admission on; without a policy it knows nothing of it until it is in a reading."""
    state: State = "idle"
    turn_id: int | None = None
    held_since_s: float | None = None
    n_turns: int = 0
    n_decoded: float = 0.0
    ctx: int = 100


class World:
    def start(self, first: Policy, third: Policy, fitted: bool) -> None:
        """``fitted``: the roofline knows the machine already."""
        self.gate = Gate()
        if fitted:
            for n in (1, 2, 3, 4, 5, 6, 7):
                self.gate.measured.roofline.fold((1.0, n, 100.0 * n, 0.0), n / SPEED)
        self.book = PolicyBook()
        self.book.set(PoolId(1), first)
        self.book.set(PoolId(3), third)
        self.now_s = 1000.0
        self.clients: dict[SessionId, Client] = {}
        self.tickets: dict[int, tuple[Client, Arrival, float, Policy]] = {}
        self.answers: dict[int, str] = {}
        self.facts: EngineFacts | None = None
        self.cells_free = CELLS
        self.n_ids = 0

    # The world -----------------------------------------------------------------------------------------------------

    def resolve(self, pool: int) -> Ruling:
        return self.book.resolve([PoolId(p) for p in PATHS.get(pool, [pool])])

    def pick(self, pick: int, which: Callable[[Client], bool]) -> Client | None:
        found = [c for c in self.clients.values() if which(c)]
        return found[pick % len(found)] if found else None

    def deliver(self, wakes: list[Wake]) -> None:
        for wake in wakes:
            if isinstance(wake, SessionWake):
                assert wake.ticket_id in self.tickets, "a wake for a ticket that nobody has"
                assert wake.ticket_id not in self.answers, f"{self.answers[wake.ticket_id]}, and answered again"
                client, arrival, since_s, given = self.tickets[wake.ticket_id]
                self.answers[wake.ticket_id] = type(wake.decision).__name__
                limit_ms = max(given.queue_timeout_ms, given.settle_max_ms + 1000)
                assert wake.decision.hold_ms == pytest.approx((self.now_s - since_s) * 1e3)
                assert wake.decision.hold_ms <= limit_ms + EPS_MS, "waited longer than its time"
                if isinstance(wake.decision, Admitted):
                    self.check_context(arrival)
                    self.check_fresh(arrival, wake.decision)
                    client.admitted = client.counted = True
                else:
                    del self.clients[client.session_id]
            else:
                client = next((c for c in self.clients.values() if c.turn_id == wake.turn_id), None)
                assert client is not None, "other turns: one that nobody has was let go"
                assert client.held_since_s is not None, "other turns: one was let go twice"
                assert wake.go.hold_ms == pytest.approx((self.now_s - client.held_since_s) * 1e3)
                client.held_since_s, client.state = None, "decoding"

    def check_context(self, arrival: Arrival) -> None:
        policy = self.resolve(arrival.pool_id).policy
        if policy is not None and policy.enforced and self.facts is not None and arrival.expected_tokens is not None:
            assert self.facts.cells_free is not None
            assert arrival.known or arrival.expected_tokens <= self.facts.cells_free, "past the context arm"

    def check_fresh(self, arrival: Arrival, decision: Admitted) -> None:
        policy = self.resolve(arrival.pool_id).policy
        if policy is None or not policy.enforced or arrival.known or arrival.overcommit or decision.warned:
            return
        if self.facts is None or self.now_s - self.facts.measured_s > STALE_AFTER_S:
            assert decision.capacity is not None
            assert decision.capacity.guaranteed, "stale facts were taken for free capacity"

    def n_in(self, pool: int) -> int:
        """Sessions that count towards the pool's guarantee."""
        of_facts = [s for s in self.facts.sessions if s.pool_id == pool] if self.facts is not None else []
        return len(of_facts) + len([c for c in self.clients.values() if c.counted and not c.seen and c.pool == pool])

    # What clients do -----------------------------------------------------------------------------------------------

    def arrive(self, pool: int, tenant: str, overcommit: bool, expected: int | None) -> None:
        self.n_ids += 1
        client = Client(SessionId(f"s{self.n_ids}"), pool, tenant, self.now_s)
        ruling = self.resolve(pool)
        arrival = Arrival(
            client.session_id,
            PoolId(pool),
            ruling,
            overcommit=overcommit,
            expected_tokens=expected,
            tenant=tenant,
            n_bytes=100,
        )
        below = ruling.policy is not None and self.n_in(pool) < ruling.policy.guarantee_min_sessions
        self.clients[client.session_id] = client
        decision, wakes = self.gate.arrive(arrival, self.now_s)
        if ruling.policy is None or not ruling.policy.enforced:
            assert isinstance(decision, Admitted), "nothing enforces, and somebody was stopped"
        fits = expected is None or self.facts is None or expected <= (self.facts.cells_free or 0)
        if below and fits:
            assert isinstance(decision, Admitted), "below the guarantee, and stopped"
        if isinstance(decision, Admitted):
            self.check_context(arrival)
            self.check_fresh(arrival, decision)
            client.admitted, client.counted = True, ruling.policy is not None
        elif isinstance(decision, Held):
            assert ruling.policy is not None
            assert decision.ticket_id not in self.tickets
            self.tickets[decision.ticket_id] = (client, arrival, self.now_s, ruling.policy)
        else:
            assert isinstance(decision, Refused)
            assert 0 < decision.retry_after_s < float("inf")
            del self.clients[client.session_id]
        self.deliver(wakes)

    def come_back(self, pick: int) -> None:
        client = self.pick(pick, lambda c: c.admitted)
        if client is not None:
            arrival = Arrival(
                client.session_id, PoolId(client.pool), self.resolve(client.pool), known=True, expected_tokens=CELLS + 1
            )
            decision, wakes = self.gate.arrive(arrival, self.now_s)
            assert isinstance(decision, Admitted), "a continuation was stopped"
            self.deliver(wakes)

    def give_up(self, pick: int, late: bool) -> None:
        """Also who was answered in the same step, and does not know it yet."""
        if not self.tickets:
            return
        some = sorted(self.answers if late else self.waiting()) or sorted(self.tickets)
        ticket_id = some[pick % len(some)]
        cancelled, wakes = self.gate.cancel(ticket_id, self.now_s)
        assert cancelled == (ticket_id not in self.answers), "cancelled and granted, or neither"
        if cancelled:
            self.answers[ticket_id] = "cancelled"
            del self.clients[self.tickets[ticket_id][0].session_id]
        self.deliver(wakes)

    def killed_after_its_grant(self, pick: int) -> None:
        client = self.pick(pick, lambda c: c.admitted and not c.seen)
        if client is not None:
            if client.turn_id is not None:
                self.end(client)
            del self.clients[client.session_id]
            self.deliver(self.gate.leave(client.session_id, self.now_s))

    def goes_away(self, pick: int) -> None:
        """A session that was seen: it is just not in the next reading."""
        client = self.pick(pick, lambda c: c.seen)
        if client is not None:
            if client.turn_id is not None:
                self.end(client)
            del self.clients[client.session_id]

    def begin_turn(self, pick: int, uncached: int) -> None:
        client = self.pick(pick, lambda c: c.admitted and c.turn_id is None)
        if client is None:
            return
        self.n_ids += 1
        client.turn_id, client.n_turns = self.n_ids, client.n_turns + 1
        ruling = self.resolve(client.pool)
        request = TurnRequest(
            client.turn_id,
            client.session_id,
            PoolId(client.pool),
            ruling,
            client.since_s,
            client.ctx,
            uncached,
            n_bytes=100,
            tenant=client.tenant,
        )
        decision = self.gate.begin_turn(request, self.now_s)
        if isinstance(decision, TurnHeld):
            assert ruling.policy is not None
            assert ruling.policy.enforced
            assert decision.until_s == self.now_s + ruling.policy.max_turn_hold_ms / 1e3
            client.held_since_s, client.state = self.now_s, "waiting"
        else:
            assert decision == Go()
            client.state = "decoding"

    def end_turn(self, pick: int) -> None:
        client = self.pick(pick, lambda c: c.turn_id is not None)
        if client is not None:
            self.end(client)

    def end(self, client: Client) -> None:
        assert client.turn_id is not None
        turn_id = client.turn_id
        client.turn_id, client.held_since_s, client.state = None, None, "idle"
        self.deliver(self.gate.end_turn(turn_id, self.now_s))
        assert self.gate.end_turn(turn_id, self.now_s) == []

    # Time and facts ------------------------------------------------------------------------------------------------

    def time_passes(self, seconds: float, reads: bool) -> None:
        self.wait(seconds, reads=reads)

    def wait(self, seconds: float, *, reads: bool) -> None:
        """As a caller does it: a reading twice a second (or none), and ``tick`` when the gate asked for it."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            wake_s = self.gate.next_wake_s()
            assert wake_s is None or wake_s > self.now_s, "it asks to be woken in the past"
            at_s = min(end_s, self.now_s + 0.5 if reads else end_s, wake_s if wake_s is not None else end_s)
            self.decode(at_s - self.now_s)
            self.now_s = at_s
            if reads:
                self.observe()
            else:
                self.deliver(list(self.gate.tick(self.now_s).wakes))

    def decode(self, dt_s: float) -> None:
        decoding = [c for c in self.clients.values() if c.state == "decoding"]
        for client in decoding:
            client.n_decoded += dt_s * SPEED / len(decoding)

    def read(self, cells_free: int) -> None:
        self.cells_free = cells_free
        self.now_s += 0.01
        self.observe()

    def observe(self) -> None:
        live = [c for c in self.clients.values() if c.admitted]
        sessions = [
            SessionFacts(
                c.session_id,
                PoolId(c.pool),
                self.resolve(c.pool).scope,
                c.state,
                c.n_turns,
                int(c.n_decoded),
                c.ctx,
                100,
            )
            for c in live
        ]
        self.facts = EngineFacts(
            self.now_s, sessions, cells_total=CELLS, cells_used=CELLS - self.cells_free, cells_free=self.cells_free
        )
        for client in live:
            client.seen = True
        self.deliver(list(self.gate.observe(self.facts, self.now_s).wakes))

    def change_policy(self, pool: int, policy: Policy | None) -> None:
        if policy is None:
            self.book.delete(PoolId(pool))
        else:
            self.book.set(PoolId(pool), policy)
        # Whoever waits does so no longer than he was told at his arrival.
        self.deliver(self.gate.policies_changed(self.resolve, self.now_s))

    # What must always hold -----------------------------------------------------------------------------------------

    def waiting(self) -> set[int]:
        return self.tickets.keys() - self.answers.keys()

    def books_are_those_of_the_world(self) -> None:
        assert set(self.gate.entry.waiting) == self.waiting(), "other tickets wait"
        running = {c.turn_id for c in self.clients.values() if c.turn_id is not None and c.held_since_s is None}
        held = {c.turn_id for c in self.clients.values() if c.held_since_s is not None}
        assert set(self.gate.turns.running) == running, "other turns run"
        assert {t.ticket_id for t in self.gate.turns.line.order(self.now_s)} == held, "other turns are held"
        unseen = {c.session_id for c in self.clients.values() if c.counted and not c.seen}
        assert set(self.gate.entry.granted) == unseen, "other sessions are granted"
        lines = [s.line for s in self.gate.entry.scopes.values()]
        assert sum(line.n_bytes for line in lines) == 100 * len(self.waiting()), "other bytes wait"
        assert sum(len(line) for line in lines) == len(self.waiting()), "the lines are longer"

    def nobody_waits_who_could_go(self) -> None:
        for scope in self.gate.entry.scopes.values():
            for ticket in scope.line.order(self.now_s):
                capacity = self.gate.entry.decide(self.gate.entry.waiting[ticket.ticket_id], self.now_s)
                assert not capacity.can_admit, f"lost wake-up: {capacity.reason}"
                if not capacity.is_hard or ticket.is_overdue(self.now_s):
                    break
        for ticket in self.gate.turns.line.order(self.now_s):
            client = next((c for c in self.clients.values() if c.turn_id == ticket.ticket_id), None)
            assert client is not None, "other turns are held"
            assert not self.fits(client), "lost wake-up of a turn"

    def fits(self, client: Client) -> bool:
        """Whether the turn could go: nobody else decodes, or nothing would hold it."""
        policy = self.resolve(client.pool).policy
        if policy is None or not policy.enforced or policy.max_turn_hold_ms == 0:
            return True
        held = next(t for t in self.gate.turns.held() if t.turn_id == client.turn_id)
        return self.gate.turns.fits(held)

    def nobody_waits_longer_than_his_time(self) -> None:
        lines = [self.gate.turns.line, *(s.line for s in self.gate.entry.scopes.values())]
        for line in lines:
            assert all(t.deadline_s > self.now_s for t in line.order(self.now_s)), "waits longer than its time"

    def check(self) -> None:
        self.books_are_those_of_the_world()
        self.nobody_waits_longer_than_his_time()
        self.nobody_waits_who_could_go()

    def end_of_storm(self) -> None:
        """Everybody has his answer in the end, and nothing is left."""
        self.wait(200.0, reads=False)
        assert self.waiting() == set(), "somebody waits for ever"
        assert all(c.held_since_s is None for c in self.clients.values()), "a turn is held for ever"
        for client in list(self.clients.values()):
            if client.turn_id is not None:
                self.end(client)
            if not client.seen:
                self.deliver(self.gate.leave(client.session_id, self.now_s))
        self.clients.clear()
        self.now_s += 1.0
        self.observe()
        gate = self.gate
        assert (gate.entry.granted, gate.entry.waiting, gate.turns.running) == ({}, {}, {}), "somebody is left"
        assert (gate.turns.n_running, gate.turns.n_held, gate.turns.line.n_bytes, gate.next_wake_s()) == (
            0,
            0,
            0,
            None,
        ), "something is left"
