"""The server under test, given by the environment, and what a reply through the proxy must tell beside the answer."""

import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

URL = os.environ.get("CONFORMANCE_URL", "")
ARM = os.environ.get("CONFORMANCE_ARM", "stock")
POOLED = ARM == "proxy"
N_RULES = 24
SYSTEM = "You work at the front desk of a library. Answer in one short sentence. House rules: " + " ".join(
    f"Rule {n}: shelf {n} is open to everybody on weekday number {n % 5 + 1}, from {n % 12 + 1} o'clock."
    for n in range(1, N_RULES + 1)
)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city", "unit"],
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": WEATHER},
}
ANTHROPIC_TOOL: Any = {"name": "get_weather", "description": "The weather in a city.", "input_schema": WEATHER}


def call_for(city: str) -> str:
    """What makes a model of 135 M parameters call the tool: it repeats the call."""
    call = json.dumps({"name": "get_weather", "arguments": {"city": city, "unit": "c"}})
    return f"Say exactly this: <tool_call>\n{call}\n</tool_call>"


def chat(question: str = "Which shelf is open on Monday?") -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    if not URL:
        pytest.skip("CONFORMANCE_URL names no server: run it with `make conformance`")
    with httpx.Client(base_url=URL, timeout=300, trust_env=False) as http:
        yield http


@pytest.fixture(scope="session", autouse=True)
def pools(http: httpx.Client) -> dict[str, Any]:
    """What the chats begin with, as pools where there are any."""
    if not POOLED:
        return {}
    made = {}
    for name, more in {"house": {}, "tools": {"tools": [TOOL]}}.items():
        answer = http.post("/polykv/pools", json={"messages": chat()[:1], "name": name, **more})
        assert answer.status_code == 201, answer.text
        made[name] = answer.json()
    return made


class Told:
    """Checks what a reply says of its pool."""

    def __init__(self, pools: dict[str, Any]):
        self._pools = pools

    def of(self, said: dict[str, Any] | None, pool: str = "house") -> None:
        """``said``: the fields of a reply that the client does not know. Only the proxy in front of pools has one."""
        told = (said or {}).get("polykv")
        if not POOLED:
            assert told is None or told["pool_id"] is None
            return
        assert told is not None, "the reply does not say which pool it used"
        assert (told["pool_id"], told["miss_reason"]) == (self._pools[pool]["pool_id"], None)
        assert told["cached_n_tokens"] >= self._pools[pool]["prefix_len"]


@pytest.fixture
def told(pools: dict[str, Any]) -> Told:
    return Told(pools)


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="sk-none", timeout=300) as client:
        yield client


@pytest_asyncio.fixture
async def aclient(http: httpx.Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="sk-none", timeout=300) as client:
        yield client


@pytest.fixture
def claude(http: httpx.Client) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=URL, api_key="sk-none", timeout=300) as client:
        yield client


@pytest_asyncio.fixture
async def aclaude(http: httpx.Client) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="sk-none", timeout=300) as client:
        yield client
