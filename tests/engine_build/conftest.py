"""A per-user cache of its own for every test, with the pinned source already in it, and a build that takes no time.

The source is the real one (fetched once per machine). CMake is a script that writes a ``build.ninja`` of a few shell
steps; Ninja is real, so its output is what the build has to understand.
"""

import os
import stat
from pathlib import Path

import pytest

from polykv_proxy.engine.source import pinned_tree
from polykv_proxy.engine.tools import find_cmake_and_ninja


class Lines:
    """Keeps what a build tells, for asserting."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[int, int]] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def step(self, n_done: int, n_total: int, what: str) -> None:
        self.steps.append((n_done, n_total))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture(scope="session")
def source_tree() -> Path:
    return pinned_tree(lambda line: None)


@pytest.fixture(scope="session")
def real_ninja() -> Path:
    return find_cmake_and_ninja(lambda line: None)[1]


@pytest.fixture
def cache(tmp_path: Path, source_tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    (folder / "source").mkdir(parents=True)
    (folder / "source" / source_tree.name).symlink_to(source_tree)
    monkeypatch.setenv("POLYKV_CACHE", str(folder))
    monkeypatch.delenv("POLYKV_CMAKE_ARGS", raising=False)
    return folder


class QuickTools:
    """A folder in front of PATH with a CMake that plans three steps; each run of the last one leaves a mark."""

    def __init__(self, folder: Path, ninja: Path) -> None:
        self.folder = folder
        self.marks = folder / "marks"
        (folder / "ninja").symlink_to(ninja)
        self.plan("exit 0")

    def plan(self, second_step: str) -> None:
        """Make CMake plan a build whose second step is this shell command."""
        script = f"""#!/bin/sh
if [ "$1" = --version ]; then echo "cmake version 3.25.1"; exit; fi
while [ $# -gt 0 ]; do [ "$1" = -B ] && objects=$2; shift; done
mkdir -p "$objects/bin"
cat > "$objects/build.ninja" <<'PLAN'
rule run
  command = $what
  description = $title
build one: run
  what = touch one
  title = Building one.o
build two: run one
  what = {second_step} && touch two
  title = Building two.o
build llama-server: run two
  what = printf '%s\\n' '#!/bin/sh' 'echo version 0' > bin/llama-server && chmod +x bin/llama-server && $
    echo built >> {self.marks} && touch llama-server
  title = Linking llama-server
PLAN
"""
        path = self.folder / "cmake"
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def n_builds(self) -> int:
        return len(self.marks.read_text().splitlines()) if self.marks.exists() else 0


@pytest.fixture
def tools(tmp_path: Path, cache: Path, real_ninja: Path, monkeypatch: pytest.MonkeyPatch) -> QuickTools:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return QuickTools(folder, real_ninja)
