"""What the soak calls a fault."""

import random
from typing import Any

import pytest

from benchmarks.soak import FILLS, N_FILLED, Soak, report

ZERO = dict.fromkeys(("tasks", "file_descriptors", "requests", "cells", "pools"), 0)
KINDS = ("create", "fork", "compact", "release", "chat", "stream", "left in the middle", "left before the reply")
MB = 1 << 20


def faults(*rounds: dict[str, Any], without: str = "", wrong: str = "") -> list[str]:
    life = Soak("http://x", random.Random(1))
    life.done.update(kind for kind in KINDS if kind != without)
    life.wrong += [wrong] if wrong else []
    found: list[str] = report(life, [ZERO | {"rss_bytes": 80 * MB, "done": 10} | changed for changed in rounds])[
        "faults"
    ]
    return found


def test_as_at_first_or_less_is_well() -> None:
    assert faults({}, {"tasks": 5}, {}) == []
    assert faults({"tasks": 3}, {"tasks": 2}) == []


@pytest.mark.parametrize("name", ZERO)
def test_one_more_of_anything_is_a_fault(name: str) -> None:
    assert faults({name: 3}, {name: 4}) == [f"{name} has grown: 3 at first, 4 at the end"]


def test_memory_may_fill_what_is_kept_and_then_stays() -> None:
    full = 80 * MB + FILLS
    assert faults({}, {"rss_bytes": full}) == []
    assert len(faults({}, {"rss_bytes": full + 1})) == 1
    at = {"done": N_FILLED, "rss_bytes": 90 * MB}
    assert faults({}, at, at, {"done": N_FILLED + 1, "rss_bytes": 94 * MB}) == []
    assert len(faults({}, at, at, {"done": N_FILLED + 1, "rss_bytes": 95 * MB})) == 1


def test_what_never_happened_or_went_wrong_is_a_fault() -> None:
    assert faults({}, without="compact") == ["nothing happened: compact"]
    assert faults({}, wrong="chat: 500") == ["chat: 500"]
