"""Which pool a request gets: the order of the rules, what is rendered, single flight, and what the engine proves."""

import asyncio
from typing import Any

import pytest

from polykv_proxy.control import AttachPlan, AttachRequest, Outcome
from polykv_proxy.errors import ExplicitPrefixTooLong, PoolNotFound
from tests.control.conftest import eventually, planes
from tests.fake_engine import FakeEngine, Hold, drop, reply
from tests.fake_engine.toy import Template

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are an agent with very many tools and a long list of rules to follow."}
LONG = "Tell me a long story about a proxy that shares prefixes among agents, with all the details there are."


def chat(*users: str, **more: Any) -> dict[str, Any]:
    return {"messages": [SYSTEM, *({"role": "user", "content": u} for u in users)], **more}


async def decide(plane, path: str = CHAT, body: dict | None = None, **kw: Any) -> AttachPlan:
    return await plane.control.decide_attach(AttachRequest(path=path, body=body or chat("Hi"), **kw))


async def run(plane, plan: AttachPlan, path: str = CHAT, body: dict | None = None, id_slot: int = 0) -> dict[str, Any]:
    """Send what the relay would send, and settle."""
    sent = dict(body or chat("Hi")) | {"id_slot": id_slot}
    if plan.pool_id is not None:
        sent |= {
            "shared_pool_slot": plan.seq_id,
            "shared_prefix_n_tokens": plan.prefix_n_tokens if plan.exact else -1,
            "shared_pool_gen": plan.gen,
            "shared_pool_epoch": plan.epoch,
        }
    async with plane.session.post(plane.engine.url + path, json=sent) as r:
        answer = await r.json()
    timings = answer.get("timings", {})
    outcome = Outcome(
        status=r.status,
        cache_n=timings.get("cache_n"),
        prompt_n=timings.get("prompt_n"),
        predicted_n=timings.get("predicted_n"),
        pool_n=timings.get("pool_n"),
    )
    return {"reason": plane.control.settle(plan, outcome), "timings": timings}


def n_renders(plane) -> int:
    return len(plane.engine.requests("/polykv/engine/render"))


async def test_without_pools_nothing_is_rendered(plane):
    plan = await decide(plane)
    assert (plan.pool_id, plan.miss_reason) == (None, "no_pool")
    assert n_renders(plane) == 0


async def test_deepest_match_is_attached_and_the_engine_proves_it(plane):
    root = await plane.create(messages=[SYSTEM], name="root")
    child = await plane.fork("root", messages=[SYSTEM, {"role": "user", "content": LONG}], name="child")
    plan = await decide(plane, body=chat(LONG))
    assert (plan.pool_id, plan.prefix_n_tokens) == (child["pool_id"], child["prefix_len"])
    got = await run(plane, plan, body=chat(LONG))
    assert (got["reason"], got["timings"]["pool_n"]) == (None, child["prefix_len"])
    plan = await decide(plane, body=chat("Hi"))
    got = await run(plane, plan, body=chat("Hi"), id_slot=1)
    assert got["timings"]["pool_n"] == plan.prefix_n_tokens >= root["prefix_len"]
    pools = {p.name: p for p in plane.control.tree}
    assert (pools["child"].n_queries + pools["root"].n_queries, pools["child"].n_hits + pools["root"].n_hits) == (2, 2)


async def test_named_beats_the_sessions_which_beats_the_deepest(plane):
    await plane.create(messages=[SYSTEM], name="root")
    await plane.fork("root", messages=[SYSTEM, {"role": "user", "content": LONG}], name="child")
    session = plane.control.sessions.name("s", plane.control.clock())
    session.pool_id = 1
    assert (await decide(plane, body=chat(LONG))).pool_id == 2
    assert (await decide(plane, body=chat(LONG), session="s")).pool_id == 1
    assert (await decide(plane, body=chat(LONG), session="s", pool_ref="child")).pool_id == 2
    assert (await decide(plane, body=chat(LONG), session="s", pool_ref=2)).pool_id == 2
    session.pool_id = 99  # released meanwhile
    assert (await decide(plane, body=chat(LONG), session="s")).pool_id == 2


async def test_a_session_whose_pool_no_longer_fits_matches_anew(plane):
    await plane.create(prompt="A" * 40, name="a")
    await plane.create(prompt="B" * 40, name="b")
    session = plane.control.sessions.name("s", plane.control.clock())
    session.pool_id = 1
    plan = await decide(plane, "/completion", {"prompt": "B" * 50}, session="s")
    assert (plan.pool_id, plan.prefix_n_tokens) == (2, 40)


async def test_an_unknown_pool_is_unpooled_or_404_when_strict(plane):
    await plane.create(messages=[SYSTEM])
    plan = await decide(plane, pool_ref="none")
    assert (plan.pool_id, plan.miss_reason) == (None, "no_pool")
    with pytest.raises(PoolNotFound):
        await decide(plane, pool_ref=77, strict=True)


async def test_no_common_prefix_and_a_partial_one(plane):
    await plane.create(prompt="A" * 40, name="a")
    plan = await decide(plane, "/completion", {"prompt": "B"}, pool_ref="a")
    assert (plan.pool_id, plan.miss_reason, plan.asked) == (None, "diverged", 1)
    plan = await decide(plane, "/completion", {"prompt": "A" * 30 + "B"}, pool_ref="a")
    assert (plan.pool_id, plan.prefix_n_tokens, plan.miss_reason) == (1, 30, "diverged")
    plan = await decide(plane, "/completion", {"prompt": "A" * 30}, pool_ref="a")
    assert (plan.prefix_n_tokens, plan.miss_reason) == (30, None)
    got = await run(plane, plan, "/completion", {"prompt": "A" * 30})
    assert (got["timings"]["cache_n"], got["reason"]) == (29, None)


async def test_a_prompt_that_leaves_the_pool_on_the_way_is_no_hit(plane):
    root = await plane.create(messages=[SYSTEM, {"role": "user", "content": LONG}])
    result = await run(plane, await decide(plane, body=chat("Something else")), body=chat("Something else"))
    pool = plane.control.tree.get(root["pool_id"])
    assert (result["reason"], pool.n_queries, pool.n_hits) == ("diverged", 1, 0)


async def test_a_short_common_beginning_is_no_automatic_match(plane):
    await plane.create(messages=[SYSTEM])
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert (await decide(plane, body=body)).pool_id is None
    assert (await decide(plane, body=body, pool_ref=1)).prefix_n_tokens == 1
    await plane.create(tokens=[ord("x")], name="tiny")
    assert (await decide(plane, "/completion", {"prompt": "xy"})).prefix_n_tokens == 1


async def test_a_few_common_template_tokens_are_no_reason_to_join_a_child(plane):
    root = await plane.create(messages=[SYSTEM], name="root")
    await plane.fork("root", messages=[SYSTEM, {"role": "user", "content": LONG}], name="child")
    body = chat("Something else", tools=None)
    plan = await decide(plane, body=body)
    assert (plan.pool_id, plan.prefix_n_tokens, plan.miss_reason) == (1, root["prefix_len"], None)
    plan = await decide(plane, body=chat(LONG[:40] + "!", tools=None))
    assert (plan.pool_id, plan.miss_reason) == (2, "diverged")


async def test_explicit_prefix_is_checked_and_kept(plane):
    await plane.create(prompt="A" * 40, name="a")
    body = {"prompt": "A" * 30 + "B" * 10}
    plan = await decide(plane, "/completion", body, pool_ref="a", explicit_p=20)
    assert (plan.prefix_n_tokens, plan.exact, plan.miss_reason) == (20, True, None)
    assert (await run(plane, plan, "/completion", body))["timings"]["pool_n"] == 20
    for kw in ({"pool_ref": "a"}, {}):
        with pytest.raises(ExplicitPrefixTooLong) as e:
            await decide(plane, "/completion", body, explicit_p=31, **kw)
        assert (e.value.status, e.value.code, e.value.divergence_pos) == (400, "prefix_mismatch", 30)


async def test_legacy_slot_above_the_slots_is_the_pool_in_that_sequence(plane):
    made = await plane.create(prompt="A" * 40)
    plan = await decide(plane, "/completion", {"prompt": "A" * 50}, legacy_slot=made["seq_id"], explicit_p=40)
    assert (plan.pool_id, plan.prefix_n_tokens) == (1, 40)
    plan = await decide(plane, "/completion", {"prompt": "A" * 50}, legacy_slot=made["seq_id"] + 1)
    assert (plan.pool_id, plan.miss_reason) == (None, "no_pool")


async def test_legacy_slot_below_the_slots_is_that_slots_context_snapshotted_once(plane):
    await run(plane, AttachPlan(), "/completion", {"prompt": "A" * 40, "n_predict": 1}, id_slot=2)
    for _ in range(2):
        plan = await decide(plane, "/completion", {"prompt": "A" * 50}, legacy_slot=2)
        assert plan.prefix_n_tokens == 40
    assert len(plane.engine.ready_pools()) == 1
    assert plane.control.tree.get(1).auto
    got = await run(plane, plan, "/completion", {"prompt": "A" * 50}, id_slot=3)
    assert got["timings"]["pool_n"] == 40
    assert (await decide(plane, legacy_slot=1)).miss_reason == "not_resident"  # an empty slot


async def test_a_list_of_prompts_shares_one_pool_if_all_match(plane):
    await plane.create(prompt="A" * 40)
    plan = await decide(plane, "/completion", {"prompt": ["A" * 50, "A" * 45 + "C"]})
    assert (plan.pool_id, plan.prefix_n_tokens) == (1, 40)
    plan = await decide(plane, "/completion", {"prompt": ["A" * 50, "B"]}, pool_ref=1)
    assert (plan.pool_id, plan.miss_reason) == (None, "incompatible")


async def test_media_and_what_the_engine_will_refuse_go_unpooled(plane):
    await plane.create(prompt="<|im_start|>system\nYou are")
    media = {"messages": [SYSTEM, {"role": "user", "content": [{"type": "image_url"}]}]}
    assert (await decide(plane, body=media)).miss_reason == "incompatible"
    assert (await decide(plane, body={"messages": []})).pool_id is None


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/chat/completions"])
async def test_other_dialects_match_the_same_pool(plane, path):
    await plane.create(messages=[SYSTEM], name="a")
    system = SYSTEM["content"]
    body = {
        "/v1/messages": {"system": system, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
        "/v1/responses": {"instructions": system, "input": "Hi"},
        "/chat/completions": chat("Hi"),
    }[path]
    plan = await decide(plane, path, body)
    assert (plan.pool_id, plan.miss_reason) == (1, None)


# What was seen before is not rendered again -------------------------------------------------------------------------


async def test_the_same_body_is_rendered_once_whatever_the_sampling(plane):
    await plane.create(tokens=[1, 2, 3])
    first = await decide(plane)
    n = n_renders(plane)
    assert await decide(plane, body=chat("Hi", temperature=0.5, stream=True, max_tokens=5)) == first
    assert n_renders(plane) == n
    await decide(plane, body=chat("Hi", tools=[{"name": "x"}]))
    assert n_renders(plane) == n + 1


async def test_a_chat_that_starts_with_a_pools_messages_is_not_rendered(plane):
    pool = await plane.create(messages=[SYSTEM], name="a")
    n = n_renders(plane)
    plan = await decide(plane, body=chat(LONG))
    assert (plan.pool_id, plan.prefix_n_tokens, plan.exact, n_renders(plane)) == (1, pool["prefix_len"], False, n)
    got = await run(plane, plan, body=chat(LONG))
    assert (got["timings"]["pool_n"], got["reason"]) == (pool["prefix_len"], None)


async def test_a_growing_conversation_is_rendered_until_growing_is_known_to_keep_what_was_there(plane):
    pool = await plane.create(prompt="<|im_start|>system\nYou are an agent with very many tools", name="a")
    plan = await decide(plane, body=chat(LONG))
    assert plan.miss_reason is None
    n = n_renders(plane)
    plan = await decide(plane, body=chat(LONG, LONG))
    assert (plan.prefix_n_tokens, plan.exact, n_renders(plane)) == (pool["prefix_len"], True, n + 1)
    for k in range(3, 6):
        plan = await decide(plane, body=chat(*[LONG] * k))
        assert (plan.pool_id, plan.prefix_n_tokens, plan.exact) == (1, pool["prefix_len"], False)
    assert n_renders(plane) == n + 1
    other = LONG.upper()
    await decide(plane, body=chat(other))
    await decide(plane, body=chat(other, "and on"))  # this kind of growth is known by now
    assert n_renders(plane) == n + 2
    await decide(plane, body=chat(other, "and on", tools=[{"name": "x"}]))  # of these tools nothing is known
    assert n_renders(plane) == n + 3


async def test_the_deepest_match_that_was_found_is_known_as_the_sessions_pool_too(plane):
    await plane.create(prompt="<|im_start|>system\nYou are an agent with very many tools", name="a")
    for body in (chat("x"), chat("x", "y")):
        await decide(plane, body=body)  # so that growing is known
    found = await decide(plane, body=chat(LONG))
    n = n_renders(plane)
    assert (await decide(plane, body=chat(LONG), pool_ref="a")) == found
    grown = await decide(plane, body=chat(LONG, LONG), pool_ref="a")
    assert (grown.pool_id, grown.prefix_n_tokens, grown.exact) == (1, found.prefix_n_tokens, False)
    assert n_renders(plane) == n


async def test_what_the_engine_found_to_be_otherwise_is_not_remembered(plane):
    """A template that prints the date: the same body is another prompt the next day."""

    class Dated(Template):
        day = "Monday"

        def _chat(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> tuple[str, bool]:
            text, media = super()._chat(messages, body)
            return f"{self.day}. {text}", media

    plane.engine.template = Dated()
    pool = await plane.create(messages=[SYSTEM], name="a")
    plan = await decide(plane, body=chat(LONG))
    assert (await run(plane, plan, body=chat(LONG)))["reason"] is None
    Dated.day = "Monnight"
    plan = await decide(plane, body=chat(LONG))
    assert plan.prefix_n_tokens == pool["prefix_len"]
    got = await run(plane, plan, body=chat(LONG), id_slot=1)
    assert (got["timings"]["pool_n"], got["reason"]) == (len("Mon"), "diverged")
    for body in (chat(LONG), chat(LONG.upper())):
        plan = await decide(plane, body=body)  # it was rendered: three letters are no match
        assert (plan.pool_id, plan.miss_reason) == (None, "no_pool")


class DropsReasoning(Template):
    """Reasoning is only shown behind the last question, as by Qwen3 and others."""

    def _chat(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> tuple[str, bool]:
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        shown = [
            message | {"content": f"<think>{message['reasoning_content']}</think>{message['content']}"}
            if message.get("reasoning_content") and i > last
            else message
            for i, message in enumerate(messages)
        ]
        return super()._chat(shown, body)


async def test_a_template_that_drops_old_reasoning_is_not_taken_at_its_old_word(plane):
    plane.engine.template = DropsReasoning()

    def working(question: str) -> list[dict[str, Any]]:
        asked = {"role": "user", "content": question}
        thought = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm. " * 30}
        return [SYSTEM, asked, thought, {"role": "tool", "content": "It says: " + LONG}]

    more = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": LONG}]
    for question in ("What is it?", "Where is it?"):
        shown = plane.engine.template.render(CHAT, {"messages": working(question)})[0][0]
        cut = len(shown) - 110  # behind the reasoning
        pool = await plane.create(tokens=[*shown[:cut], 1])
        plan = await decide(plane, body={"messages": working(question)})
        assert (plan.pool_id, plan.prefix_n_tokens) == (pool["pool_id"], cut)
        grown = {"messages": working(question) + more}
        where = plane.engine.template.render(CHAT, grown)[0][0]
        same = next(i for i, (one, other) in enumerate(zip(shown, where, strict=False)) if one != other)
        assert same < cut
        plan = await decide(plane, body=grown)
        assert (plan.pool_id, plan.prefix_n_tokens, plan.exact) == (pool["pool_id"], same, True)


async def test_another_start_of_the_engine_may_have_another_template(plane):
    await plane.create(messages=[SYSTEM], name="a", ttl_s=0)
    assert not (await decide(plane, body=chat(LONG))).exact
    plane.engine.template = DropsReasoning()
    await plane.engine.restart()
    await eventually(lambda: plane.control.tree.get("a").residency == "cold")
    n = n_renders(plane)
    assert (await decide(plane, body=chat(LONG))).exact
    assert n_renders(plane) == n + 1


async def test_a_new_deeper_pool_is_found_although_the_chat_was_seen(plane):
    await plane.create(messages=[SYSTEM], name="a")
    assert (await decide(plane, body=chat(LONG))).pool_id == 1
    await plane.fork("a", messages=[SYSTEM, {"role": "user", "content": LONG}])
    assert (await decide(plane, body=chat(LONG, "more"))).pool_id == 2


async def test_a_longer_pool_made_before_a_shorter_one_is_still_the_deepest(plane):
    await plane.create(messages=[SYSTEM, {"role": "user", "content": LONG}])
    await plane.create(messages=[SYSTEM])
    assert (await decide(plane, body=chat(LONG))).pool_id == 1


async def test_a_released_pool_is_not_remembered(plane):
    await plane.create(messages=[SYSTEM], name="a")
    assert (await decide(plane)).pool_id == 1
    await plane.call("DELETE", "/polykv/pools/a")
    await plane.create(tokens=[5] * 30)
    assert (await decide(plane)).pool_id is None


async def test_an_upper_estimate_that_was_wrong_costs_time_only(plane):
    """A template may render old messages differently; the engine compares, and the receipt says so."""
    await plane.create(messages=[SYSTEM], name="a")
    plane.control.tree.get("a").own[-5] ^= 1  # as if the estimate were wrong: the engine holds other tokens
    body = chat(LONG)
    plan = await decide(plane, body=body)
    plane.engine.ready_pools()[0].tokens[-5] ^= 1
    got = await run(plane, plan, body=body)
    assert got["timings"]["pool_n"] == plan.prefix_n_tokens - 5
    assert got["reason"] == "diverged"


# Residency ----------------------------------------------------------------------------------------------------------


async def test_a_hundred_attaches_to_a_cold_pool_prefill_it_once(plane):
    await plane.create(prompt="A" * 40, name="a", ttl_s=0)
    await plane.engine.restart()
    await eventually(lambda: plane.control.tree.get("a").residency == "cold")
    plane.engine.prefill_s = 0.001
    plans = await asyncio.gather(*(decide(plane, "/completion", {"prompt": "A" * 40 + "x"}) for _ in range(100)))
    assert {p.pool_id for p in plans} == {1}
    assert plane.engine.hooks.n_materialized == 1
    got = await run(plane, plans[0], "/completion", {"prompt": "A" * 40 + "x"})
    assert (got["timings"]["pool_n"], got["reason"]) == (40, None)


async def test_a_cancelled_waiter_does_not_cancel_it_for_the_others(plane):
    await plane.create(prompt="A" * 40, name="a", ttl_s=0)
    await plane.engine.restart()
    await eventually(lambda: plane.control.tree.get("a").residency == "cold")
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    body = {"prompt": "A" * 41}
    one, two = (asyncio.create_task(decide(plane, "/completion", body)) for _ in range(2))
    await hold.reached()
    one.cancel()
    await asyncio.wait([one])
    hold.release()
    assert (await two).pool_id == 1
    assert plane.engine.hooks.n_materialized == 1


async def test_when_all_waiters_left_it_is_called_off_and_nothing_leaks(plane):
    await plane.create(prompt="A" * 40, name="a", ttl_s=0)
    await plane.engine.restart()
    await eventually(lambda: plane.control.tree.get("a").residency == "cold")
    hold = Hold()
    plane.engine.on("materialize", "reply", hold)  # the engine has done it, the answer is on its way
    waiters = [asyncio.create_task(decide(plane, "/completion", {"prompt": "A" * 41})) for _ in range(3)]
    await hold.reached()
    for waiter in waiters:
        waiter.cancel()
    await asyncio.wait(waiters)
    await eventually(lambda: plane.control.tree.get("a").residency == "resident")  # what the engine did is not lost
    hold.release()
    assert (await decide(plane, "/completion", {"prompt": "A" * 41})).pool_id == 1
    assert [pool.seq for pool in plane.engine.ready_pools()] == [plane.control.tree.get("a").seq_id]
    assert plane.engine.hooks.n_materialized == 1


@pytest.mark.parametrize("ref", ["b", "a"])
async def test_a_pool_that_is_released_while_it_comes_back_is_prefilled_no_further(plane, ref):
    """Also when it waits for its parent, which goes with it. Who asked goes on with what there is, at once."""
    engine, a, b = plane.engine, "A" * 2000, "A" * 2000 + "B" * 2000
    await plane.create(prompt=a, name="a", ttl_s=0)
    await plane.fork("a", prompt=b, name="b", ttl_s=0)
    await engine.restart()
    engine.stops_when_left = True
    await eventually(lambda: plane.control.tree.get("b").residency == "cold")
    if ref == "b":
        await decide(plane, "/completion", {"prompt": a + "x"})  # the parent is there already
    n_there = engine.cache.used()
    n_made, n_orders = engine.hooks.n_materialized, len(ordered(engine))
    engine.prefill_s = 0.002
    waiters = [asyncio.create_task(decide(plane, "/completion", {"prompt": b + "x"})) for _ in range(2)]
    await eventually(lambda: engine.cache.used() > n_there)
    answering = Hold()
    engine.on("free", "request", answering)
    engine.on("list", "request", answering, times=None)
    releasing = asyncio.create_task(plane.call("DELETE", f"/polykv/pools/{ref}?recursive=true"))
    plans = await asyncio.wait_for(asyncio.gather(*waiters), 5)
    assert [(p.pool_id, p.miss_reason) for p in plans] == [(1, None) if ref == "b" else (None, "no_pool")] * 2
    answering.release()
    status, answer = await releasing
    assert (status, answer["released"]) == (200, [2] if ref == "b" else [2, 1])

    await eventually(lambda: plane.control.residency.books_true and plane.control.residency.at_rest)
    assert engine.hooks.n_materialized == n_made, "it was broken off on the way"
    assert len(ordered(engine)) == n_orders + 1, "nothing was ordered for it any more"
    assert engine.cache.used() == n_there
    assert [pool.seq for pool in engine.ready_pools()] == [pool.seq_id for pool in plane.control.tree]


def ordered(engine: FakeEngine) -> list[Any]:
    return [asked for asked in engine.requests("/polykv/engine/pools") if asked.method == "POST"]


async def test_children_come_back_with_their_parents_first_and_share_their_cells(plane):
    await plane.create(prompt="A" * 40, name="a", ttl_s=0)
    await plane.fork("a", prompt="A" * 40 + "B" * 10, name="b", ttl_s=0)
    await plane.fork("b", prompt="A" * 40 + "B" * 10 + "C" * 5, name="c", ttl_s=0)
    await plane.engine.restart()
    await eventually(lambda: plane.control.tree.get("c").residency == "cold")
    plan = await decide(plane, "/completion", {"prompt": "A" * 40 + "B" * 10 + "C" * 6}, pool_ref="c")
    assert plan.prefix_n_tokens == 55
    assert plane.engine.cache.used() == 55
    assert plane.engine.hooks.n_processed == 55
    _, view = await plane.call("GET", "/polykv/pools")
    assert [p["residency"] for p in view["pools"]] == ["resident"] * 3
    assert sum(p["own_kv_cells"] for p in view["pools"]) == 55


async def test_with_too_few_sequences_a_deep_pool_comes_back_alone_and_serves_its_parents():
    async with FakeEngine(max_pools=3) as engine, planes(engine) as plane:
        await plane.create(prompt="A" * 40, name="a")
        await plane.fork("a", prompt="A" * 40 + "B" * 10, name="b")
        await plane.fork("b", prompt="A" * 40 + "B" * 10 + "C" * 5, name="c")
        engine.max_pools = 1
        await engine.restart()
        await eventually(lambda: plane.control.watch.stats.max_pools == 1)
        plan = await decide(plane, "/completion", {"prompt": "A" * 40 + "B" * 10 + "C" * 6}, pool_ref="c")
        assert (plan.prefix_n_tokens, engine.cache.used()) == (55, 55)
        plan = await decide(plane, "/completion", {"prompt": "A" * 45}, pool_ref="a")
        got = await run(plane, plan, "/completion", {"prompt": "A" * 45})
        assert (got["timings"]["pool_n"], got["reason"]) == (40, None)
        assert engine.hooks.n_materialized == 1


async def test_a_pool_that_cannot_become_resident_gives_unpooled_service(plane):
    await plane.create(prompt="A" * 40, name="a", ttl_s=0)
    await plane.engine.restart()
    await eventually(lambda: plane.control.tree.get("a").residency == "cold")
    for status in (503, 507, 500, 400, 501):
        plane.engine.on("materialize", "request", reply(status, {"error": {"type": "polykv_error", "message": "x"}}))
        plan = await decide(plane, "/completion", {"prompt": "A" * 41})
        assert (plan.pool_id, plan.miss_reason, plan.asked) == (None, "not_resident", 1)
    assert (await decide(plane, "/completion", {"prompt": "A" * 41})).pool_id == 1


async def test_an_attach_meant_for_another_start_is_ignored_and_explained(plane):
    await plane.create(prompt="A" * 40, name="a")
    body = {"prompt": "A" * 41}
    plan = await decide(plane, "/completion", body)
    await plane.engine.restart()
    got = await run(plane, plan, "/completion", body)
    assert got["timings"]["cache_n"] == 0
    assert got["reason"] in ("not_resident", "upstream_restarted")  # nobody waited for an explanation
    await plane.control.refresh()
    assert plane.control.settle(plan, Outcome(status=200, cache_n=0, prompt_n=41)) == "upstream_restarted"
    plan = await decide(plane, "/completion", body)
    assert (await run(plane, plan, "/completion", body, id_slot=1))["timings"]["pool_n"] == 40


async def test_a_pool_released_between_decision_and_request_is_never_wrong(plane):
    await plane.create(prompt="A" * 40, name="a")
    body = {"prompt": "A" * 41}
    plan = await decide(plane, "/completion", body)
    await plane.call("DELETE", "/polykv/pools/a")
    await plane.create(prompt="B" * 40)
    got = await run(plane, plan, "/completion", body)
    assert (got["timings"]["cache_n"], got["reason"]) == (0, "evicted")


async def test_sequences_that_the_engine_lost_are_noticed(plane):
    await plane.create(prompt="A" * 40, name="a")
    pool = plane.engine.ready_pools()[0]
    plane.engine.hooks._clear(pool)
    body = {"prompt": "A" * 41}
    got = await run(plane, await decide(plane, "/completion", body), "/completion", body)
    assert got["reason"] == "not_resident"
    await eventually(lambda: plane.control.tree.get("a").residency == "cold")
    assert (await run(plane, await decide(plane, "/completion", body), "/completion", body, 1))["timings"][
        "pool_n"
    ] == 40


async def explained(plane, plan: AttachPlan, body: dict) -> str | None:
    """As a relay that waits for the explanation before it makes the receipt."""
    outcome = Outcome(status=200, cache_n=0, prompt_n=len(body["prompt"]))
    await plane.control.explain(plan, outcome)
    return plane.control.settle(plan, outcome)


async def test_a_miss_that_is_explained_is_called_by_its_name():
    async with FakeEngine() as engine, planes(engine, heartbeat_s=60) as plane:
        await plane.create(prompt="A" * 40, name="a")
        body = {"prompt": "A" * 41}
        plan = await decide(plane, "/completion", body)
        await engine.restart()
        assert await explained(plane, plan, body) == "upstream_restarted"
        plan = await decide(plane, "/completion", body)
        assert plan.prefix_n_tokens == 40
        engine.hooks._clear(engine.ready_pools()[0])
        assert await explained(plane, plan, body) == "evicted"
        assert (await decide(plane, "/completion", body)).prefix_n_tokens == 40


async def test_a_hit_is_not_explained(plane):
    await plane.create(prompt="A" * 40, name="a")
    plan = await decide(plane, "/completion", {"prompt": "A" * 41})
    n = len(plane.engine.requests("/polykv/engine/pools"))
    await plane.control.explain(plan, Outcome(status=200, cache_n=40, pool_n=40, prompt_n=1))
    await plane.control.explain(plan, Outcome(status=500))
    assert len(plane.engine.requests("/polykv/engine/pools")) == n


async def test_failed_requests_are_not_counted(plane):
    await plane.create(prompt="A" * 40, name="a")
    plan = await decide(plane, "/completion", {"prompt": "A" * 41})
    plane.control.settle(plan, Outcome(status=500))
    plane.control.settle(plan, Outcome())
    assert plane.control.tree.get("a").n_queries == 0


async def test_an_engine_that_cannot_share_serves_unpooled():
    async with FakeEngine(share="recurrent state") as engine, planes(engine) as plane:
        assert (await decide(plane)).miss_reason == "swa_or_recurrent"


async def test_a_render_that_fails_is_unpooled(plane):
    await plane.create(messages=[SYSTEM])
    plane.engine.on("render", "request", drop(), times=None)
    assert (await decide(plane, "/completion", {"prompt": "x"})).miss_reason == "not_resident"
