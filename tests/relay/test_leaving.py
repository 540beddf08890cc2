"""A client that leaves, at any point, closes upstream and gives back its place and its slot within a second.

Nobody else notices.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from polykv_proxy.ids import SlotId
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import body_of
from tests.relay.raw import HANG_UP, OK, RawEngine, connected, get, post, until
from tests.relay.test_attach import prefix_tokens

CHAT = "/v1/chat/completions"
RENDER, POOLS = "/polykv/engine/render", "/polykv/engine/pools"


@asynccontextmanager
async def asking(proxy: Proxy, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A request under way; leaving the block is leaving the line."""
    async with connected(proxy.url) as (reader, writer):
        writer.write(post(CHAT, orjson.dumps(body_of(CHAT, **fields)), "Content-Type: application/json\r\n"))
        yield reader


async def all_at_rest(proxy: Proxy, within_s: float = 1.0) -> None:
    began = time.monotonic()
    while any(proxy.at_rest().values()) or proxy.control.slots.unsure:
        assert time.monotonic() - began < within_s, (proxy.at_rest(), proxy.control.slots)
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["request", "prefill", "reply"])
async def test_before_the_head(engine: FakeEngine, proxy: Proxy, phase: str, stream: bool) -> None:
    hold = Hold()
    engine.on(CHAT, phase, hold)
    async with asking(proxy, stream=stream):
        await hold.reached()
        assert proxy.at_rest()["held"] == 1
    await all_at_rest(proxy)
    assert engine.requests(CHAT)[0].left
    assert all(slot.state == "idle" for slot in engine.slots)


async def test_in_the_middle_of_a_stream(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "chunk:3", hold)
    async with asking(proxy, stream=True) as reader:
        await hold.reached()
        assert (await reader.readline()) == OK
    await all_at_rest(proxy)
    assert engine.requests(CHAT)[0].left


async def test_while_waiting_for_a_slot(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold, times=4)
    running = [asyncio.create_task(proxy.chat(str(i))) for i in range(4)]
    await until(lambda: hold.n == 4)
    async with asking(proxy):
        await until(lambda: proxy.relay.desk.n_waiting == 1)
    last = asyncio.create_task(proxy.chat("last"))
    await until(lambda: proxy.at_rest()["turns"] == 5 and proxy.relay.desk.n_waiting == 1)
    hold.release()
    assert [r.status_code for r in await asyncio.gather(*running, last)] == [200] * 5
    assert len(engine.requests(CHAT)) == 5
    await all_at_rest(proxy)


@pytest.mark.parametrize("place", [RENDER, POOLS])
async def test_while_its_pool_is_looked_for_or_brought_back(engine: FakeEngine, proxy: Proxy, place: str) -> None:
    pool = await proxy.pool(tokens=await prefix_tokens(engine, CHAT))
    if place == POOLS:
        await engine.restart()
        await proxy.control.refresh()
    hold = Hold()
    engine.on(place, "request", hold)
    async with asking(proxy, pool_id=pool["pool_id"]):
        await hold.reached()
    await all_at_rest(proxy)
    hold.release()
    assert engine.requests(CHAT) == []


async def test_while_uploading(proxy: Proxy) -> None:
    async with connected(proxy.url) as (_, writer):
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{".encode())
        await until(lambda: proxy.relay.n_running == 1)
    await all_at_rest(proxy)


async def test_from_a_plain_relay(make_proxy: ProxyMaker) -> None:
    for script in ([60.0], [OK + b"Content-Length: 9\r\n\r\nabc", 60.0]):
        async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
            async with connected(proxy.url) as (_, writer):
                writer.write(get("/v1/models"))
                await until(lambda: engine.heads)
                await asyncio.sleep(0.05)
            await all_at_rest(proxy)


async def test_a_slot_is_not_handed_on_while_the_engine_may_still_use_it(engine: FakeEngine, proxy: Proxy) -> None:
    """llama-server notices a closed connection a moment later; pinned there, the next one would block its queue."""
    left_it, noticed, release = asyncio.Event(), asyncio.Event(), engine._release

    async def late(slot: Any) -> None:
        left_it.set()
        await noticed.wait()
        await release(slot)

    hold = Hold()
    engine.on(CHAT, "chunk:1", hold)
    async with asking(proxy, stream=True, session_id="a"):
        await hold.reached()
        engine._release = late  # type: ignore[method-assign]
    await asyncio.wait_for(left_it.wait(), 5)  # the engine is told later than the slot is marked here
    assert proxy.control.slots.unsure
    engine._release = release  # type: ignore[method-assign]
    (left,) = [slot.id for slot in engine.slots if slot.state != "idle"]
    assert proxy.at_rest()["held"] == 0

    answers = await asyncio.gather(*(proxy.chat(str(i), session_id="a") for i in range(8)))
    assert [a.status_code for a in answers] == [200] * 8
    assert {r.json()["id_slot"] for r in engine.requests(CHAT)[1:]} == {0, 1, 2, 3} - {left}
    noticed.set()
    await all_at_rest(proxy, 3)
    assert (await proxy.chat("again", session_id="a")).status_code == 200


async def test_a_storm_of_leavers_disturbs_nobody(engine: FakeEngine, proxy: Proxy) -> None:
    engine.token_s = 0.002
    rng = random.Random(7)
    pool = await proxy.pool(tokens=await prefix_tokens(engine, CHAT))

    async def leaver(i: int) -> None:
        await asyncio.sleep(rng.random() * 0.5)
        fields: dict[str, Any] = {"stream": rng.random() < 0.5, "max_tokens": 30, "session_id": f"s{i % 9}"}
        if rng.random() < 0.5:
            fields["pool_id"] = pool["pool_id"]
        async with asking(proxy, **fields) as reader:
            try:
                await asyncio.wait_for(reader.read(100), rng.random() * 0.3)
            except TimeoutError:
                return

    async def stayer(i: int) -> None:
        answer = await proxy.client.post(CHAT, json=body_of(CHAT, f"stay {i}", stream=True, max_tokens=10))
        assert answer.content.endswith(b"data: [DONE]\n\n")

    await asyncio.gather(*(leaver(i) for i in range(200)), *(stayer(i) for i in range(12)))
    await all_at_rest(proxy, 3)
    assert all(slot.state == "idle" for slot in engine.slots)


async def test_a_hundred_clients_on_four_slots(engine: FakeEngine, proxy: Proxy) -> None:
    engine.token_s = 0.001
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, sum(s.state != "idle" for s in engine.slots) + engine.n_deferred)
            await asyncio.sleep(0.001)

    watcher = asyncio.create_task(watch())
    answers = await asyncio.gather(*(proxy.chat(str(i), stream=i % 2 == 0) for i in range(100)))
    watcher.cancel()
    assert [a.status_code for a in answers] == [200] * 100
    assert most <= 4
    await all_at_rest(proxy)


@pytest.mark.parametrize("size", [50_000_000])
async def test_a_slow_reader_slows_the_engine_and_not_memory(make_proxy: ProxyMaker, size: int) -> None:
    piece = b"x" * 100_000
    script: list[bytes | float] = [
        OK + b"Content-Length: %d\r\n\r\n" % size,
        *([piece] * (size // len(piece))),
        HANG_UP,
    ]
    sent = 0

    class Counting(list[bytes | float]):
        def __iter__(self) -> Any:
            nonlocal sent
            for item in super().__iter__():
                sent += len(item) if isinstance(item, bytes) else 0
                yield item

    async with RawEngine(Counting(script)) as engine, make_proxy(engine.url) as proxy:
        async with connected(proxy.url) as (reader, writer):
            writer.write(get("/big"))
            await reader.readuntil(b"\r\n\r\n")
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(0.5)
            assert sent < size / 2
            assert proxy.relay.n_running == 1
        await all_at_rest(proxy)


async def test_the_slot_of_a_session_that_was_deleted_while_it_waited_is_nobodys(make_proxy: ProxyMaker) -> None:
    hold = Hold()
    async with FakeEngine(n_slots=1) as engine, make_proxy(engine.url) as proxy:
        engine.on(CHAT, "prefill", hold)
        first = asyncio.create_task(proxy.chat("one", session_id="a"))
        await hold.reached()
        second = asyncio.create_task(proxy.chat("two", session_id="b"))
        await until(lambda: proxy.control.slots.n_waiting == 1)
        assert (await proxy.client.delete("/polykv/sessions/b")).status_code == 200
        hold.release()
        assert [answer.status_code for answer in await asyncio.gather(first, second)] == [200, 200]
        await all_at_rest(proxy)
        assert proxy.control.slots.owner_of(SlotId(0)) is None
