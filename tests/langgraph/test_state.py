"""The reducers: pure, and the same whoever comes first."""

from itertools import permutations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.langgraph import merge_polykv, polykv_update

names = st.sampled_from(["a", "b", "c"])


def updates() -> st.SearchStrategy[list[dict[str, Any]]]:
    """Three updates, each made at a time of its own."""
    one = st.fixed_dictionaries(
        {},
        optional={
            "pool_id": st.integers(0, 5),
            "capacity": st.fixed_dictionaries({"n_active": st.integers(0, 3)}),
            "sessions": st.dictionaries(names, st.fixed_dictionaries({"tps": st.integers(0, 9)})),
            "compactions": st.integers(0, 3),
            "pools": st.dictionaries(st.sampled_from("012345"), st.just({"parent": 0})),
            "retired": st.lists(st.integers(0, 5)),
        },
    )

    def dated(drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for ts, update in enumerate(drawn):
            if "pool_id" in update:
                update["at"] = {"pool_id": ts}
            if "capacity" in update:
                update["capacity"]["ts"] = ts
            for session in update.get("sessions", {}).values():
                session["ts"] = ts
        return drawn

    return st.lists(one, min_size=3, max_size=3).map(dated)


@given(updates())
def test_the_order_of_updates_does_not_matter(drawn: list[dict[str, Any]]) -> None:
    found = [merge_polykv(merge_polykv(a, b), c) for a, b, c in permutations(drawn)]
    found += [merge_polykv(a, merge_polykv(b, c)) for a, b, c in permutations(drawn)]
    assert all(each == found[0] for each in found)


def test_each_key_is_merged_by_its_own_rule() -> None:
    left = {
        "pool_id": 1,
        "sessions": {"a": {"tps": 1, "ts": 5}, "b": {"tps": 2, "ts": 5}},
        "capacity": {"n_active": 1, "ts": 9},
        "pools": {"5": {"parent": -1}, "6": {"parent": 5}},
        "compactions": 2,
        "retired": [7, 3],
    }
    right = {
        "session_id": "s",
        "sessions": {"a": {"tps": 9, "ts": 4}, "c": {"tps": 3, "ts": 4}},
        "capacity": {"n_active": 2, "ts": 8},
        "pools": {"8": {"parent": 6}},
        "compactions": 1,
        "retired": [5],
    }
    before = repr((left, right))
    assert merge_polykv(left, right) == {
        "pool_id": 1,
        "session_id": "s",
        "sessions": {"a": {"tps": 1, "ts": 5}, "b": {"tps": 2, "ts": 5}, "c": {"tps": 3, "ts": 4}},
        "capacity": {"n_active": 1, "ts": 9},
        "pools": {"6": {"parent": 5}, "8": {"parent": 6}},
        "compactions": 2,
        "retired": [3, 5, 7],
    }
    assert repr((left, right)) == before
    assert merge_polykv(None, None) == {}


def test_a_later_update_wins_and_one_without_a_time_too() -> None:
    first = polykv_update(pool_id=1, retired=[4])
    second = polykv_update(pool_id=2)
    second["at"]["pool_id"] = first["at"]["pool_id"] + 1
    assert merge_polykv(first, second)["pool_id"] == merge_polykv(second, first)["pool_id"] == 2
    assert merge_polykv(second, {"pool_id": 3}) == {"pool_id": 3}
