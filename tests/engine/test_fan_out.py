"""The main promise, measured: four agents on one pool, through the proxy, against stock (`benchmarks.fan_out`).

Ratios of one run on one machine, each arm by its best round, so a busy machine makes this slow rather than red.
"""

import pytest

from benchmarks.fan_out import measure, report

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_fan_out_keeps_its_promises() -> None:
    found = measure(4, print)
    print(report(found))
    assert found.broken_promises() == []
