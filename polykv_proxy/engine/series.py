"""The patch series: our only changes to llama.cpp, and the checks that keep it readable.

``patches/series`` names the patches in order, one per line; ``#`` starts a comment. Every file is in ``git
format-patch`` form with stable headers, so that the same change always gives the same bytes: a zero hash in the From
line, one author, one date, full blob hashes, no signature with a git version.

check   apply the series to the base tree without fuzz, one commit per patch, export again, compare byte for byte
export  write the series from a git tree whose first commit is the base and which holds one commit per patch
"""

import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.engine.git import AUTHOR, DATE, run_git
from polykv_proxy.engine.problem import EngineProblem

_FORMAT = (
    "format-patch",
    "--zero-commit",
    "--no-signature",
    "--no-numbered",
    "--no-attach",
    "--no-thread",
    "--no-cover-letter",
    "--no-renames",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-relative",
    "--no-indent-heuristic",
    "--full-index",
    "--binary",
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=myers",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--stat=80",
    "--summary",
)
_TOUCHED = re.compile(r"^(?:diff --git a/(.+) b/\1|--- a/(.+)|\+\+\+ b/(.+))$")


@dataclass(frozen=True)
class Series:
    """The pinned commit and the patches on top of it, in order."""

    base: str
    patches: tuple[Path, ...]

    @property
    def names(self) -> list[str]:
        return [patch.name for patch in self.patches]


def load_series(patches_dir: Path) -> Series:
    """Read BASE and series; refuse names that are missing, doubled or not in the folder, and patches left out."""
    base_file, series_file = patches_dir / "BASE", patches_dir / "series"
    for needed in (base_file, series_file):
        if not needed.is_file():
            raise EngineProblem(f"{needed} is missing")
    base = base_file.read_text(encoding="utf-8").strip()
    if not re.fullmatch(r"[0-9a-f]{40}", base):
        raise EngineProblem(f"{base_file} does not hold a commit hash: {base!r}")
    lines = (line.split("#", 1)[0].strip() for line in series_file.read_text(encoding="utf-8").splitlines())
    names = [line for line in lines if line]
    if len(set(names)) != len(names):
        raise EngineProblem(f"{series_file} names a patch twice")
    present = {path.name for path in patches_dir.glob("*.patch")}
    if missing := [name for name in names if name not in present]:
        raise EngineProblem(f"{series_file} names a patch that is not beside it: {missing[0]}")
    if forgotten := sorted(present - set(names)):
        raise EngineProblem(f"{forgotten[0]} is in {patches_dir} but not in series")
    return Series(base, tuple(patches_dir / name for name in names))


def apply_series(tree: Path, series: Series) -> None:
    """Apply every patch to the plain files of ``tree``; git apply allows no fuzz.

    ``tree`` becomes a git repository for the moment: inside another repository git apply silently skips
    files that the outer one ignores.
    """
    if not series.patches:
        return
    run_git(["init", "-q"], cwd=tree, step="preparing the source tree")
    for patch in series.patches:
        run_git(["apply", "--whitespace=nowarn", patch.resolve()], cwd=tree, step=f"applying {patch.name}")
    shutil.rmtree(tree / ".git")


def check_series(tree: Path, series: Series) -> None:
    """Raise EngineProblem unless the series applies to ``tree`` exactly and exports to the same bytes."""
    with tempfile.TemporaryDirectory(prefix="polykv-patches-") as scratch:
        repo = Path(scratch, "tree")
        repo.mkdir()
        _commit_base(repo, tree, _touched_paths(series.patches))
        for patch in series.patches:
            run_git(
                ["am", "--quiet", "--keep-cr", "--whitespace=nowarn", patch.resolve()],
                cwd=repo,
                step=f"applying {patch.name}",
            )
        exported = Path(scratch, "exported")
        names = export_series(repo, exported)
        if names != series.names:
            raise EngineProblem(f"exporting the series again gives other file names: {', '.join(names)}")
        for patch in series.patches:
            if patch.read_bytes() != (again := exported / patch.name).read_bytes():
                raise EngineProblem(
                    f"{patch.name} differs from what exporting it again gives: write it with "
                    "`polykvctl engine export-patches TREE`",
                    detail=_first_difference(patch, again),
                )


def export_series(tree: Path, patches_dir: Path) -> list[str]:
    """Write ``NNNN-*.patch`` and ``series`` from the commits of ``tree`` after its first one; old patches go away."""
    if run_git(["status", "--porcelain", "--untracked-files=no"], cwd=tree, step="reading the tree").strip():
        raise EngineProblem(f"{tree} has changes that are not committed")
    if run_git(["rev-list", "--merges", "HEAD"], cwd=tree, step="reading the tree").strip():
        raise EngineProblem(f"{tree} holds a merge: a series is a straight line of commits")
    base = run_git(["rev-list", "--max-parents=0", "HEAD"], cwd=tree, step="reading the tree").strip()
    with tempfile.TemporaryDirectory(prefix="polykv-export-") as scratch:
        run_git([*_FORMAT, "-o", scratch, f"{base}..HEAD"], cwd=tree, step="exporting the series")
        written = sorted(Path(scratch).iterdir())
        patches_dir.mkdir(parents=True, exist_ok=True)
        for old in patches_dir.glob("*.patch"):
            old.unlink()
        for patch in written:
            Path(patches_dir, patch.name).write_bytes(_with_stable_headers(patch.read_bytes()))
    names = [patch.name for patch in written]
    Path(patches_dir, "series").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return names


def _with_stable_headers(patch: bytes) -> bytes:
    head, _, rest = patch.partition(b"\nSubject:")
    head = re.sub(rb"(?m)^From: .*(\n[ \t].*)*", f"From: {AUTHOR}".encode(), head)
    head = re.sub(rb"(?m)^Date: .*", f"Date: {DATE}".encode(), head)
    return head + b"\nSubject:" + rest


def _touched_paths(patches: Iterable[Path]) -> set[str]:
    touched: set[str] = set()
    for patch in patches:
        for line in patch.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            if found := _TOUCHED.match(line):
                touched.add(next(path for path in found.groups() if path))
    return touched


def _commit_base(repo: Path, tree: Path, paths: set[str]) -> None:
    """A repository of just the files that the series touches: blob hashes and hunks are the same, in a second."""
    run_git(["init", "-q"], cwd=repo, step="preparing a scratch repository")
    for path in sorted(paths):
        if (source := tree / path).is_file():
            target = repo / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    run_git(["add", "--all", "--force"], cwd=repo, step="preparing a scratch repository")
    run_git(["commit", "-q", "--allow-empty", "-m", "base"], cwd=repo, step="preparing a scratch repository")


def _first_difference(ours: Path, theirs: Path) -> str:
    left, right = ours.read_bytes().splitlines(), theirs.read_bytes().splitlines()
    for number, (a, b) in enumerate(zip(left, right, strict=False), start=1):
        if a != b:
            return f"line {number}:\n- {a.decode('utf-8', 'replace')}\n+ {b.decode('utf-8', 'replace')}"
    return f"{len(left)} lines against {len(right)}, or another line ending at the end"
