"""Gates, refusals and couriers in graphs."""

import asyncio
import operator
import time
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeError
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy

from polykv_proxy import client
from polykv_proxy.client import Job, PaceEvent
from polykv_proxy.langgraph import (
    CapacityGate,
    CourierNode,
    PolyKVContext,
    PolyKVState,
    PoolSaturatedError,
    polykv_retry_on,
    route_on_capacity,
    saturated_handler,
)
from tests.client.toy_gate import ToyGate

STRICT = "LANGGRAPH_STRICT_MSGPACK"


class State(PolyKVState):
    went: Annotated[list[str], operator.add]


def gated(gate: CapacityGate, **compiled: Any) -> Any:
    graph = StateGraph(State, context_schema=PolyKVContext)
    graph.add_node("gate", gate, destinations=gate.destinations)
    graph.add_node("spawn", lambda state: {"went": ["spawn"]})
    graph.add_node("hold", lambda state: {"went": ["hold"]})
    graph.add_edge(START, "gate")
    return graph.compile(**compiled)


async def both(graph: Any, toy: ToyGate, given: dict[str, Any], **config: Any) -> list[dict[str, Any]]:
    """Invoked and awaited."""
    context = PolyKVContext(client=toy.sync(), async_client=toy.asynchronous())
    invoked = await asyncio.to_thread(graph.invoke, given, context=context, **config)
    return [invoked, await graph.ainvoke(given, context=context, **config)]


def occupied(toy: ToyGate, n: int) -> ToyGate:
    toy.live.update(f"other-{i}" for i in range(n))
    return toy


@pytest.mark.parametrize(("n_there", "went"), [(1, "spawn"), (2, "hold")])
async def test_a_gate_goes_where_there_is_room(n_there: int, went: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STRICT, "true")
    graph = gated(CapacityGate(), checkpointer=InMemorySaver())
    toy = occupied(ToyGate(room=2), n_there)
    config = {"configurable": {"thread_id": "t"}}
    for state in await both(graph, toy, {"polykv": {"pool_id": 7}, "went": []}, config=config):
        assert state["went"][-1] == went
        assert state["capacity_ok"] is (went == "spawn")
        assert route_on_capacity(state) == went
        assert state["polykv"]["pool_id"] == 7
        assert state["polykv"]["capacity"]["target_tps_per_session"] == 10
        assert type(state["polykv"]["capacity"]) is dict


async def test_a_gate_waits_while_it_settles_and_then_goes_on() -> None:
    toy = ToyGate(room=2)
    context = PolyKVContext(async_client=toy.asynchronous())

    def settle() -> None:
        toy.settled_at_s = time.monotonic() + 0.005 if toy.n_capacity < 2 else 0.0

    toy.on_capacity = settle
    state = await gated(CapacityGate(pool_id="p")).ainvoke({"went": []}, context=context)
    assert state["went"] == ["spawn"]
    assert toy.n_capacity == 3
    toy.on_capacity = lambda: setattr(toy, "settled_at_s", time.monotonic() + 60)
    state = await gated(CapacityGate(pool_id="p", max_wait=0.01)).ainvoke({"went": []}, context=context)
    assert state["went"] == ["hold"]


async def test_a_gate_waits_for_room() -> None:
    toy = occupied(ToyGate(room=1), 1)
    toy.on_capacity = lambda: toy.live.clear() if toy.n_capacity % 3 == 2 else None
    graph = gated(CapacityGate(pool_id="p", on_saturated="wait", poll_interval=0.001))
    for state in await both(graph, toy, {"went": []}):
        assert state["went"] == ["spawn"]
        occupied(toy, 1)


async def test_a_gate_raises_or_interrupts() -> None:
    toy = occupied(ToyGate(room=1), 1)
    with pytest.raises(PoolSaturatedError) as caught:
        await both(gated(CapacityGate(pool_id="p", on_saturated="raise")), toy, {"went": []})
    assert (caught.value.pool_id, caught.value.reason) == ("p", "projected mean tps below floor")
    graph = gated(CapacityGate(pool_id="p", on_saturated="interrupt"), checkpointer=InMemorySaver())
    context, config = PolyKVContext(async_client=toy.asynchronous()), {"configurable": {"thread_id": "t"}}
    held = await graph.ainvoke({"went": []}, config, context=context)
    (told,) = held["__interrupt__"]
    assert told.value["reason"] == "projected mean tps below floor"
    toy.live.clear()
    state = await graph.ainvoke(Command(resume=True), config, context=context)
    assert state["went"] == ["spawn"]


async def test_a_gate_says_what_it_misses() -> None:
    graph, toy = gated(CapacityGate()), ToyGate(room=1)
    with pytest.raises(ValueError, match="knows no pool"):
        await graph.ainvoke({"went": []}, context=PolyKVContext(async_client=toy.asynchronous()))
    with pytest.raises(ValueError, match="no async_client"):
        await graph.ainvoke({"went": []}, context=PolyKVContext(client=toy.sync()))
    with pytest.raises(ValueError, match="no client"):
        await asyncio.to_thread(graph.invoke, {"went": []})


# Refusals ----------------------------------------------------------------------------------------------------------


def failing(error: Callable[[], Exception], **node: Any) -> tuple[Any, list[int]]:
    tries: list[int] = []

    def work(state: State) -> State:
        tries.append(1)
        raise error()

    graph = StateGraph(State)
    graph.add_node("work", work, **node)
    graph.add_node("hold", lambda state: {"went": ["hold"]})
    graph.add_edge(START, "work")
    graph.add_edge("hold", END)
    return graph.compile(), tries


def test_a_refusal_goes_to_hold_and_other_errors_do_not() -> None:
    refused = client.PoolSaturatedError("full", pool_id=3, retry_after=9.0)
    graph, _ = failing(lambda: refused, error_handler=saturated_handler)
    state = graph.invoke({"went": []})
    assert state["went"] == ["hold"]
    assert state["capacity_ok"] is False
    graph, _ = failing(lambda: client.PoolNotFoundError("gone"), error_handler=saturated_handler)
    with pytest.raises(client.PoolNotFoundError):
        graph.invoke({"went": []})
    with pytest.raises(ValueError, match="mine"):
        saturated_handler({}, NodeError("n", ValueError("mine")))


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (client.PoolSaturatedError("full", status_code=429), False),
        (client.PoolSaturatedError("stale", status_code=503), False),
        (client.PolyKVContextOverflowError("long", status_code=400), False),
        (client.PoolNotFoundError("gone", status_code=404), False),
        (client.PolyKVUnavailableError("away", status_code=503), True),
        (client.PolyKVTimeoutError("late"), False),
        (client.KvExhaustedError("no cells", status_code=503), True),
        (client.PolyKVError("odd", status_code=500), True),
        (ConnectionError(), True),
        (ValueError(), False),
    ],
)
def test_what_is_worth_another_attempt(error: Exception, again: bool) -> None:
    assert polykv_retry_on(error) is again
    policy = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=3, retry_on=polykv_retry_on)
    graph, tries = failing(lambda: error, retry_policy=policy)
    with pytest.raises(type(error)):
        graph.invoke({"went": []})
    assert len(tries) == (3 if again else 1)


# Couriers ----------------------------------------------------------------------------------------------------------


class Work(PolyKVState):
    items: list[str]
    results: list[dict[str, Any]]


def delivering(node: CourierNode, **compiled: Any) -> Any:
    graph = StateGraph(Work, context_schema=PolyKVContext)
    graph.add_node("deliver", node)
    graph.add_edge(START, "deliver")
    return graph.compile(**compiled)


async def test_a_courier_node_starts_workers_as_there_is_room() -> None:
    toy = ToyGate(room=2, refuse=2)
    sdk = toy.sync()

    def work(job: Job[str]) -> str:
        if job.item == "bad":
            raise ValueError("no such file")
        said = sdk.chat([{"role": "user", "content": job.item}], pool_id=job.pool_id, session_id=job.session_id)
        toy.leave(job.session_id)
        return said.text.upper()

    events: list[PaceEvent] = []
    node = CourierNode(work, session_key=lambda item, index: item, poll_interval=0.01, on_event=events.append)
    graph = delivering(node)
    given = {"items": ["a", "bad", "c"], "polykv": {"pool_id": "p"}}
    for state in await both(graph, toy, given, config={"configurable": {"thread_id": "t"}}):
        first, bad, third = state["results"]
        assert (first["item"], first["session_id"], first["result"], first["error"]) == ("a", "t:a", "T:A", None)
        assert (bad["result"], bad["error"]) == (None, "ValueError: no such file")
        assert third["result"] == "T:C"
    assert toy.most <= 2
    assert {each.session_id for each in events if each.kind == "spawn"} == {"t:a", "t:bad", "t:c"}
    waits = [each.wait_s for each in events if each.kind == "saturated" and each.reason != "it was refused"]
    assert all(wait_s is None or wait_s < 0.1 for wait_s in waits), "it looks as often as it was told"


class Item(PolyKVState):
    item: str
    said: str


async def test_workers_of_a_courier_may_be_graphs() -> None:
    toy = ToyGate(room=2)
    sdk, async_sdk = toy.sync(), toy.asynchronous()

    async def alook(state: Item) -> dict[str, str]:
        at = state["polykv"]
        said = await async_sdk.chat([], pool_id=at["pool_id"], session_id=at["session_id"])
        toy.leave(at["session_id"])
        return {"said": said.text}

    def look(state: Item) -> dict[str, str]:
        at = state["polykv"]
        said = sdk.chat([], pool_id=at["pool_id"], session_id=at["session_id"])
        toy.leave(at["session_id"])
        return {"said": said.text}

    from langchain_core.runnables import RunnableLambda

    inner = StateGraph(Item)
    inner.add_node("look", RunnableLambda(look, afunc=alook))
    inner.add_edge(START, "look")
    graph = delivering(CourierNode(inner.compile()), checkpointer=InMemorySaver())
    given = {"items": ["a", "b", "c"], "polykv": {"pool_id": "p"}}
    for state in await both(graph, toy, given, config={"configurable": {"thread_id": "t"}}):
        assert [each["error"] for each in state["results"]] == [None] * 3
        assert [each["result"]["said"] for each in state["results"]] == ["t:0", "t:1", "t:2"]
        assert [each["result"]["item"] for each in state["results"]] == ["a", "b", "c"]
