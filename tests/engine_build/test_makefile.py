"""The Makefile before anything is installed: what is missing is one line that says what to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polykv_proxy.engine.paths import checkout_dir

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = checkout_dir()
    assert root is not None
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(root / name, tmp_path / name)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A make of its own, also when make runs these tests."""
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=outside, capture_output=True, text=True, check=False, timeout=60
    )


def python_that_fails(folder: Path, when: str) -> Path:
    """A Python whose ``-c`` programs that contain ``when`` fail; the others run in the real one."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\ncase "$2" in *"{when}"*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


def first_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make:")]
    assert len(lines) == 1
    return lines[0]


def test_help_is_the_default_and_lists_the_targets(clone: Path) -> None:
    done = make(clone)

    targets = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"install", "demo", "test", "test-all", "up", "lint", "check-patches", "bench", "help"} <= targets


def test_old_python_is_named(clone: Path) -> None:
    old = python_that_fails(clone, "version_info")

    assert first_line(make(clone, "install", f"PYTHON={old}")).startswith(f"{old} is not Python 3.11 or newer")


def test_missing_venv_module_says_what_to_install(clone: Path) -> None:
    bare = python_that_fails(clone, "import venv")

    assert "has no venv module: install it (Debian: apt-get install python3-venv)" in first_line(
        make(clone, "test", f"PYTHON={bare}")
    )


def test_no_python_at_all_says_so(clone: Path) -> None:
    assert first_line(make(clone, "up", "PYTHON=")).startswith("Python 3.11 or newer is missing")
