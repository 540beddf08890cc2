"""llama-server's own tests, unchanged, against three servers: stock, patched with pools, and patched behind the proxy.

    python -m benchmarks.upstream_tests [--files test_basic test_slot_save ...] [--arms stock proxy]

The test files are those of the pinned commit; only the models they would download are replaced by the tests' chat
model, so some of them fail everywhere (they expect the words of another model). What counts: whatever passes on stock
passes on the others. Ends with 1 when something does not and is not listed in EXPECTED with its reason.

Where a test asks for the split cache, the patched arms get a unified one with the same context per slot: pools are only
shared there, and on a split cache every pool would take context from the slots.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks import upstream_server
from polykv_proxy.engine.source import pinned_tree
from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.harness import free_port

FILES = ("test_basic", "test_completion", "test_chat_completion", "test_slot_save", "test_ctx_shift")
ARMS = ("stock", "patched", "proxy")

# Tests that pass on stock and need not pass here, with the reason; a name without parameters covers all of them.
FULL_CACHE = "a full cache truncates one answer here, where stock fails all of them"
UNIFIED = "two slots of a unified cache round differently, on stock with --kv-unified, too"
EXPECTED: dict[str, dict[str, str]] = {
    "patched": {
        "test_completion::test_completion_unified": FULL_CACHE,
        "test_completion::test_completion_with_tokens_input": UNIFIED,
    },
    "proxy": {
        "test_completion::test_completion_unified": FULL_CACHE,
        "test_completion::test_completion_with_tokens_input": UNIFIED,
        "test_basic::test_server_multiple_addresses": "the proxy listens on one address",
    },
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
    self.n_threads = self.n_threads or 2
    return start(self, *args, **kwargs)

utils.ServerProcess.start = start_with_our_model
"""


def run_arm(arm: str, tests: Path, selected: list[str]) -> dict[str, str]:
    """Outcome per test: passed, failed or skipped. ``selected``: files or single tests, as pytest names them."""
    scratch = tests.parent / arm
    scratch.mkdir()
    launcher = scratch / "llama-server"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m {upstream_server.__name__} {arm} "$@"\n')
    launcher.chmod(0o755)
    results = scratch / "results.xml"
    root = Path(__file__).resolve().parent.parent
    environment = os.environ | {
        "LLAMA_SERVER_BIN_PATH": str(launcher),
        "UPSTREAM_TESTS_BINARY": str(binary_path("stock" if arm == "stock" else "patched")),
        "UPSTREAM_TESTS_MODEL": str(chat_model_path()),
        "PYTHONPATH": os.pathsep.join([str(tests), str(root)]),
        "PORT": str(free_port()),
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "polykv_swap",
        "-q",
        "--junit-xml",
        str(results),
        "-p",
        "no:cacheprovider",
    ]
    command += ["-o", "timeout=300", "-o", "addopts=", *selected]
    with (scratch / "pytest.log").open("w") as log:
        subprocess.run(command, cwd=tests, env=environment, stdout=log, stderr=log, check=False)
    if not results.exists():
        raise RuntimeError((scratch / "pytest.log").read_text()[-4000:])
    return {name_of(case): outcome(case) for case in ET.parse(results).iter("testcase")}


def passing(outcomes: dict[str, str]) -> list[str]:
    return [
        f"unit/{file}.py::{test}" for file, _, test in (n.partition("::") for n in outcomes if outcomes[n] == "passed")
    ]


def name_of(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"


def outcome(case: ET.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "failed" if case.find("failure") is not None or case.find("error") is not None else "passed"


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="*", default=list(FILES))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--keep", type=Path, help="copy the logs of every arm into this folder")
    options = parser.parse_args()
    outcomes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="polykv-upstream-tests-") as folder:
        tests = Path(folder) / "tests"
        shutil.copytree(pinned_tree(lambda line: print(line, file=sys.stderr)) / "tools/server/tests", tests)
        (tests / "polykv_swap.py").write_text(PLUGIN)
        for arm in dict.fromkeys(["stock", *options.arms]):
            # What fails on stock, whose model it was not written for, says nothing about the others.
            selected = passing(outcomes["stock"]) if outcomes else [f"unit/{name}.py" for name in options.files]
            print(f"running {len(selected)} files or tests against {arm}", file=sys.stderr, flush=True)
            outcomes[arm] = run_arm(arm, tests, selected)
            if options.keep:
                shutil.copytree(tests.parent / arm, options.keep / arm, dirs_exist_ok=True)
    return report(outcomes)


def report(outcomes: dict[str, dict[str, str]]) -> int:
    passed = {name for name, how in outcomes["stock"].items() if how == "passed"}
    total = len(outcomes["stock"])
    print(f"{len(passed)} of {total} tests pass on stock with this model")
    unexpected = 0
    for arm, results in outcomes.items():
        counts = {how: sum(1 for value in results.values() if value == how) for how in ("passed", "failed", "skipped")}
        also = sum(results.get(name) == "passed" for name in passed)
        print(f"{arm:8} {counts}; of the {len(passed)} that pass on stock: {also}")
        for name in sorted(passed):
            if results.get(name) == "passed":
                continue
            reason = EXPECTED.get(arm, {}).get(name.partition("[")[0])
            unexpected += reason is None
            print(f"  {results.get(name, 'missing')}  {name}  {reason or 'UNEXPECTED'}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
