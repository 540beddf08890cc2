"""What the engine never sees."""

import asyncio
import socket
from contextlib import suppress

from polykv_proxy.relay import backlog
from tests.contract.changes.lab import CHAT, FINE, Check, Lab, chat, models, status_of
from tests.relay.raw import OK, connected, exchange, get, post, until

PREFLIGHT = OK + b"Access-Control-Allow-Origin: http://a.example\r\nContent-Length: 0\r\n\r\n"


async def refused(lab: Lab, request: bytes, code: str, status: int) -> bool:
    """Whether it is turned away with this. Anything else than that, or a 200, is not foreseen."""
    engine, head, body = await lab.sent(request)
    if status_of(head) == 200:
        assert len(engine.heads) == 1
        return False
    assert (engine.heads, status_of(head)) == ([], status)
    assert b'"code":"%s"' % code.encode() in body
    return b'"src":"polykv_proxy"' in body


async def polykv_paths(lab: Lab) -> bool:
    spelled = ("/polykv/engine/stats", "//polykv/engine", "/%u0070olykv/engine/stats", "/polykv%2Fpools")
    return all([await refused(lab, get(path), "not_found", 404) for path in spelled])


async def keys(lab: Lab) -> bool:
    for free in ("/health", "/"):
        assert not await refused(lab, get(free), "invalid_api_key", 401)
    return await refused(lab, models(), "invalid_api_key", 401)


async def slots_local(lab: Lab) -> bool:
    foreign = get("/slots").replace(b"Host: localhost", b"Host: elsewhere.example")
    return await refused(lab, foreign, "forbidden", 403)


async def cors(lab: Lab) -> bool:
    async with lab.raw([PREFLIGHT]) as (_, proxy):
        await exchange(proxy.url, get(CHAT, "Origin: http://a.example\r\n", "OPTIONS"))
        head, body = await exchange(
            proxy.url, chat("Origin: http://a.example\r\nx-pool-id: \xe9\xe9" + "x" * 300 + "\r\n")
        )
    assert b'"src":"polykv_proxy"' in body
    return b"Access-Control-Allow-Origin: http://a.example\r\n" in head


async def json(lab: Lab) -> bool:
    async with lab.fake() as (engine, proxy):
        answer = await proxy.client.post(CHAT, content=b'{"messages": [')
        ours = engine.requests(CHAT) == []
    assert ours == (answer.json()["error"].get("position") == 14)
    return ours


async def field_errors(lab: Lab) -> bool:
    return await refused(lab, chat(body=b'{"session_id":7,"messages":[]}'), "invalid_request", 400)


async def body_limit(lab: Lab) -> bool:
    assert not await refused(lab, post("/anything", b"x" * 2000), "body_too_large", 413)
    return await refused(lab, chat(body=b'{"messages":[],"x":"' + b"x" * 2000 + b'"}'), "body_too_large", 413)


async def slow(lab: Lab, sent: bytes) -> bool:
    """Whether what goes no further is a 408 soon."""
    async with lab.raw() as (_, proxy), connected(proxy.url) as (reader, writer):
        writer.write(sent)
        try:
            async with asyncio.timeout(lab.patience_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return False
        return status_of(head) == 408


async def slow_head(lab: Lab) -> bool:
    return await slow(lab, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")


async def slow_body(lab: Lab) -> bool:
    return await slow(lab, chat()[:-1])


async def stalled_reader(lab: Lab) -> bool:
    n_bytes = 24 << 20
    head = OK + b"Content-Length: %d\r\n\r\n" % n_bytes
    async with lab.raw([head, *[b"x" * (1 << 20)] * 24]) as (engine, proxy):
        with socket.create_connection(
            (proxy.url.split("/")[2].split(":")[0], int(proxy.url.rpartition(":")[2]))
        ) as taker:
            taker.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(taker, models())
            n_taken = 0
            with suppress(TimeoutError):
                await until(lambda: engine.heads and not proxy.relay.n_running, lab.patience_s)
            try:
                while n_taken < n_bytes and (piece := await loop.sock_recv(taker, 1 << 20)):
                    n_taken += len(piece)
            except ConnectionError:
                return True
            return n_taken < n_bytes


async def head_limits(lab: Lab) -> bool:
    too_large = [get("/" + "x" * 17_000), models("x: " + "x" * 33_000 + "\r\n"), models("x: y\r\n" * 129)]
    return all([await refused(lab, request, "headers_too_large", 431) for request in too_large])


async def framing(lab: Lab) -> bool:
    unclear = [
        chat("Transfer-Encoding: chunked\r\n"),
        chat("Content-Length: 3\r\n"),
        models("X-A: b\r\n c\r\n"),
        get("host:443", method="CONNECT"),
        models().replace(b"HTTP/1.1", b"HTTP/2.0"),
        models().replace(b"Host: localhost\r\n", b""),
        chat() + b"\0",
        post("/x", b"", "Transfer-Encoding: gzip, chunked\r\n").replace(b"Content-Length: 0\r\n", b""),
    ]
    return all([await refused(lab, request, "invalid_request", 400) for request in unclear])


async def crowd(lab: Lab) -> bool:
    lab.monkeypatch.setattr(backlog, "MAX_WAITING", 0)
    async with lab.fake() as (engine, proxy):
        answer = await proxy.client.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
        ours = engine.requests(CHAT) == []
    assert answer.status_code == (429 if ours else 200)
    return ours


async def draining(lab: Lab) -> bool:
    async with lab.raw([FINE]) as (engine, proxy):
        proxy.relay.drain()
        head, body = await exchange(proxy.url, chat())
        other, _ = await exchange(proxy.url, models())
    assert (status_of(other), len(engine.heads)) == (200, 1)
    return status_of(head) == 503 and b'"code":"draining"' in body


REFUSALS: dict[str, Check] = {
    "polykv-paths": polykv_paths,
    "keys": keys,
    "slots-local": slots_local,
    "cors": cors,
    "json": json,
    "field-errors": field_errors,
    "body-limit": body_limit,
    "slow-head": slow_head,
    "slow-body": slow_body,
    "stalled-reader": stalled_reader,
    "head-limits": head_limits,
    "framing": framing,
    "crowd": crowd,
    "draining": draining,
}
