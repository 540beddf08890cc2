"""The files of saved states: private, complete or not there, believed only after a check, and cleaned up at a start.

A file that is torn, damaged or missing is a miss and no more.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from .conftest import Launcher
from .hooks import Engine, Json
from .noise import Noise
from .state_files import (
    EMPTY_HEADER,
    MAGIC,
    ONE_TOKEN,
    StateFile,
    checksum,
    disk,
    is_private,
    name_of,
    raw_file,
    state_files,
)
from .test_saved_errors import refused, state_of

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


# Where they are ----------------------------------------------------------------------------------------------------


def test_files_are_private_and_say_what_is_listed(engine: Engine, folder: Path, noise: Noise) -> None:
    seq = engine.materialize(noise(1, ROOT_LEN))["seq"]
    both = engine.save("root", seq=seq, to="both")
    assert both["in"] == ["ram", "disk"]
    only = engine.save("part", seq=seq, start=50, n_tokens=100, to="disk")
    assert only["in"] == ["disk"]
    files = state_files(folder)
    assert files.keys() == {"root", "part"}
    assert all(is_private(path) for path in folder.iterdir())
    assert is_private(folder)
    sizes = {tag: path.stat().st_size for tag, path in files.items()}
    assert {tag: state["bytes"] for tag, state in on_disk(engine).items()} == sizes
    assert only["bytes"] == sizes["part"]
    assert engine.stats()["saved"]["disk"] == {"bytes": sum(sizes.values()), "max": 100 * 2**20, "why_off": ""}
    header = StateFile.read(files["part"]).header
    assert [header[key] for key in ("from", "n_tokens", "tokens_hash")] == [
        only[key] for key in ("from", "n_tokens", "tokens_hash")
    ]
    assert engine.forget("root")["saved"]["disk"]["bytes"] == sizes["part"]
    assert state_files(folder).keys() == {"part"}


def test_restart(engine: Engine, launch: Launcher, folder: Path, noise: Noise) -> None:
    """Killed: what was whole is there, what was half written or replaced goes, what is not ours stays."""
    trunk = noise(1, ROOT_LEN)
    engine.save("root", seq=engine.materialize(trunk)["seq"], to="both")
    listed = on_disk(engine)
    engine.server.kill()
    path = state_files(folder)["root"]
    older = folder / name_of(1)
    older.write_bytes(path.read_bytes())
    os.utime(older, (1e9, 1e9))
    (folder / (name_of(2) + ".tmp")).write_bytes(MAGIC)
    theirs = ["notes.txt", "other.state", "0123.state", "other.tmp", "other.state.tmp"]
    for name in theirs:
        (folder / name).write_text("not ours")
    (folder / name_of(3)).mkdir()
    (folder / name_of(4)).symlink_to(folder / "notes.txt")

    second = launch.pooled("dense", *disk(folder), *QUIET)
    assert {state["tag"]: state for state in second.saved()} == listed
    kept = {path.name, "polykv.lock", *theirs, name_of(3), name_of(4)}
    assert {entry.name for entry in folder.iterdir()} == kept
    loaded = second.load("root")
    assert second.stats()["n_prompt_cum"] == 0
    prompt = trunk + noise(2, 20)
    done = second.ask(prompt, 12, slot=0, pool=loaded["seq"])
    assert (done.pool_n, done.tokens) == (ROOT_LEN, second.full(prompt, 12, slot=1).tokens)


def test_one_server_at_a_time(engine: Engine, launch: Launcher, folder: Path, noise: Noise) -> None:
    """The second says why it has no disk, works without, and touches nothing."""
    engine.save("root", seq=engine.materialize(noise(1, ROOT_LEN))["seq"], to="disk")
    half = folder / (name_of(2) + ".tmp")
    half.touch()
    second = launch.pooled("dense", *disk(folder))
    why_off = second.stats()["saved"]["disk"]["why_off"]
    assert why_off == f"another server uses {folder}/polykv.lock"
    assert second.saved() == []
    seq = second.materialize(noise(1, 50))["seq"]
    refused(second, {"op": "save", "tag": "t", "seq": seq, "to": "both"}, 501, "another server uses")
    second.save("t", seq=seq)
    assert half.exists()
    assert engine.load("root")["n_tokens"] == ROOT_LEN
    engine.server.kill()
    assert launch.pooled("dense", *disk(folder)).load("root")["n_tokens"] == ROOT_LEN
    assert not half.exists()


@pytest.mark.parametrize("flags", [("--polykv-save-path", "{}"), ("--polykv-save-disk", "100")], ids=str)
def test_half_a_setting(launch: Launcher, folder: Path, flags: tuple[str, ...]) -> None:
    off = launch.pooled("dense", *(flag.format(folder) for flag in flags)).stats()["saved"]["disk"]
    missing = {"--polykv-save-path", "--polykv-save-disk"} - {*flags}
    assert off["why_off"] == f"the server was started without {missing.pop()}"
    assert off["max"] == 0
    assert not folder.exists()


def test_folder_that_cannot_be_made(launch: Launcher, folder: Path, noise: Noise) -> None:
    folder.write_text("a file")
    engine = launch.pooled("dense", *disk(folder))
    assert str(folder) in engine.stats()["saved"]["disk"]["why_off"]
    engine.save("t", seq=engine.materialize(noise(1, 50))["seq"])


# Damage ------------------------------------------------------------------------------------------------------------


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def with_header(raw: bytes, **changed: Any) -> bytes:
    """Right checksums over something else."""
    state = StateFile.parse(raw)
    return StateFile(state.header | changed, state.parts).raw()


def n_header(raw: bytes) -> int:
    return int.from_bytes(raw[8:16], "little")


def older(raw: bytes) -> bytes:
    """As the version before would have written it: without the checksum of the header."""
    end = 16 + n_header(raw)
    content = b"POLYKV01" + raw[8:end] + raw[end + 8 : -8]
    return content + checksum(content)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "bit-in-cells": lambda raw: flipped(raw, len(raw) - 100),
    "bit-in-tokens": lambda raw: flipped(raw, 16 + n_header(raw) + 8 + 4),
    "bit-in-header": lambda raw: flipped(raw, 30),
    "bit-in-header-checksum": lambda raw: flipped(raw, 16 + n_header(raw)),
    "older-version": older,
    "bit-in-checksum": lambda raw: flipped(raw, len(raw) - 1),
    "bit-in-magic": lambda raw: flipped(raw, 0),
    "torn": lambda raw: raw[: len(raw) // 2],
    "without-checksum": lambda raw: raw[:-8],
    "too-long": lambda raw: raw + b"\0",
    "empty": lambda raw: b"",
    "zeros": lambda raw: bytes(len(raw)),
    "other-tag": lambda raw: with_header(raw, tag="somebody"),
    "other-hash": lambda raw: with_header(raw, tokens_hash="0" * 16),
    "negative": lambda raw: with_header(raw, n_tgt=-1),
    "wraps-around": lambda raw: with_header(raw, n_tokens=2**62 + ROOT_LEN),
    "no-number": lambda raw: with_header(raw, n_tokens=str(ROOT_LEN)),
    "fraction": lambda raw: with_header(raw, n_tokens=ROOT_LEN + 0.0),
    "from-behind": lambda raw: with_header(raw, **{"from": ROOT_LEN}),
}


def test_damaged_files_are_a_miss(engine: Engine, folder: Path, noise: Noise) -> None:
    """Noticed before anything is changed; the file goes, and the tag can be used again."""
    seq = engine.materialize(noise(1, ROOT_LEN))["seq"]
    for name, damage in DAMAGES.items():
        engine.save("root", seq=seq, to="disk")
        path = state_files(folder)["root"]
        path.write_bytes(damage(path.read_bytes()))
        before = state_of(engine)
        refused(engine, {"op": "load", "tag": "root"}, 410, "the file of 'root'")
        assert not path.exists(), name
        refused(engine, {"op": "load", "tag": "root"}, 410, "nothing is saved")
        after = state_of(engine)
        for key in ("cells", "slots"):
            assert after[key] == before[key], name
        assert after["listing"]["pools"] == before["listing"]["pools"]
        assert after["saved"]["disk"]["bytes"] == 0, name


def test_damaged_headers_at_a_start(engine: Engine, launch: Launcher, folder: Path, noise: Noise) -> None:
    """A bit anywhere in what is listed of a file, a size that is another, an older version: never listed, removed, and
    that is said. What is whole stays."""
    seq = engine.materialize(noise(1, 10))["seq"]
    engine.save("root", seq=seq, to="disk")
    listed = on_disk(engine)
    engine.server.stop()
    path = state_files(folder)["root"]
    raw = path.read_bytes()
    n_listed = 16 + n_header(raw) + 8 + 4 * 10
    damaged = [flipped(raw, at) for at in range(n_listed)]
    damaged += [older(raw), raw[:-1], raw + b"\0", raw[:n_listed], with_header(raw, tokens_hash="0" * 16)]
    for number, content in enumerate(damaged):
        (folder / name_of(number)).write_bytes(content)
    second = launch.pooled("dense", *disk(folder))
    assert {state["tag"]: state for state in second.saved()} == listed
    assert list(folder.glob("*.state")) == [path]
    log = second.server.log()
    unsaid = [n for n in range(len(damaged)) if not re.search(f"{name_of(n)} .*, removing it", log)]
    assert unsaid == []
    assert second.load("root")["n_tokens"] == 10


def test_missing_file(engine: Engine, folder: Path, noise: Noise) -> None:
    engine.save("root", seq=engine.materialize(noise(1, ROOT_LEN))["seq"], to="disk")
    state_files(folder)["root"].unlink()
    refused(engine, {"op": "load", "tag": "root"}, 410, "the file of 'root' cannot be opened")
    assert engine.saved() == []


def test_tokens_that_the_model_does_not_have(engine: Engine, folder: Path, noise: Noise) -> None:
    """Whoever wrote that meant it: checksum and hash are right."""
    seq = engine.materialize(noise(1, ROOT_LEN))["seq"]
    engine.save("root", seq=seq, to="disk")
    path = state_files(folder)["root"]
    state = StateFile.read(path)
    for token in (-1, noise.n_vocab, 2**31 - 1):
        tokens = token.to_bytes(4, "little", signed=True) + state.parts[4 : 4 * ROOT_LEN]
        header = state.header | {"tokens_hash": xxhash.xxh64_hexdigest(tokens)}
        path.write_bytes(StateFile(header, tokens + state.parts[4 * ROOT_LEN :]).raw())
        before = state_of(engine)
        refused(engine, {"op": "load", "tag": "root"}, 409, "tokens that this model does not have")
        assert state_of(engine) == before


def test_cells_that_do_not_fit(engine: Engine, folder: Path, noise: Noise) -> None:
    """Fewer of them than the header says, more, of another sequence of positions: the cache is left as it was."""
    seq = engine.materialize(noise(1, ROOT_LEN))["seq"]
    engine.save("root", seq=seq, to="disk")
    engine.save("part", seq=seq, n_tokens=150, to="disk")
    engine.save("behind", seq=seq, start=50, to="disk")
    files = state_files(folder)
    root = StateFile.read(files["root"])
    tokens = root.parts[: 4 * ROOT_LEN]
    cells = {tag: StateFile.read(path) for tag, path in files.items()}
    for tag, n_own in (("part", 150), ("behind", ROOT_LEN)):
        own = cells[tag].parts[4 * n_own :]
        files["root"].write_bytes(StateFile(root.header | {"n_tgt": len(own)}, tokens + own).raw())
        before = state_of(engine)
        refused(engine, {"op": "load", "tag": "root"}, 409, "does not fit this cache")
        refused(engine, {"op": "load", "tag": "root", "id_slot": 1}, 409, "does not fit this cache")
        assert state_of(engine) == before
    for n_more, said in ((64, "too long"), (-64, "")):
        own = root.parts[4 * ROOT_LEN :]
        own = own + bytes(n_more) if n_more > 0 else own[:n_more]
        files["root"].write_bytes(StateFile(root.header | {"n_tgt": len(own)}, tokens + own).raw())
        refused(engine, {"op": "load", "tag": "root"}, 409, said)
        assert state_of(engine) == before
    engine.free(seq)
    assert engine.cells_used() == 0


HOSTILE: dict[str, bytes] = {
    "deep": raw_file(b'{"tag":' + b"[" * 400_000 + b"]" * 400_000 + b"}", b""),
    "deep-ckpts": raw_file(b'{"ckpts":' * 80_000 + b"0" + b"}" * 80_000, b""),
    "list": raw_file(b"[1,2,3]", b""),
    "number": raw_file(b"7", b""),
    "not-utf8": raw_file(b'{"tag":"\xff\xfe"}', b""),
    "no-end": raw_file(b'{"tag":"t"', b""),
    "empty": raw_file(b"", b""),
    "long-header": MAGIC + (2**63).to_bytes(8, "little") + bytes(100),
    "header-behind-end": MAGIC + (2**19).to_bytes(8, "little") + bytes(100),
} | {
    f"{key}={value!r}"[:40]: StateFile(EMPTY_HEADER | {key: value}, ONE_TOKEN).raw()
    for key, value in (
        ("n_tokens", 0),
        ("n_tokens", -1),
        ("n_tokens", 2**64),
        ("n_tokens", 1e300),
        ("n_tokens", [1]),
        ("from", -5),
        ("from", 2**31),
        ("tag", None),
        ("tag", {"a": 1}),
        ("fingerprint", 7),
        ("tokens_hash", ["h"]),
        ("n_spec", 2**63),
        ("n_dft", True),
        ("ckpts", 5),
        ("ckpts", {"n_tgt": 1}),
        ("ckpts", [7]),
        ("ckpts", [{"n_tokens": 1, "pos_min": 0, "pos_max": 0, "n_tgt": 2**63 - 1, "n_dft": 2**63 - 1, "n_spec": 2}]),
        ("ckpts", [{"n_tokens": -1, "pos_min": 0, "pos_max": 0, "n_tgt": 0, "n_dft": 0, "n_spec": 0}]),
    )
}


def test_hostile_headers_at_a_start(launch: Launcher, folder: Path) -> None:
    """None of them is listed, all of them are removed, and the server lives."""
    folder.mkdir()
    for number, content in enumerate(HOSTILE.values()):
        (folder / name_of(number)).write_bytes(content)
    good = StateFile(EMPTY_HEADER | {"tag": "good"}, ONE_TOKEN)
    (folder / name_of(99)).write_bytes(good.raw())
    engine = launch.pooled("dense", *disk(folder))
    assert {state["tag"]: state["usable"] for state in engine.saved()} == {"good": False}
    left = {path.name for path in folder.glob("*.state")}
    assert left == {name_of(99)}, [name for n, name in enumerate(HOSTILE) if name_of(n) in left]
