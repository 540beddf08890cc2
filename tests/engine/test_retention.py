"""More pools than sequences, and a tree deeper than there are sequences, on the real engine."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .binaries import binary_path
from .divergence import Distribution, divergence
from .stack import ProxyStack
from .tiny_models import tiny_model_path

pytestmark = pytest.mark.engine

N_SEQS = 16
MAX_NATS = 1e-3
"""Batches of other shapes round otherwise; another prefix makes another distribution."""

ENGINE = ("-t", "1", "-c", "8192", "--parallel", "2", "--kv-unified", "-b", "64", "--polykv-max-pools", str(N_SEQS))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[ProxyStack]:
    model = tiny_model_path("dense", chat_model)
    with ProxyStack(binary_path("patched"), model, *ENGINE, log_dir=tmp_path_factory.mktemp("retention")) as stack:
        yield stack


def create(stack: ProxyStack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = stack.http.post(path, json=body).raise_for_status().json()
    return made


def check(stack: ProxyStack, tokens: list[int], pool: str, session: str) -> float | None:
    """The pool's whole prefix is shared. Gives how far the answer is from that of a full prefill, if it can be told."""
    body = {"prompt": [*tokens, 11, 12], "n_predict": 1, "ignore_eos": True, "temperature": 0, "n_probs": 20}
    shared = stack.http.post("/completion", json=body | {"pool_id": pool, "session_id": session}).json()
    assert (shared["polykv"]["miss_reason"], shared["timings"]["pool_n"]) == (None, len(tokens))
    whole = stack.http.post("/completion", json=body | {"cache_prompt": False}).json()
    both = [distribution(answer) for answer in (whole, shared)]
    return divergence(both[0], both[1]) if all(both) else None


def distribution(answer: dict[str, Any]) -> Distribution:
    """Empty when the token is half a character: the engine then says nothing of it."""
    listed = answer.get("completion_probabilities") or [{"top_logprobs": []}]
    return {token["id"]: token["logprob"] for token in listed[0]["top_logprobs"]}


def check_all(apart: list[float | None]) -> None:
    told = [nats for nats in apart if nats is not None]
    assert len(told) > len(apart) / 2
    assert max(told) < MAX_NATS


def test_depth_64_on_16_sequences(stack: ProxyStack) -> None:
    rng = random.Random(1)
    prefixes = [[rng.randrange(10, 200) for _ in range(20)]]
    create(stack, "/polykv/pools", {"tokens": prefixes[0], "name": "l0"})
    for level in range(1, 64):
        own = [rng.randrange(10, 200) for _ in range(20)]
        prefixes.append(prefixes[-1] + own)
        create(stack, f"/polykv/pools/l{level - 1}/fork", {"own_tokens": own, "name": f"l{level}"})
    view = stack.http.get("/polykv/pools").json()
    assert (view["tree_depth"], view["seq_ids_used"], view["kv_cells_used"]) == (64, N_SEQS, 64 * 20)
    assert {pool["residency"] for pool in view["pools"]} == {"resident"}
    levels = rng.sample(range(64), 16)
    check_all([check(stack, prefixes[level], f"l{level}", f"s{level % 5}") for level in levels])
    stack.http.delete("/polykv/pools/l0?recursive=true").raise_for_status()


@pytest.mark.parametrize("n_pools", [100, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_hundreds_of_pools_on_16_sequences(stack: ProxyStack, n_pools: int) -> None:
    rng = random.Random(n_pools)
    system = [rng.randrange(10, 200) for _ in range(60)]
    prefixes = []
    create(stack, "/polykv/pools", {"tokens": system, "name": "system"})
    for i in range(n_pools):
        own = [rng.randrange(10, 200) for _ in range(20)]
        branch_pos = rng.randint(30, 60)
        prefixes.append(system[:branch_pos] + own)
        body = {"own_tokens": own, "branch_pos": branch_pos, "name": f"p{i}"}
        create(stack, "/polykv/pools/system/fork", body)
    check_all([check(stack, prefixes[i], f"p{i}", f"agent-{i}") for i in rng.sample(range(n_pools), n_pools // 5)])
    view = stack.http.get("/polykv/pools").json()
    assert view["seq_ids_used"] == N_SEQS
    own_cells = sum(pool["own_kv_cells"] for pool in view["pools"])
    suffixes = sum(session["suffix_n_tokens"] for pool in view["pools"] for session in pool["sessions"])
    assert own_cells + suffixes + view["unpooled"]["kv_cells"] == view["kv_cells_used"]
    stack.http.delete("/polykv/pools/system?recursive=true").raise_for_status()
