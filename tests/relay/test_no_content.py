"""A 204 as llama-server sends it: framed, although it has no body. Its client gets one without."""

import asyncio

import pytest

from tests.relay.conftest import ProxyMaker
from tests.relay.raw import OK, RawEngine, exchange, post

HEAD = b"HTTP/1.1 204 No Content\r\nServer: llama.cpp\r\nTransfer-Encoding: chunked\r\nX-Mark: 1\r\n\r\n"
LAST = b"0\r\n\r\n"


@pytest.mark.parametrize(
    "script",
    [
        [HEAD + LAST],
        [HEAD, 0.02, LAST],
        [HEAD + LAST[:2], 0.02, LAST[2:]],
        [HEAD[:20], 0.02, HEAD[20:60], 0.02, HEAD[60:] + LAST],
        [HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")],
        [HEAD],
        [HEAD[:1], 0.02, HEAD[1:11], 0.02, HEAD[11:] + LAST],
        [HEAD.replace(b"chunked", b"chunked \t") + LAST],
    ],
    ids=[
        "at once",
        "chunk later",
        "chunk in two",
        "head in three",
        "without framing",
        "without the chunk",
        "status in pieces",
        "space behind",
    ],
)
@pytest.mark.parametrize("path", ["/cors-proxy?url=x", "/v1/chat/completions"])
async def test_it_has_no_body_and_the_connection_lives(
    make_proxy: ProxyMaker, script: list[bytes | float | asyncio.Event], path: str
) -> None:
    async with RawEngine(script) as engine, make_proxy(engine.url, mode="explicit") as proxy:
        for _ in range(3):
            head, body = await exchange(proxy.url, post(path, b"{}", "Connection: close\r\n"))
            assert head.startswith(b"HTTP/1.1 204 No Content\r\n")
            assert b"x-mark: 1" in head.lower()
            assert b"transfer-encoding" not in head.lower()
            assert body == b""


async def test_a_body_that_begins_like_one_stays_as_it_is(make_proxy: ProxyMaker) -> None:
    """Also when the network cuts exactly there."""
    body = HEAD + LAST + b"the end"
    script = [OK + b"Content-Length: %d\r\n\r\n" % (len(body) + 1) + b"x", 0.05, body]
    async with RawEngine(script) as engine, make_proxy(engine.url, mode="explicit") as proxy:
        _, got = await exchange(proxy.url, post("/cors-proxy", b"{}"))
        assert got == b"x" + body


async def test_a_reply_of_a_page_that_did_not_change_too(make_proxy: ProxyMaker) -> None:
    script: list[bytes | float | asyncio.Event] = [HEAD.replace(b"204 No Content", b"304 Not Modified") + LAST]
    async with RawEngine(script) as engine, make_proxy(engine.url, mode="explicit") as proxy:
        for _ in range(2):
            head, body = await exchange(proxy.url, post("/cors-proxy?url=x", b"{}", "Connection: close\r\n"))
            assert (head[:12], body) == (b"HTTP/1.1 304", b"")
            assert b"transfer-encoding" not in head.lower()


async def test_another_status_in_pieces_stays_as_it_is(make_proxy: ProxyMaker) -> None:
    reply = OK + b"Content-Length: 2\r\n\r\nok"
    async with (
        RawEngine([reply[:3], 0.02, reply[3:10], 0.02, reply[10:]]) as engine,
        make_proxy(engine.url, mode="explicit") as proxy,
    ):
        head, body = await exchange(proxy.url, post("/cors-proxy", b"{}", "Connection: close\r\n"))
        assert (head[:12], body) == (b"HTTP/1.1 200", b"ok")


async def test_a_head_without_end_is_not_kept(make_proxy: ProxyMaker) -> None:
    script: list[bytes | float | asyncio.Event] = [HEAD[:-2] + b"X-Fill: " + b"x" * (1 << 18)]
    async with RawEngine(script) as engine, make_proxy(engine.url, mode="explicit") as proxy:
        head, _ = await asyncio.wait_for(exchange(proxy.url, post("/cors-proxy", b"{}", "Connection: close\r\n")), 10)
        assert head[:12] == b"HTTP/1.1 502"
