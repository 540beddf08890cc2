"""Twelve sessions on four slots: every later turn prefills only what is new, and answers as after a full prefill.

Through the proxy, on tiny models in f32. Prompts of completions are tokens, so that the next turn's are exactly those
of the last one, its answer's and some new ones; an answer's last token was never decoded, so it counts as new. The text
of a chat's answer is tokenized anew, so there only the last prompt is certain to be the same; the last token of that
may become one with the answer's first, and a state that cannot be cut goes back to its checkpoint, four tokens before.

With a sliding window (and `--swa-full`) other requests may overwrite cells of a slot at rest that are out of its
window, parked or not. What they overwrote is not saved but prefilled again: there only the answers are compared.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import loopback
from .binaries import binary_path
from .noise import Noise
from .stack import ProxyStack
from .tiny_models import tiny_model_path

pytestmark = pytest.mark.engine

N_SESSIONS, N_TURNS, N_ANSWER = 12, 3, 8
N_LAST = 4
"""So many of a prompt's last tokens may be prefilled again."""
POOL_LEN = 200
WAYS = [
    ("alone", "completion", "whole"),
    ("alone", "chat", "stream"),
    ("pool", "completion", "stream"),
    ("pool", "chat", "whole"),
]
FAST = WAYS[1:3]
"""Both kinds of prompt, with and without a pool."""
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
EXACT = ("-t", "1", "--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
"""Flash attention rounds to f16, differently wherever the cells lie: by 0.02 nats on these models, parked or not."""
CLEAR_NATS = 1e-4
"""Where the two most likely tokens are nearer than this, sums in another order may swap them."""


@pytest.fixture(scope="module", params=["dense", "sliding", "hybrid"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def stack(model: str, chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyStack]:
    dir_ = tmp_path_factory.mktemp("parked")
    flags = ("--swa-full",) if model == "sliding" else ()
    with ProxyStack(binary_path("patched"), tiny_model_path(model, chat_model), *EXACT, *flags, log_dir=dir_) as stack:
        yield stack


@dataclass
class Talk:
    """One session. ``turns``: prompt and answer of each, in tokens. ``n_known``: so many of the next prompt are."""

    stack: ProxyStack
    name: str
    noise: Noise
    seed: int
    trunk: list[int]
    system: str = ""
    chat: bool = False
    stream: bool = False
    prompt: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    n_known: int = 0

    def say(self, n_turn: int) -> dict[str, Any]:
        """Have one turn. Gives the engine's own record of it."""
        if self.chat:
            return self._chat(n_turn)
        self.prompt = (self.prompt or list(self.trunk)) + self.noise(self.seed + n_turn, 60)
        body = {"prompt": self.prompt, "n_predict": N_ANSWER, "return_tokens": True, **GREEDY}
        pieces = self._post("/completion", body)
        tokens = [token for piece in pieces for token in piece["tokens"]]
        # A stream that keeps half a character back does not tell its tokens either.
        told_all = len(tokens) == N_ANSWER
        self.n_known = len(self.prompt) + N_ANSWER - 1 if told_all else len(self.prompt) - N_LAST
        if told_all:
            self.turns.append((self.prompt, tokens))
        self.prompt = self.prompt + tokens
        return self._task()

    def _chat(self, n_turn: int) -> dict[str, Any]:
        self.messages = self.messages or [{"role": "system", "content": self.system}]
        self.messages = [*self.messages, {"role": "user", "content": self.noise.text(self.seed + n_turn, 60)}]
        pieces = self._post("/v1/chat/completions", {"messages": self.messages, "max_tokens": N_ANSWER, **GREEDY})
        parts = [c.get("delta") or c.get("message") or {} for piece in pieces for c in piece["choices"]]
        text = "".join(part.get("content") or "" for part in parts)
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        task = self._task()
        self.n_known = task["n_prompt"] - N_LAST
        return task

    def _post(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self.stack.http.post(path, json=body | {"session_id": self.name, "stream": self.stream})
        assert answer.status_code == 200, answer.text
        if not self.stream:
            return [answer.json()]
        lines = answer.text.splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    def _task(self) -> dict[str, Any]:
        stats: dict[str, Any] = loopback.get(f"{self.stack.engine_url}/polykv/engine/stats", timeout=60).json()
        task: dict[str, Any] = stats["finished"][-1]
        return task


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id="-".join(way), marks=[] if way in FAST else [pytest.mark.slow]) for way in WAYS],
)
def test_no_turn_of_twelve_sessions_is_prefilled_twice(
    stack: ProxyStack, model: str, noise: Noise, way: tuple[str, str, str]
) -> None:
    pooled, chat, stream = way[0] == "pool", way[1] == "chat", way[2] == "stream"
    seed = 10**6 * (1 + WAYS.index(way))
    trunk, system = noise(seed, POOL_LEN), noise.text(seed, POOL_LEN)
    source = {"messages": [{"role": "system", "content": system}]} if chat else {"tokens": trunk}
    pool = stack.http.post("/polykv/pools", json=source).raise_for_status().json() if pooled else None
    talks = [
        Talk(stack, f"{'-'.join(way)}-{i}", noise, seed + 10 * i + 1, trunk, system, chat=chat, stream=stream)
        for i in range(N_SESSIONS)
    ]
    for n_turn in range(N_TURNS):
        for talk in talks:
            n_known = talk.n_known
            task = talk.say(n_turn)
            assert task["n_decoded"] == N_ANSWER
            if model != "sliding":
                assert task["n_cached"] >= n_known, (talk.name, n_turn, task)
                assert task["n_pool"] == (pool["prefix_len"] if pool is not None else 0)
    for talk in talks:
        if talk.turns:
            assert_answer_of_a_full_prefill(stack, *talk.turns[-1])
    if pool is not None:
        stack.http.delete(f"/polykv/pools/{pool['pool_id']}").raise_for_status()


def assert_answer_of_a_full_prefill(stack: ProxyStack, prompt: list[int], tokens: list[int]) -> None:
    body = {"prompt": prompt, "n_predict": N_ANSWER, "return_tokens": True, "n_probs": 2, "cache_prompt": False}
    full = loopback.post(f"{stack.engine_url}/completion", json=body | GREEDY, timeout=120).raise_for_status().json()
    assert full["timings"]["cache_n"] == 0
    if full["tokens"] != tokens:
        apart = next(i for i, pair in enumerate(zip(full["tokens"], tokens, strict=True)) if pair[0] != pair[1])
        first, second = (top["logprob"] for top in full["completion_probabilities"][apart]["top_logprobs"])
        assert first - second < CLEAR_NATS, (apart, full["tokens"], tokens)


def test_parked_sessions_outlive_a_killed_engine(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    config = tmp_path / "proxy.toml"
    config.write_text("warm_disk_bytes = 100000000\nwarm_after_s = 0.5\n")
    model, up_args = (
        tiny_model_path("dense", chat_model),
        ("--config", str(config), "--state", str(tmp_path / "pools.db")),
    )
    with ProxyStack(binary_path("patched"), model, *EXACT, log_dir=tmp_path, up_args=up_args) as stack:
        pool = stack.http.post("/polykv/pools", json={"tokens": noise(1, POOL_LEN)}).raise_for_status().json()
        talks = [Talk(stack, f"s{i}", noise, 1000 * i + 100, noise(1, POOL_LEN)) for i in range(6)]
        for n_turn in range(2):
            for talk in talks:
                talk.say(n_turn)
        wait_until(lambda: n_on_disk(stack, "session-") == len(talks) and not held_by_slots(stack))
        epoch = engine(stack, "stats")["epoch"]
        os.kill(stack.engine_pid, signal.SIGKILL)
        wait_until(lambda: stack.http.get("/polykv/health").json()["engine"]["epoch"] not in (None, epoch))
        for talk in talks:
            n_known = talk.n_known
            task = talk.say(2)
            assert task["n_cached"] == n_known
            assert task["n_pool"] == pool["prefix_len"]
            assert_answer_of_a_full_prefill(stack, *talk.turns[-1])


def engine(stack: ProxyStack, what: str) -> dict[str, Any]:
    answer: dict[str, Any] = loopback.get(f"{stack.engine_url}/polykv/engine/{what}", timeout=60).json()
    return answer


def n_on_disk(stack: ProxyStack, begin: str) -> int:
    saved = engine(stack, "pools")["saved"]
    return len([state for state in saved if state["tag"].startswith(begin) and state["in"] == "disk"])


def held_by_slots(stack: ProxyStack) -> int:
    return sum(slot["n_tokens"] for slot in engine(stack, "stats")["slots"])


def wait_until(is_so: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if is_so():
                return
        except httpx.TransportError:
            pass  # the engine is being started
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.1)
