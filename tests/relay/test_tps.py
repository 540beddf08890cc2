"""``GET /polykv/tps``: the contract's object, once and as a stream, and what a stream costs."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import until
from tests.relay.test_shutdown import serving_process

STATS = "/polykv/engine/stats"
FIELDS = {"ts", "aggregate_tps", "mean_active_tps", "n_active", "n_warming", "sessions"}
OF_SESSION = {
    *("session_id", "pool_id", "tps_ewma", "n_decoded", "ttft_ms"),
    *("state", "ctx_used", "ctx_total", "ctx_headroom_tokens"),
    *("stalled", "stall_ms"),
}


async def poll(proxy: Proxy) -> dict[str, Any]:
    answer = await proxy.client.get("/polykv/tps")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    sample = answer.json()
    assert sample.keys() == FIELDS
    assert all(session.keys() == OF_SESSION for session in sample["sessions"])
    return sample


@asynccontextmanager
async def subscribed(proxy: Proxy, interval_ms: int = 100) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    query = {"stream": "1", "interval_ms": str(interval_ms)}
    async with proxy.client.stream("GET", "/polykv/tps", params=query) as answer:
        assert answer.status_code == 200
        yield samples(answer)


async def samples(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line:
            kind, _, data = line.partition(": ")
            assert kind == "data"
            yield json.loads(data)


def of(sample: dict[str, Any], session_id: str) -> dict[str, Any]:
    return next(session for session in sample["sessions"] if session["session_id"] == session_id)


def run(proxy: Proxy, name: str, **fields: Any) -> "asyncio.Task[httpx.Response]":
    body = {"prompt": list(range(100, 140)), "n_predict": 4000, "session_id": name, "stream": True, **fields}
    return asyncio.create_task(proxy.client.post("/completion", json=body))


def slot_of(engine: FakeEngine, proxy: Proxy, name: str) -> Any:
    session = proxy.control.sessions.get(name)  # type: ignore[arg-type]
    assert session is not None
    assert session.slot_id is not None
    return engine.slots[session.slot_id]


async def leave(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_nobody_there(proxy: Proxy) -> None:
    sample = await poll(proxy)
    assert (sample["mean_active_tps"], sample["n_active"], sample["n_warming"]) == (None, 0, 0)
    assert sample["sessions"] == []
    assert sample["ts"] > 1.7e9
    async with subscribed(proxy) as ticks:
        async for tick in ticks:
            if tick["aggregate_tps"] is not None:
                assert tick["aggregate_tps"] == 0.0, "that nobody decodes is known"
                break


async def test_who_decodes_who_warms_up_and_who_rests(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.client.post("/completion", json={"prompt": "hello", "n_predict": 3, "session_id": "rests"})
    engine.token_s = 0.01
    tasks = [run(proxy, name) for name in ("a", "b", "new")]
    await until(lambda: sum(slot.state == "generating" for slot in engine.slots) == 3)
    slot_of(engine, proxy, "a").tps_ewma = 30.0
    slot_of(engine, proxy, "b").tps_ewma = 10.0
    async with subscribed(proxy) as ticks:
        async for tick in ticks:
            if tick["n_active"] == 2 and all(of(tick, name)["n_decoded"] > 2 for name in ("a", "b", "new")):
                break
    assert (tick["mean_active_tps"], tick["n_warming"]) == (20.0, 1)
    assert [of(tick, name)["tps_ewma"] for name in ("a", "b", "new")] == [30.0, 10.0, None]
    assert {of(tick, name)["state"] for name in ("a", "b", "new")} == {"decoding"}
    assert of(tick, "rests")["state"] == "idle"
    a, total = of(tick, "a"), engine.n_ctx_slot
    assert a["ctx_used"] == 40 + a["n_decoded"]
    assert (a["ctx_total"], a["ctx_headroom_tokens"]) == (total, total - a["ctx_used"])
    assert a["ttft_ms"] > 0
    await leave(*tasks)


async def test_what_runs_is_counted_while_it_runs_and_once(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.client.post("/completion", json={"prompt": "hello", "n_predict": 5, "session_id": "a"})
    assert of(await poll(proxy), "a")["n_decoded"] == 5
    engine.token_s = 0.01
    task = run(proxy, "a", n_predict=40, stream=False)
    seen = []
    async with subscribed(proxy) as ticks:
        async for tick in ticks:
            seen.append(of(tick, "a")["n_decoded"])
            if task.done():
                break
    assert (await task).status_code == 200
    assert seen == sorted(seen)
    assert any(5 < n < 45 for n in seen), seen
    assert of(await poll(proxy), "a")["n_decoded"] == 45


async def test_the_aggregate_counts_also_what_nobody_sent_through_the_proxy(engine: FakeEngine, proxy: Proxy) -> None:
    engine.token_s = 0.01
    async with httpx.AsyncClient(base_url=engine.url, timeout=20, trust_env=False) as other:
        body = {"prompt": "hello", "n_predict": 4000, "stream": True}
        task = asyncio.create_task(other.post("/completion", json=body))
        async with subscribed(proxy) as ticks:
            async for tick in ticks:
                if tick["aggregate_tps"]:
                    break
        assert tick["sessions"] == []
        assert tick["aggregate_tps"] <= 100.0, "a token takes 10 ms"
        await leave(task)


async def test_a_prompt_is_no_decoding(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on("/completion", "prefill", hold)
    task = run(proxy, "a")
    await hold.reached()
    async with subscribed(proxy) as ticks:
        async for tick in ticks:
            if tick["aggregate_tps"] is not None and of(tick, "a")["ctx_used"] is not None:
                break
    assert (tick["aggregate_tps"], tick["n_active"], tick["n_warming"]) == (0.0, 0, 1)
    assert (of(tick, "a")["state"], of(tick, "a")["n_decoded"], of(tick, "a")["ctx_used"]) == ("prefilling", 0, 40)
    hold.release()
    await leave(task)


async def test_unknown_while_the_engine_is_away_and_after_another_start(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.client.post("/completion", json={"prompt": "hello", "n_predict": 5, "session_id": "rests"})
    rate = of(await poll(proxy), "rests")["tps_ewma"]
    assert rate
    async with subscribed(proxy) as ticks:
        async for tick in ticks:
            if tick["aggregate_tps"] is not None:
                break
        await engine.kill()
        async for tick in ticks:
            if tick["aggregate_tps"] is None:
                break
        assert (tick["mean_active_tps"], tick["n_active"], tick["n_warming"]) == (None, None, None)
        assert of(tick, "rests")["tps_ewma"] == rate
        await engine.start()
        async for tick in ticks:
            if tick["n_active"] is not None:
                break
        assert tick["aggregate_tps"] is None, "one look at the new start is no rate"
        async for tick in ticks:
            if tick["aggregate_tps"] is not None:
                break
        assert tick["aggregate_tps"] == 0.0


async def test_an_engine_that_sleeps_is_not_woken(engine: FakeEngine, proxy: Proxy) -> None:
    engine.sleep()
    await proxy.control.refresh()
    async with subscribed(proxy) as ticks:
        n = 0
        async for tick in ticks:
            assert (tick["aggregate_tps"], tick["n_active"]) == (None, None)
            n += 1
            if n == 4:
                break
    assert engine.sleeping


async def test_an_engine_without_hooks(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(hooks=False) as engine, make_proxy(engine.url) as proxy:
        fields = {"prompt": "hello", "n_predict": 5, "session_id": "a"}
        (await proxy.client.post("/completion", json=fields)).raise_for_status()
        sample = await poll(proxy)
        assert (sample["aggregate_tps"], sample["mean_active_tps"], sample["n_active"]) == (None, None, None)
        assert (of(sample, "a")["n_decoded"], of(sample, "a")["state"]) == (5, "idle")
        assert of(sample, "a")["tps_ewma"] > 0
        async with subscribed(proxy) as ticks:
            async for tick in ticks:
                assert tick.keys() == FIELDS
                break


async def test_the_stats_are_read_for_all_at_once_and_ten_times_a_second_at_most(
    engine: FakeEngine, proxy: Proxy
) -> None:
    async def listen(n: int) -> None:
        async with subscribed(proxy) as ticks:
            async for _ in ticks:
                n -= 1
                if not n:
                    return

    heartbeat = proxy.control.watch._task
    assert heartbeat is not None
    await leave(heartbeat)
    before, began = len(engine.requests(STATS)), asyncio.get_running_loop().time()
    await asyncio.gather(*(listen(12) for _ in range(30)))
    took_s = asyncio.get_running_loop().time() - began
    n_read = len(engine.requests(STATS)) - before
    assert 2 <= n_read <= 10 * took_s + 1
    await asyncio.sleep(0.3)
    assert len(engine.requests(STATS)) - before == n_read, "nobody listens any more"
    before = len(engine.requests(STATS))
    for _ in range(20):
        await poll(proxy)
    assert len(engine.requests(STATS)) == before, "who asks once gets what is known"


async def test_an_engine_that_does_not_answer_holds_up_no_tick(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on("stats", "request", hold, times=None)
    async with subscribed(proxy) as ticks:
        n = 0
        async for _ in ticks:
            n += 1
            if n == 5:
                break
    assert hold.n == 1, "and is not asked again meanwhile"
    hold.release()


async def test_who_does_not_read_blocks_nobody_and_is_let_go(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, client_stall_s=0.3) as proxy:
        await nobody_waits_for_who_does_not_read(proxy)


async def nobody_waits_for_who_does_not_read(proxy: Proxy) -> None:
    for i in range(2000):
        proxy.control.sessions.name(f"session-{i}", proxy.control.clock())  # type: ignore[arg-type]
    loop, address = asyncio.get_running_loop(), httpx.URL(proxy.url)
    with socket.socket() as idler:
        idler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idler.setblocking(False)
        await loop.sock_connect(idler, (address.host, address.port))
        head = b"GET /polykv/tps?stream=1&interval_ms=100 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        await loop.sock_sendall(idler, head)
        n = 0
        async with subscribed(proxy) as ticks:
            async for tick in ticks:
                assert len(tick["sessions"]) == 2000
                n += 1
                if n == 20:
                    break
        got, piece = b"", b"?"
        with suppress(ConnectionError):
            while piece and len(got) < 64 << 20:
                piece = await loop.sock_recv(idler, 1 << 20)
                got += piece
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")
    assert len(got) < 64 << 20, "it was hung up on"
    assert not got.endswith(b"0\r\n\r\n"), "and not told that this was all"


async def test_draining_ends_every_stream_at_a_whole_line_and_refuses_new_ones(proxy: Proxy) -> None:
    async with proxy.client.stream("GET", "/polykv/tps", headers={"Accept": "text/event-stream"}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-request-id"]
        text = ""
        async for piece in answer.aiter_text():
            text += piece
            proxy.relay.drain()
    assert text.endswith("}\n\n")
    refused = await proxy.client.get("/polykv/tps?stream=1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert (await proxy.client.get("/polykv/tps")).status_code == 200


async def test_sigterm_waits_for_no_stream(engine: FakeEngine) -> None:
    async with (
        serving_process(engine) as (process, client),
        client.stream("GET", "/polykv/tps?stream=1&interval_ms=60000") as answer,
    ):
        text = ""
        async for piece in answer.aiter_text():
            text += piece
            process.send_signal(signal.SIGTERM)
        assert text.endswith("}\n\n")
        assert await asyncio.wait_for(process.wait(), 10) == 0


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *((f"interval_ms={given}", "interval_ms") for given in ("99", "60001", "-500", "1e3", "", "x", "9" * 20)),
        ("stream=perhaps", "stream"),
    ],
)
async def test_what_is_wrong_in_the_query_is_named(proxy: Proxy, query: str, param: str) -> None:
    answer = await proxy.client.get(f"/polykv/tps?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_the_query_beats_the_accept_header(proxy: Proxy) -> None:
    headers = {"Accept": "text/event-stream"}
    answer = await proxy.client.get("/polykv/tps?stream=0&interval_ms=60000", headers=headers)
    assert answer.json().keys() == FIELDS
    assert (await proxy.client.head("/polykv/tps?stream=1")).headers["content-type"] == "text/event-stream"


async def test_it_is_the_control_planes(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, api_key="data", admin_key="admin") as proxy:
        refused = await proxy.client.get("/polykv/tps", headers={"Authorization": "Bearer data"})
        assert refused.status_code == 403
