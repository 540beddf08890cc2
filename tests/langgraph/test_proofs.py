"""Graphs on the proxy as it is served, before the fake engine: a wide fan-out, a conversation through bad times."""

import asyncio
import operator
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy, Send

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient, PolyKVUnavailableError
from polykv_proxy.langgraph import (
    ChatPolyKV,
    PolyKVCompactionMiddleware,
    PolyKVPoolMiddleware,
    PolyKVState,
    polykv_retry_on,
    saturated_handler,
)
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker, make_proxy
from tests.relay.raw import until

__all__ = ["make_proxy"]

FLOOR = 1e6
"""Tokens per second that nothing decodes at: whoever comes beyond the guarantee is one too many."""
SYSTEM = "You are one of many who share this text. "


def model(proxy: Proxy, **fields: Any) -> ChatPolyKV:
    return ChatPolyKV(base_url=proxy.url, max_tokens=4, poll_interval_s=0.02, **fields)


@pytest.fixture(params=["sync", "async"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def run(way: str, graph: Any, given: Any, config: Any = None) -> dict[str, Any]:
    """Invoked, with threads, or awaited."""
    if way == "sync":
        made: dict[str, Any] = await asyncio.to_thread(graph.invoke, given, config)
        return made
    return dict(await graph.ainvoke(given, config))


def overlapping(spans: list[tuple[float, float]]) -> int:
    """How many were open at once, at most."""
    most = now = 0
    for _, step in sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]):
        now += step
        most = max(most, now)
    return most


class Fan(TypedDict):
    items: list[int]
    done: Annotated[list[int], operator.add]


class Item(TypedDict):
    item: int


async def test_a_fan_out_of_fifty_never_exceeds_the_gate(make_proxy: ProxyMaker, way: str) -> None:
    async with FakeEngine(n_slots=16) as engine, make_proxy(engine.url) as proxy, AsyncPolyKVClient(proxy.url) as sdk:
        engine.token_s = 0.03
        root = await sdk.create_pool(messages=[{"role": "system", "content": SYSTEM}])
        policy = {"target_tps_per_session": FLOOR, "mode": "enforced", "guarantee_min_sessions": 3, "settle_max_ms": 0}
        await sdk.set_admission(root.pool_id, policy)
        asked = model(proxy, on_saturated="wait", pool_id=root.pool_id)

        async def awork(state: Item) -> dict[str, Any]:
            name = f"t:{state['item']}"
            await asked.ainvoke([("system", SYSTEM), ("user", str(state["item"]))], session_id=name)
            await sdk.drop_session(name)  # it is done: its place is free at once, not when it was idle for long
            return {"done": [state["item"]]}

        def work(state: Item) -> dict[str, Any]:
            name = f"t:{state['item']}"
            asked.invoke([("system", SYSTEM), ("user", str(state["item"]))], session_id=name)
            with PolyKVClient(proxy.url) as sync_sdk:
                sync_sdk.drop_session(name)
            return {"done": [state["item"]]}

        graph = StateGraph(Fan)
        graph.add_node("work", RunnableLambda(work, afunc=awork))
        graph.add_conditional_edges(START, lambda state: [Send("work", {"item": each}) for each in state["items"]])
        state = await run(way, graph.compile(), {"items": list(range(50)), "done": []})
        assert sorted(state["done"]) == list(range(50))
        chats = [each for each in await sdk.requests(last=1000) if each.path == "/v1/chat/completions"]
        served = [each for each in chats if each.status == 200]
        assert len(served) == 50
        assert {each.session_id for each in served} == {f"t:{i}" for i in range(50)}
        spans = [(each.sent_ts, each.ended_ts) for each in served]
        assert overlapping([(begin, end) for begin, end in spans if begin is not None and end is not None]) in (2, 3)
        assert all(each.pool_id == root.pool_id for each in served)


class Held(PolyKVState):
    went: Annotated[list[str], operator.add]


async def test_a_retry_policy_does_not_multiply_refusals(engine: FakeEngine, make_proxy: ProxyMaker, way: str) -> None:
    async with make_proxy(engine.url) as proxy, AsyncPolyKVClient(proxy.url) as sdk:
        root = await sdk.create_pool(messages=[{"role": "system", "content": SYSTEM}])
        policy = {"target_tps_per_session": FLOOR, "mode": "enforced", "guarantee_min_sessions": 0, "settle_max_ms": 0}
        await sdk.set_admission(root.pool_id, policy)
        engine.token_s = 0.01
        busy = asyncio.create_task(
            sdk.chat([{"role": "user", "content": "x"}], session_id="busy", max_tokens=2000, overcommit=True)
        )
        rate = proxy.control.door.rate_of
        await until(lambda: (r := rate("busy")) is not None and r.tps is not None and r.tps > 0)
        asked = model(proxy, pool_id=root.pool_id)

        async def awork(state: Held) -> dict[str, Any]:
            await asked.ainvoke([("system", SYSTEM), ("user", "hi")], session_id="one-more")
            return {"went": ["served"]}

        def work(state: Held) -> dict[str, Any]:
            asked.invoke([("system", SYSTEM), ("user", "hi")], session_id="one-more")
            return {"went": ["served"]}

        graph = StateGraph(Held)
        policies = RetryPolicy(max_attempts=5, initial_interval=0.001, retry_on=polykv_retry_on)
        graph.add_node(
            "work", RunnableLambda(work, afunc=awork), retry_policy=policies, error_handler=saturated_handler
        )
        graph.add_node("hold", lambda state: {"went": ["held"]})
        graph.add_edge(START, "work")
        state = await run(way, graph.compile(), {"went": []})
        assert state["went"] == ["held"]
        refused = [each for each in await sdk.requests(last=100) if each.session_id == "one-more" or each.status == 429]
        assert [each.status for each in refused] == [429]
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await until(lambda: not any(proxy.at_rest().values()))


async def test_a_conversation_survives_saturation_compaction_and_a_restart(make_proxy: ProxyMaker, way: str) -> None:
    async with (
        FakeEngine(n_ctx_slot=2000) as engine,
        make_proxy(engine.url) as proxy,
        AsyncPolyKVClient(proxy.url) as sdk,
    ):
        sync_sdk = PolyKVClient(proxy.url)
        trunk = await sdk.create_pool(messages=[{"role": "system", "content": SYSTEM}], name="trunk", pin=True)
        begun = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "a"}]
        work = await sdk.fork_pool("trunk", messages=begun)
        policy = {"target_tps_per_session": FLOOR, "mode": "enforced", "guarantee_min_sessions": 1, "settle_max_ms": 0}
        await sdk.set_admission("trunk", policy)
        asked = model(proxy, on_saturated="wait")
        compacts = PolyKVCompactionMiddleware(sync_sdk, async_client=sdk, keep=2, pressure=0.5, summary_max_tokens=20)
        agent = create_agent(
            asked,
            [],
            system_prompt=SYSTEM,
            middleware=[PolyKVPoolMiddleware(), compacts],
            checkpointer=InMemorySaver(),
        )
        config: Any = {"configurable": {"thread_id": "talker"}}
        at = {"pool_id": work.pool_id, "ancestor_pool_id": trunk.pool_id}

        # Saturation: another session has the only place, and gives it up once ours has been refused or waits.
        engine.token_s = 0.01
        busy = asyncio.create_task(sdk.chat(begun, pool_id=work.pool_id, session_id="busy", max_tokens=2000))
        rate = proxy.control.door.rate_of
        await until(lambda: (r := rate("busy")) is not None and r.tps is not None and r.tps > 0)
        first = asyncio.create_task(run(way, agent, {"messages": [HumanMessage("a" * 100)], "polykv": at}, config))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(first), 0.3)
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        state = await first
        await sdk.drop_session("busy")
        engine.token_s = 0.0
        assert len(state["messages"]) == 2

        for turn in range(10):
            if turn == 2:
                await engine.restart()
            if turn == 5:
                engine.on("/v1/chat/completions", "reply", engine.die(), times=1)
                with pytest.raises(PolyKVUnavailableError):
                    await run(way, agent, {"messages": [HumanMessage(f"{turn}" * 200)]}, config)
                await engine.restart()
                state = await run(way, agent, None, config)
            else:
                state = await run(way, agent, {"messages": [HumanMessage(f"{turn}" * 200)]}, config)
            receipt = state["messages"][-1].response_metadata["polykv"]
            assert receipt["session_id"] == "talker"
            assert receipt["ctx_used"] < 1500
        assert state["polykv"]["compactions"] >= 1
        assert state["polykv"]["pool_id"] == trunk.pool_id
        assert state["polykv"]["retired"] == [work.pool_id]
        assert [each.pool_id for each in (await sdk.pools()).pools if not each.auto] == [trunk.pool_id]
        sync_sdk.close()
