"""Clients that take their time for a head, for a body or with reading: each kind has an end, and nobody else waits."""

import asyncio
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from aiohttp import web

from polykv_proxy.relay import connection
from polykv_proxy.relay.slow_clients import Patience, SlowClients
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import body_of
from tests.relay.raw import OK, RawEngine, connected, get, post, until
from tests.relay.test_leaving import all_at_rest

CHAT = "/v1/chat/completions"
HEAD_S = 0.4
HALF = b"GET /v1/models HTTP/1.1\r\nHost: local"
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


async def everything(reader: Reader) -> bytes:
    """Until the other end closes, or resets because a byte of ours crossed that."""
    async with asyncio.timeout(20):
        try:
            return await reader.read(-1)
        except ConnectionResetError:
            return bytes(reader._buffer)  # type: ignore[attr-defined]


def is_answered(reader: Reader) -> bool:
    return bool(reader._buffer) or reader.at_eof()  # type: ignore[attr-defined]


def assert_told(reply: bytes) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close" in head.lower()
    said = json.loads(body)
    assert (said["src"], said["error"]["code"]) == ("polykv_proxy", "head_timeout")


# Heads ------------------------------------------------------------------------------------------------------------


async def begin_and_stop(reader: Reader, writer: Writer) -> None:
    writer.write(HALF)


async def drip(reader: Reader, writer: Writer) -> None:
    """One byte after the other, each well in time: it is the head that is waited for, not the next byte."""
    for byte in HALF:
        if is_answered(reader):
            return
        writer.write(bytes([byte]))
        await asyncio.sleep(HEAD_S / 10)


async def be_answered(reader: Reader, writer: Writer, rest: bytes = get("/v1/models")) -> None:
    writer.write(rest)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))


async def begin_the_second(reader: Reader, writer: Writer) -> None:
    await be_answered(reader, writer)
    writer.write(HALF)


@pytest.mark.parametrize("client", [begin_and_stop, drip, begin_the_second])
async def test_a_head_that_was_begun_has_its_time(
    engine: FakeEngine, make_proxy: ProxyMaker, client: Callable[[Reader, Writer], Awaitable[None]]
) -> None:
    async with make_proxy(engine.url, client_head_s=HEAD_S) as proxy:
        async with connected(proxy.url) as (reader, writer):
            await client(reader, writer)
            assert_told(await everything(reader))
        assert (await proxy.chat()).status_code == 200


async def test_a_head_that_began_behind_a_running_request_has_it_after_the_reply(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    """The reply is not cut for it, however long it takes."""
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    async with make_proxy(engine.url, client_head_s=0.1) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(post(CHAT, json.dumps(body_of(CHAT)).encode()))
        await hold.reached()
        writer.write(HALF)
        await asyncio.sleep(0.5)
        hold.release()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        rest = await everything(reader)
        assert_told(rest[rest.index(b"HTTP/1.1 408 ") :])


async def test_a_connection_on_which_nothing_comes_is_closed_without_a_word(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    async with make_proxy(engine.url, client_head_s=0.1) as proxy, connected(proxy.url) as (reader, _):
        assert await everything(reader) == b""


async def test_who_is_idle_between_two_requests_is_left_alone(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    """Also when an empty line follows the first one, as some clients send it."""
    async with make_proxy(engine.url, client_head_s=0.1) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(get("/health") + b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(2):
            async with connected(proxy.url) as (later, begun):
                begun.write(HALF)
                assert_told(await everything(later))
        assert not reader.at_eof()
        writer.write(get("/v1/models"))
        assert b"HTTP/1.1 200 " in await reader.readuntil(b"\r\n\r\n")


async def test_a_head_in_pieces_that_is_in_time_is_served(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, client_head_s=2) as proxy, connected(proxy.url) as (reader, writer):
        for piece in (HALF, b"host\r\nX-A: ", b"b\r\n", b"\r\n"):
            writer.write(piece)
            await asyncio.sleep(0.02)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_a_request_that_takes_long_is_nobodys_fault(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    times = {"client_head_s": 0.1, "client_body_idle_s": 0.1, "client_stall_s": 0.1}
    async with make_proxy(engine.url, **times) as proxy:
        for stream in (False, True):
            hold = Hold()
            engine.on(CHAT, "chunk:2" if stream else "prefill", hold)
            asked = asyncio.create_task(proxy.chat(stream=stream))
            await hold.reached()
            await asyncio.sleep(0.5)
            hold.release()
            assert (await asked).status_code == 200


@pytest.fixture
def short_idle_time(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setitem(connection._OPTIONS, "keepalive_timeout", 0.3)
    return 0.3


async def test_a_head_that_began_within_the_idle_time_may_end_after_it(
    engine: FakeEngine, make_proxy: ProxyMaker, short_idle_time: float
) -> None:
    """And the connection has its idle time anew behind it."""
    async with make_proxy(engine.url) as proxy, connected(proxy.url) as (reader, writer):
        await be_answered(reader, writer)
        for _ in range(2):
            writer.write(HALF)
            await asyncio.sleep(2 * short_idle_time)
            await be_answered(reader, writer, b"host\r\n\r\n")
        assert await everything(reader) == b""


@pytest.mark.usefixtures("short_idle_time")
async def test_a_head_that_began_within_the_idle_time_has_its_own_end(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    async with make_proxy(engine.url, client_head_s=1) as proxy, connected(proxy.url) as (reader, writer):
        await be_answered(reader, writer)
        writer.write(HALF)
        assert_told(await everything(reader))


@pytest.mark.parametrize("is_new", [False, True])
async def test_what_came_in_the_moment_of_the_end_is_answered(
    engine: FakeEngine, make_proxy: ProxyMaker, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """The kernel has it already, and closing over it would be a reset."""
    made: list[connection.Connection] = []
    monkeypatch.setattr(
        connection.Connection,
        "connection_made",
        lambda self, transport: (made.append(self), super(connection.Connection, self).connection_made(transport)),
    )
    async with make_proxy(engine.url) as proxy:
        async with connected(proxy.url) as (reader, writer):
            if not is_new:
                await be_answered(reader, writer)
            await until(lambda: made and made[-1]._waiter)
            writer.write(get("/v1/models", "Connection: close\r\n"))
            if is_new:
                made[-1]._no_head()
            else:
                made[-1]._next_keepalive_close_time = 0.0
                made[-1]._process_keepalive()
            assert (await everything(reader)).startswith(b"HTTP/1.1 200 ")
        assert not made[-1].connected


# Bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/polykv/pools"])
@pytest.mark.parametrize("framing", ["Content-Length: 100\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
async def test_an_upload_that_stops_in_the_middle_is_a_408(
    engine: FakeEngine, make_proxy: ProxyMaker, path: str, framing: str
) -> None:
    async with make_proxy(engine.url, client_body_idle_s=0.2) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{framing}".encode())
        reply = await everything(reader)
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in reply
        await all_at_rest(proxy)


async def test_a_slow_upload_that_never_rests_that_long_is_served(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    body = json.dumps(body_of(CHAT)).encode()
    async with (
        make_proxy(engine.url, client_body_idle_s=1, client_head_s=0.1) as proxy,
        connected(proxy.url) as (reader, writer),
    ):
        writer.write(post(CHAT, body)[: -len(body)])
        step = len(body) // 14 + 1
        for i in range(0, len(body), step):
            writer.write(body[i : i + step])
            await asyncio.sleep(0.15)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_an_upload_that_the_engine_does_not_take_is_not_the_clients_fault(make_proxy: ProxyMaker) -> None:
    size, go = 40_000_000, asyncio.Event()

    async def serve(reader: Reader, writer: Writer) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/upload" in head:
                await go.wait()
                await reader.readexactly(size)
                writer.write(OK + b"Content-Length: 0\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with make_proxy(url, client_body_idle_s=0.2) as proxy, connected(proxy.url) as (reader, writer):
            writer.write(post("/upload", b"x" * size))
            await asyncio.sleep(1)
            assert not reader.at_eof()
            go.set()
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).startswith(b"HTTP/1.1 200 ")


# Replies ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def small_reader(proxy: Proxy, request: bytes, rcvbuf: int = 4096) -> AsyncIterator[socket.socket]:
    """Whose kernel takes little for it: it reads when the test does."""
    loop, address = asyncio.get_running_loop(), httpx.URL(proxy.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        client.setblocking(False)
        await loop.sock_connect(client, (address.host, address.port))
        await loop.sock_sendall(client, request)
        yield client


def long_reply(size: int) -> list[bytes | float | asyncio.Event]:
    return [OK + b"Content-Length: %d\r\n\r\n" % size, *([b"x" * 100_000] * (size // 100_000))]


async def test_a_reader_that_takes_nothing_any_more_is_hung_up_on(make_proxy: ProxyMaker) -> None:
    async with (
        RawEngine(long_reply(50_000_000)) as engine,
        make_proxy(engine.url, client_stall_s=0.3) as proxy,
        small_reader(proxy, get("/big")),
    ):
        await until(lambda: proxy.relay.n_running == 1)
        await until(engine.left.is_set)
        await all_at_rest(proxy)


async def test_also_when_the_reply_is_finished_as_far_as_its_handler_knows(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    """What is left of it waits in the connection, and would for ever; so would the whole of a control plane's reply."""
    async with make_proxy(engine.url, client_stall_s=0.3) as proxy:
        for i in range(5000):
            proxy.control.sessions.name(f"session-{i:0200}", proxy.control.clock())  # type: ignore[arg-type]
        async with small_reader(proxy, get("/polykv/sessions") * 8) as client:
            got, piece = 0, b"?"
            await asyncio.sleep(1.5)
            with suppress(ConnectionError):
                while piece:
                    piece = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 20), 5)
                    got += len(piece)
        one = len((await proxy.client.get("/polykv/sessions")).content)
        assert 0 < got < 8 * one


async def test_a_slow_reader_that_goes_on_reading_gets_everything(make_proxy: ProxyMaker) -> None:
    """For many times as long as one that takes nothing."""
    size, n_read = 12_000_000, 0
    async with (
        RawEngine(long_reply(size)) as engine,
        make_proxy(engine.url, client_stall_s=0.5) as proxy,
        small_reader(proxy, get("/big"), 65536) as client,
    ):
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 3
        while piece := await asyncio.wait_for(loop.sock_recv(client, 60_000), 5):
            n_read += len(piece)
            if n_read >= size:
                break
            if loop.time() < until_s:
                await asyncio.sleep(0.1)
    assert n_read > size


# All at once ------------------------------------------------------------------------------------------------------


def test_time_in_which_the_process_did_not_run_counts_for_nobody() -> None:
    async def run() -> float:
        slow = SlowClients(Patience(0.2, 30, 60))
        slow.start(web.Server(lambda _: None))  # type: ignore[arg-type, return-value]
        await asyncio.sleep(0)
        time.sleep(1)  # noqa: ASYNC251 (the loop stands still, as in a process that does not run)
        await asyncio.sleep(0.01)
        await slow.stop()
        return slow.now_s

    assert asyncio.run(run()) <= 2 * Patience(0.2, 30, 60).look_every_s


@asynccontextmanager
async def served(engine: FakeEngine, **settings: str) -> AsyncIterator[str]:
    """`polykvctl serve` as a process: its own event loop, its own file descriptors."""
    args = ("-m", "polykv_proxy.cli", "serve", "--upstream", engine.url, "--port", "0", "--state", ":memory:", "--json")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLYKV_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=kept | settings
    )
    try:
        assert process.stdout is not None
        yield json.loads(await asyncio.wait_for(process.stdout.readline(), 30))["proxy"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_five_hundred_half_open_connections_slow_nobody_down(engine: FakeEngine) -> None:
    """One in three sends nothing, one began a head, one sends it byte by byte. All of them are let go."""

    async def took_s(client: httpx.AsyncClient) -> float:
        began_s = time.perf_counter()
        assert (await client.post("/tokenize", json={"content": "x"})).status_code == 200
        return time.perf_counter() - began_s

    async with (
        served(engine, POLYKV_CLIENT_HEAD_S="2") as url,
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as good,
        asyncio.TaskGroup() as tasks,
    ):
        alone = [await took_s(good) for _ in range(40)]
        address = httpx.URL(url)
        ends = [await asyncio.open_connection(address.host, address.port) for _ in range(500)]

        async def be_slow(i: int, reader: Reader, writer: Writer) -> bytes:
            if i % 3 == 1:
                writer.write(HALF)
            while i % 3 == 2 and not is_answered(reader):
                writer.write(b"G")
                await asyncio.sleep(0.5)
            reply = await everything(reader)
            writer.close()
            return reply

        slow = [tasks.create_task(be_slow(i, *end)) for i, end in enumerate(ends)]
        beside: list[float] = []
        while len(beside) < 40 and not any(task.done() for task in slow):
            beside.append(await took_s(good))
        assert len(beside) >= 10
        assert statistics.median(beside) < 5 * statistics.median(alone)
        replies = await asyncio.gather(*slow)
        for i, reply in enumerate(replies):
            assert reply == b"" if i % 3 == 0 else reply.startswith(b"HTTP/1.1 4")
        assert (await good.post("/tokenize", json={"content": "x"})).status_code == 200
