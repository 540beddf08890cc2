"""Pool, session and gate of agents."""

import asyncio
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from polykv_proxy.langgraph import (
    CapacityGateMiddleware,
    ChatPolyKV,
    PolyKVContext,
    PolyKVPoolMiddleware,
    PoolSaturatedError,
)
from tests.client.toy_gate import ToyGate


def agent(toy: ToyGate, **gate: Any) -> Any:
    transport = httpx.MockTransport(toy._answer)
    model = ChatPolyKV(
        base_url=toy.url,
        http_client=httpx.Client(transport=transport),
        http_async_client=httpx.AsyncClient(transport=transport),
    )
    return create_agent(
        model,
        [],
        middleware=[CapacityGateMiddleware("p", poll_interval=0.001, **gate), PolyKVPoolMiddleware("p")],
        context_schema=PolyKVContext,
        checkpointer=InMemorySaver(),
    )


async def talk(way: str, graph: Any, toy: ToyGate, thread: str, **given: Any) -> dict[str, Any]:
    context = PolyKVContext(client=toy.sync(), async_client=toy.asynchronous())
    asked = {"messages": [HumanMessage("hi")], **given}
    config: Any = {"configurable": {"thread_id": thread}}
    if way == "sync":
        made: dict[str, Any] = await asyncio.to_thread(graph.invoke, asked, config, context=context)
        return made
    return dict(await graph.ainvoke(asked, config, context=context))


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_an_agent_is_a_session_of_its_thread_unless_it_has_one(way: str) -> None:
    toy = ToyGate(room=3)
    graph = agent(toy)
    state = await talk(way, graph, toy, "t1")
    assert state["messages"][-1].content == "t1"
    assert state["capacity_ok"] is True
    assert list(state["polykv"]["sessions"]) == ["t1"]
    state = await talk(way, graph, toy, "t2", polykv={"session_id": "mine"})
    assert state["messages"][-1].content == "mine"
    assert toy.order == ["t1", "mine"]


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_the_gate_is_for_new_sessions_only(way: str) -> None:
    toy = ToyGate(room=1)
    graph = agent(toy, on_saturated="raise")
    await talk(way, graph, toy, "t1")
    assert (await talk(way, graph, toy, "t1"))["messages"][-1].content == "t1", "it goes on while there is no room"
    with pytest.raises(PoolSaturatedError):
        await talk(way, graph, toy, "t2")
    assert toy.order == ["t1"]


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_without_room_an_agent_ends_or_waits(way: str) -> None:
    toy = ToyGate(room=1)
    toy.live.add("other")
    state = await talk(way, agent(toy, on_saturated="end"), toy, "t1")
    assert [each.content for each in state["messages"]] == ["hi"]
    assert state["capacity_ok"] is False
    with pytest.raises(PoolSaturatedError):
        await talk(way, agent(toy, on_saturated="wait", max_wait=0.01), toy, "t1")
    n_asked = toy.n_capacity
    toy.on_capacity = lambda: toy.live.clear() if toy.n_capacity >= n_asked + 3 else None
    state = await talk(way, agent(toy, on_saturated="wait"), toy, "t1")
    assert state["messages"][-1].content == "t1"
