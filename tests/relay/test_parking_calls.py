"""Parking asks the engine for nothing that is known to be in vain, and no request waits for a file."""

import asyncio
from typing import Any

import orjson
import pytest

from polykv_proxy.ids import SessionId
from tests.fake_engine import FakeEngine, Hold, delay
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import until
from tests.relay.test_parking import COMPLETION, RAM, SYSTEM, Agent, fill_slots, said, started_over, tag, went_on


def orders(engine: FakeEngine, op: str) -> list[dict[str, Any]]:
    asked = [orjson.loads(r.body) for r in engine.received if r.path == "/polykv/engine/pools" and r.body]
    return [order for order in asked if order["op"] == op]


def failures(proxy: Proxy) -> dict[str, int]:
    return dict(proxy.control.tier.facts().counts.n_failures)


# Files ---------------------------------------------------------------------------------------------------------------


async def test_a_request_waits_for_no_file(make_proxy: ProxyMaker) -> None:
    async with (
        FakeEngine(save_ram=RAM, save_disk=RAM) as engine,
        make_proxy(engine.url, warm_disk_bytes=RAM) as proxy,
    ):
        agent, hold = Agent(proxy, "a"), Hold()
        engine.on("save", "write", hold)
        await agent.say(said("a", 0))
        await asyncio.wait_for(fill_slots(proxy), 0.9)  # a file may take a second of a request
        await hold.reached()
        assert (list(engine.saved.ram), engine.saved.files) == ([tag("a")], [])
        hold.release()
        await until(lambda: [file.tag for file in engine.saved.files] == [tag("a")])
        await engine.restart()
        await proxy.control.refresh()
        assert went_on(await agent.say(said("a", 1)), said("a", 1))


async def test_what_is_in_slots_when_the_proxy_ends_is_on_disk_then(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=RAM, save_disk=RAM) as engine:
        async with make_proxy(engine.url, warm_disk_bytes=RAM) as proxy:
            engine.on("save", "write", delay(0.05), times=None)
            agents = [Agent(proxy, f"agent-{i}") for i in range(3)]
            for agent in agents:
                await agent.say(said(agent.name, 0))
        assert {file.tag for file in engine.saved.files} == {tag(agent.name) for agent in agents}
        await engine.restart()
        async with make_proxy(engine.url, warm_disk_bytes=RAM) as proxy:
            for agent in agents:
                agent.proxy = proxy
                assert went_on(await agent.say(said(agent.name, 1)), said(agent.name, 1))


async def test_a_full_memory_keeps_the_latest_and_the_disk_all(make_proxy: ProxyMaker) -> None:
    n_bytes = 420 * 1024
    async with (
        FakeEngine(save_ram=2 * n_bytes, save_disk=RAM) as engine,
        make_proxy(engine.url, warm_disk_bytes=RAM) as proxy,
    ):
        agents = [Agent(proxy, f"agent-{i}") for i in range(9)]
        for turn in range(3):
            for agent in agents:
                receipt = await agent.say(said(agent.name, turn))
                assert turn == 0 or went_on(receipt, said(agent.name, turn)), (agent.name, turn)
                await until(lambda: engine.saved.ram.keys() <= {file.tag for file in engine.saved.files})
        counts = proxy.control.tier.facts().counts
        assert (counts.n_forgotten, counts.n_loads["disk"] > 0, failures(proxy)) == (0, True, {})
        usage = engine.saved.usage()
        assert proxy.control.saved.n_bytes("ram") == usage["ram"]["bytes"] <= 2 * n_bytes


# In vain -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
async def test_a_request_that_was_decided_before_a_restart_finds_its_pool_again_or_loads_nothing(
    make_proxy: ProxyMaker, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    async with (
        FakeEngine(save_ram=RAM, save_disk=RAM) as engine,
        make_proxy(engine.url, warm_disk_bytes=RAM) as proxy,
    ):
        await proxy.pool(tokens=engine.template.tokenizer.encode(SYSTEM), name="p")
        agent, parking = Agent(proxy, "a"), proxy.control.parking
        await agent.say(said("a", 0))
        await fill_slots(proxy)
        await until(lambda: len(engine.saved.files) == 2)  # the pool's, and the session's
        real = parking._prepare

        async def prepare(*given: Any, **named: Any) -> None:
            monkeypatch.setattr(parking, "_prepare", real)
            if not kept:
                engine.saved.files = [file for file in engine.saved.files if not file.tag.startswith("pool-")]
            await engine.restart()
            await real(*given, **named)

        monkeypatch.setattr(parking, "_prepare", prepare)
        receipt = await agent.say(said("a", 1))
        assert went_on(receipt, said("a", 1)) if kept else started_over(receipt)
        assert failures(proxy) == {}
        assert all(order["parent_seq"] >= 0 for order in orders(engine, "load") if order.get("id_slot", -1) >= 0)


async def test_a_state_is_not_loaded_behind_a_pool_that_begins_otherwise(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=RAM) as engine, make_proxy(engine.url) as proxy:
        encode = engine.template.tokenizer.encode
        await proxy.pool(tokens=encode(SYSTEM))
        agent = Agent(proxy, "a")
        await agent.say(said("a", 0))
        await fill_slots(proxy)
        other = "Another beginning altogether. " * 9
        await proxy.pool(tokens=encode(other))
        body = {"prompt": other + said("a", 1), "n_predict": 8, "session_id": "a"}
        receipt = (await proxy.client.post(COMPLETION, json=body)).json()["polykv"]
        assert (receipt["cached_n_tokens"], receipt["pool_id"]) == (len(other), 2)
        assert (next(iter(engine.saved.ram)), orders(engine, "load"), failures(proxy)) == (tag("a"), [], {})


async def test_empty_slots_are_not_emptied(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=RAM, n_cells=1000) as engine, make_proxy(engine.url) as proxy:
        once = await proxy.client.post(COMPLETION, json={"prompt": "one question " * 50, "n_predict": 1})
        assert once.status_code == 200
        await proxy.client.post(COMPLETION, json={"prompt": "a second one " * 50, "n_predict": 1})
        await until(lambda: proxy.control.slots.n_held == 0)
        assert len([slot for slot in engine.slots if slot.tokens]) == 1
        n_filled = len(orders(engine, "clear"))
        assert n_filled <= 1
        for order in orders(engine, "clear"):
            assert order["id_slot"] == 0


async def test_what_belongs_to_its_pool_alone_is_not_moved(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=RAM) as engine, make_proxy(engine.url) as proxy:
        tokens = engine.template.tokenizer.encode(SYSTEM)
        await proxy.pool(tokens=tokens)
        await Agent(proxy, "a").say("hm")
        engine.slots[0].cut(len(tokens))
        await proxy.control.refresh()
        assert engine.slots[0].n_pool_shared == len(tokens)
        assert not await proxy.control.parking._move(proxy.control.sessions.get(SessionId("a")).slot_id)
        assert orders(engine, "save") == []
