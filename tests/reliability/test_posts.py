"""A POST is never repeated, except once when connecting itself failed: what the engine got is counted."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from polykv_proxy.errors import ConnectFailed
from polykv_proxy.relay.pump import _READ_AT_ONCE
from polykv_proxy.upstream import EngineClient
from polykv_proxy.upstream.short import MAX_BYTES
from tests.fake_engine import FakeEngine, drop
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import HANG_UP, OK, RawEngine, exchange, post

CHAT, COMPLETION, OTHER = "/v1/chat/completions", "/completion", "/tokenize"
JSON = "Content-Type: application/json\r\n"


def chat(**fields: Any) -> bytes:
    return post(CHAT, orjson.dumps({"messages": [{"role": "user", "content": "x"}], **fields}), JSON)


def chunked(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n{JSON}\r\n".encode()
    return head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


KINDS: dict[str, bytes] = {
    "short": chat(),
    "short, of a session": chat(session_id="s"),
    "streamed": chat(stream=True),
    "streamed, of a session": chat(stream=True, session_id="s"),
    "long": chat(user="x" * 2 * MAX_BYTES),
    "without a length": chunked(CHAT, b'{"messages":[]}'),
    "another route": post(OTHER, b'{"content":"x"}', JSON),
    "another route, without a length": chunked(OTHER, b'{"content":"x"}'),
    "another route, relayed while it comes": post(OTHER, b'{"content":"%s"}' % (b"x" * 2 * _READ_AT_ONCE), JSON),
}
WHOLE = b'Content-Type: application/json\r\nContent-Length: 30\r\n\r\n{"choices":[],"content":"none"'
ACCIDENTS: dict[str, list[Any]] = {
    "reset before a byte": [HANG_UP],
    "closed before a byte, after a while": [0.05, HANG_UP],
    "reset after one byte": [b"H", HANG_UP],
    "reset within the head": [OK + b"Content-Ty", HANG_UP],
    "reset after the head": [OK + b"Content-Type: application/json\r\nContent-Length: 30\r\n\r\n", HANG_UP],
    "reset within the body": [OK + WHOLE[:-9], HANG_UP],
    "not HTTP": [b"nonsense\r\n\r\n", HANG_UP],
    "503": [b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"],
    "429": [b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"],
}


@pytest.mark.parametrize("accident", ACCIDENTS)
@pytest.mark.parametrize("kind", KINDS)
async def test_it_reaches_the_engine_once(make_proxy: ProxyMaker, kind: str, accident: str) -> None:
    async with RawEngine(ACCIDENTS[accident]) as engine, make_proxy(engine.url) as proxy:
        with_body = exchange(proxy.url, KINDS[kind])
        if accident in ("reset after the head", "reset within the body"):  # off the path the reply had begun by then
            await asyncio.gather(with_body, return_exceptions=True)
        else:
            head, _ = await with_body
            assert head.split(b" ")[1] in (b"429", b"502", b"503")
        assert len(engine.heads) == 1


@pytest.fixture
def on_refused(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Called, one after the other, whenever a connection to the engine for a request was refused."""
    steps: list[Callable[[], Any]] = []
    real = EngineClient._request

    async def request(self: EngineClient, method: str, path_qs: str, *args: Any, **kw: Any) -> Any:
        try:
            return await real(self, method, path_qs, *args, **kw)
        except ConnectFailed:
            if method == "POST" and steps and not path_qs.startswith("/polykv"):
                await steps.pop(0)()
            raise

    monkeypatch.setattr(EngineClient, "_request", request)
    return steps


async def nothing() -> None:
    return


@asynccontextmanager
async def gone(make_proxy: ProxyMaker) -> AsyncIterator[tuple[FakeEngine, Proxy]]:
    """An engine that the proxy knows, and that is not there any more."""
    async with FakeEngine() as engine, make_proxy(engine.url) as proxy:
        await proxy.chat()
        await engine.kill()
        engine.received.clear()
        yield engine, proxy


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETION, CHAT, OTHER])
async def test_after_a_refused_connection_it_is_sent_once(
    make_proxy: ProxyMaker, on_refused: list[Any], path: str, stream: bool
) -> None:
    async with gone(make_proxy) as (engine, proxy):
        on_refused.append(engine.start)
        body = {"prompt": "x", "content": "x", "messages": [{"role": "user", "content": "x"}], "stream": stream}
        answer = await proxy.client.post(path, json=body)
        assert (answer.status_code, on_refused) == (200, [])
        assert len(engine.requests(path)) == 1


@pytest.mark.parametrize("path", [COMPLETION, CHAT, OTHER])
async def test_refused_twice_it_is_not_tried_again(make_proxy: ProxyMaker, on_refused: list[Any], path: str) -> None:
    async with gone(make_proxy) as (engine, proxy):
        on_refused += [nothing, engine.start, nothing]
        body = {"prompt": "x", "content": "x", "messages": [{"role": "user", "content": "x"}]}
        answer = await proxy.client.post(path, json=body)
        assert (answer.status_code, on_refused) == (503, [nothing])
        assert engine.requests(path) == []


async def test_refused_once_and_reset_then_it_is_not_tried_again(make_proxy: ProxyMaker, on_refused: list[Any]) -> None:
    async with gone(make_proxy) as (engine, proxy):
        on_refused.append(engine.start)
        engine.on(COMPLETION, "request", drop(), times=None)
        assert (await proxy.client.post(COMPLETION, json={"prompt": "x"})).status_code == 503
        assert len(engine.requests(COMPLETION)) == 1


@pytest.mark.parametrize("op", ["materialize", "snapshot"])
async def test_orders_of_the_control_plane_are_given_once(engine: FakeEngine, proxy: Proxy, op: str) -> None:
    await proxy.client.post(COMPLETION, json={"prompt": "hello", "session_id": "s"})
    engine.on(op, "request", drop(), times=None)
    source = {"from_session": "s"} if op == "snapshot" else {"tokens": [1, 2, 3]}
    answer = await proxy.client.post("/polykv/pools", json=source)
    assert answer.status_code == 503
    orders = [r for r in engine.requests("/polykv/engine/pools") if r.method == "POST" and r.json()["op"] == op]
    assert len(orders) == 1
