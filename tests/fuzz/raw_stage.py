"""A proxy in front of an engine that is played byte by byte, on a loop of its own."""

import asyncio
from collections.abc import Sequence
from typing import Any

from polykv_proxy.app import serving
from polykv_proxy.config import load_settings
from tests.fuzz.stage import SETTLED_S, Loop, at_work
from tests.relay.raw import RawEngine, connected, until


class RawStage(Loop):
    """Every request is answered with the same script."""

    engine: RawEngine
    url: str
    app: Any

    async def _start(self) -> None:
        self.engine = await self._stack.enter_async_context(RawEngine())
        settings = load_settings(upstream_url=self.engine.url, state=":memory:", port=0)
        self.url, self.app = await self._stack.enter_async_context(serving(settings))

    async def play(self, script: Sequence[bytes], requests: list[bytes]) -> list[bytes]:
        """All at once, each on a connection that is closed after its reply. Gives what came; nobody is left behind."""
        self.errors.clear()
        self.engine.script = script
        replies = await asyncio.gather(*(self._ask(request) for request in requests))
        await until(lambda: not at_work(self.app), SETTLED_S)
        return replies

    async def _ask(self, request: bytes) -> bytes:
        async with connected(self.url) as (reader, writer), asyncio.timeout(SETTLED_S):
            writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            try:
                return await reader.read(-1)
            except ConnectionResetError:
                return b""
