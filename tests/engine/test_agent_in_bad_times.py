"""An agent of LangChain on the real engine, while its pool is full, its context runs out and the engine is killed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient, PolyKVUnavailableError
from polykv_proxy.langgraph import ChatPolyKV, PolyKVCompactionMiddleware, PolyKVPoolMiddleware
from tests.relay.raw import until

from .deployment import Deployment
from .restarts import kill_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLOOR = 1e6
"""Tokens per second that nothing decodes at: whoever comes beyond the guarantee is one too many."""
SYSTEM = "You are one of many who share this text, and each of you has a task. " * 8
CTX = 2048
N_TURNS = 12
KILLED_AT_REST, KILLED_AT_WORK = 2, 7


async def test_it_survives_saturation_compaction_and_kills(chat_model: Path, tmp_path: Path) -> None:
    sizes = ("-c", str(CTX), "--parallel", "4", "--kv-unified", "--polykv-max-pools", "8", "-t", "1")
    with Deployment(chat_model, *sizes, dir_=tmp_path, settings={"session_gap_s": 1}) as site:
        url = str(site.http.base_url)
        async with AsyncPolyKVClient(url) as sdk:
            with PolyKVClient(url) as sync_sdk:
                await converse(site, url, sdk, sync_sdk)


async def converse(site: Deployment, url: str, sdk: AsyncPolyKVClient, sync_sdk: PolyKVClient) -> None:
    begun = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Let us begin."}]
    trunk = await sdk.create_pool(messages=begun[:1], name="trunk", pin=True)
    work = await sdk.fork_pool("trunk", messages=begun)
    policy = {"target_tps_per_session": FLOOR, "mode": "enforced", "guarantee_min_sessions": 1, "settle_max_ms": 0}
    await sdk.set_admission("trunk", policy)
    agent = create_agent(
        ChatPolyKV(base_url=url, max_tokens=24, temperature=0, on_saturated="wait", poll_interval_s=0.1),
        [],
        system_prompt=SYSTEM,
        middleware=[
            PolyKVPoolMiddleware(),
            PolyKVCompactionMiddleware(sync_sdk, async_client=sdk, keep=2, pressure=0.4, summary_max_tokens=32),
        ],
        checkpointer=InMemorySaver(),
    )
    config: Any = {"configurable": {"thread_id": "talker"}}

    async def say(given: dict[str, Any] | None) -> dict[str, Any]:
        return dict(await agent.ainvoke(given, config))

    # Another session has the only place.
    busy = asyncio.create_task(
        sdk.chat(begun, pool_id=work.pool_id, session_id="busy", max_tokens=1500, ignore_eos=True)
    )
    await until(lambda: sync_sdk.capacity("trunk").mean_active_tps is not None, within_s=60)
    at = {"pool_id": work.pool_id, "ancestor_pool_id": trunk.pool_id}
    first = asyncio.create_task(say({"messages": [HumanMessage("What is a queue?")], "polykv": at}))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(first), 1.0)
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await sdk.drop_session("busy")
    state = await asyncio.wait_for(first, 120)
    assert len(state["messages"]) == 2

    for turn in range(N_TURNS):
        if turn == KILLED_AT_REST:
            await asyncio.to_thread(site.restart_engine)
        given = {"messages": [HumanMessage(f"Go on with part {turn}. " * 12)]}
        if turn == KILLED_AT_WORK:
            asked = asyncio.create_task(say(given))
            await until(lambda: any(slot["state"] != "idle" for slot in site.stats()["slots"]), within_s=30)
            kill_engine(site.engine)
            with pytest.raises(PolyKVUnavailableError):
                await asked
            await asyncio.to_thread(site.engine.start)
            await asyncio.to_thread(site.wait_ready)
            given = None  # the question is in the graph's state
        state = await say(given)
        receipt = state["messages"][-1].response_metadata["polykv"]
        assert (receipt["session_id"], receipt["pool_id"]) == ("talker", state["polykv"]["pool_id"])
        assert receipt["cached_n_tokens"] >= receipt["prefix_n_tokens"] > 0
        assert receipt["ctx_used"] < CTX
    assert state["polykv"]["compactions"] >= 1
    assert work.pool_id in state["polykv"]["retired"]
    kept = [each.pool_id for each in (await sdk.pools()).pools if not each.auto]
    assert kept == [trunk.pool_id]
