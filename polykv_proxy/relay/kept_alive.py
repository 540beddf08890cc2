"""A stream whose turn is held for long: its head and comments go out, so that nobody on the way takes it for dead.

Only for turns that are held: they always go on, so a 200 is no promise that is broken. What fails afterwards is an
``error`` event of the stream that has begun.
"""

import asyncio
import logging

import orjson
from aiohttp import web

from polykv_proxy.errors import UpstreamError
from polykv_proxy.relay.pump import begin_events
from polykv_proxy.upstream import UpstreamResponse

log = logging.getLogger("polykv.relay")

EVERY_S = 10.0
COMMENT = b": hold\n\n"
MAX_REASON = 1 << 16
"""Of a refusal of the engine so many bytes are read."""


class KeptAlive:
    """``start`` when it is held, ``end`` in any case."""

    def __init__(self, request: web.Request, extra: list[tuple[str, str]]):
        self._request, self._extra = request, extra
        self._response: web.StreamResponse | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="polykv-hold")

    async def end(self) -> web.StreamResponse | None:
        """Gives what was begun. It is not torn off in the middle of a comment, also when the client leaves."""
        if self._task is not None:
            self._over.set()
            await asyncio.wait([self._task])
        return self._response

    async def _run(self) -> None:
        while not await self._is_over():
            try:
                if self._response is None:
                    self._response = await begin_events(self._request, self._extra)
                await self._response.write(COMMENT)
            except ConnectionError as e:
                log.debug("the client of a held turn is gone: %s", e)  # its handler is being told
                return

    async def _is_over(self) -> bool:
        try:
            async with asyncio.timeout(EVERY_S):
                await self._over.wait()
        except TimeoutError:
            return False
        return True


async def refused_late(upstream: UpstreamResponse) -> UpstreamError:
    """What the engine said instead of a stream, for a client that was told 200 already."""
    body = b""
    while len(body) < MAX_REASON and (piece := await upstream.read_piece()):
        body += piece
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"an answer of {len(body)} bytes that is no stream"
    return UpstreamError(f"the engine: {message}", engine_status=upstream.status)
