"""The supervisor with real processes: small HTTP servers that come up, die and refuse to die."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from polykv_proxy.engine.leftovers import tidy_logs
from polykv_proxy.engine.problem import EngineProblem
from polykv_proxy.engine.supervisor import Child, Supervisor, backoff_s

SERVER = """
import http.server, signal, sys, time
port, stubborn = int(sys.argv[1]), len(sys.argv) > 2
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("serving", flush=True)
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Ok).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_server(tmp_path: Path, name: str = "engine", *arguments: str) -> Child:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), *arguments]
    return Child(name, command, f"http://127.0.0.1:{port}/health", log=tmp_path / f"{name}.log")


def wait_for(condition: Callable[[], bool], *, within_s: float = 20) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("n_quick_deaths", "wait_s"), [(1, 1), (2, 2), (3, 4), (5, 16), (6, 30), (100, 30)])
def test_backoff_doubles_up_to_half_a_minute(n_quick_deaths: int, wait_s: float) -> None:
    assert backoff_s(n_quick_deaths) == wait_s


def test_ready_comes_after_every_child_answers_and_stop_ends_them_in_reverse(tmp_path: Path) -> None:
    first, second = make_server(tmp_path, "first"), make_server(tmp_path, "second")
    supervisor = Supervisor([first, second], print)
    seen: list[bool] = []

    def when_ready() -> None:
        seen.extend([first.is_ready(), second.is_ready()])
        supervisor.ask_to_stop()

    supervisor.run(when_ready)

    assert seen == [True, True]
    assert not is_alive(first.pid)
    assert not is_alive(second.pid)


def test_child_that_dies_is_started_again(tmp_path: Path) -> None:
    child = make_server(tmp_path)
    said: list[str] = []
    supervisor = Supervisor([child], said.append)
    pids: list[int] = []

    def watch() -> None:
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda: child.pid != pids[0] and child.is_ready())
        pids.append(child.pid)
        supervisor.ask_to_stop()

    def when_ready() -> None:
        pids.append(child.pid)
        threading.Thread(target=watch).start()

    supervisor.run(when_ready)

    assert len(set(pids)) == 2
    assert said == ["the engine died (SIGKILL), starting it again in 1 s", f"engine started again (pid {pids[1]})"]
    assert not is_alive(pids[1])


def test_a_log_is_in_use_while_its_child_lives_and_between_two_starts(tmp_path: Path) -> None:
    living, dead = make_server(tmp_path, "living"), make_server(tmp_path, "dead")
    living.log, dead.log = logs = tmp_path / "engine-any-50000.log", tmp_path / "engine-any-50001.log"
    supervisor = Supervisor([living, dead], print)

    def left() -> list[bool]:
        """By who tidies up, and finds that they are old."""
        for log in logs:
            os.utime(log, (1, 1))
        tidy_logs(tmp_path / "engine-any-50002.log", is_ours=True)
        return [log.exists() for log in logs]

    def when_ready() -> None:
        living.close_log()  # as when we are gone: the child has it still
        os.kill(dead.pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(dead.pid))
        assert left() == [True, True]
        supervisor.ask_to_stop()

    supervisor.run(when_ready)
    assert left() == [False, False]


def test_child_that_dies_at_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    first = make_server(tmp_path, "first")
    broken = make_server(tmp_path, "broken")
    broken.command = [sys.executable, "-c", "import sys; sys.exit('unknown argument: --polykv')"]

    with pytest.raises(EngineProblem, match=r"the broken ended at start \(status 1\); its log: .*broken.log") as caught:
        Supervisor([first, broken], print).run(lambda: None)

    assert caught.value.detail == "unknown argument: --polykv"
    assert not is_alive(first.pid)


def test_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    child = make_server(tmp_path)
    child.command = [str(tmp_path / "nothing")]

    with pytest.raises(EngineProblem, match="the engine cannot be started"):
        Supervisor([child], print).run(lambda: None)


def test_asked_twice_a_stubborn_child_is_killed(tmp_path: Path) -> None:
    child = make_server(tmp_path, "engine", "stubborn")
    supervisor = Supervisor([child], print)

    def when_ready() -> None:
        supervisor.ask_to_stop()
        supervisor.ask_to_stop()

    begun_s = time.monotonic()
    supervisor.run(when_ready)

    assert time.monotonic() - begun_s < 9
    assert child.process is not None
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells children that their parent died")
def test_children_go_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    port = free_port()
    script = f"""
import sys
from pathlib import Path
from polykv_proxy.engine.supervisor import Child, Supervisor
command = [sys.executable, "-c", {SERVER!r}, "{port}", "stubborn"]
child = Child("engine", command, "http://127.0.0.1:{port}/", log=Path({str(tmp_path / "log")!r}))
Supervisor([child], print).run(lambda: print(child.pid, flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = json.loads(supervisor.stdout.readline())
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).status == 200
        supervisor.kill()
    wait_for(lambda: not is_alive(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_limit_on_files_ends_no_child(tmp_path: Path) -> None:
    """A write over the limit fails for who ignores SIGXFSZ, and kills who does not."""
    port = free_port()
    child = Child("engine", ["sleep", "60"], f"http://127.0.0.1:{port}/", log=tmp_path / "log")
    child.start()
    try:
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        ignored = int(next(line for line in lines if line.startswith("SigIgn:")).split()[1], 16)
        assert ignored >> (signal.SIGXFSZ - 1) & 1
    finally:
        os.kill(child.pid, signal.SIGKILL)
        assert child.process is not None
        child.process.wait(10)
