"""A short POST goes its own way to the engine: the same bytes, the same replies and the same errors as any other."""

import asyncio
import contextlib

import pytest

from polykv_proxy import errors
from polykv_proxy.upstream import EngineClient

BODY = b'{"prompt":"x"}'
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: 1\r\nx-a: 2\r\n\r\nok"
PIECES = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"


class Wire:
    """Takes requests with a body of ``BODY``'s length and answers each with the next of ``answers``; b"" hangs up."""

    def __init__(self, *answers: bytes):
        self.answers = list(answers)
        self.heads: list[bytes] = []
        self.n_connections = 0
        self.came, self.left = asyncio.Event(), asyncio.Event()
        self.serving: set[asyncio.Task] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self.serving.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                assert await reader.readexactly(len(BODY)) == BODY
                self.came.set()
                answer = self.answers.pop(0) if self.answers else None
                if answer is None:
                    continue
                writer.write(answer)
                await writer.drain()
                if not answer.startswith(b"HTTP/1.1") or b"hang up" in answer:
                    break
        self.left.set()
        writer.close()


@contextlib.asynccontextmanager
async def wire(*answers: bytes, user: str = "", key: str | None = None):
    there = Wire(*answers)
    server = await asyncio.start_server(there.serve, "127.0.0.1", 0)
    client = EngineClient(f"http://{user}127.0.0.1:{server.sockets[0].getsockname()[1]}", key)
    try:
        yield client, there
    finally:
        await client.close()
        await asyncio.gather(*there.serving)
        server.close()


@pytest.fixture(params=["short", "long"])
def way(request, monkeypatch):
    """The same POST both ways."""
    if request.param == "long":
        monkeypatch.setattr("polykv_proxy.upstream.relay.MAX_BYTES", 0)
    return request.param


async def ask(client: EngineClient, target: str = "/x", headers=(), *, streams: bool = False) -> bytes:
    async with await client.open("POST", target, headers, BODY, streams=streams) as response:
        return await response.read()


HEADERS = [(b"X-Own", b"1"), (b"x-own", "ü".encode()), (b"Accept", b"text/plain"), (b"b", b"")]


@pytest.mark.parametrize("target", ["/x", "/x?", "/x?a=%2F&b=%20", "//x/../y", "/a%2fb;c=1", "/x#part", "/x?a#b"])
@pytest.mark.parametrize("streams", [False, True])
async def test_the_same_bytes_go_out_both_ways(monkeypatch, target, streams):
    async with wire(OK, OK, key="k") as (client, there):
        assert await ask(client, target, HEADERS, streams=streams) == b"ok"
        monkeypatch.setattr("polykv_proxy.upstream.relay.MAX_BYTES", 0)
        assert await ask(client, target, HEADERS, streams=streams) == b"ok"
    short, long = there.heads
    assert short == long
    assert b"\r\nAuthorization: Bearer k\r\n" in short
    assert (b"\r\nConnection: close\r\n" in short) is streams


async def test_a_line_break_in_a_header_is_never_sent(way):
    async with wire(OK) as (client, there):
        with pytest.raises(ValueError, match="header"):
            await ask(client, headers=[(b"X-A", b"1\r\nX-B: 2")])
        assert there.heads == []
        assert await ask(client) == b"ok"


async def test_replies_are_read_both_ways(way):
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    async with wire(hints + OK) as (client, _), await client.open("POST", "/x", [], BODY) as response:
        assert (response.status, response.reason) == (200, "OK")
        assert response.headers == [("Content-Length", "2"), ("X-A", "1"), ("x-a", "2")]
        assert [await response.read_piece(), await response.read_piece()] == [b"ok", b""]


async def test_connections_are_used_again_unless_the_reply_came_in_chunks():
    async with wire(OK, OK, PIECES, OK) as (client, there):
        for n_connections in (1, 1, 1, 2):
            assert await ask(client) == b"ok"
            assert there.n_connections == n_connections


@pytest.mark.parametrize(
    ("answer", "ours", "said"),
    [
        (b"nonsense\r\n\r\n", errors.UpstreamError, "is not HTTP that can be read (ClientResponseError)"),
        (b"", errors.UpstreamUnavailable, "the engine closed the connection (ServerDisconnectedError)"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nX: hang up\r\n\r\nhalf",
            errors.UpstreamUnavailable,
            "the engine's reply broke off before its end; ask again",
        ),
    ],
)
async def test_what_breaks_is_told_the_same_both_ways(way, answer, ours, said):
    async with wire(answer) as (client, there):
        with pytest.raises(ours) as e:
            await ask(client)
        assert type(e.value) is ours
        assert e.value.message.startswith("POST /x: ")
        assert e.value.message.endswith(said)
        assert len(there.heads) == 1


async def test_who_leaves_hangs_up(way):
    async with wire() as (client, there):
        asking = asyncio.create_task(ask(client))
        async with asyncio.timeout(10):
            await there.came.wait()
            asking.cancel()
            await there.left.wait()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_reply_that_is_closed_halfway_hangs_up(way):
    async with wire(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf") as (client, there):
        response = await client.open("POST", "/x", [], BODY)
        assert await response.read_piece() == b"half"
        reading = asyncio.ensure_future(response.read_piece())
        await asyncio.sleep(0)
        response.close()
        with pytest.raises(errors.UpstreamUnavailable):
            await reading
        async with asyncio.timeout(10):
            await there.left.wait()


async def test_who_is_named_in_the_address_is_told_to_the_engine(way):
    async with wire(OK, user="me:secret@") as (client, there):
        assert await ask(client) == b"ok"
    assert b"\r\nAuthorization: Basic bWU6c2VjcmV0\r\n" in there.heads[0]
