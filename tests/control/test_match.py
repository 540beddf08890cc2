"""The dry run: what a request would get, where it leaves the pool, and that nothing comes of asking."""

import asyncio
from typing import Any

import pytest

from polykv_proxy.control import AttachRequest
from tests.control.conftest import eventually, planes
from tests.fake_engine import FakeEngine, Hold

SYSTEM = {"role": "system", "content": "You are an agent with very many tools and rules."}
ASK, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a thing."}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


async def match(plane: Any, **body: Any) -> dict[str, Any]:
    status, answer = await plane.call("POST", "/polykv/match", body)
    assert status == 200, answer
    return answer


async def test_it_changes_nothing(plane):
    await plane.create(prompt="A" * 40, name="a")
    before = (await plane.call("GET", "/polykv/pools"))[1]
    n_prefilled = plane.engine.hooks.n_processed
    for body in ({"prompt": "A" * 50}, {"prompt": "A" * 50, "pool_id": "a"}, {"tokens": [65] * 30}, {"prompt": "x"}):
        await match(plane, **body)
    assert (await plane.call("GET", "/polykv/pools"))[1] == before
    assert (plane.engine.hooks.n_processed, len(plane.control.comparer.seen)) == (n_prefilled, 0)


async def test_it_says_what_a_request_then_gets(plane):
    await plane.create(messages=[SYSTEM], name="a")
    await plane.fork("a", messages=[SYSTEM, ASK, ANSWER], name="b")
    for messages in ([SYSTEM, ASK], [SYSTEM, ASK, ANSWER, ASK], [ASK], [SYSTEM | {"content": "You are else."}]):
        told = await match(plane, messages=messages)
        body = {"messages": messages}
        plan = await plane.control.decide_attach(AttachRequest(path="/v1/chat/completions", body=body))
        assert (told["pool_id"], told["prefix_n_tokens"]) == (plan.pool_id, plan.prefix_n_tokens)


async def test_tokens_need_no_rendering_and_an_engine_that_was_there_once(plane):
    await plane.create(tokens=list(range(40)), name="a")
    n = len(plane.engine.requests("/polykv/engine/render"))
    told = await match(plane, tokens=[*range(40), 1])
    assert told == {
        "pool_id": 1,
        "name": "a",
        "prefix_n_tokens": 40,
        "uncached_n_tokens": 1,
        "miss_reason": None,
        "divergence": None,
    }
    assert len(plane.engine.requests("/polykv/engine/render")) == n
    await plane.engine.kill()
    told = await match(plane, tokens=[*range(30), 99])
    assert (told["miss_reason"], told["divergence"]) == ("diverged", {"pos": 30, "pool_id": 1, "pool_prefix_len": 40})
    await plane.refused(503, "upstream_unavailable", "POST", "/polykv/match", {"prompt": "x"})
    await plane.engine.start()
    await eventually(lambda: plane.control.hooks)


async def test_a_cold_pool_stays_cold(plane):
    await plane.create(tokens=list(range(40)), name="a", ttl_s=0)
    await plane.engine.restart()
    await eventually(lambda: plane.control.tree.get("a").residency == "cold")
    assert (await match(plane, tokens=list(range(40))))["miss_reason"] == "cold"
    assert plane.control.tree.get("a").residency == "cold"


async def test_a_token_that_the_model_does_not_have_is_named(plane):
    error = await plane.refused(400, "invalid_request", "POST", "/polykv/match", {"tokens": [1, 300]})
    assert (error["param"], error["message"][:9]) == ("tokens", "tokens[1]")
    error = await plane.refused(400, "invalid_request", "POST", "/polykv/match", {"messages": [{"content": "x"}]})
    assert error["param"] == "messages"


async def test_where_nothing_matches_it_says_how_far_the_nearest_went(plane):
    assert (await match(plane, tokens=[1]))["divergence"] is None  # no pools
    await plane.create(tokens=list(range(40)))
    told = await match(plane, tokens=[0, 1, 2, 9])
    assert (told["pool_id"], told["miss_reason"]) == (None, "no_pool")
    assert told["divergence"] == {"pos": 3, "pool_id": 1, "pool_prefix_len": 40}
    assert (await match(plane, tokens=[7]))["divergence"] == {"pos": 0, "pool_id": None, "pool_prefix_len": None}
    assert (await match(plane, tokens=[7], pool_id=1))["divergence"] == {"pos": 0, "pool_id": 1, "pool_prefix_len": 40}


@pytest.mark.parametrize("at", range(4))
async def test_the_message_that_left_the_pool_is_named(plane, at):
    said = [SYSTEM, ASK, ANSWER, ASK]
    await plane.create(messages=said, name="a")
    text = said[at]["content"]
    edited = [*said[:at], said[at] | {"content": text[:5] + "~" + text[6:]}, *said[at + 1 :]]
    told = await match(plane, messages=edited, pool_id="a")
    assert (told["miss_reason"], told["divergence"]["message"]) == ("diverged", at)
    tokens = plane.engine.template.render("/v1/chat/completions", {"messages": edited})[0][0]
    assert tokens[told["divergence"]["pos"]] == ord("~")
    told = await match(plane, messages=[*edited, ANSWER, ASK], pool_id="a")
    assert told["divergence"]["message"] == at


async def test_another_role_is_the_message_it_is_of(plane):
    await plane.create(messages=[SYSTEM, ASK, ANSWER], name="a")
    told = await match(plane, messages=[SYSTEM, ASK, ANSWER | {"role": "tool"}], pool_id="a")
    assert told["divergence"]["message"] == 2


async def test_what_is_no_message_is_not_named_as_one(plane):
    await plane.create(messages=[SYSTEM, ASK], tools=TOOLS, name="a")
    other = [{"type": "function", "function": {"name": "find"}}]
    assert (await match(plane, messages=[SYSTEM, ASK], tools=other, pool_id="a"))["divergence"]["message"] is None
    edited = SYSTEM | {"content": "You were."}
    assert (await match(plane, messages=[edited, ASK], tools=TOOLS, pool_id="a"))["divergence"]["message"] == 0
    # The prompt ends, the pool goes on: the cue to answer is of no message.
    await plane.create(messages=[SYSTEM, ASK, {"role": "tool", "content": "x"}], name="b")
    assert (await match(plane, messages=[SYSTEM, ASK], pool_id="b"))["divergence"]["message"] is None


async def test_a_template_that_refuses_fewer_messages_leaves_it_open(plane):
    said = [SYSTEM, ASK, ANSWER, ASK]
    await plane.create(messages=said, name="a")
    plane.engine.template.refuses = lambda messages: "too few" if len(messages) < 4 else None
    told = await match(plane, messages=[*said[:3], ASK | {"content": "Why?"}], pool_id="a")
    assert (told["miss_reason"], told["divergence"]["message"]) == ("diverged", None)


async def test_a_pool_released_meanwhile_is_a_404(plane):
    await plane.create(prompt="A" * 40, name="a")
    hold = Hold()
    plane.engine.faults.on("render", "request", hold)
    asked = asyncio.create_task(plane.call("POST", "/polykv/match", {"prompt": "A", "pool_id": "a"}))
    await hold.reached()
    await plane.call("DELETE", "/polykv/pools/a")
    hold.release()
    status, answer = await asked
    assert (status, answer["error"]["code"]) == (404, "pool_not_found")


async def test_it_is_answered_while_a_pool_is_being_prefilled():
    async with FakeEngine() as engine, planes(engine) as plane:
        await plane.create(prompt="A" * 40, name="a")
        hold = Hold()
        engine.on("materialize", "request", hold)
        making = asyncio.create_task(plane.create(prompt="B" * 40))
        await hold.reached()
        assert (await match(plane, prompt="A" * 41))["pool_id"] == 1
        hold.release()
        await making
