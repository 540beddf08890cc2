"""What the warm tier promises to agents, on the chat model: no turn is prefilled twice, pools that nobody uses cost
nothing, a killed engine costs no prefill (`benchmarks.warm_agents`).

Speeds by the best round of each arm: a busy machine makes this slow rather than red. One thread spins for nobody.
"""

import pytest

from benchmarks.warm_agents import report, run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_warm_tier_keeps_its_promises_to_agents() -> None:
    found = run(1, print, up_to=6, n_threads=1)
    print(report(found))
    assert found.broken_promises() == []
