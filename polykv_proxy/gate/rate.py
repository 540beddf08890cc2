"""How fast each session decodes, as it experiences it: an average over time, from cumulative counters.

Prefill is left out: time counts only while the session decodes. It lives on between turns, so only a session without
any sample is *warming*. Two figures are kept. The *experienced* rate has everything in it and is what the floor is
compared with. The *clear* rate leaves out stretches that took much longer than usual because the engine was busy with
somebody's prompt (*stalled*): those say nothing about how many sessions the machine can carry. A stretch goes from one
reading with new tokens to the next: within a long batch no counter moves.

The window is ``window_tokens`` or ``window_s``, whichever ends first; the average is bias-corrected, so that the first
sample counts in full.
"""

import math
from dataclasses import dataclass, field

from polykv_proxy.gate.facts import EngineFacts, SessionFacts
from polykv_proxy.ids import SessionId

STALL_AFTER_S = 1.0
"""So much later than usual, while somebody's prompt was processed: a stall. The short prompts of ordinary turns are a
part of the load, and stay in the forecast."""


@dataclass(slots=True)
class Average:
    """Bias-corrected exponential average over time."""

    sum: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float | None:
        return self.sum / self.weight if self.weight > 0 else None

    def fold(self, sample: float, dt_s: float, window_s: float) -> None:
        a = 1.0 - math.exp(-dt_s / window_s)
        self.sum += a * (sample - self.sum)
        self.weight += a * (1.0 - self.weight)


@dataclass(slots=True)
class SessionRate:
    """``stalled``: right now. ``stall_ms``: of this turn, in stalls that are over."""

    experienced: Average = field(default_factory=Average)
    clear: Average = field(default_factory=Average)
    reply_tps: float | None = None
    stalled: bool = False
    stall_ms: float = 0.0
    n_turns: int = -1
    pending_s: float = 0.0
    pending_prefill: bool = False

    @property
    def tps(self) -> float | None:
        value = self.experienced.value
        return value if value is not None else self.reply_tps

    @property
    def clear_tps(self) -> float | None:
        value = self.clear.value
        return value if value is not None else self.tps


@dataclass(frozen=True, slots=True)
class Rates:
    """Over all decoders of the engine. None: nobody decodes, or nobody who does has a sample."""

    mean_active_tps: float | None = None
    mean_clear_tps: float | None = None
    n_active: int = 0
    n_warming: int = 0


class RateBook:
    def __init__(self, *, window_tokens: int = 128, window_s: float = 2.0):
        self._window_tokens, self._window_s = window_tokens, window_s
        self._rates: dict[SessionId, SessionRate] = {}
        self._last: EngineFacts | None = None
        self._before: dict[SessionId, SessionFacts] = {}

    def get(self, session_id: SessionId) -> SessionRate | None:
        return self._rates.get(session_id)

    def update(self, facts: EngineFacts) -> None:
        """Take in a reading. Sessions that are not in it any more are forgotten."""
        last = self._last
        comparable = last is not None and last.epoch == facts.epoch
        dt_s = facts.measured_s - last.measured_s if last is not None else 0.0
        if comparable and dt_s <= 0:
            return
        prefill = last is not None and (facts.n_prefilled > last.n_prefilled or _is_prefilling(last, facts))
        now = {s.session_id: s for s in facts.sessions}
        for session_id, session in now.items():
            rate = self._rates.setdefault(session_id, SessionRate())
            if session.reply_tps:
                rate.reply_tps = session.reply_tps
            if session.n_turns != rate.n_turns:
                rate.n_turns, rate.stalled, rate.stall_ms = session.n_turns, False, 0.0
                rate.pending_s, rate.pending_prefill = 0.0, False
            before = self._before.get(session_id)
            if comparable and before is not None and _decodes_on(before, session):
                self._fold(rate, session.n_decoded - before.n_decoded, dt_s, prefill)
            elif session.state != "decoding":
                rate.stalled = False
        for session_id in self._rates.keys() - now.keys():
            del self._rates[session_id]
        self._last, self._before = facts, now

    def _fold(self, rate: SessionRate, n_tokens: int, dt_s: float, prefill: bool) -> None:
        tps = rate.experienced.value
        window_s = min(self._window_s, self._window_tokens / tps) if tps else self._window_s
        rate.pending_s += dt_s
        rate.pending_prefill |= prefill
        if tps is not None:
            rate.experienced.fold(n_tokens / dt_s, dt_s, window_s)
        elif n_tokens:  # until its first token it is warming: 0 would be a rate, and drag the mean down
            rate.experienced.fold(n_tokens / rate.pending_s, rate.pending_s, window_s)
        clear = rate.clear.value
        usual_s = n_tokens / clear if clear else (rate.pending_s if n_tokens else 0.0)
        late_s = rate.pending_s - usual_s
        is_late = late_s >= STALL_AFTER_S or rate.stalled
        rate.stalled = n_tokens == 0 and is_late and rate.pending_prefill
        if n_tokens == 0 and (rate.pending_prefill or not is_late):
            return  # what it was shows when a token comes
        if is_late and rate.pending_prefill:
            rate.stall_ms += late_s * 1e3
        else:
            rate.clear.fold(n_tokens / rate.pending_s, rate.pending_s, window_s)
        rate.pending_s, rate.pending_prefill = 0.0, False

    def read(self, facts: EngineFacts | None) -> Rates:
        """The means over those who decode in this reading."""
        if facts is None:
            return Rates()
        experienced, clear, n_warming = [], [], 0
        for session in facts.sessions:
            if not session.processing:
                continue
            rate = self._rates.get(session.session_id)
            if rate is None or rate.tps is None:
                n_warming += 1
            elif session.state == "decoding":
                experienced.append(rate.tps)
                clear.append(rate.clear_tps or 0.0)
        n = len(experienced)
        if not n:
            return Rates(n_warming=n_warming)
        return Rates(sum(experienced) / n, sum(clear) / n, n, n_warming)


def _decodes_on(before: SessionFacts, now: SessionFacts) -> bool:
    same_turn = before.n_turns == now.n_turns and now.n_decoded >= before.n_decoded
    return same_turn and before.state == "decoding" and now.state == "decoding"


def _is_prefilling(*readings: EngineFacts) -> bool:
    return any(s.state == "prefilling" for facts in readings for s in facts.sessions)
