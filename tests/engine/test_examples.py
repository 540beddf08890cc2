"""The examples on the real engine and the chat model, as a reader runs them: each does what it says that it does."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from benchmarks.fan_out import fan_out
from examples import courier_floor, long_conversation, pool_tree_agent, supervisor
from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient
from polykv_proxy.langgraph import ChatPolyKV, PolyKVContext, polykv_update
from polykv_proxy.langgraph.compaction import SUMMARY
from tests.langgraph.conftest import langchain_openai

from .binaries import binary_path
from .stack import ProxyStack

__all__ = ["langchain_openai"]

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
NOBODY = "1e6"
"""A floor in tokens per second that nothing here reaches."""


@pytest.fixture(scope="module")
def stack(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyStack]:
    dir_ = tmp_path_factory.mktemp("examples")
    with ProxyStack(binary_path("patched"), chat_model, "-t", "1", log_dir=dir_) as stack:
        yield stack


@pytest.fixture
def polykv(stack: ProxyStack) -> Iterator[PolyKVClient]:
    """A client; afterwards nothing that an example made is left."""
    with PolyKVClient(stack.url) as polykv:
        yield polykv
        assert [each.pool_id for each in polykv.pools().pools if not each.auto] == []


def n_prompt(polykv: PolyKVClient, messages: list[dict[str, str]]) -> int:
    """Tokens of a chat that is asked to go on."""
    return len(polykv.render(messages, add_generation_prompt=True))


def test_a_supervisor_is_run_as_a_program(stack: ProxyStack, polykv: PolyKVClient) -> None:
    command = [sys.executable, "-m", "examples.supervisor", "--max-tokens", "16"]
    env = {**os.environ, "POLYKV_BASE_URL": stack.url}
    told = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (told.returncode, told.stderr) == (0, "")
    pool, head, *rows, last = told.stdout.splitlines()
    n_tokens = int(re.findall(r"pool \d+: (\d+) tokens", pool)[0])
    assert head.split() == ["worker", "TTFT", "ms", "cached", "prefilled", "tokens/s", "held", "ms"]
    shown = {row.split()[0]: row.split()[1:5] for row in rows}
    assert set(shown) == set(supervisor.ASKED)
    for topic, (ttft_ms, cached, prefilled, tps) in shown.items():
        asked = [supervisor.SYSTEM, supervisor.TASK, {"role": "user", "content": supervisor.ASKED[topic]}]
        assert int(cached) == n_tokens, "all of the fork"
        assert int(prefilled) == n_prompt(polykv, asked) - n_tokens, "its own question"
        assert float(ttft_ms) > 0
        assert float(tps) > 0
    assert last.startswith("four reviews in ")


def ttft_ratio(url: str, pool_id: int, n_rounds: int, enough: float) -> tuple[float, list[str]]:
    """The last worker's time to first token over that of the same four requests by plain HTTP, best of each: whatever
    else runs here can only slow a round down. Rounds of both in turn, until it is ``enough``, and what each took.
    """
    model = ChatPolyKV(base_url=url, temperature=0, max_tokens=16)
    graph = supervisor.graph_of(model)

    async def by_graph(asked: dict[str, str]) -> list[float]:
        async with AsyncPolyKVClient(url) as polykv:
            given = {"asked": asked, "polykv": polykv_update(pool_id=pool_id)}
            state = await graph.ainvoke(given, context=PolyKVContext(async_client=polykv))
        return [each["ttft_ms"] for each in state["reviews"]]

    def bare(asked: dict[str, str]) -> list[float]:
        begun = [supervisor.SYSTEM, supervisor.TASK]
        fields = {"max_tokens": 16, "temperature": 0, "pool_id": pool_id}
        bodies = [
            {"messages": [*begun, {"role": "user", "content": each}], "session_id": f"bare:{topic}", **fields}
            for topic, each in asked.items()
        ]
        return [agent.ttft_ms for agent in fan_out(url, bodies).agents]

    took: dict[str, list[float]] = {"graph": [], "bare": []}
    said = []
    ratio = float("inf")
    for n in range(n_rounds):
        for arm in ("graph", "bare") if n % 2 else ("bare", "graph"):
            # Questions that nobody asked before: what a slot still has of them is no pool's merit.
            asked = {topic: f"Round {10 + n}, {arm}. {each}" for topic, each in supervisor.ASKED.items()}
            ttfts_ms = asyncio.run(by_graph(asked)) if arm == "graph" else bare(asked)
            took[arm].append(max(ttfts_ms))
            said.append(f"{arm} {n}: " + " ".join(f"{each:.0f}" for each in ttfts_ms))
        ratio = min(took["graph"]) / min(took["bare"])
        if n and ratio <= enough:
            break
    return ratio, said


@pytest.mark.slow
def test_workers_start_as_soon_as_a_bare_fan_out(stack: ProxyStack, polykv: PolyKVClient) -> None:
    system = polykv.create_pool(messages=[supervisor.SYSTEM])
    task = polykv.fork_pool(system.pool_id, messages=[supervisor.SYSTEM, supervisor.TASK])
    ratio, said = ttft_ratio(stack.url, task.pool_id, n_rounds=10, enough=1.2)
    polykv.release(system.pool_id, recursive=True)
    assert ratio <= 1.2, "\n".join(said)


def test_a_conversation_compacts_itself(
    stack: ProxyStack, polykv: PolyKVClient, capsys: pytest.CaptureFixture[str]
) -> None:
    told = long_conversation.main(["--base-url", stack.url, "--turns", "4", "--max-tokens", "16", "--pressure", "0.05"])
    turns, summaries, state = told["turns"], told["summaries"], told["state"]
    (summary,) = summaries
    at = next(n for n, each in enumerate(turns) if each["polykv"]["pool_id"] == summary["pool_id"])
    before, after = turns[at - 1], turns[at]

    # The summary is a question at the end of what the session holds.
    chat = [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]
    question = {"role": "user", "content": long_conversation.SUMMARISE}
    n_chat = len(polykv.render(chat))
    n_question = n_prompt(polykv, [*chat, question]) - n_chat
    assert summary["polykv"]["session_id"] == long_conversation.THREAD
    assert summary["prompt_n"] <= n_question + 2, "the question, and what closes the answer before it"
    assert summary["cache_n"] >= before["cache_n"] + before["prompt_n"]
    assert summary["cache_n"] + summary["prompt_n"] > 5 * n_question

    # The turn that was waiting attaches to the new pool, all of it.
    assert after["cache_n"] == summary["pool_n"]
    assert after["polykv"]["miss_reason"] is None
    assert after["polykv"]["ctx_used"] < before["polykv"]["ctx_used"]
    first, asked = state["messages"][:2]
    assert isinstance(first, HumanMessage)
    assert first.text.startswith(SUMMARY)
    assert asked.text == long_conversation.told(at), "what was just said is left as it was"
    whole = [
        {"role": "system", "content": long_conversation.SYSTEM},
        {"role": "user", "content": first.text},
        {"role": "user", "content": asked.text},
    ]
    assert after["prompt_n"] == n_prompt(polykv, whole) - summary["pool_n"], "what opens the answer"
    assert (state["polykv"]["compactions"], state["polykv"]["retired"]) == (1, []), "the trunk is still its ancestor"
    shown = capsys.readouterr().out
    assert f"{summary['cache_n']} tokens were there, {summary['prompt_n']} were prefilled" in shown


def test_an_agent_manages_its_own_tree(
    stack: ProxyStack, polykv: PolyKVClient, capsys: pytest.CaptureFixture[str]
) -> None:
    told = pool_tree_agent.main(["--base-url", stack.url, "--max-tokens", "16"])
    messages, asked = told["state"]["messages"], told["asked"]
    tools = [each for each in messages if isinstance(each, ToolMessage)]
    assert [each.status for each in tools] == ["success"] * sum(len(step) for step in pool_tree_agent.SCRIPT)
    made = [json.loads(each.text) for each in tools if each.name in ("create_pool", "fork_pool")]
    trunk, *leaves = made
    assert [each["parent"] for each in leaves] == [trunk["pool_id"]] * 2
    length = {each["name"]: each["prefix_len"] for each in leaves}
    assert len(asked) == 4
    for each in asked:
        assert each["cached"] == length[each["text"]]
        question = {"role": "user", "content": each["question"]}
        whole = n_prompt(polykv, [*pool_tree_agent.chat(each["text"]), question])
        assert each["prefilled"] == whole - each["cached"]
    at = told["state"]["polykv"]
    assert at["retired"] == sorted(each["pool_id"] for each in made)
    assert at["pools"] == {}
    assert told["state"]["capacity_ok"] is True
    last = messages[-1]
    assert isinstance(last, AIMessage)
    assert last.text, "the model has the last word"
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_a_courier_holds_who_is_too_many(
    stack: ProxyStack, polykv: PolyKVClient, capsys: pytest.CaptureFixture[str]
) -> None:
    told = courier_floor.main(["--base-url", stack.url, "--jobs", "4", "--max-tokens", "32", "--floor", NOBODY])
    kinds = [each.kind for each in told["events"]]
    assert kinds.count("spawn") == kinds.count("guarantee") == 4, "below the floor there is one, which is guaranteed"
    assert [each["error"] for each in told["pages"]] == [None] * 4
    for page in told["pages"]:
        assert page["result"]["cached"] >= told["pool"].prefix_len
        assert page["result"]["tps"] > 0
    served = [each for each in polykv.requests(last=50) if (each.session_id or "").startswith("handbook:")]
    assert [each.status for each in served] == [200] * 4, "nobody was refused"
    spans = sorted((each.sent_ts or 0.0, each.ended_ts or 0.0) for each in served)
    assert all(ended <= sent for (_, ended), (sent, _) in pairwise(spans)), "one at a time"
    held = [each for each in kinds if each in ("settle", "saturated")]
    assert held, "the others had to wait"
    assert "4 spawned in " in capsys.readouterr().out


def test_every_example_says_how_to_run_it() -> None:
    for file in sorted((ROOT / "examples").glob("*.py")):
        assert f"python -m examples.{file.stem} " in file.read_text(encoding="utf-8")
        assert f"examples.{file.stem}" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
