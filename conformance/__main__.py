"""`python -m conformance`: the official clients and llama.cpp's own tests, in front of stock and through the proxy."""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conformance import clients, upstream
from conformance.children import Children, Stopped
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
STOPPED = 128 + signal.SIGINT
"""The exit status, as of a shell."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description="The official openai and anthropic clients and llama.cpp's own server tests: what passes in front "
        "of a stock llama-server passes through the proxy.",
        epilog="Exit status: 0 when it does, except for what conformance/excuses.py lists; 1 when something else "
        "fails; 2 for wrong usage, or when the tests could not be run; 130 when it was stopped (Ctrl-C, SIGTERM): what "
        "was found by then is kept, and it says how to go on. A run of everything writes docs/conformance.md.",
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


def run(options: argparse.Namespace, folder: Path, store: Path | None, children: Children) -> int:
    """Everything that was asked for. ``store``: where what was found is kept, and looked for.

    Raises:  CannotRunError, Stopped
    """
    if options.resume and options.keyword:
        raise CannotRunError("--resume keeps whole files: leave -k out")
    tree = pinned_tree(say)
    known = sorted(path.stem for path in (tree / "tools/server/tests/unit").glob("test_*.py"))
    wanted = [name.removesuffix(".py") for name in options.files or [SCENARIOS, *known]]
    if unknown := set(wanted) - {SCENARIOS, *known}:
        raise CannotRunError(f"the pinned commit has no {', '.join(sorted(unknown))} in tools/server/tests/unit")
    kinds = {ARMS[arm] for arm in ["stock", *options.arms]}
    binaries = {kind: binary_path(kind) for kind in sorted(kinds)}
    suite = Suite(tree, folder / "models", binaries, children=children)
    found: dict[str, Found] = {}
    if SCENARIOS in wanted:
        found[SCENARIOS] = upstream.remembered(
            store,
            SCENARIOS,
            options.arms,
            lambda: clients.compare(suite, options.arms, folder, say, keyword=options.keyword),
        )
    if files := [name for name in wanted if name != SCENARIOS]:
        write_hub(suite.hub)
        with nursing(folder, children) as nursery:
            found["upstream"] = upstream.compare(
                replace(suite, nursery=nursery),
                files,
                options.arms,
                folder,
                say,
                keyword=options.keyword,
                n_jobs=options.jobs,
                store=store,
            )
    if is_whole(options):
        PAGE.write_text(page(found["upstream"], found[SCENARIOS], commit=BASE, versions=clients.versions()))
        say(f"written: {PAGE}")
    return report(found)


def go_on(arguments: Sequence[str], store: Path | None) -> str:
    """What a run that did not come to its end has done, and how to go on."""
    if store is None:
        return "a run with -k keeps nothing"
    n_done = len(list(store.glob("*.json")))
    if not n_done:
        return "nothing was done yet"
    resume = [] if parse_arguments(arguments).resume else ["--resume", str(store)]
    command = shlex.join([sys.executable, "-m", "conformance", *resume, *arguments])
    return f"{n_done} part{'s are' if n_done > 1 else ' is'} done and kept; go on with: {command}"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    folder = Path(tempfile.mkdtemp(prefix="polykv-conformance-"))
    store = options.resume or (None if options.keyword else folder.with_name(f"{folder.name}-found"))
    children = Children()
    ended = False

    def at_once() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        # Not `print`: the signal may have come in the middle of another one.
        os.write(sys.stderr.fileno(), f"stopped at once: {go_on(arguments, store)}\n".encode())

    with children.answering_signals(at_once):
        try:
            status = run(options, folder, store, children)
            ended = True
        except CannotRunError as e:
            say(str(e))
            status = 2
        except Stopped:
            status = STOPPED
        finally:
            children.end_all()
            if options.keep:
                for part in ("logs", "scenarios"):
                    if (folder / part).is_dir():
                        shutil.copytree(folder / part, options.keep / part, dirs_exist_ok=True)
            shutil.rmtree(folder)
            if not ended:
                say(f"stopped: {go_on(arguments, store)}")
            elif store is not None and not options.resume:
                shutil.rmtree(store, ignore_errors=True)  # only what was found is in it
    return status


if __name__ == "__main__":
    sys.exit(main())
