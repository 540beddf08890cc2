"""A full cache as clients see it: room is made for requests without a pool too, or they wait, or they are told."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from polykv_proxy.control import CreatePool, ForkPool, Source
from tests.fake_engine import FakeEngine, Hold, delay
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import until

PATH = "/completion"
RENDER = "/polykv/engine/render"
IMAGE = {"prompt_string": "look", "multimodal_data": ["aGVsbG8="]}
INCOMPATIBLE = [{"cache_prompt": False}, {"lora": [{"id": 0, "scale": 0.5}]}, {"id_slot": 1}]


@pytest.fixture
async def engine():
    async with FakeEngine(n_cells=1000) as engine:
        yield engine


def ask(proxy: Proxy, prompt: Any, n_predict: int = 4, **fields: Any) -> "asyncio.Task[httpx.Response]":
    body = {"prompt": prompt, "n_predict": n_predict, **fields}
    return asyncio.create_task(proxy.client.post(PATH, json=body))


async def held(
    engine: FakeEngine, proxy: Proxy, prompt: Any, **fields: Any
) -> "tuple[Hold, asyncio.Task[httpx.Response]]":
    """A request that the engine has, and keeps."""
    hold = Hold()
    engine.on(PATH, "prefill", hold)
    task = ask(proxy, prompt, **fields)
    await hold.reached()
    return hold, task


def residency(proxy: Proxy) -> dict[str | None, str]:
    return {pool.name: pool.residency for pool in proxy.control.tree}


# Enough room ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, *INCOMPATIBLE])
async def test_a_roomy_cache_is_not_asked_and_nothing_is_rendered(
    make_proxy: ProxyMaker, fields: dict[str, Any]
) -> None:
    async with FakeEngine() as engine, make_proxy(engine.url) as proxy:
        if fields:
            await proxy.pool(tokens=[1] * 300)
        before = len(engine.received)
        for i in range(8):
            assert (await ask(proxy, f"{i} " * 800, **fields)).status_code == 200
        asked = [r.path for r in engine.received[before:] if not r.path.endswith("/stats")]
        assert asked == [PATH] * 8
        n_beats = len(engine.requests("/polykv/engine/stats"))
        assert n_beats <= before + 3  # the heartbeat's own
        assert proxy.control.room._promises == {}


# Evicting ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", INCOMPATIBLE)
async def test_unused_pools_leave_for_a_request_that_gets_none(
    engine: FakeEngine, proxy: Proxy, fields: dict[str, Any]
) -> None:
    await proxy.pool(tokens=[1] * 300, name="old")
    await proxy.pool(tokens=[2] * 300, name="new")
    answer = await ask(proxy, "x" * 600, **fields)
    assert (answer.status_code, answer.json().get("tokens_predicted")) == (200, 4), answer.text
    assert residency(proxy) == {"old": "cold", "new": "resident"}
    (received,) = engine.requests(PATH)
    assert received.body.startswith(answer.request.content[:-1])


async def attached_to_a_parent_that_gave_its_sequence(proxy: Proxy) -> None:
    """An idle slot holds 300 cells that a child's sequence holds too, and the engine does not say so any more."""
    parent = await proxy.pool(tokens=[1] * 300, name="parent")
    await proxy.control.fork_pool(parent["pool_id"], ForkPool(source=Source(own_tokens=[2] * 5), name="child"))
    answer = await ask(proxy, [1] * 300 + [3, 4], pool_id="parent", session_id="rests")
    assert answer.json()["timings"]["pool_n"] == 300
    await proxy.control.residency.evict(proxy.control.tree.get("parent"))
    stats = await proxy.control.watch.refresh()
    assert stats is not None
    assert [slot.n_pool_shared for slot in stats.slots if slot.n_tokens] == [0]


@pytest.mark.parametrize("books", ["kept", "begun anew"])
async def test_an_idle_slot_gives_no_cells_that_a_pool_holds_too(engine: FakeEngine, proxy: Proxy, books: str) -> None:
    await attached_to_a_parent_that_gave_its_sequence(proxy)
    if books == "begun anew":  # as by a proxy that found the engine so, and is not told where the cells lie
        proxy.control.residency.ledger.clear()
    answer = await ask(proxy, "x" * 800)
    assert (answer.status_code, answer.json().get("tokens_predicted")) == (200, 4), answer.text
    assert residency(proxy) == {"parent": "cold", "child": "cold"}


async def test_a_pool_is_not_evicted_when_idle_slots_give_enough(engine: FakeEngine, proxy: Proxy) -> None:
    """Beside the child there are 695 cells."""
    await attached_to_a_parent_that_gave_its_sequence(proxy)
    assert (await ask(proxy, "x" * 650)).status_code == 200
    assert residency(proxy) == {"parent": "cold", "child": "resident"}


async def test_who_needs_cells_that_a_pool_at_work_holds_waits(engine: FakeEngine, proxy: Proxy) -> None:
    await attached_to_a_parent_that_gave_its_sequence(proxy)
    hold, running = await held(engine, proxy, [1] * 300 + [2] * 5 + [7], pool_id="child", session_id="works")
    big = ask(proxy, "x" * 800)
    await until(lambda: proxy.control.room.has_line or big.done())
    assert not big.done()
    hold.release()
    assert [(await task).status_code for task in (running, big)] == [200, 200]
    assert residency(proxy) == {"parent": "cold", "child": "cold"}


# Waiting -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_big_requests_at_once_wait_and_all_get_whole_answers(
    engine: FakeEngine, proxy: Proxy, stream: bool
) -> None:
    """No pool was ever made. Two of them fit, with little to spare."""
    engine.token_s = 0.002
    answers = await asyncio.gather(*(ask(proxy, f"{i}" * 450, 16, stream=stream) for i in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert all('"tokens_predicted":16' in answer.text.replace(" ", "") for answer in answers)
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


async def test_a_batch_under_way_is_no_room_for_others(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six at once, and two fit. While a batch is decoded the stats call its cells free."""
    monkeypatch.setattr("polykv_proxy.control.room.LOOK_AGAIN_S", 0.01)
    engine.n_batch, engine.token_s = 256, 0.02
    engine.on(PATH, "batch", delay(0.05), times=None)
    answers = await asyncio.gather(*(ask(proxy, f"{i}" * 390, 8) for i in range(6)))
    assert [(a.status_code, a.json()["tokens_predicted"]) for a in answers] == [(200, 8)] * 6
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


async def test_who_fits_only_without_an_answer_waits_for_those_at_work(engine: FakeEngine, proxy: Proxy) -> None:
    """Two prompts of 490 fit into 1,000 cells; one of their answers would be cut short."""
    engine.token_s = 0.002
    answers = await asyncio.gather(*(ask(proxy, f"{i}" * 490, 30) for i in range(2)))
    assert [answer.json()["tokens_predicted"] for answer in answers] == [30, 30]


async def test_who_leaves_its_answer_no_room_goes_when_it_is_alone(engine: FakeEngine, proxy: Proxy) -> None:
    answer = await ask(proxy, "9" * 990, 30)
    assert (answer.status_code, answer.json()["tokens_predicted"]) == (200, 10)


async def test_nobody_overtakes_who_waits(engine: FakeEngine, proxy: Proxy) -> None:
    hold, running = await held(engine, proxy, "r" * 700)
    big = ask(proxy, "b" * 600)
    await until(lambda: proxy.control.room.has_line)
    small = ask(proxy, "s" * 100)  # would fit beside the running one
    await asyncio.sleep(0.1)
    assert len(engine.requests(PATH)) == 1
    hold.release()
    assert [(await task).status_code for task in (running, big, small)] == [200] * 3
    assert [r.json()["prompt"][0] for r in engine.requests(PATH)] == ["r", "b", "s"]


async def test_who_waits_for_a_slot_keeps_no_cells_from_those_who_have_one(make_proxy: ProxyMaker) -> None:
    """The one that waited for cells first finds both slots taken by two that wait for the cells it was promised."""
    async with FakeEngine(n_cells=1000, n_slots=2) as engine, make_proxy(engine.url) as proxy:
        hold, running = await held(engine, proxy, "r" * 600)
        first = ask(proxy, "a" * 510)
        await until(lambda: proxy.control.room.has_line)
        look, looking = await held(engine, proxy, IMAGE)
        others = [ask(proxy, letter * 510) for letter in "bc"]
        await until(lambda: proxy.control.slots.n_waiting == 2)
        look.release()
        await looking
        hold.release()
        answers = await asyncio.wait_for(asyncio.gather(running, first, *others), 10)
        assert [answer.status_code for answer in answers] == [200] * 4


async def test_a_client_that_waits_for_cells_may_leave(engine: FakeEngine, proxy: Proxy) -> None:
    hold, running = await held(engine, proxy, "r" * 700)
    gone = ask(proxy, "g" * 600)
    await until(lambda: proxy.control.room.has_line)
    gone.cancel()
    await until(lambda: not proxy.control.room.has_line)
    hold.release()
    assert (await running).status_code == 200
    assert len(engine.requests(PATH)) == 1
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


async def test_of_a_list_of_prompts_those_count_that_run_at_once(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(n_cells=1000, n_slots=2) as engine, make_proxy(engine.url) as proxy:
        answer = await ask(proxy, [f"{i}" * 300 for i in range(6)])
        assert (answer.status_code, len(answer.json())) == (200, 6)


# Refused -------------------------------------------------------------------------------------------------------------


async def test_what_can_never_fit_gets_the_engines_own_context_error(engine: FakeEngine, proxy: Proxy) -> None:
    hold, running = await held(engine, proxy, "r" * 700)
    answer = await ask(proxy, "x" * 1000)
    error = {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 1000, "n_ctx": 1000}
    assert answer.status_code == 400
    assert answer.json()["error"].items() >= error.items()
    hold.release()
    assert (await running).status_code == 200


async def test_what_the_engine_will_refuse_keeps_no_cells_from_others(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(PATH, "request", hold)
    refused = ask(proxy, "9" * 1000)
    await hold.reached()
    assert (await ask(proxy, "x" * 900)).status_code == 200
    hold.release()
    assert (await refused).status_code == 400


@pytest.mark.parametrize("fields", [{}, {"cache_prompt": False}, {"stream": True}])
async def test_when_nothing_can_come_free_it_is_told_at_once(
    engine: FakeEngine, proxy: Proxy, fields: dict[str, Any]
) -> None:
    await proxy.control.create_pool(CreatePool(source=Source(tokens=[1] * 500), pin=True))
    await proxy.pool(tokens=[2] * 50, name="unused")
    answer = await ask(proxy, "x" * 600, **fields)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "kv_exhausted"
    assert answer.json()["error"]["cells_missing"] == 600 + 1 - 500
    assert residency(proxy)["unused"] == "resident"  # it would not have been enough
    assert engine.requests(PATH) == []


async def test_the_wait_ends_with_503(engine: FakeEngine, proxy: Proxy) -> None:
    proxy.control.room.max_wait_s = 0.2
    hold, running = await held(engine, proxy, "r" * 700)
    answer = await ask(proxy, "x" * 600)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "kv_exhausted")
    assert answer.headers["retry-after"] == "1"
    hold.release()
    assert (await running).status_code == 200
    assert (await ask(proxy, "x" * 600)).status_code == 200


@pytest.mark.parametrize("why", ["too long", "gone"])
async def test_who_waited_for_cells_in_vain_has_waited(engine: FakeEngine, proxy: Proxy, why: str) -> None:
    """The receipt and the metrics tell it like any other wait, and what there was too little of."""
    proxy.control.room.max_wait_s = 0.2 if why == "too long" else 30.0
    hold, running = await held(engine, proxy, "r" * 700)
    waiting = ask(proxy, [7] * 600, session_id="waits")
    await until(lambda: proxy.control.room.has_line)
    await asyncio.sleep(0.1)
    if why == "gone":
        waiting.cancel()
        await until(lambda: not proxy.control.room.has_line)
    else:
        refused = (await waiting).json()["error"]
        assert refused["message"].startswith("the KV cache is full: this request needs 601 cells, 301 are missing ")
        assert "fewer requests at once" in refused["message"]
        assert "--ctx" in refused["message"]
    page = (await proxy.client.get("/polykv/requests")).json()["requests"]
    receipt = next(one for one in page if one["session_id"] == "waits")
    said = (503, "kv_exhausted", "refused", refused["message"]) if why == "too long" else (None, None, None, None)
    assert tuple(receipt[key] for key in ("status", "error", "decision", "message")) == said
    assert list(receipt["held_ms"]) == ["cells"]
    assert receipt["hold_ms"] == receipt["held_ms"]["cells"] >= 100
    told = dict(line.rsplit(" ", 1) for line in (await proxy.client.get("/metrics")).text.splitlines())
    assert float(told['opencoti_polykv:holds_total{reason="cells"}']) == 1
    assert float(told['opencoti_polykv:hold_seconds_total{reason="cells"}']) == receipt["hold_ms"] / 1e3
    hold.release()
    assert (await running).status_code == 200


async def test_who_waits_for_cells_when_the_proxy_stops_is_told(engine: FakeEngine, proxy: Proxy) -> None:
    hold, running = await held(engine, proxy, "r" * 700)
    waiting = ask(proxy, "x" * 600)
    await until(lambda: proxy.control.room.has_line)
    proxy.relay.drain()
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    receipt = (await proxy.client.get("/polykv/requests")).json()["requests"][0]
    assert (receipt["error"], receipt["message"]) == ("draining", answer.json()["error"]["message"])
    hold.release()
    assert (await running).status_code == 200


async def test_explicit_mode_passes_the_engines_own_refusal(engine: FakeEngine, explicit: Proxy) -> None:
    """Nothing is evicted, awaited or worded for a request that nobody asked us to touch."""
    await explicit.pool(tokens=[1] * 500, name="unused")
    sent = {"prompt": "x" * 600, "n_predict": 4}
    direct, relayed = [await explicit.client.post(url + PATH, json=sent) for url in (engine.url, "")]
    assert (relayed.status_code, relayed.content) == (direct.status_code, direct.content)
    assert relayed.json()["error"]["code"] == 503
    assert residency(explicit) == {"unused": "resident"}
    touched = await explicit.client.post(PATH, json=sent | {"session_id": "s"})
    assert touched.status_code == 200
    assert residency(explicit) == {"unused": "cold"}


# Cut short -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_a_full_cache_cut_is_told_from_others(
    engine: FakeEngine, proxy: Proxy, path: str, stream: bool
) -> None:
    """Both are let in, since how long an answer gets is not known, and both say ``length``."""
    engine.token_s = 0.001

    async def say(letter: str, n: int) -> None:
        body: dict[str, Any] = {"max_tokens": 200, "stream": stream, "session_id": letter}
        chat = {"messages": [{"role": "user", "content": letter * n}]}
        body |= {"prompt": letter * n} if path in (PATH, "/v1/completions") else chat
        assert (await proxy.client.post(path, json=body)).status_code == 200

    await asyncio.gather(say("a", 370), say("b", 370))
    page = (await proxy.client.get("/polykv/requests")).json()["requests"]
    ended = sorted((one["error"] or "", one["predicted_n"] < 200, one["status"]) for one in page)
    assert ended == [("", False, 200), ("truncated", True, 200)]
    told = dict(line.rsplit(" ", 1) for line in (await proxy.client.get("/metrics")).text.splitlines())
    assert float(told["opencoti_polykv:truncated_total"]) == 1


async def test_an_answer_that_ends_at_its_context_is_not_cut_by_the_cache(engine: FakeEngine, proxy: Proxy) -> None:
    assert (await ask(proxy, "9" * 990, 30)).json()["tokens_predicted"] == 10
    assert (await proxy.client.get("/polykv/requests")).json()["requests"][0]["error"] is None


# What the receipt says -----------------------------------------------------------------------------------------------


async def test_hold_ms_tells_how_long_it_waited_for_cells(engine: FakeEngine, proxy: Proxy) -> None:
    hold, running = await held(engine, proxy, "r" * 700)
    began_s = time.monotonic()
    waiting = ask(proxy, "w" * 600, session_id="waits")
    await until(lambda: proxy.control.room.has_line)
    in_line_s = time.monotonic()
    await asyncio.sleep(0.1)
    released_s = time.monotonic()
    hold.release()
    receipt = (await waiting).json()["polykv"]
    assert (released_s - in_line_s) * 1e3 - 1 <= receipt["hold_ms"] <= (time.monotonic() - began_s) * 1e3 + 1
    assert (await running).status_code == 200
    assert proxy.control.room._waited_s == {}


async def test_hold_ms_tells_of_both_lines(make_proxy: ProxyMaker) -> None:
    """It waits for a slot first, and as soon as it has one for cells."""
    async with FakeEngine(n_cells=1000, n_slots=2) as engine, make_proxy(engine.url) as proxy:
        big, first = await held(engine, proxy, "r" * 700)
        small, second = await held(engine, proxy, "s" * 100)
        began_s = time.monotonic()
        waiting = ask(proxy, "w" * 600, session_id="waits")
        await until(lambda: proxy.control.slots.n_waiting == 1)
        kept_s = -time.monotonic()
        await asyncio.sleep(0.1)
        kept_s += time.monotonic()
        small.release()
        await until(lambda: proxy.control.room.has_line)
        kept_s -= time.monotonic()
        await asyncio.sleep(0.1)
        kept_s += time.monotonic()
        big.release()
        receipt = (await waiting).json()["polykv"]
        assert kept_s * 1e3 - 2 <= receipt["hold_ms"] <= (time.monotonic() - began_s) * 1e3 + 2
        assert [(await task).status_code for task in (first, second)] == [200, 200]
