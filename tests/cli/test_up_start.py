"""``polykvctl up`` before it starts anything: what is wrong is told in order, and then no engine is started."""

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polykv_proxy.cli.up import _fresh_log
from polykv_proxy.config import load_settings
from polykv_proxy.engine.leftovers import mark_in_use
from polykv_proxy.engine.paths import state_dir
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
        "stop that one, or start this one beside it with another --state, another --engine-port and another --port\n",
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


def test_of_chosen_ports_too_but_only_where_nobody_else_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a running engine writes to stays, and so do the last log of the same port and whatever is no log of ours."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ours, elsewhere = state_dir(), tmp_path / "elsewhere"
    now_s = time.time()
    for folder in (ours, elsewhere):
        folder.mkdir(parents=True)
        for n, name in enumerate((*(f"engine-{port}.log" for port in range(50000, 50009)), "engine-of-mine.log")):
            (folder / name).write_text(name)
            os.utime(folder / name, (now_s + n - 1000,) * 2)
    running = os.open(ours / "engine-50001.log", os.O_WRONLY)
    mark_in_use(running)
    every = {path.name for path in ours.iterdir()}

    assert _fresh_log(load_settings(), 50000, is_any=False) == ours / "engine-50000.log"
    kept = {"engine-50000.log.1", "engine-50001.log", *(f"engine-{port}.log" for port in range(50005, 50009))}
    assert {path.name for path in ours.iterdir()} == kept | {"engine-of-mine.log"}
    os.close(running)
    _fresh_log(load_settings(), 50000, is_any=False)
    assert not (ours / "engine-50001.log").exists(), "that run is over"

    _fresh_log(load_settings(state=str(elsewhere / "pools.db")), 60000, is_any=False)
    assert {path.name for path in elsewhere.iterdir()} == every
    os.utime(elsewhere / "engine-50002.log", (now_s - 8 * 24 * 3600,) * 2)
    _fresh_log(load_settings(state=str(elsewhere / "pools.db")), 60000, is_any=False)
    assert {path.name for path in elsewhere.iterdir()} == every - {"engine-50002.log"}


def test_the_log_of_a_running_engine_on_any_port_stays(tmp_path: Path) -> None:
    settings = load_settings(state=str(tmp_path / "pools.db"))
    running = os.open(_fresh_log(settings, 50000, is_any=True), os.O_WRONLY | os.O_CREAT)
    mark_in_use(running)
    os.utime(tmp_path / "engine-any-50000.log", (1, 1))
    for port in range(50001, 50010):
        _fresh_log(settings, port, is_any=True).touch()
    assert (tmp_path / "engine-any-50000.log").exists()
    assert len(list(tmp_path.glob("engine-any-*"))) == 6
    os.close(running)
    _fresh_log(settings, 50010, is_any=True)
    assert not (tmp_path / "engine-any-50000.log").exists()


def test_locks_of_proxies_that_were_killed_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    ours = state_dir()
    ours.mkdir(parents=True)
    hold = "import sys; from polykv_proxy.store import place; from pathlib import Path\n"
    hold += "place.lock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(ours / "killed.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        _fresh_log(load_settings(), 50000, is_any=True)
        assert (ours / "killed.db.lock").read_text() == f"process {holder.pid}\n"
        holder.kill()
    lock = place.lock(ours / "running.db")
    (ours / "mine.db.lock").write_text("do not touch")
    (ours / "killed.db").write_text("pools")
    _fresh_log(load_settings(), 50000, is_any=True)
    assert {path.name for path in ours.iterdir()} == {"running.db.lock", "mine.db.lock", "killed.db"}
    place.unlock(lock, ours / "running.db")
