"""What the client gets."""

from polykv_proxy.relay import kept_alive
from tests.contract.changes.lab import CHAT, COMPLETION, Check, Lab, chat, models, status_of
from tests.contract.test_admission_serving import ROOT, Busy, body_of, set_policy
from tests.relay.dialect_cases import SYSTEM, receipts_in
from tests.relay.raw import HANG_UP, OK, connected, exchange, get, until

SSE = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def request_id(lab: Lab) -> bool:
    _, given, _ = await lab.sent(models("x-request-id: mine\r\n"))
    _, made, _ = await lab.sent(chat())
    return b"x-request-id: mine\r\n" in given and b"x-request-id: " in made


async def receipt(lab: Lab) -> bool:
    async with lab.fake() as (_, proxy):
        messages = [{"role": "system", "content": SYSTEM}]
        (await proxy.client.post("/polykv/pools", json={"messages": messages})).raise_for_status()
        asked = {"messages": [*messages, {"role": "user", "content": "x"}], "max_tokens": 2}
        answer = await proxy.client.post(CHAT, json=asked)
        n_receipts = len(receipts_in(answer.json()))
    named = {"x-session-id", "x-pool-id", "x-cached-prefix-tokens"} & answer.headers.keys()
    assert len(named) == 3 * n_receipts
    return n_receipts == 1


async def retry_after(lab: Lab) -> bool:
    async with lab.raw([b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"]) as (_, proxy):
        head, body = await exchange(proxy.url, chat())
        other, _ = await exchange(proxy.url, models())
        return b"Retry-After: 1\r\n" in head and body == b"{}" and b"Retry-After" not in other


async def broken_stream(lab: Lab) -> bool:
    event = b'data: {"choices":[]}\n\n'
    async with lab.raw([SSE + b"%x\r\n%s\r\n" % (len(event), event), 0.02, HANG_UP]) as (_, proxy):
        async with connected(proxy.url) as (reader, writer):
            writer.write(chat(body=b'{"stream":true,"messages":[]}'))
            got = await reader.read(-1)
        return b"event: error\ndata: " in got and not got.endswith(b"0\r\n\r\n")


async def hop_back(lab: Lab) -> bool:
    script = [
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        + SSE.replace(b"\r\n\r\n", b"\r\nKeep-Alive: timeout=5\r\nConnection: keep-alive\r\n\r\n")
        + b"1\r\na\r\n1\r\nb\r\n0\r\nX-T: 1\r\n\r\n"
    ]
    async with lab.raw(script) as (engine, proxy):
        head, body = await exchange(proxy.url, models())
        old, plain = await exchange(proxy.url, b"GET /v1/models HTTP/1.0\r\n\r\n")
        engine.script = [b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"]
        empty, _ = await exchange(proxy.url, get("/v1/models", method="HEAD"))
    assert status_of(head) == 200
    assert b"keep-alive" not in head.lower() + old.lower()
    assert b"X-T" not in body
    return plain == b"ab" and b"content-length" not in empty.lower()


async def half_closed(lab: Lab) -> bool:
    script = [0.3, OK + b"Content-Length: 2\r\n\r\n{}"]
    async with lab.raw(script) as (_, proxy), connected(proxy.url) as (reader, writer):
        writer.write(models())
        writer.write_eof()
        return await reader.read(-1) == b""


async def held_streams(lab: Lab) -> bool:
    lab.monkeypatch.setattr(kept_alive, "EVERY_S", 0.02)
    async with lab.fake() as (engine, proxy):
        engine.token_s = 0.01
        (await proxy.client.post("/polykv/pools", json={"prompt": ROOT, "name": "root"})).raise_for_status()
        body = body_of("old", stream=True)
        await proxy.client.post(COMPLETION, json=body)
        await set_policy(proxy, max_turn_hold_ms=60_000)
        busy = Busy(proxy, engine)
        await busy.begin()
        async with proxy.client.stream("POST", COMPLETION, json=body) as answer:
            first = await anext(answer.aiter_raw())
        await busy.end()
        await until(lambda: not any(proxy.at_rest().values()))
        return first.startswith(b": hold\n\n")


async def metrics(lab: Lab) -> bool:
    async with lab.fake() as (engine, proxy):
        theirs = (await proxy.client.get(engine.url + "/metrics")).text
        both = (await proxy.client.get("/metrics")).text
    async with lab.alone() as proxy:
        ours = (await proxy.client.get("/metrics")).text
    return both.startswith(theirs) and "opencoti_polykv:engine_up 1.0" in both and "engine_up 0.0" in ours


async def slots_view(lab: Lab) -> bool:
    async with lab.fake() as (engine, proxy):
        theirs = (await proxy.client.get(engine.url + "/slots")).json()
        both = (await proxy.client.get("/slots")).json()
    ours = {"pool_id", "session_id", "tps_ewma", "ctx_used", "ctx_total", "ctx_headroom_tokens"}
    assert [{k: v for k, v in slot.items() if k not in ours} for slot in both] == theirs
    return all(ours <= slot.keys() for slot in both)


async def props_view(lab: Lab) -> bool:
    async with lab.fake() as (engine, proxy):
        theirs = (await proxy.client.get(engine.url + "/props")).json()
        both = (await proxy.client.get("/props")).json()
    ours = both.pop("opencoti")
    assert both == theirs
    return "polykv" in ours


async def no_engine(lab: Lab) -> bool:
    async with lab.alone() as proxy:
        gone, body = await exchange(proxy.url, models())
    async with lab.raw([b"whatever\r\n\r\n"]) as (engine, proxy):
        garbled, _ = await exchange(proxy.url, models())
        engine.script = [b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"]
        changed, _ = await exchange(proxy.url, models())
    assert b'"code":"upstream_unavailable"' in body
    return [status_of(head) for head in (gone, garbled, changed)] == [503, 502, 502]


REPLIES: dict[str, Check] = {
    "request-id": request_id,
    "receipt": receipt,
    "retry-after": retry_after,
    "broken-stream": broken_stream,
    "hop-back": hop_back,
    "half-closed": half_closed,
    "held-streams": held_streams,
    "metrics": metrics,
    "slots-view": slots_view,
    "props-view": props_view,
    "no-engine": no_engine,
}
