"""Pools beside everything else llama-server does with its slots and its cache."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import POOLS, SMALL, Launcher, layout_flags
from .divergence import bound, mean_divergence
from .hooks import Answer, Engine, Refused, Running, answer
from .noise import Noise
from .tiny_models import tiny_model_path, write_tiny_lora

pytestmark = pytest.mark.engine

TRUNK_LEN = 400


@pytest.fixture
def engine(launch: Launcher) -> Engine:
    """The defaults of llama-server: host prompt cache on, idle slots emptied at every launch."""
    return launch.pooled("dense")


def finished(engine: Engine) -> list[dict[str, Any]]:
    tasks: list[dict[str, Any]] = engine.stats()["finished"]
    return tasks


def test_cells_do_not_grow_over_rounds_with_the_host_prompt_cache(engine: Engine, noise: Noise) -> None:
    """Four agents, three rounds, turns that take each other's slots: the prefix is never copied into private cells."""
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    used = []
    for round_ in range(3):
        for agent in range(4):
            done = engine.ask(trunk + noise(100 * round_ + agent, 40), 9, slot=agent, pool=root["seq"])
            assert (done.pool_n, done.cache_n) == (TRUNK_LEN, TRUNK_LEN)
        used.append(engine.cells_used())
    assert max(used) <= TRUNK_LEN + 4 * (40 + 8)
    assert len(set(used)) == 1


def test_conversation_grows_on_its_slot(engine: Engine, noise: Noise) -> None:
    """Turn after turn in one slot: the whole history is cached, and the pool's part of it stays shared."""
    history = noise(1, TRUNK_LEN)
    root = engine.materialize(history)
    for turn in range(4):
        prompt = history + noise(10 + turn, 25)
        done = engine.ask(prompt, 16, slot=2, pool=root["seq"])
        assert done.pool_n == TRUNK_LEN
        assert done.cache_n == (TRUNK_LEN if turn == 0 else len(history) - 1)
        assert done.tokens == engine.full(prompt, 16, slot=3).tokens
        history = prompt + done.tokens


@pytest.mark.parametrize("shared_n", [TRUNK_LEN, 250])
def test_children_of_one_request_share(engine: Engine, noise: Noise, shared_n: int) -> None:
    """n > 1: every choice shares with the pool, and the prompt is held once."""
    trunk, turn = noise(1, TRUNK_LEN), noise(2, 20)
    root = engine.materialize(trunk)
    body = {"prompt": trunk + turn, "n_predict": 9, "n_cmpl": 4, "temperature": 0, "ignore_eos": True}
    body |= {"shared_pool_slot": root["seq"], "shared_prefix_n_tokens": shared_n, "return_tokens": True}
    choices = engine.http.post("/completion", json=body).raise_for_status().json()
    assert len(choices) == 4
    assert len({tuple(choice["tokens"]) for choice in choices}) == 1
    assert [task["n_pool"] for task in finished(engine)] == [shared_n] * 4
    prompt_cells = TRUNK_LEN + len(turn) + (TRUNK_LEN - shared_n)
    assert engine.cells_used() <= prompt_cells + 4 * 9


def test_list_of_prompts_shares_one_pool(engine: Engine, noise: Noise) -> None:
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    prompts = [trunk + noise(2, 20), trunk[:100] + noise(3, 20), noise(4, 50)]
    body = {"prompt": prompts, "n_predict": 4, "temperature": 0, "shared_pool_slot": root["seq"]}
    replies = engine.http.post("/completion", json=body).raise_for_status().json()
    assert sorted(reply["timings"].get("pool_n", 0) for reply in replies) == [0, 100, TRUNK_LEN]


def test_cache_prompt_false_is_honoured(engine: Engine, noise: Noise) -> None:
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    done = engine.ask(trunk + noise(2, 20), 8, pool=root["seq"], cache_prompt=False)
    assert (done.pool_n, done.cache_n, done.prompt_n) == (0, 0, TRUNK_LEN + 20)


def test_whole_prompt_in_the_pool(engine: Engine, noise: Noise) -> None:
    """A prompt that is exactly the pool: its last token is evaluated again, since its logits are needed."""
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    done = engine.ask(trunk, 16, slot=0, pool=root["seq"])
    assert (done.pool_n, done.prompt_n) == (TRUNK_LEN - 1, 1)
    assert done.tokens == engine.full(trunk, 16, slot=1).tokens


def test_prompt_shorter_than_the_pool(engine: Engine, noise: Noise) -> None:
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    done = engine.ask(trunk[:100], 16, slot=0, pool=root["seq"])
    assert (done.pool_n, done.prompt_n) == (99, 1)
    assert done.tokens == engine.full(trunk[:100], 16, slot=1).tokens


def test_slot_that_changes_its_pool(engine: Engine, noise: Noise) -> None:
    one, two = noise(1, 300), noise(2, 200)
    first, second = engine.materialize(one), engine.materialize(two)
    for trunk, pool in ((one, first), (two, second), (one, first)):
        prompt = trunk + noise(3, 20)
        done = engine.ask(prompt, 16, slot=0, pool=pool["seq"])
        assert done.pool_n == len(trunk)
        assert engine.slot(0)["pool_seq"] == pool["seq"]
        assert done.tokens == engine.full(prompt, 16, slot=1).tokens
    assert [pool["n_attach"] for pool in engine.pools()[:2]] == [2, 1]


def test_save_restore_and_erase_of_a_slot_that_shares(engine: Engine, noise: Noise) -> None:
    """A restored slot holds private cells; the pool and its other sharers are untouched by all three."""
    trunk, turn, forced = noise(1, TRUNK_LEN), noise(2, 20), noise(3, 16)
    root = engine.materialize(trunk)
    engine.ask(trunk + turn, 8, slot=0, pool=root["seq"])
    before = engine.ask(trunk + turn, slot=1, pool=root["seq"], forced=forced)
    n_saved = engine.post("/slots/0?action=save", {"filename": "agent.bin"})["n_saved"]
    assert n_saved == TRUNK_LEN + 20 + 7
    engine.erase(0)
    assert engine.post("/slots/0?action=restore", {"filename": "agent.bin"})["n_restored"] == n_saved
    assert engine.slot(0)["n_pool_shared"] == 0
    again = engine.ask(trunk + turn + noise(4, 10), 4, slot=0)
    assert (again.cache_n, again.pool_n) == (TRUNK_LEN + 20, 0)
    engine.erase(1)
    after = engine.ask(trunk + turn, slot=1, pool=root["seq"], forced=forced)
    assert (after.pool_n, after.tokens) == (TRUNK_LEN, before.tokens)
    engine.erase(0)
    engine.erase(1)
    engine.free_all()
    assert engine.cells_used() == 0


def test_restored_slot_gives_up_its_copy_at_the_next_attach(engine: Engine, noise: Noise) -> None:
    trunk, turn = noise(1, TRUNK_LEN), noise(2, 20)
    root = engine.materialize(trunk)
    engine.warm(trunk + turn, slot=0)
    assert engine.cells_used() == 2 * TRUNK_LEN + 20
    prompt = trunk + turn + noise(3, 10)
    done = engine.ask(prompt, 16, slot=0, pool=root["seq"])
    assert done.pool_n == TRUNK_LEN
    assert done.cache_n == TRUNK_LEN + 20, "what it had beyond the pool is still used"
    assert engine.cells_used() == TRUNK_LEN + 20 + 10 + 15
    assert done.tokens == engine.full(prompt, 16, slot=1).tokens


def test_sleeping_engine_loses_its_pools_and_says_so(launch: Launcher, noise: Noise) -> None:
    engine = launch.pooled("dense", "--sleep-idle-seconds", "1")
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    epoch = engine.stats()["epoch"]
    deadline = time.monotonic() + 30
    while not engine.stats().get("sleeping"):
        assert time.monotonic() < deadline, "polling the stats must not keep it awake"
        time.sleep(0.2)
    assert engine.listing() == {"sleeping": True}, "reading must not wake it"
    prompt = trunk + noise(2, 20)
    stale = engine.ask(prompt, 8, pool=root["seq"], shared_pool_epoch=epoch, shared_pool_gen=root["gen"])
    assert stale.pool_n == 0
    assert engine.stats()["epoch"] != epoch
    assert {pool["state"] for pool in engine.pools()} == {"free"}
    again = engine.materialize(trunk)
    pooled = engine.ask(prompt, 8, slot=1, pool=again["seq"])
    assert (pooled.pool_n, pooled.tokens) == (TRUNK_LEN, stale.tokens)


def test_epoch_differs_between_two_starts(launch: Launcher) -> None:
    assert launch.pooled("dense").stats()["epoch"] != launch.pooled("dense").stats()["epoch"]


@pytest.mark.parametrize("model", ["dense", "sliding", "hybrid", "recurrent"])
def test_draft_model(launch: Launcher, noise: Noise, chat_model: Path, model: str) -> None:
    """Speculative decoding with the model as its own draft: every draft is right, so the draft's cache must be, too."""
    path = tiny_model_path(model, chat_model)
    engine = launch.pooled(model, "--spec-type", "draft-simple", "-md", str(path))
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    prompt = trunk + noise(2, 20)
    pooled = engine.ask(prompt, 48, slot=0, pool=root["seq"])
    full = engine.full(prompt, 48, slot=1)
    assert pooled.pool_n == TRUNK_LEN
    assert pooled.tokens == full.tokens
    accepted = pooled.body["timings"]["draft_n_accepted"] / pooled.body["timings"]["draft_n"]
    of_full = full.body["timings"]["draft_n_accepted"] / full.body["timings"]["draft_n"]
    assert accepted >= 0.9 * of_full > 0


def test_lora_that_the_pool_was_not_made_with(launch: Launcher, noise: Noise, tmp_path: Path) -> None:
    """Adapters change every cell: a request with another scale must not share, one with the same scale does."""
    adapter = tmp_path / "lora.gguf"
    write_tiny_lora(adapter)
    engine = launch.pooled("dense", "--lora", str(adapter))
    trunk, forced = noise(1, TRUNK_LEN), noise(3, 16)
    prompt = trunk + noise(2, 20)
    root = engine.materialize(trunk)
    same = engine.ask(prompt, slot=0, pool=root["seq"], forced=forced)
    assert same.pool_n == TRUNK_LEN
    other = engine.ask(prompt, slot=1, pool=root["seq"], forced=forced, lora=[{"id": 0, "scale": 0.0}])
    assert (other.pool_n, other.cache_n) == (0, 0)
    assert other.at == engine.full(prompt, slot=2, forced=forced, lora=[{"id": 0, "scale": 0.0}]).at
    assert other.at != same.at, "the adapter must matter"

    for scale, current in ((0.25, False), (1.0, True)):
        assert engine.http.post("/lora-adapters", json=[{"id": 0, "scale": scale}]).json() == {"success": True}
        assert engine.pool(root["seq"])["lora_current"] is current
        engine.erase(0)
        again = engine.ask(prompt, slot=0, pool=root["seq"], forced=forced)
        assert again.pool_n == (TRUNK_LEN if current else 0)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "bf16", "f32"])
def test_kv_types(launch: Launcher, noise: Noise, kind: str) -> None:
    """The bound of `test_same_answers`: a slot's own cache against a full prefill, on the same server without pools."""
    engine = launch.pooled("dense", "-ctk", kind, "-ctv", kind, "-fa", "on", "--no-cache-idle-slots")
    trunk, forced = noise(1, TRUNK_LEN), noise(3, 40)
    prompt = trunk + noise(2, 20)
    engine.warm(trunk, slot=1)
    own = engine.ask(prompt, forced=forced, slot=1)
    assert own.cache_n == TRUNK_LEN
    full = engine.full(prompt, forced=forced, slot=2)
    for slot in (1, 2):
        engine.erase(slot)

    root = engine.materialize(trunk)
    pooled = engine.ask(prompt, forced=forced, slot=0, pool=root["seq"])
    assert pooled.pool_n == TRUNK_LEN
    measured, allowed = mean_divergence(full.at, pooled.at), bound(mean_divergence(full.at, own.at))
    print(f"divergence {measured:.2e} nats, allowed {allowed:.2e}")
    assert measured <= allowed
    wrong = engine.full([trunk[1], *trunk[1:], *prompt[TRUNK_LEN:]], forced=forced, slot=3)
    assert mean_divergence(full.at, wrong.at) > 10 * allowed, "a wrong token must show"
    assert engine.stats()["kv_bytes_per_token"] > 0


@pytest.mark.parametrize("model", ["dense", "sliding", "hybrid", "recurrent"])
def test_split_cache_copies_and_answers_the_same(launch: Launcher, noise: Noise, model: str) -> None:
    """Without --kv-unified a share is a copy: nothing is prefilled, nothing is shared, the answer is the same."""
    engine = launch("patched", model, "-c", "16384", "--parallel", "4", *POOLS, *layout_flags(model))
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    has_cells = model != "recurrent"
    assert engine.cells_used() == has_cells * TRUNK_LEN
    for prompt in (trunk + noise(2, 20), trunk[:250] + noise(2, 20)):
        pooled = engine.ask(prompt, 24, slot=0, pool=root["seq"])
        assert engine.cells_used() == has_cells * (TRUNK_LEN + len(prompt) + 23)
        whole = prompt[:TRUNK_LEN] == trunk
        assert pooled.pool_n == 0
        assert pooled.cache_n == (TRUNK_LEN if whole else 250 if model in ("dense", "sliding") else 0)
        assert pooled.tokens == engine.full(prompt, 24, slot=1).tokens
        engine.erase(0)
        engine.erase(1)


def test_sliding_window_without_full_cache_is_refused(launch: Launcher, noise: Noise) -> None:
    """The message names the flag; a request that names a pool anyway is prefilled and answered right."""
    engine, stock = launch("patched", "sliding", *SMALL, *POOLS), launch("stock", "sliding", *SMALL)
    assert "--swa-full" in engine.stats()["share"]
    with pytest.raises(Refused) as refused:
        engine.materialize(noise(1, TRUNK_LEN))
    assert refused.value.response.status_code == 501
    assert "--swa-full" in refused.value.response.text
    prompt = noise(1, TRUNK_LEN) + noise(2, 20)
    done = engine.ask(prompt, 32, pool=engine.pools()[0]["seq"])
    assert (done.pool_n, done.prompt_n) == (0, len(prompt))
    assert done.tokens == stock.full(prompt, 32).tokens


def test_snapshot_of_a_slot_that_generates(engine: Engine, noise: Noise) -> None:
    """Taken in the middle of an answer, which goes on as if nothing had happened."""
    prompt = noise(1, TRUNK_LEN)
    quiet = engine.full(prompt, 400, slot=0)
    engine.erase(0)
    with Running(engine, prompt, 400, id_slot=0) as agent:
        taken = engine.snapshot(0, want_tokens=True)
        was_running = agent.is_running()
        assert agent.finished()["content"] == quiet.body["content"]
    assert was_running
    assert taken["tokens"][:TRUNK_LEN] == prompt
    assert taken["tokens"][TRUNK_LEN:] == quiet.tokens[: taken["n_tokens"] - TRUNK_LEN]
    branch = taken["tokens"] + noise(2, 10)
    done = engine.ask(branch, 16, slot=1, pool=taken["seq"])
    assert done.pool_n == taken["n_tokens"]
    assert done.tokens == engine.full(branch, 16, slot=2).tokens


def test_materialize_takes_no_agents_slot(engine: Engine, noise: Noise) -> None:
    """All slots hold a conversation and one of them runs: pools are made beside them."""
    for slot in range(4):
        engine.ask(noise(slot, 60), 2, slot=slot)
    with Running(engine, noise(9, 60), 500, id_slot=0) as agent:
        made = [engine.materialize(noise(20 + i, 200))["n_tokens"] for i in range(3)]
        assert agent.is_running()
        agent.finished()
    assert made == [200] * 3


def test_slot_ids_wrap_as_in_stock(launch: Launcher, noise: Noise) -> None:
    """The hidden slot is not one of them."""
    patched, stock = launch.pooled("dense"), launch.stock("dense")
    for id_slot in (4, 5, 9):
        theirs = stock.ask(noise(1, 20), 1, slot=id_slot).body["id_slot"]
        assert patched.ask(noise(1, 20), 1, slot=id_slot).body["id_slot"] == theirs
    assert patched.http.get("/props").json()["total_slots"] == 4
    assert len(patched.http.get("/slots").json()) == 4
    assert (
        patched.http.post("/slots/4?action=erase").status_code == stock.http.post("/slots/4?action=erase").status_code
    )


def test_answer_of_many_agents_at_once(engine: Engine, noise: Noise) -> None:
    """Four agents decode through one pool in the same batches; each reads what it reads alone."""
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    prompts = [trunk + noise(10 + agent, 20) for agent in range(4)]
    forced = noise(20, 40)
    alone = [engine.full(prompt, slot=slot, forced=forced).at for slot, prompt in enumerate(prompts)]
    for slot in range(4):
        engine.erase(slot)

    def ask(slot: int) -> Answer:
        return engine.ask(prompts[slot], slot=slot, pool=root["seq"], forced=forced)

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(ask, range(4)))
    assert [done.pool_n for done in together] == [TRUNK_LEN] * 4
    # Batches of four round otherwise than batches of one; another agent's text would be a thousand times as far.
    assert max(mean_divergence(a, done.at) for a, done in zip(alone, together, strict=True)) < 1e-4


def test_request_fields_by_epoch_and_generation(engine: Engine, noise: Noise) -> None:
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)
    epoch, gen = engine.stats()["epoch"], root["gen"]
    for fields, shared in (
        ({"shared_pool_epoch": epoch, "shared_pool_gen": gen}, True),
        ({"shared_pool_epoch": "another-1", "shared_pool_gen": gen}, False),
        ({"shared_pool_epoch": epoch, "shared_pool_gen": gen + 1}, False),
        # A sequence of an earlier start with more pools: out of range here, and not an error, since the epoch tells.
        ({"shared_pool_epoch": "another-1", "shared_pool_slot": 999}, False),
    ):
        engine.erase(0)
        body = {"prompt": trunk + noise(2, 10), "n_predict": 1, "id_slot": 0, "shared_pool_slot": root["seq"]}
        done = answer(engine.post("/completion", body | {"return_tokens": True} | fields))
        assert done.pool_n == (TRUNK_LEN if shared else 0), fields
