"""§4: the admission policy of a pool, and its capacity, over HTTP."""

import asyncio
from typing import Any

import pytest

from tests.contract.conftest import ask, error_of, made, refused
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker

TEXT = "You are one of many agents who share this text. "
DEFAULTS = {
    "mode": "advisory",
    "on_saturation": "reject",
    "guarantee_min_sessions": 1,
    "settle_tokens": 48,
    "settle_max_ms": 5000,
    "estimator": "settled",
    "max_turn_hold_ms": 0,
    "max_queue": 64,
    "queue_timeout_ms": 30000,
}
FIELDS = {"target_tps_per_session", *DEFAULTS}


async def family(proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT, name="root")
    await made(proxy, "/polykv/pools/root/fork", own_tokens=[1, 2], name="leaf")


async def admission(proxy: Proxy, ref: int | str, verb: str = "GET", body: Any = None) -> dict[str, Any]:
    answer = await proxy.client.request(verb, f"/polykv/pools/{ref}/admission", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_policy_is_set_shown_inherited_and_taken_away(proxy: Proxy) -> None:
    await family(proxy)
    nothing = {"source": "none", "inherited_from": None, **dict.fromkeys(FIELDS)}
    assert await admission(proxy, "leaf") == {"pool_id": 2, "name": "leaf", "scope": 1, **nothing}
    own = {"source": "own", "inherited_from": None, "target_tps_per_session": 5.0, **DEFAULTS}
    wanted = {"pool_id": 1, "name": "root", "scope": 1, **own}
    assert await admission(proxy, "root", "POST", {"target_tps_per_session": 5}) == wanted | {"changed": True}
    assert await admission(proxy, 1) == wanted
    assert await admission(proxy, 2) == wanted | {
        "pool_id": 2,
        "name": "leaf",
        "source": "inherited",
        "inherited_from": 1,
    }
    given = {
        "target_tps_per_session": 7.5,
        "mode": "enforced",
        "on_saturation": "queue",
        "guarantee_min_sessions": 0,
        "settle_tokens": 0,
        "settle_max_ms": 100,
        "estimator": "roofline",
        "max_turn_hold_ms": 1000,
        "max_queue": 0,
        "queue_timeout_ms": 0,
    }
    shown = await admission(proxy, 2, "POST", given)
    assert {name: shown[name] for name in FIELDS} == given
    assert (shown["source"], shown["scope"]) == ("own", 2)
    gone = await admission(proxy, 2, "DELETE")
    assert (gone["source"], gone["changed"]) == ("inherited", True)
    assert (await admission(proxy, 2, "DELETE"))["changed"] is False


async def test_a_policy_is_replaced_as_a_whole(proxy: Proxy) -> None:
    await family(proxy)
    await admission(proxy, 1, "POST", {"target_tps_per_session": 5, "mode": "enforced", "max_queue": 3})
    second = await admission(proxy, 1, "POST", {"target_tps_per_session": 6, "mode": None})
    assert {name: second[name] for name in FIELDS} == {"target_tps_per_session": 6.0, **DEFAULTS}


async def test_roofline_holds_turns_unless_it_is_told_not_to(proxy: Proxy) -> None:
    await family(proxy)
    body = {"target_tps_per_session": 5, "estimator": "roofline"}
    assert (await admission(proxy, 1, "POST", body))["max_turn_hold_ms"] == 30_000
    assert (await admission(proxy, 1, "POST", body | {"max_turn_hold_ms": 0}))["max_turn_hold_ms"] == 0


async def test_the_default_is_that_of_the_settings(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, default_target_tps=3, default_mode="enforced") as proxy:
        await family(proxy)
        shown = await admission(proxy, "leaf")
        assert (shown["source"], shown["inherited_from"], shown["mode"]) == ("default", "default", "enforced")
        assert shown["target_tps_per_session"] == 3


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "target_tps_per_session", "is missing"),
        ({"target_tps_per_session": None}, "target_tps_per_session", "is missing"),
        ({"target_tps_per_session": 0}, "target_tps_per_session", "more than 0"),
        ({"target_tps_per_session": -1.5}, "target_tps_per_session", "more than 0"),
        ({"target_tps_per_session": 1e7}, "target_tps_per_session", "at most 1,000,000"),
        ({"target_tps_per_session": "5"}, "target_tps_per_session", "must be a number"),
        ({"target_tps_per_session": True}, "target_tps_per_session", "must be a number"),
        ({"target_tps_per_session": [5]}, "target_tps_per_session", "must be a number"),
        ({"mode": "strict"}, "mode", "must be one of advisory, enforced"),
        ({"mode": ["enforced"]}, "mode", "must be one of advisory, enforced"),
        ({"on_saturation": "wait"}, "on_saturation", "must be one of reject, warn, queue"),
        ({"estimator": "best"}, "estimator", "must be one of settled, roofline"),
        ({"guarantee_min_sessions": -1}, "guarantee_min_sessions", "from 0 to 10000"),
        ({"guarantee_min_sessions": 1.0}, "guarantee_min_sessions", "must be an integer"),
        ({"settle_tokens": True}, "settle_tokens", "must be an integer"),
        ({"settle_max_ms": "100"}, "settle_max_ms", "must be an integer"),
        ({"max_turn_hold_ms": 3_600_001}, "max_turn_hold_ms", "from 0 to 3600000"),
        ({"max_queue": 100_001}, "max_queue", "from 0 to 100000"),
        ({"queue_timeout_ms": 10**15}, "queue_timeout_ms", "from 0 to 3600000"),
        ({"settle_token": 5}, "settle_token", "unknown field 'settle_token'; there are: target_tps_per_session, "),
    ],
)
async def test_what_is_wrong_with_a_policy_is_named(proxy: Proxy, body: Any, param: str, said: str) -> None:
    await family(proxy)
    whole = body if param == "target_tps_per_session" else {"target_tps_per_session": 5} | body
    answer = await proxy.client.post("/polykv/pools/1/admission", json=whole)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert said in error["message"]
    assert (await admission(proxy, 1))["source"] == "none"


@pytest.mark.parametrize(
    ("raw", "code"),
    [(b"", "invalid_json"), (b"{", "invalid_json"), (b"[5]", "invalid_request"), (b"5", "invalid_request")]
    + [(b'{"target_tps_per_session": %s}' % n, "invalid_json") for n in (b"NaN", b"Infinity")]
    + [(b'{"target_tps_per_session": 1e400}', "invalid_json")],
)
async def test_what_is_no_policy_at_all(proxy: Proxy, raw: bytes, code: str) -> None:
    await family(proxy)
    answer = await proxy.client.post("/polykv/pools/1/admission", content=raw)
    assert (answer.status_code, error_of(answer)["code"]) == (400, code)


async def test_a_pool_that_is_not_there(proxy: Proxy) -> None:
    for verb, body in (("GET", None), ("POST", {"target_tps_per_session": 5}), ("DELETE", None)):
        assert await refused(proxy, verb, "/polykv/pools/nobody/admission", body) == (404, "pool_not_found")
    await family(proxy)
    await admission(proxy, "leaf", "POST", {"target_tps_per_session": 5})
    await proxy.client.delete("/polykv/pools/leaf")
    assert await refused(proxy, "GET", "/polykv/pools/2/admission") == (404, "pool_not_found")


async def test_policies_can_be_set_while_the_engine_is_away(engine: FakeEngine, proxy: Proxy) -> None:
    await family(proxy)
    await engine.kill()
    assert (await admission(proxy, 1, "POST", {"target_tps_per_session": 5}))["source"] == "own"
    assert (await admission(proxy, 2))["inherited_from"] == 1


CAPACITY = {
    *("can_admit", "projected_mean_tps_if_admitted", "headroom_sessions", "kv_headroom_pct", "reason"),
    *("settling", "settle_remaining_ms", "n_warming", "n_pool_sessions", "guaranteed", "projected_mean_tps_model"),
    *("projected_mean_tps_measured", "drop_per_admit_ewma", "known_session", "compaction_pressure"),
    *("seq_ids_used", "seq_ids_max", "projected_idle_estimate"),
    *("kv_streams_total", "kv_streams_free", "kv_cells_per_stream", "ctx_used", "ctx_total", "ctx_headroom_tokens"),
}


async def capacity(proxy: Proxy, ref: int | str, **query: Any) -> dict[str, Any]:
    answer = await proxy.client.get(f"/polykv/pools/{ref}/capacity", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_capacity_has_the_fields_of_the_contract(engine: FakeEngine, proxy: Proxy) -> None:
    await family(proxy)
    found = await capacity(proxy, "leaf")
    assert found.keys() >= CAPACITY
    assert (found["pool_id"], found["name"], found["can_admit"], found["reason"]) == (2, "leaf", True, "ok")
    assert (found["seq_ids_used"], found["seq_ids_max"]) == (2, engine.max_pools)
    assert (found["n_pool_sessions"], found["n_active"], found["compaction_pressure"]) == (0, 0, 0)
    pools = (await proxy.client.get("/polykv/pools")).json()["pools"]
    leaf = next(pool["prefix_len"] for pool in pools if pool["name"] == "leaf")  # what a new session begins with
    left = engine.n_ctx_slot - leaf
    assert (found["ctx_used"], found["ctx_total"], found["ctx_headroom_tokens"]) == (leaf, engine.n_ctx_slot, left)
    n_used = engine.cache.used()
    assert found["kv_headroom_pct"] == 100  # nobody uses the pools: a new session could have their cells
    assert n_used > 0
    unknown = ("mean_active_tps", "projected_mean_tps_if_admitted", "drop_per_admit_ewma", "settle_remaining_ms")
    assert [found[name] for name in (*unknown, "target_tps_per_session", "mode", "estimator")] == [None] * 7
    assert [found[name] for name in found if name.startswith("kv_") and "stream" in name] == [None] * 3


async def test_a_pool_below_its_guarantee_has_room(proxy: Proxy) -> None:
    await family(proxy)
    await admission(proxy, "root", "POST", {"target_tps_per_session": 5, "mode": "enforced"})
    found = await capacity(proxy, "leaf")
    assert (found["can_admit"], found["reason"], found["guaranteed"]) == (True, "guaranteed minimum", True)
    assert (found["target_tps_per_session"], found["mode"], found["estimator"]) == (5, "enforced", "settled")


async def test_the_context_arm_counts_expected_tokens(engine: FakeEngine, proxy: Proxy) -> None:
    await family(proxy)
    await admission(proxy, "root", "POST", {"target_tps_per_session": 5, "mode": "enforced"})
    fits, wall = await capacity(proxy, 1, expected_tokens=engine.cache.n_cells), await capacity(proxy, 1)
    too_long = await capacity(proxy, 1, expected_tokens=engine.cache.n_cells + 1)
    assert (fits["can_admit"], wall["can_admit"]) == (True, True)
    assert (too_long["can_admit"], too_long["reason"]) == (False, "context headroom exhausted")
    assert too_long["headroom_sessions"] == 0


async def test_a_session_that_was_served_goes_on(proxy: Proxy) -> None:
    await family(proxy)
    await admission(proxy, "root", "POST", {"target_tps_per_session": 1e6, "guarantee_min_sessions": 0})
    await ask(proxy, TEXT + "Go.", session_id="a/1", pool_id="root")
    known, new = await capacity(proxy, 1, session_id="a/1"), await capacity(proxy, 1, session_id="b")
    assert (known["known_session"], known["can_admit"], known["reason"]) == (True, True, "continuation")
    assert new["known_session"] is False
    assert (known["n_pool_sessions"], new["n_pool_sessions"]) == (1, 1)


async def test_who_decodes_too_slowly_leaves_no_room(engine: FakeEngine, proxy: Proxy) -> None:
    """The floor is that of the pool; the rates are those of the whole engine."""
    await family(proxy)
    engine.token_s = 0.02
    body = {"prompt": TEXT + "Go.", "n_predict": 400, "session_id": "a", "pool_id": "root"}
    running = asyncio.create_task(proxy.client.post("/completion", json=body))
    policy = {"target_tps_per_session": 1e5, "guarantee_min_sessions": 0, "settle_max_ms": 0}
    await admission(proxy, "root", "POST", policy)
    found = await capacity(proxy, "root")
    for _ in range(200):
        found = await capacity(proxy, "root")
        if found["n_active"]:
            break
        await asyncio.sleep(0.02)
    assert (found["n_active"], found["n_pool_sessions"]) == (1, 1)
    assert (found["can_admit"], found["reason"]) == (False, "projected mean tps below floor")
    assert found["projected_mean_tps_if_admitted"] == found["projected_mean_tps_model"] < found["mean_active_tps"]
    assert found["headroom_sessions"] == 0
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("expected_tokens=-1", "expected_tokens"),
        ("expected_tokens=", "expected_tokens"),
        ("expected_tokens=1.5", "expected_tokens"),
        ("expected_tokens=many", "expected_tokens"),
        ("expected_tokens=2147483648", "expected_tokens"),
        ("expected_tokens=99999999999999999999", "expected_tokens"),
        ("session_id=", "session_id"),
        ("session_id=a%00b", "session_id"),
        ("session_id=" + "x" * 257, "session_id"),
    ],
)
async def test_what_is_wrong_with_a_question_is_named(proxy: Proxy, query: str, param: str) -> None:
    await family(proxy)
    answer = await proxy.client.get(f"/polykv/pools/1/capacity?{query}")
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert param in error["message"]


async def test_nobody_can_tell_the_capacity(engine: FakeEngine, proxy: Proxy) -> None:
    await family(proxy)
    assert await refused(proxy, "GET", "/polykv/pools/nobody/capacity") == (404, "pool_not_found")
    await engine.kill()
    answer = await proxy.client.get("/polykv/pools/1/capacity")
    assert (answer.status_code, error_of(answer)["code"]) == (503, "upstream_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
