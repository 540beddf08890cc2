"""The policy: defaults, checks, inheritance."""

from typing import Any

import pytest

from polykv_proxy.errors import RequestError
from polykv_proxy.gate.policy import Policy, PolicyBook, Ruling, parse_policy
from polykv_proxy.ids import PoolId

A, B, C = PoolId(1), PoolId(2), PoolId(3)


def test_defaults_are_those_of_the_contract() -> None:
    assert parse_policy({"target_tps_per_session": 15}).to_json() == {
        "target_tps_per_session": 15.0,
        "mode": "advisory",
        "on_saturation": "reject",
        "guarantee_min_sessions": 1,
        "settle_tokens": 48,
        "settle_max_ms": 5000,
        "estimator": "settled",
        "max_turn_hold_ms": 0,
        "max_queue": 64,
        "queue_timeout_ms": 30000,
    }


def test_roofline_holds_turns_unless_told_otherwise() -> None:
    roofline = {"target_tps_per_session": 5, "estimator": "roofline"}
    assert parse_policy(roofline).max_turn_hold_ms == 30_000
    assert parse_policy(roofline | {"max_turn_hold_ms": 0}).max_turn_hold_ms == 0


def test_what_is_printed_can_be_set_again() -> None:
    policy = parse_policy({"target_tps_per_session": 5.5, "mode": "enforced", "on_saturation": "queue", "max_queue": 0})
    assert parse_policy(policy.to_json()) == policy


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "target_tps_per_session"),
        ({"target_tps_per_session": None}, "target_tps_per_session"),
        ({"target_tps_per_session": 0}, "target_tps_per_session"),
        ({"target_tps_per_session": -1}, "target_tps_per_session"),
        ({"target_tps_per_session": True}, "target_tps_per_session"),
        ({"target_tps_per_session": "15"}, "target_tps_per_session"),
        ({"target_tps_per_session": float("nan")}, "target_tps_per_session"),
        ({"target_tps_per_session": float("inf")}, "target_tps_per_session"),
        ({"target_tps_per_session": 5, "mode": "strict"}, "mode"),
        ({"target_tps_per_session": 5, "mode": ["enforced"]}, "mode"),
        ({"target_tps_per_session": 5, "on_saturation": "drop"}, "on_saturation"),
        ({"target_tps_per_session": 5, "estimator": "best"}, "estimator"),
        ({"target_tps_per_session": 5, "guarantee_min_sessions": -1}, "guarantee_min_sessions"),
        ({"target_tps_per_session": 5, "guarantee_min_sessions": True}, "guarantee_min_sessions"),
        ({"target_tps_per_session": 5, "settle_tokens": 1.5}, "settle_tokens"),
        ({"target_tps_per_session": 5, "settle_max_ms": 10**9}, "settle_max_ms"),
        ({"target_tps_per_session": 5, "max_queue": "many"}, "max_queue"),
        ({"target_tps_per_session": 5, "settle_token": 48}, "settle_token"),
        ([15], None),
        (None, None),
    ],
)
def test_a_wrong_field_is_named(body: Any, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_policy(body)
    assert caught.value.param == param


def test_the_nearest_ancestor_wins() -> None:
    book, high, low = PolicyBook(), Policy(30.0), Policy(5.0)
    book.set(A, high)
    assert book.resolve([C, B, A]) == Ruling(high, A, A)
    book.set(B, low)
    assert book.resolve([C, B, A]) == Ruling(low, B, B)
    assert book.resolve([A]) == Ruling(high, A, None)
    assert book.delete(B) == low
    assert book.resolve([C, B, A]) == Ruling(high, A, A)


def test_the_default_comes_last_and_is_kept_per_root() -> None:
    book = PolicyBook(Policy(3.0))
    assert book.resolve([C, B, A]) == Ruling(Policy(3.0), A, "default")
    book.set(A, Policy(7.0))
    assert book.resolve([C, B, A]).policy == Policy(7.0)


def test_nobody_is_gated_without_a_policy() -> None:
    book = PolicyBook()
    assert book.is_empty
    assert book.resolve([B, A]) == Ruling(None, A, None)
    book.set(A, Policy(7.0))
    assert not book.is_empty
    assert not PolicyBook(Policy(1.0)).is_empty
