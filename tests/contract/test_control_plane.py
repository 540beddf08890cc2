"""§4: the fields of every answer, and their meaning."""

import time
from typing import Any

import pytest

from tests.contract.conftest import ask, made, refused
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy

TEXT = "You are one of many agents who share this text. "

MADE = {
    "pool_id",
    "name",
    "parent",
    "branch_pos",
    "prefix_len",
    "own_n_tokens",
    "seq_id",
    "residency",
    "materialize_ms",
    "same_as",
}
TOP = {"pools", "tree_depth", "seq_ids_used", "seq_ids_max", "kv_cells_used", "kv_cells_total"}
POOL = {
    *(
        "pool_id",
        "parent",
        "branch_pos",
        "prefix_len",
        "own_kv_bytes",
        "subtree_kv_bytes",
        "warm_bytes",
        "residency",
        "pinned",
    ),
    *("last_access_ts", "children", "sessions", "name", "own_n_tokens", "seq_id", "orphaned_pin", "hits", "queries"),
}
OF_POOL = {
    *("session_id", "suffix_n_tokens", "marginal_kv_bytes", "tps_ewma", "ttft_ms", "state"),
}
RECEIPT = {
    *("request_id", "path", "dialect", "stream", "received_ts", "sent_ts", "first_token_ts", "ended_ts", "status"),
    "message",
    *("error", "decision", "session_id", "parent_session_id", "pool_id", "prefix_n_tokens", "cached_n_tokens"),
    *("prompt_n", "predicted_n", "slot_id", "displaced", "hold_ms", "held_ms", "miss_reason", "divergence"),
    *("normalised", "admission"),
}
SESSION = {
    *("session_id", "pool_id", "slot_id", "state", "tps_ewma", "ctx_used", "ctx_total", "ctx_headroom_tokens"),
}


async def test_create_and_fork_answer_with_exactly_these_fields(proxy: Proxy) -> None:
    root = await made(proxy, prompt=TEXT)
    child = await made(proxy, "/polykv/pools/1/fork", own_tokens=[1, 2])
    assert root.keys() == child.keys() == MADE
    assert (root["parent"], root["name"], child["parent"]) == (-1, None, root["pool_id"])


async def test_the_tree_has_the_fields_of_the_contract(engine: FakeEngine, proxy: Proxy) -> None:
    before_s = time.time()
    await made(proxy, prompt=TEXT, name="root")
    await made(proxy, "/polykv/pools/root/fork", own_tokens=[1, 2], name="leaf")
    await ask(proxy, TEXT + "Go.", session_id="s", pool_id="root")
    view = (await proxy.client.get("/polykv/pools")).json()
    root, leaf = view["pools"]
    assert view.keys() >= TOP
    assert root.keys() >= POOL
    assert root["sessions"][0].keys() >= OF_POOL
    assert (root["children"], leaf["children"], leaf["parent"]) == ([2], [], 1)
    assert (root["queries"], root["hits"], leaf["queries"]) == (1, 1, 0)
    assert (view["tree_depth"], view["seq_ids_used"], view["seq_ids_max"]) == (2, 2, engine.max_pools)
    assert before_s - 1 <= leaf["last_access_ts"] <= root["last_access_ts"] <= time.time() + 1


@pytest.mark.parametrize("agents", [0, 1, 3])
async def test_own_cells_of_pools_and_sessions_are_the_engines_used_cells(
    engine: FakeEngine, proxy: Proxy, agents: int
) -> None:
    await made(proxy, prompt=TEXT, name="root")
    await made(proxy, "/polykv/pools/root/fork", prompt=TEXT[:20] + "@branch", name="branch")
    for i in range(agents):
        await ask(proxy, f"{TEXT}Agent {i}, go.", session_id=f"s{i}", pool_id="root")
    view = (await proxy.client.get("/polykv/pools")).json()
    per_cell = view["kv_bytes_per_token"]
    own = sum(pool["own_kv_bytes"] for pool in view["pools"])
    marginal = sum(s["marginal_kv_bytes"] for pool in view["pools"] for s in pool["sessions"])
    assert (own + marginal) / per_cell == view["kv_cells_used"] == engine.cache.used()
    root = view["pools"][0]
    assert root["subtree_kv_bytes"] == own + marginal
    assert root["own_kv_bytes"] == len(TEXT) * per_cell


async def test_one_subtree_by_id_and_by_name(proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT, name="root")
    await made(proxy, "/polykv/pools/root/fork", own_tokens=[1], name="a")
    await made(proxy, "/polykv/pools/root/fork", own_tokens=[2], name="b")
    await made(proxy, "/polykv/pools/a/fork", own_tokens=[3], name="aa")
    for ref in ("a", "2"):
        view = (await proxy.client.get(f"/polykv/pools/{ref}")).json()
        assert [pool["name"] for pool in view["pools"]] == ["a", "aa"]
        assert view["tree_depth"] == 2


@pytest.mark.parametrize(
    ("source", "branch_pos", "kind"),
    [
        ({"tokens": [*range(50), 200]}, None, "branch"),
        ({"tokens": [*range(60), 200]}, None, "extend"),
        ({"own_tokens": [200]}, None, "extend"),
        ({"own_tokens": [200]}, 30, "early"),
        ({"tokens": [*range(50), 200]}, 30, "early"),
    ],
)
async def test_where_a_fork_branches(proxy: Proxy, source: dict[str, Any], branch_pos: int | None, kind: str) -> None:
    await made(proxy, tokens=list(range(60)))
    wish = {} if branch_pos is None else {"branch_pos": branch_pos}
    child = await made(proxy, "/polykv/pools/1/fork", **source, **wish, exact=True)
    assert child["branch_pos"] == {"branch": 50, "extend": 60, "early": 30}[kind]
    assert child["prefix_len"] == child["branch_pos"] + child["own_n_tokens"]


async def test_from_session_is_what_its_slot_holds(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT, name="root")
    await ask(proxy, TEXT + "Go.", session_id="s", pool_id="root")
    child = await made(proxy, "/polykv/pools/root/fork", from_session="s", name="child")
    assert (child["branch_pos"], child["own_n_tokens"]) == (len(TEXT), len("Go.") + 2)
    assert engine.hooks.n_processed == len(TEXT)  # no prefill for it
    for i in range(4):
        await ask(proxy, f"{i} takes a slot", session_id=f"other-{i}")
    again = {"from_session": "s"}
    assert await refused(proxy, "POST", "/polykv/pools/root/fork", again) == (409, "session_not_resident")
    assert await refused(proxy, "POST", "/polykv/pools", {"from_session": "nobody"}) == (404, "session_not_found")


async def test_sessions_say_who_is_attached_where(proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT)
    await ask(proxy, TEXT + "Go.", session_id="s")
    (listed,) = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
    session = (await proxy.client.get("/polykv/sessions/s")).json()
    assert listed == session | {"last_access_ts": listed["last_access_ts"]}
    assert session.keys() >= SESSION
    assert (session["pool_id"], session["state"], session["ctx_used"]) == (1, "idle", len(TEXT) + 5)
    dropped = await proxy.client.delete("/polykv/sessions/s")
    assert (dropped.status_code, dropped.json()["session_id"]) == (200, "s")
    assert (await proxy.client.get("/polykv/sessions")).json() == {"sessions": []}
    assert (await proxy.client.get("/polykv/pools")).json()["pools"][0]["sessions"] == []


async def test_match_says_what_a_request_would_get_and_changes_nothing(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT)
    before = (await proxy.client.get("/polykv/pools")).json()
    for asked in ({"prompt": TEXT + "Go."}, {"tokens": list((TEXT + "Go.").encode())}):
        answer = (await proxy.client.post("/polykv/match", json=asked)).json()
        wanted = {"pool_id": 1, "name": None, "prefix_n_tokens": len(TEXT), "uncached_n_tokens": 3, "miss_reason": None}
        assert answer == wanted | {"divergence": None}
        receipt = await ask(proxy, asked.get("prompt", asked.get("tokens")))
        assert (receipt["pool_id"], receipt["prefix_n_tokens"]) == (1, len(TEXT))
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert (await proxy.client.post("/polykv/match", json=chat)).json()["miss_reason"] == "no_pool"
    after = (await proxy.client.get("/polykv/pools")).json()
    assert (after["seq_ids_used"], len(after["pools"])) == (before["seq_ids_used"], 1)
    assert after["pools"][0]["queries"] == 2  # the two real ones


async def test_health_names_what_stands_in_the_way(engine: FakeEngine, proxy: Proxy) -> None:
    answer = await proxy.client.get("/polykv/health")
    health = answer.json()
    assert (answer.status_code, health["status"]) == (200, "ok")
    assert health["engine"].keys() >= {"reachable", "epoch", "hooks", "loading"}
    assert (health["pools"], health["sessions"]) == (0, 0)
    proxy.relay.drain()
    answer = await proxy.client.get("/polykv/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")


async def test_release_answers_what_is_freed_now_and_what_later(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT, name="root")
    await made(proxy, "/polykv/pools/root/fork", own_tokens=[1, 2], name="a")
    await made(proxy, "/polykv/pools/a/fork", own_tokens=[3], name="b")
    await ask(proxy, TEXT + "Go.", session_id="s", pool_id="root")
    answer = (await proxy.client.delete("/polykv/pools/root?recursive=true")).json()
    assert answer["released"] == [3, 2, 1]  # leaves first
    assert answer["freed_now"] == {"seq_ids": 3, "kv_cells": 3, "kv_bytes": 3 * 1024}
    later = {"kv_cells": len(TEXT), "kv_bytes": len(TEXT) * 1024, "sessions": ["s"]}
    assert answer["freed_later"] == later
    assert engine.ready_pools() == []
    assert engine.cache.used() == len(TEXT) + 5  # the session's slot still holds them


async def test_slots_props_and_metrics_are_the_engines(proxy: Proxy) -> None:
    assert len((await proxy.client.get("/slots")).json()) == 4
    assert (await proxy.client.get("/props")).json()["total_slots"] == 4
    assert "llamacpp:tokens_predicted_total" in (await proxy.client.get("/metrics")).text


async def test_what_an_engine_that_is_away_holds_is_unknown(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT)
    await engine.kill()
    view = (await proxy.client.get("/polykv/pools")).json()
    (pool,) = view["pools"]
    assert [pool[k] for k in ("residency", "seq_id", "own_kv_cells", "own_kv_bytes", "subtree_kv_bytes")] == [None] * 5
    assert [view[k] for k in ("seq_ids_used", "kv_cells_used", "kv_cells_total")] == [None] * 3
    freed = (await proxy.client.delete("/polykv/pools/1")).json()["freed_now"]
    assert freed == {"seq_ids": None, "kv_cells": None, "kv_bytes": None}


async def test_two_answers_about_an_unchanged_tree_are_the_same(proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT)
    first, second = [(await proxy.client.get("/polykv/pools")).json() for _ in range(2)]
    assert first == second


async def test_receipts_of_the_last_requests_hold_no_prompt(proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT)
    await ask(proxy, TEXT + "Go.", session_id="s")
    answer = await proxy.client.get("/polykv/requests", params={"last": 1})
    (receipt,) = answer.json()["requests"]
    assert receipt.keys() == RECEIPT
    assert (receipt["session_id"], receipt["pool_id"], receipt["decision"]) == ("s", 1, "attached")
    assert receipt["prefix_n_tokens"] == receipt["cached_n_tokens"] == len(TEXT)
    assert TEXT[:10] not in answer.text
