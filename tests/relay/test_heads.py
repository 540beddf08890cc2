"""Requests whose head or framing cannot be read: our error body, nothing quoted, nothing of it in the log."""

import asyncio
import json
import logging

import pytest

from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import RawEngine, connected, exchange, get, post

SECRET = b"sk-very-secret-0123456789"

BAD = {
    "a NUL in a header": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + SECRET + b"\x00\r\n\r\n",
    "a space before the colon": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization : " + SECRET + b"\r\n\r\n",
    "a folded header": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Api-Key: a\r\n " + SECRET + b"\r\n\r\n",
    "a strange method": SECRET + b" /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "a strange version": b"GET /" + SECRET + b" HTTP/9.9.9\r\nHost: x\r\n\r\n",
    "no HTTP": SECRET + b"\r\n\r\n",
    "a bad length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + SECRET + b"\r\n\r\n",
    "a bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    + SECRET
    + b"\r\nx\r\n0\r\n\r\n",
}
TOO_LARGE = {
    "a header": get("/v1/models", f"Authorization: {SECRET.decode() * 2000}\r\n"),
    "the request line": get("/v1/models?key=" + SECRET.decode() * 1000),
    "a header's name": get("/v1/models", f"{'x' * 40_000}: {SECRET.decode()}\r\n"),
    "their number": get("/v1/models", f"X-Api-Key: {SECRET.decode()}\r\n" * 200),
}


def error_of(head: bytes, body: bytes) -> dict[str, str]:
    """The error of a reply that has the contract's shape."""
    lower = head.lower()
    assert head.startswith(b"HTTP/1.1 ")
    assert b"\r\ncontent-type: application/json" in lower
    assert b"\r\nx-request-id: " in lower
    assert b"\r\nconnection: close\r\n" in lower
    said = json.loads(body)
    assert said["src"] == "polykv_proxy"
    assert set(said["error"]) == {"message", "type", "code"}
    error: dict[str, str] = said["error"]
    return error


@pytest.mark.parametrize("kind", BAD)
async def test_an_unreadable_head_gets_our_error(proxy: Proxy, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    head, body = await exchange(proxy.url, BAD[kind])
    error = error_of(head, body)
    assert head.split(b" ")[1] == b"400"
    assert error["type"] == "invalid_request_error"
    assert_quiet(head + body, caplog)


@pytest.mark.parametrize("kind", TOO_LARGE)
async def test_a_head_that_is_too_large_is_a_431(
    proxy: Proxy, kind: str, caplog: pytest.LogCaptureFixture, engine: FakeEngine
) -> None:
    caplog.set_level(logging.DEBUG)
    head, body = await exchange(proxy.url, TOO_LARGE[kind])
    assert head.split(b" ")[1] == b"431"
    assert error_of(head, body)["code"] == "headers_too_large"
    assert_quiet(head + body, caplog)
    assert engine.requests("/v1/models") == []


def assert_quiet(reply: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert SECRET[:16] not in reply
    assert SECRET[:16].decode() not in caplog.text
    assert "Traceback" not in caplog.text
    assert [r for r in caplog.records if r.levelno > logging.INFO] == []
    assert 0 < len([r for r in caplog.records if r.name.startswith("polykv")]) <= 2


async def test_the_next_connection_is_served(proxy: Proxy) -> None:
    for request in (*BAD.values(), *TOO_LARGE.values()):
        await exchange(proxy.url, request)
    assert (await proxy.chat()).status_code == 200


async def test_heads_just_below_the_limits_pass(make_proxy: ProxyMaker) -> None:
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        head, _ = await exchange(proxy.url, get("/v1/models?q=" + "a" * 16_000, f"x-long: {'b' * 32_000}\r\n"))
        assert head.startswith(b"HTTP/1.1 200 ")
        assert engine.heads[0].startswith(b"GET /v1/models?q=" + b"a" * 16_000 + b" ")
        assert engine.header("x-long") == ["b" * 32_000]


async def test_a_body_that_becomes_unreadable_is_a_400_that_quotes_nothing(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for path in ("/v1/chat/completions", "/tokenize"):
        good = post(path, b"", "Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")
        head, body = await exchange(proxy.url, good + b"1\r\n{\r\n" + SECRET + b"\r\n")
        assert head.split(b" ")[1] == b"400"
        assert SECRET[:16] not in head + body
    assert SECRET[:16].decode() not in caplog.text


HEADS = {
    "an unreadable target": b"HEAD /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "an authority": b"HEAD host:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "behind an empty line": b"\r\nHEAD host:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an unreadable header": b"HEAD / HTTP/1.1\r\nHost : x\r\n\r\n",
    "too large": get("/" + "a" * 17_000, method="HEAD"),
    "another version": b"HEAD / HTTP/2.0\r\nHost: x\r\n\r\n",
    "before what is none": get("/", method="HEAD") + b"\0",
}


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("kind", HEADS)
async def test_a_reply_to_head_has_no_body(proxy: Proxy, kind: str, in_pieces: bool) -> None:
    """A client would take it for the head of the next reply."""
    async with connected(proxy.url) as (reader, writer), asyncio.timeout(10):
        for piece in (HEADS[kind][:3], HEADS[kind][3:9], HEADS[kind][9:]) if in_pieces else (HEADS[kind],):
            writer.write(piece)
            await asyncio.sleep(0.01)
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == (b"431" if kind == "too large" else b"400")
    assert body == b""


async def test_a_head_that_is_not_complete_in_time_has_none_either(make_proxy: ProxyMaker) -> None:
    async with RawEngine() as engine, make_proxy(engine.url, client_head_s=0.1) as proxy:
        for begun, has_body in ((b"HEAD / HT", False), (b"GET /HEAD ", True)):
            async with connected(proxy.url) as (reader, writer), asyncio.timeout(10):
                writer.write(begun)
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert bool(body) == has_body


@pytest.mark.parametrize("version", [b" HTTP/2.0", b" HTTP/0.9", b""])
async def test_an_answer_is_of_a_version_that_is_served(proxy: Proxy, version: bytes) -> None:
    head, _ = await exchange(proxy.url, b"GET /health" + version + b"\r\nHost: localhost\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
