"""Replies as the engine wrote them, whatever they hold and however they are cut; and requests as the client did."""

import asyncio
import codecs
import random
from collections.abc import Sequence

import pytest

from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS
from tests.relay.raw import OK, RawEngine, connected, exchange, get, post, unchunked

CHAT, NATIVE, MESSAGES, RESPONSES = "/v1/chat/completions", "/completion", "/v1/messages", "/v1/responses"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
SSE = OK + b"Content-Type: text/event-stream\r\nX-Accel-Buffering: no\r\n" + CHUNKED
PLAIN_BODY, OWN_FIELD = b'{"stream":true,"messages":[]}', b'{"session_id":"s","stream":true,"messages":[]}'

USAGE = (
    b'"usage":{"completion_tokens":4,"prompt_tokens":9,"total_tokens":13,'
    b'"prompt_tokens_details":{"cached_tokens":0},"x_new":1e-07},'
    b'"timings":{"cache_n":0,"prompt_n":9,"prompt_ms":1.10,"predicted_n":4,"predicted_ms":2E+1,"draft_n":0,'
    b'"x_unknown":[null,{}]}'
)
REASONING = [
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}]}\n\n',
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"reasoning_content":"H\xc3\xa9, \\u65e5\xe6\x9c\xac '
    b'\xf0\x9f\x98\x80"}}]}\n\n',
    b'data: { "choices" : [ {"finish_reason":null,"index":0,"delta":{"content":"}\\"usage\\":{ [DONE]"}} ] }\n\n',
]
TOOL_CALLS = [
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1","type":"function",'
    b'"function":{"name":"look","arguments":"{"}}]}}]}\n\n',
    *(
        b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"'
        + piece
        + b'"}}]}}]}\n\n'
        for piece in (b"\\", b'\\"pa', b'th\\\\\\":', b"\xc3\xa9", b"\\ud83d\\ude00", b"}")
    ),
]
LAST = b'data: {"choices":[{"finish_reason":"tool_calls","index":0,"delta":{}}],"created":1,' + USAGE + b"}\n\n"
DONE = b"data: [DONE]\n\n"
STREAMS: dict[str, tuple[str, bytes]] = {
    "reasoning": (CHAT, b"".join([*REASONING, LAST, DONE])),
    "tool calls": (CHAT, b"".join([*TOOL_CALLS, LAST, DONE])),
    "usage in a chunk of its own": (
        CHAT,
        b"".join([*REASONING, LAST.replace(USAGE, b'"x":1'), b'data: {"choices":[],' + USAGE + b"}\n\n", DONE]),
    ),
    "CRLF": (CHAT, b"".join([*TOOL_CALLS, LAST, DONE]).replace(b"\n", b"\r\n")),
    "CR": (CHAT, b"".join([*REASONING, LAST, DONE]).replace(b"\n", b"\r")),
    "comments": (
        CHAT,
        b"".join([b":\n\n", b": ping\n\n", REASONING[1], b":keep-alive }\r\n\r\n", LAST, b": end\n\n", DONE]),
    ),
    "several data lines": (
        CHAT,
        b'id: 7\nretry: 10\nevent: message\ndata: {"choices":[],\ndata: "x":1}\n\ndata\ndata:\n\n' + LAST + DONE,
    ),
    "a byte order mark": (CHAT, codecs.BOM_UTF8 + b"".join([*REASONING, LAST, DONE])),
    "no JSON": (CHAT, b"data: {\xff\xfe\n\ndata: \x00\x01}\n\nwhatever\n\n" + DONE),
    "no end": (CHAT, b"".join(REASONING)[:-1]),
    "native": (
        NATIVE,
        b'data: {"content":"\xc3\xa9","stop":false}\n\ndata: {"content":"","stop":true,' + USAGE + b"}\n\n",
    ),
    "Messages": (
        MESSAGES,
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"cache_read_input_tokens":0,'
        b'"input_tokens":9,"x":1}}}\n\nevent: ping\ndata: {"type":"ping"}\n\nevent: content_block_delta\ndata: '
        b'{"delta":{"type":"thinking_delta","thinking":"\xe6\x97\xa5"}}\n\nevent: content_block_delta\ndata: '
        b'{"delta":{"type":"input_json_delta","partial_json":"{\\"pa"}}\n\nevent: message_delta\ndata: '
        b'{"type":"message_delta","delta":'
        b'{"stop_reason":"tool_use"},"usage":{"output_tokens":4}}\n\nevent: message_stop\ndata: '
        b'{"type":"message_stop"}\n\n',
    ),
    "Responses": (
        RESPONSES,
        b'event: response.reasoning_text.delta\ndata: {"type":"response.reasoning_text.delta","delta":"\xe6\x97\xa5"}'
        b"\n\n"
        b'event: response.completed\ndata: {"type":"response.completed","response":{"x":1,"usage":{"input_tokens":9,'
        b'"output_tokens":4,"input_tokens_details":{"cached_tokens":0}}}}\n\n',
    ),
}


def framed(pieces: Sequence[bytes]) -> list[bytes | float]:
    return [SSE, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece), b"0\r\n\r\n"]


def cut(stream: bytes, how: str) -> list[bytes]:
    if how == "bytes":
        return [stream[i : i + 1] for i in range(len(stream))]
    chance = random.Random(how + str(len(stream)))
    at = sorted(chance.sample(range(1, len(stream)), min(len(stream) - 1, 40)))
    return [stream[a:b] for a, b in zip([0, *at], [*at, len(stream)], strict=True)]


def without_receipt(body: bytes) -> tuple[bytes, int]:
    """A reply without our member, and how many of them there were."""
    start = body.find(b',"polykv":{')
    if start < 0:
        return body, 0
    end = body.index(b"}", start) + 1
    return body[:start] + body[end:], 1 + without_receipt(body[end:])[1]


@pytest.mark.parametrize("how", ["bytes", "one way", "another way"])
@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_is_the_engines_own_however_it_is_cut(make_proxy: ProxyMaker, name: str, how: str) -> None:
    path, stream = STREAMS[name]
    async with RawEngine(framed(cut(stream, how))) as engine, make_proxy(engine.url) as proxy:
        head, body = await exchange(proxy.url, post(path, PLAIN_BODY, "x-request-id: a\r\n"))
        assert unchunked(body) == stream
        assert head == SSE.replace(b"Transfer-Encoding", b"x-request-id: a\r\nTransfer-Encoding")
        _, body = await exchange(proxy.url, post(path, OWN_FIELD))
        rest, n_receipts = without_receipt(unchunked(body))
        assert rest == stream
        assert n_receipts == (name not in ("no JSON", "no end"))
        assert engine.bodies == [PLAIN_BODY, b'{"stream":true,"messages":[]}']


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_reply_is_the_engines_own(make_proxy: ProxyMaker, path: str) -> None:
    """Numbers as they are written, 0 that is 0, members nobody knows, blanks, and bytes that are no UTF-8."""
    reply = (
        b'{ "id" : "x\\/y", "choices":[{"message":{"content":null,"reasoning_content":"\xc3\xa9"}}],\n'
        + USAGE
        + b" }\n"
    )
    head = OK + b"Content-Type: application/json; charset=utf-8\r\nContent-Length: "
    for said in (reply, b"", b"{", b'{"a":"\xff"}', b"\xef\xbb\xbf{}"):
        script = [head + b"%d\r\n\r\n" % len(said) + said]
        async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
            got_head, body = await exchange(proxy.url, post(path, b'{"messages":[]}', "x-request-id: a\r\n"))
            assert got_head + body == script[0].replace(b"\r\n\r\n", b"\r\nx-request-id: a\r\n\r\n", 1)
            _, body = await exchange(proxy.url, post(path, b'{"session_id":"s","messages":[]}'))
            assert without_receipt(body)[0] == said


@pytest.mark.parametrize("path", ["/v1/models", CHAT])
async def test_a_change_of_protocol_that_nobody_asked_for_is_an_error(make_proxy: ProxyMaker, path: str) -> None:
    script = [b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
        for body in (b'{"messages":[]}', b'{"session_id":"s","messages":[]}'):
            head, said = await exchange(proxy.url, post(path, body, "Upgrade: websocket\r\nConnection: Upgrade\r\n"))
            assert head.startswith(b"HTTP/1.1 502 ")
            assert b'"code":"upstream_error"' in said
            assert engine.header("upgrade") == []
        assert not any(proxy.at_rest().values())


async def test_header_values_of_latin_1_lose_no_character(make_proxy: ProxyMaker) -> None:
    """aiohttp writes UTF-8 only, and would leave the bytes out without a word."""
    script = [OK + b"X-Name: Zo\xeb\r\nContent-Length: 2\r\n\r\n{}"]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
        for request in (get("/v1/models"), post(CHAT, b'{"messages":[]}'), post("/upload", b"a" * 40_000)):
            head, _ = await exchange(proxy.url, request.replace(b"Host:", b"X-Name: Zo\xeb\r\nHost:"))
            assert b"X-Name: Zo\xc3\xab\r\n" in head
            assert b"X-Name: Zo\xc3\xab\r\n" in engine.heads[-1]


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_llama_server_can_read_is_read_here(engine: FakeEngine, proxy: Proxy, path: str) -> None:
    """A byte order mark in front, and the NULs of a string of C behind."""
    for raw in (
        codecs.BOM_UTF8 + b'{"session_id":"s"}',
        b'{"session_id":"s"}\0',
        codecs.BOM_UTF8 + b'{"session_id":"s"} \0\0',
    ):
        await proxy.client.post(path, content=raw)
        at_engine = engine.requests(path)[-1].body
        assert b"session_id" not in at_engine
        assert (at_engine.startswith(codecs.BOM_UTF8), at_engine.endswith(b"\0")) == (
            raw[:1] != b"{",
            raw[-1:] == b"\0",
        )
    answer = await proxy.client.post(path, content=codecs.BOM_UTF8 + b'{"a":\0}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("spelled", ["/v1/chat/complet%69ons", "/v1%2Fchat/completions", "/v1/chat/%u0063ompletions#x"])
async def test_an_escaped_path_is_the_same_path(engine: FakeEngine, proxy: Proxy, spelled: str) -> None:
    """llama-server decodes it before it looks for a route: so the body is read here, too."""
    head, body = await exchange(
        proxy.url, post(spelled, b'{"session_id":"s","messages":[{"role":"user","content":"x"}]}')
    )
    assert b"x-session-id: s\r\n" in head
    received = engine.received[-1]
    assert b"session_id" not in received.body
    if spelled.endswith("%69ons"):  # the others are no routes of the fake
        assert received.path == CHAT
        assert without_receipt(body)[1] == 1
    (recorded,) = (await proxy.client.get("/polykv/requests")).json()["requests"]
    assert recorded["path"] == CHAT


PREFLIGHT = (
    OK + b"Server: llama.cpp\r\nAccess-Control-Allow-Origin: http://a.example\r\n"
    b"Access-Control-Allow-Credentials: true\r\nAccess-Control-Allow-Methods: GET, POST, DELETE, OPTIONS\r\n"
    b"Access-Control-Allow-Headers: *\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n"
)
ORIGIN = "Origin: http://a.example\r\n"
ASKS = ORIGIN + "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n"


@pytest.mark.parametrize("target", [CHAT, "/", "*"])
async def test_a_preflight_is_answered_by_the_engine_also_without_a_key(make_proxy: ProxyMaker, target: str) -> None:
    async with RawEngine([PREFLIGHT]) as engine, make_proxy(engine.url, api_key="k") as proxy:
        head, _ = await exchange(proxy.url, get(target, ASKS + "x-request-id: a\r\n", "OPTIONS"))
        assert head == PREFLIGHT.replace(b"\r\n\r\n", b"\r\nx-request-id: a\r\n\r\n")
        assert engine.heads[-1].startswith(f"OPTIONS {target} HTTP/1.1\r\n".encode())
        assert engine.header("access-control-request-headers") == ["authorization"]


async def test_a_page_that_may_read_replies_may_read_why_there_is_none(make_proxy: ProxyMaker) -> None:
    """A browser shows its page nothing of an answer without this header, of ours as well."""
    async with RawEngine([PREFLIGHT]) as engine, make_proxy(engine.url, api_key="k") as proxy:
        asked = post(CHAT, b"{", ORIGIN)
        head, _ = await exchange(proxy.url, asked)
        assert b"access-control" not in head.lower()
        await exchange(proxy.url, get(CHAT, ASKS, "OPTIONS"))
        for refused in (asked, asked.replace(b"Origin", b"Authorization: Bearer k\r\nx-session-id: s\r\nOrigin")):
            head, body = await exchange(proxy.url, refused)
            assert head.split(b" ")[1] in (b"401", b"400")
            assert b"Access-Control-Allow-Origin: http://a.example\r\n" in head
            assert b'"src":"polykv_proxy"' in body
        for other in ("Origin: http://b.example\r\n", ""):
            head, _ = await exchange(proxy.url, post(CHAT, b"{", other))
            assert b"access-control" not in head.lower()
        head, _ = await exchange(proxy.url, post("/polykv/pools", b"{", ORIGIN))
        assert b"access-control" not in head.lower(), "no page manages pools"
        engine.script = [PREFLIGHT.replace(b"Origin: http://a.example", b"Origin: ")]
        await exchange(proxy.url, get(CHAT, ASKS, "OPTIONS"))
        assert b"access-control" not in (await exchange(proxy.url, asked))[0].lower(), "the engine's last word counts"


PAGE = b"\x1f\x8b\x08\x00 compressed, and never looked into \xff\xfe\x00"
PAGE_HEAD = (
    OK + b'Server: llama.cpp\r\nContent-Encoding: gzip\r\nETag: "abc"\r\nCross-Origin-Embedder-Policy: require-corp\r\n'
    b"Cross-Origin-Opener-Policy: same-origin\r\nCache-Control: no-cache\r\nContent-Type: text/html; charset=utf-8\r\n"
    b"Accept-Ranges: bytes\r\nContent-Length: %d\r\n\r\n" % len(PAGE)
)


@pytest.mark.parametrize("target", ["/", "/index.html", "/_app/immutable/a-1.js"])
async def test_the_web_page_comes_as_it_is(make_proxy: ProxyMaker, target: str) -> None:
    async with RawEngine([PAGE_HEAD + PAGE]) as engine, make_proxy(engine.url) as proxy:
        asked = 'Accept-Encoding: gzip, br\r\nIf-None-Match: W/"x"\r\nRange: bytes=0-9\r\nx-request-id: a\r\n'
        head, body = await exchange(proxy.url, get(target, asked))
        assert head == PAGE_HEAD.replace(b"\r\n\r\n", b"\r\nx-request-id: a\r\n\r\n")
        assert body == PAGE
        for name in ("accept-encoding", "if-none-match", "range"):
            assert engine.header(name)
        engine.script = [PAGE_HEAD]
        head, _ = await exchange(proxy.url, get(target, asked, "HEAD"))
        assert head == PAGE_HEAD.replace(b"\r\n\r\n", b"\r\nx-request-id: a\r\n\r\n")


RESUMED = "/v1/stream?conv_id=org%2Frepo%3A%3Ac1&from=17"


async def test_a_stream_is_resumed_where_the_client_says(make_proxy: ProxyMaker) -> None:
    """And it comes as the engine keeps it: nothing is put into it that the client's count did not have."""
    stream = b"".join([*REASONING, LAST, DONE])[17:]
    async with RawEngine(framed(cut(stream, "resumed"))) as engine, make_proxy(engine.url) as proxy:
        _, body = await exchange(proxy.url, get(RESUMED))
        assert unchunked(body) == stream
        assert engine.heads[-1].startswith(f"GET {RESUMED} HTTP/1.1\r\n".encode())
        asked = post(CHAT, PLAIN_BODY, "X-Conversation-Id: org/repo::c1\r\n")
        _, body = await exchange(proxy.url, asked)
        assert unchunked(body) == stream
        assert engine.header("x-conversation-id") == ["org/repo::c1"]


async def test_metrics_have_what_is_asked_of_every_reply(make_proxy: ProxyMaker) -> None:
    theirs = b"llamacpp:x 1\n"
    said = OK + b"Server: llama.cpp\r\nAccess-Control-Allow-Origin: http://a.example\r\nProcess-Start-Time-Unix: 7\r\n"
    script = [said + b"Content-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n" % len(theirs) + theirs]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
        head, body = await exchange(proxy.url, get("/metrics", ORIGIN + "x-request-id: a\r\n"))
        assert engine.header("origin") == ["http://a.example"]
        assert head.startswith(said)
        assert b"x-request-id: a\r\n" in head
        assert body.startswith(theirs)
        assert b"opencoti_polykv:" in body
        assert head.lower().count(b"content-length") == head.lower().count(b"content-type") == 1


async def test_pieces_of_a_cut_character_are_not_waited_for(make_proxy: ProxyMaker) -> None:
    """Half a character and half a line go out when they come."""
    event = 'data: {"content":"日'.encode()
    go_on = asyncio.Event()
    script = [SSE, b"%x\r\n%s\r\n" % (len(event) - 1, event[:-1]), go_on, b"1\r\n" + event[-1:] + b"\r\n0\r\n\r\n"]
    for body in (PLAIN_BODY, OWN_FIELD):
        go_on.clear()
        async with (
            RawEngine(script) as engine,
            make_proxy(engine.url) as proxy,
            connected(proxy.url) as (reader, writer),
        ):
            writer.write(post(NATIVE, body))
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            got = await asyncio.wait_for(reader.readuntil(event[-3:-1]), 5)
            assert got.endswith(event[:-1])
            go_on.set()
            assert (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)).endswith(event[-1:] + b"\r\n0\r\n\r\n")
