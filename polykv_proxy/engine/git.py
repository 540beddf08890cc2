"""Git as this room uses it: never with the user's settings, always with a readable failure."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from polykv_proxy.engine.problem import EngineProblem

_SETTINGS = (
    "core.autocrlf=false",
    "core.safecrlf=false",
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "commit.gpgSign=false",
    "gc.auto=0",
    "safe.directory=*",
    "init.defaultBranch=main",
    "advice.detachedHead=false",
)


def _environment(author: str, date: str) -> dict[str, str]:
    """The caller's environment without anything that steers git, plus a fixed identity."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    name, _, address = author.partition(" <")
    identity = {f"GIT_{role}_NAME": name for role in ("AUTHOR", "COMMITTER")}
    identity |= {f"GIT_{role}_EMAIL": address.rstrip(">") for role in ("AUTHOR", "COMMITTER")}
    identity |= {f"GIT_{role}_DATE": date for role in ("AUTHOR", "COMMITTER")}
    return kept | identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}


AUTHOR = "PolyKV <polykv@localhost>"
DATE = "Thu, 1 Jan 2026 00:00:00 +0000"


def run_git(arguments: Sequence[str | Path], *, cwd: Path, step: str) -> str:
    """Run git in ``cwd`` and return its standard output.

    ``step`` says in the error line what was being done.

    Raises:  EngineProblem when git is missing or fails; its detail is git's own output
    """
    git = shutil.which("git")
    if git is None:
        raise EngineProblem("git is not installed: install it (Debian: apt-get install git)")
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    done = subprocess.run(
        [git, *settings, *map(str, arguments)],
        cwd=cwd,
        env=_environment(AUTHOR, DATE),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise EngineProblem(f"{step} failed (git {arguments[0]})", detail=(done.stdout + done.stderr).strip())
    return done.stdout
