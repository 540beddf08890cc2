"""Who starts next: the line before the gate of one pool, and the decision of who stands first in it. No clock, no IO.

The server's gate decides; this only asks it at the right moments, so that sessions come one by one and each sees what
the one before it costs:

1.  Who is known to the server goes on at once: its session was admitted before.
2.  One after the other, in the order in which they came.
3.  Nobody while the admission before is open: until its first request was accepted, ``/capacity`` does not know of it.
4.  Nobody before the time that a refusal told (``penalize``).
5.  Then as ``/capacity`` says: guaranteed goes; settling waits, for as long as it says at most; warming sessions have
    no rate yet, so wait; no room waits for the next look. It looks at every ``poll_interval_s``, also while it
    settles: that ends early when the session before decoded its tokens, or left.
"""

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from polykv_proxy.client.asking import Call, Pool
from polykv_proxy.client.calls import capacity
from polykv_proxy.client.errors import PoolSaturatedError
from polykv_proxy.client.results import Capacity

HARD = ("context headroom exhausted", "no free stream (split cache)")
"""Nothing goes past these, overcommit neither."""
MIN_WAIT_S = 0.02
JITTER = 0.25

Kind = Literal["spawn", "settle", "guarantee", "overcommit", "saturated"]


@dataclass(frozen=True, slots=True)
class PaceEvent:
    """``settle``: it waits for a measurement, ``saturated``: for room, ``reason`` says what for and ``wait_s`` how long
    it is now. ``guarantee``, ``overcommit``: why it was let in. ``spawn``: a courier started its worker.

    ``at_s``: of ``time.monotonic``.
    """

    kind: Kind
    at_s: float
    pool_id: Pool
    session_id: str | None
    reason: str | None = None
    wait_s: float | None = None
    capacity: Capacity | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Go:
    kind: Literal["guarantee", "overcommit"] | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Wait:
    """``seconds``: at most; None: for the next look."""

    kind: Literal["settle", "saturated"]
    reason: str | None
    seconds: float | None = None


def decide(found: Capacity, *, overcommit: bool = False) -> Go | Wait:
    """Whether who stands first starts now."""
    if found.can_admit and found.guaranteed:
        return Go("guarantee", found.reason)
    if overcommit and found.reason not in HARD:
        return Go("overcommit", found.reason)
    if found.settling:
        left_ms = found.settle_remaining_ms
        return Wait("settle", found.reason, max(MIN_WAIT_S, left_ms / 1e3) if left_ms is not None else None)
    if not found.can_admit:
        return Wait("saturated", found.reason)
    if found.target_tps_per_session is not None and found.n_warming:
        return Wait("settle", "sessions without a rate yet")
    return Go(None, found.reason)


class Line:
    """All who wait for one pool of one proxy in this process: threads, tasks and loops alike.

    Methods may be called by any thread; none of them waits.
    """

    _shared: ClassVar["weakref.WeakValueDictionary[tuple[str, str], Line]"] = weakref.WeakValueDictionary()
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[object] = deque()
        self._wakers: set[Callable[[], None]] = set()
        self._open: Admission | None = None
        self._not_before_s = 0.0
        self.version = 0
        """Grows with every change: who looked before it need not wait."""

    @classmethod
    def shared(cls, base_url: str, pool_id: Pool) -> "Line":
        """The one of this proxy and pool."""
        with cls._sharing:
            line = cls._shared.get((base_url, str(pool_id)))
            if line is None:
                line = cls._shared[base_url, str(pool_id)] = cls()
            return line

    def join(self) -> object:
        """Give a ticket: stand at the end."""
        ticket = object()
        with self._lock:
            self._waiting.append(ticket)
        return ticket

    def leave(self, ticket: object) -> None:
        with self._lock:
            self._waiting.remove(ticket)
        self._changed()

    def look(self, ticket: object) -> tuple[int, bool, "Admission | None", float]:
        """(version, whether it stands first, the open admission, before when nobody goes)."""
        with self._lock:
            return self.version, self._waiting[0] is ticket, self._open, self._not_before_s

    def opened(self, admission: "Admission") -> None:
        with self._lock:
            self._open = admission
        self._changed()

    def closed(self, admission: "Admission") -> None:
        with self._lock:
            if self._open is not admission:
                return
            self._open = None
        self._changed()

    def not_before(self, at_s: float) -> None:
        with self._lock:
            self._not_before_s = max(self._not_before_s, at_s)
        self._changed()

    def wake_me(self, waker: Callable[[], None], seen: int) -> bool:
        """Call ``waker`` once something changed since ``seen``. False: it did already."""
        with self._lock:
            if self.version != seen:
                return False
            self._wakers.add(waker)
            return True

    def never_mind(self, waker: Callable[[], None]) -> None:
        with self._lock:
            self._wakers.discard(waker)

    def _changed(self) -> None:
        with self._lock:
            self.version += 1
            wakers, self._wakers = self._wakers, set()
        for waker in wakers:
            waker()


class Admission:
    """Leave to start one session. Until ``accepted`` or ``abandon``, or the end of ``with``, nobody else is let in.

    ``accepted``: its first request was answered or begins to be. Who cannot tell need not: the one who is next asks the
    server whether it knows ``session_id``. ``abandon``: it will not start. Both may be called by any thread and again.
    """

    def __init__(self, line: Line, session_id: str | None, found: Capacity, reason: str | None, opened_s: float):
        self._line = line
        self.session_id = session_id
        self.capacity = found
        self.reason = reason
        self.opened_s = opened_s

    def accepted(self) -> None:
        self._line.closed(self)

    def abandon(self) -> None:
        self._line.closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._line.closed(self)


@dataclass(frozen=True, slots=True)
class Asking:
    """What somebody wants to be let in for. Seconds.

    ``max_wait_s`` None: wait for ever. ``accept_s``: an admission that is not accepted after so long holds up nobody.
    """

    pool_id: Pool
    session_id: str | None = None
    expected_tokens: int | None = None
    overcommit: bool = False
    poll_interval_s: float = 1.0
    max_wait_s: float | None = None
    accept_s: float = 60.0
    on_event: Callable[[PaceEvent], Any] | None = None

    def call(self, session_id: str | None) -> Call[Capacity]:
        return capacity(self.pool_id, expected_tokens=self.expected_tokens, session_id=session_id)


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so long (None: for ever), or until something changes in the line since ``seen``."""

    seconds: float | None
    seen: int


Acquiring = Generator[Call[Capacity] | Pause, Capacity | None, Admission]
"""Yields what is to be asked, and is sent the answer, or what is to be waited for; returns the admission."""


def acquire(
    line: Line, asking: Asking, clock: Callable[[], float], u: Callable[[], float] = random.random
) -> Acquiring:
    """Stand in line and be let in. See the module for the rules.

    Raises:  PoolSaturatedError after ``max_wait_s``, with the capacity that was found last
    """
    began_s = clock()
    found: Capacity | None = None
    if asking.session_id is not None:
        found = yield from _asked(asking, asking.session_id)
        if found.known_session:
            return Admission(line, asking.session_id, found, found.reason, clock())
    ticket = line.join()
    told: tuple[str, str | None] | None = None
    try:
        while True:
            seen, first, before, not_before_s = line.look(ticket)
            wait = Wait("saturated", "others are before it")
            poll_s = asking.poll_interval_s * (1.0 - JITTER + 2 * JITTER * u())
            pause_s: float | None = None
            if first and before is not None:
                if clock() - before.opened_s >= asking.accept_s or (
                    before.session_id is not None and (yield from _asked(asking, before.session_id)).known_session
                ):
                    before.accepted()
                    continue
                wait, pause_s = Wait("settle", "the session before it has not begun"), poll_s
            elif first and clock() < not_before_s:
                wait, pause_s = Wait("saturated", "it was refused"), not_before_s - clock()
            elif first:
                found = yield from _asked(asking, asking.session_id)
                decision = decide(found, overcommit=asking.overcommit)
                if isinstance(decision, Go):
                    admission = Admission(line, asking.session_id, found, decision.reason, clock())
                    line.opened(admission)
                    if decision.kind is not None:
                        _tell(asking, decision.kind, clock(), decision.reason, capacity=found)
                    return admission
                wait, pause_s = decision, poll_s if decision.seconds is None else min(poll_s, decision.seconds)
            if asking.max_wait_s is not None:
                left_s = began_s + asking.max_wait_s - clock()
                if left_s <= 0:
                    raise PoolSaturatedError(
                        f"no room on pool {asking.pool_id} within {asking.max_wait_s:g} s: {wait.reason}",
                        code="max_wait",
                        reason=wait.reason,
                        retry_after=pause_s,
                        pool_id=asking.pool_id,
                        capacity=found,
                    )
                pause_s = left_s if pause_s is None else min(pause_s, left_s)
            if first and told != (wait.kind, wait.reason):
                told = (wait.kind, wait.reason)
                _tell(asking, wait.kind, clock(), wait.reason, wait_s=pause_s, capacity=found)
            yield Pause(pause_s, seen)
    finally:
        line.leave(ticket)


def penalty_s(retry_after: float | None, poll_interval_s: float, u: float) -> float:
    """How long nobody starts after a refusal."""
    return (retry_after if retry_after is not None else poll_interval_s) * (1.0 + JITTER * u)


def _asked(asking: Asking, session_id: str | None) -> Generator[Call[Capacity], Capacity | None, Capacity]:
    answer = yield asking.call(session_id)
    assert answer is not None, "who drives this sends what was asked for"
    return answer


def _tell(asking: Asking, kind: Kind, at_s: float, reason: str | None, **more: Any) -> None:
    if asking.on_event is not None:
        asking.on_event(PaceEvent(kind, at_s, asking.pool_id, asking.session_id, reason, **more))
