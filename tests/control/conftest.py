"""A control plane in front of a fake engine, and a client for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from polykv_proxy.config import load_settings
from polykv_proxy.control import Control
from polykv_proxy.routes import add_routes
from tests.fake_engine import FakeEngine
from tests.serving import Runner


class Plane:
    """``await plane.call("POST", "/polykv/pools", {…})`` → (status, body). ``headers`` are those of the last answer."""

    def __init__(self, control: Control, engine: FakeEngine, url: str, session: aiohttp.ClientSession):
        self.control, self.engine, self.url, self.session = control, engine, url, session
        self.headers: Any = {}

    async def call(self, method: str, path: str, body: Any = None, **kw: Any) -> tuple[int, Any]:
        if isinstance(body, bytes):
            kw["data"] = body
        elif body is not None:
            kw["json"] = body
        async with self.session.request(method, self.url + path, **kw) as r:
            self.headers = r.headers
            return r.status, await r.json(content_type=None)

    async def create(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.call("POST", "/polykv/pools", body)
        assert status == 201, answer
        return answer

    async def fork(self, ref: Any, **body: Any) -> dict[str, Any]:
        status, answer = await self.call("POST", f"/polykv/pools/{ref}/fork", body)
        assert status == 201, answer
        return answer

    async def refused(self, status: int, code: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
        got, answer = await self.call(method, path, body)
        assert (got, answer["error"]["code"], answer["src"]) == (status, code, "polykv_proxy"), answer
        return answer["error"]

    def tokens(self, text: str) -> list[int]:
        return self.engine.template.tokenizer.encode(text)


async def eventually(is_so: Callable[[], Any], timeout_s: float = 5) -> None:
    """Wait until something is so."""
    for _ in range(int(timeout_s / 0.01)):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never was so")


@asynccontextmanager
async def planes(
    engine: FakeEngine, lease_ttl_s: float = 5.0, heartbeat_s: float = 0.05, **settings: Any
) -> AsyncIterator[Plane]:
    loaded = load_settings(upstream_url=engine.url, **{"state": ":memory:", **settings})
    control = Control(loaded, heartbeat_s=heartbeat_s, lease_ttl_s=lease_ttl_s)
    app = web.Application(client_max_size=control.settings.max_body_bytes)
    add_routes(app, control)
    runner = Runner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await control.start()
    await runner.setup()
    try:
        port = await runner.listen()
        async with aiohttp.ClientSession() as session:
            yield Plane(control, engine, f"http://127.0.0.1:{port}", session)
    finally:
        await runner.cleanup()
        await control.stop()


@pytest.fixture
async def plane(engine: FakeEngine) -> AsyncIterator[Plane]:
    async with planes(engine) as plane:
        yield plane
