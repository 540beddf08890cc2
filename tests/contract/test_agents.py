"""§3 and §4 for agents that configure nothing: more of them than slots, and what the receipts of their requests say."""

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are one of many agents who share all of these words. " * 8}
N_SLOTS, N_ANSWER = 4, 4


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(n_slots=N_SLOTS, save_ram=1 << 24) as engine:
        yield engine


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine, make_proxy: ProxyMaker) -> AsyncIterator[Proxy]:
    """Tokens have one byte each here."""
    async with make_proxy(engine.url, auto_pool_min_tokens=128) as proxy:
        yield proxy


class Agent:
    """Sends what chat clients send, and a header to say who it is."""

    def __init__(self, proxy: Proxy, engine: FakeEngine, name: str):
        self.proxy, self.engine, self.name = proxy, engine, name
        self.messages = [SYSTEM]

    async def say(self, text: str) -> int:
        """Gives how many tokens of what was said before were not reused."""
        before = len(self.engine.template.render(CHAT, {"messages": self.messages})[0][0])
        self.messages = [*self.messages, {"role": "user", "content": text}]
        body = {"messages": self.messages, "max_tokens": N_ANSWER}
        answer = await self.proxy.client.post(CHAT, json=body, headers={"x-session-id": self.name})
        assert answer.status_code == 200
        said = answer.json()
        self.messages = [*self.messages, said["choices"][0]["message"]]
        return before - int(said["timings"]["cache_n"])


async def receipts(proxy: Proxy) -> list[dict[str, Any]]:
    """Oldest first."""
    listed = (await proxy.client.get("/polykv/requests?last=100")).json()["requests"]
    return sorted(listed, key=lambda one: one["received_ts"])


async def test_after_its_sub_agents_ran_the_main_agents_own_words_are_still_there(
    engine: FakeEngine, proxy: Proxy
) -> None:
    """Twice as many sub-agents as slots; the receipt of the one that took its slot names it."""
    main = Agent(proxy, engine, "main")
    await main.say("Read all of this before you begin. " * 10)
    subs = [Agent(proxy, engine, f"sub-{i}") for i in range(2 * N_SLOTS)]
    for i, sub in enumerate(subs):
        await sub.say(f"{i}: Your task. " * 4)
    displacing = [one for one in await receipts(proxy) if "main" in one["displaced"]]
    assert len(displacing) == 1
    # The template closes the last answer anew.
    assert await main.say("Go on with what they found.") <= 1
    last = (await receipts(proxy))[-1]
    assert last["cached_n_tokens"] > len("Read all of this before you begin. " * 10)
    assert last["session_id"] == "main"
    assert len(last["displaced"]) == 1
    assert last["displaced"][0].startswith("sub-")


async def test_one_more_agent_than_slots_in_turn(engine: FakeEngine, proxy: Proxy) -> None:
    """Every later turn prefills what is new, and every receipt says whose slot it took: the one away for longest."""
    agents = [Agent(proxy, engine, f"agent-{i}") for i in range(N_SLOTS + 1)]
    n_again = [[await agent.say(f"{agent.name}, turn {n}. " * 4) for agent in agents] for n in range(3)]
    assert all(n <= 1 for turn in n_again[1:] for n in turn)
    told = await receipts(proxy)
    assert [one["displaced"] for one in told[:N_SLOTS]] == [[]] * N_SLOTS
    assert [one["displaced"] for one in told[N_SLOTS:]] == [
        [told[i - N_SLOTS]["session_id"]] for i in range(N_SLOTS, len(told))
    ]
