"""Clients that shut their writing side behind their request, as `nc -N` does: answered while they are there, and as
soon gone as others when they leave after all."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from polykv_proxy.relay import half_closed
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import body_of
from tests.relay.raw import HANG_UP, OK, RawEngine, connected, get, post, unchunked, until
from tests.relay.test_leaving import all_at_rest
from tests.relay.test_slow_clients import served

CHAT = "/v1/chat/completions"
WHOLE = OK + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECES = [b"data: %d\n\n" % i for i in range(3)]


def chat(**fields: object) -> bytes:
    return post(CHAT, json.dumps(body_of(CHAT, **fields)).encode(), "Content-Type: application/json\r\n")


def in_chunks(*pieces: bytes) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]


async def ask_and_shut(url: str, request: bytes) -> bytes:
    """All that came until the other end closed."""
    async with connected(url) as (reader, writer), asyncio.timeout(20):
        writer.write(request)
        writer.write_eof()
        return await reader.read(-1)


def split(reply: bytes) -> tuple[bytes, bytes]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(("version", "pause_s"), [(b"HTTP/1.1", 0.0), (b"HTTP/1.1", 1.5), (b"HTTP/1.0", 0.3)])
async def test_a_reply_in_one_piece(make_proxy: ProxyMaker, version: bytes, pause_s: float) -> None:
    async with RawEngine([pause_s, WHOLE + b"{}"]) as engine, make_proxy(engine.url) as proxy:
        request = post("/tokenize", b"{}").replace(b"HTTP/1.1", version)
        head, body = split(await ask_and_shut(proxy.url, request))
        assert head.split(b"\r\n")[0] == version + b" 200 OK"
        assert b"\r\nContent-Length: 2" in head
        assert body == b"{}"
        await all_at_rest(proxy)


@pytest.mark.parametrize("pause_s", [0.0, 0.05, 1.3])
async def test_a_stream(make_proxy: ProxyMaker, pause_s: float) -> None:
    """Also when the engine says nothing for longer than it may be unknown whether somebody is there."""
    first, *others = in_chunks(*PIECES)
    script = [EVENTS, first, pause_s, *others, pause_s, b"0\r\n\r\n"]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
        head, body = split(await ask_and_shut(proxy.url, chat(stream=True)))
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert unchunked(body) == b"".join(PIECES)
        await all_at_rest(proxy)


async def test_what_it_gets_is_what_others_get(engine: FakeEngine, proxy: Proxy) -> None:
    """A model's replies, with pools, sessions and receipts in them."""
    for stream in (False, True):
        kept = await proxy.chat("hello", stream=stream, session_id="a")
        request = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": stream}
        raw = json.dumps({**request, "session_id": "b"}).encode()
        _, body = split(await ask_and_shut(proxy.url, post(CHAT, raw)))
        if not stream:
            assert json.loads(body)["choices"] == kept.json()["choices"]
            assert json.loads(body)["polykv"]["session_id"] == "b"
        else:
            assert unchunked(body).count(b"data: ") == kept.content.count(b"data: ")
            assert unchunked(body).endswith(b"data: [DONE]\n\n")


async def test_several_at_once_are_all_answered(make_proxy: ProxyMaker) -> None:
    async with RawEngine([0.3, WHOLE + b"{}"]) as engine, make_proxy(engine.url) as proxy:
        reply = await ask_and_shut(proxy.url, get("/a") + post("/b", b"[]") + get("/c"))
        assert [head.split(b" ")[1] for head in engine.heads] == [b"/a", b"/b", b"/c"]
        assert reply.count(b"HTTP/1.1 200 OK\r\n") == 3
        assert reply.count(b"HTTP/1.") == 3


async def test_our_own_replies_and_refusals(proxy: Proxy) -> None:
    head, body = split(await ask_and_shut(proxy.url, get("/polykv/pools")))
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert "pools" in json.loads(body)
    head, body = split(await ask_and_shut(proxy.url, b"GET /a\xff HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(body)["src"] == "polykv_proxy"


@pytest.mark.parametrize("sent", [b"{", b""])
async def test_a_body_that_cannot_become_whole_is_one_that_left(engine: FakeEngine, proxy: Proxy, sent: bytes) -> None:
    raw = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n".encode()
    assert await ask_and_shut(proxy.url, raw + sent) == b""
    await all_at_rest(proxy)
    assert engine.requests(CHAT) == []


# Leaving after all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "stream"), [("prefill", False), ("prefill", True), ("chunk:3", True)])
async def test_who_shut_its_side_and_leaves_later_is_noticed(
    engine: FakeEngine, proxy: Proxy, phase: str, stream: bool
) -> None:
    hold = Hold()
    engine.on(CHAT, phase, hold)
    async with connected(proxy.url) as (_, writer):
        writer.write(chat(stream=stream))
        writer.write_eof()
        await hold.reached()
        await asyncio.sleep(0.5)
        assert proxy.at_rest()["held"] == 1
    await all_at_rest(proxy, 1.0)
    assert engine.requests(CHAT)[0].left


async def test_who_shut_its_side_in_the_line_keeps_its_place_until_it_leaves(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold, times=4)
    running = [asyncio.create_task(proxy.chat(str(i))) for i in range(4)]
    await until(lambda: hold.n == 4)
    waits = asyncio.create_task(ask_and_shut(proxy.url, chat()))
    await until(lambda: proxy.relay.desk.n_waiting == 1)
    async with connected(proxy.url) as (_, writer):
        writer.write(chat())
        writer.write_eof()
        await until(lambda: proxy.relay.desk.n_waiting == 2)
    await until(lambda: proxy.relay.desk.n_waiting == 1, 1.0)
    hold.release()
    assert (await waits).startswith(b"HTTP/1.1 200 OK\r\n")
    assert [r.status_code for r in await asyncio.gather(*running)] == [200] * 4
    assert len(engine.requests(CHAT)) == 5
    await all_at_rest(proxy)


@asynccontextmanager
async def tunnel(url: str) -> AsyncIterator[str]:
    """Passes an end of file on, and bytes to a client that is not there any more until writing fails."""
    to = urlsplit(url)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
        except OSError:
            return

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection(to.hostname, to.port)
        await asyncio.gather(pass_on(reader, there), pass_on(back, writer))
        there.transport.abort()
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_who_leaves_behind_a_tunnel_is_noticed(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    async with tunnel(proxy.url) as url:
        async with connected(url) as (_, writer):
            writer.write(chat())
            await hold.reached()
        await all_at_rest(proxy, 1.0)
    assert engine.requests(CHAT)[0].left


# Who cannot be asked any longer -----------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOON_S", "SURE_FOR_S", "LOOK_S"):
        monkeypatch.setattr(half_closed, name, 0.02)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_who_waits_for_longer_than_it_can_be_asked_is_told(make_proxy: ProxyMaker, version: bytes) -> None:
    async with RawEngine([60.0]) as engine, make_proxy(engine.url) as proxy:
        for method in (b"GET", b"HEAD"):
            request = get("/slow", method=method.decode()).replace(b"HTTP/1.1", version)
            head, body = split(await ask_and_shut(proxy.url, request))
            assert head.split(b"\r\n")[0] == version + b" 400 Bad Request"
            if method == b"GET":
                assert "shut its writing side" in json.loads(body)["error"]["message"]
            else:
                assert body == b""
            await all_at_rest(proxy)
        assert len(engine.heads) == 2


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("begin", "version"),
    [
        (EVENTS + in_chunks(*PIECES)[0], "1.1"),
        (EVENTS + in_chunks(*PIECES)[0], "1.0"),
        (OK + b"Content-Length: 9\r\n\r\nabc", "1.1"),
    ],
)
async def test_a_silent_reply_that_began_is_cut(make_proxy: ProxyMaker, begin: bytes, version: str) -> None:
    async with RawEngine([begin, 60.0, HANG_UP]) as engine, make_proxy(engine.url) as proxy:
        request = get("/slow").replace(b"HTTP/1.1", b"HTTP/" + version.encode())
        head, body = split(await ask_and_shut(proxy.url, request))
        assert head.split(b" ")[1] == b"200"
        assert not body.endswith(b"\r\n0\r\n\r\n")
        await all_at_rest(proxy)


async def test_as_it_is_served(engine: FakeEngine) -> None:
    """On the event loop of a real proxy."""
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    engine.on("/completion", "prefill", hold)
    async with served(engine) as url:
        asked = asyncio.create_task(ask_and_shut(url, post("/completion", b'{"prompt":"a","n_predict":2}')))
        async with connected(url) as (_, writer):
            writer.write(chat())
            writer.write_eof()
            await until(lambda: hold.n == 2)
        await until(lambda: any(r.left for r in engine.requests(CHAT)), 1.0)
        hold.release()
        head, body = split(await asked)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert json.loads(body)["content"]
