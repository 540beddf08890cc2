"""kill -9 of proxy or engine at any moment, under load: the same tree, ids and names, right answers, no ghosts."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import xxhash

from . import loopback
from .conftest import POOLS, Launcher
from .hooks import Answer, Engine
from .noise import Noise
from .restarts import GREEDY, Crowd, Json, Manager, ProxyProcess, Question, Reader, kill_engine, wait_until_nothing

pytestmark = pytest.mark.engine

STABLE = ("stable-root", "stable-branch", "stable-deep")
CLEAR_NATS = 0.05
"""Requests share batches here, which changes sums a little: only answers without a near tie are asked for."""


@pytest.fixture
def engine(launch: Launcher) -> Engine:
    return launch("patched", "dense", "-c", "8192", "--parallel", "4", "--kv-unified", *POOLS, "--no-cache-idle-slots")


@pytest.fixture
def proxy(engine: Engine, tmp_path: Path) -> Iterator[ProxyProcess]:
    with ExitStack() as stack:
        proxy = ProxyProcess(engine.server.url, tmp_path / "state" / "pools.db", tmp_path / "proxy.log")
        stack.callback(proxy.kill)
        proxy.start()
        yield proxy


def stable_tokens(noise: Noise) -> dict[str, list[int]]:
    root = noise(1, 300)
    branch = root[:200] + noise(2, 100)
    return dict(zip(STABLE, (root, branch, branch + noise(3, 60)), strict=True))


def ask_unpooled(engine: Engine, noise: Noise) -> list[Question]:
    """Questions behind each pool whose greedy answer is clear, answered by the engine alone after a full prefill."""
    questions = []
    for name, tokens in stable_tokens(noise).items():
        clear = 0
        for seed in range(200, 260):
            prompt = tokens + noise(seed, 12)
            done = engine.full(prompt, GREEDY["n_predict"], probs=2)
            if is_clear(done):
                clear += 1
                questions.append(Question(name, prompt, done.tokens, done.body["content"]))
            if clear == 3:
                break
        assert clear == 3
    return questions


def is_clear(answer: Answer) -> bool:
    """Whether no other token was nearly as likely; not so either where the engine does not say (half a character)."""
    if len(answer.at) < len(answer.tokens):
        return False
    tops = [sorted(at.values(), reverse=True) for at in answer.at]
    return all(first - second > CLEAR_NATS for first, second, *_ in tops)


def make_stable(http: httpx.Client, noise: Noise) -> dict[str, Json]:
    tokens = stable_tokens(noise)
    root, branch, deep = STABLE
    orders: tuple[tuple[str, Json], ...] = (
        ("/polykv/pools", {"tokens": tokens[root], "name": root, "pin": True}),
        (f"/polykv/pools/{root}/fork", {"tokens": tokens[branch], "name": branch}),
        (f"/polykv/pools/{branch}/fork", {"tokens": tokens[deep], "name": deep}),
    )
    return {body["name"]: http.post(path, json=body).raise_for_status().json() for path, body in orders}


@pytest.mark.parametrize(
    ("n_rounds", "seed"),
    [pytest.param(4, 1, id="short"), pytest.param(20, None, id="long", marks=pytest.mark.slow)],
)
def test_killed_at_any_moment_nothing_is_lost_and_nothing_wrong(
    engine: Engine, proxy: ProxyProcess, noise: Noise, n_rounds: int, seed: int | None
) -> None:
    seed = int(os.environ.get("POLYKV_TEST_SEED", seed if seed is not None else time.time_ns() % 10**6))
    print(f"POLYKV_TEST_SEED={seed}")
    rng = random.Random(seed)
    questions = ask_unpooled(engine, noise)
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=proxy.url, timeout=60, trust_env=False))
        stable = make_stable(http, noise)
        managers = [Manager(f"m{i}", proxy.url, random.Random(rng.random()), noise) for i in range(2)]
        readers = [Reader(f"r{i}", random.Random(rng.random()), questions) for i in range(3)]
        crowd = Crowd(proxy.url, [*managers, *readers])
        stack.callback(crowd.end)
        for number in range(n_rounds):
            victims = [rng.choice(["proxy", "engine"])] if rng.random() < 0.85 else ["engine", "proxy"]
            for reader in readers:
                reader.proxy_lives = "proxy" not in victims
            crowd.go()
            time.sleep(rng.uniform(0.2, 1.5))
            print(f"round {number}: kill -9 of {' and '.join(victims)}")
            for victim in victims:
                proxy.kill() if victim == "proxy" else kill_engine(engine.server)
            time.sleep(rng.uniform(0, 0.3))
            for victim in rng.sample(victims, len(victims)):
                proxy.start() if victim == "proxy" else engine.server.start()
            wait_until_nothing(lambda: ill(proxy.url))
            time.sleep(rng.uniform(0, 0.5))
            crowd.rest()
            listed, shown = agreed(engine, proxy.url)
            assert {pool["name"]: pool["pool_id"] for pool in shown["pools"] if pool["name"] in STABLE} == {
                name: pool["pool_id"] for name, pool in stable.items()
            }
            for manager in managers:
                manager.reconcile(shown)
            assert len(shown["pools"]) == len(STABLE) + sum(len(manager.held) for manager in managers)
            assert_tokens(listed, shown, managers, stable_tokens(noise))
            assert_no_ghosts(proxy.url, readers, shown)
            answer_right(proxy.url, rng.choice(questions))
        for question in questions:
            answer_right(proxy.url, question)
        for pool in tree(proxy.url)["pools"]:  # sequences for everybody who is asked for
            http.post(f"/polykv/pools/{pool['pool_id']}/unpin").raise_for_status()
        for manager in managers:
            for held in manager.held.values():
                answer_as_unpooled(engine, proxy.url, held.name, [*held.tokens, *noise(77, 5)])
        assert sum(reader.n_pooled for reader in readers) > n_rounds
        assert sum(manager.n_done for manager in managers) > n_rounds
        n_cut = sum(reader.n_cut for reader in readers)
        print(f"{sum(r.n_whole for r in readers)} whole answers, {n_cut} cut streams")


def ill(url: str) -> str | None:
    try:
        answer = loopback.get(f"{url}/polykv/health", timeout=10)
    except httpx.TransportError as e:
        return repr(e)
    return None if answer.status_code == 200 else answer.text


def tree(url: str) -> Json:
    shown: Json = loopback.get(f"{url}/polykv/pools", timeout=60).raise_for_status().json()
    return shown


def agreed(engine: Engine, url: str) -> tuple[list[Json], Json]:
    """What the engine holds and what the tree says, at a moment at which nobody runs, waits or is being brought back.

    Every sequence is a resident pool's, and every resident pool has one.
    """
    found: list[tuple[list[Json], Json]] = []

    def disagree() -> str | None:
        listed = [pool for pool in engine.pools() if pool["state"] != "free"]
        shown, stats = tree(url), engine.stats()
        found[:] = [(listed, shown)]
        states = {slot["state"] for slot in [*stats["slots"], stats["service"]]}
        if states != {"idle"} or stats["n_deferred"] or [p for p in engine.pools() if p["state"] != "free"] != listed:
            return f"somebody runs or waits: {states}, {stats['n_deferred']} deferred"
        held = sorted(pool["seq"] for pool in listed)
        # A pool without a sequence of its own is shown with that of who holds its cells.
        resident = sorted({pool["seq_id"] for pool in shown["pools"] if pool["seq_id"] is not None})
        if held == resident and len(held) == shown["seq_ids_used"]:
            return None
        return f"the engine holds {held}, the tree says {resident} and {shown['seq_ids_used']} of them"

    wait_until_nothing(disagree)
    return found[0]


def assert_tokens(listed: list[Json], shown: Json, managers: list[Manager], stable: dict[str, list[int]]) -> None:
    """What the engine holds for a pool is what its maker asked for; others in its sequence start it."""
    made = {pool.name: list(pool.tokens) for manager in managers for pool in manager.held.values()} | stable
    for held in listed:
        pools = [made[pool["name"]] for pool in shown["pools"] if pool["seq_id"] == held["seq"]]
        longest = max(pools, key=len)
        raw = b"".join(token.to_bytes(4, "little") for token in longest)
        assert (held["n_tokens"], held["tokens_hash"]) == (len(longest), xxhash.xxh64_hexdigest(raw, seed=0))
        assert all(longest[: len(tokens)] == tokens for tokens in pools)


def assert_no_ghosts(url: str, readers: list[Reader], shown: Json) -> None:
    """Sessions are those that asked; none runs, none is on a pool that is gone."""
    sessions = loopback.get(f"{url}/polykv/sessions", timeout=60).json()["sessions"]
    names = {f"{reader.name}-{i}" for reader in readers for i in range(3)}
    ids = {pool["pool_id"] for pool in shown["pools"]} | {None}
    for session in sessions:
        assert session["session_id"] in names | {"checker"} or not session["named"], session
        assert session["n_running"] == 0, session
        assert session["state"] in ("idle", "parked"), session
        assert session["pool_id"] in ids, session


def answer_right(url: str, question: Question) -> None:
    body = GREEDY | {"prompt": question.prompt, "pool_id": question.pool, "session_id": "checker"}
    answer = loopback.post(f"{url}/completion", json=body | {"return_tokens": True}, timeout=60)
    told = answer.raise_for_status().json()
    assert told["tokens"] == question.tokens
    held = [(pool["name"], pool["residency"], pool["seq_id"], pool["pinned"]) for pool in tree(url)["pools"]]
    assert told["polykv"]["miss_reason"] is None, (question.pool, held)
    assert told["polykv"]["cached_n_tokens"] >= told["polykv"]["prefix_n_tokens"] > 0


def answer_as_unpooled(engine: Engine, url: str, pool: str, prompt: list[int]) -> None:
    body = GREEDY | {"prompt": prompt, "pool_id": pool, "session_id": "checker", "n_predict": 1, "return_tokens": True}
    told = loopback.post(f"{url}/completion", json=body, timeout=60).raise_for_status().json()
    assert told["polykv"]["prefix_n_tokens"] == len(prompt) - 5
    full = engine.full(prompt, 1, probs=2)
    assert told["tokens"] == full.tokens or not is_clear(full)
