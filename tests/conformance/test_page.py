"""The page that a whole run writes, and what the command says and ends with."""

import re
from fnmatch import fnmatchcase

import pytest

from conformance.__main__ import MODES, PAGE, is_whole, parse_arguments, report
from conformance.excuses import ELSEWHERE, EXCUSED, why_not
from conformance.page import page, title
from conformance.suite import Outcome
from conformance.upstream import Arm, Found

PASSED = Outcome("passed")
WORDS = Outcome("failed", '>       assert match_regex("(Suddenly)+", said)\nE       AssertionError: assert False\n')
ODD = Outcome("failed", ">       assert said == asked\nE       AssertionError: assert 'a' == 'b'\n")
STOCK = {
    "test_basic::test_health": PASSED,
    "test_basic::test_words[1]": PASSED,
    "test_basic::test_words[2]": WORDS,
    "test_slot::test_odd": ODD,
    "test_slot::test_big": Outcome("skipped", "needs a large model"),
}
PROXY = Arm(passed=["test_basic::test_health"], excused={"test_basic::test_words[1]": "it is meant so"})
PLAIN = Arm(passed=["test_basic::test_health", "test_basic::test_words[1]"])
UPSTREAM = Found(STOCK, dict(zip(MODES, (PROXY, PLAIN), strict=True)))
SCENARIOS = Found(
    {"test_openai::test_chat": PASSED, "test_refused::test_tries": Outcome("skipped")},
    {
        MODES[0]: Arm(passed=["test_openai::test_chat", "test_refused::test_tries"]),
        MODES[1]: Arm(passed=["test_openai::test_chat"]),
    },
)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return page(UPSTREAM, SCENARIOS, commit="0123456789", versions={"openai": "3.1"}).splitlines()


def test_the_counts(lines: list[str]) -> None:
    assert "| scenarios of the official clients | 1 | 1 | 1 | 1 |" in lines
    assert "| llama.cpp's own tests | 5 | 2 | 1 | 2 |" in lines
    assert "| `test_basic` | 3 | 2 | 1 | 2 |" in lines
    assert "| `test_slot` | 2 | 0 | 0 | 0 |" in lines
    assert "This page: llama.cpp 01234567, openai 3.1." in lines


def test_every_scenario_has_a_line(lines: list[str]) -> None:
    assert "| `openai::test_chat` | passes | passes | passes |" in lines
    assert "| `refused::test_tries` | - | passes | - |" in lines


def test_every_test_has_its_place(lines: list[str]) -> None:
    assert "- A: proxy, pools: `test_basic::test_words[1]`: it is meant so" in lines
    assert "- `test_basic`: `test_health`, `test_words` (1 of 2 cases)" in lines
    assert "- looks for the words of the model that it downloads: `test_basic::test_words`" in lines
    assert "- `assert said == asked` does not hold (AssertionError: assert 'a' == 'b'): `test_slot::test_odd`" in lines
    assert "- skipped: needs a large model: `test_slot::test_big`" in lines


def test_a_name_goes_before_a_rule() -> None:
    assert why_not("test_basic::test_no_ui", WORDS).startswith("needs the web page")
    assert why_not("test_basic::test_other", WORDS).startswith("looks for the words")


def test_reasons_are_for_what_fails_and_what_fails_has_one() -> None:
    """By the page of the last whole run."""
    said = PAGE.read_text()
    scenarios = [f"test_{name}" for name in re.findall(r"(?m)^\| `(\S+)` \| fails", said)]
    others = re.findall(r"`(test_\w+::\w+)`", said.partition("### What fails or is skipped")[2])
    for pattern in ELSEWHERE:
        assert any(fnmatchcase(name, pattern) for name in scenarios + others), pattern
    excused = said.partition("### Excused")[2].partition("###")[0]
    for arm in MODES:  # what outgrows a cache does not do so every time
        assert set(re.findall(rf"(?m)^- {title(arm)}: `([^`]+)`", excused)) <= set(EXCUSED[arm])


def test_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert report({"upstream": UPSTREAM, "scenarios": SCENARIOS}) == 0
    said = capsys.readouterr().out
    assert "upstream: 5 tests, 2 pass in front of stock" in said
    assert "excused: test_basic::test_words[1]" in said
    failing = Found(STOCK, {"proxy": Arm(unexpected={"test_basic::test_health": "failed: assert 1 == 2"})})
    assert report({"upstream": failing}) == 1
    assert "unexpected: test_basic::test_health" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [([], True), (["--jobs", "1"], True), (["-k", "health"], False), (["--files", "test_basic"], False),
     (["--arms", "proxy"], False)],
)  # fmt: skip
def test_only_a_whole_run_writes_the_page(arguments: list[str], whole: bool) -> None:
    assert is_whole(parse_arguments(arguments)) == whole


def test_help_names_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["--help"])
    assert ended.value.code == 0
    assert all(mode in capsys.readouterr().out for mode in ("proxy-stock",))
