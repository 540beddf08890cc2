"""docs/layouts.md names a test for each thing it says, and there is such a test."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)(?:\[([\w-]+)\])?`", PAGE)


def rows() -> list[list[str]]:
    """The cells of every table's rows, without headings."""
    found = []
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return [row for row in found if row[-1] != "shown by"]


def test_every_row_names_a_test_or_says_that_there_is_none() -> None:
    assert len(rows()) > 30
    for row in rows():
        assert re.search(r"`test_\w+\.py::test_\w+", row[-1]) or row[-1] == "not verified", row


def test_the_named_tests_exist() -> None:
    for file, name, case in NAMED:
        path = ROOT / "tests" / "engine" / file
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file}::{name}"
        if case:
            assert case in cases(path.read_text()), f"{file} has no case {case}"


def cases(source: str) -> set[str]:
    """Names of layouts: written out, or made of a kind of cells and a cache."""
    written = set(re.findall(r'Layout\(\s*"([\w-]+)"', source))
    return written | {f"{kind}-{cache}" for kind in ("q8_0", "q4_0") for cache in ("unified", "split")}


def test_every_layout_that_is_tested_is_on_the_page() -> None:
    """A layout's name begins with its model's: dense, sliding, hybrid, recurrent, or with what is special about it."""
    source = (ROOT / "tests" / "engine" / "test_cache_layouts.py").read_text()
    shown = {case.split("-")[0] for _, _, case in NAMED if case}
    assert {name.split("-")[0] for name in cases(source)} - {"q8_0", "q4_0"} <= shown
