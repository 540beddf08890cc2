"""``/slots`` and ``/props``: the engine's own bytes, with our members put in; anything odd goes on untouched."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

import polykv_proxy
from polykv_proxy.control.policies import FIELDS as POLICY_FIELDS
from polykv_proxy.gate.policy import Policy
from polykv_proxy.relay.json_bytes import elements
from tests.fake_engine import FakeEngine
from tests.fake_engine.faults import reply
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import until

OURS = ("pool_id", "session_id", "tps_ewma", "ctx_used", "ctx_total", "ctx_headroom_tokens")
PREFIX = list(range(100, 140))
ODD = rb"""[ {"id":0 ,"n_ctx": 4096, "is_processing":false,"params":{"top_p":0.949999988079071,"min_p":5e-2,
   "seed":18446744073709551615,"stop":["}]","\"id\": 7","\u00e9"], "pool_id":["theirs"]}}
 ,{
  "id": 1, "is_processing": false, "next_token":[{"n_decoded":0}] } , {} ]
"""


def raw(body: bytes, status: int = 200) -> Any:
    return reply(status, body, headers={"Content-Type": "application/json; charset=utf-8"})


def without_ours(text: bytes) -> bytes:
    """What was put in, taken out again: always the last members of an object."""
    names = b"|".join(name.encode() for name in OURS)
    value = rb'(?:null|-?[0-9.e+-]+|"[^"]*")'
    return re.sub(rb',?"(?:' + names + rb')":' + value + rb"(?=[,\s}])", b"", text)


async def slots(proxy: Proxy) -> list[dict[str, Any]]:
    answer = await proxy.client.get("/slots")
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    entries = answer.json()
    assert all(entry.keys() >= set(OURS) for entry in entries)
    return entries


@pytest.mark.parametrize("mode", ["auto", "explicit"])
async def test_every_other_byte_stays(engine: FakeEngine, make_proxy: ProxyMaker, mode: str) -> None:
    async with make_proxy(engine.url, mode=mode) as proxy:
        engine.on("/slots", "request", raw(ODD))
        answer = await proxy.client.get("/slots?model=x", headers={"Accept-Encoding": "gzip"})
        assert engine.requests("/slots")[-1].query == "model=x"
        assert answer.headers["content-type"] == "application/json; charset=utf-8"
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert answer.headers["x-request-id"]
        assert without_ours(answer.content) == ODD
        entries = json.loads(answer.content)
        assert [entry["session_id"] for entry in entries] == [None] * 3
        assert entries[0]["params"]["pool_id"] == ["theirs"]
        assert {name: entries[2][name] for name in OURS} == dict.fromkeys(OURS)


@pytest.mark.parametrize(
    "body", [b"[1, 2]", b'{"id": 0}', b"[", b'[{"id": 0}] x', b"", b"not JSON", b"[[]]", b'[{"id": 0}, null]']
)
async def test_another_shape_goes_on_untouched(engine: FakeEngine, proxy: Proxy, body: bytes) -> None:
    engine.on("/slots", "request", raw(body))
    answer = await proxy.client.get("/slots")
    assert (answer.status_code, answer.content) == (200, body)
    assert int(answer.headers["content-length"]) == len(body)


@pytest.mark.parametrize("path", ["/slots", "/props"])
async def test_another_status_goes_on_untouched(engine: FakeEngine, proxy: Proxy, path: str) -> None:
    engine.on(path, "request", raw(b'[{"id":0}]', 501))
    answer = await proxy.client.get(path)
    assert (answer.status_code, answer.content) == (501, b'[{"id":0}]')


async def test_whose_slot_it_is(engine: FakeEngine, proxy: Proxy) -> None:
    pool = await proxy.pool(PREFIX, "desk")
    body = {"prompt": [*PREFIX, 1, 2], "n_predict": 4, "session_id": "rests", "pool_id": "desk"}
    receipt = (await proxy.client.post("/completion", json=body)).json()["polykv"]
    engine.token_s = 0.02
    running = asyncio.create_task(
        proxy.client.post("/completion", json={"prompt": [5] * 30, "n_predict": 4000, "session_id": "runs"})
    )
    await until(lambda: any(slot.n_decoded > 3 and slot.state == "generating" for slot in engine.slots))
    busy = next(slot for slot in engine.slots if slot.state == "generating")
    busy.tps_ewma = 12.5
    await proxy.control.refresh()
    entries = await slots(proxy)
    mine = {entry["session_id"]: entry for entry in entries}
    rests, runs, total = mine["rests"], mine["runs"], engine.n_ctx_slot
    assert rests["pool_id"] == pool["pool_id"]
    assert (rests["ctx_used"], rests["ctx_headroom_tokens"]) == (receipt["ctx_used"], total - receipt["ctx_used"])
    assert rests["tps_ewma"] == pytest.approx(receipt["session_tps"], abs=0.01)
    assert (runs["id"], runs["pool_id"], runs["tps_ewma"]) == (busy.id, None, 12.5)
    assert 30 < runs["ctx_used"] == total - runs["ctx_headroom_tokens"]
    assert sum(entry["session_id"] is None for entry in entries) == 2

    # The same everywhere; of a session that runs no reading is like the next.
    context = {name: rests[name] for name in ("ctx_used", "ctx_total", "ctx_headroom_tokens")}
    assert context["ctx_total"] == engine.n_ctx_slot
    polykv = (await proxy.client.get("/props")).json()["opencoti"]["polykv"]
    assert polykv["ctx_total"] == engine.n_ctx_slot
    assert polykv["slots"][rests["id"]] == {"id": rests["id"]} | context
    assert [slot["id"] for slot in polykv["slots"]] == [0, 1, 2, 3]
    for path in ("/polykv/pools/desk/capacity?session_id=rests", "/polykv/sessions/rests"):
        assert context.items() <= (await proxy.client.get(path)).json().items()
    sessions = (await proxy.client.get("/polykv/tps")).json()["sessions"]
    assert context.items() <= next(s for s in sessions if s["session_id"] == "rests").items()
    running.cancel()
    await asyncio.wait([running])


async def test_somebody_who_did_not_come_through_here_has_a_slot_without_a_session(
    engine: FakeEngine, proxy: Proxy
) -> None:
    pool = await proxy.pool(PREFIX, "desk")
    await proxy.client.post("/completion", json={"prompt": "hi", "n_predict": 2, "session_id": "rests"})
    session = proxy.control.sessions.get("rests")  # type: ignore[arg-type]
    assert session is not None
    engine.token_s = 0.02
    async with httpx.AsyncClient(base_url=engine.url, timeout=20, trust_env=False) as other:
        body = {
            "prompt": [*PREFIX, 1],
            "n_predict": 4000,
            "id_slot": session.slot_id,
            "shared_pool_slot": pool["seq_id"],
        }
        running = asyncio.create_task(other.post("/completion", json=body))
        await until(lambda: engine.slots[session.slot_id].n_decoded > 3)
        engine.slots[session.slot_id].tps_ewma = 7.5
        await proxy.control.refresh()
        entry = (await slots(proxy))[session.slot_id]
        assert (entry["session_id"], entry["pool_id"], entry["tps_ewma"]) == (None, pool["pool_id"], 7.5)
        assert 44 < entry["ctx_used"] == engine.n_ctx_slot - entry["ctx_headroom_tokens"]
        running.cancel()
        await asyncio.wait([running])


async def test_a_stock_engine_tells_what_is_known(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(hooks=False) as engine, make_proxy(engine.url) as proxy:
        entries = await slots(proxy)
        assert [entry["tps_ewma"] for entry in entries] == [None] * 4
        answer = (await proxy.client.get("/props")).json()
        assert answer["opencoti"]["polykv"]["versions"]["engine_hooks"] is False


async def test_props_have_the_policy(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    own = b'{ "total_slots": 4,"default_generation_settings":{"n_ctx":16384, "top_p":0.949999988079071}\n}\n'
    settings = {"default_target_tps": 5.5, "default_mode": "enforced", "pin_max_fraction": 0.25, "grace_ttl_s": 9}
    async with make_proxy(engine.url, **settings) as proxy:
        engine.on("/props", "request", raw(own))
        answer = await proxy.client.get("/props")
        assert int(answer.headers["content-length"]) == len(answer.content)
        added = answer.json()["opencoti"]
        assert answer.content == own.replace(
            b"}\n}", b'}\n,"opencoti":' + json.dumps(added, separators=(",", ":")).encode() + b"}"
        )
        polykv = added["polykv"]
        assert (polykv["floor"], polykv["admission"], polykv["pin"]) == (
            5.5,
            Policy(target_tps_per_session=5.5, mode="enforced").to_json() | {"n_pool_policies": 0},
            {"max_fraction": 0.25},
        )
        assert (polykv["ttl"]["grace_s"], polykv["ttl"]["session_gap_s"]) == (9, 60)
        assert polykv["versions"] == {"polykv_proxy": polykv_proxy.__version__, "engine_hooks": True}


async def test_props_without_a_default_policy(proxy: Proxy) -> None:
    await proxy.pool(PREFIX, "desk")
    await proxy.control.set_policy("desk", Policy(target_tps_per_session=2))
    polykv = (await proxy.client.get("/props")).json()["opencoti"]["polykv"]
    assert polykv["floor"] is None
    assert polykv["admission"] == dict.fromkeys(POLICY_FIELDS) | {"n_pool_policies": 1}


async def test_another_opencoti_keeps_what_it_has(engine: FakeEngine, proxy: Proxy) -> None:
    engine.on("/props", "request", raw(b'{"opencoti": {"x" : 1.50, "polykv":{"old":1}} , "y":2}'))
    answer = await proxy.client.get("/props")
    assert answer.content.startswith(b'{"opencoti": {"x" : 1.50,"polykv":{"mode":"auto"')
    assert answer.content.endswith(b'} , "y":2}')
    assert b'"old"' not in answer.content
    engine.on("/props", "request", raw(b'{"opencoti": true}'))
    assert (await proxy.client.get("/props")).content == b'{"opencoti": true}'
    engine.on("/props", "request", raw(b"{}"))
    assert (await proxy.client.get("/props")).json().keys() == {"opencoti"}


async def test_an_engine_that_is_gone_is_said_in_our_words(engine: FakeEngine, proxy: Proxy) -> None:
    await engine.kill()
    answer = await proxy.client.get("/slots")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"[]", []),
        (b' [ {"a":"]}{"} ,{} ]', [b'{"a":"]}{"}', b"{}"]),
        (b'[[1],{"a":[{"b":[]}]},2]', [b"[1]", b'{"a":[{"b":[]}]}']),
    ],
)
def test_elements_of_an_array(text: bytes, found: list[bytes]) -> None:
    assert [text[start:end] for start, end in elements(text)] == found
