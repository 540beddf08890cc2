"""The engine is another one than the proxy believes when a turn comes: answers are right, and pools return.

In f32, since flash attention rounds to f16, differently wherever the cells lie.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .deployment import Deployment
from .divergence import Distribution, divergence
from .noise import Noise
from .restarts import kill_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXACT = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
CACHE = ("-c", "4096", "--parallel", "3", "--kv-unified", "--polykv-max-pools", "8", "--no-cache-idle-slots")
MAX_NATS = 1e-4
N_SUFFIX = 10


def ask(prompt: list[int]) -> dict[str, Any]:
    return {"prompt": prompt, "n_predict": 4, "ignore_eos": True, "temperature": 0, "n_probs": 20}


def distributions(answer: dict[str, Any]) -> list[Distribution]:
    return [
        {token["id"]: token["logprob"] for token in position["top_logprobs"]}
        for position in answer["completion_probabilities"]
    ]


def test_answers_are_those_of_a_full_prefill_and_every_pool_returns(
    dense_path: Path, noise: Noise, tmp_path: Path
) -> None:
    root = noise(1, 300)
    pools = {"root": root, "branch": root[:200] + noise(2, 100), "leaf": root[:200] + noise(2, 100) + noise(3, 50)}
    with Deployment(dense_path, *EXACT, *CACHE, dir_=tmp_path) as site:

        def post(path: str, **body: Any) -> dict[str, Any]:
            told: dict[str, Any] = site.http.post(path, json=body).raise_for_status().json()
            return told

        ids = {"root": post("/polykv/pools", tokens=root, name="root")["pool_id"]}
        for parent, name in (("root", "branch"), ("branch", "leaf")):
            ids[name] = post(f"/polykv/pools/{parent}/fork", tokens=pools[name], name=name)["pool_id"]
        prompt = pools["leaf"] + noise(20, N_SUFFIX)
        whole = distributions(post("/completion", **ask(prompt), cache_prompt=False))
        # Another start, before the proxy can look: it decides by what was there.
        os.kill(site._proxy.pid, signal.SIGSTOP)
        kill_engine(site.engine)
        site.engine.start()
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(post, "/completion", **ask(prompt), pool_id="leaf", session_id="leaf")
            time.sleep(0.3)
            os.kill(site._proxy.pid, signal.SIGCONT)
            answer = asked.result()
        assert answer["polykv"]["miss_reason"] in (None, "upstream_restarted")
        assert_same(distributions(answer), whole)
        site.wait_ready()
        post("/polykv/pools", tokens=noise(10, 350), name="other")
        for again, tokens in pools.items():
            prompt = tokens + noise(30, N_SUFFIX)
            answer = post("/completion", **ask(prompt), pool_id=again, session_id=f"{again}-again")
            assert (answer["polykv"]["miss_reason"], answer["timings"]["pool_n"]) == (None, len(tokens))
            assert_same(distributions(answer), distributions(post("/completion", **ask(prompt), cache_prompt=False)))
        shown = site.http.get("/polykv/pools").raise_for_status().json()["pools"]
        assert {pool["name"]: pool["pool_id"] for pool in shown if pool["name"] in ids} == ids


def assert_same(some: list[Distribution], others: list[Distribution]) -> None:
    """By the distribution of the first token: those behind it depend on it."""
    assert divergence(others[0], some[0]) < MAX_NATS
