"""Replies of an engine out of its mind: what cannot be read is a 502, what breaks off is cut, and nobody is left."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.raw_stage import RawStage
from tests.relay.conftest import ProxyMaker
from tests.relay.raw import HANG_UP, OK, RawEngine, connected, exchange, get, post, unchunked

CHAT = "/v1/chat/completions"
GET, PLAIN = get("/v1/models"), post(CHAT, b'{"messages":[]}')
TOUCHED = post(CHAT, b'{"session_id":"s","messages":[]}')
STREAMED = post(CHAT, b'{"session_id":"s","stream":true,"messages":[]}')
HEAD = get("/v1/models", method="HEAD")


@dataclass
class Reply:
    """``script`` as of the engine. ``status``: the client's; ``body``: what it gets, without framing."""

    script: Sequence[bytes | float]
    status: int = 200
    body: bytes = b"hi"


def reply(headers: bytes, body: bytes = b"", *, ends: bool = True, line: bytes = OK) -> list[bytes | float]:
    return [line + headers + b"\r\n" + body, *(() if ends else (0.02, HANG_UP))]


SIZED, CHUNKED = b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n"
TWO = b"2\r\nhi\r\n0\r\n\r\n"
REPLIES = {
    "a length": Reply(reply(SIZED, b"hi")),
    "chunks": Reply(reply(CHUNKED, TWO)),
    "chunks with extensions": Reply(reply(CHUNKED, b"2;a=b\r\nhi\r\n0;c\r\n\r\n")),
    "a trailer": Reply(reply(CHUNKED, b"2\r\nhi\r\n0\r\nX-T: 1\r\n\r\n")),
    "ended by the close": Reply([OK + b"\r\n", b"hi", 0.02, HANG_UP]),
    "HTTP/1.0": Reply(reply(SIZED, b"hi", line=b"HTTP/1.0 200 OK\r\n")),
    "100 before it": Reply([b"HTTP/1.1 100 Continue\r\n\r\n", *reply(SIZED, b"hi")]),
    "103 before it": Reply([b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", *reply(SIZED, b"hi")]),
    "no reason": Reply(reply(SIZED, b"hi", line=b"HTTP/1.1 200\r\n")),
    "an odd status": Reply(reply(SIZED, b"hi", line=b"HTTP/1.1 999 Odd\r\n"), 999),
    "more than it says": Reply(reply(SIZED, b"hiHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad")),
    "204": Reply(reply(b"Content-Length: 0\r\n", line=b"HTTP/1.1 204 No Content\r\n"), 204, b""),
    "304": Reply(reply(b"ETag: x\r\nContent-Length: 5\r\n", line=b"HTTP/1.1 304 Not Modified\r\n"), 304, b""),
    "101": Reply(reply(b"Upgrade: x\r\nConnection: Upgrade\r\n", line=b"HTTP/1.1 101 Switching\r\n"), 502),
    "a length and chunks": Reply(reply(SIZED + CHUNKED, TWO), 502),
    "no length": Reply(reply(b"Content-Length: x\r\n", b"hi"), 502),
    "no header": Reply(reply(b"whatever\r\n" + SIZED, b"hi"), 502),
    "a header without end": Reply(reply(b"X-A: " + b"a" * 70_000 + b"\r\n" + SIZED, b"hi"), 502),
    "no chunk": Reply(reply(CHUNKED, b"zz\r\nhi\r\n0\r\n\r\n"), 502),
    "no HTTP": Reply([b"\0\1\2 whatever\r\n\r\n"], 502),
    "nothing": Reply([HANG_UP], 503),
    "half a head": Reply([OK + b"X-A", 0.02, HANG_UP], 503),
}


@pytest.mark.parametrize("request_bytes", [GET, PLAIN, TOUCHED, STREAMED], ids=["get", "plain", "touched", "streamed"])
async def test_a_table_of_replies(make_proxy: ProxyMaker, request_bytes: bytes) -> None:
    wrong = {}
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        for name, expected in REPLIES.items():
            for _ in range(2):  # the second one may meet the connection of the first
                engine.heads.clear()
                engine.script = expected.script
                async with connected(proxy.url) as (reader, writer):
                    writer.write(request_bytes)
                    head = await reader.readuntil(b"\r\n\r\n")
                    lower, body = head.lower(), b""
                    if b"transfer-encoding: chunked" in lower:
                        body = unchunked(await reader.readuntil(b"0\r\n\r\n"))
                    elif b"content-length: " in lower:
                        body = await reader.readexactly(int(lower.partition(b"content-length: ")[2].split(b"\r")[0]))
                status = int(head.split(b" ")[1])
                ours = b'"src":"polykv_proxy"' in body
                as_expected = ours if expected.status in (502, 503) else body == expected.body
                # What changes nothing may be asked again on a new connection.
                n_most = 2 if expected.status == 503 and request_bytes is GET else 1
                if (status, as_expected) != (expected.status, True) or not 1 <= len(engine.heads) <= n_most:
                    wrong[name] = (status, body, len(engine.heads))
        assert not any(proxy.at_rest().values())
    assert wrong == {}


async def test_a_reply_to_head_has_no_body_and_nothing_of_it_is_taken_for_the_next(make_proxy: ProxyMaker) -> None:
    async with RawEngine(reply(SIZED, b"hi")) as engine, make_proxy(engine.url) as proxy:
        for _ in range(3):
            engine.script = reply(SIZED, b"hi")
            await exchange(proxy.url, HEAD)
            engine.script = reply(SIZED, b"ok")
            assert (await exchange(proxy.url, GET))[1] == b"ok"


LINES = [
    *(OK, b"HTTP/1.1 400 Bad\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 503 No\r\n", b"HTTP/1.1 100 Go on\r\n"),
    b"HTTP/9 2\r\n",
]
HEADERS = [
    *(SIZED, CHUNKED, b"Content-Length: 40\r\n", b"Content-Type: text/event-stream\r\n", b"Connection: close\r\n"),
    *(b"Content-Type: application/json\r\n", b"X-A: \xe9\xff\r\n", b"Content-Encoding: gzip\r\n", b"X-A: b\r\n c\r\n"),
    *(b"Keep-Alive: timeout=5\r\n", b"Content-Length: -1\r\n", b": x\r\n", b"x-request-id: theirs\r\n", b"Date: x\r\n"),
]
BODIES = [
    *(b"hi", TWO, b"{}", b"2\r\n{}\r\n0\r\n\r\n", b"", b"0\r\n\r\n", b"[" * 40, b"7\r\ndata: {\r\n", b"ff\r\nshort"),
    *(b'{"choices":[],"timings":{"cache_n":0}}  ', b'{"error":{"code":503}}'),
    b'1d\r\ndata: {"stop":true,"usage":{}}\r\n0\r\n\r\n',
]
answers = st.tuples(
    st.sampled_from(LINES) | st.binary(max_size=12),
    st.lists(st.sampled_from(HEADERS), max_size=4).map(b"".join),
    st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b""]),
    st.lists(st.sampled_from(BODIES) | st.binary(max_size=8), max_size=3).map(b"".join),
).map(b"".join)
scripts = st.lists(answers, min_size=1, max_size=2).map(b"".join)
wanted = st.lists(st.sampled_from([GET, PLAIN, TOUCHED, STREAMED, HEAD]), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def stage() -> Iterator[RawStage]:
    stage = RawStage()
    stage.start()
    yield stage
    stage.stop()


def check(stage: RawStage, script: bytes, cut: int, requests: list[bytes]) -> None:
    cut %= len(script) + 1
    got = stage.do(stage.play([script[:cut], script[cut:], HANG_UP], requests))
    assert stage.errors == []
    for replied in got:
        assert replied == b"" or replied.startswith(b"HTTP/1.1 ")
        assert b"internal_error" not in replied
        assert b" 500 " not in replied.partition(b"\r\n")[0]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=scripts, cut=st.integers(0, 400), requests=wanted)
def test_any_reply(stage: RawStage, script: bytes, cut: int, requests: list[bytes]) -> None:
    check(stage, script, cut, requests)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=scripts, cut=st.integers(0, 400), requests=wanted)
def test_any_reply_for_long(stage: RawStage, script: bytes, cut: int, requests: list[bytes]) -> None:
    check(stage, script, cut, requests)
