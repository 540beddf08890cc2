"""llama.cpp's own server tests: one file of them against one arm, and what became of each test."""

import contextlib
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance import nursery, server
from conformance.children import BOUND, Children

TEST_TIMEOUT_S = 300
NOWHERE = "http://127.0.0.1:9"
"""A hub that is not there, so that nobody waits for one."""


class CannotRunError(Exception):
    """The tests could not be run at all; the message is for a person."""


@dataclass(frozen=True)
class Outcome:
    """How one test ended: passed, failed or skipped; what pytest printed about a failure, or why it was skipped."""

    how: str
    said: str = ""

    @property
    def assertion(self) -> str:
        """The statement of the test that failed: pytest marks it in the listing it prints."""
        marked = [line[1:].strip() for line in self.said.splitlines() if line.startswith(">")]
        return marked[-1] if marked else ""

    @property
    def error(self) -> str:
        """The last line of the error itself."""
        marked = [line[1:].strip() for line in self.said.splitlines() if line.startswith("E ")]
        return marked[0] if marked else ""


@dataclass(frozen=True)
class Suite:
    """The pinned tests, and what they run: a folder of models and a server of each kind, all as ``children``."""

    upstream: Path
    hub: Path
    binaries: dict[str, Path]
    nursery: Path = Path()
    children: Children = field(default_factory=Children)

    def launcher_of(self, arm: str) -> str:
        """A script in the place of the server binary."""
        if arm == "stock":
            command = [*BOUND, str(self.binaries["stock"])]
        elif arm.startswith("proxy"):
            command = [*BOUND, sys.executable, "-SEc", nursery.LAUNCHER, str(self.nursery), arm]
        else:
            command = [sys.executable, "-m", server.__name__, arm]
        return f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'


@contextlib.contextmanager
def nursing(folder: Path, children: Children) -> Iterator[Path]:
    """A process that forks proxies, and the socket at which it is asked for them.

    Raises:  CannotRunError
    """
    at = folder / "nursery"
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", nursery.__name__, str(at)]
    process = children.start(command, stdout=subprocess.PIPE, cwd=root)
    assert process.stdout is not None
    with process.stdout as said:
        try:
            if not said.readline():
                raise CannotRunError("the process that forks proxies did not start")
            yield at
        finally:
            children.end(process)


def lay_out(suite: Suite, folder: Path) -> Path:
    """A tree of one's own that looks like llama.cpp's from where the tests stand. Gives their folder."""
    tests = folder / "tools" / "server" / "tests"
    shutil.copytree(suite.upstream / "tools" / "server" / "tests", tests)
    (tests / "tmp").mkdir()
    shutil.copytree(suite.upstream / "tools" / "mtmd", folder / "tools" / "mtmd")
    (folder / "models").symlink_to(suite.upstream / "models")
    return tests


def run(
    suite: Suite, arm: str, tests: Path, selected: Sequence[str], logs: Path, *, keyword: str | None = None
) -> dict[str, Outcome]:
    """Outcome per test. ``selected``: files or single tests, as pytest names them; ``logs``: a folder to be made.

    Raises:  CannotRunError
    """
    logs.mkdir(parents=True)
    launcher = logs / "llama-server"
    launcher.write_text(suite.launcher_of(arm))
    launcher.chmod(0o755)
    results = logs / "results.xml"
    root = Path(__file__).resolve().parent.parent
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POLYKV_", "LLAMA_", "HF_"))}
    environment = kept | {
        "LLAMA_SERVER_BIN_PATH": str(launcher),
        "LLAMA_CACHE": str(suite.hub / "hub"),
        "MODEL_ENDPOINT": NOWHERE,
        "HF_ENDPOINT": NOWHERE,
        "CONFORMANCE_BINARY": str(suite.binaries[server.ARMS[arm]]),
        "CONFORMANCE_DOWNLOADS": str(suite.hub / "downloads"),
        "PYTHONPATH": os.pathsep.join([str(tests), str(root)]),
        "PORT": str(port_for_long()),
        "PYTHONWARNINGS": "ignore",
        "NO_PROXY": "*",
    }
    command = [sys.executable, "-m", "pytest", "-p", "conformance.swap", "-p", "no:cacheprovider", "-q"]
    command += ["-o", f"timeout={TEST_TIMEOUT_S}", "-o", "addopts=", "--junit-xml", str(results)]
    command += [*selected, *(["-k", keyword] if keyword else [])]
    with (logs / "pytest.log").open("w") as log:
        status = suite.children.run(command, cwd=tests, env=environment, stdout=log, stderr=log)
    if status not in (0, 1, 5):  # 1: some tests failed, 5: none was selected
        end = (logs / "pytest.log").read_text()[-4000:]
        raise CannotRunError(f"{end}\npytest ended with status {status} on {arm}")
    return {name_of(case): outcome_of(case) for case in ET.parse(results).iter("testcase")}


def name_of(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"


def outcome_of(case: ET.Element) -> Outcome:
    if (skipped := case.find("skipped")) is not None:
        return Outcome("skipped", skipped.get("message", ""))
    said = "\n".join(found.text or "" for found in case if found.tag in ("failure", "error"))
    return Outcome("failed", said) if said else Outcome("passed")


def port_for_long() -> int:
    """A free one that no client gets for its end of a connection while nobody listens there between two tests.

    Raises:  CannotRunError
    """
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise CannotRunError("of a hundred ports from 20000 to 30000 none is free")


def pytest_name(name: str) -> str:
    file, _, test = name.partition("::")
    return f"unit/{file}.py::{test}"
