"""Couriers: many jobs, each of them one session of a pool, started as the pool has room.

A job starts when the pacer lets it in, so the machine decides how many run at once. A worker that meets the gate all
the same (PoolSaturatedError) is started again later, with the same session.
"""

import asyncio
import inspect
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from polykv_proxy.client.asking import Pool
from polykv_proxy.client.clients import AsyncPolyKVClient, PolyKVClient
from polykv_proxy.client.errors import PoolSaturatedError
from polykv_proxy.client.line import Admission, PaceEvent
from polykv_proxy.client.pacer import AdmissionPacer, AsyncAdmissionPacer

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Job(Generic[Item]):
    """What a worker is given. Its requests carry ``pool_id`` and ``session_id``, and ``overcommit`` if it is so.

    ``attempt``: 0, or how often the gate refused it before.
    """

    item: Item
    index: int
    pool_id: Pool
    session_id: str
    overcommit: bool = False
    attempt: int = 0
    _admission: Admission | None = field(default=None, repr=False, compare=False)

    def accepted(self) -> None:
        """Its first request goes: the next job may be let in. Without it the server is asked for ``session_id``."""
        if self._admission is not None:
            self._admission.accepted()


@dataclass(frozen=True, slots=True)
class Delivery(Generic[Item, Made]):
    """What became of an item. ``error``: what its worker raised. Seconds are of ``time.monotonic``.

    ``started_s``: its last attempt was let in. ``attempts``: how often it was.
    """

    item: Item
    session_id: str
    started_s: float
    ended_s: float
    attempts: int
    error: BaseException | None
    _made: Made | None = field(default=None, repr=False)

    @property
    def result(self) -> Made:
        """What its worker returned. Raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._made  # type: ignore[return-value]


class Courier(Generic[Item, Made]):
    """``Courier(client, "review", worker).run(items)`` gives one ``Delivery`` per item, in their order.

    ``worker(job)``: a function; ``arun`` also takes a coroutine function, and runs a plain one in a thread.
    ``session_key(item, index)``: the session of an item, the same over retries and, if it should go on after a restart,
    over runs. ``overcommit(item)``: this one goes past the floor. ``max_workers``: a ceiling besides the gate's.
    ``requeue_on_saturated``: False hands a refusal over as the item's error; ``max_attempts``: so often at most.
    ``events``: what happened, in order.
    """

    def __init__(
        self,
        client: PolyKVClient | AsyncPolyKVClient,
        pool_id: Pool,
        worker: Callable[[Job[Item]], Made] | Callable[[Job[Item]], Awaitable[Made]],
        *,
        pacer: AdmissionPacer | AsyncAdmissionPacer | None = None,
        session_key: Callable[[Item, int], str] | None = None,
        overcommit: Callable[[Item], bool] | None = None,
        max_workers: int | None = None,
        requeue_on_saturated: bool = True,
        max_attempts: int = 100,
        on_event: Callable[[PaceEvent], Any] | None = None,
    ):
        self._client, self._pool_id, self._worker, self._pacer = client, pool_id, worker, pacer
        prefix = secrets.token_hex(4)
        self._session_key = session_key or (lambda item, index: f"{prefix}:{index}")
        self._overcommit = overcommit or (lambda item: False)
        self._max_workers = max_workers
        self._max_attempts = max_attempts if requeue_on_saturated else 1
        self._on_event = on_event
        self.events: list[PaceEvent] = []

    def run(self, items: Iterable[Item]) -> list[Delivery[Item, Made]]:
        """Work off the items in threads.

        Raises:  what the pacer raises, once those that were started have ended
        """
        if not isinstance(self._client, PolyKVClient) or isinstance(self._pacer, AsyncAdmissionPacer):
            raise TypeError("run needs a PolyKVClient and its pacer; with an AsyncPolyKVClient await arun")
        pacer = self._pacer or AdmissionPacer(self._client, self._pool_id)
        books = self._books(items)
        running: dict[Future[Made], tuple[Job[Item], float]] = {}
        with ThreadPoolExecutor(books.most(self._max_workers), "courier") as threads:
            while books.todo or running:
                if books.todo and len(running) < books.most(self._max_workers):
                    job = books.todo.popleft()
                    admission = pacer.acquire(
                        session_id=job.session_id, overcommit=job.overcommit, on_event=self._happened
                    )
                    started_s = self._spawned(job, admission)
                    running[threads.submit(self._work, replace(job, _admission=admission), pacer)] = (job, started_s)
                else:
                    wait(running, return_when=FIRST_COMPLETED)
                for future in [each for each in running if each.done()]:
                    job, started_s = running.pop(future)
                    books.ended(job, started_s, future.exception(), future)
        return books.deliveries()

    async def arun(self, items: Iterable[Item]) -> list[Delivery[Item, Made]]:
        """Work off the items in tasks. Cancelled, it cancels them and waits until they are out.

        Raises:  what the pacer raises; those that were started are cancelled, too
        """
        if not isinstance(self._client, AsyncPolyKVClient) or isinstance(self._pacer, AdmissionPacer):
            raise TypeError("arun needs an AsyncPolyKVClient and its pacer; with a PolyKVClient call run")
        pacer = self._pacer or AsyncAdmissionPacer(self._client, self._pool_id)
        books = self._books(items)
        running: dict[asyncio.Task[Made], tuple[Job[Item], float]] = {}
        try:
            while books.todo or running:
                if books.todo and len(running) < books.most(self._max_workers):
                    job = books.todo.popleft()
                    admission = await pacer.acquire(
                        session_id=job.session_id, overcommit=job.overcommit, on_event=self._happened
                    )
                    started_s = self._spawned(job, admission)
                    task = asyncio.create_task(self._awork(replace(job, _admission=admission), pacer))
                    running[task] = (job, started_s)
                else:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in [each for each in running if each.done()]:
                    job, started_s = running.pop(task)
                    books.ended(job, started_s, _exception(task), task)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return books.deliveries()

    def _work(self, job: Job[Item], pacer: AdmissionPacer) -> Made:
        try:
            made: Made = self._worker(job)  # type: ignore[assignment]
            return made
        except PoolSaturatedError as error:
            self._refused(job, error, pacer)
            raise
        finally:
            job.accepted()  # whatever came of it, it holds up nobody any more

    async def _awork(self, job: Job[Item], pacer: AsyncAdmissionPacer) -> Made:
        try:
            if _is_async(self._worker):
                made = self._worker(job)
            else:
                made = await asyncio.to_thread(self._worker, job)
            result: Made = await made if inspect.isawaitable(made) else made
            return result
        except PoolSaturatedError as error:
            self._refused(job, error, pacer)
            raise
        finally:
            job.accepted()

    def _refused(self, job: Job[Item], error: PoolSaturatedError, pacer: AdmissionPacer | AsyncAdmissionPacer) -> None:
        now_s = time.monotonic()
        pacer.penalize(error.retry_after)
        self._happened(
            PaceEvent("saturated", now_s, job.pool_id, job.session_id, error.reason or error.code, error.retry_after)
        )

    def _spawned(self, job: Job[Item], admission: Admission) -> float:
        now_s = time.monotonic()
        spawn = PaceEvent("spawn", now_s, job.pool_id, job.session_id, admission.reason, capacity=admission.capacity)
        try:
            self._happened(spawn)
        except BaseException:  # of who listens: it will not start
            admission.abandon()
            raise
        return now_s

    def _happened(self, event: PaceEvent) -> None:
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def _books(self, items: Iterable[Item]) -> "_Books[Item, Made]":
        jobs = [
            Job(item, index, self._pool_id, self._session_key(item, index), self._overcommit(item))
            for index, item in enumerate(items)
        ]
        return _Books(jobs, self._max_attempts)


class _Books(Generic[Item, Made]):
    """Who is still to go, and what became of the others."""

    def __init__(self, jobs: list[Job[Item]], max_attempts: int):
        names = [job.session_id for job in jobs]
        if len(set(names)) < len(names):
            raise ValueError("two items have the same session: session_key must tell them apart")
        self.todo = deque(jobs)
        self._n_jobs, self._max_attempts = len(jobs), max_attempts
        self._done: dict[int, Delivery[Item, Made]] = {}

    def most(self, max_workers: int | None) -> int:
        return max(1, min(max_workers or self._n_jobs, self._n_jobs))

    def ended(
        self,
        job: Job[Item],
        started_s: float,
        error: BaseException | None,
        outcome: "Future[Made] | asyncio.Task[Made]",
    ) -> None:
        if isinstance(error, PoolSaturatedError) and job.attempt + 1 < self._max_attempts:
            self.todo.appendleft(replace(job, attempt=job.attempt + 1))
            return
        made = outcome.result() if error is None else None
        self._done[job.index] = Delivery(
            job.item, job.session_id, started_s, time.monotonic(), job.attempt + 1, error, made
        )

    def deliveries(self) -> list[Delivery[Item, Made]]:
        return [self._done[index] for index in range(self._n_jobs)]


def _exception(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _is_async(worker: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(worker) or inspect.iscoroutinefunction(getattr(worker, "__call__", None))  # noqa: B004
