"""The demo's agents: one streamed chat request each, all of a group at once, measured where the client stands."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from polykv_proxy.cli.client import ServerRefused, Unreachable
from polykv_proxy.cli.demo.content import Group


@dataclass(frozen=True)
class AgentRun:
    """What one agent saw. ``cache_n`` and ``prompt_n`` are the engine's own: tokens reused, tokens prefilled."""

    agent: str
    pool: str
    ttft_ms: float
    wall_ms: float
    cache_n: int
    prompt_n: int
    predicted_n: int
    tps: float
    text: str
    miss_reason: str | None


@dataclass(frozen=True)
class GroupRun:
    """All agents of a group. ``wall_ms``: from the first request sent to the last answer complete."""

    agents: tuple[AgentRun, ...]
    wall_ms: float

    @property
    def slowest_ttft_ms(self) -> float:
        return max(agent.ttft_ms for agent in self.agents)

    @property
    def prefilled_n(self) -> int:
        return sum(agent.prompt_n for agent in self.agents)

    @property
    def whole_n(self) -> int:
        """Cells if nobody shared: prompt and answer of every agent."""
        return sum(agent.cache_n + agent.prompt_n + agent.predicted_n for agent in self.agents)


def run_group(
    url: str, group: Group, *, pooled: bool, n_predict: int, tick: Callable[[str], None] = lambda _: None
) -> GroupRun:
    """Let all agents of a group ask at once. ``tick`` hears every piece of text, by agent.

    Raises:  ServerRefused, Unreachable
    """
    return asyncio.run(fan_out(url, group, pooled, n_predict, tick))


async def fan_out(url: str, group: Group, pooled: bool, n_predict: int, tick: Callable[[str], None]) -> GroupRun:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, limits=limits) as http:
        started_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(_ask(http, agent, _body(group, agent, pooled, n_predict), tick))
                    for agent in agent_names(group)
                ]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        wall_ms = 1000 * (time.perf_counter() - started_s)
    return GroupRun(tuple(task.result() for task in running), wall_ms)


def agent_names(group: Group) -> list[str]:
    return [f"{group.pool}-{number}" for number in range(1, len(group.questions) + 1)]


def _body(group: Group, agent: str, pooled: bool, n_predict: int) -> dict[str, Any]:
    question = group.questions[agent_names(group).index(agent)]
    body: dict[str, Any] = {
        "messages": [*group.prefix, {"role": "user", "content": question}],
        "max_tokens": n_predict,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | ({"pool_id": group.pool, "session_id": agent} if pooled else {})


async def _ask(http: httpx.AsyncClient, agent: str, body: dict[str, Any], tick: Callable[[str], None]) -> AgentRun:
    timings: dict[str, Any] = {}
    receipt: dict[str, Any] = {}
    text, ttft_ms = "", 0.0
    started_s = time.perf_counter()
    async for chunk in _chunks(http, body):
        for choice in chunk.get("choices", ()):
            if piece := choice.get("delta", {}).get("content"):
                ttft_ms = ttft_ms or 1000 * (time.perf_counter() - started_s)
                text += piece
                tick(agent)
        timings = chunk.get("timings") or timings
        receipt = chunk.get("polykv") or receipt
    wall_ms = 1000 * (time.perf_counter() - started_s)
    if not timings:
        raise ServerRefused(f"the answer to {agent} carries no timings", status=200)
    return AgentRun(
        agent=agent,
        pool=str(body.get("pool_id", "")),
        ttft_ms=ttft_ms,
        wall_ms=wall_ms,
        cache_n=timings["cache_n"],
        prompt_n=timings["prompt_n"],
        predicted_n=timings["predicted_n"],
        tps=timings["predicted_per_second"],
        text=text,
        miss_reason=receipt.get("miss_reason"),
    )


async def _chunks(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Give the JSON of every data line."""
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise ServerRefused(f"HTTP {answer.status_code}: {answer.text[:300]}", status=answer.status_code)
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ServerRefused(str(chunk["error"].get("message", chunk["error"])), status=200)
                yield chunk
    except httpx.TransportError as error:
        raise Unreachable(f"the proxy went away: {error or type(error).__name__}") from None
