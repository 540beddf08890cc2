"""A short ``POST`` to the engine: head and body in one write, and no more work than that.

Most requests are of this kind. aiohttp's client does for each what only others need (redirects, cookies, proxies,
traces, kinds of bodies, a task that writes while the reply may come already); that was a quarter of what the proxy adds
to a small request. Here are its connections, its writer and its parser without the rest. What goes over the wire is the
same.
"""

import asyncio
from collections.abc import Iterable
from functools import lru_cache
from typing import Self, TypedDict

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError, RawResponseMessage, StreamWriter
from multidict import CIMultiDict
from yarl import URL

MAX_BYTES = 1 << 15
"""A longer body may have to wait for an engine that is slow to take it, and the reply may come meanwhile."""


class Limits(TypedDict):
    """What the parser of replies takes."""

    max_line_size: int
    max_field_size: int
    read_bufsize: int


class ShortReply:
    """A reply of which the head was read. The connection goes back when the body is there."""

    __slots__ = ("_connection", "content", "headers", "raw_headers", "reason", "status")

    def __init__(self, connection: Connection, message: RawResponseMessage, content: aiohttp.StreamReader):
        self._connection: Connection | None = connection
        self.status, self.reason = message.code, message.reason
        self.headers, self.raw_headers = message.headers, message.raw_headers
        self.content = content
        content.on_eof(self._release)

    def close(self) -> None:
        """Hang up, unless everything has come."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self.content.set_exception(aiohttp.ClientConnectionError("closed"))
            connection.close()

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


class ShortPosts:
    """Sends over the connections of a session of aiohttp's, with its timeouts."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, limits: Limits):
        if session.connector is None:
            raise RuntimeError("the session is closed")
        self._base_url, self._limits = base_url, limits
        self._connector, self._timeout = session.connector, session.timeout
        # Says where to, and is never sent itself.
        url, loop = URL(base_url, encoded=True), asyncio.get_running_loop()
        self._to = aiohttp.ClientRequest("POST", url, loop=loop, session=session)
        self._host = self._to.headers["Host"]

    @classmethod
    def over(cls, session: aiohttp.ClientSession, base_url: str, limits: Limits) -> Self | None:
        """None for an address that asks for more: a user's name in it, or nothing that could be connected to."""
        url = URL(base_url, encoded=True)
        plain = url.scheme in ("http", "https") and url.raw_host and url.raw_user is None and url.raw_password is None
        return cls(session, base_url, limits) if plain else None

    async def send(self, path_qs: str, headers: Iterable[tuple[str, str]], body: bytes) -> ShortReply:
        """Raises:  aiohttp's exceptions, OSError"""
        target = _target(self._base_url, path_qs)
        sent = CIMultiDict([("Host", self._host), *headers, ("Content-Length", str(len(body)))])
        if self._connector.force_close:
            sent["Connection"] = "close"
        try:
            connection = await self._connector.connect(self._to, traces=[], timeout=self._timeout)
        except TimeoutError as e:
            raise aiohttp.ConnectionTimeoutError("connecting took too long") from e
        try:
            protocol = connection.protocol
            assert protocol is not None
            protocol.set_response_params(read_until_eof=True, auto_decompress=False, **self._limits)
            writer = StreamWriter(protocol, self._to.loop)
            await writer.write_headers(f"POST {target} HTTP/1.1", sent)
            await writer.write_eof(body)
            message, content = await self._head(protocol)
            if "Transfer-Encoding" in message.headers:
                protocol.force_close()  # see ``EngineClient.open``
            return ShortReply(connection, message, content)
        except BaseException:
            connection.close()
            raise

    async def _head(self, protocol: ResponseHandler) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
        while True:
            try:
                message, content = await protocol.read()
            except HttpProcessingError as e:
                raise aiohttp.ClientResponseError(self._to.request_info, (), status=e.code, message=e.message) from e
            if not 100 <= message.code < 200 or message.code == 101:
                return message, content


@lru_cache(maxsize=256)
def _target(base_url: str, path_qs: str) -> str:
    """As aiohttp writes it into the request line."""
    return URL(base_url + path_qs, encoded=True).raw_path_qs
