"""Who may use which of llama-server's slots, first come first served.

Pure: a question or a fact goes in, grants come out; waiting is the caller's business. The rules, in this order:

1. A slot serves one request at a time. One that the engine may still be using is not handed out: pinned to a busy
   slot, a request would block the engine's queue behind it.
2. Strictly in order of arrival. A request for n choices waits until n slots are free, and nobody overtakes it.
3. Which free slot: the session's own; else, of those that no live session owns, the one whose last conversation
   this one begins with (longest first), else one that nobody owns, else the longest unused; else the longest unused of
   all. The owner of a slot taken that way is displaced, and named.
4. Further slots of one request are the lowest free ones: the engine itself picks them that way.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from polykv_proxy.conversation import Conversation, Mark
from polykv_proxy.ids import SessionId, SlotId


class Ticket(NamedTuple):
    """A request for ``n`` slots."""

    ticket_id: int
    session: SessionId | None = None
    n: int = 1
    conversation: Conversation | None = None


class Displaced(NamedTuple):
    """A session, and the slot that was its own."""

    session: SessionId
    slot_id: SlotId


class Grant(NamedTuple):
    """``slots[0]`` is the one to name to the engine. ``displaced``: sessions that lost their slot by this. ``own``: it
    was the session's own before, or holds what its conversation begins with.
    """

    ticket: Ticket
    slots: tuple[SlotId, ...]
    displaced: tuple[Displaced, ...] = ()
    own: bool = False


@dataclass(slots=True, eq=False)
class _Slot:
    slot_id: SlotId
    owner: SessionId | None = None
    mark: Mark | None = None
    ticket_id: int | None = None
    used_s: float = 0.0
    left_s: float = float("-inf")
    """When its owner, who is there still, gave it back."""
    n_outside: int = 0
    engine_busy: bool = False
    reserved: bool = False

    @property
    def free(self) -> bool:
        return self.ticket_id is None and not (self.n_outside or self.engine_busy or self.reserved)


@dataclass(slots=True)
class SlotBook:
    """``is_live(session, now_s)``: whether a session still counts as using its slot between turns. For ``live_s`` after
    it gave the slot back it does, and is not asked about.

    Whoever calls must see to it that the grants that come back reach those who wait.
    """

    is_live: Callable[[SessionId, float], bool] = lambda _session, _now_s: False
    live_s: float = 0.0
    _slots: list[_Slot] = field(default_factory=list)
    # Every request asks for these, and an engine may have many slots: kept up to date by ``_look_at`` and ``_own``.
    _free: set[_Slot] = field(default_factory=set)
    _owned: dict[SessionId, list[_Slot]] = field(default_factory=dict)
    _waiting: OrderedDict[int, Ticket] = field(default_factory=OrderedDict)
    _held: dict[int, Grant] = field(default_factory=dict)
    _may_be_unsure: bool = False

    @property
    def n_slots(self) -> int:
        return len(self._slots)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_held(self) -> int:
        return sum(1 for s in self._slots if s.ticket_id is not None)

    @property
    def unsure(self) -> bool:
        """A slot is closed only because the engine may still be using it."""
        if not self._may_be_unsure:
            return False
        busy = [s for s in self._slots if s.engine_busy]
        self._may_be_unsure = bool(busy)
        return any(s.ticket_id is None for s in busy)

    @property
    def needs_look(self) -> bool:
        """Somebody waits because of that."""
        return bool(self._waiting) and self.unsure

    def slot_of(self, session: SessionId) -> SlotId | None:
        owned = self._owned.get(session)
        return min(slot.slot_id for slot in owned) if owned else None

    def serves(self, session: SessionId) -> bool:
        """A request of this session was granted a slot, and has it still."""
        return any(grant.ticket.session == session for grant in self._held.values())

    def owner_of(self, slot_id: SlotId) -> SessionId | None:
        return self._slots[slot_id].owner if 0 <= slot_id < len(self._slots) else None

    def resize(self, n_slots: int, now_s: float) -> list[Grant]:
        """The engine (re)started with so many slots. What runs keeps its ticket; nothing else is remembered."""
        old = {s.slot_id: s for s in self._slots}
        self._slots = [_Slot(SlotId(i)) for i in range(n_slots)]
        self._free.clear()
        self._owned.clear()
        for slot in self._slots:
            before = old.get(slot.slot_id)
            if before is not None:
                slot.ticket_id, slot.n_outside = before.ticket_id, before.n_outside
            self._look_at(slot)
        return self._pump(now_s)

    def take(self, ticket: Ticket, now_s: float) -> Grant | None:
        """What can be granted at once; None when there is a line to stand in (``request``)."""
        free = self._free_for(ticket) if not self._waiting else None
        return self._grant(ticket, free, now_s) if free else None

    def request(self, ticket: Ticket, now_s: float) -> list[Grant]:
        grant = self.take(ticket, now_s)
        if grant is not None:
            return [grant]
        self._waiting[ticket.ticket_id] = ticket
        return []

    def withdraw(self, ticket_id: int, now_s: float) -> list[Grant]:
        """Out of the queue, wherever it stood."""
        return self._pump(now_s) if self._waiting.pop(ticket_id, None) else []

    def release(self, ticket_id: int, now_s: float, *, unsure: bool = False) -> list[Grant]:
        """``unsure``: the engine may still be at it (the client left); closed until seen idle."""
        grant = self._held.pop(ticket_id, None)
        if grant is None:
            return []
        self._may_be_unsure |= unsure
        said = grant.ticket.conversation
        mark = said.mark() if said is not None else None
        for slot_id in grant.slots:
            slot = self._slots[slot_id] if slot_id < len(self._slots) else None
            if slot is not None and slot.ticket_id == ticket_id:
                slot.ticket_id, slot.used_s = None, now_s
                slot.left_s = now_s if slot.owner is not None and slot.owner == grant.ticket.session else float("-inf")
                slot.engine_busy = slot.engine_busy or unsure
                slot.mark = mark
                self._look_at(slot)
        return self._pump(now_s)

    def occupy(self, slot_id: SlotId) -> tuple[Displaced, ...]:
        """A request that names its slot itself runs there: honoured, and kept out of everybody's way.

        Gives whose conversation rests there, to be displaced.
        """
        if not 0 <= slot_id < len(self._slots):
            return ()
        slot = self._slots[slot_id]
        displaced = (Displaced(slot.owner, slot_id),) if slot.free and slot.owner is not None else ()
        slot.n_outside += 1
        slot.mark = None
        self._own(slot, None)
        self._look_at(slot)
        return displaced

    def vacate(self, slot_id: SlotId, now_s: float, *, unsure: bool = False) -> list[Grant]:
        if 0 <= slot_id < len(self._slots) and self._slots[slot_id].n_outside:
            slot = self._slots[slot_id]
            slot.n_outside -= 1
            slot.engine_busy |= unsure
            self._look_at(slot)
            self._may_be_unsure |= unsure
        return self._pump(now_s)

    def observe(self, busy: Collection[SlotId], now_s: float) -> list[Grant]:
        """What the engine says right now. Slots in use here are known better."""
        for slot in self._slots:
            slot.engine_busy = slot.ticket_id is None and not slot.n_outside and slot.slot_id in busy
            self._look_at(slot)
        self._may_be_unsure = True
        return self._pump(now_s)

    def resting(self) -> list[tuple[SlotId, SessionId | None]]:
        """Free slots and who owns them, the longest unused first."""
        return [(s.slot_id, s.owner) for s in sorted(self._slots, key=lambda slot: slot.used_s) if s.free]

    def used_s(self, slot_id: SlotId) -> float:
        """When it was last given back."""
        return self._slots[slot_id].used_s

    def reserve(self, slot_id: SlotId) -> bool:
        """Keep a free slot out of everybody's way while something is done with what it holds; False: it is not free."""
        if not 0 <= slot_id < len(self._slots) or not self._slots[slot_id].free:
            return False
        self._slots[slot_id].reserved = True
        self._look_at(self._slots[slot_id])
        return True

    def unreserve(
        self, slot_id: SlotId, now_s: float, *, emptied: bool = False, filled_for: SessionId | None = None
    ) -> list[Grant]:
        """``emptied``: it is nobody's now. ``filled_for``: it holds what this session said."""
        if 0 <= slot_id < len(self._slots) and self._slots[slot_id].reserved:
            slot = self._slots[slot_id]
            slot.reserved = False
            self._look_at(slot)
            if emptied or filled_for is not None:
                slot.mark, slot.used_s, slot.left_s = None, now_s, float("-inf")
                self._own(slot, filled_for)
        return self._pump(now_s)

    def pass_on(self, slot_id: SlotId, before: SessionId, to: SessionId) -> bool:
        """What a session left in a slot is another one's own from here on. False: it is not there any more.

        The engine was seen to be done with it.
        """
        if not 0 <= slot_id < len(self._slots):
            return False
        slot = self._slots[slot_id]
        if slot.ticket_id is not None or slot.owner not in (before, None):
            return False
        slot.mark, slot.engine_busy, slot.left_s = None, False, float("-inf")
        self._own(slot, to)
        self._look_at(slot)
        return True

    def forget(self, sessions: Iterable[SessionId]) -> None:
        """These sessions are over; their slots belong to nobody."""
        for session in sessions:
            for slot in self._owned.pop(session, ()):
                slot.owner = None

    def _look_at(self, slot: _Slot) -> None:
        """It may have become free, or not be any more."""
        if slot.free:
            self._free.add(slot)
        else:
            self._free.discard(slot)

    def _own(self, slot: _Slot, owner: SessionId | None) -> None:
        if slot.owner is not None:
            owned = self._owned[slot.owner]
            owned.remove(slot)
            if not owned:
                del self._owned[slot.owner]
        slot.owner = owner
        if owner is not None:
            self._owned.setdefault(owner, []).append(slot)

    def _pump(self, now_s: float) -> list[Grant]:
        grants: list[Grant] = []
        while self._waiting:
            ticket = next(iter(self._waiting.values()))
            free = self._free_for(ticket)
            if not free:
                break
            del self._waiting[ticket.ticket_id]
            grants.append(self._grant(ticket, free, now_s))
        return grants

    def _free_for(self, ticket: Ticket) -> Collection[_Slot]:
        """The free slots, if they are enough."""
        return self._free if len(self._free) >= min(ticket.n, len(self._slots)) else ()

    def _grant(self, ticket: Ticket, free: Collection[_Slot], now_s: float) -> Grant:
        first, session = self._choose(ticket, free, now_s), ticket.session
        chosen = [first]
        if ticket.n > 1:
            lowest = sorted(free, key=lambda slot: slot.slot_id)
            chosen = [first, *(slot for slot in lowest if slot is not first)][: ticket.n]
        displaced, own = [], self._is_own(first, ticket)
        for slot in chosen:
            if slot.owner is not None and slot.owner != session:
                displaced.append(Displaced(slot.owner, slot.slot_id))
            if slot.owner != session or slot is not first:
                self._own(slot, session if slot is first else None)
            slot.mark, slot.ticket_id = None, ticket.ticket_id
            self._free.discard(slot)
        if session is not None and len(owned := self._owned[session]) > 1:
            # It moved, its slot was closed when it asked: an idle session owns one slot.
            for slot in [slot for slot in owned if slot.ticket_id is None]:
                self._own(slot, None)
        grant = Grant(ticket, tuple([slot.slot_id for slot in chosen]), tuple(displaced), own)
        self._held[ticket.ticket_id] = grant
        return grant

    def _is_own(self, slot: _Slot, ticket: Ticket) -> bool:
        if slot.owner is not None:
            return slot.owner == ticket.session
        return slot.mark is not None and ticket.conversation is not None and ticket.conversation.covers(slot.mark)

    def _choose(self, ticket: Ticket, free: Collection[_Slot], now_s: float) -> _Slot:
        session, said, live_s = ticket.session, ticket.conversation, self.live_s
        if session is not None and (own := [slot for slot in self._owned.get(session, ()) if slot in free]):
            return min(own, key=lambda slot: slot.slot_id)
        best: _Slot | None = None
        best_fitness = (0, True, float("inf"), 0)
        unused: _Slot | None = None  # the longest, of those that live sessions own
        for slot in free:
            owner = slot.owner
            if owner is not None and (now_s - slot.left_s < live_s or self.is_live(owner, now_s)):
                if unused is None or (slot.used_s, slot.slot_id) < (unused.used_s, unused.slot_id):
                    unused = slot
                continue
            fits = slot.mark.length if slot.mark is not None and said is not None and said.covers(slot.mark) else 0
            fitness = (-fits, owner is not None, slot.used_s, slot.slot_id)
            if best is None or fitness < best_fitness:
                best, best_fitness = slot, fitness
        chosen = best or unused
        assert chosen is not None  # something is free
        return chosen
