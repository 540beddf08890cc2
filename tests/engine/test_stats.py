"""The stats tell the truth about slots and cells, and can be read at any moment, whatever the engine is busy with."""

import time
from typing import Any

import pytest
import xxhash

from .conftest import POOLS, Launcher
from .hooks import Engine, Running
from .noise import Noise

pytestmark = pytest.mark.engine


@pytest.fixture
def engine(launch: Launcher) -> Engine:
    return launch.pooled("dense", "--no-cache-idle-slots")


def timed_stats(engine: Engine, n: int, interval_s: float = 0.1) -> list[float]:
    """Milliseconds of ``n`` reads at ten per second."""
    took = []
    for _ in range(n):
        began = time.perf_counter()
        engine.stats()
        took.append(1000 * (time.perf_counter() - began))
        time.sleep(max(0.0, interval_s - took[-1] / 1000))
    return sorted(took)


def test_stats_at_ten_hertz_during_a_long_prefill(launch: Launcher, noise: Noise) -> None:
    """A batch of 800 tokens takes seconds on the chat model; reads must not wait for its end."""
    engine = launch.pooled("chat", "-b", "2048")
    began = time.perf_counter()
    tokens, during = noise(1, 800), []
    with Running(engine, noise(2, 10), 1) as first:
        first.finished()
    with PrefillInBackground(engine, tokens) as prefill:
        while prefill.is_running():
            during += timed_stats(engine, 5)
    prefill_ms = 1000 * (time.perf_counter() - began)
    during.sort()
    assert len(during) >= 10
    p95 = during[int(0.95 * len(during))]
    middle, worst = during[len(during) // 2], during[-1]
    print(f"p50 {middle:.1f} p95 {p95:.1f} max {worst:.1f} ms while one batch took {prefill_ms:.0f} ms")
    assert p95 < prefill_ms / 20, "reads wait for the batch"


class PrefillInBackground(Running):
    """A long prompt whose first token comes at the end: do not wait for it."""

    def __init__(self, engine: Engine, tokens: list[int]) -> None:
        super().__init__(engine, tokens, 1)

    def __enter__(self) -> "PrefillInBackground":
        self._thread.start()
        return self


def test_list_is_readable_while_a_pool_is_made(launch: Launcher, noise: Noise) -> None:
    """A materialize shows as busy, with its tag, long before it is done."""
    engine = launch.pooled("dense", "-b", "64", "-ub", "64", "--no-cache-idle-slots")
    seq = engine.pools()[2]["seq"]
    seen: list[dict[str, Any]] = []
    with BackgroundMaterialize(engine, noise(1, 7000), seq=seq, tag="mine") as making:
        while making.is_running():
            seen.append(engine.pool(seq))
    assert {(pool["state"], pool["tag"]) for pool in seen} >= {("busy", "mine")}
    made = engine.pool(seq)
    assert (made["state"], made["n_tokens"]) == ("ready", 7000)


class BackgroundMaterialize(Running):
    def __init__(self, engine: Engine, tokens: list[int], **more: Any) -> None:
        super().__init__(engine, tokens, 0)
        self._tokens = tokens
        self._more = more

    def __enter__(self) -> "BackgroundMaterialize":
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self._engine.materialize(self._tokens, **self._more)
        except BaseException as error:
            self.error = error


def test_hash_is_xxh64_of_the_tokens(engine: Engine, noise: Noise) -> None:
    tokens = noise(1, 300)
    made = engine.materialize(tokens, tag="a tag")
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert made["tokens_hash"] == xxhash.xxh64_hexdigest(packed, seed=0)
    assert made["tag"] == "a tag"
    listed = engine.pool(made["seq"])
    for key in ("gen", "tag", "n_tokens", "tokens_hash", "parent_seq", "branch_pos"):
        assert listed[key] == made[key]


def test_finished_tasks_tell_what_was_reused(engine: Engine, noise: Noise) -> None:
    trunk = noise(1, 200)
    root = engine.materialize(trunk)
    engine.ask(trunk + noise(2, 20), 5, slot=1, pool=root["seq"])
    engine.full(noise(3, 30), 7, slot=2)
    pooled, alone = engine.stats()["finished"][-2:]
    fields = ("id_slot", "n_prompt", "n_cached", "n_pool", "n_decoded")
    assert [pooled[key] for key in fields] == [1, 220, 200, 200, 5]
    assert [alone[key] for key in fields] == [2, 30, 0, 0, 7]
    assert pooled["id_task"] < alone["id_task"]


def test_only_the_last_finished_tasks_are_kept(engine: Engine, noise: Noise) -> None:
    for seed in range(70):
        engine.ask(noise(seed, 5), 1, slot=seed % 4)
    tasks = engine.stats()["finished"]
    assert len(tasks) == 64
    assert [task["id_slot"] for task in tasks] == [seed % 4 for seed in range(6, 70)]


def test_slots_show_what_they_hold_and_do(engine: Engine, noise: Noise) -> None:
    trunk = noise(1, 200)
    root = engine.materialize(trunk)
    with Running(engine, trunk + noise(2, 20), 500, id_slot=3, shared_pool_slot=root["seq"]) as agent:
        slot = engine.slot(3)
        assert slot["state"] == "generating"
        assert (slot["n_prompt"], slot["n_cached"], slot["n_pool_shared"]) == (220, 200, 200)
        assert slot["pool_seq"] == root["seq"]
        assert slot["n_tokens"] >= 220
        agent.finished()
    slot = engine.slot(3)
    assert (slot["state"], slot["n_tokens"], slot["n_decoded_cum"]) == ("idle", 719, 500)
    assert slot["tps_ewma"] > 0
    assert [engine.slot(id_)["tps_ewma"] for id_ in (0, 1, 2)] == [None] * 3


def test_rate_is_the_rate_the_client_sees(engine: Engine, noise: Noise) -> None:
    """The server's own timing of the same answer, within a half: it is a window, not the mean."""
    done = engine.ask(noise(1, 50), 400, slot=0)
    tps = engine.slot(0)["tps_ewma"]
    assert tps == pytest.approx(done.body["timings"]["predicted_per_second"], rel=0.5)


def test_counters_only_grow(engine: Engine, noise: Noise) -> None:
    before = engine.stats()
    engine.ask(noise(1, 50), 10, slot=0)
    middle = engine.stats()
    engine.materialize(noise(2, 100))
    after = engine.stats()
    assert middle["n_decoded_cum"] - before["n_decoded_cum"] == 10
    assert middle["n_prompt_cum"] - before["n_prompt_cum"] == 50
    assert after["n_prompt_cum"] - middle["n_prompt_cum"] == 100
    assert after["n_decoded_cum"] == middle["n_decoded_cum"]


def test_facts_of_the_model_and_the_layout(engine: Engine) -> None:
    stats = engine.stats()
    assert stats["share"] == "ok"
    assert (stats["n_slots"], stats["max_pools"], stats["n_ctx_slot"]) == (4, 8, 8192)
    assert stats["kv_unified"] is True
    assert stats["recurrent"] is False
    assert stats["cells"] == {"used": 0, "total": 8192, "free": 8192, "hi": 0, "n_stream": 1}
    assert stats["model"]["n_vocab"] == 49152
    n_layer, n_embd_kv, f16 = 4, 64, 2
    assert stats["kv_bytes_per_token"] == 2 * n_layer * n_embd_kv * f16
    assert len(stats["slots"]) == 4
    assert len(engine.pools()) == 8


def test_fingerprint_tells_models_apart(launch: Launcher) -> None:
    one, again, other = (launch.pooled(model).stats()["model"]["fingerprint"] for model in ("dense", "dense", "hybrid"))
    assert one == again != other


def test_cells_are_fresh_after_every_operation(engine: Engine, noise: Noise) -> None:
    engine.warm(noise(1, 100), slot=0)
    assert engine.cells_used() == 100
    engine.post("/slots/0?action=save", {"filename": "x.bin"})
    engine.erase(0)
    assert engine.cells_used() == 0
    engine.post("/slots/1?action=restore", {"filename": "x.bin"})
    assert engine.cells_used() == 100
    engine.erase(1)
    assert engine.cells_used() == 0


def test_stock_metrics_and_slots_do_not_show_the_service_slot(launch: Launcher, noise: Noise) -> None:
    engine = launch.pooled("dense", "--metrics", "--slots")
    engine.materialize(noise(1, 50))
    assert [slot["id"] for slot in engine.http.get("/slots").json()] == [0, 1, 2, 3]
    metrics = engine.http.get("/metrics").text
    assert "llamacpp:requests_processing 0" in metrics


def test_flags_that_matter_beside_pools(launch: Launcher) -> None:
    """What an operator started, as it took effect: without a unified cache no idle slot is emptied."""
    asked = ("-b", "512", "--polykv-prefill-quota", "0", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "--context-shift")
    flags = launch.pooled("dense", *asked, "--cache-reuse", "16", "--sleep-idle-seconds", "900").stats()["flags"]
    assert flags["hosts"] == ["127.0.0.1"]
    assert (flags["n_batch"], flags["prefill_quota"], flags["cache_reuse"], flags["sleep_idle_s"]) == (512, 0, 16, 900)
    assert (flags["cache_type_k"], flags["cache_type_v"]) == ("q8_0", "q8_0")
    assert (flags["cache_ram_mib"], flags["cache_idle_slots"], flags["context_shift"]) == (8192, True, True)
    plain = launch("patched", "dense", "-c", "16384", "--parallel", "4", "--cache-ram", "0", *POOLS).stats()["flags"]
    assert (plain["cache_ram_mib"], plain["cache_idle_slots"], plain["context_shift"]) == (0, False, False)
    assert (plain["n_draft"], plain["n_lora"], plain["has_media"], plain["has_api_key"]) == (0, 0, False, False)
