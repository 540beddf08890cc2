"""The engine or the proxy dies while a shorter pool is being prefilled: everything is as it was, and goes on."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import loopback
from .conftest import POOLS, Launcher
from .hooks import Engine
from .noise import Noise
from .restarts import GREEDY, ProxyProcess, kill_engine, wait_until_nothing
from .test_restarts import agreed, ill, tree

pytestmark = pytest.mark.engine

N_CTX = 16384
TRUNK_LEN, WORK_LEN, NEW_LEN = 300, 3_000, 2_600
"""The new one takes so long, in small batches, that nobody has to be quick."""


def remembered(url: str) -> dict[int, tuple[Any, ...]]:
    """What a failed compaction must leave alone; sessions are another matter when the proxy dies."""
    pools = tree(url)["pools"]
    return {pool["pool_id"]: (pool["name"], pool["parent"], pool["prefix_len"], pool["pinned"]) for pool in pools}


@pytest.mark.parametrize("victim", ["engine", "proxy"])
def test_who_dies_during_a_compaction_leaves_everything_as_it_was(
    launch: Launcher, noise: Noise, tmp_path: Path, victim: str
) -> None:
    flags = ("-c", str(N_CTX), "--parallel", "4", "--kv-unified", *POOLS, "--no-cache-idle-slots", "-b", "64")
    engine = launch("patched", "dense", *flags)
    proxy = ProxyProcess(engine.server.url, tmp_path / "state" / "pools.db", tmp_path / "proxy.log")
    proxy.start()
    try:
        with httpx.Client(base_url=proxy.url, timeout=120, trust_env=False) as http:
            check(engine, proxy, http, noise, victim)
    finally:
        proxy.kill()


def check(engine: Engine, proxy: ProxyProcess, http: httpx.Client, noise: Noise, victim: str) -> None:
    def ask(session: str) -> dict[str, Any]:
        body = {"prompt": work + noise(session_seed[session], 30), "session_id": session, "return_tokens": True}
        told: dict[str, Any] = http.post("/completion", json=body | GREEDY).raise_for_status().json()
        return told

    trunk = noise(1, TRUNK_LEN)
    work = trunk + noise(2, WORK_LEN - TRUNK_LEN)
    session_seed = {f"agent-{i}": 10 + i for i in range(4)}
    http.post("/polykv/pools", json={"tokens": trunk, "name": "trunk"}).raise_for_status()
    fork = {"tokens": work, "name": "work", "pin": True}
    http.post("/polykv/pools/trunk/fork", json=fork).raise_for_status()
    answers = {session: ask(session) for session in session_seed}
    assert {told["polykv"]["pool_id"] for told in answers.values()} == {2}
    before = remembered(proxy.url)
    assert before == {1: ("trunk", -1, TRUNK_LEN, False), 2: ("work", 1, WORK_LEN, True)}

    outcome: list[httpx.Response | httpx.TransportError] = []

    def compact() -> None:
        body = {"ancestor": "trunk", "tokens": trunk + noise(3, NEW_LEN)}
        try:
            outcome.append(loopback.post(f"{proxy.url}/polykv/pools/work/compact", json=body, timeout=120))
        except httpx.TransportError as e:
            outcome.append(e)

    compacting = threading.Thread(target=compact)
    compacting.start()
    wait_until_nothing(lambda: None if outcome or is_at_work(engine) else "the new pool is not being prefilled")
    assert not outcome, getattr(outcome[0], "text", outcome)
    if victim == "engine":
        kill_engine(engine.server)
        compacting.join(60)
        [answer] = outcome
        assert isinstance(answer, httpx.Response)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
        assert remembered(proxy.url) == before
        assert {s["session_id"] for s in sessions_of(proxy.url, 2)} == set(session_seed)
        engine.server.start()
    else:
        proxy.kill()
        compacting.join(60)
        assert isinstance(outcome[0], httpx.TransportError)
        proxy.start()
    wait_until_nothing(lambda: ill(proxy.url))
    assert remembered(proxy.url) == before
    for session, told in answers.items():
        again = ask(session)
        assert (again["polykv"]["pool_id"], again["tokens"]) == (2, told["tokens"])
    _, shown = agreed(engine, proxy.url)
    assert {pool["residency"] for pool in shown["pools"]} == {"resident"}
    assert shown["seq_ids_used"] <= 2, "nothing is left of the new one"


def is_at_work(engine: Engine) -> bool:
    service = engine.stats()["service"]
    return service["state"] != "idle" and service["n_tokens"] > TRUNK_LEN


def sessions_of(url: str, pool_id: int) -> list[dict[str, Any]]:
    [pool] = [pool for pool in tree(url)["pools"] if pool["pool_id"] == pool_id]
    found: list[dict[str, Any]] = pool["sessions"]
    return found
