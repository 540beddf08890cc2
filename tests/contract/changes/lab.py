"""A proxy with the settings of a row, in front of whatever engine the check wants."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import OK, RawEngine, exchange, get, post

CHAT, COMPLETION = "/v1/chat/completions", "/completion"
FINE = OK + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
BODY = b'{"messages":[]}'


class Lab:
    """``settings``: by field, as in the environment."""

    def __init__(self, make_proxy: ProxyMaker, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]):
        self._make_proxy, self.monkeypatch, self.settings = make_proxy, monkeypatch, settings
        # Of what a setting makes happen, for a busy machine; and of what does not happen by itself.
        self.patience_s = 10.0 if settings else 0.4

    @asynccontextmanager
    async def raw(self, script: Sequence[Any] = (FINE,)) -> AsyncIterator[tuple[RawEngine, Proxy]]:
        async with RawEngine(script) as engine, self._make_proxy(engine.url, **self.settings) as proxy:
            yield engine, proxy

    @asynccontextmanager
    async def fake(self, **engine_kw: Any) -> AsyncIterator[tuple[FakeEngine, Proxy]]:
        async with FakeEngine(**engine_kw) as engine, self._make_proxy(engine.url, **self.settings) as proxy:
            yield engine, proxy

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[Proxy]:
        async with RawEngine() as engine:
            url = engine.url
        async with self._make_proxy(url, **self.settings) as proxy:
            yield proxy

    async def sent(self, request: bytes) -> tuple[RawEngine, bytes, bytes]:
        """One request on an engine of its own: the engine afterwards, head and body of the reply."""
        async with self.raw() as (engine, proxy):
            head, body = await exchange(proxy.url, request)
        return engine, head, body


Check = Callable[[Lab], Awaitable[bool]]


def chat(headers: str = "", body: bytes = BODY) -> bytes:
    return post(CHAT, body, headers)


def models(headers: str = "") -> bytes:
    return get("/v1/models", headers)


def status_of(head: bytes) -> int:
    return int(head.split(b" ")[1])
