"""Saved states on a disk that is full, slow, gone, or full of somebody else's.

Files of another model, build or layout of the cache are refused and kept for whom they belong to, until the budget
needs their room.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .binaries import binary_path
from .conftest import POOLS, SMALL, Launcher
from .harness import EngineServer
from .hooks import Engine, Json, Running
from .noise import Noise
from .state_files import EMPTY_HEADER, ONE_TOKEN, StateFile, contents, disk, name_of, state_files
from .test_saved_errors import refused

pytestmark = pytest.mark.engine

ROOT_LEN = 200
QUIET = ("--no-cache-idle-slots",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "states"


@pytest.fixture
def engine(launch: Launcher, folder: Path) -> Engine:
    return launch.pooled("dense", *disk(folder), *QUIET)


def on_disk(engine: Engine) -> dict[str, Json]:
    return {state["tag"]: state for state in engine.saved() if state["in"] == "disk"}


# Somebody else's --------------------------------------------------------------------------------------------------


def test_foreign_files(engine: Engine, launch: Launcher, folder: Path, noise: Noise, dense_path: Path) -> None:
    """Of another model, type of cells, rope, layout, adapter-like change of weights: listed as unusable, refused, kept,
    and right again for whom they belong to."""
    trunk = noise(1, ROOT_LEN)
    engine.save("root", seq=engine.materialize(trunk)["seq"], to="disk")
    engine.server.kill()
    kept = contents(folder)
    others: dict[str, tuple[str, ...]] = {
        "kv type": ("-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"),
        "rope": ("--rope-freq-base", "54321"),
        "layout of values": ("-fa", "off"),
        "weights": ("--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.001"),
    }
    for what, flags in others.items():
        other = launch.pooled("dense", *flags, *disk(folder))
        assert [state["usable"] for state in other.saved()] == [False], what
        refused(other, {"op": "load", "tag": "root"}, 409, "another model, build or cache layout")
        assert other.cells_used() == 0
        other.server.kill()
    assert contents(folder) == kept
    again = launch.pooled("dense", *disk(folder), "--parallel", "2", "-c", "4096", *QUIET)
    assert [state["usable"] for state in again.saved()] == [True]
    assert again.load("root")["n_tokens"] == ROOT_LEN


def test_model_that_was_written_anew(
    launch: Launcher, folder: Path, noise: Noise, tmp_path: Path, dense_path: Path
) -> None:
    """Name, size and vocabulary are the same, and one bit of a weight is not."""
    mine = tmp_path / "model.gguf"
    shutil.copy(dense_path, mine)

    def start() -> Engine:
        flags = (*SMALL, *POOLS, *disk(folder))
        return launch.own(EngineServer(binary_path("patched"), mine, *flags, log_dir=tmp_path))

    first = start()
    first.save("root", seq=first.materialize(noise(1, 50))["seq"], to="disk")
    first.server.stop()
    same = start()
    assert [state["usable"] for state in same.saved()] == [True]
    same.server.stop()
    raw = bytearray(mine.read_bytes())
    raw[-100_000] ^= 1
    mine.write_bytes(raw)
    assert [state["usable"] for state in start().saved()] == [False]


def test_room_is_made_of_what_cannot_be_used(launch: Launcher, folder: Path, noise: Noise) -> None:
    """Foreign files go first, oldest first, when the budget needs them; usable ones never."""
    folder.mkdir()
    for number in range(3):
        path = folder / name_of(number)
        header = EMPTY_HEADER | {"tag": f"foreign-{number}", "n_tgt": 300_000}
        path.write_bytes(StateFile(header, ONE_TOKEN + bytes(300_000)).raw())
        os.utime(path, (1e9 + number, 1e9 + number))
    engine = launch.pooled("dense", *disk(folder, mib=1), *QUIET)
    seq = engine.materialize(noise(1, 300))["seq"]
    assert on_disk(engine).keys() == {"foreign-0", "foreign-1", "foreign-2"}
    engine.save("one", seq=seq, to="disk")
    assert on_disk(engine).keys() == {"foreign-1", "foreign-2", "one"}
    engine.save("two", seq=seq, to="disk")
    engine.save("three", seq=seq, to="disk")
    assert on_disk(engine).keys() == state_files(folder).keys() == {"one", "two", "three"}
    before = contents(folder)
    usage = engine.stats()["saved"]["disk"]
    error = refused(engine, {"op": "save", "tag": "four", "seq": seq, "to": "disk"}, 507, "not enough disk")
    assert error["free"] == usage["max"] - usage["bytes"]
    assert error["free"] < error["need"] <= usage["bytes"]
    assert contents(folder) == before
    both = engine.save("four", seq=seq, to="both")
    assert both["in"] == ["ram"], "memory has it all the same"
    assert (both["disk_error"]["code"], both["disk_error"]["free"]) == (507, error["free"])
    engine.save("three", seq=seq, start=10, to="disk")
    assert on_disk(engine)["three"]["from"] == 10, "the same tag has its own place"


def test_smaller_budget_at_the_next_start(launch: Launcher, folder: Path, noise: Noise) -> None:
    """The oldest go."""
    first = launch.pooled("dense", *disk(folder), *QUIET)
    for seed, tag in enumerate(("old", "older", "new")):
        seq = first.materialize(noise(seed, 450))["seq"]
        first.save(tag, seq=seq, to="disk")
    first.server.stop()
    files = state_files(folder)
    for age, tag in enumerate(("new", "old", "older")):
        os.utime(files[tag], (1e9 - age, 1e9 - age))
    second = launch.pooled("dense", *disk(folder, mib=1))
    assert [state["tag"] for state in second.saved()] == ["old", "new"]
    assert state_files(folder).keys() == {"old", "new"}


def test_budget_that_is_taken_away(engine: Engine, launch: Launcher, folder: Path, noise: Noise) -> None:
    """The next start without one removes the files, of other models too: prompts that nobody would look for again. What
    is not the engine's stays, and so does all of it while another server has the folder."""
    seq = engine.materialize(noise(1, ROOT_LEN))["seq"]
    engine.save("one", seq=seq, to="disk")
    engine.save("two", seq=seq, to="disk")
    (folder / name_of(1)).write_bytes(StateFile(EMPTY_HEADER, ONE_TOKEN).raw())
    (folder / (name_of(2) + ".tmp")).write_bytes(bytes(3 * 2**20))
    theirs = ["notes.txt", "other.state", "0123.state", "other.state.tmp", name_of(3), name_of(4)]
    for name in theirs[:-2]:
        (folder / name).write_text("not ours")
    (folder / name_of(3)).mkdir()
    (folder / name_of(4)).symlink_to(folder / "notes.txt")
    before = {path.name for path in folder.iterdir()}

    def start() -> Engine:
        other = launch.pooled("dense", "--polykv-save-path", str(folder))
        without = {"bytes": 0, "max": 0, "why_off": "the server was started without --polykv-save-disk"}
        assert other.stats()["saved"]["disk"] == without
        return other

    busy = start()
    assert {path.name for path in folder.iterdir()} == before
    assert f"are left there: another server uses {folder}/polykv.lock" in busy.server.log()
    engine.server.kill()
    mib = sum((folder / name).lstat().st_size for name in before - {*theirs, "polykv.lock"}) / 2**20
    alone = start()
    assert {path.name for path in folder.iterdir()} == {*theirs, "polykv.lock"}
    assert f"saved states in {folder}: removed 4 files, {mib:.1f} MiB" in alone.server.log()
    later = launch.pooled("dense", *disk(folder))
    later.save("t", seq=later.materialize(noise(1, 50))["seq"], to="disk")
    assert on_disk(later).keys() == {"t"}, "who has no budget does not keep others from it"


def test_folder_without_states_is_left_as_it_is(launch: Launcher, folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("not ours")
    launch.pooled("dense", "--polykv-save-path", str(folder))
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


# The disk ----------------------------------------------------------------------------------------------------------


def test_folder_that_goes_away(engine: Engine, folder: Path, noise: Noise) -> None:
    """Disk only: refused. Both: memory has it, and the reason is told. The server lives and goes on."""
    seq = engine.materialize(noise(1, ROOT_LEN))["seq"]
    engine.save("root", seq=seq, to="both")
    shutil.move(folder, folder.with_name("away"))
    refused(engine, {"op": "save", "tag": "t", "seq": seq, "to": "disk"}, 507, "cannot create")
    both = engine.save("u", seq=seq, to="both")
    assert (both["in"], both["disk_error"]["code"]) == (["ram"], 507)
    assert {state["tag"] for state in engine.saved()} == {"root", "u"}
    assert engine.load("root")["n_tokens"] == ROOT_LEN
    shutil.move(folder.with_name("away"), folder)
    engine.save("t", seq=seq, to="disk")
    assert state_files(folder).keys() == {"root", "t"}


def test_disk_that_is_full(launch: Launcher, folder: Path, noise: Noise, tmp_path: Path, dense_path: Path) -> None:
    """A file that cannot be finished leaves nothing behind. (A limit on the size of files stands for the full disk.)"""
    server = EngineServer(binary_path("patched"), dense_path, *SMALL, *POOLS, *disk(folder), log_dir=tmp_path)
    server.command = ["sh", "-c", 'trap "" XFSZ; ulimit -f 2048; exec "$@"', "sh", *server.command]
    engine = launch.own(server)
    small, large = (engine.materialize(noise(n, n))["seq"] for n in (200, 4000))
    error = refused(engine, {"op": "save", "tag": "large", "seq": large, "to": "disk"}, 507, "cannot write")
    assert "need" not in error, "it is not the budget"
    assert list(folder.glob("*.state*")) == []
    engine.save("small", seq=small, to="disk")
    assert state_files(folder).keys() == {"small"}
    assert engine.save("large", seq=large, to="both")["disk_error"]["code"] == 507
    engine.free_all()
    assert (engine.load("large")["n_tokens"], engine.load("small")["n_tokens"]) == (4000, 200)


def test_disk_work_waits_for_nobody_and_nobody_for_it(engine: Engine, folder: Path, noise: Noise) -> None:
    """A file that takes for ever to be read (a pipe that nobody writes to): meanwhile everything else is answered, and
    a stream runs."""
    seq = engine.materialize(noise(1, ROOT_LEN))["seq"]
    engine.save("slow", seq=seq, to="disk")
    engine.save("quick", seq=seq)
    path = state_files(folder)["slow"]
    path.unlink()
    os.mkfifo(path)
    with ThreadPoolExecutor(2) as threads:
        load: Json = {"op": "load", "tag": "slow"}
        loading = threads.submit(engine.http.post, "/polykv/engine/pools", json=load)
        engine.save("other", seq=seq, start=10, to="disk")
        waiting = threads.submit(engine.load, "other", parent=seq)
        with Running(engine, noise(3, 20), 50, id_slot=0) as agent:
            assert engine.stats()["saved"]["disk"]["bytes"] > 0
            engine.free(engine.load("quick")["seq"])
            engine.save("again", seq=seq)
            engine.forget("again")
            engine.save("second", seq=seq, to="disk")
            assert agent.finished()["tokens_predicted"] == 50
        assert {state["tag"] for state in engine.saved()} == {"slow", "quick", "other", "second"}
        assert not loading.done(), "the pipe was to be read all the time"
        assert not waiting.done(), "files are read one after the other"
        path.open("wb").close()
        assert loading.result().status_code == 500
        assert waiting.result()["n_tokens"] == ROOT_LEN
    assert on_disk(engine).keys() == {"slow", "other", "second"}, "what cannot be read for now is kept"


def test_saved_again_in_the_other_place(engine: Engine, folder: Path, noise: Noise) -> None:
    """A tag is one thing: what was under it before goes, wherever it was; a copy of the same stays."""
    one, two = (engine.materialize(noise(seed, ROOT_LEN))["seq"] for seed in (1, 2))
    hashes = {seq: engine.pool(seq)["tokens_hash"] for seq in (one, two)}
    engine.save("t", seq=one, to="both")
    engine.save("t", seq=one)
    engine.save("t", seq=one, to="disk")
    assert [(state["in"], state["tokens_hash"]) for state in engine.saved()] == [
        ("ram", hashes[one]),
        ("disk", hashes[one]),
    ]
    engine.save("t", seq=two)
    assert [(state["in"], state["tokens_hash"]) for state in engine.saved()] == [("ram", hashes[two])]
    assert state_files(folder) == {}
    engine.save("t", seq=one, to="disk")
    assert [(state["in"], state["tokens_hash"]) for state in engine.saved()] == [("disk", hashes[one])]
    assert engine.load("t")["tokens_hash"] == hashes[one]
