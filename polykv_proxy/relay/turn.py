"""One attachable request on its way: session, pool, slot, engine, and back.

    decide who and what   session by name, by agent headers or recognised; pool and cells by control. On the way a new
                          session may have to wait at its pool's door, or is refused (``gating``)
    wait for a slot       first come first served; the session's own first. Who had to wait is decided anew
    hold                  a turn that would slow the others below the floor, if the policy says so
    make it ready         what another session left there is saved, what this one said before is loaded
    send                  the rewritten bytes, once
    relay                 every byte when it comes; our object goes into the last one that can carry it
    settle                books of pool and session, from what the reply said about itself

A client may leave at any point: the handler is cancelled, and leaving each stage undoes what it took. The order of the
``finally`` blocks is the order in which things were taken, backwards.
"""

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

from polykv_proxy.control import AttachRequest, Control
from polykv_proxy.control.plain import Pin
from polykv_proxy.control.receipts import RequestRecord
from polykv_proxy.conversation import Conversation
from polykv_proxy.errors import CapacityError, PolyKVError
from polykv_proxy.ids import SlotId
from polykv_proxy.relay import backlog
from polykv_proxy.relay.backlog import Place
from polykv_proxy.relay.costs import Costs
from polykv_proxy.relay.desk import SlotDesk
from polykv_proxy.relay.dialects import Call, Dialect, conversation_of
from polykv_proxy.relay.fields import OWN_HEADERS
from polykv_proxy.relay.gating import Gating
from polykv_proxy.relay.hints import beginnings_in
from polykv_proxy.relay.kept_alive import KeptAlive, refused_late
from polykv_proxy.relay.pump import cut, is_sse, mark_recorded, pump_plain, say_if_refused
from polykv_proxy.relay.receipt import Receipt
from polykv_proxy.relay.reply import Reply
from polykv_proxy.relay.rewrite import rewrite
from polykv_proxy.relay.speakers import speaker_in
from polykv_proxy.relay.usage import is_cut
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import Displaced, Grant
from polykv_proxy.turns import Session, Usage

log = logging.getLogger("polykv.relay")

STALE_MS = 50
"""After so long in the queue the decision where to attach is made anew: pools come and go meanwhile."""


class TurnRelay(Reply):
    """Carries one request. Made per request, used once. ``normalised``: what was pinned in it (``normalise``)."""

    def __init__(
        self,
        control: Control,
        desk: SlotDesk,
        clock: Callable[[], float],
        *,
        request: web.Request,
        target: str,
        call: Call,
        costs: Costs,
        read_s: float,
        place: Place,
    ):
        super().__init__(control, clock, request=request, call=call)
        self._place = place
        self._desk, self._costs, self._read_s, self._target = desk, costs, read_s, target
        self._books: SessionBook = control.sessions
        self._sent = False
        self._gating: Gating | None = None
        self._grant: Grant | None = None
        self.normalised: tuple[str, ...] = ()
        self._pin: Pin | None = None
        self._left: list[Displaced] = []
        self._preparing: asyncio.Task[None] | None = None

    async def run(self, request_id: str, *, look_first: bool) -> web.StreamResponse:
        call, now_s = self._call, self._clock()
        said = conversation_of(call)
        session = self._who(said, now_s)
        unheard_of = not session.named and not session.n_turns
        self._receipt = Receipt(session.session_id, ctx_total=self._control.ctx_total)
        self._turn = self._books.begin(session, now_s)
        usage = Usage()
        record = self._record = RequestRecord(request_id, call.path, call.dialect.name.lower(), now_s, call.stream)
        record.turn, record.told, record.usage = self._turn, self._receipt, usage
        record.normalised = self.normalised
        self._control.requests.add(record)
        if not self._control.policies.is_empty:
            self._meet_gate()
        try:
            with self._place:
                await self._decide(session)
                grant = await self._take_slot(session, said, look_first)
                try:
                    if self._gating is not None:
                        await self._hold_turn(session, self._gating, grant, request_id)
                    await self._make_ready(session, grant)
                    return await self._send(request_id, grant, usage)
                finally:
                    self._give_back(grant)
        except PolyKVError as e:
            record.error, self._status = e.code, self._status or e.status
            record.message = e.message if isinstance(e, CapacityError) else None
            mark_recorded(self._request)
            if self._touched:
                say_if_refused(self._request, self._receipt.headers(session.tps))
            if self._begun is not None and not self._complete:
                return await cut(self._request, self._begun, e, call.dialect, sse=True)
            raise
        finally:
            self._settle(usage)
            is_answered = self._complete and self._status == 200 and not self._failed
            answered = said if is_answered else None
            self._books.end(self._turn, usage, self._clock(), said=answered)
            if self._pin is not None:
                self._control.plain.end(self._pin, usage.ctx_used)
            known = self._books.get(session.session_id)
            if known is None:
                self._control.forget_traces(session.session_id)  # deleted meanwhile: the slot is nobody's
            elif unheard_of and self._status != 200 and known is session:
                self._control.drop_session(session.session_id)  # it was told nothing that it could come back to
            if not self._sent:
                self._control.take_back(session)
            if self._gating is not None:
                self._gating.over()
            record.status, record.ended_s = self._status, self._clock()
            self._costs.ended(record.held, usage)
            if self._engine_done_s is not None:
                self._costs.after.add(record.ended_s - self._engine_done_s)
            record.slot_id = self._pin.slot_id if self._pin is not None else self._slot_id
            if self._sent and not self._complete and record.error is None:
                record.error = "incomplete"
            elif is_answered and call.n_finals == 1 and is_cut(usage, call.body, self._receipt.ctx_total):
                record.error = "truncated"
                self._costs.n_truncated += 1
            self._control.parking.tend()

    # Before the engine has it --------------------------------------------------------------------------------------

    def _who(self, said: Conversation | None, now_s: float) -> Session:
        speaker = speaker_in(self._call, self._request.headers)
        self._family = speaker.family
        named = self._call.fields.session or speaker.session
        if named is not None:
            return self._books.name(named, now_s, parent=speaker.parent if speaker.parent != named else None)
        return self._books.recognise(said, now_s) or self._books.make(now_s)

    async def _decide(self, session: Session) -> None:
        call, receipt = self._call, self._receipt
        fields, attach = call.fields, self._control.attach
        n_bytes = len(call.raw)
        if self._control.watch.hooks is False and not call.explicit:
            return
        asks = call.explicit or call.incompatible or len(self._control.tree)
        if not asks and attach.admission.lets_in(n_bytes, session.session_id):
            asks = call.n_prompts == 1 and self._control.fan_out.begins_alike(self._turn, call.path, call.body, n_bytes)
            if not asks:
                return
        request = AttachRequest(
            path=call.path,
            body=call.body,
            pool_ref=fields.pool,
            explicit_p=fields.explicit_p,
            legacy_slot=fields.legacy_slot,
            session=session.session_id,
            explicit=call.explicit,
            strict=fields.strict,
            shareable=not call.incompatible,
            has_media=call.has_media,
            takes_a_slot=call.own_slot is None,
            turn=self._turn,
            n_bytes=n_bytes,
            door=self._gating.at_door if self._gating is not None else None,
        )
        try:
            plan = self._plan = await self._control.decide_attach(request)
        finally:
            self._hold("shared_prefill", request.waits.joined_s)
            self._hold("pool", request.waits.made_s)
            self._hold("cells", request.waits.cells_s)
        receipt.pool_id, receipt.miss_reason = plan.pool_id, plan.miss_reason
        receipt.prefix_n_tokens = plan.prefix_n_tokens

    def _hold(self, why: str, seconds: float) -> int:
        """Count a wait, also of who is refused after it. Gives it in ms."""
        ms = self._record.hold(why, seconds)
        self._receipt.hold_ms += ms
        return ms

    async def _take_slot(self, session: Session, said: Conversation | None, look_first: bool) -> Grant | None:
        call, n_slots = self._call, self._desk.book.n_slots
        if self._control.watch.hooks is False:
            if call.n_finals == 1:
                may_pin = call.own_slot is None and call.body.get("cache_prompt") is not False
                may_pin &= call.dialect is not Dialect.MESSAGES  # its converter drops the slot without our patch
                self._pin = await self._control.plain.begin(session, said, may_pin=may_pin)
                self._record.displaced = self._pin.displaced
            return None
        if not self._control.hooks or not n_slots:
            return None
        if call.own_slot is not None:
            self._slot_id = SlotId(call.own_slot % n_slots)
            self._record.displaced = self._desk.occupy(self._slot_id)
            self._left = self._control.parking.leaving(self._record.displaced)
            return None
        n = call.n_finals if call.n_choices <= n_slots else 1  # more choices than slots: the engine refuses it
        left_s = backlog.MAX_WAIT_S
        while True:
            waited_ms = await self._stand_in_line(session, min(n, n_slots), said, look_first, left_s)
            left_s -= waited_ms / 1e3
            if waited_ms >= STALE_MS or self._control.room.is_put_off():
                try:
                    await self._decide(session)
                except BaseException:
                    self._step_back()
                    raise
            grant, self._grant = self._grant, None
            if grant is not None:
                return grant

    async def _stand_in_line(
        self, session: Session, n_slots: int, said: Conversation | None, look_first: bool, within_s: float
    ) -> int:
        """Gives how long it waited, in ms. Raises QueueTimeout (429)."""
        waited_ms = 0
        grant = self._desk.take(session.session_id, n_slots, said) if not look_first else None
        if grant is None:
            since_s = self._clock()
            try:
                grant = await self._desk.acquire(
                    session.session_id,
                    n_slots,
                    said,
                    look_first=look_first,
                    on_wait=self._control.room.put_off,
                    within_s=within_s,
                )
            except TimeoutError as e:
                raise self._place.late() from e
            finally:
                waited_ms = self._hold("slot", self._clock() - since_s)
        self._grant, self._slot_id = grant, grant.slots[0]
        self._record.displaced = grant.displaced
        self._left = self._control.parking.leaving(grant.displaced)
        return waited_ms

    def _step_back(self) -> None:
        """It does not go on for now: others may have its slot, and what it would have taken of the cache."""
        self._control.room.put_off()
        if self._grant is not None:
            grant, self._grant, self._slot_id, self._left = self._grant, None, None, []
            self._desk.release(grant)

    def _meet_gate(self) -> None:
        self._gating = Gating(
            self._control,
            self._call,
            self._turn,
            self._receipt,
            headers=self._request.headers,
            family=self._family,
            hold=self._hold,
            step_back=self._step_back,
        )
        self._record.visit = self._gating.visit

    async def _hold_turn(self, session: Session, gating: Gating, grant: Grant | None, request_id: str) -> None:
        extra = [("x-request-id", request_id), *self._receipt.headers(session.tps)]
        alive = KeptAlive(self._request, extra)
        # Who may resume his stream counts the engine's bytes to say where: there must be no others among them.
        counts_bytes = "x-conversation-id" in self._request.headers
        try:
            held = await gating.before_it_goes_out(
                self._plan,
                own=grant is not None and grant.own,
                on_hold=alive.start if self._call.stream and not counts_bytes else lambda: None,
            )
        finally:
            self._begun = await alive.end()
        if held and self._plan is not None and self._plan.epoch != self._control.watch.epoch:
            await self._decide(session)  # the engine was restarted meanwhile

    async def _make_ready(self, session: Session, grant: Grant | None) -> None:
        """Nobody's conversation is lost by this request, and its own is back where it goes."""
        if self._slot_id is None:
            return
        since_s = self._clock()
        self._preparing = self._control.parking.prepare(
            session,
            self._slot_id,
            self._left,
            self._plan,
            own=grant is not None and grant.own,
            reuses=not self._call.incompatible and self._call.n_prompts == 1,
        )
        if self._preparing is not None:
            try:
                await asyncio.wait([self._preparing])
            finally:
                self._hold("saved_state", self._clock() - since_s)

    def _give_back(self, grant: Grant | None) -> None:
        if self._preparing is not None and not self._preparing.done():
            self._preparing.add_done_callback(lambda _: self._let_go(grant))  # the engine is at that slot
        else:
            self._let_go(grant)

    def _let_go(self, grant: Grant | None) -> None:
        unsure = self._sent and not self._complete
        if grant is not None:
            self._desk.release(grant, unsure=unsure)
        elif self._slot_id is not None:
            self._desk.vacate(self._slot_id, unsure=unsure)

    # The engine has it ---------------------------------------------------------------------------------------------

    async def _send(self, request_id: str, grant: Grant | None, usage: Usage) -> web.StreamResponse:
        slot_id = grant.slots[0] if grant is not None else None
        if self._pin is not None:
            slot_id = self._pin.slot_id
        body = rewrite(self._call, self._plan, slot_id)
        sent_s = self._clock()
        self._turn.sent(sent_s, slot_id, self._plan.pool_id if self._plan is not None else None)
        self._costs.sent(sent_s - self._read_s - self._record.held_s)
        self._sent = True
        self._place.leave(sent=True)
        if (marked := beginnings_in(self._call)) and self._control.hints.on:
            tokens = self._plan.tokens if self._plan is not None else None
            self._control.hints.follow(self._turn, self._call.path, self._call.body, marked, tokens)
        headers = self._request.raw_headers
        async with await self._control.engine.open(
            "POST", self._target, headers, body, drop=OWN_HEADERS, streams=self._call.stream
        ) as upstream:
            self._status = upstream.status
            extra = [("x-request-id", request_id)]
            if self._touched:
                extra += self._receipt.headers(self._turn.session.tps)
            if self._begun is not None and (upstream.status != 200 or not is_sse(upstream)):
                raise await refused_late(upstream)
            if upstream.status != 200:
                response = await pump_plain(self._request, upstream, extra, self._call.dialect)
                self._complete = True
                return response
            if self._plan is not None and self._plan.pool_id is not None:
                self._turn.accepted(self._plan.pool_id)
            relay = self._stream if is_sse(upstream) else self._whole
            return await relay(upstream, extra, usage)
