"""What the proxy costs: added latency of small requests, and tokens per second of many streams, against a fake engine.

    python -m benchmarks.relay_overhead [--rounds 1500] [--streams 32] [--repeat 3] [--json] [--assert]

Four processes: a fake engine that answers a fixed reply (streams: one event per 10 ms), a bare aiohttp relay of a few
lines, the proxy, and this client. Direct, bare and proxied requests are interleaved, so that all see the same machine.
With --assert, exit 1 when a small request that attaches to nothing costs more than 1.5 times (median) what the bare
relay adds, or 32 streams get less than 95 % of the direct path's tokens per second (median of the repetitions).
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

CHAT = "/v1/chat/completions"
PATIENT = aiohttp.ClientTimeout(total=None)
EVENT = b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" word"}}],"created":1,"id":"x"}\n\n'
NOT_RELAYED = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "content-length"})
N_EVENTS, EVENT_S = 300, 0.01
MAX_ADDED_RATIO, MIN_STREAM_RATIO = 1.5, 0.95
TIMINGS = {"cache_n": 1, "prompt_n": 9, "predicted_n": 3, "predicted_per_second": 50.0}
REPLY = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": {}, "timings": TIMINGS}).encode()


def engine_app(n_slots: str, reply: bytes = REPLY) -> web.Application:
    state = {
        "epoch": "bench",
        "n_slots": int(n_slots),
        "max_pools": 16,
        "n_ctx_slot": 4096,
        "cells": {"used": 0, "total": 4096, "free": 4096},
        "slots": [{"id": i, "state": "idle"} for i in range(int(n_slots))],
    }

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if b'"stream":true' not in body:
            return web.Response(body=reply, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        began = asyncio.get_running_loop().time()
        for i in range(N_EVENTS):
            await asyncio.sleep(max(0.0, began + i * EVENT_S - asyncio.get_running_loop().time()))
            await response.write(EVENT)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def stats(_request: web.Request) -> web.Response:
        return web.json_response(state)

    async def pools(_request: web.Request) -> web.Response:
        return web.json_response({"epoch": "bench", "pools": []})

    async def cells(_request: web.Request) -> web.Response:
        slots = [{"id": i, "runs": []} for i in range(int(n_slots))]
        return web.json_response({"epoch": "bench", "pools": [], "slots": slots})

    app = web.Application()
    app.router.add_post(CHAT, chat)
    app.router.add_post("/polykv/engine/pools", cells)
    app.router.add_get("/polykv/engine/stats", stats)
    app.router.add_get("/polykv/engine/pools", pools)
    return app


def bare_app(upstream: str) -> web.Application:
    """What anybody would write: a session, and chunks passed on."""

    async def client(app: web.Application) -> Any:
        app[SESSION] = aiohttp.ClientSession(auto_decompress=False, timeout=PATIENT)
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


SESSION = web.AppKey("session", aiohttp.ClientSession)


Serving = AbstractAsyncContextManager[str]


@contextlib.asynccontextmanager
async def plain(make: Callable[[str], web.Application], arg: str) -> AsyncIterator[str]:
    runner = web.AppRunner(make(arg), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def engine(n_slots: str) -> Serving:
    return plain(engine_app, n_slots)


def bare(upstream: str) -> Serving:
    return plain(bare_app, upstream)


@contextlib.asynccontextmanager
async def proxy(upstream: str) -> AsyncIterator[str]:
    from polykv_proxy.app import calm_collector, serving
    from polykv_proxy.config import load_settings

    calm_collector()  # as `polykvctl serve` does
    async with serving(load_settings(upstream_url=upstream, state=":memory:", port=0)) as (url, _app):
        yield url


def serve(make: Callable[[str], Serving], arg: str, pipe: Connection) -> None:
    async def main() -> None:
        async with make(arg) as url:
            pipe.send(url)
            await asyncio.Event().wait()

    uvloop.run(main())


def start(make: Callable[[str], Serving], arg: str) -> tuple[multiprocessing.Process, str]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(make, arg, there), daemon=True)
    process.start()
    if not here.poll(30):
        raise TimeoutError(f"{make.__name__} did not start")
    return process, here.recv()


@contextlib.contextmanager
def lines(n_slots: str) -> Iterator[dict[str, str]]:
    """The three ways to an engine with so many slots."""
    processes = []
    try:
        process, engine_url = start(engine, n_slots)
        processes.append(process)
        urls = {"direct": engine_url}
        for name, make in (("bare", bare), ("proxy", proxy)):
            process, urls[name] = start(make, engine_url)
            processes.append(process)
        uvloop.run(require_managed(urls["proxy"]))
        yield urls
    finally:
        for process in reversed(processes):
            process.terminate()
            process.join()


async def require_managed(url: str) -> None:
    """A proxy that does not manage its engine relays unread, which is cheaper than what is to be measured.

    Raises:  RuntimeError
    """
    body = {"messages": [{"role": "user", "content": "hello"}]}
    async with aiohttp.ClientSession(timeout=PATIENT) as client:
        await (await client.post(url + CHAT, json=body)).read()
        sessions = (await (await client.get(url + "/polykv/sessions")).json())["sessions"]
    if not sessions:
        raise RuntimeError("the proxy does not manage this engine: its hooks lack something that is asked for")


async def measure_small(urls: dict[str, str], rounds: int) -> dict[str, list[float]]:
    body = json.dumps({"messages": [{"role": "user", "content": "hello " * 40}], "max_tokens": 3}).encode()
    took: dict[str, list[float]] = {name: [] for name in urls}
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}, timeout=PATIENT) as client:
        for i in range(rounds + 20):
            for name, url in urls.items():
                began = time.perf_counter()
                async with client.post(url + CHAT, data=body) as reply:
                    await reply.read()
                if i >= 20:
                    took[name].append((time.perf_counter() - began) * 1e3)
    return took


async def measure_streams(url: str, n_streams: int) -> float:
    """Tokens per second over all streams."""
    body = b'{"stream":true,"messages":[]}'

    async def one(client: aiohttp.ClientSession) -> int:
        async with client.post(url + CHAT, data=body) as reply:
            return (await reply.read()).count(b'"content"')

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=PATIENT) as client:
        began = time.perf_counter()
        n = sum(await asyncio.gather(*(one(client) for _ in range(n_streams))))
        return n / (time.perf_counter() - began)


def measure(rounds: int, n_streams: int) -> dict[str, Any]:
    with lines("4") as urls:  # as many slots as `polykvctl up` starts
        took = uvloop.run(measure_small(urls, rounds))
    with lines(str(n_streams)) as urls:
        streams = {name: uvloop.run(measure_streams(url, n_streams)) for name, url in urls.items()}
    median = {name: statistics.median(times) for name, times in took.items()}
    added = {name: median[name] - median["direct"] for name in ("bare", "proxy")}
    return {
        "median_ms": {k: round(v, 3) for k, v in median.items()},
        "added_ms": {k: round(v, 3) for k, v in added.items()},
        "added_ratio": round(added["proxy"] / added["bare"], 2),
        "tokens_per_s": {k: round(v, 1) for k, v in streams.items()},
        "stream_ratio": round(streams["proxy"] / streams["direct"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--assert", action="store_true", dest="check")
    asked = parser.parse_args()
    runs = [measure(asked.rounds, asked.streams) for _ in range(asked.repeat)]
    added = statistics.median(run["added_ratio"] for run in runs)
    streams = statistics.median(run["stream_ratio"] for run in runs)
    if asked.json:
        print(json.dumps({"added_ratio": added, "stream_ratio": streams, "runs": runs}))
    else:
        for run in runs:
            print("  ".join(f"{key} {value}" for key, value in run.items()))
        print(f"a small request: {added:.2f} x what a bare relay adds (at most {MAX_ADDED_RATIO})")
        print(f"{asked.streams} streams: {streams:.3f} of the direct tokens/s (at least {MIN_STREAM_RATIO})")
    return int(asked.check and (added > MAX_ADDED_RATIO or streams < MIN_STREAM_RATIO))


if __name__ == "__main__":
    sys.exit(main())
