"""The engine dies, refuses or restarts: what the client sees, and how often the engine was asked."""

import asyncio
import json

import httpx
import pytest

from tests.fake_engine import FakeEngine, Hold, drop
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, body_of, events_of
from tests.relay.raw import HANG_UP, OK, RawEngine, connected, exchange, post, unchunked, until
from tests.relay.test_leaving import all_at_rest

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("touched", [False, True])
async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_end(
    engine: FakeEngine, proxy: Proxy, path: str, touched: bool
) -> None:
    engine.on(path, "chunk:3", engine.die())
    body = body_of(path, stream=True, **({"session_id": "s"} if touched else {}))
    got, broken = b"", ""
    async with proxy.client.stream("POST", path, json=body) as answer:
        try:
            async for piece in answer.aiter_raw():
                got += piece
        except httpx.RemoteProtocolError as e:
            broken = str(e)
    assert "incomplete chunked read" in broken
    assert b"[DONE]" not in got
    assert b"message_stop" not in got
    assert got.split(b"\n\n")[-2].startswith(b"event: error\ndata: {")
    last = events_of(got)[-1]
    assert last["error"]["code"] == "upstream_unavailable"
    assert (last.get("type") == "error") == (path in ("/v1/messages", "/v1/responses"))
    await all_at_rest(proxy)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("phase", ["request", "prefill", "reply"])
async def test_no_reply_is_a_503_in_the_dialects_shape_and_is_not_repeated(
    engine: FakeEngine, proxy: Proxy, path: str, phase: str
) -> None:
    engine.on(path, phase, drop())
    answer = await proxy.client.post(path, json=body_of(path, session_id="s"))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    body = answer.json()
    assert body["error"]["code"] == "upstream_unavailable"
    assert (body.get("type") == "error") == (path == "/v1/messages")
    assert len(engine.requests(path)) == 1
    await all_at_rest(proxy)


async def test_half_a_reply_in_one_piece_is_an_error_not_half_an_answer(make_proxy: ProxyMaker) -> None:
    script = [OK + b'Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"choices":[', HANG_UP]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
        answer = await proxy.chat(session_id="s")
        assert answer.status_code == 503
        assert len(engine.heads) == 1


async def test_a_stream_cut_in_the_middle_of_a_line(make_proxy: ProxyMaker) -> None:
    piece = b'data: {"choices":[{"finish_reason":null,"del'
    script = [
        OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(piece), piece)
    ]
    async with RawEngine([*script, 0.05, HANG_UP]) as engine, make_proxy(engine.url) as proxy:
        for field in (b"", b'"session_id":"s",'):
            async with connected(proxy.url) as (reader, writer):
                writer.write(post(CHAT, b"{" + field + b'"stream":true,"messages":[]}'))
                got = await asyncio.wait_for(reader.read(-1), 5)
            assert b"event: error\ndata: " in got.replace(b"\r\n", b"\n")
            assert not got.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("field", [{}, {"session_id": "s"}])
async def test_a_connection_that_the_engine_closes_after_a_stream_is_not_used_again(
    make_proxy: ProxyMaker, field: dict[str, str]
) -> None:
    """llama-server announces keep-alive and hangs up after every chunked reply; a POST must not meet that."""
    event = b'data: {"choices":[{"finish_reason":"stop"}],"timings":{}}\n\ndata: [DONE]\n\n'
    head = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
    script = [OK + head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event), 0.01, HANG_UP]
    async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
        for i in range(30):
            answer = await proxy.chat(stream=True, **field)
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.001 * (i % 12))
        assert len(engine.heads) == 30


async def test_an_engine_that_is_not_there_is_a_503_and_comes_back_by_itself(engine: FakeEngine, proxy: Proxy) -> None:
    await engine.kill()
    answer = await proxy.chat(session_id="s")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
    await all_at_rest(proxy)
    await until(lambda: not proxy.control.health()[0], 0.8)
    await engine.start()
    assert (await proxy.chat(session_id="s")).status_code == 200


async def test_who_waits_for_a_slot_of_a_dead_engine_is_told(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold, times=4)
    tasks = [asyncio.create_task(proxy.chat(str(i))) for i in range(10)]
    await until(lambda: hold.n == 4 and proxy.relay.desk.n_waiting == 6)
    await engine.kill()
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert [a.status_code for a in answers] == [503] * 10
    await all_at_rest(proxy)


async def test_loading_is_the_engines_own_answer(engine: FakeEngine, proxy: Proxy) -> None:
    engine.loading = True
    answer = await proxy.chat(session_id="s")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "Loading model"
    assert answer.headers["retry-after"] == "1"


async def test_draining_refuses_new_work_and_lets_running_turns_finish(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold, times=4)
    running = [asyncio.create_task(proxy.chat(str(i))) for i in range(4)]
    await until(lambda: hold.n == 4)
    queued = asyncio.create_task(proxy.chat("queued"))
    await until(lambda: proxy.relay.desk.n_waiting == 1)
    proxy.relay.drain()
    for answer in (await queued, await proxy.chat("new"), await proxy.chat("new", path="/v1/messages")):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "draining"
        assert answer.headers["retry-after"]
    assert not proxy.relay.idle.is_set()
    hold.release()
    assert [a.status_code for a in await asyncio.gather(*running)] == [200] * 4
    await asyncio.wait_for(proxy.relay.idle.wait(), 1)
    assert (await proxy.client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length : 3\r\n\r\nabc",
        b"POST /v1/chat/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_framing_that_two_servers_could_read_differently_is_refused(
    make_proxy: ProxyMaker, request_bytes: bytes
) -> None:
    async with RawEngine() as engine, make_proxy(engine.url) as proxy:
        head, _ = await exchange(proxy.url, request_bytes)
        assert head.split(b" ")[1] in (b"400", b"431")
        assert engine.heads == []


FULL = (
    b'{"error":{"code":503,"message":"the KV cache is full: no cells left for this prompt","type":"unavailable_error"}}'
)


@pytest.mark.parametrize("field", [b"", b'"session_id":"s",'])
async def test_an_engine_without_room_is_heard_in_its_own_words(make_proxy: ProxyMaker, field: bytes) -> None:
    """Before the first byte as a 503, and as the first event of a stream that then says nothing else."""
    json_head = b"Content-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n" % len(FULL)
    whole = [b"HTTP/1.1 503 Service Unavailable\r\n" + json_head + FULL]
    event = b"data: " + FULL + b"\n\n"
    sse_head = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    streamed = [sse_head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)]
    for script, stream, said in ((whole, b"false", FULL), (streamed, b"true", event)):
        async with RawEngine(script) as engine, make_proxy(engine.url) as proxy:
            head, body = await exchange(
                proxy.url, post(CHAT, b"{" + field + b'"stream":' + stream + b',"messages":[]}')
            )
            assert head.split(b" ")[1] == (b"503" if stream == b"false" else b"200")
            assert (unchunked(body) if stream == b"true" else body) == said
            assert (b"retry-after: 1" in head.lower()) == (stream == b"false")
            assert len(engine.heads) == 1


@pytest.mark.parametrize(
    "framed", [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("path", ["/tokenize", CHAT])
async def test_a_head_that_may_not_be_passed_on_is_a_502(make_proxy: ProxyMaker, path: str, framed: bytes) -> None:
    """A control character in a header would be the beginning of another one to somebody."""
    head = OK + b"Content-Type: application/json\r\nX-Odd: a\x01b\r\n"
    async with RawEngine((head + framed,)) as engine, make_proxy(engine.url) as proxy:
        for _ in range(2):
            told, body = await exchange(proxy.url, post(path, json.dumps(body_of(path)).encode()))
            assert told.startswith(b"HTTP/1.1 502 ")
            assert b"chunked" not in told
            assert "cannot be passed on" in json.loads(body)["error"]["message"]
