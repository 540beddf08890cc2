"""Ports of what ``polykvctl`` starts on this machine."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from polykv_proxy.engine import local
from polykv_proxy.engine.local import choose_port
from polykv_proxy.engine.problem import EngineProblem

HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def taken_there() -> Iterator[int]:
    """A port that somebody listens on at one of two addresses, and nobody at the other."""
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.socket())
        try:
            server.bind((THERE, 0))
        except OSError:
            pytest.skip("one loopback address only")
        server.listen()
        yield server.getsockname()[1]


def test_a_free_port_is_free_on_every_address(taken_there: int) -> None:
    port = choose_port(HERE, THERE, wanted=0, flag="--port")
    for host in (HERE, THERE):
        with socket.socket() as ours:
            ours.bind((host, port))


def test_a_port_that_is_taken_on_one_of_them_is_refused_with_that_address(taken_there: int) -> None:
    assert choose_port(HERE, wanted=taken_there, flag="--port") == taken_there
    with pytest.raises(EngineProblem) as refused:
        choose_port(HERE, THERE, wanted=taken_there, flag="--port")
    assert refused.value.message == (
        f"{THERE}:{taken_there} cannot be used (Address already in use): choose another with --port"
    )


def test_any_port_is_tried_again_when_another_address_has_it_taken(
    taken_there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, asked = local._bound, []

    def first_the_taken_one(host: str, port: int) -> socket.socket:
        asked.append((host, port))
        return bound(host, taken_there if len(asked) == 1 else port)

    monkeypatch.setattr(local, "_bound", first_the_taken_one)
    port = choose_port(HERE, THERE, wanted=0, flag="--port")
    assert port not in (0, taken_there)
    assert asked == [(HERE, 0), (THERE, taken_there), (HERE, 0), (THERE, port)]


def test_an_address_of_another_machine_is_refused_whatever_the_port() -> None:
    with pytest.raises(EngineProblem, match=r"192\.0\.2\.77:\d+ cannot be used \(.+\): choose another with --port"):
        choose_port(HERE, "192.0.2.77", wanted=0, flag="--port")


def test_all_of_both_families_share_a_port() -> None:
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert choose_port("::", "0.0.0.0", wanted=0, flag="--port") > 0
