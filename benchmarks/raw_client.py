"""Clients that cost next to nothing, so that what is measured is what they speak to."""

import asyncio
import time
from collections import Counter
from typing import cast
from urllib.parse import urlsplit

from benchmarks.idle_engine import CHAT, MARK

_DUE = b'"t":"'


def request(url: str, body: bytes | None = None, path: str = CHAT) -> bytes:
    """As SDKs send it; without a body a GET."""
    host = urlsplit(url).netloc
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\n"
    head += "User-Agent: benchmark/1.0\r\nAuthorization: Bearer none\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


def place(url: str) -> tuple[str, int]:
    to = urlsplit(url)
    return to.hostname or "localhost", to.port or 80


class Asker(asyncio.Protocol):
    """One connection; a request when the reply before it, which has a length, was read to its end."""

    def __init__(self) -> None:
        self._came = b""
        self._told: asyncio.Future[bytes] | None = None

    @classmethod
    async def to(cls, url: str) -> "Asker":
        return (await asyncio.get_running_loop().create_connection(cls, *place(url)))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)

    def close(self) -> None:
        self._wire.close()

    async def ask(self, request: bytes) -> bytes:
        """The body of the reply. Raises RuntimeError when that is no success, ConnectionError when it breaks off."""
        self._told = asyncio.get_running_loop().create_future()
        self._wire.write(request)
        reply = await self._told
        head, _, body = reply.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 20"):
            raise RuntimeError(reply.decode(errors="replace"))
        return body

    def data_received(self, data: bytes) -> None:
        came = self._came = self._came + data
        end = came.find(b"\r\n\r\n")
        if end < 0 or self._told is None:
            return
        at = came[:end].lower().find(b"content-length:")
        if at < 0:
            self._told.set_exception(RuntimeError(came.decode(errors="replace")))
        elif len(came) >= end + 4 + int(came[at + 15 : end].split(b"\r\n", 1)[0]):
            self._came = b""
            self._told.set_result(came)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._told is not None and not self._told.done():
            self._told.set_exception(exc or ConnectionError("the server hung up"))


class Listener(asyncio.Protocol):
    """One stream after the other on a connection: what came, and how late it was."""

    def __init__(self, request: bytes, heard: "Heard"):
        self._request, self._heard = request, heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._wire.write(self._request)

    def close(self) -> None:
        self._wire.abort()

    def data_received(self, data: bytes) -> None:
        self._heard.n_events += data.count(MARK)
        at = data.find(_DUE)
        if 0 <= at <= len(data) - 21:  # of several the first, which is the latest
            self._heard.late_ms[int(time.monotonic() * 1e3) - int(data[at + 5 : at + 21]) // 1000] += 1
        if data.endswith(b"0\r\n\r\n"):
            self._heard.n_ended += 1
            self._wire.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard.n_lost += 1


class Heard:
    """By all listeners. ``late_ms``: how often a piece's first event was so late; ``n_lost``: broken connections."""

    def __init__(self) -> None:
        self.n_events = self.n_ended = self.n_lost = 0
        self.late_ms: Counter[int] = Counter()

    def quantile_ms(self, q: float) -> int:
        left = q * self.late_ms.total()
        for ms in sorted(self.late_ms):
            left -= self.late_ms[ms]
            if left <= 0:
                return max(0, ms)
        return 0
