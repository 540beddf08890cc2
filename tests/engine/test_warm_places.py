"""Memory and disk together, through the proxy on a real engine: what leaves one stays in the other, and is not there
twice in the cache when it comes back."""

import shutil
from pathlib import Path

import pytest

from .noise import Noise
from .test_warm_pools import (
    LATER,
    N_SUFFIX,
    attach,
    books_hold,
    create,
    deployed,
    eventually,
    family,
    residencies,
    same_as_a_full_prefill,
    view,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

N_POOLS = 12
N_TOKENS = 300


def test_a_memory_for_three_pools_and_a_disk_for_all(dense_path: Path, noise: Noise, tmp_path: Path) -> None:
    """The engine counts its memory in blocks, so the proxy's budget is exceeded before the proxy can know it."""
    budget = 1_000_000
    with deployed(dense_path, tmp_path, LATER | {"warm_ram_bytes": budget}, n_cells=2048, disk=True) as site:
        tokens = {f"p{i}": noise(i, N_TOKENS) for i in range(N_POOLS)}
        for name, prefix in tokens.items():
            create(site, name, prefix)
        eventually(lambda: view(site)["warm"]["disk"]["pools"] == N_POOLS, lambda: view(site)["warm"])
        warm, saved = view(site)["warm"], site.stats()["saved"]
        assert "cold" not in residencies(site).values()
        assert warm["ram"]["bytes"] == saved["ram"]["bytes"] <= budget
        assert 0 < warm["ram"]["pools"] < N_POOLS - 6
        metrics = site.http.get("/metrics").text
        assert "warm_forgotten_total 0.0" in metrics
        assert "warm_failures_total{" not in metrics
        before = site.stats()["n_prompt_cum"]
        for name, prefix in tokens.items():
            attach(site, name, prefix, f"s-{name}")
        assert site.stats()["n_prompt_cum"] - before == N_POOLS * N_SUFFIX
        site.restart_engine()
        answers = {name: attach(site, name, prefix, f"t-{name}") for name, prefix in tokens.items()}
        assert site.stats()["n_prompt_cum"] == N_POOLS * N_SUFFIX
        same_as_a_full_prefill(site, tokens["p0"], answers["p0"])
        books_hold(site)


def test_what_was_saved_whole_shares_what_a_parent_holds_again(dense_path: Path, noise: Noise, tmp_path: Path) -> None:
    with deployed(dense_path, tmp_path, LATER) as site:
        tokens = family(site, noise)
        for name in ("lone", "heir", "root", "branch"):
            site.http.post(f"/polykv/pools/{name}/evict?to=cold").raise_for_status()
        site.http.post("/polykv/pools/leaf/evict?to=warm").raise_for_status()
        assert site.stats()["cells"]["used"] == 0
        site.http.post("/polykv/pools/root/pin").raise_for_status()
        before = site.stats()["n_prompt_cum"]
        site.http.post("/polykv/pools/leaf/pin").raise_for_status()
        assert site.stats()["n_prompt_cum"] == before
        # Of the root's 300 tokens 200 are the leaf's, too.
        assert site.stats()["cells"]["used"] == 300 + len(tokens["leaf"]) - 200
        books_hold(site)
        same_as_a_full_prefill(site, tokens["leaf"], attach(site, "leaf", tokens["leaf"], "s"))
        books_hold(site)


def test_a_folder_that_goes_away_costs_nothing_but_the_files(dense_path: Path, noise: Noise, tmp_path: Path) -> None:
    def told(what: str) -> int:
        return site.log.read_text().count(what)

    def n_files() -> int:
        return int(view(site)["warm"]["disk"]["pools"])

    folder = tmp_path / "saved"
    with deployed(dense_path, tmp_path, LATER, disk=True) as site:
        create(site, "before", noise(0, N_TOKENS))
        eventually(lambda: n_files() == 1, lambda: view(site)["warm"])
        shutil.move(folder, folder.with_name("away"))
        tokens = {f"p{i}": noise(10 + i, N_TOKENS) for i in range(4)}
        for name, prefix in tokens.items():
            create(site, name, prefix)
        eventually(lambda: told("states are not saved on disk") > 0, lambda: site.log.read_text()[-2000:])
        for name in ("p0", "p1"):
            answer = site.http.post(f"/polykv/pools/{name}/evict?to=warm").raise_for_status()
            assert answer.json()["residency"] == "warm"
        assert (n_files(), view(site)["warm"]["ram"]["pools"], told("states are not saved on disk")) == (1, 2, 1)
        shutil.move(folder.with_name("away"), folder)
        eventually(lambda: n_files() == 5, lambda: view(site)["warm"])
        assert (told("states are not saved on disk"), told("states are saved on disk again")) == (1, 1)
        assert site.stats()["saved"]["ram"]["bytes"] == view(site)["warm"]["ram"]["bytes"]
        site.restart_engine()
        for name, prefix in tokens.items():
            attach(site, name, prefix, f"s-{name}")
        assert site.stats()["n_prompt_cum"] == len(tokens) * N_SUFFIX
