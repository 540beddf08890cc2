"""Cells that were promised to requests on their way, until the engine's stats show them.

A promise belongs to the task that serves the request, and ends with ``settled`` or with the task: a request that leaves
takes its promise along, and one that is decided twice has one.

A place in the line for slots comes before a place in the line for cells: whoever stands in that line is promised
nothing. Else it could wait for the slot of somebody who waits for the cells that it was promised.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import InvariantError
from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import SlotBook


@dataclass(slots=True, eq=False)
class Promise:
    """Not ``counted``: it is only known that it will come, and for which pool."""

    n_cells: int
    pool_id: PoolId | None
    session: SessionId | None
    counted: bool = True


class Promises:
    """``_changed`` is set when cells may have come free."""

    def __init__(self, sessions: SessionBook, slots: SlotBook, watch: EngineWatch):
        self._sessions, self._slots, self._watch = sessions, slots, watch
        self._promises: dict[asyncio.Task[Any], Promise] = {}
        self._n_counted = self._n_promised = 0  # promises that are counted, and the cells of these
        self._waited_s: dict[asyncio.Task[Any], float] = {}
        self._changed = asyncio.Event()

    def promise(self, n_cells: int, pool_id: PoolId | None = None, session: SessionId | None = None) -> None:
        """Count these cells as taken, and the pool as used, until ``settled``. Replaces this task's last promise."""
        self._replace(this_task(), Promise(n_cells, pool_id, session))

    def announce(self, pool_id: PoolId | None, session: SessionId | None) -> None:
        """It comes later, and needs nothing until it is counted then. The pool counts as used."""
        self._replace(this_task(), Promise(0, pool_id, session, counted=False))

    def put_off(self) -> None:
        """This task has to wait for something else first: others may have its cells, and it is counted anew."""
        own = self._promises.get(this_task())
        if own is not None and own.counted:
            self.announce(own.pool_id, own.session)
            self._changed.set()

    def is_put_off(self) -> bool:
        """This task was announced, and not counted since."""
        if len(self._promises) == self._n_counted:
            return False  # nobody is
        own = self._promises.get(this_task())
        return own is not None and not own.counted

    def settled(self) -> None:
        """What this task was promised is used up or not needed any more."""
        if self._replace(this_task(), None) is not None:
            self._changed.set()

    def waited(self, seconds: float) -> None:
        """This task waited for cells."""
        task = this_task()
        self._waited_s[task] = self._waited_s.get(task, 0.0) + seconds

    def take_waited_s(self) -> float:
        """How long this task waited for cells since it was last asked."""
        return self._waited_s.pop(this_task(), 0.0)

    def comes_back(self) -> bool:
        """Whether this request has to stand in line for a slot first, and is decided anew when it has one.

        Cells for everybody in that line would be counted long before they are needed.
        """
        own = self._promises.get(this_task())
        if own is not None:
            return False
        return self._slots.n_waiting > 0 or self._slots.n_held >= self._slots.n_slots

    def _live(self) -> "list[tuple[asyncio.Task[Any], Promise]]":
        """Promises of tasks that are still at it; those of others end here."""
        done = [task for task in self._promises if task.done()]
        for task in done:
            self._replace(task, None)
        return list(self._promises.items())

    def _replace(self, task: "asyncio.Task[Any]", promise: Promise | None) -> Promise | None:
        """Give what it was promised before."""
        before = self._promises.pop(task, None)
        if before is not None and before.counted:
            self._n_counted -= 1
            self._n_promised -= before.n_cells
        if promise is not None:
            self._promises[task] = promise
            if promise.counted:
                self._n_counted += 1
                self._n_promised += promise.n_cells
        return before

    def _arrived(self, task: "asyncio.Task[Any]", promise: Promise, running: Collection[int]) -> bool:
        """It is this task's own, or the stats show it already: it was sent before they were asked for, and runs."""
        if task is this_task():
            return True
        session = self._sessions.get(promise.session) if promise.session is not None else None
        if session is None:
            return False
        asked_s = self._watch.asked_s
        return any(t.slot_id in running and t.sent_s is not None and t.sent_s < asked_s for t in session.turns.values())


def this_task() -> "asyncio.Task[Any]":
    """The task that serves this request."""
    task = asyncio.current_task()
    if task is None:
        raise InvariantError("cells are promised to a task")
    return task
