"""Nobody starves and nobody takes the others down: the prefill quota of pools, and the rule for a full cache."""

import time
from typing import Any

import pytest

from .conftest import Launcher
from .divergence import mean_divergence
from .hooks import Engine, Running
from .noise import Noise

pytestmark = pytest.mark.engine

# Four requests of 310 tokens do not fit into 1,024 cells, three do.
FULL = ("-c", "1024", "--parallel", "4", "--kv-unified")
N_PROMPT, N_PREDICT = 150, 160


def outcomes(engine: Engine, noise: Noise) -> list[dict[str, Any]]:
    """Four streams that outgrow the cache together: the last event of each."""
    agents = [Running(engine, noise(seed, N_PROMPT), N_PREDICT, id_slot=seed) for seed in range(4)]
    for agent in agents:
        agent.start()
    return [agent.last_event() for agent in agents]


def test_full_cache_truncates_one_stream_and_stock_kills_all(launch: Launcher, noise: Noise) -> None:
    patched, stock = launch("patched", "dense", *FULL, "--polykv-max-pools", "8"), launch("stock", "dense", *FULL)
    alone = [patched.full(noise(seed, N_PROMPT), N_PREDICT).body["content"] for seed in range(4)]
    for slot in range(4):
        patched.erase(slot)

    ended = outcomes(patched, noise)
    assert [event.get("stop_type") for event in ended] == ["limit"] * 4
    truncated = [seed for seed, event in enumerate(ended) if event["truncated"]]
    assert len(truncated) == 1
    for seed, event in enumerate(ended):
        if seed in truncated:
            assert alone[seed].startswith(event["content"].rstrip("\ufffd"))
            assert 0 < event["tokens_predicted"] < N_PREDICT
        else:
            assert event["tokens_predicted"] == N_PREDICT
    assert [event["error"]["code"] for event in outcomes(stock, noise)] == [500] * 4


def test_pool_survives_a_full_cache(launch: Launcher, noise: Noise) -> None:
    engine = launch("patched", "dense", *FULL, "--polykv-max-pools", "8")
    trunk = noise(9, 200)
    root = engine.materialize(trunk)
    outcomes(engine, noise)
    done = engine.ask(trunk + noise(10, 20), 16, slot=0, pool=root["seq"])
    assert done.pool_n == 200
    assert done.tokens == engine.full(trunk + noise(10, 20), 16, slot=1).tokens


def test_materialize_without_room_leaves_streams_alone(launch: Launcher, noise: Noise) -> None:
    """Fits when it starts, no longer when the stream has grown: 507 for the pool, and the stream goes on.

    In batches of eight, one of them the stream's, 850 tokens take 122 batches, in which the stream grows by as many:
    100 + 850 + 122 cells are more than there are.
    """
    few = ("--parallel", "2", "--polykv-max-pools", "2", "-b", "8", "-ub", "8")
    engine = launch("patched", "dense", *FULL, *few)
    with Running(engine, noise(1, 100), 700, id_slot=0) as agent:
        response = engine.http.post(
            "/polykv/engine/pools", json={"op": "materialize", "tokens": noise(2, 850), "seq": -1, "parent_seq": -1}
        )
        last = agent.finished()
    assert response.status_code == 507, response.text
    assert response.json()["error"]["need"] > 0
    assert (last["tokens_predicted"], last["truncated"]) == (700, False)
    assert {pool["state"] for pool in engine.pools()} == {"free"}
    assert engine.cells_used() == 100 + 699
    # What the stream left in its cells is what a full prefill of its text puts there, but for rounding: it was written
    # token by token, between the pool's cells. One wrong token is ten times as far.
    taken = engine.snapshot(0, want_tokens=True)
    engine.free(taken["seq"])
    text, forced = taken["tokens"] + noise(3, 8), noise(4, 16)
    kept = engine.ask(text, slot=0, forced=forced)
    assert kept.cache_n == 100 + 699
    engine.erase(0)
    full = engine.full(text, slot=0, forced=forced)
    wrong = engine.full([*text[:300], *noise(5, 1), *text[301:]], slot=0, forced=forced)
    assert mean_divergence(full.at, kept.at) < mean_divergence(full.at, wrong.at) / 10


# Prefill quota ----------------------------------------------------------------------------------------------------

QUOTA_FLAGS = ("-b", "2048", "--no-cache-idle-slots")
N_POOL = 1740


@pytest.fixture
def with_and_without(launch: Launcher) -> tuple[Engine, Engine]:
    """The default quota, and none."""
    return launch.pooled("chat", *QUOTA_FLAGS), launch.pooled("chat", *QUOTA_FLAGS, "--polykv-prefill-quota", "0")


def gap_and_total(engine: Engine, tokens: list[int], prompt: list[int]) -> tuple[float, float]:
    """A stream's longest wait for a token while a pool is made, and how long that took. Seconds."""
    with Running(engine, prompt, 2000, id_slot=0, ignore_eos=True) as agent:
        time.sleep(0.3)
        began = time.perf_counter()
        made = engine.materialize(tokens)
        total = time.perf_counter() - began
        arrivals = [at for at in [*agent.arrivals] if at >= began - 0.1]
        longest = max(b - a for a, b in zip(arrivals, [*arrivals[1:], time.perf_counter()], strict=True))
        agent.leave()
    engine.free(made["seq"])
    return longest, total


def test_quota_bounds_the_gap_of_a_running_stream(with_and_without: tuple[Engine, Engine], noise: Noise) -> None:
    """Longest gap at most a quarter, total time within a tenth.

    Each arm by its best of alternating rounds: whatever else runs here can only add to a gap. One round, up to nine
    while the ratios are not met.
    """
    measured: list[list[tuple[float, float]]] = [[], []]
    gap = total = gap_without = total_without = 0.0
    for round_ in range(9):
        for arm, engine in enumerate(with_and_without):
            measured[arm].append(gap_and_total(engine, noise(round_, N_POOL), noise(50 + round_, 20)))
        (gap, total), (gap_without, total_without) = (
            [min(each) for each in zip(*arm, strict=True)] for arm in measured
        )
        if gap <= gap_without / 4 and total <= 1.1 * total_without:
            break
    print(f"gap {gap:.2f} s and {gap_without:.2f} s without; total {total:.2f} s and {total_without:.2f} s")
    assert gap <= gap_without / 4
    assert total <= 1.1 * total_without
