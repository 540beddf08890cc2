"""Pacers: be let in one by one, as the server's gate has room. The rules are those of ``line``.

All pacers of one process for the same proxy and pool stand in one line, threads and event loops alike. Between
processes the gate itself is the arbiter: with an enforced policy it may still refuse, so tell it (``penalize``).
"""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from polykv_proxy.client.asking import Call, Pool
from polykv_proxy.client.clients import AsyncPolyKVClient, PolyKVClient
from polykv_proxy.client.line import Acquiring, Admission, Asking, Line, PaceEvent, Pause, acquire, penalty_s
from polykv_proxy.client.results import Capacity

Listener = Callable[[PaceEvent], Any]


class _Pacing:
    """What both have in common."""

    def __init__(
        self,
        base_url: str,
        pool_id: Pool,
        *,
        expected_tokens: int | None,
        poll_interval: float,
        max_wait: float | None,
        on_event: Listener | None,
    ):
        self._line = Line.shared(base_url, pool_id)
        self._asking = Asking(
            pool_id,
            expected_tokens=expected_tokens,
            poll_interval_s=poll_interval,
            max_wait_s=max_wait,
            on_event=on_event,
        )

    @property
    def pool_id(self) -> Pool:
        return self._asking.pool_id

    def penalize(self, retry_after: float | None = None) -> None:
        """The server refused somebody: nobody starts for so many seconds, and a little more, not all at once."""
        self._line.not_before(time.monotonic() + penalty_s(retry_after, self._asking.poll_interval_s, random.random()))

    def _acquiring(
        self, session_id: str | None, expected_tokens: int | None, overcommit: bool, on_event: Listener | None
    ) -> Acquiring:
        asking = replace(
            self._asking,
            session_id=session_id,
            expected_tokens=expected_tokens if expected_tokens is not None else self._asking.expected_tokens,
            overcommit=overcommit,
            on_event=on_event or self._asking.on_event,
        )
        return acquire(self._line, asking, time.monotonic)


class AdmissionPacer(_Pacing):
    """``with pacer.acquire(session_id="agent-7"): …first request of agent-7…``

    ``expected_tokens``: what a session will hold beyond the pool, for the context arm. ``poll_interval``: seconds
    between looks while there is no room. ``max_wait``: then PoolSaturatedError; None waits for ever.
    """

    def __init__(
        self,
        client: PolyKVClient,
        pool_id: Pool,
        *,
        expected_tokens: int | None = None,
        poll_interval: float = 1.0,
        max_wait: float | None = None,
        on_event: Listener | None = None,
    ):
        super().__init__(
            client.base_url,
            pool_id,
            expected_tokens=expected_tokens,
            poll_interval=poll_interval,
            max_wait=max_wait,
            on_event=on_event,
        )
        self._client = client

    def acquire(
        self,
        *,
        session_id: str | None = None,
        expected_tokens: int | None = None,
        overcommit: bool = False,
        on_event: Listener | None = None,
    ) -> Admission:
        """Wait until one more session may start. One that the server knows goes at once.

        ``overcommit``: past the floor; send the request with ``overcommit=True``, too.

        Raises:  PoolSaturatedError after ``max_wait``; what ``capacity`` raises
        """
        acquiring = self._acquiring(session_id, expected_tokens, overcommit, on_event)
        with contextlib.closing(acquiring):
            answer: Capacity | None = None
            while True:
                try:
                    wanted = acquiring.send(answer)
                except StopIteration as done:
                    admission: Admission = done.value
                    return admission
                if isinstance(wanted, Call):
                    answer = self._client.call(wanted)
                else:
                    answer = None
                    self._wait(wanted)

    def _wait(self, pause: Pause) -> None:
        woken = threading.Event()
        if self._line.wake_me(woken.set, pause.seen):
            try:
                woken.wait(pause.seconds)
            finally:
                self._line.never_mind(woken.set)


class AsyncAdmissionPacer(_Pacing):
    """``with await pacer.acquire(session_id="agent-7"): …first request of agent-7…``; else as ``AdmissionPacer``."""

    def __init__(
        self,
        client: AsyncPolyKVClient,
        pool_id: Pool,
        *,
        expected_tokens: int | None = None,
        poll_interval: float = 1.0,
        max_wait: float | None = None,
        on_event: Listener | None = None,
    ):
        super().__init__(
            client.base_url,
            pool_id,
            expected_tokens=expected_tokens,
            poll_interval=poll_interval,
            max_wait=max_wait,
            on_event=on_event,
        )
        self._client = client

    async def acquire(
        self,
        *,
        session_id: str | None = None,
        expected_tokens: int | None = None,
        overcommit: bool = False,
        on_event: Listener | None = None,
    ) -> Admission:
        """Wait until one more session may start. Cancelled, it leaves the line.

        Raises:  PoolSaturatedError after ``max_wait``; what ``capacity`` raises
        """
        acquiring = self._acquiring(session_id, expected_tokens, overcommit, on_event)
        with contextlib.closing(acquiring):
            answer: Capacity | None = None
            while True:
                try:
                    wanted = acquiring.send(answer)
                except StopIteration as done:
                    admission: Admission = done.value
                    return admission
                if isinstance(wanted, Call):
                    answer = await self._client.call(wanted)
                else:
                    answer = None
                    await self._wait(wanted)

    async def _wait(self, pause: Pause) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # its loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(woken.set)

        if self._line.wake_me(wake, pause.seen):
            try:
                async with asyncio.timeout(pause.seconds):
                    await woken.wait()
            except TimeoutError:
                pass  # it has waited for as long as it should
            finally:
                self._line.never_mind(wake)
