"""How one request of a chat model comes past the gate: at once or not at all, or by way of the pacer of its pool.

A session that is named stands in the pacer's line before it asks, and those behind it wait until the server knows it.
Without a name the server may recognise a conversation that goes on, which is never gated: so it is asked first, and
stands in line only once it was refused. Without a pool there is no line either, and the server says how long to wait.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from polykv_proxy import client
from polykv_proxy.client import AdmissionPacer, AsyncAdmissionPacer, AsyncPolyKVClient, PolyKVClient
from polykv_proxy.client.line import Admission, penalty_s
from polykv_proxy.langgraph.errors import PoolSaturatedError

PAUSE_S = 1.0
"""When a refusal does not say for how long."""


class Accepting(Protocol):
    def accepted(self) -> None:
        """The server has taken the request: the next may be let in."""


class _Free:
    """Leave to ask that nobody else waits for."""

    def accepted(self) -> None:
        pass


class _Door:
    """``with door.enter() as admission:`` ask; on an error ``door.refused(error)``, and if that returns, again."""

    def __init__(
        self,
        *,
        pool_id: int | str | None,
        session_id: str | None,
        overcommit: bool,
        waits: bool,
        max_wait_s: float | None,
        poll_interval_s: float,
    ):
        self._poll_interval_s = poll_interval_s
        self._pool_id, self._session_id, self._overcommit, self._waits = pool_id, session_id, overcommit, waits
        self._until_s = None if max_wait_s is None else time.monotonic() + max_wait_s
        self._pause_s = 0.0
        self._was_refused = False
        self._pacer: AdmissionPacer | AsyncAdmissionPacer | None = None

    def refused(self, error: BaseException, cause: BaseException) -> None:
        """Raises it, unless it is a refusal that is waited for."""
        left_s = self._left_s()
        if not self._waits or not isinstance(error, client.PoolSaturatedError) or (left_s is not None and left_s <= 0):
            raise error from cause
        self._was_refused = True
        if self._pacer is not None:
            self._pacer.penalize(error.retry_after)
        else:
            pause_s = penalty_s(error.retry_after, PAUSE_S, random.random())
            self._pause_s = pause_s if left_s is None else min(pause_s, left_s)

    def _stands_in_line(self) -> bool:
        return self._waits and self._pool_id is not None and (self._session_id is not None or self._was_refused)

    def _left_s(self) -> float | None:
        return None if self._until_s is None else self._until_s - time.monotonic()

    @contextlib.contextmanager
    def _inside(self, admission: Admission | None) -> Iterator[Accepting]:
        if admission is None:
            yield _Free()
            return
        if self._session_id is None:
            admission.accepted()  # nobody could tell when the server knows it
        with admission:
            yield admission


class Door(_Door):
    def __init__(
        self,
        sdk: PolyKVClient,
        **options: Any,
    ):
        super().__init__(**options)
        self._sdk = sdk

    def enter(self) -> AbstractContextManager[Accepting]:
        """Raises PoolSaturatedError when there was no room for ``max_wait_s``."""
        if self._pool_id is None or not self._stands_in_line():
            time.sleep(self._pause_s)
            return self._inside(None)
        self._pacer = pacer = AdmissionPacer(
            self._sdk, self._pool_id, poll_interval=self._poll_interval_s, max_wait=self._left_s()
        )
        try:
            admission = pacer.acquire(session_id=self._session_id, overcommit=self._overcommit)
        except client.PoolSaturatedError as error:
            raise PoolSaturatedError.of(error) from error
        return self._inside(admission)


class AsyncDoor(_Door):
    def __init__(
        self,
        sdk: AsyncPolyKVClient,
        **options: Any,
    ):
        super().__init__(**options)
        self._sdk = sdk

    async def enter(self) -> AbstractContextManager[Accepting]:
        """Cancelled, it leaves the line. Raises PoolSaturatedError when there was no room for ``max_wait_s``."""
        if self._pool_id is None or not self._stands_in_line():
            await asyncio.sleep(self._pause_s)
            return self._inside(None)
        self._pacer = pacer = AsyncAdmissionPacer(
            self._sdk, self._pool_id, poll_interval=self._poll_interval_s, max_wait=self._left_s()
        )
        try:
            admission = await pacer.acquire(session_id=self._session_id, overcommit=self._overcommit)
        except client.PoolSaturatedError as error:
            raise PoolSaturatedError.of(error) from error
        return self._inside(admission)
