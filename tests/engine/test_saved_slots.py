"""Slots that are saved and loaded: parked sessions, and everything else that is in use beside them."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import Launcher
from .hooks import Answer, Engine, Json, Running
from .noise import Noise
from .state_files import disk
from .test_saved_errors import refused
from .tiny_models import tiny_model_path, write_tiny_lora

pytestmark = pytest.mark.engine

TRUNK_LEN = 300
N_ANSWER = 9
QUIET = ("--no-cache-idle-slots",)


@pytest.fixture
def dense(launch: Launcher) -> Engine:
    return launch.pooled("dense", *QUIET)


def assert_next_turn(engine: Engine, history: list[int], slot: int, pool: int, noise: Noise) -> Answer:
    """The slot has the history but for its last token, behind the pool's prefix; the answer is right."""
    turn = history + noise(90, 20)
    done = engine.ask(turn, N_ANSWER, slot=slot, pool=pool)
    assert (done.pool_n, done.cache_n, done.prompt_n) == (TRUNK_LEN, len(history) - 1, 21)
    assert done.tokens == engine.full(turn, N_ANSWER, slot=3).tokens
    return done


@pytest.mark.parametrize("model", ["dense", "sliding", "hybrid"])
def test_parked_session_goes_on_in_another_slot(launch: Launcher, noise: Noise, model: str) -> None:
    """Parked out of slot 0, which others then use, and loaded into slot 2 behind its pool: the next turn prefills only
    what is new, and so does the one after it."""
    engine = launch.pooled(model, *QUIET)
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)["seq"]
    history = trunk + noise(2, 60)
    history += engine.ask(history, N_ANSWER, slot=0, pool=root).tokens
    saved = engine.save("talk", slot=0, start=TRUNK_LEN)
    assert (saved["from"], saved["n_tokens"]) == (TRUNK_LEN, len(history) - 1)
    engine.clear(0)
    engine.warm(noise(3, 200), slot=0)
    engine.warm(noise(4, 200), slot=2)

    loaded = engine.load("talk", parent=root, id_slot=2)
    assert (loaded["id_slot"], loaded["n_tokens"]) == (2, len(history) - 1)
    assert (loaded["parent_seq"], loaded["branch_pos"], loaded["n_pool_shared"]) == (root, TRUNK_LEN, TRUNK_LEN)
    shown = engine.slot(2)
    assert (shown["pool_seq"], shown["n_pool_shared"], shown["n_tokens"]) == (root, TRUNK_LEN, len(history) - 1)
    assert engine.cells_used() == TRUNK_LEN + 200 + len(history) - 1 - TRUNK_LEN
    done = assert_next_turn(engine, history, 2, root, noise)
    assert_next_turn(engine, history + noise(90, 20) + done.tokens, 2, root, noise)


def test_session_without_a_pool(dense: Engine, noise: Noise) -> None:
    talk = noise(1, 100)
    talk += dense.ask(talk, N_ANSWER, slot=0).tokens
    dense.save("talk", slot=0)
    dense.clear(0)
    loaded = dense.load("talk", id_slot=1)
    assert (loaded["parent_seq"], loaded["branch_pos"], loaded["n_pool_shared"]) == (-1, 0, 0)
    turn = talk + noise(2, 20)
    done = dense.ask(turn, N_ANSWER, slot=1)
    assert (done.cache_n, done.tokens) == (len(talk) - 1, dense.full(turn, N_ANSWER, slot=2).tokens)


def test_one_state_in_a_pool_and_in_slots(dense: Engine, noise: Noise) -> None:
    """What was saved of a slot can become a pool, and the other way round."""
    trunk = noise(1, TRUNK_LEN)
    dense.warm(trunk, slot=0)
    dense.save("state", slot=0, n_tokens=TRUNK_LEN)
    dense.clear(0)
    pool = dense.load("state")
    dense.load("state", id_slot=1)
    dense.load("state", id_slot=2)
    assert dense.cells_used() == 3 * TRUNK_LEN
    turn = trunk + noise(2, 20)
    right = dense.full(turn, N_ANSWER, slot=3).tokens
    assert [dense.ask(turn, N_ANSWER, slot=slot).tokens for slot in (1, 2)] == [right, right]
    assert dense.ask(turn, N_ANSWER, slot=0, pool=pool["seq"]).tokens == right


@pytest.mark.parametrize("model", ["dense", "sliding", "hybrid", "recurrent"])
def test_saved_while_it_generates(launch: Launcher, noise: Noise, model: str) -> None:
    """Its answer is not changed by it, and the copy goes on as the original did."""
    engine = launch.pooled(model, *QUIET)
    prompt = noise(1, 60)
    whole = engine.full(prompt, 300, slot=0)
    copies: list[Json] = []
    with Running(engine, prompt, 300, id_slot=0, cache_prompt=False) as agent:
        while agent.is_running() and (not copies or copies[-1]["n_tokens"] < copies[0]["n_tokens"] + 20):
            copies.append(engine.save(f"copy-{len(copies)}", slot=0))
        assert agent.is_running(), "it was to be saved while it ran"
    assert agent.finished()["content"] == whole.body["content"]

    everything = prompt + whole.tokens
    for copy in (copies[0], copies[-1]):
        n_tokens = copy["n_tokens"]
        engine.load(copy["tag"], id_slot=1)
        done = engine.ask(everything[: n_tokens + 1], N_ANSWER, slot=1)
        assert (done.cache_n, done.prompt_n) == (n_tokens, 1)
        assert done.tokens == everything[n_tokens + 1 :][:N_ANSWER]


def test_prompt_that_has_not_begun(dense: Engine, noise: Noise) -> None:
    """The slot still holds what it held before, under the tokens of a new task: which of both would be saved?"""
    long = {"prompt": noise(1, 6000), "n_predict": 0, "id_slot": 0}
    short = {"prompt": noise(2, 50), "n_predict": 1, "id_slot": 1}
    save = {"op": "save", "tag": "t", "id_slot": 1}
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(dense.post, "/completion", long)
        while dense.slot(0)["state"] != "prompt":
            assert not first.done()
        second = threads.submit(dense.post, "/completion", short)
        while dense.slot(1)["state"] != "started":
            assert not second.done()
        refused(dense, save, 409, "has not started its prompt")


def test_draft_model(launch: Launcher, noise: Noise, chat_model: Path) -> None:
    """The model as its own draft: drafts are accepted as before only if the draft's cache came back, too."""
    path = tiny_model_path("dense", chat_model)
    engine = launch.pooled("dense", "--spec-type", "draft-simple", "-md", str(path), *QUIET)
    trunk = noise(1, TRUNK_LEN)
    root = engine.materialize(trunk)["seq"]
    prompt = trunk + noise(2, 20)
    before = engine.ask(prompt, 48, slot=0, pool=root)
    saved = engine.save("root", seq=root)
    assert saved["bytes"] > 2 * 300 * 1024, "cells of both"
    engine.free(root)
    engine.clear(0)
    loaded = engine.load("root")["seq"]
    after = engine.ask(prompt, 48, slot=0, pool=loaded)
    assert (after.pool_n, after.tokens) == (TRUNK_LEN, before.tokens)
    drafts = [done.body["timings"]["draft_n_accepted"] / done.body["timings"]["draft_n"] for done in (before, after)]
    assert drafts[1] >= 0.9 * drafts[0] > 0

    engine.save("talk", slot=0, start=TRUNK_LEN)
    engine.clear(0)
    engine.load("talk", parent=loaded, id_slot=1)
    turn = prompt + after.tokens + noise(3, 20)
    parked = engine.ask(turn, 48, slot=1)
    full = engine.full(turn, 48, slot=2)
    assert (parked.prompt_n, parked.tokens) == (21, full.tokens)
    drafts = [done.body["timings"]["draft_n_accepted"] / done.body["timings"]["draft_n"] for done in (full, parked)]
    assert drafts[1] >= 0.9 * drafts[0] > 0


def test_adapters(launch: Launcher, noise: Noise, tmp_path: Path) -> None:
    """Kept in memory with what it was computed with: refused behind a pool of other adapters, and for a slot when they
    are not those of the requests to come. Files do not know adapters, so they are refused."""
    adapter = tmp_path / "lora.gguf"
    write_tiny_lora(adapter)
    folder = tmp_path / "states"
    engine = launch.pooled("dense", "--lora", str(adapter), *disk(folder), *QUIET)
    trunk = noise(1, TRUNK_LEN)
    branch = trunk[:200] + noise(2, 50)
    root = engine.materialize(trunk)["seq"]
    child = engine.materialize(branch, parent=root, branch_pos=200)["seq"]
    engine.save("root", seq=root)
    engine.save("child", seq=child, start=200)
    for to in ("disk", "both"):
        refused(engine, {"op": "save", "tag": "t", "seq": root, "to": to}, 501, "kept in memory only")
    prompt = branch + noise(3, 20)
    right = engine.full(prompt, N_ANSWER, slot=1).tokens
    engine.free_all()
    root = engine.load("root")["seq"]
    child = engine.load("child", parent=root)["seq"]
    same = engine.ask(prompt, N_ANSWER, slot=0, pool=child)
    assert (same.pool_n, same.tokens) == (250, right)

    engine.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}]).raise_for_status()
    assert engine.pool(child)["lora_current"] is False
    assert engine.ask(prompt, N_ANSWER, slot=1, pool=child).pool_n == 0
    other = engine.materialize(trunk)["seq"]
    refused(engine, {"op": "load", "tag": "child", "parent_seq": other}, 409, "other lora adapters")
    refused(engine, {"op": "load", "tag": "root", "id_slot": 0}, 409, "other lora adapters than requests have now")


def asleep(engine: Engine) -> None:
    deadline = time.monotonic() + 30
    while not engine.stats().get("sleeping"):
        assert time.monotonic() < deadline, "never asleep"
        time.sleep(0.1)


def test_sleep(launch: Launcher, noise: Noise, tmp_path: Path) -> None:
    """The cache is gone, what was saved is not; but with adapters: they are loaded anew, and told apart by where they
    are."""
    adapter = tmp_path / "lora.gguf"
    write_tiny_lora(adapter)
    nap = ("--sleep-idle-seconds", "1")
    plain = launch.pooled("dense", *nap, *disk(tmp_path / "states"), *QUIET)
    adapted = launch.pooled("dense", *nap, "--lora", str(adapter), *QUIET)
    trunk = noise(1, TRUNK_LEN)
    for engine in (plain, adapted):
        seq = engine.materialize(trunk)["seq"]
        engine.save("root", seq=seq)
    plain.save("file", seq=plain.pools()[0]["seq"], to="disk")
    epoch = plain.stats()["epoch"]
    for engine in (plain, adapted):
        asleep(engine)
        assert engine.stats() == {"sleeping": True}
    loaded = plain.load("root")
    assert plain.stats()["epoch"] != epoch
    assert plain.load("file")["tokens_hash"] == loaded["tokens_hash"]
    assert {state["tag"] for state in plain.saved()} == {"root", "file"}
    plain.save("file", seq=loaded["seq"], to="disk")
    prompt = trunk + noise(2, 20)
    done = plain.ask(prompt, N_ANSWER, slot=0, pool=loaded["seq"])
    assert (done.pool_n, done.tokens) == (TRUNK_LEN, plain.full(prompt, N_ANSWER, slot=1).tokens)
    refused(adapted, {"op": "load", "tag": "root"}, 410, "nothing is saved")
    assert adapted.saved() == []
