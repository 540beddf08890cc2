"""Requests that begin alike, at the same time or one after the other: what they share is prefilled once."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from polykv_proxy.control.automatic import MAX_AUTO_POOLS
from polykv_proxy.gate.policy import Policy
from polykv_proxy.relay.turn import STALE_MS
from tests.fake_engine import FakeEngine, Hold, drop, reply
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, SYSTEM, body_of, receipt_at
from tests.relay.raw import until

CHAT = "/v1/chat/completions"
SHORT = {"auto_pool_min_tokens": 128}
"""Tokens have one byte each here, not four: prompts of 128 tokens are as long as otherwise those of 512."""
WORDS = ("Apples?", "Zebras!", "Moving on.", "1 and 2", "Brief: x", "[list]", "<b>", "never mind")


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine, make_proxy: ProxyMaker) -> AsyncIterator[Proxy]:
    async with make_proxy(engine.url, warm_after_s=0, **SHORT) as proxy:
        yield proxy


def n_tokens(engine: FakeEngine, path: str, text: str) -> int:
    return len(engine.template.render(path, body_of(path, text))[0][0])


def n_common(engine: FakeEngine, path: str) -> int:
    """What all questions of this dialect begin with."""
    one, other = (engine.template.render(path, body_of(path, text))[0][0] for text in WORDS[:2])
    return next(i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y)


async def ask(proxy: Proxy, text: str, path: str = CHAT, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """Gives the receipt."""
    answer = await proxy.client.post(path, json=body_of(path, text, stream=stream, session_id=text, **fields))
    assert answer.status_code == 200, answer.text
    return dict(receipt_at(path, answer.content, stream=stream))


async def pools(proxy: Proxy) -> list[dict[str, Any]]:
    listed = (await proxy.client.get("/polykv/pools")).json()["pools"]
    return [dict(pool) for pool in listed]


# At the same time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_what_all_begin_with_is_prefilled_once(
    engine: FakeEngine, proxy: Proxy, path: str, stream: bool, k: int
) -> None:
    hold = Hold()
    engine.on(path, "prefill", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0], path, stream=stream))
    await hold.reached()
    others = [asyncio.create_task(ask(proxy, text, path, stream=stream)) for text in WORDS[1:k]]
    await until(lambda: proxy.control.fan_out.n_waiting == k - 1)
    assert len(engine.requests(path)) == 1, "nobody else is with the engine yet"
    hold.release()
    receipts = await asyncio.gather(first, *others)

    n_shared = n_common(engine, path)
    n_suffixes = sum(n_tokens(engine, path, text) - n_shared for text in WORDS[:k])
    assert engine.n_prompt_cum == n_shared + n_suffixes
    assert receipts[0]["cached_n_tokens"] == 0
    assert [r["cached_n_tokens"] for r in receipts[1:]] == [n_shared] * (k - 1)
    assert [r["miss_reason"] for r in receipts[1:]] == [None] * (k - 1)
    (pool,) = await pools(proxy)
    assert (pool["auto"], pool["pinned"], pool["name"], pool["prefix_len"]) == (True, False, None, n_shared)
    assert {r["pool_id"] for r in receipts[1:]} == {pool["pool_id"]}
    assert engine.cache.used() == n_shared + sum(len(s.tokens) - n_shared for s in engine.slots if s.tokens)
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


async def test_also_without_any_word_of_who_asks(engine: FakeEngine, proxy: Proxy) -> None:
    engine.prefill_s = 0.001
    bodies = [body_of(CHAT, text) for text in WORDS[:4]]
    answers = await asyncio.gather(*(proxy.client.post(CHAT, json=body) for body in bodies))
    assert [a.status_code for a in answers] == [200] * 4
    n_shared = n_common(engine, CHAT)
    assert engine.n_prompt_cum == n_shared + sum(n_tokens(engine, CHAT, text) - n_shared for text in WORDS[:4])


async def test_a_crowd(engine: FakeEngine, proxy: Proxy) -> None:
    engine.prefill_s = 0.0005
    texts = [f"{i}: what is that?" for i in range(60)]
    receipts = await asyncio.gather(*(ask(proxy, text) for text in texts))
    n_shared = n_common(engine, CHAT)
    assert sorted(r["cached_n_tokens"] >= n_shared for r in receipts) == [False] + [True] * 59
    assert engine.n_prompt_cum <= n_shared + sum(n_tokens(engine, CHAT, text) - n_shared for text in texts)
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


async def test_the_others_go_on_while_the_first_still_decodes(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "chunk:1", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0], stream=True))
    await hold.reached()
    receipts = await asyncio.gather(*(ask(proxy, text) for text in WORDS[1:4]))
    assert [r["cached_n_tokens"] for r in receipts] == [n_common(engine, CHAT)] * 3
    assert not first.done()
    hold.release()
    await first


async def test_the_wait_is_told_as_hold(engine: FakeEngine, proxy: Proxy) -> None:
    engine.prefill_s = 0.001
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await until(lambda: bool(engine.requests(CHAT)))
    receipt = await ask(proxy, WORDS[1])
    assert receipt["hold_ms"] >= 100
    assert (await first)["hold_ms"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_one_that_leaves_hands_over(engine: FakeEngine, proxy: Proxy, stream: bool) -> None:
    hold, second = Hold(), Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0], stream=stream))
    await hold.reached()
    others = [asyncio.create_task(ask(proxy, text, stream=stream)) for text in WORDS[1:4]]
    await until(lambda: proxy.control.fan_out.n_waiting == 3)
    engine.on(CHAT, "prefill", second)
    first.cancel()
    await second.reached()
    await until(lambda: proxy.control.fan_out.n_waiting == 2)
    second.release()
    receipts = await asyncio.gather(*others)
    n_shared = n_common(engine, CHAT)
    assert [r["cached_n_tokens"] for r in receipts] == [0, n_shared, n_shared]
    assert len(engine.requests(CHAT)) == 4
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


async def test_the_next_one_gets_the_slot_with_what_was_prefilled(engine: FakeEngine, proxy: Proxy) -> None:
    """The engine keeps what it decoded of a prompt whose client left."""
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await hold.reached()
    (slot,) = [slot for slot in engine.slots if slot.state == "prompt"]
    engine.cache.append(slot, engine.template.render(CHAT, body_of(CHAT))[0][0][:200])
    other = asyncio.create_task(ask(proxy, WORDS[1]))
    await until(lambda: proxy.control.fan_out.n_waiting == 1)
    first.cancel()
    assert (await other)["cached_n_tokens"] == 200
    assert proxy.control.sessions.get(WORDS[1]).slot_id == slot.id  # type: ignore[union-attr]


async def test_a_leader_that_left_is_waited_for_until_the_engine_lets_go_of_it(
    engine: FakeEngine, proxy: Proxy
) -> None:
    """Which looks for its clients once a second."""
    hold, looks = Hold(), Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await hold.reached()
    (slot,) = [slot for slot in engine.slots if slot.state == "prompt"]
    engine.cache.append(slot, engine.template.render(CHAT, body_of(CHAT))[0][0][:200])
    other = asyncio.create_task(ask(proxy, WORDS[1]))
    await until(lambda: proxy.control.fan_out.n_waiting == 1)
    engine.on("stats", "request", looks, times=None)
    await looks.reached()
    first.cancel()
    await until(lambda: slot.state == "idle")
    slot.state = "prompt"
    looks.release()
    await asyncio.sleep(1.5)  # longer than a leader without a slot is waited for
    assert proxy.control.fan_out.n_waiting == 1
    slot.state = "idle"
    assert (await other)["cached_n_tokens"] == 200


async def test_that_slot_is_to_be_had_before_anybody_looks_at_it_again(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot whose client left is kept closed until it is seen at rest; who leads on has seen it."""
    monkeypatch.setattr("polykv_proxy.relay.desk.LOOK_MIN_S", 60)
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await hold.reached()
    (slot,) = [slot for slot in engine.slots if slot.state == "prompt"]
    engine.cache.append(slot, engine.template.render(CHAT, body_of(CHAT))[0][0][:200])
    other = asyncio.create_task(ask(proxy, WORDS[1]))
    await until(lambda: proxy.control.fan_out.n_waiting == 1)
    first.cancel()
    assert (await other)["cached_n_tokens"] == 200


async def test_of_those_who_wait_the_first_in_line_leads_on(engine: FakeEngine, proxy: Proxy) -> None:
    """Not who was compared first: else it follows the one in front of it in line, who follows it."""
    prefill, render = Hold(), Hold()
    engine.on(CHAT, "prefill", prefill)
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await prefill.reached()
    engine.on("render", "request", render)
    others = [asyncio.create_task(ask(proxy, WORDS[1]))]
    await render.reached()
    others += [asyncio.create_task(ask(proxy, text)) for text in WORDS[2:4]]
    await until(lambda: proxy.control.fan_out.n_waiting == 2)
    render.release()
    await until(lambda: proxy.control.fan_out.n_waiting == 3)
    first.cancel()
    receipts = await asyncio.wait_for(asyncio.gather(*others), 20)
    n_shared = n_common(engine, CHAT)
    assert [r["cached_n_tokens"] for r in receipts] == [0, n_shared, n_shared]


async def test_who_leads_on_may_have_some_behind_it_already(engine: FakeEngine, proxy: Proxy) -> None:
    """They share more with it than with the first one; those who do not follow it, too."""
    task = "Read all files in this folder and tell what each of them is for, in one line each. " * 2
    hold, second = Hold(), Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await hold.reached()
    others = []
    for n, text in enumerate((task + "a", task + "b", WORDS[1]), 1):
        others.append(asyncio.create_task(ask(proxy, text)))
        await until(lambda n=n: proxy.control.fan_out.n_waiting == n)
    engine.on(CHAT, "prefill", second)
    first.cancel()
    await second.reached()
    await until(lambda: proxy.control.fan_out.n_waiting == 2)
    second.release()
    receipts = await asyncio.wait_for(asyncio.gather(*others), 20)
    n_shared = n_common(engine, CHAT)
    assert [r["cached_n_tokens"] for r in receipts] == [0, n_shared + len(task), n_shared]
    assert [pool["prefix_len"] for pool in await pools(proxy)] == [n_shared, n_shared + len(task)]
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


@pytest.mark.parametrize(
    "accident",
    [reply(500, {"error": {"code": 500, "message": "no", "type": "server_error"}}), drop()],
    ids=["refused", "dropped"],
)
async def test_a_first_one_that_fails_takes_nobody_along(engine: FakeEngine, proxy: Proxy, accident: Any) -> None:
    hold = Hold()

    async def fail(request: Any) -> Any:
        await hold(request)
        return await accident(request)

    engine.on(CHAT, "prefill", fail)
    first = asyncio.create_task(proxy.client.post(CHAT, json=body_of(CHAT, WORDS[0])))
    await hold.reached()
    others = [asyncio.create_task(ask(proxy, text)) for text in WORDS[1:4]]
    await until(lambda: proxy.control.fan_out.n_waiting == 3)
    hold.release()
    assert (await first).status_code >= 500
    assert sorted(r["cached_n_tokens"] for r in await asyncio.gather(*others)) == [0] + [n_common(engine, CHAT)] * 2


async def test_a_leader_in_line_is_not_waited_for(make_proxy: ProxyMaker) -> None:
    """All stand in line, and what they share is prefilled once all the same."""
    async with FakeEngine(n_slots=1) as engine, make_proxy(engine.url, warm_after_s=0, **SHORT) as proxy:
        hold = Hold()
        engine.on("/completion", "prefill", hold)
        busy = asyncio.create_task(proxy.client.post("/completion", json={"prompt": "other", "n_predict": 1}))
        await hold.reached()
        asked = [asyncio.create_task(ask(proxy, text)) for text in WORDS[:4]]
        await until(lambda: proxy.control.slots.n_waiting == 4)
        hold.release()
        await busy
        n_shared = n_common(engine, CHAT)
        assert [r["cached_n_tokens"] >= n_shared for r in await asyncio.gather(*asked)] == [False, True, True, True]


async def test_a_leader_that_waits_for_cells_takes_nobody_along(make_proxy: ProxyMaker) -> None:
    """Each of them waits as long as it would alone, not one after the other."""
    async with (
        FakeEngine(n_slots=6, n_cells=1000, n_ctx_slot=1000) as engine,
        make_proxy(engine.url, warm_after_s=0, **SHORT) as proxy,
    ):
        proxy.control.room.max_wait_s = 2.0
        hold = Hold()
        engine.on("/completion", "chunk:1", hold)
        big = {"prompt": "b" * 600, "n_predict": 20, "stream": True}
        busy = asyncio.create_task(proxy.client.post("/completion", json=big))
        await hold.reached()
        began_s = asyncio.get_running_loop().time()
        posts = (proxy.client.post(CHAT, json=body_of(CHAT, text + "x" * 200)) for text in WORDS[:4])
        answers = await asyncio.gather(*posts)
        took_s = asyncio.get_running_loop().time() - began_s
        assert [a.status_code for a in answers] == [503] * 4
        assert took_s < 2 * proxy.control.room.max_wait_s + 2.0, "not four times"
        hold.release()
        await busy


async def test_who_leaves_while_he_waits_leaves_nothing(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await hold.reached()
    others = [asyncio.create_task(ask(proxy, text)) for text in WORDS[1:6]]
    await until(lambda: proxy.control.fan_out.n_waiting == 5)
    for other in others[:4]:
        other.cancel()
    await until(lambda: proxy.control.fan_out.n_waiting == 1)
    hold.release()
    assert (await others[4])["cached_n_tokens"] == n_common(engine, CHAT)
    await first
    await until(lambda: proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0))
    assert len(engine.requests(CHAT)) == 2


async def test_when_the_engine_dies_everybody_is_told(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    tasks = [asyncio.create_task(proxy.client.post(CHAT, json=body_of(CHAT, text))) for text in WORDS[:4]]
    await hold.reached()
    await until(lambda: proxy.control.fan_out.n_waiting == 3)
    await engine.kill()
    answers = await asyncio.gather(*tasks)
    assert {a.status_code for a in answers} <= {502, 503}
    await until(lambda: proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0))
    await engine.start()
    await proxy.control.refresh()
    assert (await ask(proxy, WORDS[0]))["cached_n_tokens"] == 0


async def test_two_turns_of_one_session_at_once_share_too(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    posts = [
        asyncio.create_task(proxy.client.post(CHAT, json=body_of(CHAT, text, session_id="one"))) for text in WORDS[:2]
    ]
    await hold.reached()
    await until(lambda: proxy.control.fan_out.n_waiting == 1)
    hold.release()
    answers: list[httpx.Response] = await asyncio.gather(*posts)
    cached = [receipt_at(CHAT, a.content, stream=False)["cached_n_tokens"] for a in answers]
    assert sorted(cached) == [0, n_common(engine, CHAT)]


# One after the other -------------------------------------------------------------------------------------------------


async def test_the_second_session_attaches_to_what_the_first_left(engine: FakeEngine, proxy: Proxy) -> None:
    await ask(proxy, WORDS[0])
    assert await pools(proxy) == []
    assert (await ask(proxy, WORDS[1]))["cached_n_tokens"] == n_common(engine, CHAT)
    assert (await ask(proxy, WORDS[2]))["cached_n_tokens"] == n_common(engine, CHAT)
    assert [pool["prefix_len"] for pool in await pools(proxy)] == [n_common(engine, CHAT)]


async def test_a_few_words_too_many_in_an_automatic_pool_are_no_miss(engine: FakeEngine, proxy: Proxy) -> None:
    for text in ("Task 0: count", "Task 1: add"):
        await ask(proxy, text)
    (pool,) = await pools(proxy)
    receipt = await ask(proxy, "Write a poem")
    assert receipt["cached_n_tokens"] == receipt["prefix_n_tokens"] == pool["prefix_len"] - len("Task ")
    assert (receipt["pool_id"], receipt["miss_reason"]) == (pool["pool_id"], None)
    (pool,) = await pools(proxy)
    assert (pool["queries"], pool["hits"]) == (2, 2)
    named = await ask(proxy, "Write a song", pool_id=pool["pool_id"])
    assert named["miss_reason"] == "diverged", "who asks for a pool is told that he does not get all of it"


async def test_when_nobody_holds_it_any_more_the_next_one_prefills_and_it_is_a_pool(
    engine: FakeEngine, proxy: Proxy
) -> None:
    await ask(proxy, WORDS[0])
    for slot in engine.slots:
        slot.cut(0)
    proxy.control.sessions.drop(WORDS[0])  # type: ignore[arg-type]
    proxy.control.slots.forget([WORDS[0]])  # type: ignore[list-item]
    assert (await ask(proxy, WORDS[1]))["cached_n_tokens"] == 0
    await until(lambda: len(proxy.control.tree) == 1)
    assert (await ask(proxy, WORDS[2]))["cached_n_tokens"] == n_common(engine, CHAT)


async def test_what_a_session_left_is_shared_after_its_books_are_closed(engine: FakeEngine, proxy: Proxy) -> None:
    """Who names no session is forgotten after a while; its slot still holds what it said, as long as nobody took it."""
    await proxy.client.post(CHAT, json=body_of(CHAT, WORDS[0]))
    proxy.control.sessions.anonymous_idle_s = 0
    await until(lambda: len(proxy.control.sessions) == 0)
    receipt = await ask(proxy, WORDS[1])
    assert (receipt["cached_n_tokens"], receipt["miss_reason"]) == (n_common(engine, CHAT), None)
    assert [pool["prefix_len"] for pool in await pools(proxy)] == [n_common(engine, CHAT)]


async def test_what_somebody_else_put_there_since_is_not_shared(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.client.post(CHAT, json=body_of(CHAT, WORDS[0]))
    proxy.control.sessions.anonymous_idle_s = 0
    await until(lambda: len(proxy.control.sessions) == 0)
    (slot,) = [slot for slot in engine.slots if slot.tokens]
    other = {"prompt": "Nothing of the kind. " * 60, "id_slot": slot.id, "n_predict": 2}
    assert (await proxy.client.post("/completion", json=other)).status_code == 200
    n_before = engine.n_prompt_cum
    assert (await ask(proxy, WORDS[1]))["cached_n_tokens"] == 0
    assert engine.n_prompt_cum - n_before == n_tokens(engine, CHAT, WORDS[1])
    orders = [order for order in engine.requests("/polykv/engine/pools") if order.method == "POST"]
    n_tried = [order.json()["op"] for order in orders].count("snapshot")
    assert n_tried == 1, "once it is seen to be another one's it is left alone"


async def test_what_a_parked_session_said_is_loaded_and_shared(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=1 << 30) as engine, make_proxy(engine.url, warm_after_s=0.1, **SHORT) as proxy:
        await ask(proxy, WORDS[0])
        await until(lambda: not any(slot.tokens for slot in engine.slots))
        n_before = engine.n_prompt_cum
        receipt = await ask(proxy, WORDS[1])
        assert receipt["cached_n_tokens"] == n_common(engine, CHAT)
        assert engine.n_prompt_cum - n_before == n_tokens(engine, CHAT, WORDS[1]) - n_common(engine, CHAT)
        assert (await ask(proxy, WORDS[0]))["cached_n_tokens"] > n_common(engine, CHAT), "it has its own still"


async def test_what_cannot_be_loaded_is_prefilled(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=1 << 30) as engine, make_proxy(engine.url, warm_after_s=0.1, **SHORT) as proxy:
        await ask(proxy, WORDS[0])
        await until(lambda: not any(slot.tokens for slot in engine.slots))
        engine.saved.ram.clear()
        assert (await ask(proxy, WORDS[1]))["cached_n_tokens"] == 0
        assert (await ask(proxy, WORDS[2]))["cached_n_tokens"] == n_common(engine, CHAT)


async def test_a_deeper_beginning_becomes_a_pool_below(engine: FakeEngine, proxy: Proxy) -> None:
    task = "Read all files in this folder and tell what each of them is for, in one line each. " * 2
    await ask(proxy, WORDS[0])
    await ask(proxy, WORDS[1])
    await ask(proxy, task + "a")
    deeper = await ask(proxy, task + "b")
    root, child = sorted(await pools(proxy), key=lambda pool: pool["prefix_len"])
    assert child["parent"] == root["pool_id"]
    assert child["prefix_len"] == root["prefix_len"] + len(task) == deeper["cached_n_tokens"]


async def test_a_session_that_goes_on_waits_for_nobody(engine: FakeEngine, proxy: Proxy) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Go"}]
    body = {"messages": messages, "session_id": "main", "max_tokens": 4}
    said = (await proxy.client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    other = asyncio.create_task(ask(proxy, WORDS[1]))
    await hold.reached()
    more = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "On"}]
    answer = await proxy.client.post(CHAT, json=body | {"messages": more})
    n_before = len(engine.template.render(CHAT, {"messages": messages})[0][0])
    assert answer.json()["polykv"]["cached_n_tokens"] > n_before
    hold.release()
    await other


async def test_agents_that_name_nothing_are_worth_keeping(engine: FakeEngine, proxy: Proxy) -> None:
    """They go on, as one that is like nobody hardly ever does; also who came first, and attached to nothing."""
    for _ in range(2):
        bodies = [body_of(CHAT, text) for text in WORDS[:2]]
        await asyncio.gather(*(proxy.client.post(CHAT, json=body) for body in bodies))
    await proxy.chat("Once upon a time")
    assert [session.may_return for session in proxy.control.sessions] == [True] * 4 + [False]


# None of it ----------------------------------------------------------------------------------------------------------


async def test_prompts_that_are_not_alike_cost_nothing(engine: FakeEngine, proxy: Proxy) -> None:
    n_stats = len(engine.requests("/polykv/engine/stats"))
    proxy.control.watch._heartbeat_s = 60
    for i in range(20):
        messages = [{"role": "user", "content": f"{i} is another question. " * 40}]
        assert (await proxy.client.post(CHAT, json={"messages": messages, "max_tokens": 1})).status_code == 200
    assert not engine.requests("/polykv/engine/render")
    assert len(engine.requests("/polykv/engine/stats")) <= n_stats + 2
    assert len(proxy.control.tree) == 0


async def test_many_agents_with_one_prompt_are_not_compared_again(engine: FakeEngine, proxy: Proxy) -> None:
    for i in range(3):
        await ask(proxy, f"{i} tasks")
    n_renders = len(engine.requests("/polykv/engine/render"))
    for i in range(3, 20):
        await ask(proxy, f"{i} tasks")
    assert len(proxy.control.tree) == 1
    # Each is new to the matcher, which renders it once; none of the others is rendered for it again.
    assert len(engine.requests("/polykv/engine/render")) <= n_renders + 17


async def test_a_small_request_costs_the_engine_nothing_more(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    """However many say the same: there is too little in it to be shared."""
    async with make_proxy(engine.url) as proxy:
        answers = [await proxy.chat("hello " * 30) for _ in range(4)]
        answers += await asyncio.gather(*(proxy.chat("hello " * 30) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert engine.requests("/polykv/engine/render") == []


async def test_what_cannot_be_rendered_is_not_tried_again_and_again(engine: FakeEngine, proxy: Proxy) -> None:
    engine.on("render", "request", reply(500, {"error": {"code": 500, "message": "no"}}), times=None)
    for text in WORDS:
        assert (await proxy.client.post(CHAT, json=body_of(CHAT, text))).status_code == 200
    assert len(engine.requests("/polykv/engine/render")) <= 2
    assert len(proxy.control.tree) == 0


async def test_what_cannot_have_so_many_tokens_is_not_looked_at(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url) as proxy:
        fan_out = proxy.control.fan_out
        assert (fan_out.concerns(255), fan_out.concerns(256)) == (False, True)
        fan_out.counted(1000, 100)
        assert (fan_out.concerns(1279), fan_out.concerns(1280)) == (False, True), "twice as dense, but not more"
        fan_out.counted(1000, 50)
        fan_out.counted(10, 10)
        assert not fan_out.concerns(1279), "the most counts, and what is too short anyway does not"
        answer = await proxy.chat("hello " * 50)
        timings, n_bytes = answer.json()["timings"], len(answer.request.content)
        assert fan_out.tokens_per_byte == (timings["cache_n"] + timings["prompt_n"]) / n_bytes > 0.1
        assert fan_out.concerns(n_bytes)


@pytest.mark.parametrize("settings", [{"auto_pool_min_tokens": 0}, {"mode": "explicit"}, {"auto_pool_min_tokens": 999}])
async def test_when_it_is_off_everybody_prefills(
    engine: FakeEngine, make_proxy: ProxyMaker, settings: dict[str, Any]
) -> None:
    async with make_proxy(engine.url, **settings) as proxy:
        await asyncio.gather(*(ask(proxy, text) for text in WORDS[:4]))
        assert engine.n_prompt_cum == sum(n_tokens(engine, CHAT, text) for text in WORDS[:4])
        assert len(proxy.control.tree) == 0


async def test_no_sequence_to_be_had_is_no_reason_to_fail(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(max_pools=1) as engine, make_proxy(engine.url, **SHORT) as proxy:
        pool = await proxy.pool(tokens=[1, 2, 3])
        await proxy.client.post(f"/polykv/pools/{pool['pool_id']}/pin")
        receipts = await asyncio.gather(*(ask(proxy, text) for text in WORDS[:4]))
        assert [r["cached_n_tokens"] for r in receipts] == [0] * 4


async def test_who_has_a_slot_waits_for_nobody_who_is_in_line_for_it(make_proxy: ProxyMaker) -> None:
    """No sequence to be had, one slot, and the second request gets it after the third: it is decided anew then."""
    async with FakeEngine(max_pools=1, n_slots=1) as engine, make_proxy(engine.url) as proxy:
        pool = await proxy.pool(tokens=[1, 2, 3])
        await proxy.client.post(f"/polykv/pools/{pool['pool_id']}/pin")
        prefill, render = Hold(), Hold()
        engine.on(CHAT, "prefill", prefill)
        requests = [asyncio.create_task(ask(proxy, WORDS[0]))]
        await prefill.reached()
        engine.on("render", "request", render)
        requests.append(asyncio.create_task(ask(proxy, WORDS[1])))
        await render.reached()
        requests.append(asyncio.create_task(ask(proxy, WORDS[2])))
        await until(lambda: proxy.control.fan_out.n_waiting == 1)
        render.release()
        await until(lambda: proxy.control.fan_out.n_waiting == 2)
        engine.on(CHAT, "reply", decoded := Hold())
        prefill.release()
        await until(lambda: proxy.relay.desk.n_waiting == 2)
        await asyncio.sleep(2 * STALE_MS / 1e3)
        decoded.release()
        receipts = await asyncio.wait_for(asyncio.gather(*requests), 20)
        assert [r["pool_id"] for r in receipts] == [None] * 3


async def test_a_first_one_that_decodes_behind_another_prompt_is_not_waited_for(
    engine: FakeEngine, proxy: Proxy
) -> None:
    """What the engine made of its body is not what the engine rendered for us: that is never shared."""
    hold = Hold()
    engine.on(CHAT, "chunk:1", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0], stream=True))
    await hold.reached()
    (slot,) = [slot for slot in engine.slots if slot.state == "generating"]
    slot.n_prompt += 1
    receipt = await asyncio.wait_for(ask(proxy, WORDS[1]), 20)
    assert (receipt["pool_id"], receipt["cached_n_tokens"], first.done()) == (None, 0, False)
    hold.release()
    await first


async def test_cells_that_are_not_shared_are_prefilled_once_for_all(engine: FakeEngine, proxy: Proxy) -> None:
    """A sliding window gave them to others while the first one decodes."""
    lost = {"error": {"code": 409, "message": "slot 0 lost cells of its first 352 tokens", "type": "polykv_error"}}
    engine.on("snapshot", "request", reply(409, lost), times=None)
    hold = Hold()
    engine.on(CHAT, "chunk:1", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0], stream=True))
    await hold.reached()
    receipts = await asyncio.wait_for(asyncio.gather(*(ask(proxy, text) for text in WORDS[1:4])), 20)
    assert [r["cached_n_tokens"] for r in receipts] == [n_common(engine, CHAT)] * 3
    assert engine.hooks.n_materialized == 1
    hold.release()
    await first


async def test_an_engine_that_cannot_say_is_not_waited_for(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polykv_proxy.control.flights.ASKED_S", 1.0)
    await ask(proxy, WORDS[0])
    hold = Hold()
    engine.on("stats", "request", hold, times=None)
    began_s = asyncio.get_running_loop().time()
    receipt = await ask(proxy, WORDS[1], max_tokens=1)
    assert receipt["hold_ms"] >= 900
    assert asyncio.get_running_loop().time() - began_s < 10
    hold.release()


async def test_an_engine_that_is_in_a_long_batch_says_it_after_that(engine: FakeEngine, proxy: Proxy) -> None:
    """The stats come between two batches. Who gave up before would stand behind the same batch, and prefill it all."""
    await ask(proxy, WORDS[0])
    batch = Hold()
    engine.on("stats", "request", batch, times=None)
    second = asyncio.create_task(ask(proxy, WORDS[1]))
    await until(lambda: proxy.control.fan_out.n_waiting == 1)
    await asyncio.sleep(1.5)  # longer than a leader without a slot is waited for
    assert proxy.control.fan_out.n_waiting == 1
    batch.release()
    assert (await second)["cached_n_tokens"] == n_common(engine, CHAT)


# In two dialects -----------------------------------------------------------------------------------------------------

COMPLETIONS = "/v1/completions"


def written_out(engine: FakeEngine, text: str) -> dict[str, Any]:
    """The prompt of ``body_of(CHAT, text)`` as a client writes it that has the template itself."""
    tokens = engine.template.render(CHAT, body_of(CHAT, text))[0][0]
    body = {"prompt": engine.template.tokenizer.decode(tokens), "max_tokens": 4}
    assert engine.template.render(COMPLETIONS, body)[0][0] == tokens
    return body


async def forget_what_slots_hold(engine: FakeEngine, proxy: Proxy) -> None:
    """As when nobody has come for a while."""
    proxy.control.sessions.anonymous_idle_s = 0
    await until(lambda: len(proxy.control.sessions) == 0)
    proxy.control.sessions.anonymous_idle_s = 30
    for slot in engine.slots:
        slot.cut(0)


@pytest.mark.parametrize("first", [CHAT, "/v1/messages", "/v1/responses"])
async def test_who_comes_while_the_pool_is_made_waits_for_it_in_another_dialect_too(
    engine: FakeEngine, proxy: Proxy, first: str
) -> None:
    """The second one was just served, its slot is about to become a pool, and no two bodies begin alike."""
    post = proxy.client.post
    assert (await post(first, json=body_of(first, WORDS[0]))).status_code == 200
    await forget_what_slots_hold(engine, proxy)
    making = Hold()
    engine.on("snapshot", "request", making)
    assert (await post(first, json=body_of(first, WORDS[1]))).status_code == 200
    await making.reached()
    assert len(proxy.control.tree) == 0
    third = asyncio.create_task(post(COMPLETIONS, json=written_out(engine, WORDS[2])))
    await until(lambda: proxy.control.fan_out.n_waiting == 1)
    assert engine.requests(COMPLETIONS) == []
    n_before = engine.n_prompt_cum
    making.release()
    receipt = receipt_at(COMPLETIONS, (await third).content, stream=False)
    (pool,) = await pools(proxy)
    assert (receipt["pool_id"], receipt["cached_n_tokens"]) == (pool["pool_id"], n_common(engine, CHAT))
    assert engine.n_prompt_cum - n_before == n_tokens(engine, CHAT, WORDS[2]) - n_common(engine, CHAT)


async def test_what_was_rendered_is_found_by_its_tokens(engine: FakeEngine, proxy: Proxy) -> None:
    """With a pool on the tree prompts are rendered anyway: a slot is shared between two dialects at no render more."""
    await proxy.pool(tokens=[1, 2, 3])
    await proxy.client.post(CHAT, json=body_of(CHAT, WORDS[0]))
    n_renders = len(engine.requests("/polykv/engine/render"))
    assert n_renders == 1
    answer = await proxy.client.post(COMPLETIONS, json=written_out(engine, WORDS[1]))
    receipt = receipt_at(COMPLETIONS, answer.content, stream=False)
    assert (receipt["cached_n_tokens"], receipt["miss_reason"]) == (n_common(engine, CHAT), None)
    assert len(engine.requests("/polykv/engine/render")) == n_renders + 1
    assert [pool["prefix_len"] for pool in await pools(proxy) if pool["auto"]] == [n_common(engine, CHAT)]


async def test_nobody_is_rendered_for_a_pool_that_is_made_who_goes_on_in_its_own_slot(
    engine: FakeEngine, proxy: Proxy
) -> None:
    body = {"messages": [{"role": "user", "content": "Once upon a time. " * 40}], "session_id": "main", "max_tokens": 4}
    said = (await proxy.client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]
    making = Hold()
    await ask(proxy, WORDS[0])
    engine.on("snapshot", "request", making)
    second = asyncio.create_task(ask(proxy, WORDS[1]))
    await making.reached()
    n_renders = len(engine.requests("/polykv/engine/render"))
    more = [*body["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "On"}]
    assert (await proxy.client.post(CHAT, json=body | {"messages": more})).status_code == 200
    assert len(engine.requests("/polykv/engine/render")) == n_renders
    making.release()
    await second


# Families ------------------------------------------------------------------------------------------------------------


def otherwise(text: str, **fields: Any) -> dict[str, Any]:
    """The same prompt as ``body_of``, its system message in parts."""
    body = body_of(CHAT, text, **fields)
    body["messages"][0]["content"] = [{"type": "text", "text": body["messages"][0]["content"]}]
    return body


@pytest.mark.parametrize(("keys", "shares"), [(("agents", "agents"), True), ((None, None), False), (("a", "b"), False)])
async def test_a_family_shares_what_is_written_otherwise(
    engine: FakeEngine, proxy: Proxy, keys: tuple[str | None, str | None], shares: bool
) -> None:
    """The first one is waited for, and the beginning is prefilled once."""
    bodies = [body_of(CHAT, WORDS[0], session_id="one"), otherwise(WORDS[1], session_id="two")]
    bodies = [body | ({"prompt_cache_key": key} if key else {}) for body, key in zip(bodies, keys, strict=True)]
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(proxy.client.post(CHAT, json=bodies[0]))
    await hold.reached()
    second = asyncio.create_task(proxy.client.post(CHAT, json=bodies[1]))
    if shares:
        await until(lambda: proxy.control.fan_out.n_waiting == 1)
        assert len(engine.requests(CHAT)) == 1
    else:
        await second
    hold.release()
    answers = [await first, await second]
    n_shared = n_common(engine, CHAT)
    n_each = [n_tokens(engine, CHAT, text) for text in WORDS[:2]]
    assert engine.n_prompt_cum == sum(n_each) - (n_shared if shares else 0)
    timings = [answer.json()["timings"] for answer in answers]
    assert [one["cache_n"] for one in timings] == [0, n_shared if shares else 0]


async def test_other_keys_keep_nobody_apart(engine: FakeEngine, proxy: Proxy) -> None:
    receipts = [await ask(proxy, text, prompt_cache_key=text) for text in WORDS[:2]]
    assert [r["cached_n_tokens"] for r in receipts] == [0, n_common(engine, CHAT)]


async def test_one_key_for_all_costs_a_look_at_each_kind_of_prompt(engine: FakeEngine, proxy: Proxy) -> None:
    for i in range(6):
        for name in "ab":
            body = {"prompt": f"{i} is another. " * 40 + name, "n_predict": 2, "prompt_cache_key": "all"}
            assert (await proxy.client.post("/completion", json=body)).status_code == 200
    assert [pool["prefix_len"] for pool in await pools(proxy)] == [len("0 is another. ") * 40] * 6
    assert len(engine.requests("/polykv/engine/render")) <= 12


# Ageing --------------------------------------------------------------------------------------------------------------


async def test_what_was_not_used_for_long_is_taken_off_the_tree(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, session_idle_s=0.2, session_gap_s=0.1, **SHORT) as proxy:
        ordered = await proxy.pool(tokens=[1, 2, 3])
        await asyncio.gather(*(ask(proxy, text) for text in WORDS[:2]))
        assert len(proxy.control.tree) == 2
        await until(lambda: len(proxy.control.tree) == 1)
        assert [pool["pool_id"] for pool in await pools(proxy)] == [ordered["pool_id"]]


@pytest.mark.parametrize("wish", ["policy", "pin"])
async def test_what_somebody_wants_something_of_stays(engine: FakeEngine, make_proxy: ProxyMaker, wish: str) -> None:
    async with make_proxy(engine.url, session_idle_s=0.2, session_gap_s=0.1, **SHORT) as proxy:
        await asyncio.gather(*(ask(proxy, text) for text in WORDS[:2]))
        (pool,) = proxy.control.tree
        if wish == "policy":
            await proxy.control.set_policy(pool.pool_id, Policy(target_tps_per_session=2))
        else:
            await proxy.control.pin_pool(pool.pool_id)
        await until(lambda: pool.last_use_s < proxy.control.clock() - 1)
        assert list(proxy.control.tree) == [pool]
        if wish == "policy":
            await proxy.control.drop_policy(pool.pool_id)
        else:
            await proxy.control.unpin_pool(pool.pool_id)
        await until(lambda: not len(proxy.control.tree))


async def test_there_are_not_more_than_so_many(
    engine: FakeEngine, make_proxy: ProxyMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polykv_proxy.control.automatic.MAX_AUTO_POOLS", 2)
    assert MAX_AUTO_POOLS > 16
    async with make_proxy(engine.url, session_gap_s=0) as proxy:
        for name in "abc":
            prompt = f"{name} is what this one begins with. " * 20
            for task in ("Zero", "one"):
                body = {"prompt": prompt + task, "n_predict": 2, "session_id": name + task}
                assert (await proxy.client.post("/completion", json=body)).status_code == 200
        await until(lambda: len(proxy.control.tree) == 2)
        assert [pool["pool_id"] for pool in await pools(proxy)] == [2, 3], "the longest unused went"
