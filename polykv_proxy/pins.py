"""Which slot a session keeps in front of a llama-server without hooks, where others may use slots, too.

Pure: the book decides by what ``/slots`` showed a moment ago. It never makes anybody wait: without a slot that is
surely right the request names none, and llama-server chooses. The rules, in this order:

1. Somebody is on the way to a slot that nobody knows: no pin, it could be any. Nor ever a pin to a slot that is in use,
   since llama-server would let the request wait for it though others are free.
2. A session goes on in the slot that holds what it said, told by the number of tokens. If that is not there, or not
   free: no pin. llama-server compares prompts itself, and has what it saved of idle slots.
3. A new session, and one whose slot was given away, gets a slot that no live session keeps: best one that was used for
   the same beginning, then an empty one, then the longest unused.
4. All are kept: a new session displaces the longest unused. One that was itself displaced so displaces the last used,
   and who was displaced by that the longest unused again: more sessions than slots, each in its turn, would else
   displace each other for ever. A request that looks like the only one of its kind displaces nobody.
5. An engine that empties slots at rest gets no pins (the default with a unified cache: they are saved first, and loaded
   for a request only when it names no slot). That is seen by the slots: by what sessions had in them, or at the first
   look, when others used them before.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from polykv_proxy.ids import SessionId, SlotId
from polykv_proxy.upstream.plain import PlainSlot

NEAR_TOKENS = 2
"""A slot holds all tokens of its last turn but the very last, give or take."""


class Asking(NamedTuple):
    """Whose turn it is. ``returns``: there will be more. ``family``: how its prompt begins, None = like no other."""

    session: SessionId
    returns: bool = False
    family: int | None = None


@dataclass(slots=True)
class _Slot:
    slot_id: SlotId
    owner: SessionId | None = None
    family: int | None = None
    n_running: int = 0
    used_s: float = float("-inf")
    id_task: int | None = None
    seen_at_rest: bool = False
    """Since its owner's last turn: whoever works there now is somebody else."""


@dataclass(slots=True)
class PinBook:
    """``is_kept(session, now_s)``: whether it counts as using its slot between turns.

    ``empties_idle``: the engine was seen to empty slots that rest.
    """

    is_kept: Callable[[SessionId, float], bool] = lambda _session, _now_s: True
    empties_idle: bool = False
    _slots: list[_Slot] = field(default_factory=list)
    _held: dict[SessionId, int | None] = field(default_factory=dict)
    _displaced: dict[SessionId, bool] = field(default_factory=dict)
    """Whose slot was given away; True: as the longest unused one."""
    _has_looked: bool = False
    _n_loose: int = 0
    _sent_s: float = float("-inf")

    def reset(self, n_slots: int) -> None:
        """Another start of the engine, or another engine. What runs ends by itself."""
        running = {s.slot_id: s.n_running for s in self._slots}
        self._slots = [_Slot(SlotId(i), n_running=running.get(SlotId(i), 0)) for i in range(n_slots)]
        self._held.clear()
        self._displaced.clear()
        self.empties_idle = self._has_looked = False

    @property
    def owners(self) -> set[SessionId]:
        return {slot.owner for slot in self._slots if slot.owner is not None}

    def slot_of(self, session: SessionId) -> SlotId | None:
        return next((s.slot_id for s in self._slots if s.owner == session), None)

    def is_away(self, session: SessionId) -> bool:
        """Its slot was given to somebody else, and it has none since."""
        return session in self._displaced

    def forget(self, sessions: Iterable[SessionId]) -> None:
        """They are over; their slots are nobody's."""
        gone = set(sessions)
        for session in gone:
            self._held.pop(session, None)
            self._displaced.pop(session, None)
        for slot in self._slots:
            if slot.owner in gone:
                slot.owner = None

    def begin(
        self, asking: Asking, seen: Sequence[PlainSlot] | None, now_s: float, *, n_elsewhere: int = 0
    ) -> SlotId | None:
        """A request is about to be sent. Gives the slot to name, None: name none. ``end`` it with the same.

        ``seen``: what ``/slots`` just showed, None = nothing. ``n_elsewhere``: requests at the engine besides those of
        the book; they named no slot.
        """
        slot = None
        if seen is not None and self.take_in(seen) and not self.empties_idle:
            n_unknown = sum(now.busy and not slot.n_running for slot, now in self._pairs(seen))
            if self._n_loose + n_elsewhere <= n_unknown:
                slot = self._choose(asking, seen, now_s)
        self._sent_s = now_s
        if slot is None:
            self._n_loose += 1
            return None
        if slot.owner is not None and slot.owner != asking.session:
            self._displaced[slot.owner] = not self._displaced.get(asking.session, False)
        for other in self._slots:
            if other.owner == asking.session:
                other.owner = None
        self._displaced.pop(asking.session, None)
        slot.owner, slot.family, slot.n_running = asking.session, asking.family, slot.n_running + 1
        return slot.slot_id

    def end(self, session: SessionId, slot_id: SlotId | None, n_held: int | None, now_s: float) -> None:
        """A request is over. ``n_held``: tokens of its prompt and its answer, None = not known."""
        if slot_id is None:
            self._n_loose -= 1
        elif slot_id < len(self._slots):
            slot = self._slots[slot_id]
            slot.n_running, slot.used_s, slot.seen_at_rest = max(0, slot.n_running - 1), now_s, False
        if session not in self._displaced:
            self._held[session] = n_held

    def take_in(self, seen: Sequence[PlainSlot]) -> bool:
        """Learn from what the slots show. False: these are not the slots that the book is about."""
        if [now.slot_id for now in seen] != [slot.slot_id for slot in self._slots]:
            return False
        if any(_goes_back(slot, now) for slot, now in self._pairs(seen)):
            self.reset(len(self._slots))
        if not self._has_looked:
            # A guess, until sessions show what becomes of theirs: without it the first would lose what is saved of it.
            self._has_looked, self.empties_idle = True, _only_last_holds(seen)
        n_emptied = n_kept = 0
        for slot, now in self._pairs(seen):
            is_news, slot.id_task = slot.id_task != now.id_task, now.id_task
            if now.busy or slot.n_running or now.n_tokens is None:
                continue
            held = self._held.get(slot.owner) if slot.owner is not None else None
            fits = held is None or _is_near(now, held)
            if held is not None and slot.seen_at_rest and not is_news and slot.used_s < self._sent_s:
                # Nothing ran here since, and something began elsewhere.
                n_kept += fits
                n_emptied += not fits and now.n_tokens == 0
            if slot.owner is not None and (not fits or (is_news and slot.seen_at_rest)):
                slot.owner, is_news = None, True
            if slot.owner is None and is_news:
                slot.owner = self._whose(now)
            slot.seen_at_rest = True
        if n_emptied or n_kept:
            self.empties_idle = not n_kept
        return True

    # ---------------------------------------------------------------------------------------------------------------

    def _pairs(self, seen: Sequence[PlainSlot]) -> Iterable[tuple[_Slot, PlainSlot]]:
        return zip(self._slots, seen, strict=True)

    def _whose(self, now: PlainSlot) -> SessionId | None:
        """The one session without a slot that said as much as this one holds."""
        owners = self.owners
        fitting = [
            session
            for session, held in self._held.items()
            if held is not None and session not in owners and session not in self._displaced and _is_near(now, held)
        ]
        return fitting[0] if len(fitting) == 1 else None

    def _choose(self, asking: Asking, seen: Sequence[PlainSlot], now_s: float) -> _Slot | None:
        free = [(slot, now) for slot, now in self._pairs(seen) if not now.busy and not slot.n_running]
        if asking.session in self._held and asking.session not in self._displaced:
            return next((slot for slot, now in free if slot.owner == asking.session and now.n_tokens), None)
        unkept = [(slot, now) for slot, now in free if slot.owner is None or not self.is_kept(slot.owner, now_s)]
        if unkept:
            return min(unkept, key=lambda one: _fitness(one[0], one[1], asking))[0]
        if not free or not asking.returns:
            return None
        by_use = sorted((slot for slot, _ in free), key=lambda slot: slot.used_s)
        return by_use[-1] if self._displaced.get(asking.session) else by_use[0]


def _fitness(slot: _Slot, now: PlainSlot, asking: Asking) -> tuple[bool, bool, float]:
    begins_so = asking.family is not None and slot.family == asking.family
    return (not begins_so, bool(now.n_tokens), slot.used_s)


def _is_near(now: PlainSlot, n_held: int) -> bool:
    return now.n_tokens is not None and abs(now.n_tokens - (n_held - 1)) <= NEAR_TOKENS


def _only_last_holds(seen: Sequence[PlainSlot]) -> bool:
    """Of those that worked, only the last one to begin holds anything: as if each had emptied all others at rest."""
    worked = sorted((now for now in seen if now.id_task is not None), key=lambda now: now.id_task or 0)
    others = [now for now in worked[:-1] if not now.busy]
    return bool(others and worked[-1].n_tokens) and all(now.n_tokens == 0 for now in others)


def _goes_back(slot: _Slot, now: PlainSlot) -> bool:
    """Tasks are counted from the start of the process: this is another one."""
    return slot.id_task is not None and (now.id_task is None or now.id_task < slot.id_task)
