"""The door: the rim around the gate, where sessions and turns wait and can be cancelled.

The gate decides (``gate``); here are its futures, its timer and its readings. Rules kept in here:

- Every wake is delivered before anything is awaited, and is the one answer to its ticket. Who was granted in the step
  in which it left gives the grant back.
- Whom the gate counts as inside is taken out again when its turn ended without the engine having seen it, and when no
  reading shows it any more.
- Nobody is gated while there is no policy: then nothing in here runs.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from polykv_proxy.control.gate_facts import GateFacts, gate_id
from polykv_proxy.control.policies import Policies
from polykv_proxy.control.refused import refusal_of
from polykv_proxy.control.visits import Visit
from polykv_proxy.errors import PolyKVError
from polykv_proxy.gate.facts import Arrival, EngineFacts, TurnRequest
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.outcome import Admitted, Counts, Go, Held, Refused, SessionWake, Tick, TurnHeld, Wake
from polykv_proxy.gate.queue import Standing
from polykv_proxy.gate.rate import SessionRate
from polykv_proxy.gate.settle import AdmitRecord
from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.tree.pool import Pool

log = logging.getLogger("polykv.gate")

READ_S, READ_FAST_S = 0.5, 0.2
"""How often the engine is looked at while there is a policy, and while somebody waits."""

MAX_RECORDS = 1000

Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Answer]):
    """``answer`` stays when nobody is left to take it."""

    future: "asyncio.Future[Answer]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    answer: Answer | None = None

    def give(self, answer: Answer) -> None:
        self.answer = answer
        if not self.future.done():
            self.future.set_result(answer)

    def fail(self, error: PolyKVError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Door:
    """``fresh``: have the engine's stats read, unless they just were. ``u``: a random number from 0 to 1."""

    def __init__(
        self,
        gate: Gate,
        *,
        policies: Policies,
        facts: GateFacts,
        fresh: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        u: Callable[[], float] = random.random,
    ):
        self.gate = gate
        self._policies, self._facts, self._fresh, self._clock, self._u = policies, facts, fresh, clock, u
        self.records: deque[AdmitRecord] = deque(maxlen=MAX_RECORDS)
        """How the last admissions went, the newest last."""
        self._tickets: dict[int, _Waiting[Admitted | Refused | None]] = {}
        self._held: dict[int, _Waiting[Go]] = {}
        self._inside: dict[SessionId, Visit] = {}
        """Who asked to come in, and has a turn under way."""
        self._settling = WeakValueDictionary[SessionId, Visit]()
        self._gone: set[PoolId] = set()
        self._seen: EngineFacts | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Task[None] | None = None

    # Life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read the engine as long as somebody has a policy."""
        if not self._policies.is_empty and (self._reader is None or self._reader.done()):
            self._reader = asyncio.create_task(self._read_on(), name="polykv-gate")

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def dismiss(self, error: PolyKVError) -> None:
        """Everybody who waits gets ``error``."""
        for ticket in self._tickets.values():
            ticket.fail(error)
        for held in self._held.values():
            held.fail(error)

    async def _read_on(self) -> None:
        while not self._policies.is_empty:
            try:
                await self.look()
            except Exception:
                log.exception("a bug in the reading of the engine for the gate; it goes on")
            await asyncio.sleep(READ_FAST_S if self._tickets or self._held else READ_S)

    # Readings ------------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Have a reading that is not older than a moment. An engine that does not answer leaves the last one."""
        await self._fresh()
        self.observe()

    def observe(self) -> None:
        """Take in what is known of the engine by now."""
        now_s, facts = self._clock(), self._facts.read()
        if facts is not None and (self._seen is None or _is_newer(facts, self._seen)):
            self._seen = facts
            self._take(self.gate.observe(facts, now_s))
            self._drop_unseen(facts, now_s)
        else:
            self._take(self.gate.tick(now_s))
        self._forget_gone()

    def _drop_unseen(self, facts: EngineFacts, now_s: float) -> None:
        """Who was let in, and is over before a reading could show it, would hold its place for good."""
        shown = {session.session_id for session in facts.sessions} | self._inside.keys()
        for session_id in [s for s in self.gate.entry.granted if s not in shown]:
            self._deliver(self.gate.leave(session_id, now_s))

    def _take(self, tick: Tick) -> None:
        self._deliver(tick.wakes)
        for record in tick.records:
            self.records.append(record)
            last = self._settling.get(record.session_id)
            for session_id, visit in list(self._settling.items()):
                if last is not None and visit.scope == last.scope:  # they settled together
                    visit.record = record
                    del self._settling[session_id]

    def _on_timer(self) -> None:
        self._timer = None
        self._take(self.gate.tick(self._clock()))

    def _deliver(self, wakes: Iterable[Wake]) -> None:
        """Tell those who wait, and be there when the next of them is due."""
        for wake in wakes:
            if isinstance(wake, SessionWake):
                self._tickets[wake.ticket_id].give(wake.decision)
            else:
                self._held[wake.turn_id].give(wake.go)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self.gate.next_wake_s()
        if at_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.001, at_s - self._clock()), self._on_timer)

    # Sessions ------------------------------------------------------------------------------------------------------

    async def enter(
        self, visit: Visit, pool: Pool, *, expected_tokens: int | None = None, uncached_tokens: int = 0
    ) -> bool:
        """Let a turn's session into a pool, or have it wait. Gives whether it waited.

        Once a turn is in, and where no policy holds, there is nothing to ask. A client that leaves meanwhile gives up
        its place at once. When the pool is released meanwhile the turn is not in: it is to ask at the door of the pool
        that it gets instead, and has waited since it came to this one.

        Raises:  PoolSaturated, QueueFull, QueueTimeout (429), LoadUnknown (503), what ``dismiss`` was given
        """
        turn = visit.turn
        if turn.entered or self._policies.resolve(pool.pool_id).policy is None:
            return False
        known = turn.number == 1 and self._facts.is_known(turn.session.session_id)
        if not known and not self.gate.measured.is_fresh(self._clock()):
            await self.look()
        ruling = self._policies.resolve(pool.pool_id)
        policy, now_s = ruling.policy, self._clock()
        if policy is None:
            return False
        me = gate_id(turn.session.session_id, turn.number)
        arrival = Arrival(
            me,
            pool.pool_id,
            ruling,
            known=known,
            overcommit=visit.overcommit,
            prefix_len=pool.prefix_len,
            expected_tokens=expected_tokens,
            uncached_tokens=uncached_tokens,
            n_bytes=visit.n_bytes,
            tenant=visit.tenant,
            is_retry=visit.is_retry,
            since_s=visit.since_s,
        )
        self._inside[me], visit.scope = visit, ruling.scope
        try:
            decision, wakes = self.gate.arrive(arrival, now_s)
            self._deliver(wakes)
            waited = isinstance(decision, Held)
            if isinstance(decision, Held):
                answer = await self._wait(decision, visit, me)
                if answer is None:
                    self._inside.pop(me, None)
                    visit.sent_away()
                    return True
                decision = answer
                policy = self._policies.resolve(pool.pool_id).policy or policy  # it may be another one by now
            visit.answered(decision)
            if isinstance(decision, Refused):
                raise refusal_of(decision, pool, policy, self._u(), self._facts.gap_s)
        except BaseException:
            self._inside.pop(me, None)
            raise
        turn.entered, turn.pool_id = True, pool.pool_id
        if policy.on_saturation != "warn":
            visit.sessions_remaining = None
        if not known:
            self._settling[me] = visit
        if visit.decision == "overcommitted":
            log.info("session %s overcommits pool %s", turn.session.session_id, pool.label)
        return waited

    async def _wait(self, held: Held, visit: Visit, me: SessionId) -> Admitted | Refused | None:
        """None: the pool was released."""
        ticket_id, waiting = held.ticket_id, _Waiting[Admitted | Refused | None]()
        self._tickets[ticket_id] = waiting
        visit.queued(
            self._clock(),
            held.capacity,
            lambda: self.gate.standing(ticket_id, self._clock()),
            lambda: self.gate.verdict(ticket_id),
        )
        visit.turn.held = True
        self._arm()
        try:
            visit.on_hold()
            return await waiting.future
        except BaseException:
            visit.look_again()
            _, wakes = self.gate.cancel(ticket_id, self._clock())
            self._deliver(wakes)
            if isinstance(waiting.answer, Admitted):  # in the very moment in which it left
                self._deliver(self.gate.leave(me, self._clock()))
            raise
        finally:
            del self._tickets[ticket_id]
            visit.turn.held = False
            visit.goes_on()

    def forget(self, pool_id: PoolId) -> None:
        """The pool was released. Who waits at its door is not in, but looks where it belongs now."""
        tickets, wakes = self.gate.send_away(pool_id, self._clock())
        for ticket_id in tickets:
            self._tickets[ticket_id].give(None)
        self._deliver(wakes)
        self._gone.add(pool_id)
        self._forget_gone()

    def _forget_gone(self) -> None:
        for pool_id in list(self._gone):
            self.gate.forget(pool_id)
            if pool_id not in self.gate.entry.scopes:  # else somebody is still on its way in
                self._gone.discard(pool_id)

    def policies_changed(self) -> None:
        """Those who wait do so under the new policies."""
        self._deliver(self.gate.policies_changed(self._policies.resolve, self._clock()))
        self.start()

    # Turns ---------------------------------------------------------------------------------------------------------

    async def begin_turn(
        self,
        visit: Visit,
        pool_id: PoolId,
        *,
        ctx_tokens: int,
        uncached_tokens: int,
        on_hold: Callable[[], None] = lambda: None,
    ) -> bool:
        """Just before a turn goes out: wait while it would slow the others below the floor. Gives whether it waited.

        Never refuses. ``end_turn`` is owed, whatever happens. ``on_hold``: called when it has to wait.

        Raises:  what ``dismiss`` was given
        """
        turn = visit.turn
        request = TurnRequest(
            turn.turn_id,
            gate_id(turn.session.session_id, turn.number),
            pool_id,
            self._policies.resolve(pool_id),
            turn.session.created_s,
            ctx_tokens=ctx_tokens,
            uncached_tokens=uncached_tokens,
            n_bytes=visit.n_bytes,
            tenant=visit.tenant,
        )
        decision = self.gate.begin_turn(request, self._clock())
        if not isinstance(decision, TurnHeld):
            return False
        waiting = self._held[turn.turn_id] = _Waiting[Go]()
        visit.held(lambda: self._standing_of_turn(turn.turn_id))
        turn.held = True
        self._arm()
        try:
            on_hold()
            await waiting.future
            return True
        except BaseException:
            self._deliver(self.gate.end_turn(turn.turn_id, self._clock()))
            raise
        finally:
            del self._held[turn.turn_id]
            turn.held = False
            visit.goes_on()

    def _standing_of_turn(self, turn_id: int) -> Standing:
        """When its time is over it goes: that is its turn, too."""
        standing = self.gate.turns.line.standing(turn_id, self._clock())
        return replace(standing, eta_s=standing.left_s, ends_first=False) if standing.ends_first else standing

    def end_turn(self, visit: Visit) -> None:
        """A turn is over, however far it came. After its session's books were brought up to date."""
        turn, now_s = visit.turn, self._clock()
        me = gate_id(turn.session.session_id, turn.number)
        self._deliver(self.gate.end_turn(turn.turn_id, now_s))
        if self._inside.get(me) is visit:
            del self._inside[me]
            if turn.number > 1 or not turn.session.n_sent:  # no reading will show it
                self._deliver(self.gate.leave(me, now_s))

    # Questions -----------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        return self.gate.counts

    @property
    def n_waiting(self) -> int:
        """Sessions at the door."""
        return len(self._tickets)

    @property
    def n_held(self) -> int:
        """Turns that are held."""
        return len(self._held)

    def rate_of(self, session_id: SessionId) -> SessionRate | None:
        """How fast a session decodes, as measured for the gate; None: it is not."""
        return self.gate.measured.rates_book.get(session_id) if not self._policies.is_empty else None

    def capacity(
        self, pool_id: PoolId, expected_tokens: int | None = None, session_id: SessionId | None = None
    ) -> dict[str, Any]:
        """What ``enter`` would say to a new session, or to this one. By the engine's last stats.

        Raises:  PoolNotFound (404)
        """
        pool = self._facts.pool(pool_id)
        self.observe()
        known = session_id is not None and self._facts.is_known(session_id)
        arrival = Arrival(
            session_id or SessionId(""),
            pool_id,
            self._policies.resolve(pool_id),
            known=known,
            prefix_len=pool.prefix_len,
            expected_tokens=expected_tokens,
        )
        return self.gate.capacity(arrival, self._clock()).to_json() | self._facts.sequences()


def _is_newer(facts: EngineFacts, seen: EngineFacts) -> bool:
    return facts.measured_s > seen.measured_s or facts.epoch != seen.epoch
