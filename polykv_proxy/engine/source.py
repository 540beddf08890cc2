"""The pinned llama.cpp tree: from the submodule if it is checked out, else out of a source distribution on PyPI.

Both give the same tree, and ``tree_sha256`` proves it before anything is built. The hash covers what the build reads
and nothing else: the files below ``BUILT``, without documents, dot files, tests and the web interface (``_is_read``).
So a file that only one of the two sources has (git metadata, whatever a packager drops by an ignore rule) does not
matter, and neither do times and modes. The list of paths is hashed with the contents: CMake globs in some folders,
so a file too many would be a different build.
"""

import hashlib
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from polykv_proxy.engine import paths
from polykv_proxy.engine.files import Say, download, file_lock, replace_dir, scratch_dir, sha256_file
from polykv_proxy.engine.git import run_git
from polykv_proxy.engine.problem import EngineProblem

BASE = "0c1e57098bba43ac29e6e3b677cdceebdd22334f"
TREE_SHA256 = "b44875fba3e8c0ade66493fef67c0981c81c6399a0b700f23c8c6d14ea2ddd75"
SDIST, SDIST_VERSION = "llama-cpp-python", "0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_SDIST_FOLDER = f"llama_cpp_python-{SDIST_VERSION}/vendor/llama.cpp/"

BUILT = (
    "CMakeLists.txt",
    "LICENSE",
    "licenses",
    "cmake",
    "common",
    "ggml",
    "include",
    "scripts",
    "src",
    "tools",
    "vendor",
)
_UI_READ = {"CMakeLists.txt", "sources.cmake", "ui.cpp.in", "ui.h.in"}


def pinned_tree(say: Say) -> Path:
    """A folder with the pinned tree, whole and unchanged; copy it before you write to it.

    Raises:  EngineProblem when the submodule was changed, or the tree cannot be fetched
    """
    if (submodule := paths.submodule_dir()) and _head(submodule) == BASE:
        if tree_sha256(submodule) != TREE_SHA256:
            raise EngineProblem(
                "llama.cpp/ was changed: restore it (git -C llama.cpp checkout . && git -C llama.cpp clean -xfd), "
                "changes to the engine belong in patches/"
            )
        return submodule
    cached = paths.cache_dir() / "source" / BASE[:12]
    with file_lock(cached.with_suffix(".lock"), say=say, waiting_for="it fetches the source of llama.cpp"):
        if not cached.is_dir() or tree_sha256(cached) != TREE_SHA256:
            say(f"fetching the source of llama.cpp {BASE[:8]} ({SDIST} {SDIST_VERSION}, 77 MB)")
            _fetch(cached)
    return cached


def copy_tree(tree: Path, target: Path) -> None:
    """Copy what the build and the patches need from a pinned tree."""
    for relative in _files(tree):
        copy = target / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / relative, copy)


def tree_sha256(tree: Path) -> str:
    """One hash over path and content of every file that the build reads."""
    whole = hashlib.sha256()
    for relative in sorted(filter(_is_read, _files(tree))):
        whole.update(f"{sha256_file(tree / relative)}  {relative}\n".encode())
    return whole.hexdigest()


def _is_read(relative: str) -> bool:
    path = PurePosixPath(relative)
    if path.suffix == ".md" or any(part.startswith(".") for part in path.parts):
        return False
    if path.parts[:2] == ("tools", "ui"):
        return len(path.parts) == 3 and path.name in _UI_READ
    return not (path.parts[0] == "tools" and "tests" in path.parts)


def _files(tree: Path) -> Iterator[str]:
    """Files below BUILT; of a git checkout only the tracked ones, so that a stray build folder does not count."""
    if (tree / ".git").exists():
        listed = run_git(["ls-files", "-z", "--", *BUILT], cwd=tree, step=f"listing {tree}").split("\0")
        yield from (path for path in listed if path and (tree / path).is_file())
        return
    for top in BUILT:
        if (tree / top).is_file():
            yield top
        yield from (path.relative_to(tree).as_posix() for path in (tree / top).rglob("*") if path.is_file())


def _head(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():
        return None
    return run_git(["rev-parse", "HEAD"], cwd=checkout, step=f"reading {checkout}").strip()


def _fetch(cached: Path) -> None:
    with scratch_dir(cached.parent) as scratch:
        sdist = download(SDIST, SDIST_VERSION, SDIST_SHA256, binary=False, into=scratch)
        tree = scratch / "tree"
        with tarfile.open(sdist) as archive:
            # Python before 3.11.4 (Debian 12 has 3.11.2) knows no filters; this archive is known by its hash anyway.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            for member in archive:
                if not member.name.startswith(_SDIST_FOLDER):
                    continue
                member.name = member.name.removeprefix(_SDIST_FOLDER)
                if member.name != ".git":  # a file that points nowhere: git would take the folder for a broken checkout
                    archive.extract(member, tree)
        if (found := tree_sha256(tree)) != TREE_SHA256:
            raise EngineProblem(
                f"the fetched source is not llama.cpp {BASE[:8]}: hash {found} instead of {TREE_SHA256}"
            )
        replace_dir(tree, cached)
