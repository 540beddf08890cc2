"""Messages and Responses in one piece carry no timings: their rate is what the engine's stats say of the task."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from polykv_proxy.ids import SlotId
from polykv_proxy.relay.usage import rate_in
from polykv_proxy.turns import Usage
from polykv_proxy.upstream import Stats
from polykv_proxy.upstream.wire import FinishedTask, SlotStats
from tests.fake_engine import FakeEngine
from tests.fake_engine.faults import Action
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import body_of, receipt_at

SILENT = ["/v1/messages", "/v1/responses"]


@pytest_asyncio.fixture
async def alone(engine: FakeEngine, make_proxy: ProxyMaker) -> AsyncIterator[Proxy]:
    """Nobody looks whether others begin alike."""
    async with make_proxy(engine.url, auto_pool_min_tokens=0) as proxy:
        yield proxy


def rates(engine: FakeEngine, of_slot: dict[int, float], **more: Any) -> Action:
    """Stats in which the slots have these rates."""

    async def action(_request: web.Request) -> web.Response:
        stats = await engine.hooks._stats(_request)
        for slot in stats["slots"]:
            slot["tps_ewma"] = of_slot.get(slot["id"])
        return web.json_response(stats | more)

    return action


@pytest.mark.parametrize("path", SILENT)
@pytest.mark.parametrize("own", [{}, {"id_slot": 2}])
async def test_the_rate_comes_from_the_stats(engine: FakeEngine, proxy: Proxy, path: str, own: dict[str, int]) -> None:
    engine.on("stats", "reply", rates(engine, {0: 31.25, 1: 31.25, 2: 31.25, 3: 31.25}), times=None)
    answer = await proxy.client.post(path, json=body_of(path, session_id="s", **own))
    assert receipt_at(path, answer.content, stream=False)["session_tps"] == 31.25
    assert answer.headers["x-session-tps"] == "31.25"
    session = proxy.control.sessions.get("s")
    assert session is not None
    assert session.tps == 31.25


@pytest.mark.parametrize("path", SILENT)
async def test_of_the_slot_it_ran_in(engine: FakeEngine, proxy: Proxy, path: str) -> None:
    engine.on("stats", "reply", rates(engine, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}), times=None)
    for _ in range(3):
        names = [f"s{i}" for i in range(4)]
        answers = await asyncio.gather(*(proxy.client.post(path, json=body_of(path, session_id=n)) for n in names))
        ran = [proxy.control.sessions.get(n).slot_id for n in names]  # type: ignore[union-attr]
        assert sorted(ran) == [0, 1, 2, 3]
        told = [receipt_at(path, a.content, stream=False)["session_tps"] for a in answers]
        assert told == [slot_id + 1.0 for slot_id in ran]


@pytest.mark.parametrize("path", SILENT)
async def test_an_engine_that_does_not_say_it_in_time_costs_100_ms_at_most(
    engine: FakeEngine, alone: Proxy, path: str
) -> None:
    proxy = alone

    async def late(_request: web.Request) -> None:
        await asyncio.sleep(2)

    await proxy.client.post(path, json=body_of(path, session_id="warm"))
    engine.on("stats", "request", late, times=None)
    began = asyncio.get_running_loop().time()
    answer = await proxy.client.post(path, json=body_of(path, session_id="s"))
    assert answer.status_code == 200
    assert asyncio.get_running_loop().time() - began < 0.5
    assert receipt_at(path, answer.content, stream=False)["session_tps"] is None
    assert "x-session-tps" not in answer.headers


async def test_nobody_asks_when_the_reply_says_it_or_has_no_receipt(engine: FakeEngine, alone: Proxy) -> None:
    proxy, asked = alone, 0

    async def count(_request: web.Request) -> None:
        nonlocal asked
        asked += 1

    proxy.control.watch._heartbeat_s = 60
    await asyncio.sleep(1.1)  # the beat that was on its way
    engine.on("stats", "request", count, times=None)
    for path in ("/completion", "/v1/completions", "/v1/chat/completions"):
        await proxy.client.post(path, json=body_of(path, session_id="s"))
    for path in SILENT:
        await proxy.client.post(path, json=body_of(path, session_id="s", stream=True))
        await proxy.client.post(path, json=body_of(path))
    assert asked == 0
    for path in SILENT:
        await proxy.client.post(path, json=body_of(path, session_id="s"))
    assert asked == 2


USAGE = Usage(cache_n=3, prompt_n=7, predicted_n=5)
DONE = FinishedTask(id_task=1, id_slot=1, n_prompt=10, n_cached=3, n_decoded=5)
SLOT = SlotStats(id=1, state="idle", tps_ewma=20.0)


@pytest.mark.parametrize(
    ("slot", "done", "usage", "rate"),
    [
        (SLOT, DONE, USAGE, 20.0),
        (SLOT, None, USAGE, None),
        (SLOT, DONE.model_copy(update={"id_slot": 2}), USAGE, None),
        (SLOT, DONE.model_copy(update={"n_decoded": 6}), USAGE, None),
        (SLOT, DONE.model_copy(update={"n_prompt": 11}), USAGE, None),
        (SLOT, DONE, Usage(cache_n=3, prompt_n=7), None),
        (SLOT, DONE.model_copy(update={"n_decoded": 1}), Usage(cache_n=3, prompt_n=7, predicted_n=1), None),
        (SLOT.model_copy(update={"tps_ewma": None}), DONE, USAGE, None),
        (SLOT.model_copy(update={"id": 2}), DONE, USAGE, None),
        (SLOT.model_copy(update={"state": "generating", "n_prompt": 10}), None, USAGE, 20.0),
        (SLOT.model_copy(update={"state": "generating", "n_prompt": 11}), DONE, USAGE, None),
    ],
)
def test_only_a_rate_that_is_certain(
    slot: SlotStats, done: FinishedTask | None, usage: Usage, rate: float | None
) -> None:
    before = FinishedTask(id_task=0, id_slot=1, n_prompt=99, n_cached=0, n_decoded=50)
    stats = Stats(epoch="e", slots=(slot,), finished=(before, *([done] if done else [])))
    assert rate_in(stats, SlotId(1), usage) == rate
