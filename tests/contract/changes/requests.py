"""What the engine gets, and when."""

import asyncio
from datetime import date

import orjson

from polykv_proxy.upstream.client import EngineClient
from tests.contract.changes.lab import BODY, CHAT, COMPLETION, Check, Lab, chat, models
from tests.contract.test_admission_serving import ROOT
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy
from tests.relay.dialect_cases import SYSTEM
from tests.relay.raw import connected, exchange, get, post, until

LONG = SYSTEM * 2


async def own_hop(lab: Lab) -> bool:
    pieces = b"5;x=y\r\n" + BODY[:5] + b"\r\na\r\n" + BODY[5:] + b"\r\n0\r\nX-T: 1\r\n\r\n"
    request = b"POST %s HTTP/1.1\r\nHost: x.example\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces
    async with lab.raw() as (engine, proxy):
        await exchange(proxy.url, request % CHAT.encode())
        read_here = engine.header("content-length") == [str(len(BODY))] and engine.header("host") != ["x.example"]
        await exchange(proxy.url, request % b"/anything")
        return (
            read_here and engine.header("transfer-encoding") == ["chunked"] and b"x-t" not in engine.heads[-1].lower()
        )


async def hop_headers(lab: Lab) -> bool:
    hop = "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\nTrailer: X\r\n"
    engine, _, _ = await lab.sent(models(hop + "Upgrade: h2c\r\nProxy-Authorization: x\r\nX-Kept: 1\r\n"))
    gone = ("connection", "x-hop", "keep-alive", "te", "trailer", "upgrade", "proxy-authorization")
    return not any(engine.header(name) for name in gone) and engine.header("x-kept") == ["1"]


async def expect(lab: Lab) -> bool:
    async with lab.raw() as (engine, proxy), connected(proxy.url) as (reader, writer):
        writer.write(chat("Expect: 100-continue\r\n", b"").replace(b"Length: 0", b"Length: %d" % len(BODY)))
        told = await reader.readuntil(b"\r\n\r\n")
        writer.write(BODY)
        await reader.readuntil(b"\r\n\r\n")
        return told.startswith(b"HTTP/1.1 100 ") and engine.header("expect") == []


async def client_keys(lab: Lab) -> bool:
    keys = "Authorization: Bearer a\r\nX-Api-Key: a\r\nApi-Key: a\r\n"
    engine, _, _ = await lab.sent(models(keys))
    return not any(engine.header(name) for name in ("authorization", "x-api-key", "api-key"))


async def upstream_key(lab: Lab) -> bool:
    engine, _, _ = await lab.sent(models())
    return engine.header("authorization") == ["Bearer k"]


async def own_headers(lab: Lab) -> bool:
    own = "x-session-id: s\r\nx-pool-id: 7\r\nx-polykv-overcommit: 0\r\nx-polykv-strict: 0\r\n"
    async with lab.raw() as (engine, proxy):
        await exchange(proxy.url, chat(own))
        stayed = b"x-polykv" not in engine.heads[-1] and b"x-session-id" not in engine.heads[-1]
        await exchange(proxy.url, post("/anything", BODY, own))
        return stayed and engine.header("x-session-id") == ["s"]


async def spelling(lab: Lab) -> bool:
    engine, _, _ = await lab.sent(models("X-Twice: a\r\nx-twice: b\r\n"))
    return b"X-Twice: a\r\n" in engine.heads[-1] and b"X-Twice: b\r\n" in engine.heads[-1]


async def latin_1(lab: Lab) -> bool:
    engine, _, _ = await lab.sent(models("X-Name: Zo\xeb\r\n"))
    return b"X-Name: Zo\xc3\xab\r\n" in engine.heads[-1]


async def origin_form(lab: Lab) -> bool:
    engine, _, _ = await lab.sent(get("http://elsewhere.example/x?y#z"))
    return engine.heads[-1].startswith(b"GET /x?y HTTP/1.1\r\n")


async def plain_views(lab: Lab) -> bool:
    async with lab.raw() as (engine, proxy):
        for path in ("/slots", "/props"):
            await exchange(proxy.url, get(path, "Accept-Encoding: gzip\r\nX-Test: 1\r\n"))
            if engine.header("accept-encoding"):
                return False
        await exchange(proxy.url, models("Accept-Encoding: gzip\r\n"))
        return engine.header("accept-encoding") == ["gzip"]


async def fields(lab: Lab) -> bool:
    engine, _, _ = await lab.sent(chat(body=b'{"session_id":"s","pool_id":null, "messages":[]}'))
    return engine.bodies[-1] == b'{"messages":[]}'


async def at_engine(lab: Lab, **fields: object) -> tuple[bytes, bytes]:
    """What a chat is on its way, and what of it arrives, where a pool matches."""
    async with lab.fake() as (engine, proxy):
        pool = {"messages": [{"role": "system", "content": SYSTEM}]}
        (await proxy.client.post("/polykv/pools", json=pool)).raise_for_status()
        messages = [*pool["messages"], {"role": "user", "content": "x"}]
        body = orjson.dumps({"messages": messages, "max_tokens": 2, **fields})
        (await proxy.client.post(CHAT, content=body)).raise_for_status()
        return body, engine.requests(CHAT)[-1].body


async def slot(lab: Lab) -> bool:
    sent, arrived = await at_engine(lab)
    if arrived == sent:
        return False
    assert isinstance(orjson.loads(arrived)["id_slot"], int)
    assert arrived.startswith(sent[:-1] + b',"id_slot":')
    return True


async def attach(lab: Lab) -> bool:
    sent, arrived = await at_engine(lab)
    added = set(orjson.loads(arrived)) - set(orjson.loads(sent)) - {"id_slot"}
    assert added in (set(), {"shared_pool_slot", "shared_prefix_n_tokens", "shared_pool_gen", "shared_pool_epoch"})
    return bool(added)


async def tool_choice(lab: Lab) -> bool:
    choice = {"type": "function", "function": {"name": "look"}}
    _, arrived = await at_engine(lab, session_id="s", tool_choice=choice)
    given = orjson.loads(arrived)["tool_choice"]
    assert given in ("required", choice)
    return bool(given == "required")


async def pinned_lines(lab: Lab) -> bool:
    days = [f"Today's date: {date(2026, 1, day).isoformat()}" for day in (1, 2)]
    async with lab.fake() as (engine, proxy):
        for day in days:
            messages = [{"role": "system", "content": f"Help.\n{day}"}, {"role": "user", "content": "x"}]
            await proxy.client.post(CHAT, json={"messages": messages, "max_tokens": 2})
        arrived = [orjson.loads(r.body)["messages"][0]["content"] for r in engine.requests(CHAT)]
    assert arrived[0] == f"Help.\n{days[0]}"
    return bool(arrived[1] == arrived[0])


async def own_requests(lab: Lab) -> bool:
    async with lab.fake() as (engine, _):
        return {"/polykv/engine/owner", "/polykv/engine/stats"} <= {r.path for r in engine.received}


async def say(proxy: Proxy, agent: str, text: str = "x", system: str = LONG) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 2}
    (await proxy.client.post(CHAT, json=body, headers={"x-session-affinity": agent})).raise_for_status()


async def pools(lab: Lab) -> bool:
    async with lab.fake() as (_, proxy):
        for agent in ("a", "b", "c"):
            await say(proxy, agent, f"I am {agent}")
        return any(pool.auto for pool in proxy.control.tree)


async def parked(lab: Lab) -> bool:
    async with lab.fake(n_slots=1, save_ram=1 << 24) as (engine, proxy):
        for agent in ("a", "b", "a"):
            await say(proxy, agent, "x", f"You are {agent}. " * 20)
        orders = [orjson.loads(r.body).get("op") for r in engine.requests("/polykv/engine/pools") if r.method == "POST"]
    assert ("save" in orders) == ("load" in orders)
    return "save" in orders


async def body_first(lab: Lab) -> bool:
    async with lab.raw() as (engine, proxy), connected(proxy.url) as (reader, writer):
        request = chat()
        writer.write(request[:-1])
        await asyncio.sleep(0.05)
        waited = engine.heads == []
        writer.write(request[-1:])
        await reader.readuntil(b"\r\n\r\n")
        return waited and engine.bodies == [BODY]


async def slot_line(lab: Lab) -> bool:
    async with lab.fake(n_slots=2) as (engine, proxy):
        hold = Hold()
        engine.on(CHAT, "prefill", hold, times=2)
        turns = [asyncio.create_task(say(proxy, str(n), system=f"{n} is who you are")) for n in range(3)]
        await until(lambda: hold.n == 2 and (proxy.relay.desk.n_waiting or engine.n_deferred))
        here = proxy.relay.desk.n_waiting == 1
        hold.release()
        await asyncio.gather(*turns)
        return here


async def shared_prefill(lab: Lab) -> bool:
    async with lab.fake() as (engine, proxy):
        hold = Hold()
        engine.on(CHAT, "prefill", hold, times=2)
        turns = [asyncio.create_task(say(proxy, "a", "I am a"))]
        await hold.reached()
        turns.append(asyncio.create_task(say(proxy, "b", "I am b")))
        await until(lambda: proxy.control.sessions.n_running == 2)
        try:
            await until(lambda: hold.n == 2, lab.patience_s)
        except TimeoutError:
            waited = True
        else:
            waited = False
        hold.release()
        await asyncio.gather(*turns)
        return waited


async def full_cache(lab: Lab) -> bool:
    async with lab.fake(n_cells=1000) as (engine, proxy):
        pool = await proxy.client.post("/polykv/pools", json={"tokens": [1] * 500, "pin": True})
        pool.raise_for_status()
        answer = await proxy.client.post(COMPLETION, json={"prompt": "x" * 600, "n_predict": 4})
        told_here = engine.requests(COMPLETION) == []
    assert told_here == (answer.json().get("error", {}).get("code") == "kv_exhausted")
    return told_here


async def gate(lab: Lab) -> bool:
    async with lab.fake() as (engine, proxy):
        engine.token_s = 0.01
        await proxy.client.post("/polykv/pools", json={"prompt": ROOT, "name": "root"})
        body = {"prompt": ROOT + "On.", "n_predict": 2000, "session_id": "busy", "stream": True}
        busy = asyncio.create_task(proxy.client.post(COMPLETION, json=body))
        await until(lambda: any(slot.n_decoded > 60 for slot in engine.slots), 15)
        answer = await proxy.client.post(COMPLETION, json={"prompt": ROOT + "Go.", "n_predict": 2, "session_id": "new"})
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    assert answer.status_code in (200, 429)
    return answer.status_code == 429


async def connect_twice(lab: Lab) -> bool:
    tried = []
    request = EngineClient._request

    async def counted(self: EngineClient, method: str, *args: object, **kw: object) -> object:
        if method == "POST":
            tried.append(method)
        return await request(self, method, *args, **kw)

    lab.monkeypatch.setattr(EngineClient, "_request", counted)
    async with lab.alone() as proxy:
        await exchange(proxy.url, chat())
    twice = len(tried)
    async with FakeEngine(hooks=False) as engine, lab._make_proxy(engine.url, **lab.settings) as proxy:
        await say(proxy, "a")
        return twice == 2 and len(engine.requests(CHAT)) == 1


REQUESTS: dict[str, Check] = {
    "own-hop": own_hop,
    "hop-headers": hop_headers,
    "expect": expect,
    "client-keys": client_keys,
    "upstream-key": upstream_key,
    "own-headers": own_headers,
    "spelling": spelling,
    "latin-1": latin_1,
    "origin-form": origin_form,
    "plain-views": plain_views,
    "fields": fields,
    "slot": slot,
    "attach": attach,
    "tool-choice": tool_choice,
    "pinned-lines": pinned_lines,
    "own-requests": own_requests,
    "pools": pools,
    "parked": parked,
    "body-first": body_first,
    "slot-line": slot_line,
    "shared-prefill": shared_prefill,
    "full-cache": full_cache,
    "gate": gate,
    "connect-twice": connect_twice,
}
