"""Run CMake and Ninja, count Ninja's steps, and show the step that failed."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TextIO

from polykv_proxy.engine.problem import EngineProblem

_STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
_SHOWN_LINES = 60


class Progress(Protocol):
    """Whoever shows a person how far a build is."""

    def say(self, line: str) -> None: ...

    def step(self, n_done: int, n_total: int, what: str) -> None: ...


def configure_and_compile(
    *,
    cmake: Path,
    ninja: Path,
    source: Path,
    objects: Path,
    flags: Sequence[str],
    target: str,
    log: Path,
    progress: Progress,
    lock: int,
) -> Path:
    """Build ``target`` and return its path; the whole output goes to ``log``.

    ``lock`` is the descriptor of the build lock. The compilers inherit it: if we are killed they go on for a while,
    and until they end nobody else may write to ``objects``.

    Raises:  EngineProblem whose detail is the failing step with its output
    """
    environment = _build_environment(objects)
    configure = [cmake, "-S", source, "-B", objects, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *flags]
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(_n_usable_cores())
    compile_ = [ninja, "-C", objects, "-j", jobs, target]
    with log.open("a", encoding="utf-8") as sink:
        tail = _Tail()
        if _run(list(map(str, configure)), environment, sink, tail.take, lock) != 0:
            raise EngineProblem("configuring llama.cpp failed (cmake)", detail=tail.text())
        failure = _Failure(progress)
        if _run(list(map(str, compile_)), environment, sink, failure.take, lock) != 0:
            raise EngineProblem(f"compiling llama.cpp failed; whole output: {log}", detail=failure.text())
    return objects / "bin" / target


def _build_environment(objects: Path) -> dict[str, str]:
    """ccache, where there is one, gives the same answers in any cache folder: paths are relative to the work folder."""
    return os.environ | {
        "NINJA_STATUS": "[%f/%t] ",
        "CCACHE_BASEDIR": str(objects.parent),
        "CCACHE_NOHASHDIR": "1",
        "LC_ALL": "C",
    }


def _n_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(command: list[str], environment: dict[str, str], sink: TextIO, take: "_Taker", lock: int) -> int:
    sink.write(f"$ {' '.join(command)}\n")
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock,),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            take(line.rstrip("\n"))
    return process.returncode


class _Taker(Protocol):
    def __call__(self, line: str, /) -> None: ...


class _Tail:
    """The last lines of a command that prints no steps."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def take(self, line: str) -> None:
        self._lines = [*self._lines[-_SHOWN_LINES + 1 :], line]

    def text(self) -> str:
        return "\n".join(self._lines)


class _Failure:
    """Counts Ninja's steps and keeps the first one that failed with what it printed."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step = ""
        self._failed: list[str] = []
        self._inside = False
        self._tail = _Tail()

    def take(self, line: str) -> None:
        self._tail.take(line)
        if step := _STEP.match(line):
            self._inside = False
            self._step = step[3]
            self._progress.step(int(step[1]), int(step[2]), step[3])
        elif line.startswith("FAILED:") and not self._failed:
            self._inside = True
            self._failed = [self._step, line]
        elif line.startswith("ninja: "):
            self._inside = False
        elif self._inside and len(self._failed) < _SHOWN_LINES:
            self._failed.append(line)

    def text(self) -> str:
        return "\n".join(self._failed) or self._tail.text()
