"""kill -9 of the proxy, 20 times, at any moment, also while it starts: the same tree, ids and names, and no ghosts.

The engine goes on meanwhile and keeps what it has; clients go on, too, and know what was acknowledged to them.
"""

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import xxhash

from tests.engine.harness import free_port
from tests.engine.restarts import Crowd, Manager, clean_env
from tests.fake_engine import FakeEngine

N_KILLS = 20
STABLE = {"root": "A root that stays. ", "branch": "A root that stays. A branch of it. "}
N_SESSIONS = 4


class Proxy:
    """``polykvctl serve`` with a journal, on one port for all its lives."""

    def __init__(self, engine: FakeEngine, folder: Path):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "polykv_proxy.cli", "serve", "--json", "--upstream", engine.url]
        self._command += ["--port", str(self.port), "--state", str(folder / "pools.db")]
        self._process: asyncio.subprocess.Process | None = None

    async def begin(self) -> None:
        assert self._process is None
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=clean_env()
        )

    async def started(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 60)
        assert json.loads(line)["proxy"] == self.url

    async def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.communicate()
            self._process = None


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(max_pools=12, n_cells=1 << 16) as engine:
        engine.prefill_s = 0.0005
        engine.token_s = 0.002
        yield engine


class Reader:
    """Turns of named sessions in pools that stay; a whole answer is the right one."""

    def __init__(self, engine: FakeEngine, rng: random.Random, name: str):
        self.engine, self.rng, self.name = engine, rng, name
        self.n_whole = 0

    def step(self, client: httpx.Client) -> None:
        pool = self.rng.choice(list(STABLE))
        prompt = f"{STABLE[pool]}{self.rng.randrange(100)}"
        body = {"prompt": prompt, "max_tokens": 12, "session_id": f"{self.name}-{self.rng.randrange(N_SESSIONS)}"}
        body |= {"pool_id": pool} if self.rng.random() < 0.7 else {}
        answer = client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected(self.engine, prompt, 12)
            self.n_whole += 1
        else:
            assert answer.status_code in (502, 503, 504), answer.text


def expected(engine: FakeEngine, prompt: str, n: int) -> str:
    tokens = engine.template.tokenizer.encode(prompt)
    for _ in range(n):
        tokens.append(engine._next_token(tokens, 0))
    return bytes(tokens[-n:]).decode()


def draw(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(n)]


@pytest.mark.slow
async def test_twenty_kills_at_any_moment(engine: FakeEngine, tmp_path: Path) -> None:
    seed = int(os.environ.get("POLYKV_TEST_SEED", time.time_ns() % 10**6))
    print(f"POLYKV_TEST_SEED={seed}")
    rng = random.Random(seed)
    proxy = Proxy(engine, tmp_path)
    managers = [Manager(f"m{i}", proxy.url, random.Random(rng.random()), draw) for i in range(2)]
    readers = [Reader(engine, random.Random(rng.random()), f"r{i}") for i in range(2)]
    n_kills, crowd = 0, None
    try:
        await proxy.begin()
        await proxy.started()
        async with httpx.AsyncClient(base_url=proxy.url, timeout=60, trust_env=False) as http:
            ids = await make_stable(http)
            crowd = Crowd(proxy.url, [*managers, *readers])  # type: ignore[list-item]
            while n_kills < N_KILLS:
                crowd.go()
                await asyncio.sleep(rng.uniform(0.1, 1.5))
                await proxy.kill()
                n_kills += 1
                while rng.random() < 0.3:  # and again, before it is up
                    await proxy.begin()
                    await asyncio.sleep(rng.uniform(0, 2.5))
                    await proxy.kill()
                    n_kills += 1
                await proxy.begin()
                await proxy.started()
                await asyncio.sleep(rng.uniform(0, 0.5))
                await asyncio.to_thread(crowd.rest)
                shown = await agreed(engine, http)
                assert {p["name"]: p["pool_id"] for p in shown if p["name"] in STABLE} == ids
                for manager in managers:
                    manager.reconcile({"pools": shown})
                assert len(shown) == len(STABLE) + sum(len(manager.held) for manager in managers)
                assert_adopted(engine, shown, managers)
                await assert_no_ghosts(http, readers)
        assert all(manager.n_done > 3 for manager in managers)
        assert all(reader.n_whole > 3 for reader in readers)
    finally:
        if crowd is not None:
            await asyncio.to_thread(crowd.end)
        await proxy.kill()


async def make_stable(http: httpx.AsyncClient) -> dict[str, int]:
    root = (await http.post("/polykv/pools", json={"prompt": STABLE["root"], "name": "root", "pin": True})).json()
    fork = {"prompt": STABLE["branch"], "name": "branch"}
    branch = (await http.post("/polykv/pools/root/fork", json=fork)).json()
    return {"root": root["pool_id"], "branch": branch["pool_id"]}


async def agreed(engine: FakeEngine, http: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The tree, at a moment at which it says of the engine's sequences what the engine says of them."""
    held: set[int] = set()
    told: set[int | None] = set()
    for _ in range(600):
        shown: list[dict[str, Any]] = (await http.get("/polykv/pools")).json()["pools"]
        held = {pool.seq for pool in engine.pools if pool.state != "free"}
        told = {pool["seq_id"] for pool in shown} - {None}
        quiet = all(slot.state == "idle" for slot in engine.slots) and not engine.hooks.n_service
        if held == told and quiet:
            return shown
        await asyncio.sleep(0.05)
    raise AssertionError(f"the engine holds {held}, the tree says {told}")


def assert_adopted(engine: FakeEngine, shown: list[dict[str, Any]], managers: list[Manager]) -> None:
    """What a sequence holds is what was ordered for the longest of its pools; the others begin it."""
    ordered = {pool.name: list(pool.tokens) for manager in managers for pool in manager.held.values()}
    ordered |= {name: engine.template.tokenizer.encode(text) for name, text in STABLE.items()}
    for sequence in engine.ready_pools():
        tokens = [ordered[pool["name"]] for pool in shown if pool["seq_id"] == sequence.seq]
        longest = max(tokens, key=len)
        assert sequence.tokens == longest
        assert all(longest[: len(one)] == one for one in tokens)
        raw = b"".join(token.to_bytes(4, "little") for token in longest)
        assert sequence.as_json()["tokens_hash"] == xxhash.xxh64_hexdigest(raw, seed=0)


async def assert_no_ghosts(http: httpx.AsyncClient, readers: list[Reader]) -> None:
    names = {f"{reader.name}-{i}" for reader in readers for i in range(N_SESSIONS)}
    for session in (await http.get("/polykv/sessions")).json()["sessions"]:
        assert session["session_id"] in names, session
        assert (session["n_running"], session["state"]) == (0, "idle"), session
