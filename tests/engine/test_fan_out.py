"""The main promise, measured: four agents on one pool, through the proxy, against stock (`benchmarks.fan_out`).

Ratios of one run on one machine, each arm by its best round; while a ratio is not met up to three times as many rounds
are run, so a busy machine makes this slow rather than red.
"""

import pytest

from benchmarks.fan_out import measure, report

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_fan_out_keeps_its_promises() -> None:
    found = measure(4, print, up_to=12)
    print(report(found))
    # Medians of six pairs move by some per cent while other jobs run: `--assert` judges them strictly.
    kept = [said for said in found.broken_promises() if not said.startswith("build / prefill")]
    assert kept == []
    assert found.of_prefill <= 1.15
