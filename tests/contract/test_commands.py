"""§1: what is typed, what it answers, how it ends."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from click import Command

from polykv_proxy.cli import app
from tests.contract.conftest import made
from tests.relay.conftest import Proxy

ROOT = Path(__file__).parents[2]


def command(*path: str) -> Command:
    found: Command = typer.main.get_command(app)
    for name in path:
        assert hasattr(found, "commands"), path
        found = found.commands[name]
    return found


def options(found: Command) -> dict[str, tuple[object, object]]:
    """Flag → (default, environment variable)."""
    return {flag: (p.default, getattr(p, "envvar", None)) for p in found.params for flag in p.opts}


POOL_COMMANDS = ["tree", "ls", "show", "create", "fork", "pin", "unpin", "evict", "flush", "release"]
OTHERS = [
    ("match",),
    *(("admission", name) for name in ("get", "set", "drop")),
    ("compact",),
    ("explain",),
    ("tps",),
    ("top",),
    ("sessions",),
    ("sessions", "show"),
    ("sessions", "delete"),
]


@pytest.mark.parametrize("path", [*(("pools", name) for name in POOL_COMMANDS), *OTHERS], ids=" ".join)
def test_every_command_that_asks_the_proxy_takes_the_three_options(path: tuple[str, ...]) -> None:
    taken = options(command(*path))
    assert taken["--url"] == ("http://127.0.0.1:8090", "POLYKV_URL")
    assert taken["--admin-key"] == (None, "POLYKV_ADMIN_KEY")
    assert "--json" in taken


@pytest.mark.parametrize(
    "path", [("serve",), ("up",), ("engine", "build"), ("engine", "info"), ("engine", "path"), ("model", "path")]
)
def test_the_other_commands_have_machine_readable_output(path: tuple[str, ...]) -> None:
    assert "--json" in options(command(*path))


def test_up_has_the_defaults_of_the_contract() -> None:
    taken = options(command("up"))
    wanted = {"--engine-port": 8080, "--parallel": 4, "--ctx": 16384, "--max-pools": 16, "--batch": 256}
    assert {flag: taken[flag][0] for flag in wanted} == wanted
    assert {"--model", "--port", "--state"} <= taken.keys()


def test_the_commands_that_there_are() -> None:
    assert {"build", "info", "path"} <= command("engine").commands.keys()
    assert {"serve", "up", "demo", "engine", "model", "pools"} <= command().commands.keys()


async def run(*arguments: str, url: str = "http://127.0.0.1:1") -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("POLYKV_")} | {"POLYKV_URL": url}
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "polykv_proxy.cli", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )


async def test_exit_status_and_streams_of_success_refusal_usage_and_nobody_there(proxy: Proxy) -> None:
    pool = await made(proxy, prompt="You are one of many.", name="base")
    done = await run("pools", "show", "base", "--json", url=proxy.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["pools"][0]["pool_id"] == pool["pool_id"]
    for status, arguments, url in [
        (1, ["pools", "show", "nobody", "--json"], proxy.url),
        (2, ["pools", "create", "--json"], proxy.url),
        (2, ["pools", "release", "--json"], proxy.url),
        (3, ["pools", "tree", "--json"], "http://127.0.0.1:1"),
    ]:
        done = await run(*arguments, url=url)
        assert (done.returncode, done.stdout) == (status, ""), arguments
        assert done.stderr.startswith("polykvctl")
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    "arguments", [["--mode", "both"], ["--upstream", "nonsense"], ["--port", "70000"], ["--config", "/nowhere.toml"]]
)
async def test_serve_with_a_wrong_setting_is_one_line_and_status_2(arguments: list[str]) -> None:
    done = await run("serve", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_make_help_lists_the_targets_of_the_contract() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = {line.split()[1] for line in listed.splitlines()}
    assert {"demo", "test", "up", "install", "help"} <= targets
