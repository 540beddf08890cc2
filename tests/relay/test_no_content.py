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
    ],
    ids=["at once", "chunk later", "chunk in two", "head in three", "without framing", "without the chunk"],
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
