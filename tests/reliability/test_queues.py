"""A crowd: who waits is bounded in number, bytes and time, everybody is answered, and memory stays flat."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from polykv_proxy.relay import backlog
from polykv_proxy.relay.backlog import Place
from polykv_proxy.relay.connection import Connection
from polykv_proxy.relay.dialects import Call
from polykv_proxy.relay.turn import TurnRelay
from tests.engine.restarts import clean_env
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import connected, until
from tests.reliability.conftest import leave_nothing, many_files, post_json
from tests.store.make import read

CHAT = "/v1/chat/completions"
N_QUEUED, N_SLOTS = 2000, 4

Answer = tuple[int, dict[str, str], dict[str, Any]]


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine, make_proxy: ProxyMaker) -> AsyncIterator[Proxy]:
    """With a lease that outlasts a crowd: its clients are in this process, too, and may keep the heartbeat waiting.

    Without the lease requests would go out as they are, and wait in the engine's queue instead.
    """
    async with make_proxy(engine.url) as proxy:
        proxy.control.lease._ttl_s = 3600.0
        await proxy.control.lease.renew()
        yield proxy


async def ask(proxy: Proxy, number: int, text: str = "", path: str = CHAT) -> Answer:
    """(status, headers, body) of one request on a connection of its own."""
    body = {"messages": [{"role": "user", "content": f"{number} {text}"}], "max_tokens": 2}
    async with connected(proxy.url) as (reader, writer):
        writer.write(post_json(path, body | {"session_id": f"s{number % 50}"}))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, _, lines = head.partition("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines.split("\r\n") if line)
        body = orjson.loads(await reader.readexactly(int(headers["content-length"])))
        return int(status.split(" ")[1]), headers, body


async def crowd(proxy: Proxy, n: int, text: str = "") -> list[asyncio.Task[Answer]]:
    """So many requests, a hundred at a time, so that no connection is refused by the system."""
    tasks = []
    for first in range(0, n, 100):
        tasks += [asyncio.create_task(ask(proxy, number, text)) for number in range(first, min(n, first + 100))]
        await asyncio.sleep(0.01)
    return tasks


def statuses(answers: list[Answer]) -> dict[int, int]:
    return {status: sum(s == status for s, _, _ in answers) for status in {s for s, _, _ in answers}}


def assert_asked_to_come_back(answer: Answer, code: str) -> None:
    status, headers, body = answer
    assert (status, body["error"]["code"], body["src"]) == (429, code, "polykv_proxy")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert headers["x-polykv-reason"] == body["error"]["reason"]


async def test_of_2000_requests_as_many_wait_as_may_and_all_are_answered(engine: FakeEngine, proxy: Proxy) -> None:
    if not many_files(3 * N_QUEUED):
        pytest.skip(f"this system lets nobody open {3 * N_QUEUED} files (ulimit -Hn)")
    hold = Hold()
    engine.on(CHAT, "prefill", hold, times=N_SLOTS)
    tasks = await crowd(proxy, N_QUEUED)
    n_refused = N_QUEUED - N_SLOTS - backlog.MAX_WAITING
    await until(lambda: sum(task.done() for task in tasks) == n_refused, 120)
    assert (proxy.relay.backlog.n_waiting, proxy.relay.desk.n_waiting) == (backlog.MAX_WAITING, backlog.MAX_WAITING)
    for task in tasks:
        if task.done():
            assert_asked_to_come_back(task.result(), "queue_full")
    assert (await proxy.client.get("/polykv/health")).status_code == 200
    assert (await proxy.client.get("/v1/models")).status_code == 200, "what takes no slot waits for nobody"
    hold.release()
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 240)
    assert statuses(answers) == {200: N_QUEUED - n_refused, 429: n_refused}
    assert len(engine.requests(CHAT)) == N_QUEUED - n_refused
    await leave_nothing(proxy)


async def test_their_bodies_are_bounded_and_one_alone_always_fits(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MAX_BYTES", 500_000)
    hold, size = Hold(), 50_000
    engine.on(CHAT, "prefill", hold, times=N_SLOTS)
    running = await crowd(proxy, N_SLOTS)
    await until(lambda: hold.n == N_SLOTS, 30)
    n_fit = 500_000 // (size + 200)
    tasks = await crowd(proxy, 100, "x" * size)
    await until(lambda: sum(task.done() for task in tasks) == 100 - n_fit, 120)
    assert proxy.relay.desk.n_waiting == n_fit
    assert n_fit * size < proxy.relay.backlog.n_bytes <= 500_000
    for task in tasks:
        if task.done():
            assert_asked_to_come_back(task.result(), "queue_full")
    for task in tasks:
        task.cancel()
    hold.release()
    await asyncio.gather(*running)
    await leave_nothing(proxy)
    engine.n_ctx_slot = engine.n_cells = engine.cache.n_cells = 2 << 20
    await proxy.control.refresh()
    assert (await ask(proxy, 1, "x" * 900_000))[0] == 200


async def test_an_upload_counts_while_it_comes(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MAX_BYTES", 100_000)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n".encode()
    async with connected(proxy.url) as (_, first), connected(proxy.url) as (reader, second):
        first.write(head + b"x" * 80_000)
        await until(lambda: proxy.relay.backlog.n_bytes == 80_000)
        second.write(head + b"x" * 80_000)
        assert (await asyncio.wait_for(reader.readline(), 5)).split(b" ")[1] == b"429"
        assert proxy.relay.backlog.n_bytes == 80_000
    await leave_nothing(proxy)
    assert engine.requests(CHAT) == []


async def test_who_found_no_slot_in_time_is_told(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MAX_WAIT_S", 0.2)
    hold = Hold()
    engine.on(CHAT, "prefill", hold, times=N_SLOTS)
    running = await crowd(proxy, N_SLOTS)
    await until(lambda: hold.n == N_SLOTS, 30)
    for answer in await asyncio.gather(*await crowd(proxy, 20)):
        assert_asked_to_come_back(answer, "queue_timeout")
    assert proxy.relay.desk.n_waiting == 0
    hold.release()
    assert statuses(await asyncio.gather(*running)) == {200: N_SLOTS}
    assert (await ask(proxy, 1))[0] == 200
    await leave_nothing(proxy)


async def test_a_refusal_is_in_the_dialect_of_the_client(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MAX_WAITING", 0)
    for path in (CHAT, "/v1/messages"):
        answer = await ask(proxy, 1, path=path)
        assert_asked_to_come_back(answer, "queue_full")
        assert (answer[2].get("type") == "error") == (path == "/v1/messages")
    assert (await proxy.client.get("/polykv/requests")).json()["requests"][0]["error"] == "queue_full"
    await leave_nothing(proxy)


async def test_the_proxy_may_open_as_many_files_as_the_system_allows(engine: FakeEngine) -> None:
    """The usual soft limit is less than who may wait here, and then not even the engine could be asked."""
    serve = f"{sys.executable} -m polykv_proxy.cli serve --json --upstream {engine.url} --port 0 --state :memory:"
    command, pipe, nowhere = f"ulimit -Sn 200; exec {serve}", asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec("sh", "-c", command, stdout=pipe, stderr=nowhere, env=clean_env())
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60)
        (limits,) = [line for line in read(f"/proc/{process.pid}/limits").splitlines() if line.startswith(b"Max open")]
        soft, hard = limits.split()[3:5]
        assert soft == hard
    finally:
        process.terminate()
        await process.communicate()


@pytest.mark.parametrize("leaves", [False, True])
async def test_nothing_of_a_crowd_is_left(engine: FakeEngine, proxy: Proxy, leaves: bool) -> None:
    """No turn, no body, no task and no connection of theirs, crowd after crowd."""

    async def come_and_go(n: int) -> None:
        hold = Hold()
        engine.on(CHAT, "prefill", hold, times=N_SLOTS)
        tasks = await crowd(proxy, n, "x" * 1000)
        await until(lambda: proxy.relay.desk.n_waiting == n - N_SLOTS, 120)
        for task in tasks if leaves else ():
            task.cancel()
        hold.release()
        await asyncio.gather(*tasks, return_exceptions=True)

    n_tasks, before = len(asyncio.all_tasks()), {id(o) for o in kept()}  # of tests that failed, for one
    for _ in range(3):
        await come_and_go(40)
        await leave_nothing(proxy)
        await until(lambda: {id(o) for o in kept()} <= before, 30)
    await until(lambda: len(asyncio.all_tasks()) <= n_tasks + 1, 60)  # a heartbeat, once connections are given up


def kept() -> list[object]:
    gc.collect()
    things = [o for o in gc.get_objects() if isinstance(o, TurnRelay | Call | Place | Connection)]
    return [o for o in things if not isinstance(o, Connection) or o.transport is not None]
