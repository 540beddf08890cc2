"""An engine that answers and gets nowhere is noticed, and what it says of itself never opens the gate."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from polykv_proxy.control import progress
from polykv_proxy.control.progress import HUNG_AFTER_S, PREFILL_GRACE_S, Progress
from polykv_proxy.gate import measured
from polykv_proxy.upstream import Stats
from tests.contract.conftest import made
from tests.contract.test_admission_serving import ROOT, Busy, post, set_policy
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy
from tests.relay.dialect_cases import body_of
from tests.relay.raw import until
from tests.reliability.conftest import leave_nothing

CHAT = "/v1/chat/completions"


async def health(proxy: Proxy) -> tuple[int, str]:
    answer = await proxy.client.get("/polykv/health")
    return answer.status_code, answer.json()["status"]


async def until_health(proxy: Proxy, expected: tuple[int, str]) -> None:
    async with asyncio.timeout(15):
        while await health(proxy) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("phase", ["prefill", "chunk:2"])
async def test_health_says_so_while_the_engine_calls_itself_well(
    engine: FakeEngine,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    phase: str,
) -> None:
    monkeypatch.setattr(progress, "HUNG_AFTER_S", 0.5)
    hold = Hold()
    engine.on(CHAT, phase, hold)
    stream = asyncio.create_task(proxy.client.post(CHAT, json=body_of(CHAT, stream=True)))
    await hold.reached()
    await until_health(proxy, (503, "hung"))
    refused = await proxy.client.get("/polykv/health")
    assert (refused.headers["retry-after"], refused.json()["engine"]["reachable"]) == ("1", True)
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as direct:
        assert (await direct.get("/health")).status_code == 200
        assert (await direct.get("/polykv/engine/stats")).status_code == 200
    assert not stream.done()
    await until(lambda: [r for r in caplog.records if "has done nothing for" in r.message])
    hold.release()
    assert (await stream).content.endswith(b"data: [DONE]\n\n"), "who waited on is served"
    await until_health(proxy, (200, "ok"))
    await leave_nothing(proxy)


async def test_a_pool_that_is_never_done_shows_it_too(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "HUNG_AFTER_S", 0.5)
    engine.prefill_s = 60.0
    making = asyncio.create_task(proxy.pool([1, 2, 3]))
    engine.hooks.n_service = 1
    await until_health(proxy, (503, "hung"))
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)


async def test_one_that_is_slow_or_has_nothing_to_do_does_not_hang(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "HUNG_AFTER_S", 1.0)
    engine.token_s = 0.1
    answer = asyncio.create_task(proxy.client.post(CHAT, json=body_of(CHAT, max_tokens=25)))
    while not answer.done():
        assert await health(proxy) == (200, "ok")
        await proxy.control.refresh()
        await asyncio.sleep(0.1)
    assert answer.result().status_code == 200
    await asyncio.sleep(1.2)
    assert await health(proxy) == (200, "ok")


# Readings, by themselves -------------------------------------------------------------------------------------------


def reading(ts: float, *, state: str = "generating", n_decoded: int = 1, n_deferred: int = 0) -> Stats:
    slot = {"id": 0, "state": state, "id_task": 1, "n_tokens": 100 + n_decoded, "n_decoded": n_decoded}
    return Stats.model_validate({"epoch": "e", "ts": ts, "slots": [slot], "n_deferred": n_deferred})


def test_still_is_counted_from_the_last_movement() -> None:
    looked = Progress()
    for at_s in range(10):
        looked.note(reading(at_s, n_decoded=at_s), at_s)
    assert looked.still_s(9.5) == 0.5
    for at_s in range(10, 80):
        looked.note(reading(at_s, n_decoded=9), at_s)
    assert looked.still_s(80) == 71
    assert looked.hangs(80)
    assert not looked.hangs(9 + HUNG_AFTER_S - 0.1)
    looked.note(reading(80, n_decoded=10), 80)
    assert (looked.still_s(80), looked.hangs(80)) == (0, False)


def test_who_comes_and_who_waits_is_no_movement() -> None:
    looked = Progress()
    for at_s in range(100):
        looked.note(reading(at_s, n_decoded=5, n_deferred=at_s % 7), at_s)
    assert looked.still_s(100) == 100


def test_a_batch_with_a_prompt_in_it_may_take_its_time() -> None:
    looked = Progress()
    looked.note(reading(0, state="prompt"), 0)
    looked.note(reading(8, state="prompt"), 8)
    assert (looked.still_s(8), looked.late_s(8)) == (8, 0)
    assert looked.late_s(PREFILL_GRACE_S + 2) == 2


def test_the_same_answer_again_is_no_news_even_of_an_engine_at_rest() -> None:
    looked = Progress()
    looked.note(reading(1, state="idle"), 1)
    assert looked.late_s(50) == 0
    looked.note(reading(1, state="idle"), 50)
    assert looked.late_s(50) == 49
    assert not looked.hangs(500), "nobody waits for it"
    looked.note(reading(51, state="idle"), 51)
    assert looked.late_s(60) == 0


# The gate ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def frozen(engine: FakeEngine, *, ts_goes_on: bool) -> AsyncIterator[None]:
    """From here on the stats are those of one moment."""
    body: dict[str, Any] = await engine.hooks._stats(None)  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body | ({"ts": loop.time()} if ts_goes_on else {}))

    engine.on("stats", "request", answer, times=None)
    try:
        yield
    finally:
        engine.faults.armed.clear()


async def capacity(proxy: Proxy) -> tuple[bool, str]:
    told = (await proxy.client.get("/polykv/pools/root/capacity")).json()
    return told["can_admit"], told["reason"]


async def until_capacity(proxy: Proxy, expected: tuple[bool, str]) -> None:
    async with asyncio.timeout(20):
        while await capacity(proxy) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("ts_goes_on", [True, False])
async def test_frozen_counters_never_open_the_gate_and_other_traffic_flows_on(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, ts_goes_on: bool
) -> None:
    monkeypatch.setattr(measured, "STALE_AFTER_S", 2.5)
    engine.token_s = 0.01
    await made(proxy, prompt=ROOT, name="root")
    await made(proxy, prompt="Another pool, which has no policy.", name="free")
    await set_policy(proxy, target_tps_per_session=0.001, settle_max_ms=0, settle_tokens=0)
    busy = Busy(proxy, engine)
    await busy.begin("busy", n_predict=100_000)
    await until_capacity(proxy, (True, "ok"))
    assert (await post(proxy, "early")).status_code == 200
    async with frozen(engine, ts_goes_on=ts_goes_on):
        await until_capacity(proxy, (False, "measurement stale"))
        refused = await post(proxy, "late")
        assert (refused.status_code, refused.headers["x-polykv-reason"]) == (503, "measurement stale")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await post(proxy, "early")).status_code == 200, "who is in goes on"
        for fields in ({"prompt": "nobody's"}, {"prompt": "Another pool, which has no policy. Go.", "pool_id": "free"}):
            answer = await proxy.client.post("/completion", json={"n_predict": 2, **fields})
            assert answer.status_code == 200, answer.text
        assert await capacity(proxy) == (False, "measurement stale")
    await until_capacity(proxy, (True, "ok"))
    assert (await post(proxy, "late")).status_code == 200
    await busy.end()
    await leave_nothing(proxy)


async def test_an_old_answer_of_an_engine_at_rest_opens_it_no_more(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache in between gives the same one for ever."""
    monkeypatch.setattr(measured, "STALE_AFTER_S", 2.0)
    await made(proxy, prompt=ROOT, name="root")
    await set_policy(proxy, target_tps_per_session=0.001, guarantee_min_sessions=0, settle_max_ms=0)
    await until_capacity(proxy, (True, "ok"))
    async with frozen(engine, ts_goes_on=False):
        await until_capacity(proxy, (False, "measurement stale"))
        refused = await post(proxy, "new")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_unavailable")
    await until_capacity(proxy, (True, "ok"))
    assert (await post(proxy, "new")).status_code == 200
    await leave_nothing(proxy)
