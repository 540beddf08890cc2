"""Tokens per second, from what the engine's stats say while it decodes.

    aggregate   what the engine's own counter grew by over the engine's own clock, in about ``window_s``. Counters that
                move when a request ends would show a long answer as nothing, and then as a burst.
    session     the engine's moving average of the slot that its turn runs in, once stats have shown that turn's task
                there: a slot goes on showing the rate of whoever had it before. It lives on between turns.

Every pair of stats may be all there is of the time between: a short turn is not seen at all, and then has the rate that
its reply told. What is not known is None, never the last number that was.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.ids import SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.turns import Session, Turn
from polykv_proxy.upstream import SlotStats, Stats

STALE_S = 3.0
"""Stats are asked for once a second. After three times that long they say nothing about now."""

CLOCK_SLACK_S = 0.25
"""The engine's clock may differ from ours by so much between two looks, besides what the answers took."""


class Look(NamedTuple):
    """One reading: ``ts`` of the engine, tokens decoded since its start, and when it was asked and had answered."""

    ts: float
    n_decoded: int
    asked_s: float
    known_s: float


class Aggregate:
    """The engine's tokens per second over about ``window_s``. Pure.

    Units:  *_s seconds, monotonic; ts the engine's own clock, which somebody may set
    """

    def __init__(self, window_s: float):
        self.window_s = window_s
        self._looks: deque[Look] = deque()

    def clear(self) -> None:
        self._looks.clear()

    def note(self, look: Look) -> None:
        while self._looks and look.n_decoded < self._looks[-1].n_decoded:
            self._looks.pop()  # read while the counter was being moved: that one was too high
        if self._looks and not _agree(self._looks[-1], look):
            self._looks.clear()
        self._looks.append(look)
        oldest = look.ts - self._max_span_s
        while len(self._looks) > 2 and self._looks[1].ts <= oldest:
            self._looks.popleft()

    def tps(self) -> float | None:
        """None until looks are far enough apart, and when nobody looked for long."""
        if len(self._looks) < 2:
            return None
        *others, last = self._looks
        first = min(others, key=lambda look: abs(last.ts - look.ts - self.window_s))
        span_s = last.ts - first.ts
        if not self.window_s / 2 <= span_s <= self._max_span_s:
            return None
        return (last.n_decoded - first.n_decoded) / span_s

    @property
    def _max_span_s(self) -> float:
        return max(2 * self.window_s, self.window_s + STALE_S / 2)


def _agree(before: Look, look: Look) -> bool:
    """Whether the engine's clock went on as ours did: else it was set, and a rate over it would be made up."""
    span_s = look.ts - before.ts
    least, most = look.asked_s - before.known_s, look.known_s - before.asked_s
    return span_s > 0 and least - CLOCK_SLACK_S <= span_s <= most + CLOCK_SLACK_S


class _Task(NamedTuple):
    """``n_sent``: how many turns its session had sent by then. ``ended``: that it has was noted."""

    id_task: int
    turn: Turn
    n_sent: int
    ended: bool = False


class Rates:
    """``note`` with every stats that come; the rest answers from memory.

    ``clock``: that of ``EngineWatch.asked_s`` and ``Turn.sent_s``.
    """

    def __init__(self, sessions: SessionBook, watch: EngineWatch, clock: Callable[[], float], *, window_ms: int):
        self._sessions, self._watch, self._clock = sessions, watch, clock
        self._aggregate = Aggregate(window_ms / 1e3)
        self._epoch: str | None = None
        self._seen: Stats | None = None
        self._tasks: dict[int, _Task] = {}
        """By slot: the last task of ours that was seen there."""

    def is_live(self) -> bool:
        """Whether it is known what the engine does now."""
        watch = self._watch
        ready = watch.state == "ready" and watch.hooks is True and not watch.sleeping
        return ready and self._fresh is not None and self._clock() - watch.asked_s <= STALE_S

    @property
    def _fresh(self) -> Stats | None:
        """The stats of this start of the engine."""
        stats = self._watch.stats
        return stats if stats is not None and stats.epoch == self._watch.epoch else None

    def note(self) -> None:
        """Learn from the stats that came last, once."""
        watch, stats = self._watch, self._fresh
        if watch.state != "ready" or watch.sleeping or stats is None:
            self._forget()
            return
        if stats is self._seen:
            return
        if stats.epoch != self._epoch:
            self._forget()
        self._seen, self._epoch = stats, stats.epoch
        if stats.ts is not None:
            self._aggregate.note(Look(stats.ts, stats.n_decoded_cum, watch.asked_s, self._clock()))
        slots = {slot.id: slot for slot in stats.slots}
        for turn in list(self._sessions.running.values()):
            slot = slots.get(turn.slot_id) if turn.slot_id is not None else None
            if slot is not None and turn.sent_s is not None and watch.asked_s >= turn.sent_s:
                self._note_turn(turn, slot, stats)
        for slot_id, task in list(self._tasks.items()):
            if (slot := slots.get(slot_id)) is not None and slot.idle and not task.ended:
                self._tasks[slot_id] = task._replace(ended=True)
                _note_end(task, slot, stats)

    def _forget(self) -> None:
        self._aggregate.clear()
        self._tasks.clear()
        self._seen = self._epoch = None

    def _note_turn(self, turn: Turn, slot: SlotStats, stats: Stats) -> None:
        if slot.idle or slot.id_task < 0:
            return
        if slot.id_task != turn.id_task and not self._take(turn, slot, stats):
            return
        turn.n_decoded = turn.n_decoded_before + slot.n_decoded
        turn.ctx_used = _ctx_used(slot)
        if slot.state != "generating":
            return
        if turn.state == "prefilling":
            # A reply in one piece does not tell when its prompt is done: the engine does.
            turn.decodes(self._watch.asked_s)
        if slot.tps_ewma and slot.n_decoded > 1:
            turn.session.tps = slot.tps_ewma

    def _take(self, turn: Turn, slot: SlotStats, stats: Stats) -> bool:
        """Whether the task in its slot is this turn's. A list of prompts is one task after the other."""
        last = self._tasks.get(slot.id)
        if last is not None and last.id_task == slot.id_task:
            return False  # of the turn before
        if stats.n_deferred and turn.first_s is None:
            return False  # somebody waits for a slot, and it may be this turn
        if turn.id_task is not None:
            done = next((task for task in stats.finished if task.id_task == turn.id_task), None)
            turn.n_decoded_before = turn.n_decoded if done is None else turn.n_decoded_before + done.n_decoded
        turn.id_task = slot.id_task
        self._tasks[slot.id] = _Task(slot.id_task, turn, turn.session.n_sent)
        return True

    # Questions -----------------------------------------------------------------------------------------------------

    def aggregate_tps(self) -> float | None:
        return self._aggregate.tps() if self.is_live() else None

    def tps_of(self, session: Session) -> float | None:
        """Its last rate; None also while something runs of which nothing is known."""
        return session.tps if not session.is_sent or self.is_live() else None

    def n_decoded_of(self, session: Session) -> int | None:
        if session.is_sent and not self.is_live():
            return None
        return session.n_decoded + sum(turn.n_decoded for turn in session.turns.values())

    def ctx_used_of(self, session: Session) -> int | None:
        """Of what runs, else what its last turn ended with."""
        if not session.is_sent:
            return session.ctx_used
        if not self.is_live():
            return None
        running = [turn.ctx_used for turn in session.turns.values() if turn.ctx_used is not None]
        return running[-1] if running else session.ctx_used

    # Slots of which no session is known -----------------------------------------------------------------------------

    def slot(self, slot_id: SlotId) -> SlotStats | None:
        stats = self._fresh if self.is_live() else None
        return next((slot for slot in stats.slots if slot.id == slot_id), None) if stats is not None else None

    @staticmethod
    def tps_in(slot: SlotStats | None) -> float | None:
        """Of its task, or of its last one; until the second token of a task it shows that of the one before."""
        if slot is None or (not slot.idle and slot.n_decoded < 2):
            return None
        return slot.tps_ewma or None

    @staticmethod
    def used_in(slot: SlotStats | None) -> int | None:
        if slot is None:
            return None
        return slot.n_tokens if slot.idle else _ctx_used(slot)


def _note_end(task: _Task, slot: SlotStats, stats: Stats) -> None:
    """The average as it was at the end of a task stays in its slot until the next one begins there."""
    session = task.turn.session
    done = next((done for done in reversed(stats.finished) if done.id_slot == slot.id), None)
    if done is None or done.id_task != task.id_task or done.n_decoded < 2:
        return  # of a single token there is no rate, and the slot shows that of the task before
    if slot.tps_ewma and session.n_sent == task.n_sent and not session.is_sent:
        session.tps = slot.tps_ewma


def _ctx_used(slot: SlotStats) -> int:
    """What the prompt and the answer take; after a context shift what is left of them."""
    used = slot.n_prompt + slot.n_decoded
    return used if not slot.n_ctx or used <= slot.n_ctx else slot.n_tokens
