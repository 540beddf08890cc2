"""§3: fields, headers, the receipt, and why a prefix was missed."""

from typing import Any

import pytest

from tests.contract.conftest import RECEIPT, ask, error_of, made
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, body_of, receipt_at

TEXT = "You are one of many agents who share this text. "
ATTACHABLE = [
    "/completion",
    "/completions",
    "/v1/completions",
    "/chat/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
]
OURS = {"pool_id", "session_id", "overcommit"}


@pytest.mark.parametrize("path", ATTACHABLE)
async def test_fields_are_for_us_and_the_engine_gets_its_own_instead(
    engine: FakeEngine, explicit: Proxy, path: str
) -> None:
    await explicit.pool(tokens=engine.template.render(path, body_of(path))[0][0][:20])
    fields = {"pool_id": 1, "session_id": "s", "shared_prefix_n_tokens": 7, "overcommit": True}
    answer = await explicit.client.post(path, json=body_of(path, **fields))
    assert answer.status_code == 200, answer.text
    (received,) = engine.requests(path)
    seen = received.json()
    assert not OURS & seen.keys()
    assert (seen["shared_prefix_n_tokens"], seen["shared_pool_epoch"]) == (7, engine.epoch)
    assert {"shared_pool_slot", "shared_pool_gen", "id_slot"} <= seen.keys()
    assert {k: v for k, v in seen.items() if not k.startswith("shared_") and k != "id_slot"} == body_of(path)
    receipt = receipt_at(path, answer.content, stream=False)
    assert (receipt["prefix_n_tokens"], receipt["cached_n_tokens"]) == (7, 7)
    assert answer.headers["x-cached-prefix-tokens"] == "7"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_receipt_has_exactly_the_fields_of_the_contract(proxy: Proxy, path: str, stream: bool) -> None:
    answer = await proxy.client.post(path, json=body_of(path, stream=stream, session_id="s"))
    receipt = receipt_at(path, answer.content, stream=stream)
    assert receipt.keys() == RECEIPT
    assert (receipt["session_id"], receipt["sessions_remaining"], receipt["hold_ms"]) == ("s", None, 0)
    assert receipt["ctx_headroom_tokens"] == receipt["ctx_total"] - receipt["ctx_used"]
    assert receipt["session_tps"] is None or receipt["session_tps"] > 0


async def test_response_headers_pooled_unpooled_and_untouched(proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT)

    async def own_headers(**fields: Any) -> set[str]:
        answer = await proxy.client.post("/completion", json={"n_predict": 2, **fields})
        return {name for name in answer.headers if name.startswith("x-")}

    always = {"x-request-id", "x-session-id", "x-cached-prefix-tokens"}
    assert await own_headers(prompt=TEXT + "Go.", stream=True) == always | {"x-pool-id"}  # attached by itself
    assert await own_headers(prompt=TEXT + "Go.", session_id="s", stream=True) == always | {"x-pool-id"}
    assert await own_headers(prompt=TEXT + "On.", session_id="s") == always | {"x-pool-id", "x-session-tps"}
    assert await own_headers(prompt="Other", session_id="t", stream=True) == always
    assert await own_headers(prompt="Other") == {"x-request-id"}


async def test_session_tps_in_the_header_of_a_stream_is_the_last_known(proxy: Proxy) -> None:
    body = {"prompt": "hello", "n_predict": 4, "session_id": "s", "stream": True}
    first = await proxy.client.post("/completion", json=body)
    second = await proxy.client.post("/completion", json=body)
    assert "x-session-tps" not in first.headers
    known = receipt_at("/completion", first.content, stream=True)["session_tps"]
    assert float(second.headers["x-session-tps"]) == pytest.approx(known)


async def test_body_beats_header(proxy: Proxy) -> None:
    for name in ("one", "two"):
        await made(proxy, prompt=f"{TEXT}{name}", name=name)
    headers = {"x-pool-id": "one", "x-session-id": "of-header"}
    body = {"prompt": TEXT + "two", "n_predict": 1}
    by_header = await proxy.client.post("/completion", json=body, headers=headers)
    both = {**body, "pool_id": "two", "session_id": "of-body"}
    by_body = await proxy.client.post("/completion", json=both, headers=headers)
    assert (by_header.headers["x-pool-id"], by_header.headers["x-session-id"]) == ("1", "of-header")
    assert (by_body.headers["x-pool-id"], by_body.headers["x-session-id"]) == ("2", "of-body")


@pytest.mark.parametrize(
    ("headers", "session_id", "parent"),
    [
        ({"x-claude-code-session-id": "c"}, "c", None),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}, "c/a", "c"),
        (
            {
                "x-claude-code-session-id": "c",
                "x-claude-code-agent-id": "a",
                "x-claude-code-parent-agent-id": "p",
            },
            "c/a",
            "c/p",
        ),
        ({"x-session-affinity": "o"}, "o", None),
        ({"session-id": "x"}, "x", None),
        ({"x-conversation-id": "v"}, "v", None),
        ({"x-session-affinity": "agent", "x-session-id": "ours"}, "ours", None),
    ],
)
async def test_agents_headers_say_whose_turn_it_is(
    engine: FakeEngine, proxy: Proxy, headers: dict[str, str], session_id: str, parent: str | None
) -> None:
    await proxy.client.post("/completion", json={"prompt": "hi", "n_predict": 1}, headers=headers)
    (session,) = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
    assert (session["session_id"], session["parent_session_id"], session["named"]) == (session_id, parent, True)
    # They are the agent's own, so the engine sees them; x-session-id is ours.
    seen = engine.requests("/completion")[-1].headers
    assert {name for name in headers if name in seen} == headers.keys() - {"x-session-id"}


async def test_legacy_slot_names_a_pools_sequence_or_a_slots_context(engine: FakeEngine, proxy: Proxy) -> None:
    pool = await made(proxy, prompt=TEXT)
    receipt = await ask(proxy, TEXT + "Go.", shared_pool_slot=pool["seq_id"])
    assert (receipt["pool_id"], receipt["miss_reason"]) == (pool["pool_id"], None)
    assert (await ask(proxy, "Another beginning, of a slot.", id_slot=3, session_id="s"))[
        "miss_reason"
    ] == "incompatible"
    context = len("Another beginning, of a slot.")
    receipt = await ask(proxy, "Another beginning, of a slot. And more.", shared_pool_slot=3)
    assert receipt["pool_id"] not in (None, pool["pool_id"])
    assert receipt["cached_n_tokens"] >= context
    assert (await ask(proxy, TEXT, shared_pool_slot=engine.pools[-1].seq))["miss_reason"] == "no_pool"


@pytest.mark.parametrize("path", PATHS)
async def test_strict_and_too_long_a_prefix_in_the_dialects_shape(proxy: Proxy, path: str) -> None:
    await made(proxy, prompt=TEXT)
    strict = await proxy.client.post(path, json=body_of(path, pool_id="nobody"), headers={"x-polykv-strict": "1"})
    long = await proxy.client.post(path, json=body_of(path, pool_id=1, shared_prefix_n_tokens=9999))
    assert (strict.status_code, error_of(strict)["code"]) == (404, "pool_not_found")
    assert (long.status_code, error_of(long)["code"]) == (400, "prefix_mismatch")
    assert isinstance(error_of(long)["divergence_pos"], int)
    for answer in (strict, long):
        assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)


MEDIA = {"prompt_string": TEXT + "Go.", "multimodal_data": ["AAAA"]}


@pytest.mark.parametrize(
    ("reason", "prompt", "fields"),
    [
        (None, TEXT + "Go.", {"pool_id": "base"}),
        (None, TEXT[:20], {"pool_id": "base"}),
        (None, [TEXT + "Go.", TEXT + "On."], {"pool_id": "base"}),
        ("diverged", TEXT[:20] + "@", {"pool_id": "base"}),
        ("diverged", "@ nothing in common", {"pool_id": "base"}),
        ("no_pool", TEXT + "Go.", {"pool_id": "nobody"}),
        ("no_pool", TEXT + "Go.", {"pool_id": 77}),
        ("incompatible", TEXT + "Go.", {"pool_id": "base", "cache_prompt": False}),
        ("incompatible", TEXT + "Go.", {"pool_id": "base", "id_slot": 1}),
        ("incompatible", TEXT + "Go.", {"pool_id": "base", "lora": [{"id": 0, "scale": 1.0}]}),
        ("incompatible", [TEXT + "Go.", "@ nothing in common"], {"pool_id": "base"}),
        ("incompatible", MEDIA, {"pool_id": "base"}),
    ],
)
async def test_miss_reason(proxy: Proxy, reason: str | None, prompt: Any, fields: dict[str, Any]) -> None:
    await made(proxy, prompt=TEXT, name="base")
    assert (await ask(proxy, prompt, **fields))["miss_reason"] == reason


async def test_miss_reason_of_a_released_pool_and_of_one_that_cannot_come_back(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    async with FakeEngine(max_pools=1) as small, make_proxy(small.url) as proxy:
        await made(proxy, prompt=TEXT, name="base")
        await small.restart()
        await proxy.control.refresh()
        await made(proxy, prompt="It has the only sequence now.", pin=True)
        assert (await ask(proxy, TEXT + "Go.", pool_id="base"))["miss_reason"] == "not_resident"
        await proxy.client.delete("/polykv/pools/base")
        assert (await ask(proxy, TEXT + "Go.", pool_id="base"))["miss_reason"] == "no_pool"


async def test_miss_reason_of_a_model_that_cannot_share(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(share="a sliding window without --swa-full") as engine, make_proxy(engine.url) as proxy:
        receipt = await ask(proxy, TEXT, pool_id=1)
        assert (receipt["pool_id"], receipt["miss_reason"]) == (None, "swa_or_recurrent")


async def test_own_slot_is_honoured_and_attached_requests_stay_out_of_it(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT)
    await ask(proxy, TEXT + "Go.", session_id="s", id_slot=2)
    seen = engine.requests("/completion")[-1].json()
    assert (seen["id_slot"], "shared_pool_slot" in seen) == (2, False)
    await ask(proxy, TEXT + "Go.", session_id="s", cache_prompt=False)
    seen = engine.requests("/completion")[-1].json()
    assert (seen["cache_prompt"], "shared_pool_slot" in seen) == (False, False)
