"""Below the application: requests whose head cannot be read, and what the HTTP library says about them.

aiohttp answers those itself, as HTTP/1.0 text that repeats what it could not read, and logs a traceback with it: a
mistyped ``Authorization`` line would stand in the log. Here they get the contract's error body and one line in the log
that quotes nothing.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import orjson
from aiohttp import HttpVersion11, http_exceptions, web, web_protocol

from polykv_proxy.errors import HeadersTooLarge, InvariantError, PolyKVError, RequestError
from polykv_proxy.relay.refusals import refusal
from polykv_proxy.relay.slow_clients import Patience, PatientHandler, SlowClients

log = logging.getLogger("polykv.http")

MAX_LINE, MAX_FIELD = 16_384, 32_768
"""Bytes of a request line, and of one header."""

_OPTIONS: dict[str, Any] = {
    "auto_decompress": False,
    "access_log": None,
    "keepalive_timeout": 75.0,
    "max_line_size": MAX_LINE,
    "max_field_size": MAX_FIELD,
}

_UNREADABLE: dict[type[Exception], str] = {
    http_exceptions.BadHttpMethod: "the method cannot be read",
    http_exceptions.BadStatusLine: "the request line cannot be read",
    http_exceptions.InvalidURLError: "the request target cannot be read",
    http_exceptions.InvalidHeader: "a header cannot be read",
    http_exceptions.TransferEncodingError: "the chunks of the body cannot be read",
    http_exceptions.ContentLengthError: "the body does not have the announced length",
}


_NO_REQUEST = (
    "this is no request of HTTP/1.1 that can be read in one way only: it may be another protocol (https?), lack its "
    "Host, have two Hosts, Content-Types, User-Agents or Content-Lengths, one beside Transfer-Encoding, or a blank or "
    "control character in a header"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ShortWay = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]
"""Serves a request, or hands it on to the application's router."""


class AppRunner(web.AppRunner):
    """Runs an application behind ``Connection``. A client that leaves cancels its handler, in every phase."""

    def __init__(self, app: web.Application, short_way: ShortWay, patience: Patience):
        super().__init__(app, handler_cancellation=True, shutdown_timeout=1.0)
        self._short_way = short_way
        self._slow = SlowClients(patience)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        routed, short_way = made.request_handler, self._short_way

        def serve(request: Any) -> Awaitable[web.StreamResponse]:
            return short_way(request, routed)

        server = _Server(serve, request_factory=made.request_factory, handler_cancellation=True, **_OPTIONS)
        server.slow = self._slow
        self._slow.start(server)
        return server

    async def cleanup(self) -> None:
        await super().cleanup()
        await self._slow.stop()


class _Server(web.Server):
    slow: SlowClients

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self.slow, loop=self._loop, **_OPTIONS)


class _InPlace:
    """The loop as aiohttp's connection sees it, which makes a task of every request and waits for it. Here the request
    is that wait itself: one task less, and two turns of the loop, which is a twentieth of what a small request costs.

    Cancelling the connection cancels what it waits for, in either way.
    """

    __slots__ = ("_loop", "call_at", "create_future", "time")

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self.call_at, self.create_future, self.time = loop.call_at, loop.create_future, loop.time

    @staticmethod
    def create_task(work: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        return work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class Connection(PatientHandler):
    """One connection of a client."""

    __slots__ = ()

    def start(self) -> Coroutine[Any, Any, None]:
        """Serve what comes; before Python 3.12, which begins tasks at once, without a task more for each request."""
        if sys.version_info < (3, 12):
            self._loop = cast(asyncio.AbstractEventLoop, _InPlace(self._loop))
        return super().start()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what no handler could: an unreadable head, or a bug that came through all of them."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client left
        error = self._understood(request, status, exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a reply had begun; nothing else can be said")
        no_body = request._message is web_protocol.ERROR and self._unreadable_head
        response = web.Response(
            status=error.status,
            body=b"" if no_body else orjson.dumps(refusal(error, None)),
            content_type="application/json",
            headers={"x-request-id": os.urandom(16).hex()},
        )
        request._version = HttpVersion11  # nobody knows which one it was; aiohttp takes 1.0
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """What aiohttp has to say about a connection: the kind of problem, never its text."""
        exc = kw.get("exc_info")
        if not isinstance(exc, PolyKVError):  # those were told when they were raised
            log.warning("connection broken off: %s", type(exc).__name__)

    def _understood(self, request: web.BaseRequest, status: int, exc: BaseException | None) -> PolyKVError:
        if isinstance(exc, http_exceptions.HttpProcessingError):
            log.info("unreadable request from %s: %s", request.remote, type(exc).__name__)
            if isinstance(exc, http_exceptions.LineTooLong) or exc.message == "Too many headers received":
                return HeadersTooLarge(
                    f"the head is too large: at most {MAX_LINE} bytes of request line, {MAX_FIELD} of each header, "
                    "128 headers"
                )
            return RequestError(
                next((said for kind, said in _UNREADABLE.items() if isinstance(exc, kind)), _NO_REQUEST)
            )
        if isinstance(exc, PolyKVError):
            return exc  # logged where it was raised
        log.error("bug below the application (%d): %s", status, type(exc).__name__, exc_info=exc)
        return InvariantError("an internal error; the proxy's log has it")
