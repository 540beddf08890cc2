"""One proxy for one engine: the second is sent away and told who is there; who was killed is followed by the next."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from . import loopback
from .conftest import Launcher
from .hooks import Engine
from .noise import Noise
from .restarts import START_WITHIN_S, ProxyProcess, clean_env

pytestmark = pytest.mark.engine


@pytest.fixture
def engine(launch: Launcher) -> Engine:
    return launch.pooled("dense")


@pytest.fixture
def proxies(engine: Engine, tmp_path: Path) -> Iterator[list[ProxyProcess]]:
    """Two for one engine, each with a journal of its own."""
    with ExitStack() as stack:
        made = []
        for name in ("first", "second"):
            made.append(ProxyProcess(engine.server.url, tmp_path / name / "pools.db", tmp_path / f"{name}.log"))
            stack.callback(made[-1].kill)
        yield made


def test_a_second_proxy_is_sent_away_and_the_next_takes_over_from_one_that_was_killed(
    engine: Engine, proxies: list[ProxyProcess], noise: Noise
) -> None:
    first, second = proxies
    first.start()
    assert create(first, noise(1, 60), "before") == 201
    holder = f"{socket.gethostname()}:{first.pid}:"

    refused = subprocess.run(
        second.command, check=False, capture_output=True, text=True, timeout=START_WITHIN_S, env=clean_env()
    )
    assert refused.returncode == 1
    assert holder in refused.stderr, refused.stderr
    assert refused.stdout == ""
    assert create(first, noise(2, 60), "beside") == 201, "the first one manages the engine as before"
    assert len(held(engine)) == 2

    first.kill()
    second.start()
    assert create(second, noise(3, 60), "after") == 201
    shown = loopback.get(f"{second.url}/polykv/pools", timeout=60).json()["pools"]
    assert [pool["name"] for pool in shown] == ["after"], "its own journal, not that of the first one"
    assert held(engine) == [shown[0]["seq_id"]], "what the first one left is freed"


def create(proxy: ProxyProcess, tokens: list[int], name: str) -> int:
    body = {"tokens": tokens, "name": name}
    return loopback.post(f"{proxy.url}/polykv/pools", json=body, timeout=60).status_code


def held(engine: Engine) -> list[int]:
    return [pool["seq"] for pool in engine.pools() if pool["state"] != "free"]
