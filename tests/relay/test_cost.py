"""What the proxy costs in front of an idle engine, beside a bare relay in the same run (`relay_overhead`)."""

import pytest

from benchmarks.relay_overhead import measure, missed, table
from benchmarks.relay_streams import measure_streams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_small_requests_and_many_streams() -> None:
    requests, streams = measure(rounds=800, repeat=3), measure_streams(256, 5.0, 10.0)
    print(table(requests, streams))
    assert missed(requests, streams) == []
