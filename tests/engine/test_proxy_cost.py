"""What the proxy costs in front of a real engine: a seen prefix, and idle polling (`benchmarks.engine_overhead`)."""

import asyncio

import pytest

from benchmarks.engine_overhead import MAX_ADDED_MS, MAX_SHARE, measure

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_seen_prefix_and_idle_polling_cost_next_to_nothing() -> None:
    found = asyncio.run(measure(rounds=40, pairs=4))
    print(found)
    assert found["first_token"]["added_around_the_prompt_ms"] <= MAX_ADDED_MS
    assert found["polling"]["heartbeat_share"] <= MAX_SHARE
