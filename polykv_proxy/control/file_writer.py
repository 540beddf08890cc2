"""States that were saved in memory because somebody waited, on their way to the disk: one at a time, in the background.

Each tag is in the line once, so the line is never longer than the list of what is saved; what is forgotten meanwhile is
not written, and what is saved anew is written as it is then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from polykv_proxy.control.endings import say_how_it_ended

log = logging.getLogger("polykv.saved")

_ended = say_how_it_ended(log, "states stay in memory for now", "a bug in writing states to the disk")


class FileWriter:
    """``write``: gives False when it is to be tried again later. ``may_write``: False while the disk fails."""

    def __init__(self, write: Callable[[str], Awaitable[bool]], may_write: Callable[[], bool]):
        self._write, self._may_write = write, may_write
        self._due: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, tag: str) -> None:
        """Write it when its turn comes."""
        self._due[tag] = None
        self.go_on()

    def discard(self, tag: str) -> None:
        """It was forgotten."""
        self._due.pop(tag, None)

    def clear(self) -> None:
        """What was in memory is not there any more."""
        self._due.clear()

    def go_on(self) -> None:
        """Called by the heartbeat, too: the disk may work again."""
        if self._due and not self._is_closed and self._may_write() and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="polykv-write-states")
            self._task.add_done_callback(_ended)

    async def finish(self) -> None:
        """Wait until all that can be written is. The caller sets a limit."""
        self.go_on()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def stop(self) -> None:
        """Leave the rest in memory: an engine that goes on has it, and so has the next proxy."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._due and self._may_write():
            tag = next(iter(self._due))
            del self._due[tag]  # whoever saves it anew meanwhile puts it in the line again
            if not await self._write(tag):
                self._due.setdefault(tag)
                return  # the heartbeat goes on
