"""``polykvctl up`` and ``serve`` as people and scripts run them: a real llama-server, the real proxy, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

POLYKVCTL = [sys.executable, "-m", "polykv_proxy.cli"]
READY_WITHIN_S = 60
MIB = 1 << 20


@contextmanager
def up(
    tmp_path: Path, *arguments: str, keep: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A running ``up --json`` on free ports, with its one line; ended hard if the test left it running.

    ``keep``: settings of the environment that it gets.
    """
    command = [*POLYKVCTL, "up", "--json", "--port", "0", "--engine-port", "0", "--ctx", "2048"]
    command += ["--state", str(tmp_path / "pools.db"), *arguments]
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(*keep))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (tmp_path / "stderr").read_text()
        yield process, json.loads(line)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def environment(*keep: str) -> dict[str, str]:
    """Ours without settings of the person who runs the tests; ``POLYKV_TEST_ENGINE`` names a binary instead of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLYKV_")}
    for ours in ("POLYKV_CACHE", "POLYKV_CMAKE_ARGS", *keep):
        kept |= {ours: os.environ[ours]} if ours in os.environ else {}
    if engine := os.environ.get("POLYKV_TEST_ENGINE"):
        kept["POLYKV_ENGINE"] = engine
    return kept


def get(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def answers(url: str) -> bool:
    try:
        get(url)
    except (urllib.error.URLError, OSError):
        return False
    return True


def wait_for(condition: Callable[[], bool], *, within_s: float = 20) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_line_of_json_comes_when_both_are_ready_and_sigterm_ends_both(tmp_path: Path) -> None:
    with up(tmp_path) as (process, facts):
        assert set(facts) == {"proxy", "engine", "engine_pid", "proxy_pid"}
        assert get(f"{facts['engine']}/health")["status"] == "ok"
        assert get(f"{facts['proxy']}/polykv/health")["engine"]["reachable"] is True
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
        assert get(f"{facts['proxy']}/v1/chat/completions", body)["choices"]

        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert not is_alive(facts["engine_pid"])
        assert not is_alive(facts["proxy_pid"])


def test_engine_that_dies_comes_back_on_its_port(tmp_path: Path) -> None:
    with up(tmp_path) as (process, facts):
        os.kill(facts["engine_pid"], signal.SIGKILL)
        wait_for(lambda: not answers(f"{facts['engine']}/health"))
        wait_for(lambda: answers(f"{facts['engine']}/health"))
        wait_for(lambda: answers(f"{facts['proxy']}/polykv/health"))

        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert "the engine died (SIGKILL), starting it again in 1 s" in (tmp_path / "stderr").read_text()


def test_pools_are_kept_in_the_state_file(tmp_path: Path) -> None:
    """A proxy that is killed, then all of it ended and started again, on other ports."""

    def shown(url: str) -> list[tuple[int, str]]:
        return [(pool["pool_id"], pool["name"]) for pool in get(f"{url}/polykv/pools")["pools"]]

    with up(tmp_path) as (process, facts):
        for name in ("one", "two"):
            get(f"{facts['proxy']}/polykv/pools", {"prompt": f"You are number {name}.", "name": name})
        os.kill(facts["proxy_pid"], signal.SIGKILL)
        wait_for(lambda: not answers(f"{facts['proxy']}/polykv/health"))
        wait_for(lambda: answers(f"{facts['proxy']}/polykv/health"))
        assert shown(facts["proxy"]) == [(1, "one"), (2, "two")]
        process.terminate()
        assert process.wait(20) == 0
    with up(tmp_path) as (_, facts):
        assert shown(facts["proxy"]) == [(1, "one"), (2, "two")]
        assert get(f"{facts['proxy']}/polykv/pools", {"prompt": "You are number three."})["pool_id"] == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells children that their parent died")
def test_killed_without_warning_it_leaves_nobody_behind(tmp_path: Path) -> None:
    with up(tmp_path) as (process, facts):
        process.kill()
        process.wait()
        wait_for(lambda: not answers(f"{facts['engine']}/health"))
        wait_for(lambda: not answers(f"{facts['proxy']}/polykv/health"))


def test_log_of_the_last_run_is_kept_and_very_old_ones_are_not(tmp_path: Path) -> None:
    old, recent = tmp_path / "engine-1.log", tmp_path / "engine-2.log"
    for log in (old, recent):
        log.write_text("words")
    os.utime(old, (time.time() - 8 * 24 * 3600,) * 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    logs = [tmp_path / f"engine-{port}.log", tmp_path / f"engine-{port}.log.1"]
    logs[0].write_text("the last run")

    with up(tmp_path, "--engine-port", port) as (_, facts):
        assert facts["engine"] == f"http://127.0.0.1:{port}"

    assert logs[1].read_text() == "the last run"
    assert "the last run" not in logs[0].read_text()
    assert logs[0].stat().st_mode & 0o077 == 0
    assert recent.exists()
    assert not old.exists()


def test_more_arguments_reach_the_engine(tmp_path: Path) -> None:
    with up(tmp_path, "--parallel", "2", "--", "--alias", "named-by-us") as (_, facts):
        assert get(f"{facts['engine']}/v1/models")["data"][0]["id"] == "named-by-us"
        assert get(f"{facts['engine']}/props")["total_slots"] == 2


def test_budgets_of_saved_states_and_their_folder_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYKV_WARM_RAM_BYTES", str(3 * MIB + 5))
    monkeypatch.setenv("POLYKV_WARM_DISK_BYTES", str(4 * MIB))
    folder = tmp_path / "pools.db.states"
    with up(tmp_path, keep=("POLYKV_WARM_RAM_BYTES", "POLYKV_WARM_DISK_BYTES")) as (_, facts):
        saved = get(f"{facts['engine']}/polykv/engine/stats")["saved"]
        assert (saved["ram"]["max"], saved["disk"]) == (3 * MIB, {"bytes": 0, "max": 4 * MIB, "why_off": ""})
        assert folder.stat().st_mode & 0o777 == 0o700


def test_saved_states_go_when_the_budget_of_the_disk_is_taken_away(tmp_path: Path) -> None:
    """Nobody else would ever remove them; and no folder is made for nothing."""
    folder = tmp_path / "pools.db.states"
    with up(tmp_path):
        assert not folder.exists()
    folder.mkdir()
    (folder / "0123456789abcdef-1.state").write_bytes(b"prompts")
    (folder / "notes.txt").write_text("not the engine's")
    with up(tmp_path) as (_, facts):
        disk = get(f"{facts['engine']}/polykv/engine/stats")["saved"]["disk"]
        assert disk == {"bytes": 0, "max": 0, "why_off": "the server was started without --polykv-save-disk"}
        assert {path.name for path in folder.iterdir()} == {"notes.txt", "polykv.lock"}


def test_without_a_journal_nothing_is_saved_on_disk_and_flags_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYKV_WARM_DISK_BYTES", str(4 * MIB))
    arguments = ("--state", ":memory:", "--", "--polykv-save-ram", "7")
    with up(tmp_path, *arguments, keep=("POLYKV_WARM_DISK_BYTES",)) as (_, facts):
        saved = get(f"{facts['engine']}/polykv/engine/stats")["saved"]
        assert (saved["ram"]["max"], saved["disk"]["max"]) == (7 * MIB, 0)
    said = "no state is saved on disk: it would lie beside the journal, and --state is :memory:"
    assert said in (tmp_path / "stderr").read_text()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere 127.0.0.1 is the only loopback address")
def test_several_addresses_first_is_named_and_all_are_served(tmp_path: Path) -> None:
    with up(tmp_path, "--host", "127.0.0.2,127.0.0.1") as (_, facts):
        assert facts["proxy"].startswith("http://127.0.0.2:")
        for url in (facts["proxy"], facts["proxy"].replace("127.0.0.2", "127.0.0.1")):
            assert get(f"{url}/polykv/health")["engine"]["reachable"] is True


def test_engine_that_refuses_its_flags_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    done = run(
        "up", "--json", "--port", "0", "--engine-port", "0", "--state", str(tmp_path / "x.db"), "--", "--nonsense"
    )

    assert done.returncode == 1
    assert done.stdout == ""
    assert "invalid argument: --nonsense" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("polykvctl: the engine ended at start (status 1); its log: ")


@pytest.mark.parametrize("flag", ["--port", "--engine-port"])
def test_port_in_use_is_one_line_that_names_the_flag(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("up", flag, str(port), "--engine-port" if flag == "--port" else "--port", "0")

    assert done.returncode == 1
    assert (
        done.stderr
        == f"polykvctl: 127.0.0.1:{port} cannot be used (Address already in use): choose another with {flag}\n"
    )


def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path) -> None:
    missing = run("up", "--model", str(tmp_path / "no.gguf"))
    setting = run("serve", "--upstream", "ftp://here")
    at_home = run("up", "--model", "~/no.gguf")

    assert at_home.stderr == f"polykvctl up: Invalid value for --model: there is no file {Path.home() / 'no.gguf'}\n"
    assert (missing.returncode, setting.returncode) == (2, 2)
    assert missing.stderr == f"polykvctl up: Invalid value for --model: there is no file {tmp_path / 'no.gguf'}\n"
    assert setting.stderr.startswith("polykvctl: --upstream: must be like http://127.0.0.1:8080")
    assert len(setting.stderr.splitlines()) == 1


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*POLYKVCTL, *arguments], capture_output=True, text=True, check=False, timeout=READY_WITHIN_S, env=environment()
    )
