"""SIGTERM with live streams and a queue: what runs ends well, who waits is told at once; a second one ends it now."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from polykv_proxy import app
from polykv_proxy.config import load_settings
from tests.fake_engine import FakeEngine, Hold
from tests.relay.dialect_cases import PATHS, body_of
from tests.relay.raw import until
from tests.relay.test_shutdown import serving_process

CHAT = "/v1/chat/completions"
N_SLOTS, N_QUEUED = 4, 6


class House:
    """Four streams that are stopped in their middle, and six requests in line behind them."""

    def __init__(self, engine: FakeEngine, client: httpx.AsyncClient):
        self.engine, self.client, self.hold = engine, client, Hold()

    async def fill(self) -> None:
        self.engine.on(CHAT, "chunk:2", self.hold, times=N_SLOTS)
        self.streams = [self.ask(CHAT, f"stream {i}", stream=True) for i in range(N_SLOTS)]
        await until(lambda: self.hold.n == N_SLOTS, 20)
        self.queued = [self.ask(PATHS[i % len(PATHS)], f"queued {i}") for i in range(N_QUEUED)]
        for _ in range(1000):
            shown = (await self.client.get("/polykv/sessions")).json()["sessions"]
            if sum(session["state"] == "waiting" for session in shown) == N_QUEUED:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(shown)

    def ask(self, path: str, text: str, *, stream: bool = False) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.client.post(path, json=body_of(path, text, stream=stream, session_id=text)))

    async def is_draining(self) -> None:
        """It was told; nothing but the signal is waited for."""
        while (answer := await self.client.get("/polykv/health")).status_code == 200:
            pass
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")

    async def refuses(self, answers: list[httpx.Response]) -> None:
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            assert int(answer.headers["retry-after"]) >= 1


async def test_what_runs_ends_well_and_who_waits_is_told(engine: FakeEngine) -> None:
    async with serving_process(engine) as (process, client):
        house = House(engine, client)
        await house.fill()
        process.send_signal(signal.SIGTERM)
        await house.is_draining()
        await house.refuses(await asyncio.wait_for(asyncio.gather(*house.queued), 10))
        await house.refuses([await client.post(path, json=body_of(path)) for path in PATHS])
        assert (await client.post("/polykv/pools", json={"tokens": [1]})).status_code == 503
        assert not any(stream.done() for stream in house.streams)
        house.hold.release()
        for answer in await asyncio.gather(*house.streams):
            assert answer.content.endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert len(engine.requests(CHAT)) == N_SLOTS, "nobody in line reached the engine"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_now(engine: FakeEngine, number: signal.Signals) -> None:
    async with serving_process(engine) as (process, client):
        house = House(engine, client)
        await house.fill()
        process.send_signal(signal.SIGTERM)
        await house.is_draining()
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), 10) == 0
        for broken in await asyncio.gather(*house.streams, return_exceptions=True):
            assert isinstance(broken, httpx.RemoteProtocolError), "never like a whole answer"
        await until(lambda: all(r.left for r in engine.requests(CHAT)))


@asynccontextmanager
async def served(engine: FakeEngine) -> AsyncIterator[tuple[httpx.AsyncClient, "asyncio.Task[None]"]]:
    """In this process, so that its patience can be shortened."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    settings = load_settings(upstream_url=engine.url, state=":memory:", port=0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    serving = asyncio.create_task(app.serve(settings, ready=url.set_result))
    try:
        async with httpx.AsyncClient(base_url=await url, timeout=20, trust_env=False) as client:
            yield client, serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for number, handler in before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)


async def test_nobody_is_waited_for_longer_than_a_minute(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.DRAIN_S == 60
    monkeypatch.setattr(app, "DRAIN_S", 0.3)
    async with served(engine) as (client, serving):
        house = House(engine, client)
        await house.fill()
        os.kill(os.getpid(), signal.SIGTERM)
        await house.refuses(await asyncio.wait_for(asyncio.gather(*house.queued), 10))
        await asyncio.wait_for(serving, 10)
        for broken in await asyncio.gather(*house.streams, return_exceptions=True):
            assert isinstance(broken, httpx.RemoteProtocolError)
