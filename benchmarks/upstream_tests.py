"""llama-server's own tests, unchanged, against four servers: whatever passes on stock passes on the others.

    python -m benchmarks.upstream_tests [--arms patched proxy] [--files test_basic test_slot_save] [-k EXPRESSION]

stock        a stock build of the pinned commit
patched-off  the patched build with `--polykv-max-pools 0`: a test that passes on stock passes, without exception
patched      the patched build with pools
proxy        the same, through the proxy

The test files are those of the pinned commit. Every test starts its server with its own flags; what is added is in
`benchmarks.upstream_server`. The models they would download are replaced by the tests' chat model, so some fail on
stock already (they expect the words of another model); those say nothing and are not run against the others. What
fails on another arm is repeated on stock; if it fails there in the same way now and then, it is called unstable.

Exit status: 0 when everything that passes on stock passes, except what EXCUSED lists with its reason and
what is unstable; 1 when something else fails; 2 for wrong usage, or when the tests could not be run.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import upstream_server
from polykv_proxy.engine.source import pinned_tree
from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.harness import free_port

FILES = ("test_basic", "test_completion", "test_chat_completion", "test_slot_save", "test_ctx_shift")
ARMS = ("stock", "patched-off", "patched", "proxy")
N_AGAIN = 5


@dataclass(frozen=True)
class Excuse:
    """Why a test may fail, and the failed assertion it is for: no other failure of that test is excused."""

    assertion: str
    reason: str


FULL_CACHE = Excuse(
    'assert res.body["timings"]["predicted_n"] == n_predict',
    "its requests outgrow a unified cache: llama-server fails all of them, and the test takes no answer that is cut "
    "short; with pools one is cut short (truncated) and the others finish",
)
EXCUSED: dict[str, dict[str, Excuse]] = {
    arm: {
        f"test_completion::test_completion_unified[256-4-n_predict_vals{case}-expected_success{case}]": FULL_CACHE
        for case in (1, 2)
    }
    for arm in ("patched", "proxy")
}

# Loaded by pytest before the tests: no downloads, one model for everything.
PLUGIN = """
import contextlib, os, sys, types

wget = types.ModuleType("wget")
filelock = types.ModuleType("filelock")
filelock.FileLock = lambda path: contextlib.nullcontext()
sys.modules.setdefault("wget", wget)
sys.modules.setdefault("filelock", filelock)

import utils

utils.ServerPreset.load_all = staticmethod(lambda: None)
start = utils.ServerProcess.start

def start_with_our_model(self, *args, **kwargs):
    self.model_hf_repo = self.model_hf_file = self.model_url = None
    self.model_file = os.environ["UPSTREAM_TESTS_MODEL"]
    self.n_threads = self.n_threads or 1  # two wait for each other on a busy machine
    return start(self, *args, **kwargs)

utils.ServerProcess.start = start_with_our_model
"""

LAUNCHER = """#!/bin/sh
exec {python} -c 'from {module} import main; raise SystemExit(main())' {arm} "$@"
"""


class CannotRunError(Exception):
    """The tests could not be run at all; the message is for a person."""


@dataclass(frozen=True)
class Outcome:
    """How one test ended: passed, failed or skipped, and what pytest printed about a failure."""

    how: str
    said: str = ""


@dataclass
class Arm:
    """What one arm made of the tests that pass on stock."""

    passed: list[str] = field(default_factory=list)
    excused: dict[str, str] = field(default_factory=dict)
    unstable: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)


def run_arm(
    arm: str,
    binary: Path,
    tests: Path,
    selected: Sequence[str],
    *,
    keyword: str | None = None,
    folder: str | None = None,
) -> dict[str, Outcome]:
    """Outcome per test. ``selected``: files or single tests, as pytest names them. ``folder``: of its logs.

    Raises:  CannotRunError
    """
    scratch = tests.parent / (folder or arm)
    scratch.mkdir()
    launcher = scratch / "llama-server"
    launcher.write_text(LAUNCHER.format(python=sys.executable, module=upstream_server.__name__, arm=arm))
    launcher.chmod(0o755)
    results = scratch / "results.xml"
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | {
        "LLAMA_SERVER_BIN_PATH": str(launcher),
        "UPSTREAM_TESTS_BINARY": str(binary),
        "UPSTREAM_TESTS_MODEL": str(chat_model_path()),
        "PYTHONPATH": os.pathsep.join([str(tests), str(root)]),
        "PORT": str(free_port()),
        "PYTHONWARNINGS": "ignore",
        "NO_PROXY": "*",
    }
    command = [sys.executable, "-m", "pytest", "-p", "polykv_swap", "-p", "no:cacheprovider", "-q"]
    command += ["-o", "timeout=300", "-o", "addopts=", "--junit-xml", str(results)]
    command += [*selected, *(["-k", keyword] if keyword else [])]
    with (scratch / "pytest.log").open("w") as log:
        status = subprocess.run(command, cwd=tests, env=environment, stdout=log, stderr=log, check=False).returncode
    if status not in (0, 1):  # 1: some tests failed
        end = (scratch / "pytest.log").read_text()[-4000:]
        raise CannotRunError(f"{end}\npytest ended with status {status} on {arm}")
    return {name_of(case): outcome_of(case) for case in ET.parse(results).iter("testcase")}


def name_of(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"


def outcome_of(case: ET.Element) -> Outcome:
    if case.find("skipped") is not None:
        return Outcome("skipped")
    said = "\n".join(found.text or "" for found in case if found.tag in ("failure", "error"))
    return Outcome("failed", said) if said else Outcome("passed")


def pytest_name(name: str) -> str:
    file, _, test = name.partition("::")
    return f"unit/{file}.py::{test}"


def judged(arm: str, wanted: Sequence[str], outcomes: dict[str, Outcome]) -> Arm:
    """Sort what passes on stock by what this arm made of it."""
    found = Arm()
    for name in wanted:
        outcome = outcomes.get(name, Outcome("missing"))
        excuse = EXCUSED.get(arm, {}).get(name)
        if outcome.how == "passed":
            found.passed.append(name)
        elif excuse is not None and failed_assertion(outcome.said) == excuse.assertion:
            found.excused[name] = excuse.reason
        else:
            found.unexpected[name] = f"{outcome.how}: {failed_assertion(outcome.said) or 'see --keep'}"
    return found


def set_aside_if_unstable(arm: Arm, name: str, outcomes: dict[str, Outcome], on_stock: Sequence[Outcome]) -> None:
    """A test that fails on stock in the same way now and then (its model ends an answer by chance) says nothing."""
    assertion = failed_assertion(outcomes[name].said) if name in outcomes else ""
    n_same = sum(outcome.how == "failed" and failed_assertion(outcome.said) == assertion for outcome in on_stock)
    if assertion and n_same:
        arm.unstable[name] = (
            f"{arm.unexpected.pop(name)}\n  on stock it fails so, too: {n_same} of {len(on_stock)} times"
        )


def failed_assertion(said: str) -> str:
    """The statement of the test that failed: pytest marks it in the listing it prints."""
    marked = [line[1:].strip() for line in said.splitlines() if line.startswith(">")]
    return marked[-1] if marked else ""


def report(stock: dict[str, Outcome], arms: dict[str, Arm]) -> int:
    """Print the table, and each test that differs. Gives the exit status."""
    counts = Counter(outcome.how for outcome in stock.values())
    print(
        f"stock: {len(stock)} tests, {counts['passed']} pass with this model "
        f"({counts['failed']} fail, {counts['skipped']} skipped)"
    )
    print(f"\n{'arm':12}{'run':>6}{'pass':>6}{'excused':>9}{'unstable':>10}{'unexpected':>12}")
    for name, arm in arms.items():
        n_run = len(arm.passed) + len(arm.excused) + len(arm.unstable) + len(arm.unexpected)
        print(
            f"{name:12}{n_run:6}{len(arm.passed):6}{len(arm.excused):9}{len(arm.unstable):10}{len(arm.unexpected):12}"
        )
    for name, arm in arms.items():
        for test, why in arm.unexpected.items():
            print(f"\n{name}: UNEXPECTED {test}\n  {why}")
        for test, why in arm.unstable.items():
            print(f"\n{name}: unstable {test}\n  {why}")
        for test, why in arm.excused.items():
            print(f"\n{name}: excused {test}\n  {why}")
    return 1 if any(arm.unexpected for arm in arms.values()) else 0


def compare(tests: Path, selected: Sequence[str], options: argparse.Namespace) -> int:
    """Run stock, then what passes there on the other arms.

    Raises:  CannotRunError
    """
    kinds = {arm: "stock" if arm == "stock" else "patched" for arm in ["stock", *options.arms]}
    binaries = {kind: binary_path(kind) for kind in set(kinds.values())}  # built before anything is run
    stock: dict[str, Outcome] = {}
    passing: list[str] = []
    arms: dict[str, Arm] = {}
    numbers = itertools.count()
    for arm, kind in kinds.items():
        what = f"{len(passing)} tests" if stock else f"{len(selected)} files"
        print(f"running {what} against {arm}", file=sys.stderr, flush=True)
        try:
            if arm == "stock":
                stock = run_arm(arm, binaries[kind], tests, selected, keyword=options.keyword)
                passing = [name for name, outcome in stock.items() if outcome.how == "passed"]
                if not passing:
                    raise CannotRunError("no test passes on stock: there is nothing to compare")
            else:
                outcomes = run_arm(arm, binaries[kind], tests, [pytest_name(name) for name in passing])
                arms[arm] = judged(arm, passing, outcomes)
                for name in list(arms[arm].unexpected):
                    again = (
                        run_arm("stock", binaries["stock"], tests, [pytest_name(name)], folder=f"again-{next(numbers)}")
                        for _ in range(N_AGAIN)
                    )
                    set_aside_if_unstable(arms[arm], name, outcomes, [outcome[name] for outcome in again])
        finally:
            if options.keep:
                shutil.copytree(tests.parent / arm, options.keep / arm, dirs_exist_ok=True)
    return report(stock, arms)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.upstream_tests",
        description=summary,
        epilog=rest.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--files", nargs="+", default=list(FILES), metavar="FILE", help=f"test files, default: {' '.join(FILES)}"
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, help="stock always runs; default: all")
    parser.add_argument("-k", dest="keyword", metavar="EXPRESSION", help="only these tests, as pytest -k selects them")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy logs and results of every arm into it")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    upstream = pinned_tree(lambda line: print(line, file=sys.stderr)) / "tools/server/tests"
    selected = [f"unit/{name.removesuffix('.py')}.py" for name in options.files]
    try:
        for file in selected:
            if not (upstream / file).is_file():
                raise CannotRunError(f"the pinned commit has no {file} in tools/server/tests")
        with tempfile.TemporaryDirectory(prefix="polykv-upstream-tests-") as folder:
            tests = Path(folder) / "tests"
            shutil.copytree(upstream, tests)
            (tests / "polykv_swap.py").write_text(PLUGIN)
            return compare(tests, selected, options)
    except CannotRunError as e:
        print(e, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
