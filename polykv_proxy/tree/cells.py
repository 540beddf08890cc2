"""Which cells each sequence holds: a shadow of the engine's cache, kept by what was ordered and by what stats say.

A run is a stretch of cells that were filled one after the other: its ``origin`` names the filling, its positions are
token positions. Sharing copies runs, as the engine copies memberships. So two sequences hold the same cell if and only
if they hold the same (origin, position), also when the pool that filled it is gone. Pure.

Who owns a cell: the pools that were made from an origin have claims on it, oldest first; a claim ends where its pool
does. Cells of a slot's origin that nobody claims are its session's own.

A unified cache is meant: with separate streams every share is a copy, and nothing is held twice.

Stats that were asked for before something was ordered may or may not show it: they say nothing of the slots and
sequences that it was about. The next ones do.

Shapes:  runs of a sequence follow each other from position 0 without a gap
Units:   positions in tokens, one cell each; *_s seconds of the clock given
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polykv_proxy.ids import PoolId, SeqId, SlotId

Origin = int


class Run(NamedTuple):
    """Cells [start, end) of one filling."""

    origin: Origin
    start: int
    end: int


Runs = tuple[Run, ...]


LYING = 1 << 40
"""Origins below minus this are those of runs that the engine told; those of its own runs the book counts from 1."""


class SlotFacts(NamedTuple):
    """What stats say of a slot. ``tasks``: (id, tokens reused) of all tasks it has had lately, oldest first.

    The first ``n_pool_shared`` cells are those of the sequence ``pool_seq``.
    """

    slot_id: SlotId
    n_tokens: int
    tasks: Sequence[tuple[int, int]]
    pool_seq: SeqId | None
    n_pool_shared: int


@dataclass(slots=True)
class _SlotEntry:
    runs: Runs = ()
    id_task: int = -1
    grows: bool = False
    """The last run is being filled by the task that is known: what comes is more of it."""
    changed_s: float = float("-inf")
    """When the last order about it was known to be carried out."""


class CellBook:
    """Sequences of pools by number and generation, and slots. ``clear`` with every start of the engine.

    ``clock``: the one that ``asked_s`` is of; without it all stats count as newer than all orders.
    """

    def __init__(self, clock: Callable[[], float] = lambda: float("-inf")) -> None:
        self._clock = clock
        self._seqs: dict[SeqId, tuple[int, Runs]] = {}
        self._changed_s: dict[SeqId, float] = {}
        """As of slots. There are as many sequences as the engine has."""
        self._slots: dict[SlotId, _SlotEntry] = {}
        self._claims: dict[Origin, list[tuple[PoolId, int]]] = {}
        self._next: Origin = 1

    def clear(self) -> None:
        self._seqs.clear()
        self._changed_s.clear()
        self._slots.clear()
        self._claims.clear()

    # Sequences of pools --------------------------------------------------------------------------------------------

    def runs(self, seq_id: SeqId, gen: int) -> Runs | None:
        """What a sequence holds; None when it is not known."""
        known = self._seqs.get(seq_id)
        return known[1] if known is not None and known[0] == gen else None

    def filled(
        self, seq_id: SeqId, gen: int, n_tokens: int, *, pool_id: PoolId, source: SeqId | None, n_shared: int
    ) -> None:
        """A sequence was prefilled for a pool, behind ``n_shared`` tokens of another sequence."""
        known = self._seqs.get(source) if source is not None else None
        head = cut(known[1], n_shared) if known is not None else ()
        fresh = Run(self._new(), length(head), n_tokens)
        self._claims[fresh.origin] = [(pool_id, n_tokens)]
        self._set(seq_id, gen, (*head, fresh))

    def snapshot(self, seq_id: SeqId, gen: int, n_tokens: int, slot_id: SlotId) -> None:
        """A slot's cells are shared. Who owns them is said with ``claim``."""
        entry = self._slots.setdefault(slot_id, _SlotEntry())
        entry.changed_s = self._clock()
        self._stretch(entry, n_tokens)
        self._set(seq_id, gen, cut(entry.runs, n_tokens))

    def claim(self, seq_id: SeqId, pool_id: PoolId, *, tree: Container[PoolId]) -> None:
        """This sequence is a pool's: what no pool of ``tree`` claims of it is the pool's from here on.

        A claim of a pool that is gone does not count: sooner or later nobody remembers that one.
        """
        for run in self._seqs.get(seq_id, (0, ()))[1]:
            claims = self._claims.setdefault(run.origin, [])
            if not any(end >= run.end and known in tree for known, end in claims):
                claims.append((pool_id, run.end))

    def adopt(self, seq_id: SeqId, gen: int, parts: Iterable[tuple[PoolId, int, int]]) -> None:
        """A sequence that an earlier run of the proxy made: ``parts`` (owner, start, end) by the tree."""
        runs = tuple(Run(-owner, start, end) for owner, start, end in parts)
        for run in runs:
            known = self._claims.get(run.origin)
            end = run.end if known is None else max(run.end, known[0][1])
            self._claims[run.origin] = [(PoolId(-run.origin), end)]
        self._seqs[seq_id] = (gen, runs)

    def look(self) -> None:
        """The engine tells where everything lies: what it told before says nothing of who fills these places now."""
        self._claims = {origin: claims for origin, claims in self._claims.items() if origin > -LYING}

    def found(self, seq_id: SeqId, gen: int, runs: Runs | None, parts: Sequence[tuple[PoolId, int, int]]) -> None:
        """The same, when the engine told where the sequence lies (see ``lying``), after ``look``."""
        if runs is None:
            self.adopt(seq_id, gen, parts)
            return
        for run in runs:
            claims = dict(self._claims.get(run.origin, ()))
            for owner, start, end in parts:
                if start < run.end and end > run.start:
                    claims[owner] = max(min(end, run.end), claims.get(owner, 0))
            # Of two that follow each other in one place, the one whose pool ends first owns the beginning.
            self._claims[run.origin] = sorted(claims.items(), key=lambda claim: claim[1])
        self._seqs[seq_id] = (gen, runs)

    def found_slot(self, slot_id: SlotId, runs: Runs | None, id_task: int) -> None:
        """Where a slot lies, by the engine; ``id_task``: the last task that it had until then."""
        if runs is not None:
            self._slots[slot_id] = _SlotEntry(runs, id_task, changed_s=self._clock())

    def freed(self, seq_id: SeqId) -> None:
        self._seqs.pop(seq_id, None)
        self._changed_s[seq_id] = self._clock()

    def _set(self, seq_id: SeqId, gen: int, runs: Runs) -> None:
        self._seqs[seq_id] = (gen, runs)
        self._changed_s[seq_id] = self._clock()

    # Slots ---------------------------------------------------------------------------------------------------------

    def observe(self, facts: SlotFacts, asked_s: float = float("inf")) -> None:
        """Bring a slot's runs to what stats say it holds that were asked for at ``asked_s``."""
        entry = self._slots.setdefault(facts.slot_id, _SlotEntry())
        changed_s = entry.changed_s
        if facts.pool_seq is not None:
            changed_s = max(changed_s, self._changed_s.get(facts.pool_seq, changed_s))
        if asked_s <= changed_s:
            return
        new = [(id_task, n) for id_task, n in facts.tasks if id_task > entry.id_task]
        if new:
            entry.runs = cut(entry.runs, min(n for _, n in new))
            entry.id_task, entry.grows = new[-1][0], False
        if facts.pool_seq is not None and (known := self._seqs.get(facts.pool_seq)) is not None:
            head = cut(known[1], facts.n_pool_shared)
            if cut(entry.runs, length(head)) != head:
                entry.runs, entry.grows = (*head, *behind(entry.runs, length(head))), False
        if length(entry.runs) > facts.n_tokens:
            entry.runs, entry.grows = cut(entry.runs, facts.n_tokens), False
        self._stretch(entry, facts.n_tokens)

    def refilled(self, slot_id: SlotId, n_tokens: int, *, source: SeqId | None = None, n_shared: int = 0) -> None:
        """Between two requests a slot came to hold something else: cells of its own, behind those of a sequence."""
        entry = self._slots.setdefault(slot_id, _SlotEntry())
        entry.changed_s = self._clock()
        known = self._seqs.get(source) if source is not None else None
        entry.runs, entry.grows = cut(known[1], n_shared) if known is not None else (), False
        if length(entry.runs) < n_tokens:
            entry.runs = (*entry.runs, Run(self._new(), length(entry.runs), n_tokens))

    def slot_runs(self, slot_id: SlotId) -> Runs:
        entry = self._slots.get(slot_id)
        return entry.runs if entry is not None else ()

    @property
    def slot_ids(self) -> list[SlotId]:
        return list(self._slots)

    def _stretch(self, entry: _SlotEntry, n_tokens: int) -> None:
        """More cells were filled behind what is known."""
        n_known = length(entry.runs)
        if n_tokens <= n_known:
            return
        if entry.grows and entry.runs:
            last = entry.runs[-1]
            entry.runs = (*entry.runs[:-1], Run(last.origin, last.start, n_tokens))
        else:
            entry.runs = (*entry.runs, Run(self._new(), n_known, n_tokens))
            entry.grows = True

    # Owners --------------------------------------------------------------------------------------------------------

    def claims(self, origin: Origin) -> Sequence[tuple[PoolId, int]]:
        """(pool, end) of those who have a claim, oldest first."""
        return self._claims.get(origin, ())

    def forget(self) -> None:
        """Drop the claims on fillings of which nobody holds a cell. Cheap while there are few of them."""
        if len(self._claims) > 256 + 4 * (len(self._seqs) + len(self._slots)):
            holdings = [*(runs for _, runs in self._seqs.values()), *(entry.runs for entry in self._slots.values())]
            alive = {run.origin for runs in holdings for run in runs}
            self._claims = {origin: claims for origin, claims in self._claims.items() if origin in alive}

    def _new(self) -> Origin:
        self._next += 1
        return self._next - 1


def lying(told: Sequence[Sequence[tuple[int, int, int]]]) -> list[Runs | None]:
    """Runs by place of all that hold cells, from one look at them: (start, end, first cell) of every stretch.

    A cell at a position is one cell, whoever filled it: so stretches that have a cell in common are one filling. Others
    are not, though they lie equally far from their positions, as those of two streams that decoded in turns do.

    Of who has no cell at some position None, which the book does not describe.
    """
    origins: dict[tuple[int, int], Origin] = {}
    at, reach, origin = 0, -1, 0
    for far, start, end in sorted({(cell - start, start, end) for lies in told for start, end, cell in lies}):
        if far != at or start >= reach:
            at, reach, origin = far, end, -LYING - (start << 32 | far + start)
        reach = max(reach, end)
        origins[far, start] = origin
    return [_without_a_gap(Run(origins[cell - start, start], start, end) for start, end, cell in lies) for lies in told]


def _without_a_gap(runs: Iterable[Run]) -> Runs | None:
    held: list[Run] = []
    for run in runs:
        if run.start != (held[-1].end if held else 0):
            return None
        held.append(run)
    return tuple(held)


def length(runs: Runs) -> int:
    return runs[-1].end if runs else 0


def cut(runs: Runs, n_tokens: int) -> Runs:
    """The part of runs in front of a position."""
    return tuple(Run(r.origin, r.start, min(r.end, n_tokens)) for r in runs if r.start < n_tokens)


def behind(runs: Runs, n_tokens: int) -> Runs:
    """The part of runs from a position on."""
    return tuple(Run(r.origin, max(r.start, n_tokens), r.end) for r in runs if r.end > n_tokens)


def union(held: Iterable[Run]) -> Mapping[Origin, list[tuple[int, int]]]:
    """Every cell once: per origin, disjoint stretches in order."""
    by_origin: dict[Origin, list[tuple[int, int]]] = {}
    for run in sorted(held):
        stretches = by_origin.setdefault(run.origin, [])
        if stretches and run.start <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(stretches[-1][1], run.end))
        else:
            stretches.append((run.start, run.end))
    return by_origin
