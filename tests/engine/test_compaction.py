"""Compaction by re-fork on the real engine: four sessions talk on a working pool, which a shorter one replaces while
they go on. Nobody's request fails, every answer is that of a full prefill, cells go down, and each next turn has the
new pool in full: ordered in one call, by the command, or in two steps by hand.
"""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .binaries import binary_path
from .noise import Noise
from .stack import ProxyStack
from .test_parked_sessions import CLEAR_NATS, EXACT
from .tiny_models import tiny_model_path

pytestmark = pytest.mark.engine

TRUNK_LEN, WORK_LEN, SHORT_LEN, SUFFIX_LEN = 300, 700, 360, 60
N_ANSWER, N_SESSIONS = 8, 4
ROUNDING_NATS = 0.3
"""Of a quantised model, whose products are rounded otherwise in batches of another size."""
GREEDY = {"temperature": 0, "ignore_eos": True, "n_predict": N_ANSWER, "return_tokens": True}


@pytest.fixture(scope="module", params=["dense", pytest.param("chat", marks=pytest.mark.slow)])
def stack(
    request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyStack]:
    """What is said on the old pool once it is gone does not become a pool again, and nobody leaves the cache."""
    dir_ = tmp_path_factory.mktemp("compaction")
    model = chat_model if request.param == "chat" else tiny_model_path("dense", chat_model)
    settings = dir_ / "polykv.toml"
    settings.write_text("auto_pool_min_tokens = 0\nwarm_after_s = 0\n")
    with ProxyStack(
        binary_path("patched"),
        model,
        *EXACT,
        "--no-cache-idle-slots",
        log_dir=dir_,
        up_args=("--config", str(settings)),
    ) as stack:
        yield stack


def post(stack: ProxyStack, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{stack.url}{path}", json=body, timeout=120, trust_env=False)
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


def turn(stack: ProxyStack, prompt: list[int], session: str, **fields: Any) -> dict[str, Any]:
    return post(stack, "/completion", prompt=prompt, session_id=session, **GREEDY, **fields)


def shown(stack: ProxyStack) -> dict[str, Any]:
    answer: dict[str, Any] = stack.http.get("/polykv/pools").raise_for_status().json()
    return answer


def settled_cells(stack: ProxyStack) -> int:
    """Used cells once nothing runs and the books agree."""
    for _ in range(200):
        view = shown(stack)
        own = sum(
            pool["own_kv_bytes"] + sum(s["marginal_kv_bytes"] for s in pool["sessions"]) for pool in view["pools"]
        )
        own += view["unpooled"]["kv_bytes"] + sum(pool["own_kv_bytes"] for pool in view["released"])
        n_bytes = httpx.get(f"{stack.engine_url}/polykv/engine/stats", timeout=60).json()["kv_bytes_per_token"]
        if own == view["kv_cells_used"] * n_bytes:
            n: int = view["kv_cells_used"]
            return n
        time.sleep(0.1)
    raise AssertionError(f"the books do not agree: {own} of {view['kv_cells_used']} cells of {n_bytes} bytes")


class Crowd:
    """Sessions that take turns without a pause, and what went wrong for them."""

    def __init__(self, stack: ProxyStack, prompts: dict[str, list[int]]) -> None:
        self._stack, self._left = stack, threading.Event()
        self.n_turns: dict[str, int] = dict.fromkeys(prompts, 0)
        self.said: list[tuple[list[int], list[int]]] = []
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._talk, args=item) for item in prompts.items()]
        for thread in self._threads:
            thread.start()

    def _talk(self, session: str, prompt: list[int]) -> None:
        while not self._left.is_set():
            try:
                told = turn(self._stack, prompt, session)
                self.said.append((prompt, told["tokens"]))
                prompt = [*prompt, *told["tokens"]]
                self.n_turns[session] += 1
            except Exception as error:
                self.errors.append(repr(error))
                return

    def wait_for_turns(self, n: int) -> None:
        for _ in range(1200):
            if self.errors or min(self.n_turns.values()) >= n:
                return
            time.sleep(0.05)
        raise AssertionError(f"too few turns: {self.n_turns}")

    def leave(self) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join(120)


def assert_right(stack: ProxyStack, prompt: list[int], tokens: list[int]) -> None:
    """These are the tokens of a full prefill; or where they first differ two were as good as equally likely."""
    alone = turn(stack, prompt, "alone", cache_prompt=False, n_probs=2)
    assert alone["timings"]["cache_n"] == 0
    if tokens != alone["tokens"]:
        at = next(i for i, (one, other) in enumerate(zip(tokens, alone["tokens"], strict=True)) if one != other)
        first, second = (top["logprob"] for top in alone["completion_probabilities"][at]["top_logprobs"])
        is_exact = "dense" in stack.http.get("/props").json()["model_path"]
        nats = CLEAR_NATS if is_exact else ROUNDING_NATS
        assert first - second < nats, f"token {at} of {tokens} is not that of {alone['tokens']}"


def in_one_call(stack: ProxyStack, short: list[int], _: Path) -> dict[str, Any]:
    return post(stack, "/polykv/pools/work/compact", ancestor="trunk", tokens=short)


def by_command(stack: ProxyStack, short: list[int], dir_: Path) -> dict[str, Any]:
    file = dir_ / "short.json"
    file.write_text(json.dumps(short))
    command = [
        sys.executable,
        "-m",
        "polykv_proxy.cli",
        "compact",
        "work",
        "--ancestor",
        "trunk",
        "--tokens",
        str(file),
    ]
    done = subprocess.run([*command, "--url", stack.url, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("order", [in_one_call, pytest.param(by_command, marks=pytest.mark.slow)])
def test_four_sessions_go_on_behind_a_shorter_pool(
    stack: ProxyStack, noise: Noise, tmp_path: Path, order: Callable[[ProxyStack, list[int], Path], dict[str, Any]]
) -> None:
    trunk = noise(1, TRUNK_LEN)
    work = trunk + noise(2, WORK_LEN - TRUNK_LEN)
    short = trunk + noise(3, SHORT_LEN - TRUNK_LEN)
    root = post(stack, "/polykv/pools", tokens=trunk, name="trunk")
    old = post(stack, "/polykv/pools/trunk/fork", tokens=work, name="work", pin=True)
    talks = {f"{order.__name__}-{i}": work + noise(10 + i, SUFFIX_LEN) for i in range(N_SESSIONS)}
    for session, prompt in talks.items():
        assert turn(stack, prompt, session)["polykv"]["pool_id"] == old["pool_id"]
    before = settled_cells(stack)
    n_old = next(pool["own_n_tokens"] for pool in shown(stack)["pools"] if pool["pool_id"] == old["pool_id"])

    crowd = Crowd(stack, talks)
    crowd.wait_for_turns(1)
    answer = order(stack, short, tmp_path)
    crowd.wait_for_turns(1 + max(crowd.n_turns.values()))
    crowd.leave()
    assert crowd.errors == [], "no request fails meanwhile"
    assert {session["session_id"] for session in answer["moved"]} == set(talks)
    assert (answer["name"], answer["pinned"], answer["released"]) == ("work", True, [old["pool_id"]])
    assert (answer["prefix_len"], answer["branch_pos"]) == (SHORT_LEN, TRUNK_LEN)

    # What they say next begins with the short pool.
    for i, session in enumerate(talks):
        told = turn(stack, short + noise(20 + i, 20), session)
        receipt, timings = told["polykv"], told["timings"]
        assert (receipt["pool_id"], receipt["miss_reason"]) == (answer["pool_id"], None)
        assert (timings["cache_n"], timings["prompt_n"]) == (SHORT_LEN, 20)
        crowd.said.append((short + noise(20 + i, 20), told["tokens"]))
    after = settled_cells(stack)
    assert after <= before - n_old
    assert after == SHORT_LEN + N_SESSIONS * (20 + N_ANSWER - 1)
    names = {pool["name"]: pool["pinned"] for pool in shown(stack)["pools"] if not pool["auto"]}
    assert names == {"trunk": False, "work": True}

    # As right as without any pool, also what was said meanwhile.
    for prompt, tokens in random.Random(1).sample(crowd.said, min(24, len(crowd.said))):
        assert_right(stack, prompt, tokens)
    stack.http.delete(f"/polykv/pools/{root['pool_id']}?recursive=true").raise_for_status()


def test_the_two_steps_by_hand(stack: ProxyStack, noise: Noise) -> None:
    """Fork the ancestor, name the new pool from the next turn on, release the old one when the last has moved."""
    trunk = noise(1, TRUNK_LEN)
    work = trunk + noise(2, WORK_LEN - TRUNK_LEN)
    short = trunk + noise(3, SHORT_LEN - TRUNK_LEN)
    root = post(stack, "/polykv/pools", tokens=trunk, name="trunk")
    old = post(stack, "/polykv/pools/trunk/fork", tokens=work, name="work")
    talks = {f"by-hand-{i}": work + noise(10 + i, SUFFIX_LEN) for i in range(N_SESSIONS)}
    for session, prompt in talks.items():
        assert turn(stack, prompt, session, pool_id="work")["polykv"]["pool_id"] == old["pool_id"]
    before = settled_cells(stack)

    new = post(stack, "/polykv/pools/trunk/fork", tokens=short, name="short")
    said = []
    for i, session in enumerate(talks):
        prompt = short + noise(20 + i, 20)
        told = turn(stack, prompt, session, pool_id="short")
        assert (told["polykv"]["pool_id"], told["timings"]["cache_n"]) == (new["pool_id"], SHORT_LEN)
        assert stack.http.get(f"/polykv/sessions/{session}").json()["pool_id"] == new["pool_id"]
        said.append((prompt, told["tokens"]))
    freed = stack.http.delete("/polykv/pools/work").raise_for_status().json()
    assert freed["freed_now"]["kv_cells"] == WORK_LEN - TRUNK_LEN
    after = settled_cells(stack)
    assert after <= before - (WORK_LEN - TRUNK_LEN)
    assert after == SHORT_LEN + N_SESSIONS * (20 + N_ANSWER - 1)
    for prompt, tokens in said:
        assert_right(stack, prompt, tokens)
    stack.http.delete(f"/polykv/pools/{root['pool_id']}?recursive=true").raise_for_status()
