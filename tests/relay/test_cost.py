"""What the proxy costs in front of a fake engine, beside a bare relay in the same run (`benchmarks.relay_overhead`)."""

import statistics

import pytest

from benchmarks.relay_overhead import MAX_ADDED_RATIO, MIN_STREAM_RATIO, measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_small_requests_and_many_streams() -> None:
    runs = [measure(rounds=800, n_streams=32) for _ in range(3)]
    print(runs)
    assert statistics.median(run["added_ratio"] for run in runs) <= MAX_ADDED_RATIO
    assert statistics.median(run["stream_ratio"] for run in runs) >= MIN_STREAM_RATIO
