"""Servers of the tests that end without leaving a connection open.

asyncio makes a transport of what it accepted one step of the event loop later, and tells the protocol another step
later. A server that is closed in between never hears of that connection, and nobody closes it: the client hangs, and
the interpreter warns of an unclosed transport when it finds it.
"""

import asyncio
import socket

from aiohttp import web


class Runner(web.AppRunner):
    """``listen``, then ``cleanup``."""

    _listener: socket.socket | None = None

    async def listen(self, port: int = 0) -> int:
        """Serve on this port of the loopback interface, 0 = a free one. Gives the port."""
        self._listener = socket.create_server(("127.0.0.1", port))
        await web.SockSite(self, self._listener).start()
        return int(self._listener.getsockname()[1])

    async def deafen(self) -> None:
        """Accept nothing any more. All that was accepted is a connection when this returns."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def cleanup(self) -> None:
        await self.deafen()
        await super().cleanup()


async def everybody_was_accepted() -> None:
    """For servers of others, after their clients left: by now each of them is a connection, or was one."""
    for _ in range(4):
        await asyncio.sleep(0)
