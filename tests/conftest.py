"""Fixtures that every test may use, and which tests may run beside each other."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from tests.fake_engine import FakeEngine

settings.register_profile("fast", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fast")


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """A fresh patched fake engine."""
    async with FakeEngine() as engine:
        yield engine


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers (``-n 2 --dist loadgroup``): one real engine at a time, and modules stay whole.

    An engine decodes on one core and its test waits for it; most others wait for clocks and disks.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        group = "engine" if item.get_closest_marker("engine") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
