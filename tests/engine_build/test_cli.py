"""``polykvctl engine`` as a person or a script runs it."""

import json
import subprocess
import sys
from pathlib import Path

from polykv_proxy.engine import paths, source

from .conftest import QuickTools


def polykvctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polykv_proxy.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_series_of_the_project_applies_and_exports_to_the_same_bytes(source_tree: Path) -> None:
    done = polykvctl("engine", "check-patches")

    assert done.returncode == 0, done.stderr
    assert f"apply to {source.BASE[:8]} and export to the same bytes" in done.stdout


def test_info_tells_what_the_key_is_made_of(cache: Path) -> None:
    facts = json.loads(polykvctl("engine", "info", "--json").stdout)
    stock = json.loads(polykvctl("engine", "info", "--stock", "--json").stdout)

    assert facts["base"] == source.BASE
    assert facts["patches"] == (paths.patches_dir() / "series").read_text().split()
    assert stock["patches"] == []
    assert "-DGGML_RPC=ON" in facts["flags"]
    assert facts["path"] == str(cache / "engine" / facts["key"] / "llama-server")
    assert facts["built"] is False
    assert not (cache / "engine").exists()


def test_path_builds_and_prints_only_the_path(tools: QuickTools) -> None:
    done = polykvctl("engine", "path", "--stock")

    assert done.returncode == 0, done.stderr
    assert subprocess.check_output([done.stdout.strip(), "--version"], text=True) == "version 0\n"
    assert "[3/3] 100 % Linking llama-server" in done.stderr


def test_failed_build_shows_the_step_and_ends_in_one_line(tools: QuickTools) -> None:
    tools.plan("echo two.cpp:7: error: no && false")

    done = polykvctl("engine", "build", "--stock", "--json")

    assert done.returncode == 1
    assert done.stdout == ""
    assert "two.cpp:7: error: no" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("polykvctl: compiling llama.cpp failed; whole output: ")


def test_cache_that_cannot_be_written_is_one_line(cache: Path) -> None:
    (cache / "engine").write_text("a file where a folder should be")

    done = polykvctl("engine", "build", "--stock")

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert str(cache / "engine") in done.stderr
