"""The pinned tree: a git checkout and a plain copy are the same, anything the build reads counts, nothing else does."""

import subprocess
from pathlib import Path

import pytest

from polykv_proxy.engine import paths, source
from polykv_proxy.engine.source import copy_tree, tree_sha256

FILES = {
    "CMakeLists.txt": "project(x)\n",
    "common/arg.cpp": "int main() {}\n",
    "ggml/src/ggml-cuda/a.cu": "// globbed\n",
    "tools/server/README.md": "words\n",
    "tools/server/tests/unit/test_a.py": "def test_a(): pass\n",
    "tools/ui/CMakeLists.txt": "# ui\n",
    "tools/ui/src/app.html": "<html>\n",
    "docs/build.md": "words\n",
}


def write_tree(folder: Path) -> Path:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "plain")


def test_checkout_and_plain_copy_have_one_hash(tmp_path: Path, tree: Path) -> None:
    checkout = write_tree(tmp_path / "checkout")
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    subprocess.run(["git", "add", "."], cwd=checkout, check=True)
    (checkout / "ggml" / "build").mkdir()
    (checkout / "ggml" / "build" / "stray.cu").write_text("not tracked\n")

    assert tree_sha256(checkout) == tree_sha256(tree)


@pytest.mark.parametrize("name", ["common/arg.cpp", "ggml/src/ggml-cuda/b.cu", "tools/ui/CMakeLists.txt"])
def test_what_the_build_reads_counts(tree: Path, name: str) -> None:
    before = tree_sha256(tree)
    (tree / name).write_text("changed or new\n")

    assert tree_sha256(tree) != before


@pytest.mark.parametrize(
    "name",
    [
        "tools/server/README.md",
        "tools/server/tests/unit/test_a.py",
        "tools/ui/src/app.html",
        "src/.clang-tidy",
        "docs/x",
    ],
)
def test_what_the_build_never_reads_does_not_count(tree: Path, name: str) -> None:
    before = tree_sha256(tree)
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("changed or new\n")

    assert tree_sha256(tree) == before


def test_moved_file_counts(tree: Path) -> None:
    before = tree_sha256(tree)
    (tree / "common" / "arg.cpp").rename(tree / "common" / "arg2.cpp")

    assert tree_sha256(tree) != before


def test_copy_has_the_same_hash_and_what_patches_may_touch(tmp_path: Path, tree: Path) -> None:
    copy_tree(tree, tmp_path / "copy")

    assert tree_sha256(tmp_path / "copy") == tree_sha256(tree)
    assert (tmp_path / "copy" / "tools" / "server" / "README.md").is_file()
    assert not (tmp_path / "copy" / "docs").exists()


def test_pinned_source_is_whole_and_matches_the_series(source_tree: Path) -> None:
    assert tree_sha256(source_tree) == source.TREE_SHA256
    assert not (source_tree / ".git").is_file()  # the dangling file of the source distribution
    assert (paths.patches_dir() / "BASE").read_text().strip() == source.BASE


def test_submodule_of_the_project_is_pinned_to_the_same_commit() -> None:
    root = paths.checkout_dir()
    assert root is not None
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    entry = subprocess.run(
        ["git", "ls-tree", "HEAD", "llama.cpp"], cwd=root, capture_output=True, text=True, check=True
    )

    assert entry.stdout.split()[:3] == ["160000", "commit", source.BASE]


def test_damaged_cache_is_fetched_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetch itself is made to fail: that it was tried is the point."""
    cached = cache / "source" / source.BASE[:12]
    cached.unlink()
    write_tree(cached)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    said: list[str] = []

    with pytest.raises(source.EngineProblem, match=r"fetching llama-cpp-python==0\.3\.36 failed"):
        source.pinned_tree(said.append)
    assert said[0].startswith("fetching the source of llama.cpp")


def test_empty_submodule_folder_is_not_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "checkout_dir", lambda: tmp_path)
    (tmp_path / "llama.cpp").mkdir()
    assert paths.submodule_dir() is None

    write_tree(tmp_path / "llama.cpp")
    assert paths.submodule_dir() == tmp_path / "llama.cpp"
