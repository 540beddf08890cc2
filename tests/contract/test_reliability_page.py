"""docs/reliability.md names the tests that show each thing it says, and there are such tests, which are run."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NODE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)(?:\[([^\]`]+)\])?`( \([^)]*\bslow\b[^)]*\))?")
N_PROMISES = 18


def rows() -> dict[int, tuple[str, str]]:
    """number → (what holds, shown by)."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0].isdigit():
            number, holds, shown_by = cells
            found[int(number)] = (holds, shown_by)
    return found


@cache
def functions_of(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def markers(file: str, test: str) -> str:
    """The source of what decorates it, and of the module's ``pytestmark``."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    of_module = [
        ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n).startswith("pytestmark")
    ]
    return "\n".join(of_module + [ast.unparse(d) for d in functions_of(file)[test].decorator_list])


def is_always_slow(file: str, test: str) -> bool:
    """Not of one that has only some cases marked so."""
    return any(
        line == "pytest.mark.slow" or (line.startswith("pytestmark") and "slow" in line)
        for line in markers(file, test).splitlines()
    )


def test_every_promise_has_its_row_and_its_tests() -> None:
    assert list(rows()) == list(range(1, N_PROMISES + 1))
    for number, (holds, shown_by) in rows().items():
        assert len(holds) > 20, number
        assert NODE.search(shown_by), number
        assert not NODE.sub("", shown_by).strip(" ,"), f"{number}: not a test's name"


def test_the_named_tests_exist_and_are_run() -> None:
    for number, (_, shown_by) in rows().items():
        for file, test, case, _ in NODE.findall(shown_by):
            assert (ROOT / file).is_file(), f"{number}: no {file}"
            assert Path(file).name.startswith("test_"), file
            assert test in functions_of(file), f"{number}: no {test} in {file}"
            assert "skip" not in markers(file, test), test
            assert "xfail" not in markers(file, test), test
            if case:
                assert repr(case) in markers(file, test), f"{number}: no case {case} of {test}"


def test_those_that_only_test_all_runs_are_said_to_be_slow() -> None:
    for _, shown_by in rows().values():
        for file, test, _, slow in NODE.findall(shown_by):
            assert bool(slow) == is_always_slow(file, test), f"{file}::{test}"


def test_a_test_of_this_folder_that_shows_nothing_is_no_proof() -> None:
    """What stands in tests/reliability is either named or helps one that is: at least one of each module is named."""
    named = {file for _, shown_by in rows().values() for file, _, _, _ in NODE.findall(shown_by)}
    modules = {f"tests/reliability/{path.name}" for path in (ROOT / "tests" / "reliability").glob("test_*.py")}
    assert modules <= named
