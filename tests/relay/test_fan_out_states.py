"""Requests that begin alike, on a model whose memory is one state per sequence: it cannot be cut where they part.

The engine keeps states a little before the end of a prompt (64 and 4 tokens here); tokens have one byte each.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.fake_engine import FakeEngine, Hold, reply
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import until
from tests.relay.test_fan_out import CHAT, SHORT, WORDS, ask, n_common, n_tokens, pools

BEFORE_END = 64
"""Where a prompt's last state but one was kept; the last one is behind the beginning that is shared."""


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(recurrent=True) as engine:
        yield engine


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine, make_proxy: ProxyMaker) -> AsyncIterator[Proxy]:
    async with make_proxy(engine.url, warm_after_s=0, **SHORT) as proxy:
        yield proxy


def n_prefilled(engine: FakeEngine) -> int:
    return engine.n_prompt_cum + engine.hooks.n_processed


def n_due(engine: FakeEngine, texts: tuple[str, ...]) -> int:
    """What they share once, and the rest of each."""
    n_shared = n_common(engine, CHAT)
    return n_shared + sum(n_tokens(engine, CHAT, text) - n_shared for text in texts)


def n_behind_state(engine: FakeEngine, leader: str) -> int:
    """Of the beginning that all share: what comes after the last state that was kept before its end."""
    return n_common(engine, CHAT) - (n_tokens(engine, CHAT, leader) - BEFORE_END)


async def only_its_pools(proxy: Proxy, engine: FakeEngine) -> None:
    """Nothing that was borrowed is left in the engine."""
    await until(lambda: len(engine.ready_pools()) == len(proxy.control.tree))


@pytest.mark.parametrize("k", [2, 4, 8])
async def test_what_all_begin_with_is_prefilled_once_but_for_the_end(engine: FakeEngine, proxy: Proxy, k: int) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await hold.reached()
    others = [asyncio.create_task(ask(proxy, text)) for text in WORDS[1:k]]
    await until(lambda: proxy.control.fan_out.n_waiting == k - 1)
    hold.release()
    receipts = await asyncio.gather(first, *others)
    n_shared = n_common(engine, CHAT)
    assert [r["cached_n_tokens"] for r in receipts] == [0] + [n_shared] * (k - 1)
    assert [r["miss_reason"] for r in receipts[1:]] == [None] * (k - 1)
    assert 0 < n_behind_state(engine, WORDS[0]) < BEFORE_END
    assert n_prefilled(engine) == n_due(engine, WORDS[:k]) + n_behind_state(engine, WORDS[0])
    assert [(pool["auto"], pool["prefix_len"]) for pool in await pools(proxy)] == [(True, n_shared)]
    await only_its_pools(proxy, engine)
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


async def test_without_a_state_on_the_way_it_is_prefilled_twice_however_many_ask(
    engine: FakeEngine, proxy: Proxy
) -> None:
    texts = ("A long story. " * 10, *WORDS[1:6])
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(ask(proxy, texts[0]))
    await hold.reached()
    others = [asyncio.create_task(ask(proxy, text)) for text in texts[1:]]
    await until(lambda: proxy.control.fan_out.n_waiting == 5)
    hold.release()
    receipts = await asyncio.gather(first, *others)
    n_shared = n_common(engine, CHAT)
    assert [r["cached_n_tokens"] for r in receipts] == [0] + [n_shared] * 5
    assert n_prefilled(engine) == n_due(engine, texts) + n_shared
    await only_its_pools(proxy, engine)


async def test_the_second_session_goes_on_from_what_the_first_left(engine: FakeEngine, proxy: Proxy) -> None:
    for text in WORDS[:3]:
        await ask(proxy, text)
    assert n_prefilled(engine) == n_due(engine, WORDS[:3]) + n_behind_state(engine, WORDS[0])


async def test_a_first_one_that_leaves_hands_over(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await hold.reached()
    others = [asyncio.create_task(ask(proxy, text)) for text in WORDS[1:4]]
    await until(lambda: proxy.control.fan_out.n_waiting == 3)
    first.cancel()
    receipts = await asyncio.wait_for(asyncio.gather(*others), 20)
    assert [r["cached_n_tokens"] for r in receipts] == [0] + [n_common(engine, CHAT)] * 2
    assert n_prefilled(engine) == n_due(engine, WORDS[1:4]) + n_behind_state(engine, WORDS[1])


async def test_where_others_part_earlier_is_a_pool_of_its_own(engine: FakeEngine, proxy: Proxy) -> None:
    """A pool that ends a few tokens too late is of no use there."""
    for text in ("Task 0: count", "Task 1: add"):
        await ask(proxy, text)
    (longer,) = await pools(proxy)
    n_shared = longer["prefix_len"] - len("Task ")
    before = n_prefilled(engine)
    assert (await ask(proxy, "Write a poem"))["cached_n_tokens"] == n_shared
    assert n_prefilled(engine) - before < BEFORE_END + n_tokens(engine, CHAT, "Write a poem") - n_shared
    assert [pool["prefix_len"] for pool in await pools(proxy)] == [longer["prefix_len"], n_shared]
    assert (await ask(proxy, "Sing a song"))["cached_n_tokens"] == n_shared
    assert (await ask(proxy, "Task 2: go"))["cached_n_tokens"] == longer["prefix_len"]
    assert len(proxy.control.tree) == 2


async def test_a_longer_pool_is_no_holder_of_one_that_left(engine: FakeEngine, proxy: Proxy) -> None:
    """It comes back from a state that the longer one kept, and is whole again."""
    for text in ("Task 0: count", "Task 1: add", "Write a poem"):
        await ask(proxy, text)
    _, pool = await pools(proxy)
    (await proxy.client.post(f"/polykv/pools/{pool['pool_id']}/evict?to=cold")).raise_for_status()
    assert len(engine.ready_pools()) == 1
    before = n_prefilled(engine)
    receipt = await ask(proxy, "Sing a song")
    assert (receipt["cached_n_tokens"], receipt["miss_reason"]) == (pool["prefix_len"], None)
    assert n_prefilled(engine) - before < BEFORE_END + n_tokens(engine, CHAT, "Sing a song") - pool["prefix_len"]


async def test_a_pool_above_is_gone_on_from(engine: FakeEngine, proxy: Proxy) -> None:
    task = "Read all files in this folder and tell what each of them is for, in one line each. " * 2
    for text in WORDS[:2]:
        await ask(proxy, text)
    before = n_prefilled(engine)
    receipts = [await ask(proxy, task + text) for text in "ab"]
    root, child = sorted(await pools(proxy), key=lambda pool: pool["prefix_len"])
    assert (child["parent"], child["branch_pos"]) == (root["pool_id"], root["prefix_len"])
    assert [r["cached_n_tokens"] for r in receipts] == [root["prefix_len"], child["prefix_len"]]
    n_suffix = n_tokens(engine, CHAT, task + "a") - child["prefix_len"]
    assert n_prefilled(engine) - before == 2 * len(task) + 2 * n_suffix


async def test_who_waits_goes_on_waiting_when_the_first_one_ended(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool may take longer than its answer."""
    monkeypatch.setattr("polykv_proxy.control.flights.GRANT_S", 0.1)
    hold = Hold()
    engine.on("materialize", "request", hold)
    first = asyncio.create_task(ask(proxy, WORDS[0]))
    await until(lambda: bool(engine.requests(CHAT)))
    others = [asyncio.create_task(ask(proxy, text)) for text in WORDS[1:4]]
    await hold.reached()
    await first
    await until(lambda: proxy.control.fan_out.n_waiting == 3)
    await asyncio.sleep(0.5)
    hold.release()
    assert [r["cached_n_tokens"] for r in await asyncio.gather(*others)] == [n_common(engine, CHAT)] * 3


async def test_one_sequence_is_enough(make_proxy: ProxyMaker) -> None:
    """There is none to borrow: then the pool is prefilled in full."""
    async with FakeEngine(recurrent=True, max_pools=1) as engine, make_proxy(engine.url, **SHORT) as proxy:
        receipts = [await ask(proxy, text) for text in WORDS[:3]]
        n_shared = n_common(engine, CHAT)
        assert [r["cached_n_tokens"] for r in receipts] == [0, n_shared, n_shared]
        assert n_prefilled(engine) == n_due(engine, WORDS[:3]) + n_shared


async def test_who_stands_in_line_for_a_slot_goes_on_from_a_state_too(make_proxy: ProxyMaker) -> None:
    """Nobody was sent yet: what they share is prefilled once, and what comes after the last state before its end."""
    async with (
        FakeEngine(recurrent=True, n_slots=1) as engine,
        make_proxy(engine.url, warm_after_s=0, **SHORT) as proxy,
    ):
        hold = Hold()
        engine.on("/completion", "prefill", hold)
        busy = asyncio.create_task(proxy.client.post("/completion", json={"prompt": "other", "n_predict": 1}))
        await hold.reached()
        before = n_prefilled(engine)
        asked = [asyncio.create_task(ask(proxy, text)) for text in WORDS[:4]]
        await until(lambda: proxy.control.slots.n_waiting == 4)
        hold.release()
        await busy
        receipts = await asyncio.gather(*asked)
        assert receipts[0]["cached_n_tokens"] == 0
        n_again = n_prefilled(engine) - before - n_due(engine, WORDS[:4]) - len("other")
        assert 0 < n_again < 4 * BEFORE_END


@pytest.mark.parametrize("op", ["snapshot", "materialize"])
async def test_what_the_engine_refuses_is_done_without(engine: FakeEngine, proxy: Proxy, op: str) -> None:
    refusal = {"error": {"code": 500, "message": "no", "type": "polykv_error"}}
    engine.on(op, "request", reply(500, refusal), times=None)
    answers: list[Any] = await asyncio.gather(*(ask(proxy, text) for text in WORDS[:4]))
    assert [r["cached_n_tokens"] for r in answers] == [0] * 4
    await until(lambda: not engine.ready_pools())
    assert len(proxy.control.tree) == 0


async def test_a_mark_makes_a_pool_of_the_requests_own_slot(engine: FakeEngine, proxy: Proxy) -> None:
    text = "You are one of many agents. " * 12
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    body = {"system": system, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert (await proxy.client.post("/v1/messages", json=body)).status_code == 200
    await until(lambda: len(proxy.control.tree) == 1)
    n_own = len(engine.template.render("/v1/messages", body)[0][0])
    (pool,) = await pools(proxy)
    assert n_prefilled(engine) == n_own + pool["prefix_len"] - (n_own - BEFORE_END)
