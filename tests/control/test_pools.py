"""The pool routes: what they answer, what they do to the engine, and every error of the contract."""

import asyncio
from itertools import pairwise

import pytest

from tests.control.conftest import eventually, planes
from tests.fake_engine import FakeEngine, Hold, drop, reply

SYSTEM = {"role": "system", "content": "You are an agent with many tools."}
USER = {"role": "user", "content": "Hello"}


async def test_create_answers_as_the_contract_says(plane):
    answer = await plane.create(tokens=[1, 2, 3], name="root", pin=True, ttl_s=5)
    assert answer.pop("materialize_ms") >= 0
    assert answer.pop("seq_id") == plane.engine.ready_pools()[0].seq
    assert answer == {
        "pool_id": 1,
        "name": "root",
        "parent": -1,
        "branch_pos": 0,
        "prefix_len": 3,
        "own_n_tokens": 3,
        "residency": "resident",
        "same_as": None,
    }
    assert plane.headers["Location"] == "/polykv/pools/1"


async def test_a_pool_with_the_tokens_of_another_says_so(plane):
    """Whichever way they were made; the oldest is named, and what is released does not count."""
    await plane.create(tokens=[1, 2, 3], name="root")
    assert (await plane.create(tokens=[1, 2, 3]))["same_as"] == 1
    assert (await plane.create(tokens=[1, 2, 3]))["same_as"] == 1
    assert (await plane.create(tokens=[1, 2, 3, 4]))["same_as"] is None
    assert (await plane.fork("root", own_tokens=[4]))["same_as"] == 4
    assert (await plane.fork("root", tokens=[1, 2, 5]))["same_as"] is None
    await plane.call("DELETE", "/polykv/pools/1?recursive=true")
    assert (await plane.create(tokens=[1, 2, 3]))["same_as"] == 2


async def test_prompt_and_messages_are_tokenized_by_the_engine(plane):
    assert (await plane.create(prompt="héllo"))["prefix_len"] == 6
    assert (await plane.create(prompt=[1, 2, "ab"]))["prefix_len"] == 4
    await plane.create(messages=[SYSTEM], tools=[{"name": "t"}], chat_template_kwargs={"x": 1}, name="chat")
    engine = plane.engine
    pool = engine.pools[2].tokens
    body = {"messages": [SYSTEM, USER], "tools": [{"name": "t"}], "chat_template_kwargs": {"x": 1}}
    lists, _ = engine.template.render("/v1/chat/completions", body)
    assert lists[0][: len(pool)] == pool
    assert len(pool) > len(SYSTEM["content"])


async def test_messages_pool_is_a_prefix_of_every_chat_that_starts_with_them(plane):
    answer = await plane.create(messages=[SYSTEM, USER, {"role": "assistant", "content": "Hi"}])
    pool = plane.engine.ready_pools()[0].tokens
    for more in ("a", "b", "Hi", "9"):
        messages = [SYSTEM, USER, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": more}]
        lists, _ = plane.engine.template.render("/v1/chat/completions", {"messages": messages})
        assert lists[0][: answer["prefix_len"]] == pool


async def test_a_template_that_refuses_some_continuations_still_gives_a_pool(plane):
    def no_two_users(messages):
        roles = [m["role"] for m in messages]
        return "roles must alternate" if any(a == b == "user" for a, b in pairwise(roles)) else None

    plane.engine.template.refuses = no_two_users
    await plane.create(messages=[SYSTEM, USER])
    plane.engine.template.refuses = lambda messages: "no"
    error = await plane.refused(400, "invalid_request", "POST", "/polykv/pools", {"messages": [SYSTEM]})
    assert error["message"] == "no"


async def test_extend_branch_and_default_branch_pos(plane):
    root = await plane.create(tokens=list(range(100)))
    child = await plane.fork(root["pool_id"], own_tokens=[7, 7])
    assert (child["parent"], child["branch_pos"], child["prefix_len"], child["own_n_tokens"]) == (1, 100, 102, 2)
    branch = await plane.fork(1, tokens=[*range(50), 200, 201])
    assert (branch["branch_pos"], branch["own_n_tokens"]) == (50, 2)
    early = await plane.fork(1, tokens=[*range(50), 200], branch_pos=20, name="early")
    assert (early["branch_pos"], early["own_n_tokens"]) == (20, 31)
    grandchild = await plane.fork("early", own_tokens=[1])
    assert (grandchild["parent"], grandchild["branch_pos"]) == (early["pool_id"], 51)
    assert plane.engine.cache.used() == 100 + 2 + 2 + 31 + 1
    assert plane.engine.hooks.n_processed == plane.engine.cache.used()


async def test_view_adds_up_to_the_engines_cells(plane):
    await plane.create(tokens=list(range(100)), name="a")
    await plane.fork("a", own_tokens=[1, 2, 3], name="b")
    status, view = await plane.call("GET", "/polykv/pools")
    assert status == 200
    assert sum(p["own_kv_bytes"] for p in view["pools"]) == plane.engine.cache.used() * 1024
    assert (view["tree_depth"], view["seq_ids_used"], view["seq_ids_max"]) == (2, 2, 16)
    assert (view["kv_cells_used"], view["kv_cells_total"]) == (103, 16384)
    status, one = await plane.call("GET", "/polykv/pools/b")
    assert [p["name"] for p in one["pools"]] == ["b"]
    assert (await plane.call("HEAD", "/polykv/pools"))[0] == 200


async def test_release_frees_and_says_what(plane):
    await plane.create(tokens=list(range(100)), name="a")
    await plane.fork("a", own_tokens=[1, 2, 3], name="b")
    error = await plane.refused(409, "pool_has_children", "DELETE", "/polykv/pools/a")
    assert error["n_children"] == 1
    assert plane.headers["x-should-retry"] == "false"
    status, answer = await plane.call("DELETE", "/polykv/pools/a?recursive=true")
    assert (status, answer["released"]) == (200, [2, 1])
    assert answer["freed_now"] == {"seq_ids": 2, "kv_cells": 103, "kv_bytes": 103 * 1024}
    assert answer["freed_later"] == {"kv_cells": 0, "kv_bytes": 0, "sessions": []}
    assert plane.engine.cache.used() == 0
    await plane.refused(404, "pool_not_found", "GET", "/polykv/pools/a")
    await plane.refused(404, "pool_not_found", "DELETE", "/polykv/pools/1")


BAD_BODIES = [
    ({}, None),
    ({"tokens": [1], "prompt": "x"}, "prompt"),
    ({"tokens": []}, "tokens"),
    ({"tokens": [1, -1]}, "tokens"),
    ({"tokens": [1, 2**31]}, "tokens"),
    ({"tokens": [1, "2"]}, "tokens"),
    ({"tokens": [1, True]}, "tokens"),
    ({"tokens": [1, 2.5]}, "tokens"),
    ({"tokens": "12"}, "tokens"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [["nested"]]}, "prompt"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"prompt": "x", "tools": []}, "tools"),
    ({"tokens": [1], "name": "123"}, "name"),
    ({"tokens": [1], "name": "a/b"}, "name"),
    ({"tokens": [1], "name": ""}, "name"),
    ({"tokens": [1], "name": 5}, "name"),
    ({"tokens": [1], "pin": "yes"}, "pin"),
    ({"tokens": [1], "ttl_s": -1}, "ttl_s"),
    ({"tokens": [1], "ttl_s": "5"}, "ttl_s"),
    ({"tokens": [1], "brunch_pos": 3}, "brunch_pos"),
    ({"tokens": [1], "branch_pos": 3}, "branch_pos"),
    ({"own_tokens": [1]}, "own_tokens"),
    ({"from_session": ""}, "from_session"),
]


@pytest.mark.parametrize(("body", "param"), BAD_BODIES)
async def test_a_wrong_body_is_a_400_that_names_the_field(plane, body, param):
    error = await plane.refused(400, "invalid_request", "POST", "/polykv/pools", body)
    assert error.get("param") == param
    assert plane.engine.cache.used() == 0


@pytest.mark.parametrize(
    ("raw", "position"), [(b"", 0), (b"{", 1), (b'{"a":}', 5), (b"nul", 0), (b'{"a":1}x', 7), (b"\xff", 0)]
)
async def test_broken_json_is_a_400_with_the_position(plane, raw, position):
    error = await plane.refused(400, "invalid_json", "POST", "/polykv/pools", raw)
    assert isinstance(error["position"], int)
    assert error["line"] == 1


@pytest.mark.parametrize("raw", [b"[]", b"1", b"null", b'"x"'])
async def test_a_body_that_is_no_object_is_a_400(plane, raw):
    await plane.refused(400, "invalid_request", "POST", "/polykv/pools", raw)


async def test_too_large_a_body_is_a_413(engine):
    async with planes(engine, max_body_bytes=2048) as plane:
        await plane.refused(413, "body_too_large", "POST", "/polykv/pools", b"[" + b"1," * 4000)


async def test_a_token_that_the_model_does_not_have_is_named(plane):
    error = await plane.refused(400, "invalid_request", "POST", "/polykv/pools", {"tokens": [1, 299, 300]})
    assert (error["param"], error["message"].startswith("tokens[2]")) == ("tokens", True)
    await plane.create(tokens=[1])
    error = await plane.refused(400, "invalid_request", "POST", "/polykv/pools/1/fork", {"own_tokens": [300]})
    assert (error["param"], error["message"].startswith("own_tokens[0]")) == ("own_tokens", True)


async def test_a_prefix_longer_than_a_slot_evicts_nobody(plane):
    await plane.create(tokens=[1] * 100)
    path, body = "/polykv/pools", {"tokens": [1] * 16384}
    error = await plane.refused(400, "context_length_exceeded", "POST", path, body)
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (16384, 16384)
    assert [pool.residency for pool in plane.control.tree] == ["resident"]
    assert error["message"].endswith("shorten it, or start the engine with a larger --ctx (llama-server: -c)")


async def test_a_prefix_longer_than_the_model_was_trained_for_is_no_matter_of_ctx():
    async with FakeEngine(n_cells=200, n_ctx_slot=100, n_ctx_train=100) as engine, planes(engine) as plane:
        for body in ({"tokens": [1] * 100}, {"tokens": [1] * 101}, {"prompt": "A" * (1 << 17)}):
            error = await plane.refused(400, "context_length_exceeded", "POST", "/polykv/pools", body)
            assert error["n_ctx"] == 100
            assert error["message"].endswith(
                "(100 tokens): shorten it, or start the engine with a model of a longer context; this one was trained "
                "with 100 tokens, and a larger --ctx gives no more"
            )


async def test_what_the_engine_refuses_is_passed_on_with_its_status(plane):
    media = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    await plane.refused(501, "sharing_unsupported", "POST", "/polykv/pools", {"messages": media})


async def test_fork_errors(plane):
    await plane.create(tokens=[1, 2, 3, 4], name="a")
    fork = "/polykv/pools/a/fork"
    error = await plane.refused(409, "prefix_mismatch", "POST", fork, {"tokens": [1, 2, 9, 9], "branch_pos": 3})
    assert error["divergence_pos"] == 2
    assert plane.headers["x-should-retry"] == "false"
    error = await plane.refused(409, "prefix_mismatch", "POST", fork, {"tokens": [9, 2]})
    assert error["divergence_pos"] == 0
    for body in (
        {"tokens": [1, 2, 3]},
        {"tokens": [1, 2, 3, 4]},
        {"tokens": [1, 2, 9], "branch_pos": 0},
        {"own_tokens": [1], "branch_pos": 5},
        {"tokens": [1, 2, 9], "branch_pos": -1},
    ):
        await plane.refused(400, "invalid_request", "POST", fork, body)
    await plane.refused(404, "pool_not_found", "POST", "/polykv/pools/none/fork", {"own_tokens": [1]})
    await plane.refused(409, "name_taken", "POST", fork, {"own_tokens": [1], "name": "a"})
    assert len(plane.control.tree) == 1
    assert plane.engine.cache.used() == 4


async def test_names_are_unique_also_while_the_first_is_being_made(plane):
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    first = asyncio.create_task(plane.call("POST", "/polykv/pools", {"tokens": [1], "name": "n"}))
    await hold.reached()
    await plane.refused(409, "name_taken", "POST", "/polykv/pools", {"tokens": [2], "name": "n"})
    hold.release()
    assert (await first)[0] == 201


async def test_concurrent_creates_with_one_name_make_one_pool(plane):
    answers = await asyncio.gather(
        *(plane.call("POST", "/polykv/pools", {"tokens": [1, i], "name": "n"}) for i in range(10))
    )
    assert sorted(status for status, _ in answers) == [201] + [409] * 9
    assert len(plane.engine.ready_pools()) == 1


async def test_no_free_sequence_and_no_free_cells():
    async with FakeEngine(max_pools=1) as engine, planes(engine) as plane:
        await plane.create(tokens=[1] * 20, pin=True)
        error = await plane.refused(503, "seq_ids_exhausted", "POST", "/polykv/pools", {"tokens": [2]})
        assert "unpin" in error["message"]
        assert "--polykv-max-pools" in error["message"]
        assert plane.headers["Retry-After"] == "1"
        assert len(plane.control.tree) == 1
    async with FakeEngine(n_cells=50, n_ctx_slot=100) as engine, planes(engine) as plane:
        await plane.create(tokens=[1] * 20, pin=True)
        error = await plane.refused(507, "kv_exhausted", "POST", "/polykv/pools", {"tokens": [2] * 40})
        assert error["cells_missing"] == 10
        assert "unpin" in error["message"]
        assert (len(plane.control.tree), engine.cache.used()) == (1, 20)


async def test_the_last_sequence_is_enough_for_a_child_of_a_cold_parent():
    async with FakeEngine(max_pools=1) as engine, planes(engine) as plane:
        await plane.create(tokens=[1, 2, 3], name="a")
        await engine.restart()
        child = await plane.fork("a", own_tokens=[4])
        assert (child["branch_pos"], child["own_n_tokens"]) == (3, 1)
        _, view = await plane.call("GET", "/polykv/pools")
        assert [p["own_kv_cells"] for p in view["pools"]] == [3, 1]
        assert engine.cache.used() == 4


async def test_a_model_that_cannot_share_is_a_501_with_the_reason():
    async with FakeEngine(share="sliding window without --swa-full") as engine, planes(engine) as plane:
        error = await plane.refused(501, "sharing_unsupported", "POST", "/polykv/pools", {"tokens": [1]})
        assert "--swa-full" in error["message"]


async def test_a_failed_create_leaves_nothing_behind(plane):
    for status, ours in ((500, "engine_refused"), (400, "invalid_request"), (507, "kv_exhausted")):
        plane.engine.on("materialize", "request", reply(status, {"error": {"type": "polykv_error", "message": "x"}}))
        _, answer = await plane.call("POST", "/polykv/pools", {"tokens": [1, 2], "name": "n"})
        assert answer["error"]["code"] == ours
    await plane.create(tokens=[1, 2], name="n")
    assert len(plane.control.tree) == 1


async def test_an_answer_that_got_lost_is_looked_up_by_its_tag(plane):
    plane.engine.on("materialize", "reply", drop())
    answer = await plane.create(tokens=[1, 2, 3])
    assert answer["seq_id"] == plane.engine.ready_pools()[0].seq
    assert len(plane.engine.ready_pools()) == 1


async def test_a_request_that_never_arrived_is_an_error_and_not_repeated(plane):
    plane.engine.on("materialize", "request", drop())
    await plane.refused(503, "upstream_unavailable", "POST", "/polykv/pools", {"tokens": [1, 2, 3]})
    orders = [r for r in plane.engine.received if r.method == "POST" and r.json().get("op") == "materialize"]
    assert len(orders) == 1
    assert len(plane.control.tree) == 0


async def test_create_goes_on_when_its_client_leaves(plane):
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    task = asyncio.create_task(plane.call("POST", "/polykv/pools", {"tokens": [1, 2, 3], "name": "n"}))
    await hold.reached()
    task.cancel()
    await asyncio.wait([task])
    hold.release()
    await eventually(lambda: plane.control.tree.find("n"))
    assert (await plane.call("GET", "/polykv/pools/n"))[1]["pools"][0]["residency"] == "resident"


async def test_an_engine_that_holds_other_tokens_is_not_believed(plane, monkeypatch):
    monkeypatch.setattr("tests.fake_engine.cache.tokens_hash", lambda tokens: "00")
    await plane.refused(502, "upstream_error", "POST", "/polykv/pools", {"tokens": [1, 2, 3]})
    assert plane.engine.ready_pools() == []


async def test_other_methods_and_bad_queries(plane):
    await plane.create(tokens=[1])
    await plane.refused(400, "invalid_request", "DELETE", "/polykv/pools/1?recursive=maybe")
    async with plane.session.put(plane.url + "/polykv/pools") as r:
        assert r.status == 405


async def test_match_is_a_dry_run(plane):
    await plane.create(prompt="You are an agent. ", name="a")
    _, answer = await plane.call("POST", "/polykv/match", {"prompt": "You are an agent. Hello"})
    assert answer == {
        "pool_id": 1,
        "name": "a",
        "prefix_n_tokens": 18,
        "uncached_n_tokens": 5,
        "miss_reason": None,
        "divergence": None,
    }
    _, answer = await plane.call("POST", "/polykv/match", {"prompt": "You are an agent; no", "pool_id": "a"})
    assert (answer["prefix_n_tokens"], answer["miss_reason"]) == (16, "diverged")
    assert answer["divergence"] == {"pos": 16, "pool_id": 1, "pool_prefix_len": 18}
    _, answer = await plane.call("POST", "/polykv/match", {"tokens": [1, 2]})
    assert (answer["pool_id"], answer["miss_reason"]) == (None, "no_pool")
    await plane.refused(404, "pool_not_found", "POST", "/polykv/match", {"prompt": "x", "pool_id": "b"})
    await plane.refused(400, "invalid_request", "POST", "/polykv/match", {})
    assert plane.control.tree.get("a").n_queries == 0
