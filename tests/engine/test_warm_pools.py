"""Pools outside the cache, through the proxy on a real engine: they leave, come back without a prefill, survive kills.

What was prefilled is counted by the engine itself, and answers are compared with those of a full prefill. All in f32,
since flash attention rounds to f16, differently wherever the cells lie.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .deployment import Deployment
from .divergence import Distribution, divergence
from .noise import Noise

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

EXACT = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
CACHE = ("--parallel", "4", "--kv-unified", "--polykv-max-pools", "12")
MIB = 1 << 20
MAX_NATS = 1e-4
N_SUFFIX = 5
SOON: dict[str, float] = {"warm_after_s": 1.0, "session_gap_s": 0.2, "grace_ttl_s": 300.0}
LATER: dict[str, float] = SOON | {"warm_after_s": 1000.0}
WITHIN_S = 60.0


@contextmanager
def deployed(
    model: Path, dir_: Path, settings: dict[str, float], *, n_cells: int = 8192, disk: bool = False
) -> Iterator[Deployment]:
    flags = [*EXACT, *CACHE, "-c", str(n_cells), "--polykv-save-ram", "256"]
    if disk:
        flags += ["--polykv-save-path", str(dir_ / "saved"), "--polykv-save-disk", "256"]
        settings = settings | {"warm_disk_bytes": 256 * MIB}
    with Deployment(model, *flags, dir_=dir_, settings=settings) as site:
        yield site


def create(site: Deployment, name: str, tokens: list[int], **fields: Any) -> None:
    body = {"tokens": tokens, "name": name} | fields
    site.http.post("/polykv/pools", json=body).raise_for_status()


def fork(site: Deployment, parent: str, name: str, own: list[int], branch_pos: int) -> None:
    body = {"own_tokens": own, "name": name, "branch_pos": branch_pos}
    site.http.post(f"/polykv/pools/{parent}/fork", json=body).raise_for_status()


def view(site: Deployment) -> dict[str, Any]:
    shown: dict[str, Any] = site.http.get("/polykv/pools").raise_for_status().json()
    return shown


def residencies(site: Deployment) -> dict[str, str]:
    return {pool["name"]: pool["residency"] for pool in view(site)["pools"]}


def eventually(is_so: Callable[[], bool], what: Callable[[], Any]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < end_s, what()
        time.sleep(0.1)


def attach(site: Deployment, name: str, tokens: list[int], session: str) -> dict[str, Any]:
    """Ask behind a whole pool: nothing but the suffix may be prefilled."""
    before = site.stats()["n_prompt_cum"]
    body = ask(tokens) | {"pool_id": name, "session_id": session}
    answer: dict[str, Any] = site.http.post("/completion", json=body).raise_for_status().json()
    assert answer["polykv"]["miss_reason"] is None, answer["polykv"]
    assert (answer["timings"]["pool_n"], answer["timings"]["prompt_n"]) == (len(tokens), N_SUFFIX)
    assert site.stats()["n_prompt_cum"] - before == N_SUFFIX, name
    return answer


def ask(tokens: list[int]) -> dict[str, Any]:
    suffix = tokens[:N_SUFFIX]
    return {"prompt": [*tokens, *suffix], "n_predict": 8, "ignore_eos": True, "temperature": 0, "n_probs": 20}


def same_as_a_full_prefill(site: Deployment, tokens: list[int], answer: dict[str, Any]) -> None:
    """By the distribution of the first token: what comes later depends on it."""
    whole = site.http.post("/completion", json=ask(tokens) | {"cache_prompt": False}).raise_for_status().json()
    assert whole["timings"]["prompt_n"] == len(tokens) + N_SUFFIX
    both = [distribution(given) for given in (whole, answer)]
    assert divergence(both[0], both[1]) < MAX_NATS


def distribution(answer: dict[str, Any]) -> Distribution:
    return {token["id"]: token["logprob"] for token in answer["completion_probabilities"][0]["top_logprobs"]}


def books_hold(site: Deployment) -> None:
    """As soon as nothing runs: when cells are low a slot may just be on its way out after the last turn."""

    def sums() -> tuple[int, int]:
        shown = view(site)
        own = sum(pool["own_kv_cells"] for pool in [*shown["pools"], *shown["released"]])
        suffixes = sum(session["suffix_n_tokens"] for pool in shown["pools"] for session in pool["sessions"])
        return own + suffixes + shown["unpooled"]["kv_cells"], shown["kv_cells_used"]

    eventually(lambda: len(set(sums())) == 1, sums)


def family(site: Deployment, noise: Noise) -> dict[str, list[int]]:
    """A root, two children that leave it midway and at its end, one below, and a root of its own."""
    root = noise(1, 300)
    tokens = {"root": root, "branch": root[:200] + noise(2, 90), "heir": root + noise(3, 60), "lone": noise(4, 150)}
    tokens["leaf"] = tokens["branch"] + noise(5, 40)
    create(site, "root", root)
    fork(site, "root", "branch", tokens["branch"][200:], 200)
    fork(site, "root", "heir", tokens["heir"][300:], 300)
    fork(site, "branch", "leaf", tokens["leaf"][290:], 290)
    create(site, "lone", tokens["lone"])
    return tokens


def test_idle_pools_leave_and_come_back_with_nothing_prefilled(dense_path: Path, noise: Noise, tmp_path: Path) -> None:
    with deployed(dense_path, tmp_path, SOON) as site:
        tokens = family(site, noise)
        assert site.stats()["n_prompt_cum"] == 300 + 90 + 60 + 40 + 150
        eventually(lambda: set(residencies(site).values()) == {"warm"}, lambda: residencies(site))
        eventually(lambda: view(site)["kv_cells_used"] == 0, lambda: site.stats()["cells"])  # freed right after
        shown = view(site)
        assert shown["seq_ids_used"] == 0
        assert all(pool["own_kv_bytes"] == 0 < pool["warm_bytes"] for pool in shown["pools"])
        n_bytes = {pool["name"]: pool["warm_bytes"] for pool in shown["pools"]}
        assert n_bytes["root"] >= 300 * shown["kv_bytes_per_token"]
        assert max(n_bytes["heir"], n_bytes["leaf"]) < n_bytes["root"] / 2  # own ranges only
        answers = {name: attach(site, name, tokens[name], f"s-{name}") for name in ("leaf", "heir", "root", "lone")}
        books_hold(site)
        for name, answer in answers.items():
            same_as_a_full_prefill(site, tokens[name], answer)


def test_a_killed_engine_costs_no_pool_a_prefill(dense_path: Path, noise: Noise, tmp_path: Path) -> None:
    with deployed(dense_path, tmp_path, SOON, disk=True) as site:
        tokens = family(site, noise)
        for i in range(3):
            tokens[f"p{i}"] = noise(10 + i, 120)
            create(site, f"p{i}", tokens[f"p{i}"], pin=i == 0)
        eventually(lambda: view(site)["warm"]["disk"]["pools"] == 8, lambda: view(site)["warm"])
        site.restart_engine()
        answers = {name: attach(site, name, prefix, f"s-{name}") for name, prefix in tokens.items()}
        assert site.stats()["n_prompt_cum"] == 8 * N_SUFFIX  # neither for them, nor for what was brought back unasked
        books_hold(site)
        for name in ("leaf", "p0"):
            same_as_a_full_prefill(site, tokens[name], answers[name])


def test_a_killed_proxy_finds_what_is_saved(dense_path: Path, noise: Noise, tmp_path: Path) -> None:
    with deployed(dense_path, tmp_path, SOON) as site:
        tokens = family(site, noise)
        eventually(lambda: set(residencies(site).values()) == {"warm"}, lambda: residencies(site))
        site.restart_proxy()
        assert set(residencies(site).values()) <= {"warm", "resident"}
        same_as_a_full_prefill(site, tokens["leaf"], attach(site, "leaf", tokens["leaf"], "s"))
        attach(site, "lone", tokens["lone"], "t")
        books_hold(site)


def test_pressure_sends_pools_to_memory_and_they_come_back(dense_path: Path, noise: Noise, tmp_path: Path) -> None:
    with deployed(dense_path, tmp_path, LATER, n_cells=2048) as site:
        tokens = {f"p{i}": noise(i, 300) for i in range(12)}
        for name, prefix in tokens.items():
            create(site, name, prefix)
        told = residencies(site)
        assert {told[f"p{i}"] for i in range(4)} == {"warm"}
        assert "cold" not in told.values()
        for turn, name in enumerate([*tokens, *reversed(tokens)]):
            answer = attach(site, name, tokens[name], f"s{turn}")
            if turn % 8 == 0:
                same_as_a_full_prefill(site, tokens[name], answer)
        books_hold(site)


def test_what_lies_high_moves_down(dense_path: Path, noise: Noise, tmp_path: Path) -> None:
    with deployed(dense_path, tmp_path, LATER) as site:
        create(site, "below", noise(1, 1500))
        top = noise(2, 200)
        create(site, "top", top, pin=True)
        assert site.stats()["cells"]["hi"] == 1700
        site.http.post("/polykv/pools/below/evict?to=cold").raise_for_status()
        eventually(lambda: site.stats()["cells"]["hi"] == 200, lambda: site.stats()["cells"])
        eventually(lambda: residencies(site)["top"] == "resident", lambda: residencies(site))
        same_as_a_full_prefill(site, top, attach(site, "top", top, "s"))
        books_hold(site)
