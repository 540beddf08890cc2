"""Fixtures that every test may use."""

from collections.abc import AsyncIterator

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
