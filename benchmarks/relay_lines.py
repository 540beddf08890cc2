"""The ways to an engine that are compared: straight, by a bare relay, by the proxy; each in a process of its own."""

import asyncio
import contextlib
import json
import logging
import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.idle_engine import CHAT, idle_engine
from benchmarks.raw_client import Asker, request

PATIENT = aiohttp.ClientTimeout(total=None)
NOT_RELAYED = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "content-length"})
SESSION = web.AppKey("session", aiohttp.ClientSession)

Serving = AbstractAsyncContextManager[str]


def bare_app(upstream: str) -> web.Application:
    """What anybody would write: a session, and chunks passed on."""

    async def client(app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        app[SESSION] = aiohttp.ClientSession(auto_decompress=False, timeout=PATIENT, connector=connector)
        yield
        await app[SESSION].close()

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in NOT_RELAYED}
        async with request.app[SESSION].request(
            request.method, upstream + request.path_qs, data=body, headers=headers
        ) as reply:
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in NOT_RELAYED - {"content-length"}}
            response = web.StreamResponse(status=reply.status, headers=kept)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application()
    app.cleanup_ctx.append(client)
    app.router.add_route("*", "/{tail:.*}", relay)
    return app


@contextlib.asynccontextmanager
async def bare(upstream: str) -> AsyncIterator[str]:
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # it says so when a client leaves a stream
    runner = web.AppRunner(bare_app(upstream), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@contextlib.asynccontextmanager
async def proxy(upstream: str) -> AsyncIterator[str]:
    from polykv_proxy.app import calm_collector, serving
    from polykv_proxy.config import load_settings

    calm_collector()  # as `polykvctl serve` does
    async with serving(load_settings(upstream_url=upstream, state=":memory:", port=0)) as (url, _app):
        yield url


def engine(of: tuple[int, float]) -> Serving:
    n_slots, reply_s = of
    return idle_engine(n_slots, reply_s=reply_s)


def serve(make: Callable[[Any], Serving], arg: Any, pipe: Connection) -> None:
    async def main() -> None:
        async with make(arg) as url:
            pipe.send(url)
            await asyncio.Event().wait()

    uvloop.run(main())


@dataclass
class Lines:
    """Addresses and processes by name; ``engine`` is the process behind ``direct``."""

    urls: dict[str, str] = field(default_factory=dict)
    processes: dict[str, multiprocessing.Process] = field(default_factory=dict)

    def start(self, name: str, make: Callable[[Any], Serving], arg: Any) -> str:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=serve, args=(make, arg, there), daemon=True)
        process.start()
        self.processes[name] = process
        if not here.poll(60):
            raise TimeoutError(f"{name} did not start")
        url: str = here.recv()
        return url


@contextlib.contextmanager
def lines(n_slots: int, reply_s: float = 0.0) -> Iterator[Lines]:
    """The three ways to an engine with so many slots, whose replies take so long."""
    way = Lines()
    try:
        way.urls["direct"] = upstream = way.start("engine", engine, (n_slots, reply_s))
        way.urls["bare"] = way.start("bare", bare, upstream)
        way.urls["proxy"] = way.start("proxy", proxy, upstream)
        uvloop.run(require_managed(way.urls["proxy"]))
        yield way
    finally:
        for process in reversed(way.processes.values()):
            process.terminate()
            process.join()


async def require_managed(url: str) -> None:
    """A proxy that does not manage its engine relays unread, which is cheaper than what is to be measured.

    Raises:  RuntimeError
    """
    asker = await Asker.to(url)
    await asker.ask(request(url, b'{"messages":[{"role":"user","content":"hello"}]}', CHAT))
    sessions = json.loads(await asker.ask(request(url, None, "/polykv/sessions")))["sessions"]
    asker.close()
    if not sessions:
        raise RuntimeError("the proxy does not manage this engine: its hooks lack something that is asked for")
