"""Bytes from the engine to the client: heads, streams, and what a broken reply looks like.

A piece goes out when it comes, the reader of a slow client slows the engine's connection (no queue in between), and
a reply that broke off never looks like one that ended: the connection is closed without its proper end.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterable
from random import getrandbits
from typing import cast

import orjson
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http import StreamWriter
from multidict import CIMultiDict

from polykv_proxy.errors import BodyTooLarge, PolyKVError, RequestError, UpstreamError
from polykv_proxy.relay.cors import allowed
from polykv_proxy.relay.dialects import Dialect
from polykv_proxy.relay.refusals import refusal, refusal_event, refusal_headers
from polykv_proxy.upstream import UpstreamResponse

_SANE_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_BEGUN = web.RequestKey("polykv_begun", bool)
_SAID = web.RequestKey("polykv_said", dict[str, str])
_RECORDED = web.RequestKey("polykv_recorded", bool)
_UNCLEAR = web.RequestKey("polykv_unclear", bool)
_READ_AT_ONCE = 1 << 20
_SERVED = (HttpVersion11, HttpVersion10)
_ADDED_BY_AIOHTTP = ("Date", "Server", "Content-Type")


class RelayedResponse(web.StreamResponse):
    """A reply whose headers are the engine's: nothing is added that was not given."""

    def __init__(self, status: int, reason: str, headers: CIMultiDict[str]):
        super().__init__(status=status, reason=reason or None, headers=headers)
        # A head with a length travels with the first piece of its body, as llama-server sends it; of a stream it goes
        # ahead.
        sized = "Content-Length" in headers
        self._send_headers_immediately = not sized
        self._plain = sized and status == 200 and "Connection" not in headers

    async def _prepare_headers(self) -> None:
        """What aiohttp's does for a reply with a body of known length on a connection that stays: nothing to add."""
        request, headers = self._req, self.headers
        if (
            self._plain
            and self._keep_alive is None
            and request is not None
            and request.keep_alive
            and request.method in ("POST", "GET")
            and request.version == HttpVersion11
        ):
            self._keep_alive = True
            request.writer.length = int(headers["Content-Length"])
            return
        added = [name for name in _ADDED_BY_AIOHTTP if name not in headers]
        await super()._prepare_headers()
        for name in added:
            headers.popall(name, None)


def check_framing(request: web.Request) -> None:
    """What the next server may read otherwise, or not at all. Raises RequestError; nothing more is read after it.

    HTTP/1.0 knows no chunks. Codings other than chunks would have to be undone here, and are not.
    """
    coding, version = request.headers.get("Transfer-Encoding"), request._version  # which is remembered once it is asked
    if coding is None and version in _SERVED and request.method != "CONNECT":
        return
    if version not in _SERVED:
        request._version = HttpVersion11  # of the answer
        why = "only HTTP/1.1 and HTTP/1.0 are served here"
    elif request.method == "CONNECT":
        why = "CONNECT is not served: there is no tunnel through here"
    elif version < HttpVersion11:
        why = "Transfer-Encoding in HTTP/1.0"
    elif coding is not None and coding.strip().lower() != "chunked":
        why = "the only Transfer-Encoding read here is chunked"
    else:
        return
    request[_UNCLEAR] = True
    raise RequestError(why)


def request_id_of(request: web.Request) -> str:
    """The client's own id if it is sane, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if given and _SANE_ID.fullmatch(given) else f"{getrandbits(128):032x}"


def is_sse(upstream: UpstreamResponse) -> bool:
    return upstream.content_type.partition(";")[0].strip().lower() == "text/event-stream"


async def read_body(request: web.Request, limit: int, on_piece: Callable[[int], None] = lambda _: None) -> bytes:
    """The whole body, with or without a length. ``on_piece``: told how many bytes came; what it raises ends it.

    Raises:  BodyTooLarge (413) as soon as that is certain, BodyTimeout (408)
    """
    length = request.content_length
    if length is not None and length > limit:
        raise BodyTooLarge(
            f"the body has {length} bytes; at most {limit} are read here (POLYKV_MAX_BODY_BYTES)", limit=limit
        )
    if length is not None and request.content.is_eof():
        on_piece(length)
        return request.content.read_nowait()
    pieces: list[bytes] = []
    n = 0
    async for piece in _pieces(request):
        n += len(piece)
        on_piece(len(piece))
        if n > limit:
            raise BodyTooLarge(
                f"the body has more than the {limit} bytes that are read here (POLYKV_MAX_BODY_BYTES)", limit=limit
            )
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def relayed_body(request: web.Request) -> bytes | AsyncIterator[bytes] | None:
    """The body of a request that nobody looks into: small ones at once, others as they come."""
    if not request.can_read_body:
        return None
    if request.content_length is not None and request.content_length <= _READ_AT_ONCE:
        return await read_body(request, _READ_AT_ONCE)
    return _pieces(request)


async def _pieces(request: web.Request) -> AsyncIterator[bytes]:
    """The body as it comes. Raises BodyTimeout (408) when nothing comes any more (``slow_clients``)."""
    content = request.content
    if content.is_eof():
        yield content.read_nowait()
        return
    while not content.at_eof():
        if piece := await content.readany():
            yield piece


async def pump_plain(
    request: web.Request, upstream: UpstreamResponse, extra: Iterable[tuple[str, str]], dialect: Dialect | None
) -> web.StreamResponse:
    """The engine's reply as it is, with ``extra`` headers."""
    response = await begin(request, upstream, extra)
    whole = upstream.read_at_once()
    try:
        while whole is None and (chunk := await upstream.read_piece()):
            await response.write(chunk)
    except UpstreamError as e:
        return await cut(request, response, e, dialect, sse=is_sse(upstream))
    await response.write_eof(whole or b"")
    return response


async def begin(request: web.Request, upstream: UpstreamResponse, extra: Iterable[tuple[str, str]]) -> RelayedResponse:
    """Send the head. Raises UpstreamError for one that would not be the end of the exchange."""
    if upstream.status == 101:
        raise UpstreamError("the engine changed to another protocol, which nobody asked it for", engine_status=101)
    headers = CIMultiDict(upstream.returnable_headers())
    for name, value in extra:
        headers[name] = value
    if upstream.status == 503 and request.method == "POST":
        headers.setdefault("Retry-After", "1")
    response = RelayedResponse(upstream.status, upstream.reason, headers)
    request[_BEGUN] = True
    try:
        await response.prepare(request)
    except ValueError as e:  # nothing of it went out, and what is said instead is framed anew
        del request[_BEGUN]
        writer = cast(StreamWriter, request.writer)
        writer.chunked, writer.length = False, None
        raise UpstreamError(f"the head of the engine's reply cannot be passed on: {e}") from e
    return response


async def begin_events(request: web.Request, extra: Iterable[tuple[str, str]]) -> RelayedResponse:
    """Send the head of a stream of events before the engine was asked for it."""
    headers = CIMultiDict([("Content-Type", "text/event-stream"), *allowed(request).items(), *extra])
    response = RelayedResponse(200, "OK", headers)
    request[_BEGUN] = True
    await response.prepare(request)
    return response


def has_begun(request: web.Request) -> bool:
    """A head of a reply went out."""
    return _BEGUN in request


async def cut(
    request: web.Request,
    response: web.StreamResponse,
    error: PolyKVError,
    dialect: Dialect | None,
    *,
    sse: bool,
    mid_line: bool = False,
) -> web.StreamResponse:
    """End a reply that broke off: an ``error`` event if it is a stream of events, and a close without a proper end."""
    if sse:
        await response.write((b"\n\n" if mid_line else b"") + refusal_event(error, dialect))
    if request.transport is not None:
        request.transport.close()
    return response


def say_if_refused(request: web.Request, headers: Iterable[tuple[str, str]]) -> None:
    """What an error reply of ours to this request would carry besides; the last word counts."""
    request[_SAID] = dict(headers)


def mark_recorded(request: web.Request) -> None:
    """It has a receipt that says how it was refused."""
    request[_RECORDED] = True


def is_recorded(request: web.Request) -> bool:
    return _RECORDED in request


def refuse(request: web.Request, error: PolyKVError, dialect: Dialect | None, request_id: str) -> web.Response:
    """An error reply of our own."""
    headers = {"x-request-id": request_id, **allowed(request), **request.get(_SAID, {}), **refusal_headers(error)}
    response = web.Response(
        status=error.status,
        body=orjson.dumps(refusal(error, dialect)),
        content_type="application/json",
        headers=headers,
    )
    if _UNCLEAR in request or not request.content.at_eof():
        response.force_close()  # an unread body is not worth waiting for, and cannot be told from the next request
    return response
