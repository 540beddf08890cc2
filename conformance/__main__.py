"""`python -m conformance`: the official clients and llama.cpp's own tests, in front of stock and through the proxy."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conformance import clients, upstream
from conformance.hub import write_hub
from conformance.page import page
from conformance.server import ARMS
from conformance.suite import CannotRunError, Suite, nursing
from conformance.upstream import Found
from polykv_proxy.engine.source import BASE, pinned_tree
from tests.engine.binaries import binary_path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "conformance.md"
MODES = ("proxy", "proxy-stock")
SCENARIOS = "scenarios"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description="The official openai and anthropic clients and llama.cpp's own server tests: what passes in front "
        "of a stock llama-server passes through the proxy.",
        epilog="Exit status: 0 when it does, except for what conformance/excuses.py lists; 1 when something else "
        "fails; 2 for wrong usage, or when the tests could not be run. A run of everything writes docs/conformance.md.",
    )
    parser.add_argument("-k", dest="keyword", metavar="EXPRESSION", help="only these tests, as pytest -k selects them")
    parser.add_argument(
        "--files", nargs="+", metavar="FILE", help=f"only these of llama.cpp's files; `{SCENARIOS}` for the clients"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        default=list(MODES),
        choices=[arm for arm in ARMS if arm != "stock"],
        help="what is compared with stock; default: both modes of the proxy",
    )
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="files at a time, default %(default)s"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FOLDER", help="keep what was found there, file by file, and do not run it again"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy logs and results of every run into it")
    return parser.parse_args(arguments)


def is_whole(options: argparse.Namespace) -> bool:
    return not options.keyword and not options.files and tuple(options.arms) == MODES


def report(found: dict[str, Found]) -> int:
    """Print what differs and the counts. Gives the exit status."""
    for what, it in found.items():
        n_passed = sum(outcome.how == "passed" for outcome in it.stock.values())
        print(f"{what}: {len(it.stock)} tests, {n_passed} pass in front of stock")
        for name, arm in it.arms.items():
            print(
                f"  {name:12} {len(arm.passed)} pass, {len(arm.excused)} excused, {len(arm.unstable)} unstable, "
                f"{len(arm.disturbed)} disturbed, {len(arm.unexpected)} FAIL"
            )
            for how in ("excused", "unstable", "disturbed", "unexpected"):
                for test, why in getattr(arm, how).items():
                    print(f"    {how}: {test}\n      {why}")
    return 1 if any(it.differs for it in found.values()) else 0


def run(options: argparse.Namespace, folder: Path) -> int:
    """Everything that was asked for.

    Raises:  CannotRunError
    """
    tree = pinned_tree(say)
    known = sorted(path.stem for path in (tree / "tools/server/tests/unit").glob("test_*.py"))
    wanted = [name.removesuffix(".py") for name in options.files or [SCENARIOS, *known]]
    if unknown := set(wanted) - {SCENARIOS, *known}:
        raise CannotRunError(f"the pinned commit has no {', '.join(sorted(unknown))} in tools/server/tests/unit")
    kinds = {ARMS[arm] for arm in ["stock", *options.arms]}
    suite = Suite(tree, folder / "models", {kind: binary_path(kind) for kind in sorted(kinds)})
    found: dict[str, Found] = {}
    if options.resume and options.keyword:
        raise CannotRunError("--resume keeps whole files: leave -k out")
    if SCENARIOS in wanted:
        found[SCENARIOS] = upstream.remembered(
            options.resume,
            SCENARIOS,
            options.arms,
            lambda: clients.compare(suite, options.arms, folder, say, keyword=options.keyword),
        )
    if files := [name for name in wanted if name != SCENARIOS]:
        write_hub(suite.hub)
        with nursing(folder) as nursery:
            found["upstream"] = upstream.compare(
                replace(suite, nursery=nursery),
                files,
                options.arms,
                folder,
                say,
                keyword=options.keyword,
                n_jobs=options.jobs,
                store=options.resume,
            )
    if is_whole(options):
        PAGE.write_text(page(found["upstream"], found[SCENARIOS], commit=BASE, versions=clients.versions()))
        say(f"written: {PAGE}")
    return report(found)


def main() -> int:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="polykv-conformance-") as scratch:
        folder = Path(scratch)
        try:
            return run(options, folder)
        except CannotRunError as e:
            say(str(e))
            return 2
        finally:
            if options.keep:
                for part in ("logs", "scenarios"):
                    if (folder / part).is_dir():
                        shutil.copytree(folder / part, options.keep / part, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
