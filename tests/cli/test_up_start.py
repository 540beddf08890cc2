"""``polykvctl up`` before it starts anything: what is wrong is told in order, and then no engine is started."""

import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polykv_proxy.cli.up import _fresh_log
from polykv_proxy.config import load_settings
from polykv_proxy.store import place
from tests.cli.test_up import run


@dataclass(frozen=True)
class Site:
    """An engine that only leaves a mark, and a port that somebody has."""

    folder: Path
    engine: Path
    mark: Path
    taken_port: str

    def up(self, *arguments: str, engine_port: str = "0", port: str = "0") -> tuple[int, str]:
        known = ("--engine", str(self.engine), "--model", str(self.engine), "--state", str(self.folder / "pools.db"))
        done = run("up", *known, "--engine-port", engine_port, "--port", port, *arguments)
        assert done.stdout == ""
        return done.returncode, done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    engine, mark = tmp_path / "engine", tmp_path / "started"
    engine.write_text(f"#!/bin/sh\ntouch {mark}\nexit 3\n")
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield Site(tmp_path, engine, mark, str(taken.getsockname()[1]))


def held_journal(site: Site) -> int:
    """One that another process has."""
    journal = site.folder / "pools.db"
    journal.touch()
    return place.lock(place.prepare(journal))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "/nowhere.gguf"), "there is no file /nowhere.gguf"),
        (("--engine", "/nowhere/llama-server"), "there is no program /nowhere/llama-server"),
        (("--max-pools", "400"), "400 pools + 2 are 406 sequences"),
        (("--mode", "both"), "--mode"),
        (("--port", "70000"), "--port"),
    ],
)
def test_wrong_usage_comes_before_a_journal_and_ports_that_are_taken(
    site: Site, arguments: tuple[str, str], said: str
) -> None:
    lock = held_journal(site)
    status, stderr = site.up(*arguments, engine_port=site.taken_port)
    place.unlock(lock, site.folder / "pools.db")
    assert (status, len(stderr.splitlines())) == (2, 1), stderr
    assert said in stderr
    assert not site.mark.exists()


def test_a_journal_in_use_comes_before_ports_and_no_engine_is_started(site: Site) -> None:
    lock = held_journal(site)
    status, stderr = site.up(engine_port=site.taken_port, port=site.taken_port)
    assert (status, stderr) == (
        1,
        f"polykvctl: the journal {site.folder / 'pools.db'} is in use by process {os.getpid()}: "
        "stop that one, or name another file with --state\n",
    )
    place.unlock(lock, site.folder / "pools.db")
    assert not site.mark.exists()
    assert site.up()[0] == 1
    assert site.mark.exists(), "nothing is in its way any more"


@pytest.mark.parametrize("flag", ["--port", "--engine-port"])
def test_a_port_in_use_starts_no_engine(site: Site, flag: str) -> None:
    status, stderr = site.up(**{flag.removeprefix("--").replace("-", "_"): site.taken_port})
    assert (status, f"choose another with {flag}" in stderr) == (1, True)
    assert not site.mark.exists()
    assert not list(site.folder.glob("pools.db*")), "nothing is left of a start that failed"


def test_of_engines_on_any_port_the_last_five_logs_are_kept(tmp_path: Path) -> None:
    settings = load_settings(state=str(tmp_path / "pools.db"))
    chosen = _fresh_log(settings, 8080, is_any=False)
    chosen.write_text("8080")
    now_s = time.time()
    for port in range(50000, 50020):
        _fresh_log(settings, port, is_any=True).write_text(str(port))
        os.utime(tmp_path / f"engine-any-{port}.log", (now_s + port - 60000,) * 2)
    assert sorted(path.name for path in tmp_path.glob("engine-*")) == [
        "engine-8080.log",
        *(f"engine-any-{port}.log" for port in range(50015, 50020)),
    ]
    assert chosen.read_text() == "8080"
