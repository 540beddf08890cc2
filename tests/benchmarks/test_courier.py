"""What the courier's benchmark makes of what it measured."""

import math
from xml.etree import ElementTree

import pytest

from benchmarks.courier import Arm, Found, Turn, TurnRun, chart, report, verdict
from benchmarks.courier_chart import Sample, runs

FAR = {20: 3.0}
TURN = Turn(
    prompt=[1], answer=[5, 6, 7], behind=[{5: 0.0, 8: 2.0}, {6: 0.0, 9: 0.1}, {7: 0.0, 10: 0.9} | FAR], pause_s=0.0
)


@pytest.mark.parametrize(
    ("tokens", "gap", "said"),
    [
        ([5, 6, 7], 0.0, "exact"),
        ([5, 9, 1], 0.1, "rounding"),
        ([5, 6, 10], 0.9, "rounding"),
        ([8, 6, 7], 2.0, "wrong"),  # among the likeliest, but not nearly as likely
        ([5, 6, 20], 3.0, "wrong"),
        ([5, 10, 7], math.inf, "wrong"),  # not even that
        ([5, 6], math.inf, "wrong"),
        ([], math.inf, "wrong"),
        ([5, 9], math.inf, "wrong"),
        ([5, 6, 7, 8], math.inf, "wrong"),
    ],
)
def test_answers_are_right_up_to_rounding(tokens: list[int], gap: float, said: str) -> None:
    assert TURN.gap(tokens) == gap
    assert verdict(gap) == said


def arm(name: str, under_s: float, gap: float = 0.0) -> Arm:
    samples = [Sample(0.2 * i, 20.0 - i, i, i == 3) for i in range(12)]
    turns = [TurnRun(gap, 32, 2.0, 0.5), TurnRun(0.0, 32, 1.0, 0.5)]
    errors = {"model": [1.0, 3.0]}
    return Arm(name, 10.0, under_s, under_s / 2, [4.0, 8.0], turns, samples, [], [], errors)


def found(*arms: Arm) -> Found:
    return Found("a machine", 12.0, {1: 40.0, 3: 13.3}, n_packages=2, n_turns=1, arms=list(arms))


def test_figures_stand_beside_those_of_the_original_run() -> None:
    said = report(found(arm("none", 9.0), arm("plain", 8.0), arm("settled", 4.0), arm("roofline", 2.0)))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("|")]
    assert ["time under the floor", "-52 %", "-50 %", "-75 %"] in rows
    assert ["p50 delivery", "-43 %", "+0 %", "+0 %"] in rows
    assert ["settled", "10.0", "4.0", "2.0", "6.0", "21.3", "16.0", "0.5", "11"] in rows
    assert any(row[-1] == "model 2.0 (n=2)" for row in rows)


def test_the_chart_is_svg_with_a_strip_for_each_arm() -> None:
    root = ElementTree.fromstring(chart(found(arm("none", 9.0), arm("settled", 4.0))))
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert tags.count("polyline") == 4
    fills = [element.get("fill") for element in root.iter() if element.tag.endswith("rect")]
    assert fills.count("#dddddd") == 2  # the settling band of each
    assert fills.count("#f4c7c3") == 2
    assert runs([True, True, False, True]) == [(0, 1), (3, 3)]


def test_what_does_not_hold_is_said() -> None:
    assert found(arm("none", 9.0), arm("settled", 4.0)).broken_promises() == []
    assert found(arm("none", 4.0), arm("settled", 4.0)).broken_promises() != []
    assert found(arm("none", 9.0, math.inf)).broken_promises() == ["none: 1 answers are wrong"]
    assert found(arm("none", 9.0, 0.9)).broken_promises() == []
    broken = arm("none", 9.0)
    broken.turns.pop()
    broken.failures.append("none-package-1: no")
    assert broken.failures
    assert found(broken).broken_promises() == ["none: none-package-1: no", "none: 1 turns of 2"]
