"""A state in memory and on disk: written later than it was saved, and forgotten in one place or the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import Launcher
from .hooks import Engine, Json, Running
from .noise import Noise
from .state_files import StateFile, disk, state_files
from .test_saved_errors import refused, state_of
from .tiny_models import write_tiny_lora

pytestmark = pytest.mark.engine

HOOK = "/polykv/engine/pools"
ROOT_LEN = 200
QUIET = ("--no-cache-idle-slots",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "states"


@pytest.fixture
def engine(launch: Launcher, folder: Path) -> Engine:
    return launch.pooled("dense", *disk(folder), *QUIET)


def write(tag: str) -> Json:
    return {"op": "save", "tag": tag, "to": "disk"}


def places(engine: Engine, tag: str) -> list[str]:
    return [state["in"] for state in engine.saved() if state["tag"] == tag]


# Written later -----------------------------------------------------------------------------------------------------


def test_what_is_in_memory_is_written_while_its_slot_goes_on(
    engine: Engine, launch: Launcher, folder: Path, noise: Noise
) -> None:
    """The file is what was saved then, to the last byte, whatever its slot and its parent hold now."""
    root = engine.materialize(noise(1, ROOT_LEN))["seq"]
    talk = noise(1, ROOT_LEN) + noise(2, 50)
    engine.warm(talk, slot=0)
    engine.save("then", slot=0, start=ROOT_LEN, n_tokens=240, to="disk")
    kept = engine.save("talk", slot=0, start=ROOT_LEN, n_tokens=240)
    engine.free(root)
    with Running(engine, noise(3, 50), 60, id_slot=0) as agent:
        written = engine.post(HOOK, write("talk"))
        assert agent.is_running(), "it was to be written while the slot is busy"
    assert agent.finished()["tokens_predicted"] == 60
    unlike = {"t_ms", "t_copy_ms", "t_write_ms", "cells", "in"}
    assert written["in"] == ["ram", "disk"]
    assert {key: value for key, value in written.items() if key not in unlike} == {
        key: value for key, value in kept.items() if key not in unlike
    }
    assert written.keys() == kept.keys() | {"t_write_ms"}
    assert places(engine, "talk") == ["ram", "disk"]
    then, later = (StateFile.read(state_files(folder)[tag]) for tag in ("then", "talk"))
    assert (later.header | {"tag": "then"}, later.parts) == (then.header, then.parts)
    engine.server.kill()
    again = launch.pooled("dense", *disk(folder), *QUIET)
    root = again.materialize(noise(1, ROOT_LEN))["seq"]
    assert again.load("talk", parent=root, id_slot=1)["n_tokens"] == 240


def test_only_what_is_in_memory_can_be_written(engine: Engine, folder: Path, noise: Noise) -> None:
    seq = engine.materialize(noise(1, ROOT_LEN))["seq"]
    engine.save("file", seq=seq, to="disk")
    engine.save("memory", seq=seq)
    before = state_of(engine)
    refused(engine, write("nobody"), 410, "nothing is saved under 'nobody' in memory")
    refused(engine, write("file"), 410, "nothing is saved under 'file' in memory")
    for to in ("ram", "both"):
        refused(engine, write("memory") | {"to": to}, 400, 'exactly one of "seq" and "id_slot"')
    for more in ({"from": 10}, {"n_tokens": 10}):
        refused(engine, write("memory") | more, 400, "is written whole")
    assert state_of(engine) == before
    engine.post(HOOK, write("memory") | {"seq": -1, "id_slot": None, "from": 0, "n_tokens": -1})
    assert places(engine, "memory") == ["ram", "disk"]


def test_no_room_and_no_disk(launch: Launcher, folder: Path, noise: Noise) -> None:
    """Asked for the disk alone, an error is the answer; the copy in memory stays."""
    engine = launch.pooled("dense", *disk(folder, mib=1), *QUIET)
    engine.save("large", seq=engine.materialize(noise(1, 1200))["seq"])
    before = state_of(engine)
    error = refused(engine, write("large"), 507, "not enough disk for saved states")
    assert error["need"] > error["free"] == 2**20
    assert state_of(engine) == before
    nowhere = launch.pooled("dense")
    nowhere.save("t", seq=nowhere.materialize(noise(1, 50))["seq"])
    refused(nowhere, write("t"), 501, "saved states have no disk: the server was started without --polykv-save-path")
    nothing = launch.pooled("dense", "--polykv-save-ram", "0")
    refused(nothing, write("t"), 501, "--polykv-save-ram or --polykv-save-path and --polykv-save-disk")


def test_adapters(launch: Launcher, folder: Path, noise: Noise, tmp_path: Path) -> None:
    adapter = tmp_path / "lora.gguf"
    write_tiny_lora(adapter)
    engine = launch.pooled("dense", "--lora", str(adapter), *disk(folder), *QUIET)
    engine.save("t", seq=engine.materialize(noise(1, 50))["seq"])
    refused(engine, write("t"), 501, "adapters is kept in memory only")
    assert state_files(folder) == {}


@pytest.mark.parametrize("change", ["save", "forget", "forget on disk"])
def test_changed_while_it_is_written(engine: Engine, folder: Path, noise: Noise, change: str) -> None:
    """Whoever comes first: the disk never has what memory does not have any more, and who wrote is told."""
    one, two = (engine.materialize(noise(seed, 2000))["seq"] for seed in (1, 2))
    changes: dict[str, Callable[[], object]] = {
        "save": lambda: engine.save("t", seq=two),
        "forget": lambda: engine.forget("t"),
        "forget on disk": lambda: engine.http.delete("/polykv/engine/saved/t?in=disk"),
    }
    with ThreadPoolExecutor(1) as threads:
        for _ in range(12):
            engine.save("t", seq=one)
            writing = threads.submit(engine.http.post, HOOK, json=write("t"))
            changes[change]()
            status = writing.result().status_code
            in_ram = {state["tokens_hash"] for state in engine.saved() if state["in"] == "ram"}
            in_file = {state["tokens_hash"] for state in engine.saved() if state["in"] == "disk"}
            assert len(in_ram) == (change != "forget")
            assert in_file <= in_ram
            assert status == 200 if in_file else status in (200, 410)
            assert len(list(folder.glob("*.state*"))) == len(in_file)


# Forgotten in one place --------------------------------------------------------------------------------------------


def test_forgotten_in_one_place(engine: Engine, folder: Path, noise: Noise) -> None:
    seq = engine.materialize(noise(1, ROOT_LEN))["seq"]
    for tag in ("a", "b", "c"):
        engine.save(tag, seq=seq, to="both")
    usage = engine.stats()["saved"]
    assert engine.forget("a?in=disk") == {
        "tag": "a",
        "saved": {
            "ram": usage["ram"],
            "disk": usage["disk"] | {"bytes": usage["disk"]["bytes"] * 2 // 3},
        },
    }
    assert state_files(folder).keys() == {"b", "c"}
    assert engine.forget("b?in=ram")["saved"]["ram"]["bytes"] == usage["ram"]["bytes"] * 2 // 3
    engine.forget("c")
    assert [(state["tag"], state["in"]) for state in engine.saved()] == [("a", "ram"), ("b", "disk")]
    for tag in ("a", "b"):
        assert engine.load(tag)["n_tokens"] == ROOT_LEN


def test_forgetting_what_is_not_there(engine: Engine, noise: Noise) -> None:
    seq = engine.materialize(noise(1, 50))["seq"]
    engine.save("memory", seq=seq)
    engine.save("file", seq=seq, to="disk")
    before = state_of(engine)
    for asked, status, said in (
        ("memory?in=disk", 410, "nothing is saved under 'memory' on disk"),
        ("file?in=ram", 410, "nothing is saved under 'file' in memory"),
        ("memory?in=tape", 400, '"in" must be "ram" or "disk"'),
        ("memory?in=both", 400, '"in" must be "ram" or "disk"'),
        ("memory?in=", 400, '"in" must be "ram" or "disk"'),
    ):
        response = engine.http.delete(f"/polykv/engine/saved/{asked}")
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (status, status, "polykv_error")
        assert said in error["message"]
    assert state_of(engine) == before
