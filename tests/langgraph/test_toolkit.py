"""Pools as tools, against the proxy as it is served."""

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import ToolNode

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient, TpsSample
from polykv_proxy.langgraph import ChatPolyKV, PolyKVPoolMiddleware, PolyKVToolkit
from polykv_proxy.langgraph.toolkit import update_of
from tests.fake_engine import FakeEngine
from tests.relay.conftest import ProxyMaker, make_proxy

__all__ = ["make_proxy"]

ADMIN = "admin-key"


@pytest.fixture(params=["sync", "async"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_an_agent_manages_its_own_pools(engine: FakeEngine, make_proxy: ProxyMaker, way: str) -> None:
    async with make_proxy(engine.url, admin_key=ADMIN) as proxy:
        with PolyKVClient(proxy.url, admin_key=ADMIN) as sdk:
            async with AsyncPolyKVClient(proxy.url, admin_key=ADMIN) as async_sdk:
                kit = PolyKVToolkit(client=sdk, async_client=async_sdk, releases=True)
                tools = {each.name: each for each in kit.get_tools()}

                async def use(called: str, /, **args: Any) -> Any:
                    call = {"type": "tool_call", "id": "1", "name": called, "args": args}
                    tool = tools[called]
                    told = await (tool.ainvoke(call) if way == "async" else asyncio.to_thread(tool.invoke, call))
                    assert isinstance(told, ToolMessage)
                    return told

                made = await use("create_pool", prompt="All of us read this. ", name="root")
                assert made.status == "success"
                root = (await async_sdk.pool("root")).pool_id
                assert f'"pool_id": {root}' in str(made.content)
                child = await use("fork_pool", pool_id="root", prompt="All of us read this. And I read on.")
                assert f'"parent": {root}' in str(child.content)
                assert '"name": "root"' in str((await use("pool_status")).content)
                assert '"own_n_tokens": 21' in str((await use("pool_status", pool_id="root")).content)
                assert '"can_admit": true' in str((await use("capacity", pool_id="root")).content)
                assert '"n_active": 0' in str((await use("session_tps")).content)
                refused = await use("release_pool", pool_id="root")
                assert refused.status == "error"
                assert str(refused.content).startswith("pool_has_children: ")
                neither = await use("create_pool")
                assert (neither.status, neither.content) == ("error", "give either prompt or system")


class Script(AgentMiddleware[Any, Any, Any]):
    """Calls of tools that the model is made to make, one after the other, then it says what it wants."""

    def __init__(self, *steps: tuple[str, dict[str, Any]]):
        super().__init__()
        self._steps = steps

    def _next(self, request: ModelRequest[Any]) -> AIMessage | None:
        n = sum(isinstance(each, AIMessage) for each in request.messages)
        if n >= len(self._steps):
            return None
        name, args = self._steps[n]
        return AIMessage("", tool_calls=[{"name": name, "args": args, "id": str(n)}])

    def wrap_model_call(self, request: ModelRequest[Any], handler: Any) -> Any:
        return self._next(request) or handler(request)

    async def awrap_model_call(self, request: ModelRequest[Any], handler: Any) -> Any:
        return self._next(request) or await handler(request)


async def test_what_tools_do_is_in_the_state_of_a_graph(
    engine: FakeEngine, make_proxy: ProxyMaker, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGGRAPH_STRICT_MSGPACK", "true")
    async with make_proxy(engine.url) as proxy, AsyncPolyKVClient(proxy.url) as async_sdk:
        with PolyKVClient(proxy.url) as sdk:
            root = {"role": "system", "content": "be brief"}
            child = [root, {"role": "user", "content": "read this"}]
            script = Script(
                ("create_pool", {"system": "be brief", "name": "root"}),
                ("fork_pool", {"pool_id": "root", "messages": child, "name": "child"}),
                ("fork_pool", {"pool_id": "root", "messages": [*child, *child], "name": "other"}),
                ("fork_pool", {"pool_id": "nowhere", "messages": child}),
                ("pool_status", {"pool_id": "root"}),
                ("capacity", {"pool_id": "child"}),
                ("session_tps", {}),
                ("release_pool", {"pool_id": "other"}),
            )
            agent = create_agent(
                ChatPolyKV(base_url=proxy.url, max_tokens=4),
                PolyKVToolkit(client=sdk, async_client=async_sdk, releases=True).get_tools(),
                middleware=[PolyKVPoolMiddleware("root"), script],
                checkpointer=InMemorySaver(),
            )
            config: Any = {"configurable": {"thread_id": "t"}}
            given = {"messages": [HumanMessage("go")]}
            state = await (
                agent.ainvoke(given, config) if way == "async" else asyncio.to_thread(agent.invoke, given, config)
            )
            told = [each for each in state["messages"] if isinstance(each, ToolMessage)]
            assert [each.tool_call_id for each in told] == [str(n) for n in range(8)]
            assert [each.status for each in told] == ["success"] * 3 + ["error"] + ["success"] * 4
            tree = {each.name: each for each in (await async_sdk.pools()).pools if not each.auto}
            assert set(tree) == {"root", "child"}
            ids = {str(each.pool_id): each for each in tree.values()}
            assert state["polykv"]["pools"] == {
                key: {"name": each.name, "parent": each.parent, "prefix_len": each.prefix_len}
                for key, each in ids.items()
            }
            assert len(state["polykv"]["retired"]) == 1
            assert (state["capacity_ok"], state["polykv"]["capacity"]["name"]) == (True, "child")
            assert "mean_active_tps" in state
            answer = state["messages"][-1]
            assert answer.response_metadata["pool_id"] == tree["root"].pool_id, "the agent stays where it is"


def test_rates_of_the_session_that_was_asked_about() -> None:
    sessions = [{"session_id": "a", "tps_ewma": 5.5, "ctx_headroom_tokens": 7, "pool_id": 3}, {"session_id": "b"}]
    sample = TpsSample.model_validate({"ts": 1.0, "mean_active_tps": 6.0, "sessions": sessions})
    assert update_of(sample, {}) == {"mean_active_tps": 6.0}
    update = update_of(sample, {"session_id": "a"})
    session = update["polykv"]["sessions"].pop("a")
    assert update == {"mean_active_tps": 6.0, "polykv": {"sessions": {}}}
    assert session.pop("ts") > 0
    assert session == {"tps": 5.5, "ctx_headroom_tokens": 7, "pool_id": 3}


async def test_in_a_graph_without_messages_of_its_own_the_answer_is_all(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    async with make_proxy(engine.url) as proxy, AsyncPolyKVClient(proxy.url) as sdk:
        node = ToolNode(PolyKVToolkit(async_client=sdk).get_tools())
        graph = StateGraph(list)
        graph.add_node("tools", node)
        graph.add_edge(START, "tools")
        call = {"name": "create_pool", "args": {"prompt": "All of us. "}, "id": "1"}
        (told,) = await graph.compile().ainvoke([AIMessage("", tool_calls=[call])])  # type: ignore[arg-type]
        assert (told.status, told.tool_call_id) == ("success", "1")


async def test_without_the_admin_key_the_agent_reads_why(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, admin_key=ADMIN) as proxy, AsyncPolyKVClient(proxy.url) as sdk:
        tools = {each.name: each for each in PolyKVToolkit(async_client=sdk).get_tools()}
        assert sorted(tools) == ["capacity", "create_pool", "fork_pool", "pool_status", "session_tps"]
        call = {"type": "tool_call", "id": "1", "name": "create_pool", "args": {"prompt": "x"}}
        told = await tools["create_pool"].ainvoke(call)
        assert told.status == "error"
        assert "admin" in told.content
