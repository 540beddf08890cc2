"""What the proxy costs: added latency of small requests, and tokens per second of many streams, against a fake engine.

    python -m benchmarks.relay_overhead [--rounds 400] [--streams 32] [--json]

Four processes: a fake engine that answers a fixed reply (streams: one event per 10 ms), a bare aiohttp relay of a few
lines, the proxy, and this client. Direct, bare and proxied requests are interleaved, so that all see the same machine.
Exit 1 when a small request that attaches to nothing costs more than 1.5 times (median) what the bare relay adds, or 32
streams get less than 95 % of the direct path's tokens per second.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
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
TIMINGS = {"cache_n": 1, "prompt_n": 9, "predicted_n": 3, "predicted_per_second": 50.0}
REPLY = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": {}, "timings": TIMINGS}).encode()


def engine_app(n_slots: str) -> web.Application:
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
            return web.Response(body=REPLY, content_type="application/json")
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

    app = web.Application()
    app.router.add_post(CHAT, chat)
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


def proxy_app(upstream: str) -> web.Application:
    from polykv_proxy.app import make_app
    from polykv_proxy.config import load_settings

    return make_app(load_settings(upstream_url=upstream, state=":memory:"))


def serve(make: Callable[..., web.Application], args: tuple[str, ...], pipe: Connection) -> None:
    async def main() -> None:
        app = make(*args)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    uvloop.run(main())


def start(make: Callable[..., web.Application], *args: str) -> tuple[multiprocessing.Process, str]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(make, args, there), daemon=True)
    process.start()
    if not here.poll(30):
        raise TimeoutError(f"{make.__name__} did not start")
    return process, here.recv()


@contextlib.contextmanager
def lines(n_slots: str) -> Iterator[dict[str, str]]:
    """The three ways to an engine with so many slots."""
    processes = []
    try:
        engine, engine_url = start(engine_app, n_slots)
        processes.append(engine)
        bare, bare_url = start(bare_app, engine_url)
        processes.append(bare)
        proxy, proxy_url = start(proxy_app, engine_url)
        processes.append(proxy)
        yield {"direct": engine_url, "bare": bare_url, "proxy": proxy_url}
    finally:
        for process in reversed(processes):
            process.terminate()
            process.join()


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with lines("4") as urls:  # as many slots as `polykvctl up` starts
        took = uvloop.run(measure_small(urls, asked.rounds))
    with lines(str(asked.streams)) as urls:
        streams = {name: uvloop.run(measure_streams(url, asked.streams)) for name, url in urls.items()}
    median = {name: statistics.median(times) for name, times in took.items()}
    added = {name: median[name] - median["direct"] for name in ("bare", "proxy")}
    result = {
        "median_ms": {k: round(v, 3) for k, v in median.items()},
        "added_ms": {k: round(v, 3) for k, v in added.items()},
        "added_ratio": round(added["proxy"] / added["bare"], 2),
        "tokens_per_s": {k: round(v, 1) for k, v in streams.items()},
        "stream_ratio": round(streams["proxy"] / streams["direct"], 3),
    }
    if asked.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:14} {value}")
    return 0 if result["added_ratio"] <= 1.5 and result["stream_ratio"] >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
