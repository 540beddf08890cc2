"""The tools a build needs: found on this machine, or fetched (CMake, Ninja), or one line that says what to install."""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.engine import paths
from polykv_proxy.engine.files import Say, file_lock, replace_dir, run_pip, scratch_dir
from polykv_proxy.engine.problem import EngineProblem

_CMAKE_AT_LEAST = (3, 18)
_WHEELS = ("cmake==3.31.6", "ninja==1.11.1.4")


@dataclass(frozen=True)
class Toolchain:
    """What decides which machine code comes out; CMake finds the compiler itself by the same rules."""

    compiler_id: str
    cpu_id: str


def find_toolchain() -> Toolchain:
    """The C and C++ compiler (``CC`` and ``CXX`` if set).

    Raises:  EngineProblem that says which package brings them
    """
    _find_compiler("CC", "C", "cc", "gcc", "clang")
    cxx = _find_compiler("CXX", "C++", "c++", "g++", "clang++")
    return Toolchain(_compiler_id(cxx), _cpu_id())


def find_cmake_and_ninja(say: Say) -> tuple[Path, Path]:
    """The system's if it has both and CMake is recent enough; else wheels from PyPI, kept in the per-user cache."""
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if cmake and ninja and _cmake_version(Path(cmake)) >= _CMAKE_AT_LEAST:
        return Path(cmake), Path(ninja)
    folder = paths.cache_dir() / "tools" / "-".join(wheel.replace("==", "-") for wheel in _WHEELS)
    with file_lock(folder.with_suffix(".lock"), say=say, waiting_for="it fetches CMake and Ninja"):
        if not folder.is_dir():
            say("fetching CMake and Ninja (this machine has none that will do)")
            with scratch_dir(folder.parent) as scratch:
                run_pip(
                    [
                        "install",
                        "--quiet",
                        "--no-deps",
                        "--only-binary",
                        ":all:",
                        "--target",
                        str(scratch / "tools"),
                        *_WHEELS,
                    ],
                    step="fetching CMake and Ninja",
                )
                replace_dir(scratch / "tools", folder)
    return _executable_in(folder, "cmake"), _executable_in(folder, "ninja")


def _find_compiler(variable: str, language: str, *usual: str) -> list[str]:
    """The command of the compiler; ``CXX="ccache g++"`` is one too."""
    if named := shlex.split(os.environ.get(variable, "")):
        if shutil.which(named[0]):
            return named
        raise EngineProblem(f"{variable}={named[0]} is not there: install it or unset {variable}")
    for candidate in usual:
        if shutil.which(candidate):
            return [candidate]
    raise EngineProblem(
        f"no {language} compiler: install one (Debian: apt-get install build-essential; macOS: xcode-select --install)"
    )


def _executable_in(folder: Path, name: str) -> Path:
    """The real binary of a wheel: scripts in ``bin/`` would need the wheel on Python's path."""
    for found in sorted(folder.rglob(name)):
        if found.is_file() and os.access(found, os.X_OK) and found.read_bytes()[:2] != b"#!":
            return found
    raise EngineProblem(f"no {name} in {folder}: delete that folder and try again")


def _cmake_version(cmake: Path) -> tuple[int, ...]:
    found = re.search(r"version (\d+)\.(\d+)", _first_line([str(cmake), "--version"]))
    return (int(found[1]), int(found[2])) if found else (0,)


def _compiler_id(cxx: list[str]) -> str:
    return f"{_first_line([*cxx, '--version'])} {_first_line([*cxx, '-dumpmachine'])}".strip()


def _cpu_id() -> str:
    """What ``-march=native`` looks at: a cache shared by unlike machines must not share binaries."""
    features = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = (line for line in cpuinfo.read_text(errors="replace").splitlines())
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    digest = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:8]
    return f"{platform.system()}-{platform.machine()}-{digest}".lower()


def _first_line(command: list[str]) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    return (done.stdout.splitlines() or [""])[0].strip()
