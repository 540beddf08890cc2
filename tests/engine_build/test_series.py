"""The patch series: applied without fuzz, exported to the same bytes."""

import subprocess
from pathlib import Path

import pytest

from polykv_proxy.engine.problem import EngineProblem
from polykv_proxy.engine.series import apply_series, check_series, export_series, load_series

BASE_FILE = "".join(f"line {number}\n" for number in range(40))


def git(tree: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org", "-c", "diff.noprefix=true"]
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "a.cpp").write_text(BASE_FILE)
    (folder / ".gitignore").write_text("*.inc\n")
    return folder


@pytest.fixture
def work(tmp_path: Path, base: Path) -> Path:
    """A tree with two commits on the base: a hook, and a new file that an ignore rule would hide."""
    folder = tmp_path / "work"
    (folder / "src").mkdir(parents=True)
    for name in ("src/a.cpp", ".gitignore"):
        (folder / name).write_text((base / name).read_text())
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "base")
    (folder / "src" / "a.cpp").write_text(BASE_FILE.replace("line 20\n", "line 20\n    polykv_hook();\n"))
    git(folder, "commit", "-qam", "server: call the hook\n\nWhy: the hook wants it, naïvely.")
    (folder / "src" / "own.inc").write_text("// own\n")
    git(folder, "add", "--force", "src/own.inc")
    git(folder, "commit", "-qm", "server: own file")
    return folder


@pytest.fixture
def exported(tmp_path: Path, work: Path) -> Path:
    folder = tmp_path / "patches"
    export_series(work, folder)
    (folder / "BASE").write_text("0123456789abcdef0123456789abcdef01234567\n")
    return folder


def test_exported_series_checks(base: Path, exported: Path) -> None:
    series = load_series(exported)

    assert series.names == ["0001-server-call-the-hook.patch", "0002-server-own-file.patch"]
    check_series(base, series)


def test_headers_do_not_depend_on_who_and_when(exported: Path) -> None:
    text = (exported / "0001-server-call-the-hook.patch").read_text()

    assert text.startswith(f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: PolyKV <polykv@localhost>\nDate: ")
    assert "Somebody" not in text
    assert "Why: the hook wants it, naïvely." in text
    assert not text.rstrip().endswith(subprocess.check_output(["git", "--version"], text=True).split()[2])


def test_apply_changes_the_tree_also_inside_another_repository(base: Path, exported: Path) -> None:
    git(base.parent, "init", "-q")
    (base.parent / ".gitignore").write_text("base/\n")

    apply_series(base, load_series(exported))

    assert "    polykv_hook();\n" in (base / "src" / "a.cpp").read_text()
    assert (base / "src" / "own.inc").read_text() == "// own\n"
    assert not (base / ".git").exists()


def test_fuzz_is_refused(base: Path, exported: Path) -> None:
    (base / "src" / "a.cpp").write_text(BASE_FILE.replace("line 19\n", "line nineteen\n"))

    with pytest.raises(EngineProblem, match=r"applying 0001-server-call-the-hook\.patch failed"):
        check_series(base, load_series(exported))
    with pytest.raises(EngineProblem, match=r"applying 0001-server-call-the-hook\.patch failed") as caught:
        apply_series(base, load_series(exported))
    assert "patch does not apply" in caught.value.detail


@pytest.mark.parametrize(
    ("ours", "edited"),
    [
        pytest.param("Date: Thu, 1 Jan 2026", "Date: Fri, 2 Jan 2026", id="another date"),
        pytest.param("src/a.cpp | 1 +\n", "src/a.cpp | 2 +\n", id="a stale diffstat"),
        pytest.param("@@ -19,6 +19,7 @@", "@@ -18,6 +18,7 @@", id="a shifted hunk"),
    ],
)
def test_patch_edited_by_hand_is_noticed(base: Path, exported: Path, ours: str, edited: str) -> None:
    patch = exported / "0001-server-call-the-hook.patch"
    assert ours in patch.read_text()
    patch.write_text(patch.read_text().replace(ours, edited))

    with pytest.raises(EngineProblem, match=r"0001-server-call-the-hook\.patch differs") as caught:
        check_series(base, load_series(exported))
    assert caught.value.detail.startswith("line ")


def test_export_replaces_the_old_series(work: Path, exported: Path) -> None:
    git(work, "reset", "-q", "--hard", "HEAD~1")

    export_series(work, exported)

    assert load_series(exported).names == ["0001-server-call-the-hook.patch"]


def test_export_refuses_uncommitted_changes(work: Path, tmp_path: Path) -> None:
    (work / "src" / "a.cpp").write_text("changed\n")

    with pytest.raises(EngineProblem, match="not committed"):
        export_series(work, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_empty_series_is_fine(base: Path, tmp_path: Path) -> None:
    (tmp_path / "BASE").write_text("0123456789abcdef0123456789abcdef01234567\n")
    (tmp_path / "series").write_text("# nothing yet\n\n")
    series = load_series(tmp_path)

    apply_series(base, series)
    check_series(base, series)

    assert (base / "src" / "a.cpp").read_text() == BASE_FILE


@pytest.mark.parametrize(
    ("series", "complaint"),
    [
        pytest.param("0009-gone.patch\n", "not beside it: 0009-gone.patch", id="missing file"),
        pytest.param("0001-server-call-the-hook.patch\n", "0002-server-own-file.patch is in", id="forgotten file"),
        pytest.param("0002-server-own-file.patch\n" * 2, "names a patch twice", id="doubled"),
    ],
)
def test_series_and_folder_must_agree(exported: Path, series: str, complaint: str) -> None:
    (exported / "series").write_text(series)

    with pytest.raises(EngineProblem, match=complaint):
        load_series(exported)


def test_base_must_be_a_commit(exported: Path) -> None:
    (exported / "BASE").write_text("main\n")

    with pytest.raises(EngineProblem, match="does not hold a commit hash"):
        load_series(exported)


def test_missing_git_is_one_line_that_says_what_to_install(
    base: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(base))

    with pytest.raises(EngineProblem, match="git is not installed: install it"):
        apply_series(base, load_series(exported))
