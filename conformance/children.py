"""Every process of a run, and that none outlives it: not after Ctrl-C, nor when the run itself fails in the middle.

Each process is started in a session of its own, so the Ctrl-C of a terminal reaches nobody but this process, which ends
the others. Whatever they start inherits a mark in its environment: by that, and by nothing else, it is found and ended,
also when it left its group or lost its parent.

    SIGINT, SIGTERM, SIGHUP   the first one: no process is started any more, all are told to end, ``Stopped`` is raised
                              in the main thread, and the worker threads end since what they wait for does. The second
                              one: all are killed, and so is this process
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.engine.harness import bound_to_this_process

BOUND = bound_to_this_process()
"""Should we be killed, our children end."""

MARK = "CONFORMANCE_RUN"
GRACE_S = 10.0
"""An engine that is asked to end takes a second or two on a busy machine."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.05
_N_KILLS = 100
"""Who is killed while it starts another one has to be looked for again."""


class Stopped(BaseException):
    """The run is to end. Not an ``Exception``: nobody on the way takes it for a failure of his own."""


class Children:
    """``grace_s``: so long they may take to end by themselves."""

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._mark = f"{MARK}={uuid.uuid4()}"
        # One that is started while a signal comes is either refused or told to end; the signal's handler may
        # interrupt who holds the lock.
        self._lock = threading.RLock()
        self._running: dict[int, subprocess.Popen[Any]] = {}
        self._stopping = False

    def start(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[bytes]:
        """As ``subprocess.Popen`` does.

        Raises:  Stopped, and what that raises
        """
        name, _, value = self._mark.partition("=")
        environment = (dict(os.environ) if env is None else env) | {name: value}
        with self._lock:
            if self._stopping:
                raise Stopped
            process: subprocess.Popen[bytes] = subprocess.Popen(
                [*BOUND, *command], stdin=subprocess.DEVNULL, start_new_session=True, env=environment, **how
            )
            self._running[process.pid] = process
        return process

    def run(self, command: Sequence[str], **how: Any) -> int:
        """Start it, wait, and give its status. What it left in its group is told to end.

        Raises:  Stopped, also when it ended because of that
        """
        process = self.start(command, **how)
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            status = self.end(process)
        if self._stopping:
            raise Stopped
        return status

    def end(self, process: subprocess.Popen[bytes], within_s: float | None = None) -> int:
        """Tell it to end and wait; what is left of its group then goes with it. Gives its status."""
        if process.returncode is not None:
            return process.returncode
        # It is reaped last of all: until then its number is nobody else's, nor its group's.
        os.kill(process.pid, signal.SIGTERM)
        end_s = time.monotonic() + (self._grace_s if within_s is None else within_s)
        while not (ended := _has_ended(process)) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        with self._lock:
            os.killpg(process.pid, signal.SIGTERM if ended else signal.SIGKILL)
            del self._running[process.pid]
            return process.wait()

    # The end -------------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """No process is started any more, and those that run are told to end."""
        with self._lock:
            self._stopping = True
            for pid in self._running:
                os.killpg(pid, signal.SIGTERM)

    def end_all(self) -> None:
        """Nothing that was started is left when this returns."""
        self.stop()
        end_s = time.monotonic() + self._grace_s
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) not in self._running:  # the others were told as a group
                    os.kill(pid, signal.SIGTERM)
        while self._left() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        self.kill_all()

    def kill_all(self) -> None:
        for _ in range(_N_KILLS):
            if not (left := self._left()):
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)

    def _left(self) -> list[int]:
        """Who has the mark. The dead that nobody has waited for have no environment any more."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and self._is_marked(path)]

    def _is_marked(self, path: Path) -> bool:
        try:
            return self._mark.encode() in (path / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone meanwhile, or another user's
            return False

    @contextlib.contextmanager
    def answering_signals(self, at_once: Callable[[], None]) -> Iterator[None]:
        """``at_once``: what is to be done at the second signal, when all are killed, before this process ends."""

        def answer(number: int, _: object) -> None:
            if not self._stopping:
                self.stop()
                raise Stopped
            self.kill_all()
            at_once()
            os._exit(128 + signal.SIGINT)  # the worker threads are not waited for

        before = {number: signal.getsignal(number) for number in _SIGNALS}
        heard = [number for number in _SIGNALS if before[number] != signal.SIG_IGN]  # under nohup it stays ignored
        for number in heard:
            signal.signal(number, answer)
        try:
            yield
        finally:
            for number in heard:
                signal.signal(number, before[number])


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
