"""Clients that leave, and crowds: what nobody waits for ends soon, and everybody gets an answer."""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from . import loopback
from .conftest import SMALL, Launcher
from .hooks import Engine, Running
from .noise import Noise

pytestmark = pytest.mark.engine

POOLS = "/polykv/engine/pools"


def open_request(engine: Engine, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a whole request on a connection of its own; closing it is leaving."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", engine.server.port))
    connection.sendall(head.encode() + content)
    return connection


def leave_after_sending(engine: Engine, body: dict[str, Any], linger_s: float) -> None:
    """Send a whole request, wait a little, and close the connection without reading."""
    with open_request(engine, POOLS, body):
        time.sleep(linger_s)


def settled(engine: Engine) -> list[str]:
    """States of the pool sequences once the service slot has nothing more to do."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stats = engine.stats()
        states = [pool["state"] for pool in engine.pools()]
        if stats["service"]["state"] == "idle" and stats["n_deferred"] == 0 and "busy" not in states:
            return states
        time.sleep(0.05)
    raise AssertionError(f"never settled: {stats['service']} {states}")


def test_client_that_leaves_while_its_pool_is_made(launch: Launcher, noise: Noise) -> None:
    """The pool is whole or not there, and its sequence can be used again."""
    engine = launch.pooled("dense", "-b", "64", "-ub", "64", "--no-cache-idle-slots")
    tokens = noise(1, 6000)
    leave_after_sending(engine, {"op": "materialize", "tokens": tokens}, linger_s=0.2)
    states = settled(engine)
    assert states.count("ready") + states.count("free") == len(states)
    cells = engine.cells_used()
    assert cells == 6000 * states.count("ready")
    engine.free_all()
    assert engine.cells_used() == 0
    assert engine.materialize(tokens[:500])["n_tokens"] == 500


def test_client_that_leaves_while_it_waits(launch: Launcher, noise: Noise) -> None:
    """The service slot is busy, two more requests wait, one of their clients goes: only that one is forgotten."""
    engine = launch.pooled("dense", "-b", "64", "-ub", "64", "--no-cache-idle-slots")
    leave_after_sending(engine, {"op": "materialize", "tokens": noise(1, 6000), "tag": "long"}, linger_s=0)
    leave_after_sending(engine, {"op": "materialize", "tokens": noise(2, 100), "tag": "gone"}, linger_s=0.1)
    patient = engine.materialize(noise(3, 100), tag="patient")
    settled(engine)
    ready = {pool["tag"]: pool["n_tokens"] for pool in engine.pools() if pool["state"] == "ready"}
    assert ready["patient"] == 100
    assert ready.keys() <= {"patient", "long", "gone"}
    assert engine.pool(patient["seq"])["state"] == "ready"
    engine.free_all()
    assert engine.cells_used() == 0


def test_freeing_a_pool_that_is_being_made(launch: Launcher, noise: Noise) -> None:
    engine = launch.pooled("dense", "-b", "64", "-ub", "64", "--no-cache-idle-slots")
    seq = engine.pools()[0]["seq"]
    leave_after_sending(engine, {"op": "materialize", "tokens": noise(1, 7000), "seq": seq}, linger_s=0.1)
    response = engine.http.delete(f"{POOLS}/{seq}")
    assert response.status_code in {200, 409, 410}, response.text
    settled(engine)
    engine.free_all()
    assert engine.cells_used() == 0


def test_attach_to_a_pool_that_is_being_made_is_served_without(launch: Launcher, noise: Noise) -> None:
    engine = launch.pooled("dense", "-b", "64", "-ub", "64", "--no-cache-idle-slots")
    seq = engine.pools()[0]["seq"]
    leave_after_sending(engine, {"op": "materialize", "tokens": noise(1, 7000), "seq": seq}, linger_s=0.1)
    done = engine.ask(noise(1, 100), 4, slot=0, pool=seq)
    assert len(done.tokens) == 4
    settled(engine)


def waited_for(done: Callable[[], bool], at_most_s: float, *, every_s: float = 0.01) -> float:
    """How long it took until this was so; fails after ``at_most_s``."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < at_most_s, f"not within {at_most_s} s"
        time.sleep(every_s)
    return time.monotonic() - began


def test_slot_of_a_client_that_left_is_idle_soon(launch: Launcher, noise: Noise) -> None:
    """A reply in one piece that nobody waits for any more ends, whatever else wakes the server meanwhile: a stream has
    a result per token, and the stats are read a hundred times a second."""
    engine = launch.pooled("dense", "--no-cache-idle-slots")
    body = {"prompt": noise(2, 50), "n_predict": 6000, "id_slot": 1, "temperature": 0, "ignore_eos": True}
    with Running(engine, noise(1, 50), 6000, id_slot=0) as agent:
        leaving = open_request(engine, "/completion", body)
        waited_for(lambda: engine.slot(1)["state"] == "generating", 30)
        leaving.close()
        took_s = waited_for(lambda: engine.slot(1)["state"] == "idle", 5)
        assert agent.is_running(), "the other stream must have been there all the time"
        agent.leave()
    print(f"idle after {took_s:.2f} s")


def test_twelve_pools_at_once_on_six_sequences(launch: Launcher, noise: Noise) -> None:
    """Six are made, six are told that there is no free sequence; nobody hangs, nothing is lost."""
    engine = launch("patched", "dense", *SMALL, "--polykv-max-pools", "6", "--no-cache-idle-slots")

    def make(seed: int) -> httpx.Response:
        body = {"op": "materialize", "tokens": noise(seed, 400), "seq": -1, "parent_seq": -1, "tag": str(seed)}
        return loopback.post(engine.server.url + POOLS, json=body, timeout=60)

    with ThreadPoolExecutor(12) as threads:
        replies = list(threads.map(make, range(12)))
    assert sorted(reply.status_code for reply in replies) == [200] * 6 + [503] * 6
    made = {reply.json()["tag"] for reply in replies if reply.status_code == 200}
    assert {pool["tag"] for pool in engine.pools()} == made
    assert {pool["state"] for pool in engine.pools()} == {"ready"}
    assert engine.cells_used() == 6 * 400
    engine.free_all()
    assert engine.cells_used() == 0
