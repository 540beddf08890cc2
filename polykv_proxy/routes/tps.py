"""``GET /polykv/tps``: the tokens per second of now, once or as a stream of events.

A stream writes one tick after the other and waits while its client does not read, so there is never more than one line
under way for anybody, and who comes back to it gets the latest. Nobody else waits for that.
"""

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.control.rate_feed import RateFeed
from polykv_proxy.errors import Draining, RequestError
from polykv_proxy.routes.answers import REQUEST_ID, answering, json_answer
from polykv_proxy.routes.body import query_flag

log = logging.getLogger("polykv.routes")

INTERVAL_MS = 500
INTERVAL_MIN_MS, INTERVAL_MAX_MS = 100, 60_000


def tps_routes(control: Control) -> list[web.RouteDef]:
    async def show(request: web.Request) -> web.StreamResponse:
        interval_s = _interval_ms(request.query) / 1e3
        if not _wants_stream(request):
            return json_answer(control.feed.sample())
        if control.draining or control.feed.ended.is_set():
            raise Draining("the proxy is shutting down")
        return await _stream(request, control, interval_s)

    return [web.get("/polykv/tps", answering(show))]


async def _stream(request: web.Request, control: Control, interval_s: float) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if REQUEST_ID in request:
        headers["x-request-id"] = request[REQUEST_ID]
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    try:
        await _tick(response, control.feed, interval_s)
        await response.write_eof()
    except ConnectionError:
        pass  # the client left
    except Exception:  # the head is out: all that can be said is that this is not the end
        log.exception("bug in a stream of rates")
        if request.transport is not None:
            request.transport.abort()
    return response


async def _tick(response: web.StreamResponse, feed: RateFeed, interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while not feed.ended.is_set():
        await feed.fresh()
        await response.write(b"data: " + feed.sample_json() + b"\n\n")
        due_s = max(due_s + interval_s, loop.time())  # ticks that a slow client missed are not made up for
        try:
            async with asyncio.timeout_at(due_s):
                await feed.ended.wait()
        except TimeoutError:
            continue


def _wants_stream(request: web.Request) -> bool:
    """The query decides, if it says anything; else what the client would like to get."""
    if "stream" in request.query:
        return query_flag(request, "stream")
    accepted = ",".join(request.headers.getall("Accept", [])).lower()
    return any(part.partition(";")[0].strip() == "text/event-stream" for part in accepted.split(","))


def _interval_ms(query: Mapping[str, str]) -> int:
    """Raises RequestError."""
    given = query.get("interval_ms")
    if given is None:
        return INTERVAL_MS
    if not (given.isascii() and given.isdigit()) or len(given) > 9:
        raise RequestError("interval_ms must be a whole number of milliseconds", param="interval_ms")
    if not INTERVAL_MIN_MS <= int(given) <= INTERVAL_MAX_MS:
        raise RequestError(f"interval_ms must be {INTERVAL_MIN_MS} to {INTERVAL_MAX_MS}", param="interval_ms")
    return int(given)
