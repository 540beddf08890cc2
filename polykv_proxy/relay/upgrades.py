"""Requests with an ``Upgrade`` that nobody follows (``h2c``, as Java's client sends it), and what comes behind them.

aiohttp's parser stops after such a request and forgets what else came in the same packet: another request, which would
never be answered, or the first half of one, whose other half would be read as a request of its own. The end of the
first one is known, so the rest is given to the parser once more. Where the end is not known the connection ends with
the reply. (What is behind ``Upgrade: websocket`` aiohttp keeps by itself.)
"""

from typing import TYPE_CHECKING, Any, cast

from aiohttp.http import HttpRequestParser, RawRequestMessage

if TYPE_CHECKING:
    from polykv_proxy.relay.slow_clients import PatientHandler


def keep_what_follows(connection: "PatientHandler", message: RawRequestMessage, data: bytes, *, is_whole: bool) -> None:
    """``message``: the last one that came, in ``data``. ``is_whole``: ``data`` begins with it."""
    if message.headers.get("Upgrade", "").lower() == "websocket":
        return
    data = data.lstrip(b"\r\n")
    is_full = len(connection._messages) >= connection._max_msg_queue_size  # the parser would take it, and stop there
    if not is_whole or is_full or message.chunked:
        closing = message._replace(should_close=True)
        connection._messages[-1] = (closing, connection._messages[-1][1])
        return
    end = data.index(b"\r\n\r\n") + 4 + int(message.headers.get("Content-Length", 0))
    if end > len(data):
        connection._parser = cast(HttpRequestParser, _UpTo(connection, end - len(data)))
    elif end < len(data):
        connection.data_received(data[end:])


class _UpTo:
    """A connection's parser until ``n`` more bytes came, the rest of a body."""

    def __init__(self, connection: "PatientHandler", n: int):
        self._connection, self._n = connection, n
        self._parser: Any = connection._parser

    def feed_data(self, data: bytes) -> Any:
        body, rest = data[: self._n], data[self._n :]
        self._n -= len(body)
        if self._n:
            return self._parser.feed_data(body)
        self._connection._parser = self._parser
        fed = self._parser.feed_data(body)
        return self._parser.feed_data(rest) if rest else fed  # the end of a body gives no message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)
