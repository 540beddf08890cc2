"""Too much, or not to be read: told at once and exactly, on every route that is read. Replies are never held back."""

import asyncio
import random

import orjson
import pytest

from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, body_of
from tests.relay.raw import connected, exchange, get, post, until
from tests.reliability.conftest import leave_nothing, post_json

CONTROL = ["/polykv/pools", "/polykv/pools/1/fork", "/polykv/pools/1/admission", "/polykv/match"]
LIMIT = 4096


def head_of(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


@pytest.mark.parametrize("path", [*PATHS, "/completions", "/chat/completions", *CONTROL])
@pytest.mark.parametrize("how", ["announced", "in chunks"])
async def test_a_body_over_the_limit_is_a_413(engine: FakeEngine, make_proxy: ProxyMaker, path: str, how: str) -> None:
    async with make_proxy(engine.url, max_body_bytes=LIMIT) as proxy, connected(proxy.url) as (reader, writer):
        if how == "announced":  # refused before any of it was sent
            writer.write(head_of(path, f"Content-Length: {LIMIT + 1}"))
        else:  # refused as soon as it is too much, before its end
            writer.write(
                head_of(path, "Transfer-Encoding: chunked") + b"%x\r\n%s\r\n" % (LIMIT + 1, b"x" * (LIMIT + 1))
            )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.split(b" ")[1] == b"413"
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = orjson.loads(await reader.readexactly(int(length.partition(b":")[2])))
        assert body["error"]["code"] == "body_too_large"
        assert (body.get("type") == "error") == (path == "/v1/messages")
        assert not [r for r in engine.received if r.method == "POST" and not r.path.startswith("/polykv/engine")]
        await leave_nothing(proxy)


@pytest.mark.parametrize("how", ["announced", "in chunks"])
async def test_a_body_at_the_limit_is_read(engine: FakeEngine, make_proxy: ProxyMaker, how: str) -> None:
    async with make_proxy(engine.url, max_body_bytes=LIMIT) as proxy:
        body = orjson.dumps({"prompt": "x", "n_predict": 1, "user": ""})
        body = body.replace(b'""', b'"%s"' % (b"y" * (LIMIT - len(body))))
        assert len(body) == LIMIT
        sent = post("/completion", body)
        if how == "in chunks":
            sent = head_of("/completion", "Transfer-Encoding: chunked") + b"%x\r\n%s\r\n0\r\n\r\n" % (LIMIT, body)
        head, _ = await exchange(proxy.url, sent)
        assert head.startswith(b"HTTP/1.1 200 ")


BROKEN = [
    (b'{"messages": [}', 14, 1, 15),
    (b'{\n "prompt": "x",\n  nonsense }', 20, 3, 3),
    (b'{"prompt": "x"', 14, 1, 15),
    (b"", 0, 1, 1),
]


@pytest.mark.parametrize("path", [*PATHS, "/polykv/pools", "/polykv/match"])
@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case[0].decode() or "nothing")
async def test_bad_json_is_a_400_that_says_where(
    engine: FakeEngine, proxy: Proxy, path: str, case: tuple[bytes, int, int, int]
) -> None:
    raw, position, line, column = case
    answer = await proxy.client.post(path, content=raw, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert (error["position"], error["line"], error["column"]) == (position, line, column)
    assert engine.requests(path) == []


@pytest.mark.parametrize(
    "target", ["/v1/models", "/v1/chat/completions", "/polykv/pools", "/polykv/health", "/index.html"]
)
async def test_headers_that_are_too_large_are_a_431_on_every_route(
    engine: FakeEngine, proxy: Proxy, target: str
) -> None:
    engine.received.clear()
    for lines in (f"x-long: {'a' * 40_000}\r\n", "x-many: a\r\n" * 200):
        head, body = await exchange(proxy.url, get(target, lines))
        assert head.split(b" ")[1] == b"431"
        assert orjson.loads(body)["error"]["code"] == "headers_too_large"
    assert [r for r in engine.received if not r.path.startswith("/polykv/engine")] == []


async def test_chunked_bodies_of_any_cut_reach_the_engine_whole(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    """Without a length, cut anywhere, also within a character and within the chunks' own lines."""
    rng = random.Random(11)
    body = orjson.dumps({"prompt": "gr\u00fc\u00dfe \U0001f600 " * 20, "n_predict": 1, "pool_id": None})
    async with make_proxy(engine.url, mode="explicit") as proxy:
        for _ in range(40):
            cuts = sorted(rng.sample(range(1, len(body)), rng.randrange(1, 12)))
            chunks = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
            sent = head_of("/completion", "Transfer-Encoding: chunked")
            sent += b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
            async with connected(proxy.url) as (reader, writer):
                at = 0
                while at < len(sent):
                    n = rng.choice([1, 7, 100, 5000])
                    writer.write(sent[at : at + n])
                    at += n
                    await asyncio.sleep(0)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert engine.requests("/completion")[-1].json()["prompt"] == orjson.loads(body)["prompt"]
        await leave_nothing(proxy)


@pytest.mark.parametrize("fields", [{}, {"session_id": "s"}], ids=["as it is", "of a session"])
@pytest.mark.parametrize("path", PATHS)
async def test_what_was_sent_is_there_before_the_next_piece_is(
    engine: FakeEngine, proxy: Proxy, path: str, fields: dict[str, str]
) -> None:
    """The engine waits with each of the first pieces until the client has the one before."""
    holds = [Hold() for _ in range(4)]
    for i, hold in enumerate(holds, 1):
        engine.on(path, f"chunk:{i}", hold)
    async with connected(proxy.url) as (reader, writer):
        writer.write(post_json(path, body_of(path, stream=True, **fields)))
        got, n_events = b"", 0
        for hold in holds:
            await hold.reached()
            while got.count(b"\n\n") <= n_events:
                got += await asyncio.wait_for(reader.read(65536), 10)
            n_events = got.count(b"\n\n")
            hold.release()
    await until(engine.requests(path)[0]._ended.is_set)
    await leave_nothing(proxy)
