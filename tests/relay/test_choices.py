"""``n`` counts for cells as far as the engine gives so many answers."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from polykv_proxy.control import AttachRequest
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(n_slots=4) as engine:
        yield engine


@pytest.mark.parametrize(
    ("path", "n", "counted"),
    [
        ("/v1/chat/completions", 1, 1),
        ("/v1/chat/completions", 4, 4),
        ("/v1/chat/completions", 5, 1),  # the engine refuses it, and nobody is to wait or leave for that
        ("/completion", 99_999, 1),
        ("/v1/messages", 3, 1),  # it does not know the word
    ],
)
async def test_no_more_than_there_are_slots(proxy: Proxy, path: str, n: int, counted: int) -> None:
    assert proxy.control.attach.admission._n_choices(AttachRequest(path=path, body={"n": n})) == counted
