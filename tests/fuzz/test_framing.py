"""Requests byte by byte: what is refused, what is served, and that the engine sees nothing else.

Behind every probe another request follows on the same connection. What was served leaves it in step, so that this one
is served too; after what was refused nothing is read any more, so that no part of it is ever taken for a request.
"""

import asyncio
import re
from dataclasses import dataclass, field

import pytest

from tests.relay.conftest import ProxyMaker
from tests.relay.raw import OK, RawEngine, connected

LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHAT = b'{"messages":[]}'
PATIENCE_S = 5.0


@dataclass
class Probe:
    """``seen``: request lines, without version, and bodies that reach the engine. ``closes``: no more is read.

    ``waits``: what follows is sent when it was answered. Who asks for another protocol has to.
    """

    sent: bytes
    status: int = 200
    seen: list[tuple[bytes, bytes]] = field(default_factory=list)
    closes: bool = False
    waits: bool = False


def refused(sent: bytes, status: int = 400, *, closes: bool = True) -> Probe:
    return Probe(sent, status, closes=closes)


def served(
    sent: bytes, line: bytes = b"POST /a", body: bytes = b"", *, closes: bool = False, waits: bool = False
) -> Probe:
    return Probe(sent, 200, [(line, body)], closes, waits)


def post(headers: bytes, body: bytes = b"", target: bytes = b"/a", version: bytes = b"1.1") -> bytes:
    return b"POST " + target + b" HTTP/" + version + b"\r\nHost: x\r\n" + headers + b"\r\n" + body


def get(headers: bytes = b"", target: bytes = b"/a", version: bytes = b"1.1", method: bytes = b"GET") -> bytes:
    return method + b" " + target + b" HTTP/" + version + b"\r\nHost: x\r\n" + headers + b"\r\n"


CHUNKED = b"Transfer-Encoding: chunked\r\n"
TWO = b"2\r\n[]\r\n0\r\n\r\n"

LENGTHS = {
    "with chunks": refused(post(b"Content-Length: 3\r\n" + CHUNKED, b"0\r\n\r\n")),
    "behind chunks": refused(post(CHUNKED + b"Content-Length: 3\r\n", b"0\r\n\r\n")),
    "0 with chunks": refused(post(b"Content-Length: 0\r\n" + CHUNKED, b"0\r\n\r\n")),
    "twice": refused(post(b"Content-Length: 2\r\nContent-Length: 3\r\n", b"[]x")),
    "twice the same": refused(post(b"Content-Length: 2\r\nContent-Length: 2\r\n", b"[]")),
    "a list": refused(post(b"Content-Length: 2, 2\r\n", b"[]")),
    "negative": refused(post(b"Content-Length: -2\r\n", b"[]")),
    "plus": refused(post(b"Content-Length: +2\r\n", b"[]")),
    "huge": refused(post(b"Content-Length: 99999999999999999999999\r\n", b"[]")),
    "hexadecimal": refused(post(b"Content-Length: 0x2\r\n", b"[]")),
    "underscore": refused(post(b"Content-Length: 1_0\r\n", b"[]")),
    "empty": refused(post(b"Content-Length:\r\n", b"[]")),
    "a point": refused(post(b"Content-Length: 2.0\r\n", b"[]")),
    "full-width digits": refused(post("Content-Length: \uff12\r\n".encode(), b"[]")),
    "a space before the colon": refused(post(b"Content-Length : 2\r\n", b"[]")),
    "blanks around": served(post(b"Content-Length: \t 2 \t\r\n", b"[]"), body=b"[]"),
    "of a GET": served(get(b"Content-Length: 2\r\n") + b"[]", b"GET /a", b"[]"),
    "of a HEAD": served(get(b"Content-Length: 2\r\n", method=b"HEAD") + b"[]", b"HEAD /a", b"[]"),
    "named by Connection": served(post(b"Connection: content-length\r\nContent-Length: 2\r\n", b"[]"), body=b"[]"),
    "none": served(post(b"")),
}
CHUNKS = {
    "twice": refused(post(CHUNKED + CHUNKED, b"0\r\n\r\n")),
    "behind gzip": refused(post(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n")),
    "before gzip": refused(post(b"Transfer-Encoding: chunked, gzip\r\n", b"0\r\n\r\n")),
    "before identity": refused(post(b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n")),
    "identity": refused(post(b"Transfer-Encoding: identity\r\nContent-Length: 2\r\n", b"[]")),
    "nothing": refused(post(b"Transfer-Encoding:\r\n", TWO)),
    "another word": refused(post(b"Transfer-Encoding: xchunked\r\n", TWO)),
    "a vertical tab": refused(post(b"Transfer-Encoding: \x0bchunked\r\n", TWO)),
    "a space before the colon": refused(post(b"Transfer-Encoding : chunked\r\n", TWO)),
    "in HTTP/1.0": refused(post(CHUNKED, TWO, version=b"1.0")),
    "upper case": served(post(b"TRANSFER-ENCODING: CHUNKED\r\n", TWO), body=b"[]"),
    "a tab": served(post(b"Transfer-Encoding:\tchunked\r\n", TWO), body=b"[]"),
    "of a GET": served(get(CHUNKED) + TWO, b"GET /a", b"[]"),
    "an extension": served(post(CHUNKED, b'2;a="b";c\r\n[]\r\n0;x\r\n\r\n'), body=b"[]"),
    "an extension with a bare LF": refused(post(CHUNKED, b"2;a\n[]\r\n0\r\n\r\n")),
    "leading zeros": served(post(CHUNKED, b"0002\r\n[]\r\n000\r\n\r\n"), body=b"[]"),
    "an overflow": refused(post(CHUNKED, b"10000000000000002\r\n[]\r\n0\r\n\r\n")),
    "negative": refused(post(CHUNKED, b"-2\r\n[]\r\n0\r\n\r\n")),
    "0x": refused(post(CHUNKED, b"0x2\r\n[]\r\n0\r\n\r\n")),
    "no number": refused(post(CHUNKED, b"\r\n[]\r\n0\r\n\r\n")),
    "a space behind the number": refused(post(CHUNKED, b"2 \r\n[]\r\n0\r\n\r\n")),
    "bare LFs": refused(post(CHUNKED, b"2\n[]\n0\n\n")),
    "longer than it says": refused(post(CHUNKED, b"2\r\n[]XX0\r\n\r\n")),
    "a trailer": served(post(CHUNKED, b"2\r\n[]\r\n0\r\nX-T: 1\r\n\r\n"), body=b"[]"),
    "a length in the trailer": refused(post(CHUNKED, b"2\r\n[]\r\n0\r\nContent-Length: 9\r\n\r\n")),
    "read here, one byte each": served(
        post(CHUNKED, b"".join(b"1\r\n%c\r\n" % byte for byte in CHAT) + b"0\r\n\r\n", b"/v1/chat/completions"),
        b"POST /v1/chat/completions",
        CHAT,
    ),
}
LINES = {
    "HTTP/0.9": refused(b"GET /a\r\n"),
    "HTTP/0.9, said": refused(get(version=b"0.9")),
    "HTTP/1.2": refused(get(version=b"1.2")),
    "HTTP/2.0": refused(get(version=b"2.0")),
    "HTTP/2's preface": refused(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "lower case": refused(b"GET /a http/1.1\r\nHost: x\r\n\r\n"),
    "a lower-case method": refused(get(method=b"get")),
    "an unknown method": refused(get(method=b"FOO")),
    "CONNECT": refused(get(target=b"host:443", method=b"CONNECT")),
    "CONNECT to a path": refused(get(method=b"CONNECT")),
    "bare LFs": refused(b"GET /a HTTP/1.1\nHost: x\n\n"),
    "two spaces": refused(b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n"),
    "TLS": refused(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50),
    "all bytes": refused(bytes(range(256))),
    "empty lines before": served(b"\r\n\r\n" + get(), b"GET /a"),
    "HTTP/1.0 kept alive": served(get(b"Connection: keep-alive\r\n", version=b"1.0"), b"GET /a"),
    "a relative target": refused(get(target=b"a/b")),
    "an authority": refused(get(target=b"host:443")),
    "a query alone": refused(get(target=b"?a")),
    "* of a GET": refused(get(target=b"*")),
    "* of OPTIONS": served(get(target=b"*", method=b"OPTIONS"), b"OPTIONS *"),
    "absolute": served(get(target=b"http://evil.example/x?y"), b"GET /x?y"),
    "absolute without a path": served(get(target=b"http://evil.example?y"), b"GET /?y"),
    "absolute, to the hooks": refused(
        get(target=b"http://localhost/polykv/engine/stats").replace(b"Host: x", b"Host: localhost"), 404, closes=False
    ),
    "two slashes": served(get(target=b"//evil.example:99999/x"), b"GET //evil.example:99999/x"),
    "a fragment": served(get(target=b"/a#b"), b"GET /a"),
    "odd characters": served(get(target=b'/[a]"<>^`{|}\\%zz?x[]=%'), b'GET /[a]"<>^`{|}\\%zz?x[]=%'),
    "a NUL": refused(get(target=b"/a\0b")),
    "control characters": refused(get(target=b"/a\x01b\x7f")),
    "UTF-8": refused(get(target="/é".encode())),
    "Latin-1": refused(get(target=b"/\xe9")),
    "too long": refused(get(target=b"/" + b"a" * 17_000), 431),
}
HEADERS = {
    "no Host": refused(b"GET /a HTTP/1.1\r\n\r\n"),
    "two Hosts": refused(b"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    "folded": refused(get(b"X-A: b\r\n c\r\n")),
    "folded with a tab": refused(get(b"X-A: b\r\n\tc\r\n")),
    "a bare LF": refused(b"GET /a HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n"),
    "a bare CR": refused(b"GET /a HTTP/1.1\r\nHost: x\rX-A: b\r\n\r\n"),
    "a NUL": refused(get(b"X-A: a\0b\r\n")),
    "a control character": refused(get(b"X-A: a\x01b\r\n")),
    "no name": refused(get(b": b\r\n")),
    "no colon": refused(get(b"foo\r\n")),
    "a control character in the name": refused(get(b"X\x01A: b\r\n")),
    "UTF-8 in the name": refused(get("Xé: b\r\n".encode())),
    "a bracket in the name": refused(get(b"X(A): b\r\n")),
    "a blank before the first": refused(b"GET /a HTTP/1.1\r\n Host: x\r\n\r\n"),
    "a tab in the value": served(get(b"X-A: a\tb\r\n"), b"GET /a"),
    "too many": refused(get(b"".join(b"X-%d: a\r\n" % i for i in range(128))), 431),
    "just not too many": served(get(b"".join(b"X-%d: a\r\n" % i for i in range(126))), b"GET /a"),
    "two Content-Types": refused(post(b"Content-Type: a\r\ncontent-type: a\r\nContent-Length: 2\r\n", b"[]")),
    "two User-Agents": refused(get(b"User-Agent: a\r\nUser-Agent: b\r\n")),
    "too long": refused(get(b"X-A: " + b"a" * 33_000 + b"\r\n"), 431),
    "a long name": refused(get(b"X" * 33_000 + b": a\r\n"), 431),
}
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A\r\n"
TURNS = {
    "pipelined": Probe(
        get(target=b"/b") + post(b"Content-Length: 2\r\n", b"[]") + post(CHUNKED, TWO, b"/c"),
        200,
        [(b"GET /b", b""), (b"POST /a", b"[]"), (b"POST /c", b"[]")],
    ),
    "Upgrade: h2c": served(post(H2C + b"Content-Length: 2\r\n", b"[]"), body=b"[]"),
    "Upgrade: h2c, and its reply is waited for": served(
        post(H2C + b"Content-Length: 2\r\n", b"[]"), body=b"[]", waits=True
    ),
    "Upgrade: h2c of a GET": served(get(H2C), b"GET /a"),
    "Upgrade: h2c of several": Probe(
        b"\r\n" + get(H2C) + post(H2C + b"Content-Length: 2\r\n", b"[]") + get(target=b"/b"),
        200,
        [(b"GET /a", b""), (b"POST /a", b"[]"), (b"GET /b", b"")],
    ),
    "Upgrade: h2c behind another": Probe(
        get(target=b"/b") + get(H2C), 200, [(b"GET /b", b""), (b"GET /a", b"")], closes=True
    ),
    "Upgrade: h2c, in chunks": served(post(H2C + CHUNKED, TWO), body=b"[]", closes=True),
    "Upgrade: foo": served(get(b"Connection: upgrade\r\nUpgrade: foo\r\n"), b"GET /a"),
    "Upgrade: websocket": served(get(b"Connection: Upgrade\r\nUpgrade: websocket\r\n"), b"GET /a"),
    "Expect in HTTP/1.0": served(
        b"POST /a HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n[]", body=b"[]", closes=True, waits=True
    ),
    "Expect of something else": served(post(b"Expect: 200-ok\r\nContent-Length: 2\r\n", b"[]"), body=b"[]"),
    "Expect of something else from us": refused(
        post(b"Expect: 200-ok\r\nContent-Length: 2\r\n", b"[]", b"/polykv/pools")
    ),
    "Connection names everything": served(
        post(b"Connection: host, content-length, x-a, keep-alive\r\nX-A: b\r\nContent-Length: 2\r\n", b"[]"), body=b"[]"
    ),
}
TABLES = {"lengths": LENGTHS, "chunks": CHUNKS, "request lines": LINES, "headers": HEADERS, "turns": TURNS}


async def play(url: str, probe: Probe) -> tuple[list[int], bytes]:
    """Give the statuses of all replies, and everything that came."""
    got = b""
    async with connected(url) as (reader, writer):
        writer.write(probe.sent + (b"" if probe.waits else LAST))
        try:
            async with asyncio.timeout(PATIENCE_S):
                if probe.waits:
                    got = await reader.readuntil(b"\r\n\r\n")
                    writer.write(LAST)
                while piece := await reader.read(65536):
                    got += piece
        except ConnectionResetError:  # it hung up with bytes of ours unread
            pass
        except TimeoutError:
            got += b"<and then nothing>"
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", got)], got


@pytest.mark.parametrize("table", TABLES)
async def test_a_table_of_probes(make_proxy: ProxyMaker, table: str) -> None:
    wrong = {}
    async with RawEngine([OK + b"Content-Length: 0\r\n\r\n"]) as engine, make_proxy(engine.url) as proxy:
        for name, probe in TABLES[table].items():
            engine.heads.clear()
            engine.bodies.clear()
            statuses, got = await play(proxy.url, probe)
            expected, seen = [probe.status] * max(1, len(probe.seen)), list(probe.seen)
            if not probe.closes:
                expected.append(200)
                seen.append((b"GET /last", b""))
            at_engine = list(zip([b" ".join(h.split(b" ")[:2]) for h in engine.heads], engine.bodies, strict=True))
            ours = probe.status == 200 or b'"src":"polykv_proxy"' in got
            at_rest = not any(proxy.at_rest().values())
            if (statuses, at_engine, ours, at_rest, got.endswith(b">")) != (expected, seen, True, True, False):
                wrong[name] = (statuses, at_engine, got[:400])
    assert wrong == {}


PIECES = [
    (post(H2C + b"Content-Length: 4\r\n"), b"[1", b",]" + LAST),
    (post(H2C + b"Content-Length: 4\r\n", b"[1"), b",]" + LAST),
    (post(H2C + b"Content-Length: 4\r\n", b"[1,]") + LAST[:9], LAST[9:]),
]


@pytest.mark.parametrize("pieces", PIECES)
async def test_what_follows_an_upgrade_is_not_lost_however_it_is_cut(
    make_proxy: ProxyMaker, pieces: tuple[bytes, ...]
) -> None:
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        async with connected(proxy.url) as (reader, writer), asyncio.timeout(PATIENCE_S):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.05)
            got = await reader.read(-1)
        assert got.count(b"HTTP/1.1 200 OK\r\n") == 2
        assert [head.split(b" ")[1] for head in engine.heads] == [b"/a", b"/last"]
        assert engine.bodies == [b"[1,]", b""]


@pytest.mark.parametrize("cut", [7, 40, len(H2C)])
async def test_half_a_request_behind_an_upgrade_never_makes_one_of_its_other_half(
    make_proxy: ProxyMaker, cut: int
) -> None:
    """Of a head that came in pieces the end is not known: nothing is read behind it."""
    inner = post(b"X-A: " + b"a" * 30 + b"\r\nContent-Length: %d\r\n" % len(LAST), LAST, b"/outer")
    sent = get(H2C) + inner
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        async with connected(proxy.url) as (reader, writer), asyncio.timeout(PATIENCE_S):
            for piece in (sent[:cut], sent[cut : -len(LAST)], sent[-len(LAST) :]):
                writer.write(piece)
                await asyncio.sleep(0.05)
            assert (await reader.read(-1)).count(b"HTTP/1.1 ") == 1
        assert [head.split(b" ")[1] for head in engine.heads] == [b"/a"]


async def test_of_a_crowd_of_upgrades_as_many_are_answered_as_are_queued(make_proxy: ProxyMaker) -> None:
    """Then the connection ends; nobody waits for what the parser forgot."""
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        async with connected(proxy.url) as (reader, writer), asyncio.timeout(PATIENCE_S):
            writer.write(get(H2C) * 100)
            try:
                got = await reader.read(-1)
            except ConnectionResetError:  # it hung up with bytes of ours unread
                got = b""
        assert len(engine.heads) >= 31
        assert len(engine.heads) >= got.count(b"HTTP/1.1 200 OK\r\n")


async def test_what_is_no_request_behind_an_upgrade_is_refused(make_proxy: ProxyMaker) -> None:
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        statuses, got = await play(proxy.url, Probe(get(H2C) + b"\0"))
        assert statuses == [200, 400]
        assert b'"src":"polykv_proxy"' in got
        assert len(engine.heads) == 1
