"""The build: one binary per key, nothing half built, one builder at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polykv_proxy.engine.build import describe_engine, ensure_engine
from polykv_proxy.engine.problem import EngineProblem

from .conftest import Lines, QuickTools


def test_first_call_builds_and_second_returns_at_once(tools: QuickTools, lines: Lines) -> None:
    binary = ensure_engine(lines, stock=True)
    again = ensure_engine(Lines(), stock=True)

    assert binary == again == Path(describe_engine(stock=True).path)
    assert subprocess.check_output([binary], text=True) == "version 0\n"
    assert tools.n_builds == 1
    assert lines.steps == [(1, 3), (2, 3), (3, 3)]


def test_after_success_only_binary_log_and_facts_are_left(cache: Path, tools: QuickTools, lines: Lines) -> None:
    binary = ensure_engine(lines, stock=True)

    assert {path.name for path in binary.parent.iterdir()} == {"llama-server", "build.log", "info.json"}
    assert {path.name for path in (cache / "engine").iterdir()} == {binary.parent.name, "build.lock"}
    assert "Linking llama-server" in (binary.parent / "build.log").read_text()
    assert json.loads((binary.parent / "info.json").read_text())["built"] is True


def test_failed_step_is_shown_and_nothing_lies_under_the_key(tools: QuickTools, lines: Lines) -> None:
    tools.plan("echo two.cpp:7: error: expected ';' && false")

    with pytest.raises(EngineProblem) as caught:
        ensure_engine(lines, stock=True)

    assert "Building two.o" in caught.value.detail
    assert "two.cpp:7: error: expected ';'" in caught.value.detail
    assert "one.o" not in caught.value.detail
    info = describe_engine(stock=True)
    assert not info.built
    assert not Path(info.path).parent.exists()


def test_next_try_after_a_failure_goes_on_where_it_stopped(tools: QuickTools, lines: Lines) -> None:
    tools.plan("false")
    with pytest.raises(EngineProblem):
        ensure_engine(lines, stock=True)
    tools.plan("exit 0")

    ensure_engine(lines, stock=True)

    assert lines.steps == [(1, 3), (2, 3), (1, 2), (2, 2)]  # step one was not done again


def test_binary_that_does_not_start_is_not_kept(tools: QuickTools, lines: Lines) -> None:
    script = tools.folder / "cmake"
    script.write_text(script.read_text().replace("echo version 0", "echo no libgomp; exit 1"))

    with pytest.raises(EngineProblem, match="does not start") as caught:
        ensure_engine(lines, stock=True)

    assert "no libgomp" in caught.value.detail
    assert not describe_engine(stock=True).built


def test_two_builders_at_once_build_once(tools: QuickTools) -> None:
    tools.plan("sleep 1")
    command = [sys.executable, "-m", "polykv_proxy.cli", "engine", "build", "--stock"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]

    assert [process.returncode for process in both] == [0, 0]
    assert results[0][0] == results[1][0]
    assert tools.n_builds == 1
    assert "waiting for another process" in results[0][1] + results[1][1]


def test_flags_make_another_key(tools: QuickTools, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = describe_engine(stock=True)
    monkeypatch.setenv("POLYKV_CMAKE_ARGS", "-DGGML_CUDA=ON '-DCMAKE_CXX_FLAGS=-O2 -g'")
    cuda = describe_engine(stock=True)

    assert cuda.flags[-2:] == ("-DGGML_CUDA=ON", "-DCMAKE_CXX_FLAGS=-O2 -g")
    assert cuda.key != plain.key


def test_missing_compiler_is_one_line_that_says_what_to_install(
    tools: QuickTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tools.folder))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)

    with pytest.raises(EngineProblem, match="no C compiler: install one"):
        ensure_engine(Lines(), stock=True)


def test_compiler_named_in_the_environment_must_exist(tools: QuickTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -std=c++17")

    with pytest.raises(EngineProblem, match="CXX=no-such-compiler is not there"):
        describe_engine(stock=True)


def test_compilers_of_a_killed_builder_keep_the_next_one_waiting(tools: QuickTools) -> None:
    tools.plan("sleep 2")
    command = [sys.executable, "-m", "polykv_proxy.cli", "engine", "build", "--stock"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as killed:
        assert killed.stderr is not None
        while "[1/3]" not in killed.stderr.readline():
            assert killed.poll() is None
        killed.kill()
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert "waiting for another process" in done.stderr
    assert "going on with the build" in done.stderr
    assert tools.n_builds == 1  # the orphans finished it, and nobody built beside them
