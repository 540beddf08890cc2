"""The two clients: the same methods (``calls``), one does them and one awaits them."""

import asyncio
import functools
import inspect
import itertools
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from polykv_proxy.client import calls, generating
from polykv_proxy.client.asking import Call, Steps, StreamCall
from polykv_proxy.client.errors import PolyKVError
from polykv_proxy.client.wire import Events, Wire

P = ParamSpec("P")
T = TypeVar("T")


def _does(make: Callable[P, Call[T]]) -> "Callable[Concatenate[PolyKVClient, P], T]":
    return _method(make, lambda self, call: self.call(call))


def _does_steps(make: Callable[P, Steps[T]]) -> "Callable[Concatenate[PolyKVClient, P], T]":
    return _method(make, lambda self, steps: self.steps(steps))


def _streams(make: Callable[P, StreamCall[T]]) -> "Callable[Concatenate[PolyKVClient, P], Generator[T, None, None]]":
    return _method(make, lambda self, call: self.stream(call))


def _awaits(make: Callable[P, Call[T]]) -> "Callable[Concatenate[AsyncPolyKVClient, P], Coroutine[Any, Any, T]]":
    return _method(make, lambda self, call: self.call(call))


def _awaits_steps(make: Callable[P, Steps[T]]) -> "Callable[Concatenate[AsyncPolyKVClient, P], Coroutine[Any, Any, T]]":
    return _method(make, lambda self, steps: self.steps(steps))


def _streams_async(
    make: Callable[P, StreamCall[T]],
) -> "Callable[Concatenate[AsyncPolyKVClient, P], AsyncGenerator[T, None]]":
    return _method(make, lambda self, call: self.stream(call))


def _method(make: Callable[..., Any], perform: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """``make`` as a method, with its signature, annotations and docstring."""

    @functools.wraps(make)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return perform(self, make(*args, **kwargs))

    signature = inspect.signature(make)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    return method


class PolyKVClient:
    """``with PolyKVClient("http://127.0.0.1:8090") as polykv: polykv.create_pool(messages=…)``

    Threads may share one. ``base_url``: else ``POLYKV_BASE_URL``, else ``POLYKV_URL``. ``api_key`` (``POLYKV_API_KEY``)
    opens the data plane, ``admin_key`` (``POLYKV_ADMIN_KEY``) the control plane; where one is missing the other is
    shown. ``timeout``: seconds without a byte, 600 unless given. ``transport``: of httpx, for tests.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int = 2,
        transport: httpx.BaseTransport | None = None,
    ):
        self._wire = Wire(base_url, api_key=api_key, admin_key=admin_key, timeout=timeout, max_retries=max_retries)
        self._http = httpx.Client(transport=transport, **self._wire.options())

    @property
    def base_url(self) -> str:
        return self._wire.base_url

    def close(self) -> None:
        """Close its connections; it cannot be used after that."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    create_pool = _does(calls.create_pool)
    fork_pool = _does(calls.fork_pool)
    pools = _does(calls.pools)
    pool = _does(calls.pool)
    subtree = _does(calls.subtree)
    pin = _does(calls.pin)
    unpin = _does(calls.unpin)
    evict = _does(calls.evict)
    flush = _does(calls.flush)
    release = _does(calls.release)
    set_admission = _does(calls.set_admission)
    admission = _does(calls.admission)
    drop_admission = _does(calls.drop_admission)
    capacity = _does(calls.capacity)
    tps = _does(calls.tps)
    stream_tps = _streams(calls.stream_tps)
    sessions = _does(calls.sessions)
    session = _does(calls.session)
    drop_session = _does(calls.drop_session)
    match = _does(calls.match)
    requests = _does(calls.requests)
    health = _does(calls.health)
    tokenize = _does(calls.tokenize)
    render = _does_steps(calls.render)
    compact_by_refork = _does(calls.compact_by_refork)
    chat = _does(generating.chat)
    stream_chat = _streams(generating.stream_chat)
    complete = _does(generating.complete)
    stream_complete = _streams(generating.stream_complete)

    def call(self, call: Call[T]) -> T:
        """Do one call. Raises PolyKVError."""
        return self._wire.result(call, self._send(call))

    def steps(self, steps: Steps[T]) -> T:
        """Do what takes several. Raises PolyKVError."""
        try:
            call = next(steps)
            while True:
                try:
                    result = self.call(call)
                except PolyKVError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(result)
        except StopIteration as done:
            whole: T = done.value
            return whole

    def stream(self, call: StreamCall[T]) -> Generator[T, None, None]:
        """The pieces of one; sent with the first ``next``, ended by ``close()``. Raises PolyKVError."""
        answer = self._send(call, stream=True)
        try:
            events = Events(call, answer)
            for chunk in answer.iter_bytes():
                yield from events.feed(chunk)
            events.close()
        except httpx.HTTPError as error:
            raise self._wire.failure(error) from error
        finally:
            answer.close()

    def _send(self, call: Call[Any], *, stream: bool = False) -> httpx.Response:
        for attempt in itertools.count():
            outcome: httpx.Response | httpx.HTTPError
            try:
                outcome = self._http.send(self._http.build_request(**self._wire.request(call)), stream=stream)
                if stream and not outcome.is_success:
                    outcome.read()
            except httpx.HTTPError as error:
                outcome = error
            pause_s = self._wire.pause_s(call, outcome, attempt)
            if pause_s is None and isinstance(outcome, httpx.Response):
                return outcome
            time.sleep(pause_s or 0.0)
        raise AssertionError("it is counted without end")


class AsyncPolyKVClient:
    """The same for asyncio: ``async with AsyncPolyKVClient() as polykv: await polykv.create_pool(messages=…)``

    One object may serve several event loops, one after the other or in several threads: each has its own connections,
    and ``aclose`` (the end of ``async with``) closes those of the running one. It may be used again after that.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        self._wire = Wire(base_url, api_key=api_key, admin_key=admin_key, timeout=timeout, max_retries=max_retries)
        self._transport = transport
        self._https: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
        self._https = weakref.WeakKeyDictionary()

    @property
    def base_url(self) -> str:
        return self._wire.base_url

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        http = self._https.pop(asyncio.get_running_loop(), None)
        if http is not None:
            await http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    create_pool = _awaits(calls.create_pool)
    fork_pool = _awaits(calls.fork_pool)
    pools = _awaits(calls.pools)
    pool = _awaits(calls.pool)
    subtree = _awaits(calls.subtree)
    pin = _awaits(calls.pin)
    unpin = _awaits(calls.unpin)
    evict = _awaits(calls.evict)
    flush = _awaits(calls.flush)
    release = _awaits(calls.release)
    set_admission = _awaits(calls.set_admission)
    admission = _awaits(calls.admission)
    drop_admission = _awaits(calls.drop_admission)
    capacity = _awaits(calls.capacity)
    tps = _awaits(calls.tps)
    stream_tps = _streams_async(calls.stream_tps)
    sessions = _awaits(calls.sessions)
    session = _awaits(calls.session)
    drop_session = _awaits(calls.drop_session)
    match = _awaits(calls.match)
    requests = _awaits(calls.requests)
    health = _awaits(calls.health)
    tokenize = _awaits(calls.tokenize)
    render = _awaits_steps(calls.render)
    compact_by_refork = _awaits(calls.compact_by_refork)
    chat = _awaits(generating.chat)
    stream_chat = _streams_async(generating.stream_chat)
    complete = _awaits(generating.complete)
    stream_complete = _streams_async(generating.stream_complete)

    async def call(self, call: Call[T]) -> T:
        """Do one call. Raises PolyKVError."""
        return self._wire.result(call, await self._send(call))

    async def steps(self, steps: Steps[T]) -> T:
        """Do what takes several. Raises PolyKVError."""
        try:
            call = next(steps)
            while True:
                try:
                    result = await self.call(call)
                except PolyKVError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(result)
        except StopIteration as done:
            whole: T = done.value
            return whole

    async def stream(self, call: StreamCall[T]) -> AsyncGenerator[T, None]:
        """The pieces of one; sent with the first ``anext``, ended by ``aclose()``. Raises PolyKVError."""
        answer = await self._send(call, stream=True)
        try:
            events = Events(call, answer)
            async for chunk in answer.aiter_bytes():
                for piece in events.feed(chunk):
                    yield piece
            events.close()
        except httpx.HTTPError as error:
            raise self._wire.failure(error) from error
        finally:
            await answer.aclose()

    async def _send(self, call: Call[Any], *, stream: bool = False) -> httpx.Response:
        http = self._http()
        for attempt in itertools.count():
            outcome: httpx.Response | httpx.HTTPError
            try:
                outcome = await http.send(http.build_request(**self._wire.request(call)), stream=stream)
                if stream and not outcome.is_success:
                    await outcome.aread()
            except httpx.HTTPError as error:
                outcome = error
            pause_s = self._wire.pause_s(call, outcome, attempt)
            if pause_s is None and isinstance(outcome, httpx.Response):
                return outcome
            await asyncio.sleep(pause_s or 0.0)
        raise AssertionError("it is counted without end")

    def _http(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        http = self._https.get(loop)
        if http is None:
            http = self._https[loop] = httpx.AsyncClient(transport=self._transport, **self._wire.options())
        return http
