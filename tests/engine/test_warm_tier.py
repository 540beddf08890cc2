"""What saved states promise, measured: prefixes come back in no time, idle pools cost nothing, streams do not notice
(`benchmarks.warm_tier`).

Ratios of one run on one machine, speeds by the best round of each arm, pauses by the shortest of the longest ones: a
busy machine makes this slow rather than red. One thread, which spins for nobody.
"""

import pytest

from benchmarks.warm_tier import measure, report

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_saved_states_keep_their_promises() -> None:
    found = measure(2, print, up_to=12, n_threads=1)
    print(report(found))
    assert found.broken_promises(judge=min) == []
