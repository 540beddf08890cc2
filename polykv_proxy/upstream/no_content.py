"""llama-server's 204 and 304, which no strict parser takes.

A reply without content has no body, and yet llama-server frames one of no length: ``Transfer-Encoding: chunked`` in the
head and the last chunk behind it, when a handler of its own proxy passes such a reply on. Other clients overlook it;
aiohttp's parser takes the last chunk for the beginning of the next reply and fails.
"""

import asyncio
import re
from functools import partial

import aiohttp
from aiohttp.client_proto import ResponseHandler

from polykv_proxy.unpaused import Unpaused

_NO_CONTENT = (b"HTTP/1.1 204", b"HTTP/1.1 304")
_N_STATUS = len(_NO_CONTENT[0])
_HEAD_END = b"\r\n\r\n"
_CHUNKED = re.compile(rb"\r\nTransfer-Encoding:[ \t]*chunked[ \t]*(?=\r\n)", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"
_MAX_HEAD = 1 << 16
"""A head that is longer is left to the parser, which has a limit of its own."""


class EngineConnection(Unpaused, ResponseHandler):
    """Takes the framing off such a reply, and the last chunk that follows it, now or with the next bytes."""

    _held = b""
    _to_skip = b""
    _was_paused = False

    def data_received(self, data: bytes) -> None:
        if not data:  # the parser is to go on with what it has
            super().data_received(data)
            return
        if self._to_skip:
            n = min(len(data), len(self._to_skip))
            if data[:n] == self._to_skip[:n]:
                data, self._to_skip = data[n:], self._to_skip[n:]
            else:
                self._to_skip = b""
        if self._held or (_may_begin(data) and self._is_between_replies()):
            data = self._without_framing(self._held + data)
        if data:
            super().data_received(data)

    def _is_between_replies(self) -> bool:
        """A body that quotes such a head is only a body."""
        return self._payload is None or self._payload.is_eof()

    def _without_framing(self, data: bytes) -> bytes:
        """Give what the parser is to see of such a reply; nothing until its head is there."""
        head, end, rest = data.partition(_HEAD_END)
        if not end and _may_begin(data) and len(data) <= _MAX_HEAD:
            self._held = data
            return b""
        self._held = b""
        if not end or not head.startswith(_NO_CONTENT):
            return data
        plain, n_found = _CHUNKED.subn(b"", head + b"\r\n")
        if not n_found:
            return data
        n = min(len(rest), len(_LAST_CHUNK))
        if rest[:n] == _LAST_CHUNK[:n]:
            rest, self._to_skip = rest[n:], _LAST_CHUNK[n:]
        return plain + b"\r\n" + rest


def _may_begin(data: bytes) -> bool:
    """These bytes are the beginning of such a reply, or may become it with the next ones."""
    return data.startswith(_NO_CONTENT) or (
        len(data) < _N_STATUS and any(line.startswith(data) for line in _NO_CONTENT)
    )


def lenient(connector: aiohttp.TCPConnector) -> aiohttp.TCPConnector:
    """The connector, whose connections are of this kind."""
    connector._factory = partial(EngineConnection, loop=asyncio.get_running_loop())  # type: ignore[assignment]
    return connector
