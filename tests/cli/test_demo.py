"""The demo: its agents against a fake engine, its tables, its way out; once as a whole on the real engine."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rich.console import Console

from polykv_proxy.cli.client import ServerRefused, Unreachable
from polykv_proxy.cli.demo.agents import AgentRun, GroupRun, fan_out
from polykv_proxy.cli.demo.content import BASE, INSTRUCTIONS, TASK_GROUP, WEB_GROUP
from polykv_proxy.cli.demo.report import agents_table, comparison_notes, comparison_table, first_words
from polykv_proxy.cli.demo.stack import Sizes, Stack
from polykv_proxy.engine.problem import EngineProblem
from tests.engine.binaries import chat_model_path
from tests.engine.tiny_models import tiny_model_path
from tests.fake_engine import FakeEngine


def agent(name: str, **changed: Any) -> AgentRun:
    facts: dict[str, Any] = {
        "agent": name,
        "pool": "coding-agent",
        "ttft_ms": 31.4,
        "wall_ms": 800.0,
        "cache_n": 1679,
        "prompt_n": 21,
        "predicted_n": 32,
        "tps": 44.06,
        "text": "I read the task twice, then I look around in the repository",
        "miss_reason": None,
    }
    return AgentRun(**(facts | changed))


@pytest_asyncio.fixture
async def roomy_engine() -> AsyncIterator[FakeEngine]:
    """The toy model has a token per letter, so the demo's prompts are long for it."""
    async with FakeEngine(n_cells=65536) as engine:
        yield engine


def rendered(what: Any) -> list[str]:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get().splitlines()


def test_groups_share_what_the_demo_says_they_share() -> None:
    base, task, web = (group.prefix for group in (BASE, TASK_GROUP, WEB_GROUP))
    assert task[: len(base)] == base
    assert web[0]["content"] != base[0]["content"]
    assert all(message["content"].startswith(INSTRUCTIONS) for message in (base[0], web[0]))
    assert all(len(set(group.questions)) == 4 for group in (BASE, TASK_GROUP, WEB_GROUP))


async def test_agents_measure_what_the_engine_reports(roomy_engine: FakeEngine) -> None:
    heard: list[str] = []
    run = await fan_out(roomy_engine.url, BASE, False, 5, heard.append)
    assert [a.agent for a in run.agents] == [f"coding-agent-{n}" for n in (1, 2, 3, 4)]
    assert {a.predicted_n for a in run.agents} == {5}
    assert all(0 < a.ttft_ms <= a.wall_ms <= run.wall_ms for a in run.agents)
    assert set(heard) == {a.agent for a in run.agents}
    assert run.whole_n == sum(a.cache_n + a.prompt_n + 5 for a in run.agents)
    sent = [json.loads(received.body) for received in roomy_engine.received]
    assert all("pool_id" not in body and body["stream"] for body in sent)


async def test_agents_of_a_pool_name_it_and_themselves(roomy_engine: FakeEngine) -> None:
    await fan_out(roomy_engine.url, WEB_GROUP, True, 2, lambda _: None)
    sent = [json.loads(received.body) for received in roomy_engine.received]
    assert {body["pool_id"] for body in sent} == {"web-agent"}
    assert {body["session_id"] for body in sent} == {f"web-agent-{n}" for n in (1, 2, 3, 4)}


async def test_refused_request_is_one_problem_not_a_group(roomy_engine: FakeEngine) -> None:
    roomy_engine.loading = True
    with pytest.raises(ServerRefused, match="HTTP 503"):
        await fan_out(roomy_engine.url, BASE, False, 2, lambda _: None)


async def test_engine_that_goes_away_is_unreachable() -> None:
    with pytest.raises(Unreachable):
        await fan_out("http://127.0.0.1:1", BASE, False, 2, lambda _: None)


def test_tables_fit_80_columns() -> None:
    run = GroupRun(tuple(agent(f"upload-ticket-{n}", ttft_ms=27_123.0) for n in (1, 2, 3, 4)), 31_000.0)
    lines = rendered(agents_table([run, run]))
    assert len(lines) == 1 + 4 + 1 + 4
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:5] == ["upload-ticket-1", "27,123", "1,679", "21", "44.1"]
    assert max(map(len, rendered(comparison_table(run, run, create_ms=6200.0, used_cells=None)))) <= 80


def test_comparison_counts_making_the_pool() -> None:
    pooled = GroupRun((agent("a"), agent("b")), 1000.0)
    alone = GroupRun((agent("a", cache_n=0, prompt_n=1700), agent("b", cache_n=0, prompt_n=1700)), 14_000.0)
    cells = [line.split() for line in rendered(comparison_table(pooled, alone, create_ms=6000.0, used_cells=1732))]
    assert cells[2][-4:] == ["1,000", "14,000", "14.0", "x"]
    assert cells[3][-4:] == ["7,000", "14,000", "2.0", "x"]
    assert cells[4][-4:] == ["42", "3,400", "81.0", "x"]
    assert cells[5][-4:] == ["1,732", "3,464", "2.0", "x"]


def same_as(names: tuple[str, ...], n_same: int) -> GroupRun:
    """Answers of which so many are those of ``agent(name)``, in another order."""
    others = [agent(name) if number < n_same else agent(name, text="else") for number, name in enumerate(names)]
    return GroupRun(tuple(reversed(others)), 14_000.0)


@pytest.mark.parametrize("n_same", [0, 1, 2])
def test_comparison_says_how_many_answers_are_the_same_and_of_a_plain_server_with_itself(n_same: int) -> None:
    names = ("a", "b", "c")
    alone = GroupRun(tuple(agent(name) for name in names), 1000.0)
    notes = comparison_notes(same_as(names, n_same), alone, same_as(names, 1))
    assert notes[1].startswith("Tokens are compared exactly before they are shared.")
    assert notes[4] == f"The same, word for word: {n_same} of 3 answers with and without pools, 1 of 3"
    assert max(map(len, notes)) <= 80


def test_answers_that_are_all_the_same_need_no_reason() -> None:
    alone = GroupRun((agent("a"), agent("b")), 1000.0)
    notes = comparison_notes(same_as(("a", "b"), 2), alone, same_as(("a", "b"), 1))
    assert notes[1:] == ["All 2 answers are the same on both sides, word for word."]


def test_first_words_stay_on_one_line() -> None:
    assert first_words("One\n\x1b[31m two") == "One [31m two"
    assert first_words("a" * 10 + " " + "b" * 30) == "a" * 10 + " …"
    assert first_words("") == ""


def test_engine_that_does_not_start_is_said_and_nothing_stays(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    with Stack(Path("/bin/false"), model, Sizes()) as stack, pytest.raises(EngineProblem) as caught:
        stack.start(lambda: None)
    assert "ended at start" in caught.value.detail


def demo_command(*args: str) -> list[str]:
    return [sys.executable, "-m", "polykv_proxy.cli", "demo", *args]


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            more = {int(child) for child in children.read_text().split()} - found
            found |= more
            waiting += more
    return found


@pytest.mark.engine
@pytest.mark.parametrize("model", ["tiny", pytest.param("chat", marks=pytest.mark.slow)])
def test_demo_shows_reuse_on_the_real_engine(model: str) -> None:
    """The tiny model has the chat model's vocabulary and template: the same prompts, prefilled in no time."""
    chosen = ("--model", str(tiny_model_path("dense", chat_model_path()))) if model == "tiny" else ()
    done = subprocess.run(
        demo_command("--json", "--no-compare", "--n-predict", "8", *chosen),
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    lengths = [pool["prefix_len"] for pool in facts["pools"]]
    assert lengths[0] > 1500
    assert facts["pools"][1]["branch_pos"] == lengths[0]
    assert 1000 < facts["pools"][2]["branch_pos"] < lengths[0]
    for length, group in zip(lengths, facts["groups"], strict=True):
        assert [a["miss_reason"] for a in group["agents"]] == [None] * 4
        assert all(a["cache_n"] >= length - 1 for a in group["agents"])
    pools = facts["tree"]["pools"]
    own = sum(pool["own_kv_cells"] for pool in pools)
    suffixes = sum(session["suffix_n_tokens"] for pool in pools for session in pool["sessions"])
    assert own + suffixes == facts["tree"]["kv_cells_used"]


@pytest.mark.engine
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to see the children")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_no_process(how: signal.Signals) -> None:
    # Shells start what runs in the background with SIGINT ignored, and so may these tests be.
    at_sigint = signal.SIG_IGN if how == signal.SIGTERM else signal.SIG_DFL
    with subprocess.Popen(
        demo_command(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, at_sigint),  # noqa: PLW1509 - no threads here
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("prefilling"):
                break
        started = descendants(running.pid)
        assert len(started) >= 3  # up, engine, proxy
        running.send_signal(how)
        running.communicate(timeout=90)
    assert running.returncode == 130
    give_up_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
