"""The books of cells against the engine's own count, on the real engine, while nothing runs."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .binaries import binary_path
from .stack import ProxyStack
from .tiny_models import tiny_model_path

pytestmark = pytest.mark.engine

ENGINE = ("-t", "1", "-c", "1024", "--parallel", "3", "--kv-unified", "-b", "64", "--polykv-max-pools", "3")
N_VOCAB = 200


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[ProxyStack]:
    model = tiny_model_path("dense", chat_model)
    with ProxyStack(binary_path("patched"), model, *ENGINE, log_dir=tmp_path_factory.mktemp("accounts")) as stack:
        yield stack


def check_sum(stack: ProxyStack, what: str) -> dict[str, Any]:
    view: dict[str, Any] = stack.http.get("/polykv/pools").raise_for_status().json()
    own = sum(pool["own_kv_cells"] for pool in view["pools"])
    suffixes = sum(session["suffix_n_tokens"] for pool in view["pools"] for session in pool["sessions"])
    released = sum(pool["own_kv_cells"] for pool in view["released"])
    parts = (own, suffixes, released, view["unpooled"]["kv_cells"])
    assert sum(parts) == view["kv_cells_used"], (what, parts)
    return view


def ask(stack: ProxyStack, tokens: list[int], session: str, pool: str | None = None) -> dict[str, Any]:
    body = {"prompt": tokens, "n_predict": 4, "session_id": session, "pool_id": pool, "temperature": 0}
    answer: dict[str, Any] = stack.http.post("/completion", json=body).raise_for_status().json()
    return answer


def test_every_cell_has_one_owner_whatever_is_done(stack: ProxyStack) -> None:
    rng = random.Random(7)

    def words(n: int) -> list[int]:
        return [rng.randrange(10, N_VOCAB) for _ in range(n)]

    def order(verb: str, path: str, body: Any = None) -> Any:
        answer = stack.http.request(verb, path, json=body).raise_for_status().json()
        check_sum(stack, f"{verb} {path}")
        return answer

    root, leaf = words(100), words(40)
    order("POST", "/polykv/pools", {"tokens": root, "name": "root"})
    order("POST", "/polykv/pools/root/fork", {"own_tokens": leaf, "name": "leaf"})
    for i in range(2):
        assert ask(stack, root + leaf + words(10), f"s{i}", "leaf")["timings"]["pool_n"] == 140
        check_sum(stack, "attached")
    ask(stack, root[:60] + words(30), "s2", "root")
    order("POST", "/polykv/pools", {"from_session": "s0", "name": "snapshot"})
    order("POST", "/polykv/pools/root/evict")
    order("DELETE", "/polykv/pools/snapshot")
    freed = order("DELETE", "/polykv/pools/leaf")
    assert (freed["freed_later"]["kv_cells"], freed["freed_later"]["sessions"]) == (40, ["s0", "s1"])
    assert [pool["name"] for pool in check_sum(stack, "released")["released"]] == ["leaf", "snapshot"]
    ask(stack, root + leaf + words(10), "s1")
    check_sum(stack, "a session that goes on")
    for i in range(6):  # three sequences for seven pools: each takes somebody's
        order("POST", "/polykv/pools/root/fork", {"tokens": root[: 20 * i + 1] + words(30), "name": f"branch-{i}"})
        ask(stack, root + words(8), f"s{i % 3}")
        check_sum(stack, "a turn among evictions")
    for session in ("s0", "s1", "s2"):
        order("DELETE", f"/polykv/sessions/{session}")
    for name in ("root", "branch-0", "branch-3"):
        ask(stack, root + words(5), "t", name)
        check_sum(stack, "came back")
    order("POST", "/polykv/pools/root/flush")
    order("DELETE", "/polykv/pools/root?recursive=true")


def test_slot_that_goes_on_behind_another_pool_keeps_the_end_of_the_one_before(stack: ProxyStack) -> None:
    """It shares the beginning of the pool that it names now. Its cells behind that are of one that is gone: they are
    not this pool's, though a pool made of the slot begins with them, too."""
    rng = random.Random(8)
    common, x, y, more = ([rng.randrange(10, N_VOCAB) for _ in range(n)] for n in (100, 20, 30, 9))
    for name, end in (("x", x), ("y", y)):
        stack.http.post("/polykv/pools", json={"tokens": common + end, "name": name}).raise_for_status()
    assert ask(stack, common + y + more, "s", "y")["timings"]["pool_n"] == 130
    stack.http.delete("/polykv/pools/y").raise_for_status()
    assert ask(stack, common + y + more[::-1], "s", "x")["timings"]["cache_n"] == 130
    check_sum(stack, "behind another pool")
    made = stack.http.post("/polykv/pools", json={"from_session": "s", "name": "z"}).raise_for_status().json()
    view = check_sum(stack, "a pool of it")
    own = {pool["name"]: pool["own_kv_cells"] for pool in view["pools"]}
    assert own == {"x": 120, "z": made["prefix_len"] - 100}
    stack.http.delete("/polykv/pools/x").raise_for_status()
    view = check_sum(stack, "the one that the beginning was of is gone")
    assert [pool["own_kv_cells"] for pool in view["pools"]] == [made["prefix_len"]]
    stack.http.delete("/polykv/pools/z").raise_for_status()
    check_sum(stack, "nobody's but the session's")
