"""Pools as tools, against the proxy as it is served."""

import asyncio
from typing import Any

import pytest
from langchain_core.messages import ToolMessage

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient
from polykv_proxy.langgraph import PolyKVToolkit
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


async def test_without_the_admin_key_the_agent_reads_why(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, admin_key=ADMIN) as proxy, AsyncPolyKVClient(proxy.url) as sdk:
        tools = {each.name: each for each in PolyKVToolkit(async_client=sdk).get_tools()}
        assert sorted(tools) == ["capacity", "create_pool", "fork_pool", "pool_status", "session_tps"]
        call = {"type": "tool_call", "id": "1", "name": "create_pool", "args": {"prompt": "x"}}
        told = await tools["create_pool"].ainvoke(call)
        assert told.status == "error"
        assert "admin" in told.content
