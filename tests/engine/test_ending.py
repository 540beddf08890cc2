"""A signal ends the server whatever it is doing, and everybody who waits is told."""

import json
import random
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .conftest import Launcher
from .hooks import N_PROBS, Engine
from .noise import Noise

pytestmark = pytest.mark.engine

MANY_TOKENS = 7000
Json = dict[str, Any]


def post(engine: Engine, path: str, body: Json) -> httpx.Response:
    """Ask on a connection of its own, which stays open until the answer is there."""
    with httpx.Client(timeout=120, trust_env=False) as client:
        return client.post(f"{engine.server.url}{path}", json=body)


def wait_until(engine: Engine, is_so: Callable[[Json], bool]) -> None:
    """Wait until the statistics say so."""
    deadline = time.monotonic() + 60
    while not is_so(stats := engine.stats()):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


def end(engine: Engine) -> int:
    """Send one SIGTERM and wait; the exit code. ``subprocess.TimeoutExpired`` when it does not end."""
    process = engine.server.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    code = process.wait(30)
    engine.server.process = None  # nothing is left to stop
    return code


@pytest.mark.parametrize("seed", range(6))
def test_a_signal_while_it_decodes(launch: Launcher, noise: Noise, seed: int) -> None:
    """The main loop takes the lock of its queue twice per batch: the signal comes at any moment, that one too."""
    engine = launch.pooled("dense", "--no-cache-idle-slots")
    body = {"n_predict": MANY_TOKENS, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(post, engine, "/completion", body | {"prompt": noise(i, 20)}) for i in range(4)]
        wait_until(engine, lambda stats: all(slot["n_decoded"] > 0 for slot in stats["slots"]))
        time.sleep(random.Random(seed).uniform(0, 0.02))
        assert end(engine) == 0
        answers = [told.result(60) for told in asked]
    assert [answer.status_code for answer in answers] == [503] * 4
    assert answers[0].json()["error"]["message"] == "the server is shutting down"


def test_a_signal_while_it_wakes_up(launch: Launcher, noise: Noise) -> None:
    """It loads the model with the lock of its queue held: the signal is certain to come at a bad moment."""
    engine = launch.pooled("dense", "--no-cache-idle-slots", "--sleep-idle-seconds", "1")
    wait_until(engine, lambda stats: "sleeping" in stats)
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(post, engine, "/completion", {"prompt": noise(1, 20), "n_predict": 1})
        while "exiting sleeping state" not in engine.server.log():
            assert not asked.done()
            time.sleep(0.001)
        assert end(engine) == 0
        assert asked.result(60).status_code == 503


def test_who_waits_for_an_answer_when_it_ends_is_told(launch: Launcher, noise: Noise) -> None:
    """A pool in the making, another that waits for it, and a stream: none of them keeps the server from ending."""
    engine = launch.pooled("dense", "-b", "64", "-ub", "64", "--no-cache-idle-slots")
    order = {"op": "materialize", "tokens": noise(1, MANY_TOKENS)}
    stream = {"prompt": noise(2, 20), "n_predict": MANY_TOKENS, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(3) as clients:
        pools = [clients.submit(post, engine, "/polykv/engine/pools", order) for _ in range(2)]
        streamed: Future[httpx.Response] = clients.submit(post, engine, "/completion", stream)
        wait_until(engine, lambda stats: stats["n_deferred"] == 1 and any(slot["n_decoded"] for slot in stats["slots"]))
        assert end(engine) == 0
        told = [pool.result(60) for pool in pools]
        events = streamed.result(60).text
    # Not an answer of the hooks: they say 503 when all sequences are taken, upon which somebody would free one.
    assert [(pool.status_code, pool.json()["error"]["type"]) for pool in told] == [(503, "unavailable_error")] * 2
    assert "the server is shutting down" in events.splitlines()[-2]


def test_who_reads_late_is_told_too(launch: Launcher, noise: Noise) -> None:
    """The server is in the middle of writing to this client when its main loop ends, and not waiting for a result."""
    engine = launch.pooled("dense", "--no-cache-idle-slots")
    n_tokens, n_buffered = 80, 64 << 10  # 60 kB each: more than all buffers in between hold, and soon read
    body = {"prompt": noise(1, 20), "n_predict": MANY_TOKENS, "ignore_eos": True, "temperature": 0}
    late = json.dumps(body | {"stream": True, "n_probs": N_PROBS, "id_slot": 0})
    head = f"POST /completion HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(late)}\r\n\r\n"
    with ThreadPoolExecutor(1) as clients, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_buffered)
        client.settimeout(60)
        client.connect(("127.0.0.1", engine.server.port))
        client.sendall((head + late).encode())
        other = clients.submit(post, engine, "/completion", body | {"id_slot": 1})
        wait_until(engine, lambda stats: stats["slots"][0]["n_decoded"] > n_tokens)
        process = engine.server.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        assert other.result(60).status_code == 503  # whoever waits is told by now, and HTTP about to be stopped
        read = b"".join(iter(lambda: client.recv(1 << 20), b""))
        assert process.wait(30) == 0
        engine.server.process = None
    assert len(read) > 4 << 20, "all that was decoded comes first"
    last = [line for line in read.splitlines() if line.startswith(b"data: ")][-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "the server is shutting down"
    assert read.endswith(b"0\r\n\r\n")
