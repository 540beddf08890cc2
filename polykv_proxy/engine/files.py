"""Files as this room uses them: locks between processes, checksums, downloads that are all there or not at all."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polykv_proxy.engine.problem import EngineProblem

Say = Callable[[str], None]
"""Tells the person at the terminal one line."""


@contextmanager
def file_lock(path: Path, *, say: Say, waiting_for: str) -> Iterator[int]:
    """Hold ``path`` exclusively; who comes second says so once and waits. A killed holder releases it.

    Gives the lock's file descriptor: a child that inherits it keeps the lock as long as it lives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process: {waiting_for}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def sha256_file(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def scratch_dir(parent: Path) -> Iterator[Path]:
    """A temporary folder on the same file system as ``parent``'s content, so that a rename out of it is atomic."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as name:
        yield Path(name)


def run_pip(arguments: list[str], *, step: str) -> None:
    """Run this interpreter's pip; it reaches whatever package index the user has set up.

    Its progress goes to stderr when that is a terminal, else its output is kept for the error.
    """
    shown = sys.stderr.isatty()
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    output = done.stdout or ""
    if "No module named pip" in output:
        raise EngineProblem(f"pip is missing in {sys.prefix}: run `{sys.executable} -m ensurepip`")
    raise EngineProblem(f"{step} failed (pip)", detail=output.strip())


def download(distribution: str, version: str, sha256: str, *, binary: bool, into: Path) -> Path:
    """Fetch one file of a package with pip, without dependencies, and check it against its pinned checksum."""
    kind = ["--only-binary", ":all:"] if binary else ["--no-binary", distribution]
    before = set(into.iterdir())
    requirement = f"{distribution}=={version}"
    run_pip(["download", "--no-deps", *kind, "--dest", str(into), requirement], step=f"fetching {requirement}")
    fetched = [path for path in into.iterdir() if path not in before]
    if len(fetched) != 1:
        raise EngineProblem(f"fetching {requirement} brought {len(fetched)} files instead of one")
    if (found := sha256_file(fetched[0])) != sha256:
        raise EngineProblem(f"{fetched[0].name} is not the pinned file: sha256 {found} instead of {sha256}")
    return fetched[0]


def replace_dir(new: Path, final: Path) -> None:
    """Put ``new`` where ``final`` is or was; nobody ever sees half of it."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        shutil.rmtree(final)
    new.rename(final)
