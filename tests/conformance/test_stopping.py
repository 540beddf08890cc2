"""Nothing outlives a run that is stopped, or that fails in the middle; and it can be gone on with.

A run of two made-up test files, whose server is a process that sleeps.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conformance.children import Children, Stopped

ROOT = Path(__file__).resolve().parent.parent.parent
WITHIN_S = 60

MAIN = """
import sys
from pathlib import Path
from conformance import __main__ as it
here = Path(sys.argv.pop(1))
it.pinned_tree = lambda say: here / "llama.cpp"
it.binary_path = lambda kind: here / "server"
it.write_hub = lambda folder: None
sys.exit(it.main())
"""
SERVER = """#!{python}
import os, signal, subprocess, sys, time
from pathlib import Path
if "child" not in sys.argv:  # one that leaves its group, and so is nobody's by its number
    subprocess.Popen([sys.argv[0], sys.argv[1], "child", *sys.argv[2:]], start_new_session=True)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(Path(sys.argv[1]) / str(os.getpid())).touch()
time.sleep(600)
"""
QUICK = "def test_quick(): pass"
HANGING = """
import os, subprocess, time
from pathlib import Path
HERE = Path({here!r})
def test_hangs():
    if not (HERE / "go").exists():
        subprocess.run([os.environ["LLAMA_SERVER_BIN_PATH"], HERE / "pids", {how!r}])
"""
BROKEN = """
import os, time
from pathlib import Path
while len(os.listdir({here!r} + "/pids")) < 2:
    time.sleep(0.05)
os._exit(3)
"""


def commands_with(text: str) -> list[str]:
    """Command lines that have it in them. The dead have none."""
    lines = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ProcessLookupError):
            lines.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [line for line in lines if text in line]


@dataclass
class Run:
    """A run of the command, with these test files."""

    folder: Path
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def write(self, **files: str) -> None:
        for name in ("pids", "tmp", "llama.cpp/models", "llama.cpp/tools/mtmd", "llama.cpp/tools/server/tests/unit"):
            (self.folder / name).mkdir(parents=True)
        tests = self.folder / "llama.cpp/tools/server/tests"
        (tests / "utils.py").write_text("class ServerProcess:\n    start = None\nclass ServerPreset: pass\n")
        for name, text in files.items():
            (tests / "unit" / f"{name}.py").write_text(text)
        (self.folder / "server").write_text(SERVER.format(python=sys.executable))
        (self.folder / "server").chmod(0o755)

    def hanging(self, how: str = "") -> str:
        return HANGING.format(here=str(self.folder), how=how)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        files = sorted(path.stem for path in (self.folder / "llama.cpp/tools/server/tests/unit").iterdir())
        command = [sys.executable, "-c", MAIN, str(self.folder), "--files", *files, "--jobs", "2", *arguments]
        command += ["--arms", "proxy-stock"]
        environment = os.environ | {"TMPDIR": str(self.folder / "tmp")}
        self.started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
        return self.started[-1]

    def wait_for(self, process: "subprocess.Popen[str]", n_servers: int, n_found: int = 0) -> None:
        end_s = time.monotonic() + WITHIN_S
        while len(self.pids) < n_servers or len(self.found) < n_found:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end_s
            time.sleep(0.02)

    @property
    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self.folder / "pids")]

    @property
    def found(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "tmp").glob("*-found/*.json"))

    @property
    def left(self) -> list[str]:
        """Of its temporary files."""
        return [path.name for path in (self.folder / "tmp").iterdir() if not path.name.endswith("-found")]

    def alive(self) -> list[str]:
        """Command lines of what it started: all of them name a file of this folder, or run here."""
        return commands_with(str(self.folder))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    # When a test failed:
    for process in run.started:
        process.kill()
        process.communicate()
    for pid in run.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing(run: Run, number: signal.Signals) -> None:
    run.write(test_b=run.hanging(), test_c=run.hanging())
    process = run.start()
    run.wait_for(process, n_servers=4)
    process.send_signal(number)
    _, said = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, run.alive(), run.left) == (130, [], [])
    assert said == "stopped: nothing was done yet\n"


def test_a_run_that_was_stopped_is_gone_on_with(run: Run) -> None:
    run.write(test_a=QUICK, test_b=run.hanging())
    process = run.start()
    run.wait_for(process, n_servers=2, n_found=1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, run.found) == (130, ["test_a.json"])
    assert said.splitlines()[-1].startswith("stopped: 1 part is done and kept; go on with: ")
    command = shlex.split(said.rpartition("go on with: ")[2])
    assert command[:3] == [sys.executable, "-m", "conformance"]
    (run.folder / "go").touch()
    again = run.start(*command[3:5])
    assert command[3] == "--resume"
    _, said = again.communicate(timeout=WITHIN_S)
    assert again.returncode == 0, said
    assert run.found == ["test_a.json", "test_b.json"]
    assert (run.alive(), run.left) == ([], [])


def test_a_second_signal_ends_it_at_once(run: Run) -> None:
    run.write(test_b=run.hanging("stubborn"), test_c=run.hanging("stubborn"))
    process = run.start()
    run.wait_for(process, n_servers=4)
    process.send_signal(signal.SIGINT)
    while len(run.alive()) > 5:  # the command and four servers that do not end: both pytests did
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, run.alive(), run.left) == (130, [], [])
    assert said == "stopped at once: nothing was done yet\n"


def test_a_run_that_fails_in_the_middle_leaves_nothing(run: Run) -> None:
    run.write(test_a=QUICK, test_b=BROKEN.format(here=str(run.folder)), test_c=run.hanging(), test_d=run.hanging())
    process = run.start()
    _, said = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, run.alive(), run.left) == (2, [], [])
    assert "pytest ended with status 3 on stock" in said
    assert said.splitlines()[-1].startswith("stopped: 1 part is done and kept; go on with: ")


def test_what_ends_by_itself_takes_its_group_along(tmp_path: Path) -> None:
    children = Children()
    assert children.run(["sh", "-c", "sh -c 'sleep 600; true' $0 & exit 3", str(tmp_path)]) == 3
    children.end_all()
    assert commands_with(str(tmp_path)) == []


def test_nothing_is_started_once_it_is_stopped() -> None:
    children = Children(grace_s=0.1)
    process = children.start(["sh", "-c", "trap '' TERM; echo; while :; do sleep 600; done"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as said:
        said.readline()
    children.end_all()
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(Stopped):
        children.start(["true"])
