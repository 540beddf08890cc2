"""Requests behind each other on one connection: each is answered, in order, however they are cut."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from .raw import OK, RawEngine, connected, get, post, until

EMPTY = OK + b"Content-Length: 0\r\n\r\n"
CHUNKED = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
async def engine() -> AsyncIterator[RawEngine]:
    """Answers nothing until it is let."""
    async with RawEngine((asyncio.Event(), EMPTY)) as raw:
        yield raw


def let(engine: RawEngine) -> None:
    assert isinstance(engine.script[0], asyncio.Event)
    engine.script[0].set()


async def replies(reader: asyncio.StreamReader, n: int) -> None:
    async with asyncio.timeout(20):
        for _ in range(n):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("n", [31, 32, 33, 64, 100])
async def test_a_crowd_behind_a_request_whose_body_came_late(engine: RawEngine, make_proxy, n: int) -> None:
    """aiohttp's parser counts that one for ever, and is full before its connection is."""
    async with make_proxy(engine.url) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(post("/late", b"{}")[:-2])
        await asyncio.sleep(0.1)
        writer.write(b"{}")
        await until(lambda: len(engine.heads) == 1)
        writer.write(b"".join(get(f"/{i}") for i in range(n)))
        await asyncio.sleep(0.05)
        let(engine)
        await replies(reader, n + 1)
        assert [head.split()[1] for head in engine.heads[1:]] == [b"/%d" % i for i in range(n)]


@pytest.mark.parametrize("n_chunks", [16_384, 16_385, 16_386])
async def test_a_request_behind_one_of_very_many_chunks(engine: RawEngine, make_proxy, n_chunks: int) -> None:
    """They hold up the reading as their last one comes: aiohttp's parser remembers that into the next body."""
    async with make_proxy(engine.url) as proxy, connected(proxy.url) as (reader, writer):
        writer.write(post("/first", b"{}") + CHUNKED % b"/chunks" + b"1\r\nx\r\n" * n_chunks + b"0\r\n\r\n")
        await until(lambda: len(engine.heads) == 1)
        await asyncio.sleep(0.3)
        let(engine)
        await replies(reader, 2)
        writer.write(post("/last", b'{"n":1}'))
        await replies(reader, 1)
        assert engine.bodies == [b"{}", b"x" * n_chunks, b'{"n":1}']


@pytest.mark.parametrize("seed", range(6))
async def test_any_requests_in_any_pieces(engine: RawEngine, make_proxy, seed: int) -> None:
    chance = random.Random(seed)
    let(engine)
    requests, bodies = [], []
    for i in range(chance.choice([31, 33, 65, 120])):
        body = b"%d:" % i + b"x" * chance.choice([0, 1, 300, 300, 300, 70_000 if i % 9 == 0 else 5])
        kind = chance.random()
        if kind < 0.25:
            requests.append(get(f"/{i}"))
            bodies.append(b"")
            continue
        step = chance.choice([50, 4000])
        pieces = [body[k : k + step] for k in range(0, len(body), step)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        requests.append(CHUNKED % (b"/%d" % i) + chunks if kind < 0.6 else post(f"/{i}", body))
        bodies.append(body)
    whole = b"".join(requests)
    async with make_proxy(engine.url) as proxy, connected(proxy.url) as (reader, writer):
        answered = asyncio.create_task(replies(reader, len(requests)))
        while whole:
            n = chance.choice([7, 100, 1000, 66_000, len(whole)])
            writer.write(whole[:n])
            whole = whole[n:]
            await writer.drain()
            await asyncio.sleep(chance.choice([0, 0, 0.003]))
        await answered
        assert engine.bodies == bodies
