"""Start processes in order, keep them running, stop them in reverse order.

One thread, one loop, no clock but ``time.monotonic``. Rules:

1. A child that dies before it was ever ready is not tried again: the reason is in its log, not in bad luck.
2. A child that dies later is started again after 1, 2, 4 … 30 s; a minute of life makes the wait short again.
3. No orphans: children are stopped when the loop ends for whatever reason, and where the kernel offers it (Linux) they
   get a signal when we are killed without a chance to stop them.
4. Stopping is SIGTERM and patience, then SIGKILL. Asked a second time, a child gets a second SIGTERM and two seconds.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polykv_proxy.engine.files import Say
from polykv_proxy.engine.leftovers import mark_in_use
from polykv_proxy.engine.problem import EngineProblem

_TICK_S = 0.1
_FIRST_WAIT_S, _LONGEST_WAIT_S, _STEADY_AFTER_S = 1.0, 30.0, 60.0
_HURRY_S = 2.0
_LOG_LINES = 12
_PR_SET_PDEATHSIG = 1


def backoff_s(n_quick_deaths: int) -> float:
    """Seconds to wait before start number ``n_quick_deaths + 1``."""
    return min(_FIRST_WAIT_S * 2.0 ** max(0, n_quick_deaths - 1), _LONGEST_WAIT_S)


@dataclass
class Child:
    """One process to keep alive.

    ``ready_url`` answers 200 once it can work. ``log`` takes all it says; None = its stderr is ours.
    """

    name: str
    command: Sequence[str]
    ready_url: str
    log: Path | None
    ready_headers: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    orphan_signal: signal.Signals = signal.SIGKILL
    stop_patience_s: float = 10.0

    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    n_quick_deaths: int = 0
    start_again_s: float | None = None
    _log_fd: int | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        out, errors = subprocess.DEVNULL, None
        if self.log is not None:
            out = errors = self._opened(self.log)
        try:
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env=os.environ | dict(self.environment),
                restore_signals=False,  # SIGXFSZ stays ignored: a limit on files fails a write, and ends nobody
                start_new_session=True,  # Ctrl-C at the terminal reaches only us: we stop them in order
                preexec_fn=_die_with(os.getpid(), self.orphan_signal),  # noqa: PLW1509 - we have no threads
            )
        except OSError as error:
            raise EngineProblem(f"the {self.name} cannot be started: {error}") from error
        self.started_s = time.monotonic()
        self.start_again_s = None

    def _opened(self, log: Path) -> int:
        """It stays open until the next start, or the end of all: it is in use between two starts as well."""
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        mark_in_use(opened)
        self.close_log()
        self._log_fd = opened
        return opened

    def close_log(self) -> None:
        if self._log_fd is not None:
            os.close(self._log_fd)
            self._log_fd = None

    def is_ready(self) -> bool:
        request = urllib.request.Request(self.ready_url, headers=dict(self.ready_headers))
        try:
            with _opener.open(request, timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def end_of_log(self) -> str:
        if self.log is None or not self.log.is_file():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])


# Health checks go to this machine: never through a proxy from the environment.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Supervisor:
    """Runs the children of one ``polykvctl up``; later children need the earlier ones."""

    def __init__(self, children: Sequence[Child], say: Say) -> None:
        self._children = children
        self._say = say
        self._n_asked_to_stop = 0  # a plain number: locks are not for signal handlers

    def ask_to_stop(self) -> None:
        """Safe in a signal handler; the second call ends the patience."""
        self._n_asked_to_stop += 1

    def run(self, when_ready: Callable[[], None]) -> None:
        """Start all, call ``when_ready`` once, keep them alive until asked to stop.

        Raises:  EngineProblem when a child cannot be brought up the first time
        """
        try:
            for child in self._children:
                if not self._n_asked_to_stop:
                    child.start()
                    self._wait_until_ready(child)
            if not self._n_asked_to_stop:
                when_ready()
            while not self._n_asked_to_stop:
                for child in self._children:
                    self._look_after(child)
                time.sleep(_TICK_S)
        finally:
            for child in reversed(self._children):
                self._stop(child)
                child.close_log()

    def _wait_until_ready(self, child: Child) -> None:
        """As long as it lives, it may take its time: a large model loads for minutes."""
        while not self._n_asked_to_stop and not child.is_ready():
            assert child.process is not None
            if (status := child.process.poll()) is not None:
                where = f"; its log: {child.log}" if child.log else ""
                raise EngineProblem(
                    f"the {child.name} ended at start ({_how(status)}){where}", detail=child.end_of_log()
                )
            time.sleep(_TICK_S)

    def _stop(self, child: Child) -> None:
        process = child.process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        give_up_s = time.monotonic() + child.stop_patience_s
        hurried = False
        while process.poll() is None:
            if self._n_asked_to_stop > 1 and not hurried:
                hurried = True
                process.terminate()
                give_up_s = min(give_up_s, time.monotonic() + _HURRY_S)
            if time.monotonic() >= give_up_s:
                process.kill()
                process.wait()
            time.sleep(_TICK_S / 2)

    def _look_after(self, child: Child) -> None:
        now_s = time.monotonic()
        if child.start_again_s is not None:
            if now_s >= child.start_again_s:
                child.start()
                self._say(f"{child.name} started again (pid {child.pid})")
            return
        assert child.process is not None
        if (status := child.process.poll()) is None:
            return
        lived_s = now_s - child.started_s
        child.n_quick_deaths = 1 if lived_s >= _STEADY_AFTER_S else child.n_quick_deaths + 1
        wait_s = backoff_s(child.n_quick_deaths)
        child.start_again_s = now_s + wait_s
        self._say(f"the {child.name} died ({_how(status)}), starting it again in {wait_s:g} s")


def _how(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _die_with(parent_pid: int, orphan_signal: signal.Signals) -> Callable[[], None] | None:
    """What the child does between fork and exec: ask the kernel for a signal when its parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, int(orphan_signal), 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before we asked
            os.kill(os.getpid(), orphan_signal)

    return ask_kernel
