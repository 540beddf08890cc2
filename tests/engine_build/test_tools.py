"""CMake and Ninja: the system's if it has both, else wheels in the per-user cache."""

import os
import subprocess
from pathlib import Path

import pytest

from polykv_proxy.engine.tools import find_cmake_and_ninja


def put_program(folder: Path, name: str, says: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return program


def test_the_systems_are_taken_when_recent_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cmake, ninja = put_program(tmp_path, "cmake", "cmake version 3.18.4"), put_program(tmp_path, "ninja", "1.10.0")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_cmake_and_ninja(print) == (cmake, ninja)


@pytest.mark.slow
@pytest.mark.parametrize("old", [True, False], ids=["CMake too old", "none at all"])
def test_wheels_are_fetched_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    if old:
        put_program(tmp_path, "cmake", "cmake version 3.10.2")
        put_program(tmp_path, "ninja", "1.10.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("POLYKV_CACHE", str(tmp_path / "cache"))
    said: list[str] = []

    cmake, ninja = find_cmake_and_ninja(said.append)

    assert said == ["fetching CMake and Ninja (this machine has none that will do)"]
    assert (tmp_path / "cache" / "tools") in cmake.parents
    assert subprocess.check_output([cmake, "--version"], text=True, env=os.environ).startswith("cmake version 3.31")
    assert subprocess.check_output([ninja, "--version"], text=True).startswith("1.11")
    assert find_cmake_and_ninja(said.append) == (cmake, ninja)
    assert len(said) == 1
