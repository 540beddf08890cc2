"""What the gate is told of the engine: one reading, put together from its stats and from our books.

Live sessions are in it: those with a turn under way that was let in, and those that were served not long ago. Who
waits at the door is not. Turns of one session at the same time are sessions of their own to the gate (``gate_id``),
since each of them decodes for itself.
"""

from collections.abc import Callable, Iterator

from polykv_proxy.control.ledger import Ledger
from polykv_proxy.control.policies import Policies
from polykv_proxy.control.rates import Rates
from polykv_proxy.control.room import Room
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.gate.facts import EngineFacts, SessionFacts, State, Streams
from polykv_proxy.ids import PoolId, SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import SlotBook
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.turns import Session, Turn
from polykv_proxy.upstream import Stats

ASLEEP = "asleep"
"""The epoch of an engine that sleeps: nothing runs there, and counters begin anew when it wakes up."""


def gate_id(session_id: SessionId, number: int) -> SessionId:
    """What the gate calls a turn's session. No client can name one so: ids are printable."""
    return session_id if number == 1 else SessionId(f"{session_id}\0{number}")


class EngineClock:
    """When the engine took a reading, by our clock: a rate is tokens over the time between two readings, and an answer
    may be late by as much as lies between them.

    A reading was taken after it was asked for. So the question that was answered soonest tells the two clocks apart
    best, and with every reading it is known better.
    """

    def __init__(self) -> None:
        self._epoch: str | None = None
        self._ahead_s = float("-inf")

    def when(self, epoch: str, ts: float | None, asked_s: float, known_s: float) -> float:
        """Seconds of our clock, from ``asked_s`` to ``known_s``. ``ts``: of the engine's, None = it does not say."""
        if ts is None:
            return asked_s
        if epoch != self._epoch:
            self._epoch, self._ahead_s = epoch, float("-inf")
        self._ahead_s = max(self._ahead_s, asked_s - ts)
        if ts + self._ahead_s > known_s:
            self._ahead_s = asked_s - ts  # somebody set the engine's clock
        return ts + self._ahead_s


class GateFacts:
    def __init__(
        self,
        *,
        tree: PoolTree,
        sessions: SessionBook,
        slots: SlotBook,
        watch: EngineWatch,
        room: Room,
        ledger: Ledger,
        rates: Rates,
        policies: Policies,
        clock: Callable[[], float],
    ):
        self._tree, self._sessions, self._slots, self._watch = tree, sessions, slots, watch
        self._room, self._ledger, self._rates, self._policies = room, ledger, rates, policies
        self._clock = clock
        self._engine_clock = EngineClock()

    def read(self) -> EngineFacts | None:
        """By the last stats; None: the engine is away, or nothing is known of this start of it."""
        watch, stats = self._watch, self._watch.stats
        if watch.state != "ready" or watch.hooks is not True:
            return None
        if watch.sleeping:
            return EngineFacts(self._clock(), self._live(), epoch=ASLEEP)
        if stats is None or stats.epoch != watch.epoch:
            return None
        self._rates.note()
        self._ledger.sync()
        counted = self._room.n_total is not None
        return EngineFacts(
            self._engine_clock.when(stats.epoch, stats.ts, watch.asked_s, self._clock()),
            self._live(),
            n_prefilled=stats.n_prompt_cum,
            cells_total=self._room.n_total,
            cells_used=stats.cells.used if counted and stats.cells is not None else None,
            cells_free=self._room.n_available() if counted else None,
            ctx_total=stats.n_ctx_slot,
            streams=self._streams(stats),
            epoch=stats.epoch,
            still_s=watch.progress.late_s(watch.asked_s),
        )

    def pool(self, pool_id: PoolId) -> Pool:
        """Raises PoolNotFound (404)."""
        return self._tree.get(pool_id)

    def sequences(self) -> dict[str, int | None]:
        """How many of the engine's sequences for pools are in use; None: it is away."""
        stats, answers = self._watch.stats, self._watch.state == "ready"
        return {
            "seq_ids_used": len(self._tree.residents()) if stats is not None and answers else None,
            "seq_ids_max": stats.max_pools if stats is not None else None,
        }

    @property
    def gap_s(self) -> float:
        """So long a session counts after a turn."""
        return self._sessions.gap_s

    def is_known(self, session_id: SessionId) -> bool:
        """It was served before: what comes is a continuation."""
        session = self._sessions.get(session_id)
        return session is not None and session.n_sent > 0

    # ---------------------------------------------------------------------------------------------------------------

    def _live(self) -> tuple[SessionFacts, ...]:
        now_s = self._clock()
        scopes: dict[PoolId, PoolId] = {}
        return tuple(facts for session in self._sessions.open() for facts in self._of_session(session, now_s, scopes))

    def _of_session(self, session: Session, now_s: float, scopes: dict[PoolId, PoolId]) -> Iterator[SessionFacts]:
        first = next((turn for turn in session.turns.values() if turn.number == 1), None)
        served = session.n_sent > 0 and self._sessions.is_live(session.session_id, now_s)
        if served or (first is not None and _is_in(first)):
            yield self._facts(session, first, 1, scopes)
        for turn in session.turns.values():
            if turn.number > 1 and _is_in(turn):
                yield self._facts(session, turn, turn.number, scopes)

    def _facts(self, session: Session, turn: Turn | None, number: int, scopes: dict[PoolId, PoolId]) -> SessionFacts:
        pool_id = turn.pool_id if turn is not None and turn.pool_id is not None else session.pool_id
        if pool_id is not None and self._tree.find(pool_id) is None:
            pool_id = None  # released while it runs on
        if pool_id is not None and pool_id not in scopes:
            scopes[pool_id] = self._policies.resolve(pool_id).scope
        slot_id = turn.slot_id if turn is not None and turn.slot_id is not None else session.slot_id
        slot_id = slot_id if number == 1 or turn is None else turn.slot_id
        ctx_used = turn.ctx_used if turn is not None else None
        return SessionFacts(
            gate_id(session.session_id, number),
            pool_id,
            scopes[pool_id] if pool_id is not None else None,
            _state(turn),
            n_turns=session.n_first_turns if number == 1 else 1,
            n_decoded=(session.n_first_decoded if number == 1 else 0) + (turn.n_decoded if turn is not None else 0),
            ctx_used=(ctx_used if ctx_used is not None else session.ctx_used) or 0,
            own_cells=self._ledger.holds(SlotId(slot_id))[1] if slot_id is not None else 0,
            reply_tps=session.tps,
            decoding_s=(session.first_decoding_s if number == 1 else 0.0)
            + (turn.decoding_s(self._watch.asked_s) if turn is not None else 0.0),
        )

    def _streams(self, stats: Stats) -> Streams | None:
        """Free: slots in which nothing runs, and for which nobody is on his way."""
        if stats.kv_unified or stats.cells is None or not stats.cells.n_stream:
            return None
        idle = {slot.id for slot in stats.slots if slot.idle}
        n_free = sum(slot_id in idle for slot_id, _ in self._slots.resting())
        return Streams(stats.cells.n_stream, n_free, stats.cells.total // stats.cells.n_stream)


def _is_in(turn: Turn) -> bool:
    """It is past the door, or never had to go through one."""
    return turn.entered or turn.sent_s is not None


def _state(turn: Turn | None) -> State:
    if turn is None:
        return "idle"
    return turn.state if turn.state in ("prefilling", "decoding") else "waiting"
