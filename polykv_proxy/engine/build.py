"""One llama-server binary per key in the per-user cache.

    engine/<key>/llama-server   the binary
    engine/<key>/build.log      everything CMake and the compilers said
    engine/<key>/info.json      what it was built from
    engine/work/                source copy and objects of a build that runs or failed; gone after success

The key covers whatever decides the machine code: base tree, patches (their diffs, not their prose), flags, compiler,
processor. A binary appears under its key by one rename, after it has answered ``--version``. One build runs at a time,
under a file lock; who comes second waits and finds it done. The compilers hold the lock too, because they may outlive
us. The work folder always has the same path, so that ccache knows the objects of a stock build again in a patched one;
after a failure it stays, and the next try of the same key goes on where that one stopped.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from polykv_proxy.engine import paths
from polykv_proxy.engine.compiling import Progress, configure_and_compile
from polykv_proxy.engine.files import file_lock, replace_dir, scratch_dir
from polykv_proxy.engine.problem import EngineProblem
from polykv_proxy.engine.series import apply_series, load_series
from polykv_proxy.engine.source import BASE, TREE_SHA256, copy_tree, pinned_tree
from polykv_proxy.engine.tools import find_cmake_and_ninja, find_toolchain

BINARY = "llama-server"
_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_RPC=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    f"-DLLAMA_BUILD_COMMIT={BASE}",
    "-DLLAMA_BUILD_NUMBER=0",
)


@dataclass(frozen=True)
class EngineInfo:
    """What one build is made of; ``key`` names it, ``path`` is where its binary lies or will lie."""

    stock: bool
    base: str
    patches: tuple[str, ...]
    flags: tuple[str, ...]
    compiler: str
    cpu: str
    key: str
    path: str
    built: bool


def describe_engine(*, stock: bool = False) -> EngineInfo:
    """Say what a build would be made of now, and whether it is there; builds and fetches nothing."""
    series = load_series(paths.patches_dir())
    if series.base != BASE:
        raise EngineProblem(f"patches/BASE says {series.base}, but the pinned source is {BASE}")
    patches = () if stock else series.patches
    flags = _FLAGS + tuple(shlex.split(os.environ.get("POLYKV_CMAKE_ARGS", "")))
    tools = find_toolchain()
    diffs = [hashlib.sha256(_diff_of(patch)).hexdigest() for patch in patches]
    facts = [TREE_SHA256, diffs, flags, tools.compiler_id, tools.cpu_id]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    binary = paths.cache_dir() / "engine" / key / BINARY
    names = tuple(patch.name for patch in patches)
    built = os.access(binary, os.X_OK)
    return EngineInfo(stock, BASE, names, flags, tools.compiler_id, tools.cpu_id, key, str(binary), built)


def ensure_engine(progress: Progress, *, stock: bool = False) -> Path:
    """Return the binary's path; fetch, patch and build it first if it is not there.

    Raises:  EngineProblem with the failing step and its output; nothing is left under the key then
    """
    info = describe_engine(stock=stock)
    if info.built:
        return Path(info.path)
    engines = paths.cache_dir() / "engine"
    with file_lock(engines / "build.lock", say=progress.say, waiting_for="it builds llama-server") as lock:
        if not os.access(info.path, os.X_OK):
            _build(info, engines, progress, lock)
    return Path(info.path)


def _build(info: EngineInfo, engines: Path, progress: Progress, lock: int) -> None:
    cmake, ninja = find_cmake_and_ninja(progress.say)
    work = engines / "work"
    _prepare_work(work, info, progress)
    kind = "stock" if info.stock else f"{len(info.patches)} patches"
    progress.say(f"building llama-server ({BASE[:8]}, {kind}); the whole output: {work / 'build.log'}")
    binary = configure_and_compile(
        cmake=cmake,
        ninja=ninja,
        source=work / "source",
        objects=work / "objects",
        flags=info.flags,
        target=BINARY,
        log=work / "build.log",
        progress=progress,
        lock=lock,
    )
    _try_out(binary)
    with scratch_dir(engines) as scratch:
        done = scratch / "done"
        done.mkdir()
        shutil.copy2(binary, done / BINARY)
        shutil.copy2(work / "build.log", done / "build.log")
        facts = asdict(info) | {"built": True}
        (done / "info.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        replace_dir(done, engines / info.key)
    _discard(work)


def _prepare_work(work: Path, info: EngineInfo, progress: Progress) -> None:
    """A fresh patched copy of the source, unless the last try of the same key left one."""
    key_file = work / "KEY"
    if key_file.is_file() and key_file.read_text(encoding="utf-8") == info.key:
        progress.say("going on with the build that stopped here")
        return
    _discard(work)
    tree = pinned_tree(progress.say)
    source = work / "source"
    source.mkdir(parents=True)
    copy_tree(tree, source)
    if not info.stock:
        apply_series(source, load_series(paths.patches_dir()))
    key_file.write_text(info.key, encoding="utf-8")


def _discard(work: Path) -> None:
    """The key goes first: interrupted half-way, what is left must not pass for a build to go on with."""
    (work / "KEY").unlink(missing_ok=True)
    if work.exists():
        shutil.rmtree(work)


def _try_out(binary: Path) -> None:
    done = subprocess.run(
        [binary, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        raise EngineProblem("the built llama-server does not start", detail=(done.stdout + done.stderr).strip())


def _diff_of(patch: Path) -> bytes:
    """The part that changes code: rewording a patch's message is no reason to compile."""
    content = patch.read_bytes()
    start = content.find(b"\ndiff --git ")
    return content[start:] if start >= 0 else content
