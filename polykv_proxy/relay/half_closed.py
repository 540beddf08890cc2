"""Clients that shut their writing side after the request, as `nc -N` does, and still read.

To the kernel they look like clients that left: both sent an end of file. Only a byte to them tells: who is there takes
it, who left answers it with a reset. So whoever is served here is asked by bytes of the reply itself, which it gets
anyway:

before the reply   ``HTTP/1.1 `` goes ahead byte by byte; the head is sent without what went ahead
in a chunked one   a zero before the next chunk's size, which changes nothing in it
else               what the engine says next, if it comes soon enough

Who left is known as soon as the reset comes; who does not acknowledge in time, or cannot be asked any more, is let go,
because a place must not be kept for nobody (reliability, promise 6). Nothing here runs for a client that keeps its side
open.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import orjson
from aiohttp import HttpVersion10
from aiohttp.http import StreamWriter

from polykv_proxy.errors import RequestError
from polykv_proxy.relay.refusals import refusal

if TYPE_CHECKING:
    from polykv_proxy.relay.slow_clients import PatientHandler

log = logging.getLogger("polykv.http")

SURE_FOR_S = 0.8
"""So long is a sign of life worth: with a look's distance and the way there less than the second that is promised."""

N_SOON, SOON_S = 3, 0.2
"""The first ones are asked sooner: a tunnel that passes an end of file on needs a byte or two to notice that nobody
takes them."""

LOOK_FIRST_S, LOOK_S = 0.01, 0.1
MAX_ZEROS = 8
"""Parsers read sizes of chunks up to sixteen digits."""

_CLOSE_WAIT = 8
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_INFO = struct.Struct("=B23xI28xI")
"""Of Linux' ``tcp_info``: the state, packets not acknowledged, ms since the last acknowledgement."""


class _Wire(NamedTuple):
    is_there: bool
    n_unacked: int
    acked_ms_ago: int


class HalfClosed:
    """One connection whose client sent its end of file while something is to be answered."""

    def __init__(self, connection: "PatientHandler", wire: asyncio.Transport):
        self._connection, self._wire = connection, wire
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self._looked_s = self._acked_s = now_s
        self._sent_s = now_s
        self._asked = 0
        self._writer: StreamWriter | None = None  # of the reply that is being made, and what of it was sent
        self._n_written = self._n_ahead = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> bool:
        """Ask for the first time. False: it left; on this machine that is known at once."""
        self._timer = self._loop.call_later(LOOK_FIRST_S, self._look)
        if not self._is_over() and not self._wire.get_write_buffer_size():
            self._ask(self._looked_s)
        wire = _seen(self._wire)
        return wire is not None and wire.is_there

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        now_s, wire = self._loop.time(), _seen(self._wire)
        if self._is_over():
            return
        if wire is None or not wire.is_there:
            self._wire.abort()
            return
        if not wire.n_unacked or wire.acked_ms_ago <= 1000 * (now_s - self._looked_s):
            self._acked_s = now_s
        self._looked_s = now_s
        if now_s - self._acked_s >= SURE_FOR_S:
            self._let_go("acknowledges nothing")
        elif not wire.n_unacked and not self._wire.get_write_buffer_size():
            self._ask(now_s)

    def _is_over(self) -> bool:
        """Close when everything is answered; no other request can come."""
        connection = self._connection
        if self._wire.is_closing():
            return True  # what it still has for the client goes out first
        if not connection.is_answering():
            connection.force_close()
            return True
        if not connection._messages and not connection._message_tail:
            connection._close = True  # after this reply
        return False

    def _ask(self, now_s: float) -> None:
        request = self._connection._current_request
        if request is None:
            return  # its turn comes in this very moment
        writer = cast(StreamWriter, request.writer)
        if writer._eof:
            return
        if writer is not self._writer or writer.output_size != self._n_written:
            self._writer, self._n_written, self._n_ahead = writer, writer.output_size, 0
            self._sent_s = now_s
        quiet_s = now_s - self._sent_s
        line = b"" if writer.output_size else b"HTTP/1.0 " if request.version == HttpVersion10 else b"HTTP/1.1 "
        if self._n_ahead >= (MAX_ZEROS if writer.output_size and writer.chunked else len(line)):
            if quiet_s >= SURE_FOR_S:
                if line:
                    self._refuse(with_body=request.method != "HEAD")
                self._let_go("waits for longer than it can be asked")
            return
        if self._asked and quiet_s < (SOON_S if self._asked < N_SOON else SURE_FOR_S):
            return
        if not _put(self._wire, line[self._n_ahead : self._n_ahead + 1] or b"0"):
            return
        self._n_ahead, self._asked, self._sent_s = self._n_ahead + 1, self._asked + 1, now_s
        if line:
            rest = _Rest(self._connection, self._wire, line[: self._n_ahead])
            self._connection.transport = cast(asyncio.Transport, rest)

    def _refuse(self, *, with_body: bool) -> None:
        """The rest of a reply whose status line went ahead up to the status."""
        error = RequestError(
            "the client shut its writing side, and for longer nobody can tell whether it still waits for the reply: "
            "keep it open until the reply came"
        )
        body = orjson.dumps(refusal(error, None))
        self._wire.write(
            b"400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body if with_body else b"")
        )

    def _let_go(self, why: str) -> None:
        log.info("a client that shut its side %s; hung up", why)
        self._wire.close()


class _Rest:
    """A transport whose next head went ahead in part. With the rest of it the connection has the real one back."""

    def __init__(self, connection: "PatientHandler", wire: asyncio.Transport, ahead: bytes):
        self._connection, self._wire, self._ahead = connection, wire, ahead

    def write(self, data: bytes) -> None:
        self._connection.transport = self._wire
        if not data.startswith(self._ahead):
            log.error("bug: a reply begins with another line than the one that went ahead")
            self._wire.abort()
            return
        self._wire.write(data[len(self._ahead) :])

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)


def _put(wire: asyncio.Transport, byte: bytes) -> bool:
    """Send it past the transport, which may wait for its next turn. Only while nothing waits in there."""
    try:
        return os.write(wire.get_extra_info("socket").fileno(), byte) == 1
    except OSError as e:  # full, or reset: the next look tells
        log.debug("a byte could not be sent: %s", e)
        return False


def can_be_asked(wire: asyncio.Transport) -> bool:
    """Whether this kernel says what became of a byte."""
    return _seen(wire) is not None


def _seen(wire: asyncio.Transport) -> _Wire | None:
    sock = wire.get_extra_info("socket")
    if _TCP_INFO is None or sock is None:
        return None
    try:
        state, n_unacked, acked_ms_ago = _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO.size))
    except (OSError, ValueError):
        return None
    return _Wire(state == _CLOSE_WAIT, n_unacked, acked_ms_ago)
