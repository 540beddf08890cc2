"""The data plane's front desk: what is ours, what is relayed untouched, and what is read.

Everything that is not the proxy's own goes to llama-server byte for byte. Only ``POST`` on an attachable path is read,
and of those only what may share a prefix becomes a turn (``turn``).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from aiohttp import web

from polykv_proxy.control import Control
from polykv_proxy.control.receipts import RequestRecord
from polykv_proxy.errors import (
    Draining,
    InvalidJson,
    InvariantError,
    PolyKVError,
    PoolNotFound,
    RequestError,
    UpstreamError,
)
from polykv_proxy.ids import SlotId
from polykv_proxy.json_levels import TOO_DEEP, TooDeep, is_too_deep
from polykv_proxy.relay.backlog import Backlog, Place
from polykv_proxy.relay.cors import Cors
from polykv_proxy.relay.costs import Costs
from polykv_proxy.relay.desk import SlotDesk
from polykv_proxy.relay.dialects import (
    ATTACHABLE,
    TAKES_A_SLOT,
    Call,
    Dialect,
    may_carry_fields,
    parse_json,
    read_call,
)
from polykv_proxy.relay.doors import engine_path
from polykv_proxy.relay.engine_views import VIEWS, engine_view
from polykv_proxy.relay.fields import BODY_FIELDS, OWN_HEADERS, Fields, in_headers, read_fields, session_in
from polykv_proxy.relay.metrics import metrics_answer
from polykv_proxy.relay.normalise import Normaliser
from polykv_proxy.relay.pump import (
    has_begun,
    is_recorded,
    pump_plain,
    read_body,
    refuse,
    relayed_body,
    say_if_refused,
)
from polykv_proxy.relay.receipt import unread_headers
from polykv_proxy.relay.speakers import speaker_in
from polykv_proxy.relay.turn import TurnRelay
from polykv_proxy.upstream.relay import Body

log = logging.getLogger("polykv.relay")


class Relay:
    """One per proxy.

    ``n_running``: requests on their way; ``idle``: there are none. ``n_floating``: how many of them are in slots of the
    engine's own choice.
    """

    def __init__(self, control: Control, clock: Callable[[], float] = time.monotonic):
        self.control = control
        self.clock = clock
        self.desk = SlotDesk(control.slots, self._busy_slots, clock)
        control.deliver_grants = self.desk.deliver
        control.plain.n_elsewhere = lambda: self.n_floating
        self.draining = False
        self.backlog = Backlog(clock)
        self.costs = Costs()
        self.cors = Cors()
        self.n_running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.n_floating = 0
        kinds = control.settings.normalise
        self._normaliser = Normaliser(kinds) if kinds else None
        self._looking: asyncio.Task[None] | None = None

    def dialect_of(self, request: web.Request, target: str) -> Dialect | None:
        return ATTACHABLE.get(engine_path(target)) if request.method == "POST" else None

    async def handle(self, request: web.Request, target: str, request_id: str) -> web.StreamResponse:
        """Serve a request of the data plane. ``target``: its origin form, as it came."""
        error: PolyKVError
        began_s = self.clock()
        self.n_running += 1
        self.idle.clear()
        try:
            return await self._serve(request, target, engine_path(target), request_id)
        except PolyKVError as e:
            upload = request.content.exception()  # one that was passed on and stopped is not the engine's fault
            error = upload if isinstance(upload, PolyKVError) else e
            if isinstance(error, UpstreamError):
                self._look_at_engine()
        except web.RequestPayloadError as e:
            log.info("unreadable body: %s", type(e).__name__)  # its text would quote the client
            error = RequestError("the body cannot be read: it breaks off, or its chunks are malformed")
        except (ConnectionError, web.HTTPException):
            raise
        except Exception:
            log.exception("bug in %s", engine_path(target))
            error = InvariantError("an internal error; the proxy's log has it")
        finally:
            self.n_running -= 1
            if not self.n_running:
                self.idle.set()
        if has_begun(request):
            # A second head inside a reply would be taken for its text: the only honest thing left is to hang up.
            if request.transport is not None:
                request.transport.abort()
            raise error
        dialect = self.dialect_of(request, target)
        if dialect is not None and not is_recorded(request):
            self.control.requests.add(self._record_of(error, engine_path(target), dialect, request_id, began_s))
        return refuse(request, error, dialect, request_id)

    def _record_of(
        self, error: PolyKVError, path: str, dialect: Dialect, request_id: str, began_s: float
    ) -> RequestRecord:
        """Of a request that was refused before it was anybody's turn."""
        return RequestRecord(
            request_id,
            path,
            dialect.name.lower(),
            began_s,
            status=error.status,
            error=error.code,
            ended_s=self.clock(),
        )

    def drain(self) -> None:
        """New work and everybody in line is refused; what runs goes on."""
        self.draining = self.control.draining = True
        self.control.feed.ended.set()
        error = Draining("the proxy is shutting down")
        self.desk.dismiss(error)
        self.control.room.dismiss(error)
        self.control.door.dismiss(error)
        self.backlog.dismiss(error)  # who is between those lines, or waits for a pool

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await self.desk.close()

    def _look_at_engine(self) -> None:
        """A request failed because of the engine: what is known of it is out of date before the next heartbeat."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="polykv-engine-look")

    async def _look(self) -> None:
        try:
            await self.control.refresh()
        except PolyKVError as e:
            log.info("the engine does not answer: %s", e.message)  # and control has taken note

    async def _serve(self, request: web.Request, target: str, path: str, request_id: str) -> web.StreamResponse:
        if path == "/metrics" and request.method == "GET":
            return await metrics_answer(self.control, self.costs, request, request_id)
        if path in VIEWS and request.method == "GET":
            return await engine_view(request, self.control, target, path, request_id)
        takes_a_slot = request.method == "POST" and path in TAKES_A_SLOT
        by_header = takes_a_slot and path in ATTACHABLE and in_headers(request.headers)
        if by_header:
            say_if_refused(request, unread_headers(session_in({}, request.headers)))
        if takes_a_slot and self.draining:
            raise Draining("the proxy is shutting down")
        if not takes_a_slot:
            return await self._plain(request, target, path, request_id, await relayed_body(request))
        if path not in ATTACHABLE or _is_written_otherwise(request):
            if by_header:
                self._check_strict(read_fields({}, request.headers))
            with self._floating():
                return await self._plain(request, target, path, request_id, await relayed_body(request))
        place = self.backlog.enter()
        try:
            return await self._serve_read(request, target, path, request_id, place, by_header=by_header)
        finally:
            place.leave()

    async def _serve_read(
        self, request: web.Request, target: str, path: str, request_id: str, place: Place, *, by_header: bool
    ) -> web.StreamResponse:
        """Read what may share a prefix, and serve it. ``place`` is left as soon as the engine has it."""
        raw = await read_body(request, self.control.settings.max_body_bytes, place.add)
        read_s = self.clock()
        call = self._read(request, path, raw, by_header=by_header)
        if call is None and by_header:
            self._check_strict(read_fields({}, request.headers))
        if call is None:
            place.leave()
            with self._floating():
                return await self._plain(request, target, path, request_id, raw)
        self._check_strict(call.fields)
        place.wait()
        turn = TurnRelay(
            self.control,
            self.desk,
            self.clock,
            request=request,
            target=target,
            call=call,
            costs=self.costs,
            read_s=read_s,
            place=place,
        )
        if self._normaliser is not None:
            turn.normalised = self._normaliser.apply(call, speaker_in(call, request.headers).family)
        if call.n_finals == 1:
            return await turn.run(request_id, look_first=self.n_floating > 0)
        with self._floating():  # the engine chooses the slots of the further choices itself
            return await turn.run(request_id, look_first=self.n_floating > 1)

    def _read(self, request: web.Request, path: str, raw: bytes, *, by_header: bool) -> Call | None:
        """None: relay it as it is."""
        plain = self.control.plain.pins
        automatic = self.control.settings.mode == "auto" and (self.control.hooks or plain)
        if not automatic and not by_header and not may_carry_fields(raw):
            return None
        try:
            body = parse_json(raw)
        except (InvalidJson, TooDeep) as e:
            if (plain or isinstance(e, TooDeep)) and not by_header and not may_carry_fields(raw):
                return None  # the engine's own words, as if nobody had looked
            raise
        if not isinstance(body, dict):
            return None
        if is_too_deep(raw, body):
            if body.keys().isdisjoint(BODY_FIELDS):
                return None
            raise TooDeep(TOO_DEEP)
        if not body.keys().isdisjoint(BODY_FIELDS):
            say_if_refused(request, unread_headers(session_in(body, request.headers)))
        call = read_call(
            path, raw, body, request.headers, rewrite_tool_choice=self.control.settings.rewrite_tool_choice
        )
        return call if automatic or call.explicit else None

    def _check_strict(self, fields: Fields) -> None:
        """Before anything else that could make it unpooled. Raises PoolNotFound (404)."""
        if fields.strict and fields.pool is not None and self.control.tree.find(fields.pool) is None:
            raise PoolNotFound(f"no pool {str(fields.pool)[:64]!r}", param="pool_id")

    async def _plain(
        self, request: web.Request, target: str, path: str, request_id: str, body: Body
    ) -> web.StreamResponse:
        drop = OWN_HEADERS if path in ATTACHABLE else frozenset[str]()
        streams = isinstance(body, bytes) and b'"stream"' in body
        async with await self.control.engine.open(
            request.method, target, request.raw_headers, body, drop=drop, streams=streams
        ) as upstream:
            if request.method == "OPTIONS":
                self.cors.heard(request, upstream)
            return await pump_plain(request, upstream, [("x-request-id", request_id)], ATTACHABLE.get(path))

    @contextmanager
    def _floating(self) -> Iterator[None]:
        self.n_floating += 1
        try:
            yield
        finally:
            self.n_floating -= 1

    async def _busy_slots(self) -> Collection[SlotId]:
        stats = await self.control.engine.stats()
        return {SlotId(slot.id) for slot in stats.slots if not slot.idle}


def _is_written_otherwise(request: web.Request) -> bool:
    """Packed, or as a form: llama-server reads it, and nobody here does."""
    headers = request.headers
    return "Content-Encoding" in headers or headers.get("Content-Type", "").lower().startswith("multipart/")
