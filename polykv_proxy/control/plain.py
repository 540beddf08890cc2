"""In front of a llama-server without hooks: which slot a session keeps, and what ``/slots`` tells of it.

``/slots`` is asked before a request is pinned, and once per heartbeat while a request of ours runs: asking wakes an
engine that sleeps, and keeps one awake that would go to sleep. It answers between two batches, so nobody waits for it
longer than ``LOOK_S``; who has seen nothing pins nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from polykv_proxy.conversation import Conversation
from polykv_proxy.doctor.facts import PinsOff
from polykv_proxy.errors import PolyKVError
from polykv_proxy.ids import SessionId, SlotId
from polykv_proxy.pins import Asking, PinBook
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import Displaced
from polykv_proxy.turns import Session
from polykv_proxy.upstream import EngineClient, SlotStats
from polykv_proxy.upstream.plain import PlainProps, PlainSlot

log = logging.getLogger("polykv.plain")

LOOK_S = 0.3

RATE_S = 0.2
"""A rate is not told of less time than that."""

FAMILY_BYTES = 256
"""Plain prompts that have so many bytes in common may have more."""


class Pin(NamedTuple):
    """What ``PlainEngine.begin`` gave for one request. ``slot_id``: None = llama-server chooses. ``displaced``: whose
    slot it was until now."""

    session: SessionId
    slot_id: SlotId | None
    displaced: tuple[Displaced, ...] = ()


class _Count(NamedTuple):
    """How far a task was. ``tps``: its rate until then, None = not known yet."""

    id_task: int | None
    n_decoded: int
    at_s: float
    tps: float | None = None


class PlainEngine:
    """``props``: None as long as no llama-server without hooks was found.

    ``n_elsewhere``: how many requests are at the engine that are not begun here.
    """

    def __init__(self, engine: EngineClient, sessions: SessionBook, clock: Callable[[], float]):
        self.props: PlainProps | None = None
        self.n_elsewhere: Callable[[], int] = lambda: 0
        self._engine, self._sessions, self._clock = engine, sessions, clock
        self._book = PinBook(is_kept=sessions.is_live)
        self._refused = False
        self._looking: asyncio.Task[list[PlainSlot] | None] | None = None
        self._seen: dict[SlotId, PlainSlot] = {}
        self._counted: dict[SlotId, _Count] = {}

    @property
    def pins_off(self) -> PinsOff | None:
        """Why sessions keep no slots; None when they do, or no llama-server without hooks was found."""
        props = self.props
        if props is None:
            return None
        if props.router:
            return "router"
        if props.n_slots < 2:
            return "one_slot"
        if self._refused or not props.shows_slots:
            return "hidden"
        return "emptied" if self._book.empties_idle else None

    @property
    def pins(self) -> bool:
        """Sessions can keep slots, so requests are worth being read."""
        return self._shows and self.props is not None and self.props.n_slots > 1

    @property
    def _shows(self) -> bool:
        """``/slots`` can be asked now, and will not wake anybody."""
        props = self.props
        return props is not None and props.shows_slots and not (props.router or props.sleeping or self._refused)

    def found(self, props: PlainProps | None) -> None:
        """Another engine, another start of it, or it went to sleep or woke up. None: it has hooks now."""
        self.props, self._refused = props, False
        self._seen.clear()
        self._counted.clear()
        self._book.reset(props.n_slots if props is not None else 0)

    def forget(self, sessions: Iterable[SessionId]) -> None:
        self._book.forget(sessions)

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    # Requests ------------------------------------------------------------------------------------------------------

    async def begin(self, session: Session, said: Conversation | None, *, may_pin: bool = True) -> Pin:
        """Choose a slot for a turn that is about to be sent. Always ``end`` it. Not ``may_pin``: it is only counted."""
        seen = await self._look_soon() if self.pins and may_pin else None
        asking = Asking(session.session_id, returns=_returns(session, said), family=_family(said))
        before = self._book.owners
        slot_id = self._book.begin(asking, seen, self._clock(), n_elsewhere=self.n_elsewhere())
        gone = before - self._book.owners
        for owner in gone:
            self._sessions.displaced(owner)
        given_away = [Displaced(owner, slot_id) for owner in gone if slot_id is not None and self._book.is_away(owner)]
        return Pin(session.session_id, slot_id, tuple(given_away))

    def end(self, pin: Pin, n_held: int | None) -> None:
        """``n_held``: tokens of prompt and answer, None = not known."""
        self._book.end(pin.session, pin.slot_id, n_held, self._clock())
        session = self._sessions.get(pin.session)
        if session is not None:
            session.slot_id = self._book.slot_of(pin.session)

    # Looking -------------------------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Look while something of ours runs."""
        if self.pins and self._sessions.n_running:
            await self._look_soon()

    async def _look_soon(self) -> list[PlainSlot] | None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="polykv-plain-look")
        await asyncio.wait([self._looking], timeout=LOOK_S)
        return self._looking.result() if self._looking.done() and not self._looking.cancelled() else None

    async def _look(self) -> list[PlainSlot] | None:
        try:
            seen = await self._engine.slots()
        except PolyKVError as e:
            log.debug("no slots: %s", e.message)
            return None
        if seen is None:
            self._refused = True
            log.info("the engine does not show its slots: it chooses them itself")
            return None
        now_s = self._clock()
        for slot in seen:
            self._seen[slot.slot_id] = slot
            self._learn_rate(slot, now_s)
        return seen

    def _learn_rate(self, slot: PlainSlot, now_s: float) -> None:
        """Tokens per second between two looks at the same task."""
        before = self._counted.get(slot.slot_id)
        if before is None or before.id_task != slot.id_task or not slot.busy:
            self._counted[slot.slot_id] = _Count(slot.id_task, slot.n_decoded or 0, now_s)
        elif now_s - before.at_s >= RATE_S:
            n_decoded = slot.n_decoded or 0
            tps = (n_decoded - before.n_decoded) / (now_s - before.at_s) if before.n_decoded else None
            self._counted[slot.slot_id] = _Count(slot.id_task, n_decoded, now_s, tps)

    def slot_of(self, session: Session) -> SlotStats | None:
        """What the last look showed of the slot that a session's turn runs in."""
        pinned = [turn.slot_id for turn in session.turns.values() if turn.slot_id is not None]
        seen = self._seen.get(pinned[-1]) if pinned else None
        if seen is None or not seen.busy:
            return None
        n_decoded = seen.n_decoded or 0
        return SlotStats(
            id=seen.slot_id,
            state="generating" if n_decoded else "prompt",
            n_decoded_cum=n_decoded,
            tps_ewma=self._counted[seen.slot_id].tps,
        )


def _returns(session: Session, said: Conversation | None) -> bool:
    answers = said is not None and not said.is_text and said.has_answers
    return session.named or session.n_turns > 1 or answers


def _family(said: Conversation | None) -> int | None:
    if said is None or not len(said):
        return None
    if said.is_text:
        return said.mark_at(FAMILY_BYTES).digest if len(said) > FAMILY_BYTES else None
    return said.mark_at(1).digest if len(said) > 1 else said.scope
