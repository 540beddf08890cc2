"""Three minutes of `make soak`: everything at once on the real engine, and nothing is left of it."""

import pytest

from benchmarks.soak import soak

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_three_minutes_of_churn_leave_nothing_behind() -> None:
    assert soak(3)["faults"] == []
