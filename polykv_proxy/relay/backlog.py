"""Requests that came and that the engine does not have yet: how many there may be, how large, and for how long.

Each costs the proxy its body and what was parsed of it while it waits, for a slot, for cells, for a pool or at a door.
All of them are counted in here, whatever they wait for. Past the bounds the next one is told when to come back, so that
a crowd costs time and never the proxy.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from types import TracebackType

from polykv_proxy.errors import PolyKVError, QueueFull, QueueTimeout
from polykv_proxy.gate.outcome import retry_after

MAX_WAITING = 1024
MAX_BYTES = 256 << 20
"""Of bodies, also of those that are still being uploaded. A single one always fits."""

MAX_WAIT_S = 600.0
"""For a slot. After so long the clients of chat APIs have given up by themselves; who has not is told."""

USUAL_S = 5.0
"""Until requests have gone out from here a place in line is taken to come free after this."""

FULL, LATE = "too many requests wait", "no slot came free"


class Backlog:
    """``u``: a random number from 0 to 1."""

    def __init__(self, clock: Callable[[], float], u: Callable[[], float] = random.random):
        self.n_bytes = 0
        self._clock, self._u = clock, u
        self._went_s: deque[float] = deque(maxlen=8)
        self._waiting: set[Place] = set()
        self._dismissed: PolyKVError | None = None

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def enter(self) -> "Place":
        """For a request whose body is about to be read."""
        return Place(self)

    def dismiss(self, error: PolyKVError) -> None:
        """Everybody who waits, wherever it is, and who comes from now on, gets ``error``."""
        self._dismissed = error
        for place in list(self._waiting):
            place.dismiss(error)

    def admit(self, place: "Place") -> None:
        """Raises QueueFull (429), what ``dismiss`` was given."""
        if self._dismissed is not None:
            raise self._dismissed
        if self.n_waiting >= MAX_WAITING:
            raise self.full()
        self._waiting.add(place)

    def drop(self, place: "Place", *, sent: bool) -> None:
        self._waiting.discard(place)
        if sent:
            self._went_s.append(self._clock())

    def full(self) -> QueueFull:
        after_s, after_ms = retry_after(self._drained_s(), self._u())
        return QueueFull(
            f"{self.n_waiting} requests wait here already, {self.n_bytes / (1 << 20):.1f} MiB of them (at most "
            f"{MAX_WAITING} and {MAX_BYTES >> 20} MiB): try again in {after_s} s, or send fewer at once",
            reason=FULL,
            retry_after_s=after_s,
            retry_after_ms=after_ms,
        )

    def late(self) -> QueueTimeout:
        after_s, after_ms = retry_after(self._drained_s(), self._u())
        return QueueTimeout(
            f"no slot came free within {MAX_WAIT_S:.0f} s: try again in {after_s} s, send fewer requests at once, or "
            "start the engine with more slots (--parallel)",
            reason=LATE,
            retry_after_s=after_s,
            retry_after_ms=after_ms,
        )

    def _drained_s(self) -> float:
        """When those who wait now will have gone out, at the pace of the last ones."""
        if len(self._went_s) < 2:
            return USUAL_S
        usual_s = (self._clock() - self._went_s[0]) / len(self._went_s)
        return usual_s * self.n_waiting


class Place:
    """Of one request: ``add`` what comes of its body, ``wait`` when it is there, ``leave`` whatever happens.

    As a context it is where the waiting is done: there it can be dismissed, as long as it has not left.
    """

    __slots__ = ("_backlog", "_dismissed", "_left", "_n_bytes", "_task")

    def __init__(self, backlog: Backlog):
        self._backlog, self._n_bytes, self._left = backlog, 0, False
        self._task: asyncio.Task[object] | None = None
        self._dismissed: PolyKVError | None = None

    def add(self, n_bytes: int) -> None:
        """Raises QueueFull (429)."""
        backlog = self._backlog
        if backlog.n_bytes > self._n_bytes and backlog.n_bytes + n_bytes > MAX_BYTES:
            raise backlog.full()
        self._n_bytes += n_bytes
        backlog.n_bytes += n_bytes

    def wait(self) -> None:
        """Raises QueueFull (429), what ``Backlog.dismiss`` was given."""
        self._backlog.admit(self)

    def leave(self, *, sent: bool = False) -> None:
        """It goes out (``sent``), or is over. A second time it changes nothing."""
        if self._left:
            return
        self._left = True
        self._backlog.n_bytes -= self._n_bytes
        self._n_bytes, self._task = 0, None
        self._backlog.drop(self, sent=sent)

    def late(self) -> QueueTimeout:
        return self._backlog.late()

    def dismiss(self, error: PolyKVError) -> None:
        if self._task is not None:
            self._dismissed = error
            self._task.cancel()

    def __enter__(self) -> None:
        self._task = asyncio.current_task()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """What was dismissed ends with that error, unless its client left as well."""
        if self._dismissed is None:
            return
        task = asyncio.current_task()
        if task is not None and task.uncancel() == 0 and isinstance(exc, asyncio.CancelledError):
            raise self._dismissed from None
