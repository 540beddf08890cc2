"""Saving and loading that is refused: the status, what the message says, and that nothing has changed by it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from .conftest import POOLS, SMALL, Launcher
from .hooks import Engine, Json, Refused, Running
from .noise import Noise
from .pictures import CHAT, chat, seeing
from .tiny_models import SLIDING_WINDOW, write_tiny_projector

pytestmark = pytest.mark.engine

HOOK = "/polykv/engine/pools"
ROOT_LEN = 200
BRANCH_POS = 120
QUIET = ("--no-cache-idle-slots",)


@pytest.fixture(scope="module")
def shared(launch_shared: Launcher, noise: Noise) -> "Site":
    """One server for all that is refused, since nothing may change by it: a root, its branch, both saved; a slot."""
    engine = launch_shared("patched", "dense", "-c", "2048", "--parallel", "2", "--kv-unified", *QUIET, *POOLS)
    root = noise(1, ROOT_LEN)
    branch = root[:BRANCH_POS] + noise(2, 100)
    seq = engine.materialize(root)["seq"]
    child = engine.materialize(branch, parent=seq, branch_pos=BRANCH_POS)["seq"]
    other = engine.materialize([*root[:50], root[51], *root[51:]])["seq"]
    engine.save("root", seq=seq)
    engine.save("branch", seq=child, start=BRANCH_POS)
    engine.warm(noise(3, 60), slot=1)
    return Site(engine, seq, child, other)


@dataclass(frozen=True)
class Site:
    """``other``: a pool whose tokens part with the root's at 50."""

    engine: Engine
    root: int
    child: int
    other: int


def state_of(engine: Engine) -> Json:
    """All that an operation could have changed."""
    listing, stats = engine.listing(), engine.stats()
    cells = engine.post(HOOK, {"op": "cells"})
    return {"listing": listing, "cells": cells, "slots": stats["slots"], "saved": stats["saved"]}


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    before = state_of(shared.engine)
    yield shared
    assert state_of(shared.engine) == before


def refused(engine: Engine, body: dict[str, Any], status: int, said: str) -> Json:
    response = engine.http.post(HOOK, json=body)
    assert response.status_code == status, response.text
    error: Json = response.json()["error"]
    assert (error["code"], error["type"]) == (status, "polykv_error")
    assert said in error["message"]
    return error


# Arguments ---------------------------------------------------------------------------------------------------------

SAVE: Json = {"op": "save", "tag": "t", "seq": 3}
LOAD: Json = {"op": "load", "tag": "root"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tag": ""}, '"tag"'),
        ({"tag": "a/b"}, "slash"),
        ({"tag": "t" * 257}, "at most 256"),
        ({"tag": 7}, "must be a string"),
        ({"id_slot": 0}, 'exactly one of "seq" and "id_slot"'),
        ({"seq": -1}, 'exactly one of "seq" and "id_slot"'),
        ({"seq": 2}, "pool sequence"),  # the service slot's
        ({"seq": 11}, "pool sequence"),  # the spare one
        ({"seq": -1, "id_slot": 2}, "id_slot"),
        ({"from": -1}, "from"),
        ({"from": 1.5}, "from"),
        ({"from": 2**70}, "from"),
        ({"n_tokens": 0}, "n_tokens"),
        ({"n_tokens": -2}, "n_tokens"),
        ({"to": "tape"}, '"ram", "disk" or "both"'),
        ({"to": None, "from": []}, "from"),
    ],
    ids=str,
)
def test_arguments_of_a_save(site: Site, more: Json, said: str) -> None:
    refused(site.engine, SAVE | more, 400, said)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tag": None}, '"tag"'),
        ({"seq": 4, "id_slot": 0}, 'only one of "seq" and "id_slot"'),
        ({"seq": 11}, "pool sequence"),
        ({"id_slot": 2}, "id_slot"),
        ({"parent_seq": 0}, "parent_seq"),
        ({"parent_seq": 11}, "parent_seq"),
        ({"branch_pos": -2}, "branch_pos"),
        ({"branch_pos": "x"}, "branch_pos"),
    ],
    ids=str,
)
def test_arguments_of_a_load(site: Site, more: Json, said: str) -> None:
    refused(site.engine, LOAD | more, 400, said)


def test_a_tag_at_its_longest(shared: Site) -> None:
    tag = "a b%?#ü" + "t" * 248
    assert len(tag.encode()) == 256
    shared.engine.save(tag, seq=shared.root)
    loaded = shared.engine.load(tag)
    assert loaded["tag"] == tag
    shared.engine.free(loaded["seq"])
    assert shared.engine.forget(quote(tag, safe=""))["tag"] == tag


# What is there -----------------------------------------------------------------------------------------------------


def test_saving_what_is_not_there(site: Site) -> None:
    free = next(pool["seq"] for pool in site.engine.pools() if pool["state"] == "free")
    refused(site.engine, SAVE | {"seq": free}, 410, f"no pool in sequence {free}")
    for more in ({"from": ROOT_LEN}, {"n_tokens": ROOT_LEN + 1}, {"from": 50, "n_tokens": 50}):
        error = refused(site.engine, SAVE | {"seq": site.root} | more, 409, f"a sequence of {ROOT_LEN} tokens")
        assert error["n_tokens"] == ROOT_LEN
    empty = {"op": "save", "tag": "t", "id_slot": 0}
    assert refused(site.engine, empty, 409, "a sequence of 0 tokens")["n_tokens"] == 0


def test_places_that_this_server_does_not_have(site: Site, launch: Launcher) -> None:
    for to in ("disk", "both"):
        refused(site.engine, SAVE | {"seq": site.root, "to": to}, 501, "without --polykv-save-path")
    assert site.engine.stats()["saved"]["disk"] == {
        "bytes": 0,
        "max": 0,
        "why_off": "the server was started without --polykv-save-path",
    }
    nowhere = launch.pooled("dense", "--polykv-save-ram", "0")
    refused(nowhere, SAVE | {"seq": 5}, 501, "--polykv-save-ram or --polykv-save-path and --polykv-save-disk")


def test_loading_what_is_not_there(site: Site) -> None:
    refused(site.engine, LOAD | {"tag": "nobody"}, 410, "nothing is saved under 'nobody'")
    response = site.engine.http.delete("/polykv/engine/saved/nobody")
    assert response.status_code == 410
    assert response.json()["error"]["type"] == "polykv_error"


def test_parent_that_does_not_fit(site: Site) -> None:
    branch = {"op": "load", "tag": "branch"}
    free = next(pool["seq"] for pool in site.engine.pools() if pool["state"] == "free")
    for parent in (-1, free):
        refused(site.engine, branch | {"parent_seq": parent}, 410, f"no parent pool in sequence {parent}")
    error = refused(site.engine, branch | {"parent_seq": site.other}, 409, "the tokens differ from the parent at 50")
    assert error["divergence_pos"] == 50
    said = f"starts at {BRANCH_POS}, not at 100"
    assert refused(site.engine, branch | {"parent_seq": site.root, "branch_pos": 100}, 409, said)["from"] == BRANCH_POS
    refused(site.engine, LOAD | {"branch_pos": 100}, 409, "starts at 0, not at 100")
    for parent, pos in ((site.root, ROOT_LEN), (site.root, ROOT_LEN + 1)):
        refused(site.engine, LOAD | {"parent_seq": parent, "branch_pos": pos}, 409, f"starts at 0, not at {pos}")
    error = refused(
        site.engine, LOAD | {"parent_seq": site.other, "branch_pos": 51}, 409, "differ from the parent at 50"
    )
    assert error["divergence_pos"] == 50
    refused(site.engine, LOAD | {"parent_seq": free, "branch_pos": 50}, 410, f"no parent pool in sequence {free}")


def test_destination_that_is_taken(site: Site, noise: Noise) -> None:
    refused(site.engine, LOAD | {"seq": site.child}, 409, f"pool sequence {site.child} is in use")


def test_busy_slot(shared: Site, noise: Noise) -> None:
    """Loading into it is refused and does not disturb it."""
    prompt = noise(4, 20)
    alone = shared.engine.full(prompt, 400, slot=0)
    with Running(shared.engine, prompt, 400, id_slot=0, cache_prompt=False) as agent:
        refused(shared.engine, LOAD | {"id_slot": 0}, 409, "slot 0 is busy")
        assert agent.is_running(), "the refusal must have come while it ran"
    assert agent.finished()["content"] == alone.body["content"]
    shared.engine.clear(0)


def test_no_sequence_left(shared: Site) -> None:
    made = [shared.engine.load("root")["seq"] for pool in shared.engine.pools() if pool["state"] == "free"]
    refused(shared.engine, LOAD, 503, "no free pool sequence")
    for seq in made:
        shared.engine.free(seq)


def test_no_cells_left(shared: Site, noise: Noise) -> None:
    """Idle slots are not cleared for it, other than for a prefill: who orders it decides."""
    shared.engine.warm(noise(5, 1400), slot=0)
    before = state_of(shared.engine)
    error = refused(shared.engine, LOAD, 507, "not enough KV cells")
    assert (error["need"], error["free"]) == (ROOT_LEN, shared.engine.stats()["cells"]["free"])
    assert error["free"] < error["need"]
    assert state_of(shared.engine) == before
    refused(shared.engine, LOAD | {"id_slot": 1}, 507, "not enough KV cells")
    shared.engine.clear(0)
    shared.engine.free(shared.engine.load("root")["seq"])


def test_only_the_owner_changes_anything(launch: Launcher, noise: Noise) -> None:
    engine = launch.pooled("dense")
    seq = engine.materialize(noise(1, 50))["seq"]
    engine.save("mine", seq=seq)
    lease = engine.http.put("/polykv/engine/owner", json={"id": "me", "ttl_s": 60})
    assert lease.status_code == 200
    before = engine.listing()
    for body in (SAVE | {"seq": seq}, LOAD | {"tag": "mine"}, {"op": "clear", "id_slot": 0}):
        assert refused(engine, body, 409, "managed by 'me'")["owner"] == "me"
    assert engine.http.delete("/polykv/engine/saved/mine").status_code == 409
    assert engine.listing() == before
    mine = {"x-polykv-owner": "me"}
    assert engine.http.delete("/polykv/engine/saved/mine", headers=mine).status_code == 200


# Memory ------------------------------------------------------------------------------------------------------------


def test_budget_of_memory(launch: Launcher, noise: Noise) -> None:
    """The need and what is free are true; who saves the same tag again needs no second place; what is forgotten is
    free at once."""
    engine = launch.pooled("dense", "--polykv-save-ram", "1", *QUIET)
    one, two = (engine.materialize(noise(seed, 600))["seq"] for seed in (1, 2))
    first = engine.save("one", seq=one)
    usage = engine.stats()["saved"]["ram"]
    assert usage == {"bytes": first["bytes"], "max": 2**20}
    error = refused(engine, SAVE | {"seq": two}, 507, "not enough memory for saved states")
    assert (error["need"], error["free"]) == (first["bytes"], 2**20 - first["bytes"])
    assert engine.stats()["saved"]["ram"] == usage
    again = engine.save("one", seq=two)
    assert [state["tokens_hash"] for state in engine.saved()] == [again["tokens_hash"]]
    assert engine.forget("one")["saved"]["ram"]["bytes"] == 0
    engine.save("t", seq=two)
    assert sum(state["bytes"] for state in engine.saved()) == engine.stats()["saved"]["ram"]["bytes"]
    huge = engine.materialize(noise(3, 3000))["seq"]
    engine.forget("t")
    error = refused(engine, SAVE | {"seq": huge}, 507, "not enough memory for saved states")
    assert error["need"] > error["free"] == 2**20


def test_small_states_cost_what_they_take(launch: Launcher, noise: Noise) -> None:
    """Memory comes in blocks: what is counted is the memory, not the bytes in it."""
    engine = launch.pooled("dense", "--polykv-save-ram", "1", *QUIET)
    seq = engine.materialize(noise(1, 10))["seq"]
    for number in range(3):
        engine.save(f"small-{number}", seq=seq)
    refused(engine, SAVE | {"seq": seq}, 507, "not enough memory")


# Layouts and content that cannot be saved --------------------------------------------------------------------------


def test_split_cache(launch: Launcher, noise: Noise) -> None:
    engine = launch("patched", "dense", "-c", "32768", "--parallel", "4", "--no-kv-unified", "--polykv-max-pools", "6")
    root = engine.materialize(noise(1, 100))["seq"]
    refused(engine, SAVE | {"seq": root}, 501, "--kv-unified")
    refused(engine, {"op": "save", "tag": "t", "id_slot": 0}, 501, "--kv-unified")


def test_media(launch: Launcher, noise: Noise, tmp_path: Path) -> None:
    """What holds an image is refused; text on the same server is not."""
    projector = tmp_path / "mmproj.gguf"
    write_tiny_projector(projector)
    engine = launch("patched", "dense", *SMALL, *POOLS, "--mmproj", str(projector), *QUIET)
    engine.post(CHAT, chat("Look.", seeing(1)) | {"id_slot": 0})
    refused(engine, {"op": "save", "tag": "t", "id_slot": 0}, 501, "media")
    talk = noise(1, 100)
    done = engine.ask(talk, 9, slot=1)
    engine.save("talk", slot=1)
    engine.load("talk", id_slot=2)
    turn = talk + done.tokens + noise(2, 20)
    again = engine.ask(turn, 9, slot=2)
    assert (again.cache_n, again.tokens) == (108, engine.full(turn, 9, slot=3).tokens)


@pytest.mark.parametrize("model", ["hybrid", "recurrent"])
def test_state_that_is_not_at_its_end(launch: Launcher, noise: Noise, model: str) -> None:
    engine = launch.pooled(model)
    root = engine.materialize(noise(1, 100))["seq"]
    error = refused(engine, SAVE | {"seq": root, "n_tokens": 60}, 501, "cannot be cut at 60 tokens")
    assert error["n_tokens"] == 100


def test_window_that_lost_cells(launch: Launcher, noise: Noise) -> None:
    """Overwritten by others: neither saved nor loaded behind."""
    flags = ("-c", "1024", "--parallel", "4", "--kv-unified", "--swa-full", *QUIET)
    engine = launch("patched", "sliding", *flags, *POOLS)
    engine.warm(noise(10, 300), slot=1)
    trunk = noise(1, 400)
    root = engine.materialize(trunk)["seq"]
    child = engine.materialize(trunk[:100] + noise(2, 50), parent=root, branch_pos=100)["seq"]
    engine.save("child", seq=child, start=100)
    engine.free(child)
    engine.clear(1)
    engine.warm(noise(11, 380), slot=2)
    cells = engine.stats()["cells"]
    assert 0 < cells["used"] - cells["swa_used"] < 100, "some of the trunk's first cells were to be taken"
    before = state_of(engine)
    refused(engine, SAVE | {"seq": root, "n_tokens": 100}, 409, "lost cells")
    refused(engine, {"op": "load", "tag": "child", "parent_seq": root}, 409, "lost cells")
    assert state_of(engine) == before


def test_sliding_window_that_is_not_kept(launch: Launcher, noise: Noise) -> None:
    """Without --swa-full there are no pools, but a slot can be parked whole; not behind anything."""
    engine = launch("patched", "sliding", *SMALL, *POOLS, *QUIET)
    talk = noise(1, 600)
    done = engine.ask(talk, 9, slot=0)
    refused(engine, {"op": "save", "tag": "t", "id_slot": 0, "from": 100}, 501, "--swa-full")
    engine.save("talk", slot=0)
    refused(engine, {"op": "load", "tag": "talk"}, 501, "--swa-full")
    engine.warm(noise(2, 600), slot=1)
    engine.load("talk", id_slot=2)
    turn = talk + done.tokens + noise(3, 20)
    again = engine.ask(turn, 9, slot=2)
    assert again.cache_n >= 608 - SLIDING_WINDOW, "from the last checkpoint on: as llama-server restores a slot"
    assert again.tokens == engine.full(turn, 9, slot=3).tokens


def test_more_than_a_slot_may_hold(launch: Launcher, noise: Noise, tmp_path: Path) -> None:
    """Saved with a larger context than the next start has."""
    disk = ("--polykv-save-path", str(tmp_path / "states"), "--polykv-save-disk", "100")
    first = launch("patched", "dense", "-c", "4096", "--parallel", "2", "--kv-unified", *POOLS, *disk)
    first.save("long", seq=first.materialize(noise(1, 1500))["seq"], to="disk")
    first.server.kill()
    second = launch("patched", "dense", "-c", "1024", "--parallel", "2", "--kv-unified", *POOLS, *disk)
    error = refused(second, {"op": "load", "tag": "long"}, 400, "exceeds the context of a slot")
    assert (error["n_tokens"], error["n_ctx"]) == (1500, 1024)
    with pytest.raises(Refused):
        second.load("long", id_slot=0)
    assert second.cells_used() == 0
