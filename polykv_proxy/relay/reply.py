"""The engine's reply on its way back: every byte when it comes, our object in the last one that can carry it.

stream      pieces pass as they come; only the line that gets the object is looked at
whole       kept until it is complete, if the object goes into it; passed on as it comes if not
settle      what it said about itself goes into the books, before the object says so
"""

import asyncio
import logging
from collections.abc import Callable

import orjson
from aiohttp import web

from polykv_proxy.control import AttachPlan, Control, Outcome
from polykv_proxy.control.diverged import Said
from polykv_proxy.control.receipts import RequestRecord
from polykv_proxy.errors import UpstreamError
from polykv_proxy.ids import SlotId
from polykv_proxy.relay.dialects import Call, Dialect
from polykv_proxy.relay.json_bytes import append_to_object
from polykv_proxy.relay.pump import begin, cut
from polykv_proxy.relay.receipt import Receipt
from polykv_proxy.relay.sse import SseReader
from polykv_proxy.relay.usage import add_whole, rate_in
from polykv_proxy.turns import Turn, Usage
from polykv_proxy.upstream import UpstreamResponse

log = logging.getLogger("polykv.relay")

MAX_WHOLE_REPLY = 64 << 20
"""A longer reply in one piece is passed on without our object rather than kept."""

ASK_RATE_S = 0.1
"""So long may the engine take to say at which rate it made a reply that does not say it."""


class Reply:
    """One request's, from when the engine has it. ``_begun``: a head that went out before the engine was asked."""

    _turn: Turn
    _receipt: Receipt
    _record: RequestRecord

    def __init__(self, control: Control, clock: Callable[[], float], *, request: web.Request, call: Call):
        self._control, self._clock, self._request, self._call = control, clock, request, call
        self._plan: AttachPlan | None = None
        self._slot_id: SlotId | None = None
        self._family: str | None = None
        self._status: int | None = None
        self._begun: web.StreamResponse | None = None
        self._engine_done_s: float | None = None
        self._complete = self._failed = self._settled = False

    @property
    def _touched(self) -> bool:
        return self._call.explicit or (self._plan is not None and self._plan.pool_id is not None)

    async def _stream(
        self, upstream: UpstreamResponse, extra: list[tuple[str, str]], usage: Usage
    ) -> web.StreamResponse:
        call = self._call
        options = call.body.get("stream_options")
        reader = SseReader(
            call.dialect,
            n_finals=call.n_finals,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
            receipt=self._object if self._touched else None,
        )
        reader.usage = usage
        response = self._begun or await begin(self._request, upstream, extra)
        started = False
        try:
            while chunk := await upstream.read_piece():
                out = reader.feed(chunk)
                if reader.started and not started:
                    started = True
                    self._turn.first_token(self._clock())
                if reader.ended:
                    self._learn_rate(usage)
                if out:
                    await response.write(out)
            self._complete, self._failed, self._engine_done_s = True, reader.failed, self._clock()
        except UpstreamError as e:
            return await cut(self._request, response, e, call.dialect, sse=True, mid_line=reader.mid_line)
        if rest := reader.finish():
            await response.write(rest)
        await response.write_eof()
        return response

    async def _whole(
        self, upstream: UpstreamResponse, extra: list[tuple[str, str]], usage: Usage
    ) -> web.StreamResponse:
        if not self._touched:
            return await self._whole_unseen(upstream, extra, usage)
        pieces: list[bytes] = []
        n = 0
        while chunk := await upstream.read_piece():
            pieces.append(chunk)
            n += len(chunk)
            if n > MAX_WHOLE_REPLY:
                return await self._whole_too_long(upstream, extra, pieces)
        self._complete, self._engine_done_s = True, self._clock()
        body = b"".join(pieces)
        try:
            add_whole(usage, orjson.loads(body))
            if usage.tps is None:
                await self._ask_rate(usage)
            if self._plan is not None:
                await self._control.explain(self._plan, self._outcome(usage))
            body = append_to_object(body, self._object(usage))
        except (orjson.JSONDecodeError, ValueError):
            log.warning("the engine's reply to %s is not JSON; passed on as it is", self._call.path)
        extra = [e for e in extra if e[0] != "x-session-tps"]
        if self._turn.session.tps is not None:
            extra.append(("x-session-tps", f"{self._turn.session.tps:.2f}"))
        extra.append(("Content-Length", str(len(body))))
        response = await begin(self._request, upstream, extra)
        await response.write_eof(body)
        return response

    async def _whole_unseen(
        self, upstream: UpstreamResponse, extra: list[tuple[str, str]], usage: Usage
    ) -> web.StreamResponse:
        """Nothing to add: pass it on as it comes, and read a copy for the session's books."""
        response = await begin(self._request, upstream, extra)
        whole = upstream.read_at_once()
        pieces = [whole] if whole is not None else []
        n = len(whole) if whole is not None else 0
        try:
            while whole is None and (chunk := await upstream.read_piece()):
                n += len(chunk)
                if n <= MAX_WHOLE_REPLY:
                    pieces.append(chunk)
                await response.write(chunk)
            self._complete, self._engine_done_s = True, self._clock()
        except UpstreamError as e:
            return await cut(self._request, response, e, self._call.dialect, sse=False)
        await response.write_eof(whole or b"")
        if n <= MAX_WHOLE_REPLY:
            try:
                add_whole(usage, orjson.loads(b"".join(pieces)))
            except orjson.JSONDecodeError:
                log.warning("the engine's reply to %s is not JSON", self._call.path)
        return response

    async def _whole_too_long(
        self, upstream: UpstreamResponse, extra: list[tuple[str, str]], pieces: list[bytes]
    ) -> web.StreamResponse:
        response = await begin(self._request, upstream, extra)
        try:
            for piece in pieces:
                await response.write(piece)
            pieces.clear()
            while chunk := await upstream.read_piece():
                await response.write(chunk)
            self._complete = True
        except UpstreamError as e:
            return await cut(self._request, response, e, self._call.dialect, sse=False)
        await response.write_eof()
        return response

    # Books ---------------------------------------------------------------------------------------------------------

    def _object(self, usage: Usage) -> bytes:
        """The ``polykv`` object; what it says is settled with the pool first."""
        self._learn_rate(usage)
        self._settle(usage)
        if usage.tps is not None:
            self._turn.session.tps = usage.tps
        return self._receipt.members(usage, self._turn.session.tps)

    def _learn_rate(self, usage: Usage) -> None:
        """Messages has no timings: the rate is what passed here between the first token and the last."""
        if usage.tps is not None or self._call.dialect is not Dialect.MESSAGES or self._turn.first_s is None:
            return
        took_s = self._clock() - self._turn.first_s
        if usage.predicted_n is not None and usage.predicted_n > 1 and took_s > 0:
            usage.tps = (usage.predicted_n - 1) / took_s

    async def _ask_rate(self, usage: Usage) -> None:
        """Messages and Responses in one piece say nothing about time. The stats do, while the slot is kept for us."""
        if self._slot_id is None or not self._control.hooks:
            return
        try:
            async with asyncio.timeout(ASK_RATE_S):
                stats = await self._control.refresh()
        except (TimeoutError, UpstreamError) as e:
            log.debug("no rate from the engine: %s", type(e).__name__)
            return
        if stats is not None:
            usage.tps = rate_in(stats, self._slot_id, usage)

    def _settle(self, usage: Usage) -> None:
        if self._settled:
            return
        self._settled = True
        if self._plan is None:
            self._control.room.settled()
        else:
            self._receipt.miss_reason = self._control.settle(self._plan, self._outcome(usage))
        if self._status == 200 and self._call.n_finals == 1:
            call = self._call
            if usage.cache_n is not None and usage.prompt_n is not None and not call.has_media:
                self._control.fan_out.counted(len(call.raw), usage.cache_n + usage.prompt_n)
            said = Said(call.path, call.body, len(call.raw), self._family)
            self._control.divergences.settled(self._record, self._turn.session, said, self._plan)

    def _outcome(self, usage: Usage) -> Outcome:
        return Outcome(
            status=self._status,
            cache_n=usage.cache_n,
            prompt_n=usage.prompt_n,
            predicted_n=usage.predicted_n,
            pool_n=usage.pool_n,
            tps=usage.tps,
        )
