"""The proxy as it is served, on a free port, in front of whatever the test plays the engine with."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web

from polykv_proxy.app import CONTROL, RELAY, serving
from polykv_proxy.config import load_settings
from polykv_proxy.control import Control, CreatePool, ForkPool, Source
from polykv_proxy.relay.relay import Relay
from tests.fake_engine import FakeEngine
from tests.serving import everybody_was_accepted


class Proxy:
    def __init__(self, url: str, app: web.Application, client: httpx.AsyncClient):
        self.url, self.app, self.client = url, app, client

    @property
    def relay(self) -> Relay:
        return self.app[RELAY]

    @property
    def control(self) -> Control:
        return self.app[CONTROL]

    async def chat(self, text: str = "hello", path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", None)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
        return await self.client.post(path, json=body, headers=headers)

    async def pool(self, tokens: list[int], name: str | None = None) -> dict[str, Any]:
        return await self.control.create_pool(CreatePool(source=Source(tokens=tokens), name=name))

    async def fork(self, parent: int, tokens: list[int]) -> dict[str, Any]:
        return await self.control.fork_pool(parent, ForkPool(source=Source(tokens=tokens)))

    def at_rest(self) -> dict[str, int]:
        """What must be zero when nobody is there."""
        return {
            "running": self.relay.n_running,
            "floating": self.relay.n_floating,
            "waiting": self.relay.desk.n_waiting + self.control.slots.n_waiting,
            "held": self.control.slots.n_held,
            "turns": self.control.sessions.n_running,
        }


ProxyMaker = Callable[..., AbstractAsyncContextManager[Proxy]]


@pytest.fixture
def make_proxy(monkeypatch: pytest.MonkeyPatch) -> ProxyMaker:
    @asynccontextmanager
    async def make(upstream_url: str, **settings: Any) -> AsyncIterator[Proxy]:
        settings = {"state": ":memory:", "port": 0, **settings}
        async with serving(load_settings(upstream_url=upstream_url, **settings)) as (url, app):
            async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
                yield Proxy(url, app, client)
            await everybody_was_accepted()

    return make


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine, make_proxy: ProxyMaker) -> AsyncIterator[Proxy]:
    """Auto mode, in front of the patched fake engine."""
    async with make_proxy(engine.url) as proxy:
        yield proxy


@pytest_asyncio.fixture
async def explicit(engine: FakeEngine, make_proxy: ProxyMaker) -> AsyncIterator[Proxy]:
    async with make_proxy(engine.url, mode="explicit") as proxy:
        yield proxy
