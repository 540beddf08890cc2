"""A request meets a pool: in all dialects, with proof from the engine's side."""

import asyncio
from typing import Any

import orjson
import pytest

from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, SYSTEM, body_of, receipt_at, receipts_in
from tests.relay.raw import until

CHAT = "/v1/chat/completions"


async def prefix_tokens(engine: FakeEngine, path: str) -> list[int]:
    """What two questions in this dialect have in common."""
    a, b = (engine.template.render(path, body_of(path, text))[0][0] for text in ("Apples?", "Zebras!"))
    n = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return a[:n]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_named_pool_in_every_dialect(engine: FakeEngine, explicit: Proxy, path: str, stream: bool) -> None:
    tokens = await prefix_tokens(engine, path)
    pool = await explicit.pool(tokens=tokens, name="agents")
    body = body_of(path, stream=stream, pool_id=pool["pool_id"], session_id="s1")
    answer = await explicit.client.post(path, json=body)
    assert answer.status_code == 200, answer.text

    receipt = receipt_at(path, answer.content, stream=stream)
    n_prompt = len(engine.template.render(path, body)[0][0])
    assert receipt["pool_id"] == pool["pool_id"]
    assert receipt["session_id"] == "s1"
    assert receipt["prefix_n_tokens"] == receipt["cached_n_tokens"] == len(tokens)
    assert receipt["miss_reason"] is None
    assert receipt["ctx_used"] == n_prompt + 4
    assert receipt["ctx_total"] == engine.n_ctx_slot
    assert receipt["ctx_headroom_tokens"] == engine.n_ctx_slot - n_prompt - 4
    assert answer.headers["x-session-id"] == "s1"
    assert answer.headers["x-pool-id"] == str(pool["pool_id"])
    assert answer.headers["x-cached-prefix-tokens"] == str(len(tokens))
    assert answer.headers["x-request-id"]

    (received,) = engine.requests(path)
    seen = received.json()
    assert not {"pool_id", "session_id"} & seen.keys()
    assert seen["shared_pool_slot"] == pool["seq_id"]
    assert seen["id_slot"] in range(4)
    assert "x-session-id" not in received.headers


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_apart_from_the_object_the_reply_is_the_engines_own(
    engine: FakeEngine, explicit: Proxy, path: str, stream: bool
) -> None:
    direct = await explicit.client.post(engine.url + path, json=body_of(path, stream=stream))
    through = await explicit.client.post(path, json=body_of(path, stream=stream, session_id="s"))
    assert len(receipts_in(orjson.loads(through.content) if not stream else [])) == (0 if stream else 1)

    def shape(raw: bytes) -> list[Any]:
        chunks = [c for c in raw.split(b"\n") if c] if stream else [raw]
        return [shape_of(orjson.loads(c.removeprefix(b"data: "))) if b"{" in c else c for c in chunks]

    assert shape(through.content) == shape(direct.content)
    assert {k for k in through.headers if not k.startswith("x-")} >= {k for k in direct.headers if k != "date"}


def shape_of(value: Any) -> Any:
    """Keys and types in order, without our object and what differs between any two runs."""
    if isinstance(value, dict):
        return [
            (k, shape_of(v)) for k, v in value.items() if k not in ("polykv", "timings", "created", "id", "id_slot")
        ]
    if isinstance(value, list):
        return [shape_of(v) for v in value]
    return value if isinstance(value, str) else type(value).__name__


async def test_fields_as_headers(engine: FakeEngine, explicit: Proxy) -> None:
    tokens = await prefix_tokens(engine, CHAT)
    pool = await explicit.pool(tokens=tokens, name="agents")
    headers = {"X-Pool-Id": "agents", "X-Session-Id": "s", "X-Polykv-Strict": "1", "X-Other": "kept"}
    answer = await explicit.client.post(CHAT, json=body_of(CHAT), headers=headers)
    assert answer.json()["polykv"]["pool_id"] == pool["pool_id"]
    (received,) = engine.requests(CHAT)
    assert received.headers["x-other"] == "kept"
    assert not {"x-pool-id", "x-session-id", "x-polykv-strict"} & received.headers.keys()
    # Nothing was removed from the body, so its bytes are what the client sent, with ours in front of the last brace.
    assert received.body.startswith(answer.request.content[:-1])


async def test_auto_mode_attaches_to_the_deepest_match(engine: FakeEngine, proxy: Proxy) -> None:
    tokens = await prefix_tokens(engine, CHAT)
    root = await proxy.pool(tokens=tokens[:100])
    leaf = await proxy.fork(root["pool_id"], tokens)
    answer = await proxy.client.post(CHAT, json=body_of(CHAT))
    assert answer.json()["polykv"]["pool_id"] == leaf["pool_id"]
    assert answer.json()["polykv"]["cached_n_tokens"] == len(tokens)


async def test_auto_mode_without_a_match_is_off_path(engine: FakeEngine, proxy: Proxy) -> None:
    answer = await proxy.client.post(CHAT, json=body_of(CHAT))
    assert receipts_in(answer.json()) == []
    assert not [h for h in answer.headers if h.startswith(("x-session", "x-pool", "x-cached"))]
    (received,) = engine.requests(CHAT)
    added = received.body.removeprefix(answer.request.content[:-1])
    assert added == b',"id_slot":%d}' % received.json()["id_slot"]
    assert len(proxy.control.sessions) == 1
    (session,) = proxy.control.sessions
    assert session.ctx_used is not None


async def test_explicit_mode_without_a_field_sends_the_same_bytes(engine: FakeEngine, explicit: Proxy) -> None:
    await explicit.pool(tokens=await prefix_tokens(engine, CHAT))
    answer = await explicit.client.post(CHAT, json=body_of(CHAT))
    (received,) = engine.requests(CHAT)
    assert received.body == answer.request.content
    assert len(explicit.control.sessions) == 0


async def test_a_session_keeps_its_slot_and_another_gets_another(engine: FakeEngine, proxy: Proxy) -> None:
    for turn in range(3):
        for who in ("a", "b", "c"):
            await proxy.chat(f"{who} {turn}", session_id=who)
    slots = [r.json()["id_slot"] for r in engine.requests(CHAT)]
    assert len(set(slots[:3])) == 3
    assert slots[3:6] == slots[6:9] == slots[:3]


async def test_an_unnamed_agent_is_recognised_by_what_it_says(engine: FakeEngine, proxy: Proxy) -> None:
    histories: list[list[dict[str, Any]]] = [[{"role": "user", "content": name}] for name in ("one", "two")]
    for _ in range(3):
        for messages in histories:
            answer = await proxy.client.post(CHAT, json={"messages": messages, "max_tokens": 4})
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    slots = [r.json()["id_slot"] for r in engine.requests(CHAT)]
    assert slots[0::2] == [slots[0]] * 3
    assert slots[1::2] == [slots[1]] * 3
    assert slots[0] != slots[1]
    assert len(proxy.control.sessions) == 2


async def test_unknown_pool_is_served_unpooled_and_strict_is_a_404(engine: FakeEngine, explicit: Proxy) -> None:
    answer = await explicit.chat(pool_id=99)
    assert answer.status_code == 200
    assert answer.json()["polykv"]["miss_reason"] == "no_pool"
    assert "x-pool-id" not in answer.headers
    for path, kind in ((CHAT, "not_found_error"), ("/v1/messages", "not_found_error")):
        answer = await explicit.chat(path=path, pool_id="gone", headers={"x-polykv-strict": "1"})
        assert answer.status_code == 404
        body = answer.json()
        assert (body["error"]["code"], body["error"]["type"], body["src"]) == ("pool_not_found", kind, "polykv_proxy")
        assert (body.get("type") == "error") == (path == "/v1/messages")


async def test_explicit_prefix_longer_than_the_match_is_a_400_with_the_place(
    engine: FakeEngine, explicit: Proxy
) -> None:
    tokens = await prefix_tokens(engine, CHAT)
    pool = await explicit.pool(tokens=tokens)
    body = body_of(CHAT, pool_id=pool["pool_id"], shared_prefix_n_tokens=len(tokens) + 1)
    answer = await explicit.client.post(CHAT, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["divergence_pos"]) == ("prefix_mismatch", len(tokens))
    answer = await explicit.client.post(CHAT, json=body | {"shared_prefix_n_tokens": 40})
    assert answer.json()["polykv"]["prefix_n_tokens"] == 40
    assert engine.requests(CHAT)[-1].json()["shared_prefix_n_tokens"] == 40


@pytest.mark.parametrize(
    ("fields", "expected_slot"),
    [({"cache_prompt": False}, None), ({"id_slot": 2}, 2), ({"lora": [{"id": 0, "scale": 1.0}]}, None)],
)
async def test_incompatible_requests_go_unpooled(
    engine: FakeEngine, explicit: Proxy, fields: dict[str, Any], expected_slot: int | None
) -> None:
    pool = await explicit.pool(tokens=await prefix_tokens(engine, CHAT))
    answer = await explicit.client.post(CHAT, json=body_of(CHAT, pool_id=pool["pool_id"], **fields))
    assert answer.json()["polykv"]["miss_reason"] == "incompatible"
    assert answer.json()["polykv"]["pool_id"] is None
    seen = engine.requests(CHAT)[-1].json()
    assert "shared_pool_slot" not in seen
    assert {k: seen[k] for k in fields} == fields
    assert expected_slot is None or seen["id_slot"] == expected_slot


async def test_a_reply_in_one_piece_is_seen_where_it_runs(engine: FakeEngine, proxy: Proxy) -> None:
    """Its head comes with its end; until then the session is not in the pool of its last turn."""
    first = await proxy.pool(tokens=list(b"first pool"), name="first")
    second = await proxy.pool(tokens=list(b"second pool"), name="second")
    body = {"prompt": "first pool!", "n_predict": 1, "session_id": "agent", "pool_id": "first"}
    assert (await proxy.client.post("/completion", json=body)).json()["polykv"]["pool_id"] == first["pool_id"]
    engine.token_s = 0.02
    body = {"prompt": "second pool!", "n_predict": 200, "session_id": "agent", "pool_id": "second"}
    running = asyncio.create_task(proxy.client.post("/completion", json=body))
    await until(lambda: any(slot.state == "generating" for slot in engine.slots))
    shown = (await proxy.client.get("/polykv/sessions/agent")).json()
    pools = (await proxy.client.get("/polykv/pools")).json()["pools"]
    assert not running.done()
    assert (shown["pool_id"], shown["state"]) == (second["pool_id"], "decoding")
    where = {pool["name"]: [(s["session_id"], s["state"]) for s in pool["sessions"]] for pool in pools}
    assert where == {"first": [], "second": [("agent", "decoding")]}
    running.cancel()
    await asyncio.wait([running])


async def test_several_choices_take_several_slots_and_carry_one_object(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold, times=None)
    many = asyncio.create_task(proxy.chat(n=3))
    await hold.reached()
    assert proxy.control.slots.n_held == 3
    one = asyncio.create_task(proxy.chat("x"))
    other = asyncio.create_task(proxy.chat("y"))
    await until(lambda: proxy.relay.desk.n_waiting == 1)
    hold.release()
    answers = await asyncio.gather(many, one, other)
    assert len(answers[0].json()["choices"]) == 3
    assert not any(proxy.at_rest().values())


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_of_prompts_shares_one_pool(engine: FakeEngine, explicit: Proxy, path: str, stream: bool) -> None:
    pool = await explicit.pool(tokens=await prefix_tokens(engine, path))
    prompts = [SYSTEM + t for t in ("Apples?", "Pears?", "Zebras!")]
    body = body_of(path, stream=stream, pool_id=pool["pool_id"]) | {"prompt": prompts}
    answer = await explicit.client.post(path, json=body)
    receipt = receipt_at(path, answer.content, stream=stream)
    assert receipt["pool_id"] == pool["pool_id"]
    assert receipt["cached_n_tokens"] == pool["prefix_len"]
    assert "id_slot" not in engine.requests(path)[-1].json()


async def test_a_named_tool_choice_reaches_the_engine_as_required(engine: FakeEngine, explicit: Proxy) -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    await explicit.chat(tool_choice=choice, session_id="s")
    assert engine.requests(CHAT)[-1].json()["tool_choice"] == "required"
    await explicit.chat(tool_choice=choice)
    assert engine.requests(CHAT)[-1].json()["tool_choice"] == choice


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_bad_fields_and_bad_json_are_400_in_the_dialects_shape(proxy: Proxy, path: str) -> None:
    for content in (b'{"pool_id": true}', b'{"pool_id": 1,,}'):
        answer = await proxy.client.post(path, content=content)
        assert answer.status_code == 400
        body = answer.json()
        assert body["error"]["type"] == "invalid_request_error"
        assert (body.get("type") == "error") == (path == "/v1/messages")
    assert body["error"]["code"] == "invalid_json"
    assert body["error"]["position"] == 14


async def test_too_large_a_body_is_a_413_with_and_without_a_length(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async def pieces() -> Any:
        for _ in range(8):
            yield b" " * 1000

    async with make_proxy(engine.url, max_body_bytes=4096) as proxy:
        for content in (b" " * 5000, pieces()):
            answer = await proxy.client.post(CHAT, content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        assert (await proxy.client.post("/tokenize", json={"content": "x" * 9000})).status_code == 200
    assert engine.requests(CHAT) == []


async def test_the_engines_own_errors_pass_unchanged(engine: FakeEngine, explicit: Proxy) -> None:
    engine.n_ctx_slot = 50
    direct = await explicit.client.post(engine.url + CHAT, json=body_of(CHAT))
    through = await explicit.client.post(CHAT, json=body_of(CHAT, session_id="s"))
    assert (through.status_code, through.content) == (direct.status_code, direct.content) == (400, direct.content)


async def test_a_plain_llama_server_behind_it(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(hooks=False) as engine, make_proxy(engine.url) as proxy:
        answer = await proxy.chat(pool_id="x", session_id="s")
        assert answer.json()["polykv"]["miss_reason"] == "no_pool"
        assert not {"pool_id", "session_id"} & engine.requests(CHAT)[-1].json().keys()


async def test_the_answer_of_a_deleted_session_uses_its_pool_to_its_end(engine: FakeEngine, explicit: Proxy) -> None:
    pool = await explicit.pool(tokens=[1, 2, 3], name="agents")
    engine.token_s = 0.01
    body = {"prompt": [1, 2, 3, 4], "n_predict": 4000, "stream": True, "session_id": "s1", "pool_id": "agents"}
    async with explicit.client.stream("POST", "/completion", json=body) as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        (await explicit.client.delete("/polykv/sessions/s1")).raise_for_status()
        assert pool["pool_id"] in explicit.control.room.in_use()
        await anext(pieces)
    await until(lambda: pool["pool_id"] not in explicit.control.room.in_use())
