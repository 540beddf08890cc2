"""Where things lie on this machine: the checkout, the per-user cache, the per-user state."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def checkout_dir() -> Path | None:
    """The project's checkout if we run from one, else None (an installed package)."""
    root = _PACKAGE.parent
    return root if (root / "patches" / "BASE").is_file() and (root / "pyproject.toml").is_file() else None


def patches_dir() -> Path:
    """The series of the checkout; an installed package carries a copy of its own."""
    root = checkout_dir()
    return root / "patches" if root else _PACKAGE / "engine" / "patches"


def submodule_dir() -> Path | None:
    """``llama.cpp/`` of the checkout if it is checked out; an empty folder (a clone without submodules) is not."""
    root = checkout_dir()
    return root / "llama.cpp" if root and (root / "llama.cpp" / "CMakeLists.txt").is_file() else None


def cache_dir() -> Path:
    """``POLYKV_CACHE``, else ``polykv`` below ``XDG_CACHE_HOME`` or ``~/.cache``. Everything in it can be rebuilt."""
    if own := os.environ.get("POLYKV_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "polykv"


def state_dir() -> Path:
    """Logs of a local engine, where the proxy keeps its journal too by default."""
    return Path.home() / ".local" / "state" / "polykv"
