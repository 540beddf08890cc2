"""The SDK against the proxy as it is served, in front of the fake engine. Every call is made by both clients.

The proxy runs in the test's own event loop, so the synchronous client has to be asked from a thread.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient
from tests.relay.conftest import Proxy, make_proxy, proxy

__all__ = ["Asked", "asked", "make_proxy", "proxy"]


class Asked:
    """``await asked("create_pool", tokens=[…])``; a stream gives the list of its pieces, up to ``most``."""

    def __init__(self, client: PolyKVClient | AsyncPolyKVClient):
        self.client = client

    async def __call__(self, method: str, /, *args: Any, most: int | None = None, **kwargs: Any) -> Any:
        if isinstance(self.client, PolyKVClient):
            return await asyncio.to_thread(self._do, method, args, kwargs, most)
        made = getattr(self.client, method)(*args, **kwargs)
        if not method.startswith("stream"):
            return await made
        pieces = []
        async for piece in made:
            pieces.append(piece)
            if len(pieces) == most:
                await made.aclose()
                break
        return pieces

    def _do(self, method: str, args: Any, kwargs: Any, most: int | None) -> Any:
        made = getattr(self.client, method)(*args, **kwargs)
        if not method.startswith("stream"):
            return made
        pieces = []
        for piece in made:
            pieces.append(piece)
            if len(pieces) == most:
                made.close()
                break
        return pieces


@pytest_asyncio.fixture(params=["sync", "async"])
async def asked(proxy: Proxy, request: pytest.FixtureRequest) -> AsyncIterator[Asked]:
    if request.param == "sync":
        with PolyKVClient(proxy.url) as client:
            yield Asked(client)
    else:
        async with AsyncPolyKVClient(proxy.url) as aclient:
            yield Asked(aclient)
