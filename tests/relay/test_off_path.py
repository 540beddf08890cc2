"""What nobody asked us to touch goes through as it is: request, reply, framing, first byte."""

import asyncio

import pytest

from tests.fake_engine import FakeEngine
from tests.relay.conftest import ProxyMaker
from tests.relay.dialect_cases import PATHS
from tests.relay.raw import HANG_UP, OK, RawEngine, connected, exchange, get, post, unchunked

BODY = (
    b'{ "messages" : [ {"role":"user","content":"h\xc3\xa9 \\u00e9 \\/"} ], '
    b'"seed": 12345678901234567890123, "t": 1.10E-7 }\n'
)


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models",
        "/v1/chat%2Fcompletions?a=%20b&c=d+e&a=2",
        "/x//y/./z/../w;p=1?q=/polykv/engine",
        "/%E2%82%AC/%41%zz?%",
        "/slots/0?action=save",
        "/?a",
    ],
)
async def test_the_target_goes_on_as_it_came(make_proxy: ProxyMaker, target: str) -> None:
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        await exchange(proxy.url, get(target))
        assert engine.heads[-1].split(b"\r\n")[0] == b"GET " + target.encode() + b" HTTP/1.1"


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS", "PUT", "PATCH", "HEAD"])
async def test_any_method(make_proxy: ProxyMaker, method: str) -> None:
    script = [OK + b"Content-Length: 0\r\nAllow: GET\r\n\r\n"]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
        head, _ = await exchange(proxy.url, get("/anything", method=method))
        assert engine.heads[-1].startswith(method.encode() + b" /anything HTTP/1.1\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Allow: GET\r\n" in head


async def test_head_keeps_the_length_and_has_no_body(make_proxy: ProxyMaker) -> None:
    async with (
        RawEngine([OK + b"Content-Length: 1234\r\nX-Y: z\r\n\r\n"]) as engine,
        make_proxy(engine.url) as proxy,
        connected(proxy.url) as (reader, writer),
    ):
        writer.write(get("/v1/models", method="HEAD") + get("/second", method="HEAD"))
        for _ in range(2):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert b"Content-Length: 1234\r\n" in head


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/embeddings", "/anything"])
async def test_body_bytes_go_on_unchanged(make_proxy: ProxyMaker, path: str) -> None:
    async with RawEngine() as engine, make_proxy(engine.url, mode="explicit") as proxy:
        await exchange(proxy.url, post(path, BODY, "Content-Type: application/json; x=y\r\n"))
        assert engine.bodies[-1] == BODY
        assert engine.header("content-type") == ["application/json; x=y"]
        assert engine.header("content-length") == [str(len(BODY))]


async def test_a_chunked_upload_of_unknown_length_goes_on_while_it_comes(make_proxy: ProxyMaker) -> None:
    pieces = [bytes([65 + i]) * 70_000 for i in range(8)]
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        async with connected(proxy.url) as (reader, writer):
            writer.write(b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in pieces:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 5)) == OK
        assert engine.bodies[-1] == b"".join(pieces)


async def test_a_compressed_body_is_not_looked_into(make_proxy: ProxyMaker) -> None:
    body = b"\x1f\x8b not really"
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        await exchange(proxy.url, post("/v1/chat/completions", body, "Content-Encoding: gzip\r\n"))
        assert engine.bodies[-1] == body
        assert engine.header("content-encoding") == ["gzip"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_form_is_not_looked_into(make_proxy: ProxyMaker, path: str) -> None:
    """llama-server reads fields of a form as well, here and there."""
    form = b'--b\r\nContent-Disposition: form-data; name="input"\r\n\r\nhello\r\n--b--\r\n'
    kind = {"content-type": "Multipart/form-data; boundary=b"}
    async with FakeEngine() as engine, make_proxy(engine.url) as proxy:
        await proxy.pool(tokens=[1, 2, 3])
        through = await proxy.client.post(path, content=form, headers=kind)
        direct = await proxy.client.post(engine.url + path, content=form, headers=kind)
        assert (through.status_code, through.content) == (direct.status_code, direct.content)
        assert [received.body for received in engine.requests(path)] == [form, form]


async def test_headers_of_one_hop_and_keys_stop_here(make_proxy: ProxyMaker) -> None:
    sent = (
        "Authorization: Bearer client-key\r\nX-Api-Key: client-key\r\nConnection: keep-alive, X-Secret\r\n"
        "X-Secret: 1\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\nUpgrade: h2c\r\nProxy-Authorization: x\r\n"
        "X-Kept: One\r\nx-kept: two\r\nCookie: a=b\r\nUser-Agent: me\r\n"
    )
    async with RawEngine() as engine, make_proxy(engine.url, upstream_api_key="upstream") as proxy:
        await exchange(proxy.url, get("/v1/models", sent))
        head = engine.heads[-1]
        assert b"client-key" not in head
        assert engine.header("authorization") == ["Bearer upstream"]
        for name in ("x-api-key", "x-secret", "keep-alive", "te", "upgrade", "proxy-authorization"):
            assert engine.header(name) == []
        assert engine.header("x-kept") == ["One", "two"]
        assert b"Cookie: a=b\r\nUser-Agent: me\r\n" in head
        assert engine.header("accept") == engine.header("accept-encoding") == []


async def test_reply_head_is_the_engines_plus_a_request_id(make_proxy: ProxyMaker) -> None:
    theirs = (
        b"HTTP/1.1 418 I'm a teapot\r\nServer: llama.cpp\r\nX-B: 1\r\nX-A: 2\r\nx-a: 3\r\nSet-Cookie: a=b\r\n"
        b"Set-Cookie: c=d\r\nKeep-Alive: timeout=5\r\nConnection: X-Hop\r\nX-Hop: 1\r\nContent-Length: 2\r\n\r\n"
    )
    async with RawEngine([theirs + b"hi"]) as engine, make_proxy(engine.url) as proxy:
        head, body = await exchange(proxy.url, get("/v1/models", "x-request-id: abc-1\r\n"))
        assert body == b"hi"
        assert head == (
            b"HTTP/1.1 418 I'm a teapot\r\nServer: llama.cpp\r\nX-B: 1\r\nX-A: 2\r\nx-a: 3\r\nSet-Cookie: a=b\r\n"
            b"Set-Cookie: c=d\r\nContent-Length: 2\r\nx-request-id: abc-1\r\n\r\n"
        )


@pytest.mark.parametrize("given", ["", "x" * 200, "a b", 'a"b'])
async def test_an_odd_request_id_is_replaced(make_proxy: ProxyMaker, given: str) -> None:
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        head, _ = await exchange(proxy.url, get("/v1/models", f"x-request-id: {given}\r\n" if given else ""))
        (line,) = [part for part in head.split(b"\r\n") if part.lower().startswith(b"x-request-id: ")]
        assert len(line.partition(b": ")[2]) == 32


async def test_compressed_replies_redirects_and_odd_statuses_pass(make_proxy: ProxyMaker) -> None:
    for reply in (
        OK + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\n\x1f\x8b123",
        b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n"
        + b'{"error":{}}',
    ):
        async with RawEngine([reply]) as engine, make_proxy(engine.url) as proxy:
            head, _, body = reply.partition(b"\r\n\r\n")
            request = get("/v1/models") if b" 304 " not in head and b" 204 " not in head else get("/x", method="HEAD")
            got_head, got_body = await exchange(proxy.url, request)
            assert got_head.startswith(head + b"\r\nx-request-id: ")
            assert got_body == body


async def test_stream_chunks_come_through_one_by_one_at_once(make_proxy: ProxyMaker) -> None:
    """Each piece is sent when the one before has arrived, so a buffer anywhere would stop it."""
    events = [b'data: {"choices":[{"finish_reason":null}],"n":%d}\n\n' % i for i in range(5)]
    goes_on = [asyncio.Event() for _ in range(6)]
    script: list[bytes | asyncio.Event] = [
        OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    ]
    for event, gate in zip(events, goes_on, strict=False):
        script += [gate, b"%x\r\n%s\r\n" % (len(event), event)]
    script += [goes_on[5], b"0\r\n\r\n"]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(post("/v1/chat/completions", BODY))
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        for event, gate in zip(events, goes_on, strict=False):
            gate.set()
            framed = await asyncio.wait_for(reader.readexactly(len(event) + 6), 5)
            assert unchunked(framed + b"0\r\n\r\n") == event
        goes_on[5].set()
        assert await asyncio.wait_for(reader.readexactly(5), 5) == b"0\r\n\r\n"


async def test_an_http_1_0_client_gets_a_stream_without_chunks(make_proxy: ProxyMaker) -> None:
    script = [OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
        head, body = await exchange(proxy.url, b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert body == b"hello"


async def test_a_reply_that_breaks_off_never_looks_complete(make_proxy: ProxyMaker) -> None:
    for head in (b"Content-Length: 100\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"):
        async with (
            RawEngine([OK + head, 0.1, HANG_UP]) as engine,
            make_proxy(engine.url) as proxy,
            connected(proxy.url) as (reader, writer),
        ):
            writer.write(get("/v1/models"))
            got = await asyncio.wait_for(reader.read(-1), 5)
            assert b"abc" in got
            assert not got.endswith(b"0\r\n\r\n")


async def test_nobody_upstream(make_proxy: ProxyMaker) -> None:
    async with RawEngine() as engine:
        url = engine.url
    async with make_proxy(url) as proxy:
        answer = await proxy.client.get("/v1/models")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "upstream_unavailable"
        assert int(answer.headers["retry-after"]) >= 1


async def test_the_engines_hooks_are_not_there_from_outside(make_proxy: ProxyMaker) -> None:
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        for target in (
            "/polykv/engine/stats",
            "//polykv/engine/stats",
            "/v1/..%2fpolykv/engine/stats",
            "/polykv%2Fengine",
        ):
            head, body = await exchange(proxy.url, get(target))
            assert head.startswith(b"HTTP/1.1 404 ")
            assert b'"code":"not_found"' in body
        assert engine.heads == []


async def test_a_client_that_waits_for_100_continue_gets_it(make_proxy: ProxyMaker) -> None:
    async with RawEngine() as engine, make_proxy(engine.url) as proxy, connected(proxy.url) as (reader, writer):
        for path in ("/v1/chat/completions", "/anything"):
            writer.write(
                post(path, b"", "Expect: 100-continue\r\n").replace(b"Content-Length: 0", b"Content-Length: 2")
            )
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 100 ")
            writer.write(b"[]")
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(OK)
            assert engine.bodies[-1] == b"[]"
            assert engine.header("expect") == []


async def test_header_values_beyond_ascii_keep_their_bytes(make_proxy: ProxyMaker) -> None:
    script = [OK + b"X-Name: Zo\xc3\xab\r\nContent-Length: 0\r\n\r\n"]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
        head, _ = await exchange(proxy.url, get("/v1/models").replace(b"Host:", b"X-Name: Zo\xc3\xab\r\nHost:"))
        assert b"X-Name: Zo\xc3\xab\r\n" in head
        assert b"X-Name: Zo\xc3\xab\r\n" in engine.heads[-1]
