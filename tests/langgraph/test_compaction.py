"""Compaction, as a node and as middleware, against a toy server: what is asked, what is kept, what is released."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from polykv_proxy.langgraph import (
    CompactionNode,
    PolyKVCompactionMiddleware,
    PolyKVPoolMiddleware,
    PolyKVState,
)
from polykv_proxy.langgraph.compaction import SUMMARISE, SUMMARY, Limits, safe_cut, shortened
from tests.langgraph.toy_server import RECEIPT, ToyServer

FULL = {"ctx_used": 85, "ctx_total": 100, "ctx_headroom_tokens": 15}
EMPTY = {"ctx_used": 20, "ctx_total": 100, "ctx_headroom_tokens": 80}


def said(text: str, **receipt: Any) -> AIMessage:
    return AIMessage(text, response_metadata={"polykv": receipt, "finish_reason": "stop"})


# Pure ----------------------------------------------------------------------------------------------------------------


def test_it_is_due_when_the_last_answer_says_so() -> None:
    limits = Limits(pressure=0.8, headroom_tokens=10)
    assert limits.due([HumanMessage("a"), said("b", **FULL), HumanMessage("c")])
    assert not limits.due([said("a", **FULL), HumanMessage("b"), said("c", **EMPTY)])
    assert limits.due([said("a", ctx_used=1, ctx_total=100, ctx_headroom_tokens=9)])
    assert not limits.due([HumanMessage("a"), AIMessage("b")])
    assert not Limits().due([said("a", ctx_used=None, ctx_total=None, ctx_headroom_tokens=3)])


def called(*ids: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": each} for each in ids])


def test_no_answer_of_a_tool_is_parted_from_its_call() -> None:
    messages: list[AnyMessage] = [
        SystemMessage("s"),
        HumanMessage("a"),
        said("b"),
        called("1", "2"),
        ToolMessage("x", tool_call_id="1"),
        ToolMessage("y", tool_call_id="2"),
        said("c"),
    ]
    assert [safe_cut(messages, cut) for cut in range(8)] == [0, 1, 2, 3, 3, 3, 6, 7]
    for keep, n_old, n_kept in [(1, 5, 1), (2, 2, 4), (3, 2, 4), (4, 2, 4), (5, 0, 6), (99, 0, 6)]:
        head, old, kept = Limits(keep=keep).split(messages)
        assert (len(head), len(old), len(kept)) == (1, n_old, n_kept)
        assert [*head, *old, *kept] == messages


def test_receipts_of_the_old_context_go() -> None:
    before = said("b", **FULL)
    new = shortened("in short", [before, HumanMessage("c")])
    assert [each.content for each in new] == [SUMMARY + "in short", "b", "c"]
    assert not Limits().due(new)
    assert new[1].response_metadata["finish_reason"] == "stop"
    assert Limits().due([before]), "it was not touched"


# Against a server ------------------------------------------------------------------------------------------------


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return word


class Server(ToyServer):
    """With pools: 1 the ancestor, 7 of the session (and ``others``), 9 the one that is made."""

    def __init__(self, *others: str):
        super().__init__()
        self.others, self.control = others, []  # type: ignore[var-annotated]
        self.answer = self._pools
        self.receipt = {**RECEIPT, **FULL}

    def _pools(self, request: httpx.Request) -> httpx.Response | None:
        path = request.url.path.removeprefix("/polykv/pools/")
        if path == request.url.path:
            return None
        body = json.loads(request.content) if request.content else None
        self.control.append((request.method, path, body))
        if request.method == "GET":
            sessions = [{"session_id": each} for each in ("t", *self.others)]
            shown = {"pool_id": 7, "name": "work", "sessions": sessions, "children": []}
            return httpx.Response(200, json={"pools": [shown]})
        if request.method == "DELETE":
            return httpx.Response(200, json={"released": [int(path)]})
        return httpx.Response(201, json={"pool_id": 9, "parent": 1})


async def talk(way: str, graph: Any, given: dict[str, Any]) -> dict[str, Any]:
    config = {"configurable": {"thread_id": "t"}}
    if way == "sync":
        made: dict[str, Any] = await asyncio.to_thread(graph.invoke, given, config)
        return made
    return dict(await graph.ainvoke(given, config))


def agent(server: Server, **fields: Any) -> Any:
    model = server.model()
    compacts = PolyKVCompactionMiddleware(model.sdk, async_client=model.async_sdk, keep=1, **fields)
    return create_agent(
        model,
        [look_up],
        system_prompt="be brief",
        middleware=[PolyKVPoolMiddleware(), compacts],
        checkpointer=InMemorySaver(),
    )


def asking(text: str, **polykv: Any) -> dict[str, Any]:
    return {"messages": [HumanMessage(text)], **({"polykv": polykv} if polykv else {})}


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize(
    ("others", "refork", "pool"), [((), "if_shared", 1), (("x",), "if_shared", 9), ((), "always", 9)]
)
async def test_an_agent_goes_on_from_a_summary(way: str, others: tuple[str, ...], refork: str, pool: int) -> None:
    server = Server(*others)
    server._said = lambda body: (["hello", " world"], [])  # type: ignore[method-assign]
    graph = agent(server, refork=refork)
    first = await talk(way, graph, asking("hi", pool_id=7, ancestor_pool_id=1))
    assert [each.content for each in first["messages"]] == ["hi", "hello world"]
    assert server.control == []
    server.says = ["fine"]
    state = await talk(way, graph, asking("more"))

    _, asked, turn = server.bodies
    assert [each["content"] for each in asked["messages"]] == ["be brief", "hi", "hello world", SUMMARISE]
    assert (asked["pool_id"], asked["session_id"], asked["max_tokens"]) == (7, "t", 1024)
    assert asked["tools"] == turn["tools"] == server.bodies[0]["tools"]
    summary = SUMMARY + "hello world"
    assert [each["content"] for each in turn["messages"]] == ["be brief", summary, "more"]
    assert (turn["pool_id"], turn["session_id"]) == (pool, "t")

    assert [each.content for each in state["messages"]] == [summary, "more", "hello world"]
    assert (state["polykv"]["pool_id"], state["polykv"]["compactions"]) == (pool, 1)
    assert state["polykv"]["sessions"]["s"]["tps"] == 12.5
    verbs = [(method, path) for method, path, _ in server.control]
    made = [("POST", "1/fork")] if pool == 9 else []
    assert verbs == [("GET", "7"), *made, *([("DELETE", "7")] if not others else [])]
    assert state["polykv"]["retired"] == ([7] if not others else [])
    for _, _, body in server.control[1:2] if made else []:
        assert [each["content"] for each in body["messages"]] == ["be brief", summary, "more"]
        assert body["tools"] == turn["tools"]


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_a_turn_that_fails_changes_nothing(way: str) -> None:
    server = Server()
    server._said = lambda body: (["hello"], [])  # type: ignore[method-assign]
    graph = agent(server)
    await talk(way, graph, asking("hi", pool_id=7, ancestor_pool_id=1))

    def fail(request: httpx.Request) -> httpx.Response | None:
        if request.url.path == "/v1/chat/completions" and len(server.bodies) >= 2:
            return httpx.Response(503, json={"error": {"message": "away", "code": "upstream_unavailable"}})
        return server._pools(request)

    server.answer = fail
    with pytest.raises(Exception, match="away"):
        await talk(way, graph, asking("more"))
    assert ("DELETE", "7", None) not in server.control
    state = graph.get_state({"configurable": {"thread_id": "t"}}).values
    assert [each.content for each in state["messages"]] == ["hi", "hello", "more"]
    assert state["polykv"]["pool_id"] == 7


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_without_a_summary_the_conversation_stays(way: str, caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server._said = lambda body: ([] if body["messages"][-1]["content"] == SUMMARISE else ["ok"], [])  # type: ignore[method-assign]
    graph = agent(server)
    await talk(way, graph, asking("hi", pool_id=7, ancestor_pool_id=1))
    state = await talk(way, graph, asking("more"))
    assert [each.content for each in state["messages"]] == ["hi", "ok", "more", "ok"]
    assert server.control == []
    assert "the conversation stays as it is" in caplog.text


class State(MessagesState, PolyKVState):
    pass


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_a_node_compacts_and_releases_after_the_next_turn(way: str) -> None:
    server = Server()
    model = server.model()

    def ask(state: State) -> dict[str, Any]:
        at = state["polykv"]
        return {"messages": [model.invoke(state["messages"], pool_id=at["pool_id"], session_id=at["session_id"])]}

    graph = StateGraph(State)
    graph.add_node("compact", CompactionNode(model, model.sdk, async_client=model.async_sdk, keep=1))
    graph.add_node("ask", ask)
    graph.add_edge(START, "compact")
    graph.add_edge("compact", "ask")
    made = graph.compile(checkpointer=InMemorySaver())
    begun = {"messages": [SystemMessage("be brief"), HumanMessage("hi")]}
    at = {"pool_id": 7, "ancestor_pool_id": 1, "session_id": "s"}
    await talk(way, made, {**begun, "polykv": at})
    server.others = ()
    state = await talk(way, made, asking("more"))
    summary = SUMMARY + "hello world"
    assert [each.content for each in state["messages"]] == ["be brief", summary, "more", "hello world"]
    assert (state["polykv"]["pool_id"], state["polykv"]["compactions"]) == (9, 1), "t was on the old pool, too"
    assert [(method, path) for method, path, _ in server.control] == [("GET", "7"), ("POST", "1/fork")]
    assert state["polykv"]["leaving"] is None


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_a_node_releases_the_pool_that_nobody_is_on(way: str) -> None:
    server = Server()
    model = server.model()
    node = CompactionNode(model, model.sdk, async_client=model.async_sdk, keep=1, tools=[look_up])
    server._said = lambda body: (["short"], [])  # type: ignore[method-assign]
    messages = [HumanMessage("hi"), said("b", **FULL), HumanMessage("more")]
    state: dict[str, Any] = {"messages": messages, "polykv": {"pool_id": 7, "ancestor_pool_id": 1, "session_id": "t"}}

    async def run() -> dict[str, Any]:
        return await (node.ainvoke(state) if way == "async" else asyncio.to_thread(node.invoke, state))

    update = await run()
    assert [each.content for each in update["messages"]][1:] == [SUMMARY + "short", "more"]
    assert (update["polykv"]["pool_id"], update["polykv"]["leaving"]) == (1, 7)
    assert [each["function"]["name"] for each in server.bodies[0]["tools"]] == ["look_up"]
    state = {"messages": update["messages"][1:], "polykv": {**state["polykv"], **update["polykv"]}}
    later = await run()
    assert "messages" not in later
    assert (later["polykv"]["leaving"], later["polykv"]["retired"]) == (None, [7])
    assert [(method, path) for method, path, _ in server.control] == [("GET", "7"), ("DELETE", "7")]


async def test_a_pool_that_is_its_own_ancestor_stays() -> None:
    server = Server()
    server._said = lambda body: (["short"], [])  # type: ignore[method-assign]
    messages = [HumanMessage("hi"), said("b", **FULL), HumanMessage("more")]
    for name, ancestor in ((7, 7), ("work", 7), (7, "work")):
        server.control.clear()
        at = {"pool_id": name, "ancestor_pool_id": ancestor, "session_id": "t"}
        model = server.model()
        update = await CompactionNode(model, async_client=model.async_sdk, keep=1, refork="never").ainvoke(
            {"messages": messages, "polykv": at}
        )
        assert update["polykv"]["leaving"] is None
        assert str(update["polykv"]["pool_id"]) == str(ancestor if name == ancestor else name)
        assert not [each for each in server.control if each[0] != "GET"]
