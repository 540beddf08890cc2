"""Two ends of a wire without an HTTP library in between: what was sent is seen byte for byte."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from tests.serving import everybody_was_accepted

OK = b"HTTP/1.1 200 OK\r\n"
HANG_UP = b"<hang up>"
"""In a script: the connection is closed here. Without it the connection is kept."""


class RawEngine:
    """Plays a plain llama-server with one slot: sends the ``script`` whatever the request (pieces; a number = a pause
    in seconds; an event is waited for)."""

    def __init__(self, script: Sequence[bytes | float | asyncio.Event] = (OK + b"Content-Length: 0\r\n\r\n",)):
        self.script = script
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.left = asyncio.Event()
        self.n_sent = 0
        self.url = ""

    async def __aenter__(self) -> "RawEngine":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await everybody_was_accepted()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await read_framed(reader, head)
                target = head.split(b" ")[1]
                if target.startswith(b"/polykv/engine"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                elif target == b"/props" and b"x-test" not in head.lower():
                    writer.write(OK + b'Content-Type: application/json\r\nContent-Length: 17\r\n\r\n{"total_slots":1}')
                else:
                    self.heads.append(head)
                    self.bodies.append(body)
                    self.n_sent = 0
                    for piece in self.script:
                        if isinstance(piece, float):
                            await asyncio.sleep(piece)
                        elif isinstance(piece, asyncio.Event):
                            await piece.wait()
                        elif piece == HANG_UP:
                            writer.transport.abort()
                            return
                        else:
                            writer.write(piece)
                            await writer.drain()
                        self.n_sent += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()

    def header(self, name: str, n: int = -1) -> list[str]:
        lines = self.heads[n].decode("latin-1").split("\r\n")[1:]
        return [line.partition(":")[2].strip() for line in lines if line.lower().startswith(name.lower() + ":")]


async def read_framed(reader: asyncio.StreamReader, head: bytes) -> bytes:
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return body
    for line in lower.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return await reader.readexactly(int(line.partition(b":")[2]))
    return b""


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait for something that tells nobody when it happens."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.003)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def exchange(url: str, request: bytes, timeout_s: float = 10) -> tuple[bytes, bytes]:
    """Send bytes, read one reply. Gives (head, body as framed, chunk sizes included)."""
    async with connected(url) as (reader, writer), asyncio.timeout(timeout_s):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        if request.startswith(b"HEAD"):
            return head, b""
        if b"transfer-encoding: chunked" in lower:
            body = b""
            while not body.endswith(b"\r\n0\r\n\r\n") and body != b"0\r\n\r\n":
                piece = await reader.read(65536)
                body += piece
                if not piece:
                    break
            return head, body
        length = next((line for line in lower.split(b"\r\n") if line.startswith(b"content-length:")), None)
        if length is None:
            return head, await reader.read(-1)
        return head, await reader.readexactly(int(length.partition(b":")[2]))


def unchunked(body: bytes) -> bytes:
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        n = int(size, 16)
        out, body = out + body[:n], body[n + 2 :]
        if not n:
            break
    return out


def post(path: str, body: bytes, headers: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode("latin-1")
        + body
    )


def get(path: str, headers: str = "", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode("latin-1")
