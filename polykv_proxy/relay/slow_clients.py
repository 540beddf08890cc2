"""Clients that take their time: for the head of a request, for the rest of its body, or with reading.

aiohttp gives nobody a deadline for a head, so a connection that sends a byte now and then would stay for ever, as would
one whose reply nobody takes. There is one look at all connections per second instead of timers per request: what a
request pays is a few assignments when bytes come.

head       a new connection, and one that began a head, has ``head_s`` for it. One that is idle between two requests
           is not waited for: it ends with aiohttp's keep-alive time. A head whose first bytes came in one packet with
           the end of the request before it counts from its next byte on.
body       ``body_idle_s`` without a byte of it are a 408; not while we are the ones who do not read.
reading    who takes nothing for ``stall_s`` while something is to be sent to him is hung up on.

The clock is the looks themselves, each worth no more than two of its intervals: time in which this process did not run
is nobody's fault.
"""

import asyncio
import fcntl
import logging
import struct
import termios
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from aiohttp import web, web_protocol
from aiohttp.http import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from polykv_proxy.errors import BodyTimeout, HeadTimeout
from polykv_proxy.relay.upgrades import keep_what_follows
from polykv_proxy.unpaused import Unpaused

log = logging.getLogger("polykv.http")


_LINE_BEGINS = 8
"""Bytes of a head that say whether it is a HEAD."""


class Patience(NamedTuple):
    """Seconds for a head, between two pieces of a body, and for a client to take anything of what is sent."""

    head_s: float
    body_idle_s: float
    stall_s: float

    @property
    def look_every_s(self) -> float:
        return max(0.02, min(1.0, min(self) / 4))


class SlowClients:
    """The clock and the looks. ``now_s``: time that this process was there for its clients."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.now_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self, server: web.Server) -> None:
        self._task = asyncio.create_task(self._run(server), name="polykv-slow-clients")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self, server: web.Server) -> None:
        loop, every_s = asyncio.get_running_loop(), self.patience.look_every_s
        looked_s = loop.time()
        while True:
            await asyncio.sleep(every_s)
            now_s = loop.time()
            self.now_s += min(now_s - looked_s, 2 * every_s)
            looked_s = now_s
            self.look(server.connections)

    def look(self, connections: Iterable[web.RequestHandler]) -> None:
        for connection in connections:
            if isinstance(connection, PatientHandler):
                try:
                    connection.look()
                except Exception:  # one odd connection must not keep all others from being looked at
                    log.exception("bug in a look at a connection")


class PatientHandler(Unpaused, web.RequestHandler):
    """A connection that knows since when its client lets us wait."""

    __slots__ = (
        "_begun",
        "_heard_s",
        "_payload",
        "_slow",
        "_stalled_s",
        "_unreadable_head",
        "_unsent",
        "_waits_s",
        "_was_paused",
        "_wire",
    )

    def __init__(self, manager: web.Server, slow: SlowClients, **options: Any) -> None:
        super().__init__(manager, **options)
        # A request that was taken up before its body had come stays counted in the parser: it stops, full, one before
        # aiohttp thinks so, and nobody would tell it to go on.
        self._max_msg_queue_size -= 1
        self._slow = slow
        self._was_paused = False
        self._wire: asyncio.Transport | None = None  # aiohttp forgets its own when it closes, before all is sent
        self._payload: StreamReader = EMPTY_PAYLOAD  # of the last request that came
        self._heard_s = 0.0
        self._waits_s: float | None = None  # for a head since then
        self._begun = b""  # the first bytes of it, when it comes in pieces
        self._unreadable_head = False  # what could not be read began as a HEAD: its reply has no body
        self._stalled_s: float | None = None  # with so many bytes unsent since then
        self._unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._waits_s = self._slow.now_s
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        n, is_between = self._request_count, self._payload.is_eof()
        super().data_received(data)
        self._heard_s = self._slow.now_s
        if self._request_count != n:
            message, self._payload = self._messages[-1]
            if self._payload is EMPTY_PAYLOAD and isinstance(message, web_protocol._ErrInfo):
                # What follows the end of a body cannot be found any more: then it may be one.
                self._unreadable_head = _is_head(self._begun + data) if is_between else b"HEAD " in data
            elif message.upgrade:  # type: ignore[union-attr] # what could not be read has no payload
                is_whole = is_between and not self._begun and self._request_count == n + 1
                self._waits_s, self._begun = None, b""
                keep_what_follows(self, cast(RawRequestMessage, message), data, is_whole=is_whole)
                return
            self._waits_s, self._begun = None, b""
        elif is_between and len(self._begun) < _LINE_BEGINS:
            begun = self._begun + data if self._begun else data.lstrip(b"\r\n")
            if begun and not self._begun:
                self._waits_s = self._heard_s
            self._begun = begun[:_LINE_BEGINS]

    def look(self) -> None:
        """Let go of a client that had its time."""
        now_s, patience = self._slow.now_s, self._slow.patience
        if self._reading_paused or self._buffer_paused:
            self._heard_s = now_s
            if self._waits_s is not None:
                self._waits_s = now_s
        elif self._waits_s is not None and now_s - self._waits_s >= patience.head_s:
            self._no_head()
        elif now_s - self._heard_s >= patience.body_idle_s and not self._payload.is_eof():
            self._no_body()
        self._look_at_writing(now_s, patience.stall_s)

    def _no_head(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done() or self._close or self._force_close:
            return  # the request before it is still being answered
        if not self._begun and self._has_unread():
            return
        log.info("no head from %s in time (%s)", self._peer(), "begun" if self._begun else "nothing came")
        if not self._begun:
            self.force_close()
            return
        self._waits_s = None
        self._unreadable_head = _is_head(self._begun)
        error = HeadTimeout(
            f"the head of the request was not complete after {self._slow.patience.head_s:g} s: send it in one go"
        )
        self._messages.append((web_protocol._ErrInfo(error.status, error, error.message), EMPTY_PAYLOAD))
        waiter.set_result(None)

    def _process_keepalive(self) -> None:
        """The idle time is over. A head that has begun has its own, and what came this moment is read first: to close
        over it would be a reset, and nobody knows of a request that met one whether it was served.
        """
        if self._begun:
            self._keepalive_handle = None  # made again after the reply
        elif not self._force_close and self._has_unread():
            self._keepalive_handle = self._loop.call_later(0.05, self._process_keepalive)
        else:
            super()._process_keepalive()

    def _has_unread(self) -> bool:
        return self._wire is not None and _in_kernel(self._wire, termios.FIONREAD) > 0

    def _no_body(self) -> None:
        if self._payload.exception() is None:
            idle_s = self._slow.patience.body_idle_s
            self._payload.set_exception(BodyTimeout(f"nothing of the body came for {idle_s:g} s"))

    def _look_at_writing(self, now_s: float, stall_s: float) -> None:
        wire = self._wire
        if wire is None or not (unsent := wire.get_write_buffer_size()):
            self._stalled_s = None
            return
        unsent += _in_kernel(wire)
        is_being_written_to = self._request_in_progress and not self._paused
        if self._stalled_s is None or is_being_written_to or unsent < self._unsent:
            self._stalled_s, self._unsent = now_s, unsent
        elif now_s - self._stalled_s >= stall_s:
            log.info("%s took nothing for %g s; hung up", self._peer(), stall_s)
            wire.abort()

    def _peer(self) -> object:
        name = self._wire.get_extra_info("peername") if self._wire is not None else None
        return name[0] if isinstance(name, tuple) else "a client"

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._wire = None


def _is_head(begun: bytes) -> bool:
    return begun.lstrip(b"\r\n").startswith(b"HEAD ")


def _in_kernel(wire: asyncio.Transport, which: int = termios.TIOCOUTQ) -> int:
    """Bytes that the peer has not acknowledged. The kernel takes new ones only when a good part of them is gone, so
    that a client which reads slowly would look like one that does not read. Or those that came and were not read.
    0 where the kernel does not tell.
    """
    sock = wire.get_extra_info("socket")
    try:
        answer = fcntl.ioctl(sock.fileno(), which, b"\0\0\0\0")
    except (OSError, ValueError):
        return 0
    n: int = struct.unpack("i", answer)[0]
    return n
