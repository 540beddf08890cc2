"""Agents that begin alike, at once, in front of an engine that has seen nothing: what they share is prefilled once.

Through the proxy, on tiny models in f32, by requests that name no pool. The engine's own count of prompt tokens tells
what was prefilled; answers are compared with those that a stock build gives to each prompt alone.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import loopback
from .binaries import binary_path
from .harness import EngineServer
from .noise import Noise
from .stack import ProxyStack
from .test_parked_sessions import EXACT, GREEDY, N_LAST, N_SESSIONS, N_TURNS
from .tiny_models import tiny_model_path

pytestmark = pytest.mark.engine

N_PREFIX, N_SUFFIX, N_ANSWER = 600, 12, 10
N_LONG = 2400
"""Of a prefix that takes the tiny model seconds."""
BATCH = 64
N_TEMPLATE = 8
"""At most so many tokens all chats begin with."""
PATHS = ("/completion", "/v1/chat/completions", "/v1/messages")
FAST = [(4, True), ("/completion", 2, False), ("/v1/chat/completions", 8, False), ("/v1/messages", 8, False)]
SIZES = ("-b", f"{BATCH}", "-c", "16384", "--parallel", "4", "--kv-unified", "--no-cache-idle-slots")


@dataclass
class Stand:
    """The proxy with its engine, a stock server beside them, and one HTTP client for all."""

    proxy: ProxyStack
    alone: EngineServer
    noise: Noise
    n_seeds: int = field(default=0)

    def seed(self) -> int:
        """Of words that nobody has seen."""
        self.n_seeds += 1000
        return self.n_seeds

    def engine(self, what: str) -> dict[str, Any]:
        answer: dict[str, Any] = loopback.get(f"{self.proxy.engine_url}/polykv/engine/{what}", timeout=60).json()
        return answer

    def n_processed(self) -> int:
        n: int = self.engine("stats")["n_prompt_cum"]
        return n

    def n_tokens(self, path: str, body: dict[str, Any]) -> list[int]:
        asked = {"path": path, "body": body}
        answer = loopback.post(f"{self.proxy.engine_url}/polykv/engine/render", json=asked, timeout=60)
        tokens: list[int] = answer.raise_for_status().json()["tokens"]
        return tokens

    def auto_pools(self) -> list[dict[str, Any]]:
        pools = self.proxy.http.get("/polykv/pools").raise_for_status().json()["pools"]
        return [pool for pool in pools if pool["auto"]]

    def forget_pools(self) -> None:
        for pool in sorted(self.auto_pools(), key=lambda pool: -int(pool["prefix_len"])):
            self.proxy.http.delete(f"/polykv/pools/{pool['pool_id']}").raise_for_status()

    def bodies(self, path: str, k: int, n_prefix: int = N_PREFIX, **fields: Any) -> list[dict[str, Any]]:
        """``k`` requests that begin with the same new words and end with their own."""
        seed = self.seed()
        return [body_of(path, self.noise, seed, seed + 1 + i, n_prefix) | fields for i in range(k)]

    def due(self, path: str, bodies: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Tokens that the prompts share at their beginning, and these once and the rest of each."""
        prompts = [self.n_tokens(path, body) for body in bodies]
        n_shared = n_common(prompts)
        return n_shared, n_shared + sum(len(prompt) - n_shared for prompt in prompts)

    def answers_alone(self, path: str, bodies: Sequence[dict[str, Any]], *, cached: bool = False) -> list[Any]:
        """By full prefills, or ``cached``: as llama-server itself goes on with what its slot has."""
        whole = [body | {"stream": False, "cache_prompt": cached, "id_slot": 0} for body in bodies]
        return [said(path, self.alone.http.post(path, json=body).raise_for_status()) for body in whole]


def n_common(prompts: Sequence[list[int]]) -> int:
    return next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len({*tokens}) > 1)


def body_of(path: str, noise: Noise, seed: int, own_seed: int, n_prefix: int) -> dict[str, Any]:
    if path == "/completion":
        prompt = noise(seed, n_prefix) + noise(own_seed, N_SUFFIX)
        return {"prompt": prompt, "n_predict": N_ANSWER, "return_tokens": True, **GREEDY}
    system, question = noise.text(seed, n_prefix), noise.text(own_seed, N_SUFFIX)
    turn = {"role": "user", "content": question}
    if path == "/v1/messages":
        return {"system": system, "messages": [turn], "max_tokens": N_ANSWER, **GREEDY}
    return {"messages": [{"role": "system", "content": system}, turn], "max_tokens": N_ANSWER, **GREEDY}


def said(path: str, answer: httpx.Response) -> Any:
    """The answer itself, whole or streamed: a text."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    pieces = [json.loads(line) for line in lines] or [answer.json()]
    parts: list[str] = []
    for piece in pieces:
        if path == "/completion":
            parts.append(piece["content"])
        elif path == "/v1/messages":
            parts += [block.get("text") or "" for block in piece.get("content", [])]
            parts.append(piece.get("delta", {}).get("text") or "")
        else:
            told = [choice.get("delta") or choice.get("message") or {} for choice in piece["choices"]]
            parts += [one.get("content") or "" for one in told]
    return "".join(parts)


@pytest.fixture(scope="module")
def stand(chat_model: Path, tmp_path_factory: pytest.TempPathFactory, noise: Noise) -> Iterator[Stand]:
    yield from stand_of("dense", chat_model, tmp_path_factory.mktemp("cold"), noise)


@pytest.fixture(autouse=True)
def no_pools(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "stand" in request.fixturenames:
        stand: Stand = request.getfixturevalue("stand")
        stand.forget_pools()


def stand_of(name: str, chat_model: Path, dir_: Path, noise: Noise, *flags: str, more: Any = ()) -> Iterator[Stand]:
    """``more``: flags of the proxied engine alone."""
    model = tiny_model_path(name, chat_model)
    with (
        EngineServer(binary_path("stock"), model, *EXACT, *SIZES, *flags, log_dir=dir_, name="stock") as alone,
        ProxyStack(binary_path("patched"), model, *EXACT, "-b", f"{BATCH}", *flags, *more, log_dir=dir_) as proxy,
    ):
        yield Stand(proxy, alone, noise)


def at_once(stand: Stand, path: str, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    async def together() -> list[httpx.Response]:
        async with client(stand) as http:
            return await asyncio.gather(*(http.post(path, json=body) for body in bodies))

    return asyncio.run(together())


def client(stand: Stand) -> httpx.AsyncClient:
    headers = {"connection": "close"}
    return httpx.AsyncClient(base_url=stand.proxy.url, timeout=300, verify=False, trust_env=False, headers=headers)


@pytest.mark.parametrize(
    ("path", "k", "stream"),
    [
        pytest.param(
            *way, id="-".join(map(str, way)), marks=[] if way[1:] in FAST or way in FAST else [pytest.mark.slow]
        )
        for way in product(PATHS, (2, 4, 8), (False, True))
    ],
)
def test_what_all_begin_with_is_prefilled_once(stand: Stand, path: str, k: int, stream: bool) -> None:
    bodies = stand.bodies(path, k, stream=stream)
    n_shared, n_due = stand.due(path, bodies)
    assert n_shared >= N_PREFIX
    before = stand.n_processed()
    answers = at_once(stand, path, bodies)
    assert [answer.status_code for answer in answers] == [200] * k
    cached = sorted(task["n_cached"] for task in stand.engine("stats")["finished"][-k:])
    # A slot that is used again still has the template's first tokens.
    assert cached[0] <= N_TEMPLATE
    assert cached[1:] == [n_shared] * (k - 1)
    assert stand.n_processed() - before == n_due - cached[0]
    assert [said(path, answer) for answer in answers] == stand.answers_alone(path, bodies)
    assert [pool["prefix_len"] for pool in stand.auto_pools()] == [n_shared]


# Somebody leaves -----------------------------------------------------------------------------------------------------


async def until(is_so: Callable[[], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110 -- the facts are another process's
            await asyncio.sleep(0.01)


class Crowd:
    """One request that is in the middle of its prefill, and others behind it that wait for what it prefills."""

    def __init__(self, stand: Stand, bodies: Sequence[dict[str, Any]]) -> None:
        self.stand, self.bodies = stand, bodies

    async def play(self, act: Callable[["Crowd"], None]) -> list[httpx.Response]:
        """Gives the answers of those that ``act`` left alone."""
        async with client(self.stand) as http:
            self.first = asyncio.create_task(http.post("/completion", json=self.bodies[0]))
            await until(lambda: self.n_first() >= 2 * BATCH)
            self.others = [asyncio.create_task(http.post("/completion", json=body)) for body in self.bodies[1:]]
            await until(lambda: self.n_waiting() == len(self.others))
            assert self.n_first() < N_LONG, "it is still at it"
            act(self)
            tasks = [self.first, *self.others]
            done = await asyncio.gather(*tasks, return_exceptions=True)
        for task, one in zip(tasks, done, strict=True):
            if isinstance(one, BaseException) and not task.cancelled():
                raise one
        return [one for one in done if isinstance(one, httpx.Response)]

    def n_first(self) -> int:
        slots = self.stand.engine("stats")["slots"]
        return max((slot["n_tokens"] for slot in slots if slot["state"] != "idle"), default=0)

    def n_waiting(self) -> int:
        sessions = self.stand.proxy.http.get("/polykv/sessions").raise_for_status().json()["sessions"]
        return sum(session["state"] == "waiting" for session in sessions)


@pytest.mark.parametrize("named", [False, True], ids=["whole", "named-stream"])
def test_a_first_one_that_leaves_in_its_prefill_hands_over_what_is_prefilled(stand: Stand, named: bool) -> None:
    bodies = stand.bodies("/completion", 4, N_LONG, stream=named)
    if named:
        bodies = [body | {"session_id": f"agent-{i}"} for i, body in enumerate(bodies)]
    before = stand.n_processed()

    def leave(crowd: Crowd) -> None:
        crowd.first.cancel()

    answers = asyncio.run(Crowd(stand, bodies).play(leave))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [said("/completion", answer) for answer in answers] == stand.answers_alone(
        "/completion", bodies[1:], cached=True
    )
    _, n_due = stand.due("/completion", bodies[1:])
    assert stand.n_processed() - before <= n_due + BATCH


def test_who_leaves_while_it_waits_costs_nothing(stand: Stand) -> None:
    bodies = stand.bodies("/completion", 4, N_LONG)
    before = stand.n_processed()

    def leave(crowd: Crowd) -> None:
        crowd.others[0].cancel()
        crowd.others[1].cancel()

    answers = asyncio.run(Crowd(stand, bodies).play(leave))
    kept = [bodies[0], bodies[3]]
    assert [said("/completion", answer) for answer in answers] == stand.answers_alone("/completion", kept, cached=True)
    assert stand.n_processed() - before == stand.due("/completion", kept)[1]


@pytest.mark.parametrize("k", [2, 4])
def test_a_first_one_that_the_engine_refuses_takes_nobody_along(stand: Stand, k: int) -> None:
    bodies = stand.bodies("/completion", k + 1)
    bodies[0]["grammar"] = "root ::= ("
    before = stand.n_processed()
    refused, *answers = at_once(stand, "/completion", bodies)
    assert refused.status_code == 400
    assert [said("/completion", answer) for answer in answers] == stand.answers_alone("/completion", bodies[1:])
    assert stand.n_processed() - before == stand.due("/completion", bodies[1:])[1]


# One after the other -------------------------------------------------------------------------------------------------


def test_twelve_agents_that_name_nothing_prefill_only_what_is_new(stand: Stand) -> None:
    """In turn on four slots, chats that grow. The text of an answer is tokenized anew, so the last tokens of a prompt
    and its answer count as new."""
    seed = stand.seed()
    system = {"role": "system", "content": stand.noise.text(seed, N_PREFIX)}
    talks: list[list[dict[str, str]]] = [[system] for _ in range(N_SESSIONS)]
    known = [0] * N_SESSIONS
    for n_turn in range(N_TURNS):
        for number, talk in enumerate(talks):
            talk.append({"role": "user", "content": stand.noise.text(seed + 1 + 100 * n_turn + number, 40)})
            body = {"messages": talk, "max_tokens": N_ANSWER, **GREEDY}
            answer = stand.proxy.http.post(PATHS[1], json=body).raise_for_status()
            task = stand.engine("stats")["finished"][-1]
            assert task["n_cached"] >= known[number], (n_turn, number, task)
            known[number] = task["n_prompt"] - N_LAST
            if n_turn == 0 and number:
                assert task["n_cached"] >= N_PREFIX
            text = said(PATHS[1], answer)
            if n_turn == N_TURNS - 1:
                assert [text] == stand.answers_alone(PATHS[1], [body])
            talk.append({"role": "assistant", "content": text})


# Other memories ------------------------------------------------------------------------------------------------------


MEMORIES = {"hybrid": (), "recurrent": (), "sliding": (), "sliding-full": ("--swa-full",)}


@pytest.mark.parametrize(
    ("memory", "path"),
    [
        pytest.param(memory, path, marks=[] if path == PATHS[0] and memory != "recurrent" else [pytest.mark.slow])
        for memory, path in product(MEMORIES, PATHS[:2])
    ],
)
def test_other_memories_answer_as_alone(memory: str, path: str, chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """What has one state instead of cells cannot be shared in a slot's middle: a pool is prefilled for the others, from
    the last state on that the engine kept in the slot of the first one. A window without `--swa-full` cannot be shared
    at all.
    """
    for stand in stand_of(memory.removesuffix("-full"), chat_model, tmp_path, noise, *MEMORIES[memory]):
        bodies = stand.bodies(path, 4)
        n_shared, n_due = stand.due(path, bodies)
        answers = at_once(stand, path, bodies)
        n_again = stand.n_processed() - n_due
        assert [said(path, answer) for answer in answers] == stand.answers_alone(path, bodies)
        if memory == "sliding":
            assert n_again == 3 * n_shared
        elif memory == "sliding-full":
            assert n_again == 0
        else:
            assert 0 < n_again < BATCH
        assert [pool["prefix_len"] for pool in stand.auto_pools()] == ([] if memory == "sliding" else [n_shared])
