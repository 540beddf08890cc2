"""SIGTERM to the real process: at once not ready, running turns finish, a second one ends it now."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.fake_engine import FakeEngine, Hold
from tests.relay.dialect_cases import body_of
from tests.relay.raw import until

CHAT = "/v1/chat/completions"


async def start(engine: FakeEngine) -> asyncio.subprocess.Process:
    args = ("-m", "polykv_proxy.cli", "serve", "--upstream", engine.url, "--port", "0", "--state", ":memory:", "--json")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("POLYKV_")},
    )


@asynccontextmanager
async def serving_process(engine: FakeEngine) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    process = await start(engine)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        async with httpx.AsyncClient(base_url=json.loads(line)["proxy"], timeout=20, trust_env=False) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_sigterm_lets_running_turns_finish(engine: FakeEngine) -> None:
    hold = Hold()
    engine.on(CHAT, "chunk:2", hold)
    async with serving_process(engine) as (process, client):
        assert (await client.get("/polykv/health")).status_code == 200
        running = asyncio.create_task(client.post(CHAT, json=body_of(CHAT, stream=True)))
        await hold.reached()
        process.send_signal(signal.SIGTERM)
        health = await client.get("/polykv/health")
        while health.status_code == 200:
            health = await client.get("/polykv/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        refused = await client.post(CHAT, json=body_of(CHAT))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert not running.done()
        hold.release()
        assert (await running).content.endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_second_sigterm_ends_it_now(engine: FakeEngine) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    async with serving_process(engine) as (process, client):
        running = asyncio.create_task(client.post(CHAT, json=body_of(CHAT)))
        await hold.reached()
        process.send_signal(signal.SIGTERM)
        while (await client.get("/polykv/health")).status_code == 200:
            pass
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], httpx.RemoteProtocolError)
        await until(lambda: engine.requests(CHAT)[0].left)


async def test_a_second_proxy_on_the_same_engine_says_so_in_one_line(engine: FakeEngine) -> None:
    async with serving_process(engine) as (_, client):
        second = await start(engine)
        _, said = await asyncio.wait_for(second.communicate(), 30)
        assert second.returncode == 1
        last = said.decode().splitlines()[-1]
        assert last.startswith("polykvctl: another proxy (")
        assert last.endswith(" use its URL, or end it (its name is host:process id:…)")
        assert "Traceback" not in said.decode()
        assert (await client.get("/polykv/health")).status_code == 200
