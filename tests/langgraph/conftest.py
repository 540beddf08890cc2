"""Fixtures that the standard tests of LangChain ask for, without the plugins that would run in every other test too."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.langgraph.toy_server import ToyServer

with warnings.catch_warnings():
    # The first import compiles schemas of pydantic.v1 and others' old annotations; what they warn of is not ours.
    warnings.simplefilter("ignore")
    import langchain_openai  # noqa: F401


@pytest.fixture
def toy() -> ToyServer:
    return ToyServer()


@pytest.fixture
def benchmark() -> Callable[..., Any]:
    """Once, and nothing is measured."""
    return lambda do, *args, **kwargs: do(*args, **kwargs)


@pytest.fixture
def vcr() -> None:
    """Nothing is recorded."""


@pytest.fixture
def snapshot() -> None:
    """The model does not serialise, so nothing is compared."""
