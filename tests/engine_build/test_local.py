"""What ``polykvctl`` starts on this machine: its ports, its environment, its folder."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from polykv_proxy.engine import local
from polykv_proxy.engine.local import (
    EngineOptions,
    choose_port,
    engine_command,
    engine_environment,
    make_states_folder,
)
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


def options(**fields: object) -> EngineOptions:
    return EngineOptions(binary=Path("llama-server"), model=Path("m.gguf"), port=1, **fields)


def test_budgets_of_saved_states_are_whole_mib_rounded_down() -> None:
    given = options(save_ram_bytes=(3 << 20) + (1 << 19), save_disk_bytes=(5 << 20) - 1, save_path=Path("/x/states"))
    assert engine_environment(given) == {
        "LLAMA_ARG_POLYKV_SAVE_RAM": "3",
        "LLAMA_ARG_POLYKV_SAVE_DISK": "4",
        "LLAMA_ARG_POLYKV_SAVE_PATH": "/x/states",
    }
    assert not [flag for flag in engine_command(given) if "save" in flag]  # an older engine would not start


def test_no_budget_is_said_and_no_folder_is_no_disk() -> None:
    """The engine's own default is not none."""
    assert engine_environment(options(save_ram_bytes=0, save_disk_bytes=1 << 30)) == {
        "LLAMA_ARG_POLYKV_SAVE_RAM": "0",
        "LLAMA_ARG_POLYKV_SAVE_DISK": "0",
    }
    assert engine_environment(options(n_max_pools=0)) == {}


def test_the_folder_of_saved_states_is_beside_the_journal_and_ours_alone(tmp_path: Path) -> None:
    journal = tmp_path / "new" / "pools.db"
    folder = make_states_folder(journal)
    assert (folder, folder.stat().st_mode & 0o777) == (tmp_path / "new" / "pools.db.states", 0o700)
    folder.chmod(0o755)
    assert make_states_folder(journal).stat().st_mode & 0o777 == 0o700


def test_no_folder_beside_what_is_no_journal_or_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(EngineProblem, match="is no file"):
        make_states_folder(tmp_path)
    (tmp_path / "pools.db.states").write_text("somebody's")
    with pytest.raises(EngineProblem, match=r"pools.db.states cannot be made \(File exists\)"):
        make_states_folder(tmp_path / "pools.db")
    assert (tmp_path / "pools.db.states").read_text() == "somebody's"
