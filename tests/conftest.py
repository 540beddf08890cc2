"""Fixtures that every test may use, and which tests may run beside each other."""

from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of two workers (``-n 2``) one has all modules with real engines, which run one at a time; none is torn apart.

    An engine decodes on one core and its test waits for it; most others wait for clocks and disks.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "engine" if runs_engines(config.rootpath / module) else module

    return Scheduling(config, log)


@cache
def runs_engines(module: Path) -> bool:
    return "mark.engine" in module.read_text(encoding="utf-8")
