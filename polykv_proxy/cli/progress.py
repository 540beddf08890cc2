"""How long work looks at a terminal: a bar that counts steps; without a terminal a plain line now and then.

Everything goes to stderr: stdout belongs to the command's result.
"""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PLAIN_EVERY_S = 30.0


class BuildProgress:
    """``engine.compiling.Progress`` for people. Use as a context manager: the bar must be taken down."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_plain_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def step(self, n_done: int, n_total: int, what: str) -> None:
        if sys.stderr.isatty():
            self._draw(n_done, n_total, what)
            return
        now_s = time.monotonic()
        if n_done == n_total or now_s - self._last_plain_s >= _PLAIN_EVERY_S:
            self._last_plain_s = now_s
            self.say(f"[{n_done}/{n_total}] {100 * n_done // n_total} % {what}")

    def _draw(self, n_done: int, n_total: int, what: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        if self._bar is None:
            from rich.console import Console

            columns = (
                TextColumn("compiling"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", style="dim", markup=False),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=False)
            self._task = self._bar.add_task("", total=n_total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=n_done, total=n_total, description=what.rsplit("/", 1)[-1])
