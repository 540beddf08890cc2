"""Who owns which KV cells: by ownership, never by membership.

A shared cell belongs to many sequences, so adding up per sequence counts it many times. Here every cell has one owner:
of the pool that it was filled for, and the pools above that one, the one whose own range [D, L) has its position. What
a slot filled for itself is its session's. So own cells add up to the engine's used cells, whoever holds them by now:
the pool's sequence, a descendant's, a slot's, also when the pool is cold or off the tree.

Pure: what is held comes from ``cells``.

Units:   *_cells one token's keys and values; *_bytes = cells * bytes_per_token, None while that is not known
Source:  design §4.2, §3.4 (implicit reference counting)
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from polykv_proxy.ids import PoolId, SessionId, SlotId
from polykv_proxy.tree.cells import CellBook, Origin, Run, Runs, union
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree


class Gone(NamedTuple):
    """A pool that was released while somebody still held some of its cells."""

    pool_id: PoolId
    name: str | None
    parent: PoolId
    branch_pos: int
    prefix_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCells:
    """A session and what its slot holds: ``pool_n_tokens`` in cells of pools, ``suffix_n_tokens`` in its own."""

    session_id: SessionId
    pool_id: PoolId | None
    pool_n_tokens: int
    suffix_n_tokens: int


@dataclass(frozen=True, slots=True)
class Accounts:
    """Every cell once.

    ``own_cells``       of the tree's pools; those without a cell are absent
    ``released_cells``  of pools that are off the tree
    ``slot_cells``      of slots, beyond what they share with pools
    """

    own_cells: Mapping[PoolId, int] = field(default_factory=dict)
    released_cells: Mapping[PoolId, int] = field(default_factory=dict)
    slot_cells: Mapping[SlotId, int] = field(default_factory=dict)

    @property
    def total_cells(self) -> int:
        """What the engine's used cells are when nothing runs (dense model)."""
        return sum(sum(part.values()) for part in (self.own_cells, self.released_cells, self.slot_cells))


def account(tree: PoolTree, gone: Mapping[PoolId, Gone], book: CellBook, *, unified: bool = True) -> Accounts:
    """Count the cells that the resident pools' sequences and the slots hold.

    ``unified`` False: every share is a copy, so what two sequences hold is counted twice.

    Costs O(resident pools * depth), however many pools there are.
    """
    of_pools = [
        book.runs(p.seq_id, p.gen) or () for p in tree.residents() if p.seq_id is not None and p.gen is not None
    ]
    of_slots = [(slot_id, book.slot_runs(slot_id)) for slot_id in book.slot_ids]
    holdings = [*of_pools, *(runs for _, runs in of_slots)]
    own: Counter[PoolId] = Counter()
    released: Counter[PoolId] = Counter()
    for held in [[run for runs in holdings for run in runs]] if unified else holdings:
        for origin, stretches in union(held).items():
            for owner, n_cells in _owners(tree, gone, book.claims(origin), stretches):
                if owner is not None:
                    (own if owner in tree else released)[owner] += n_cells
    slots: Counter[SlotId] = Counter()
    counted: dict[Origin, int] = {}
    of_nobody = [(run, slot_id) for slot_id, runs in of_slots for run in own_runs(tree, gone, book, runs)]
    for (origin, start, end), slot_id in sorted(of_nobody):
        at = max(start, counted.get(origin, 0)) if unified else start
        slots[slot_id] += max(0, end - at)
        counted[origin] = max(end, at)
    return Accounts(dict(own), dict(released), dict(slots))


def still_needed(gone: Mapping[PoolId, Gone], book: CellBook, accounts: Accounts) -> set[PoolId]:
    """Released pools that own cells, or may when others above or beside them go, and those above them."""
    of_slots = {run.origin for slot_id in book.slot_ids for run in book.slot_runs(slot_id)}
    claiming = {pool_id for origin in of_slots for pool_id, _ in book.claims(origin)}
    needed: set[PoolId] = set()
    for pool_id in {*accounts.released_cells, *claiming}:
        above = gone.get(pool_id)
        while above is not None and above.pool_id not in needed:
            needed.add(above.pool_id)
            above = gone.get(above.parent)
    return needed


def count_cells(held: Iterable[Run]) -> int:
    """Cells that are held, each once, however many hold it."""
    return sum(end - start for stretches in union(held).values() for start, end in stretches)


def count_freed(going: Iterable[Run], staying: Iterable[Run]) -> int:
    """Cells that come free when all who hold ``going`` let go, as far as nobody holds them with ``staying`` too."""
    rest = list(staying)
    return count_cells([*rest, *going]) - count_cells(rest)


def parts_of(tree: PoolTree, pool: Pool) -> list[tuple[PoolId, int, int]]:
    """Who owns what of a pool's prefix, by the tree: (owner, start, end), from position 0."""
    parts, end, owner = [], pool.prefix_len, pool
    while end:
        if owner.branch_pos < end:
            parts.append((owner.pool_id, owner.branch_pos, end))
            end = owner.branch_pos
        if end:
            owner = tree.get(owner.parent)
    return parts[::-1]


def own_runs(tree: PoolTree, gone: Mapping[PoolId, Gone], book: CellBook, runs: Runs) -> list[Run]:
    """Of what a slot holds, the part that no pool owns."""
    own = []
    for origin, start, end in runs:
        at = start
        for owner, n_cells in _owners(tree, gone, book.claims(origin), [(start, end)]):
            if owner is None:
                own.append(Run(origin, at, at + n_cells))
            at += n_cells
    return own


def owners_of(tree: PoolTree, gone: Mapping[PoolId, Gone], book: CellBook, runs: Runs) -> set[PoolId]:
    """Pools that own some of what a slot holds."""
    parts = (part for origin, start, end in runs for part in _owners(tree, gone, book.claims(origin), [(start, end)]))
    return {owner for owner, _ in parts if owner is not None}


def subtree_cells(tree: PoolTree, own: Mapping[PoolId, int], of_sessions: Mapping[PoolId, int]) -> dict[PoolId, int]:
    """Own cells of each pool, of everything below it and of their sessions. Pools without a cell are absent.

    Costs O(pools with cells and all above them), however many pools there are.
    """
    subtree = Counter(own)
    subtree.update(of_sessions)
    reached: dict[PoolId, Pool] = {}
    for pool_id in subtree:
        pool = tree.find(pool_id)
        while pool is not None and pool.pool_id not in reached:
            reached[pool.pool_id] = pool
            pool = tree.find(pool.parent)
    for pool in sorted(reached.values(), key=lambda pool: -pool.depth):
        if not pool.is_root:
            subtree[pool.parent] += subtree[pool.pool_id]
    return dict(subtree)


def _owners(
    tree: PoolTree,
    gone: Mapping[PoolId, Gone],
    claims: Sequence[tuple[PoolId, int]],
    stretches: Iterable[tuple[int, int]],
) -> list[tuple[PoolId | None, int]]:
    """Split stretches of one filling by owner, in order: (pool or None, cells)."""
    parts: list[tuple[PoolId | None, int]] = []
    for start, end in stretches:
        at = start
        while at < end:
            known = [(pool_id, to) for pool_id, to in claims if to > at and (pool_id in tree or pool_id in gone)]
            # The oldest claim of a pool that is still there, else the oldest.
            owner, to = next((c for c in known if c[0] in tree), known[0] if known else (None, end))
            if owner is None:
                parts.append((None, end - at))
                break
            # A pool's own range ends where the path to its root says.
            node: Pool | Gone | None = tree.find(owner) or gone.get(owner)
            to = min(to, end)
            while node is not None and at < node.branch_pos:
                to = min(to, node.branch_pos)
                node = tree.find(node.parent) or gone.get(node.parent)
            parts.append((node.pool_id if node is not None else None, to - at))
            at = to
    return parts


def kv_bytes(n_cells: int | None, bytes_per_token: float | None) -> int | None:
    """Turn cells into bytes; unknown stays unknown."""
    return None if n_cells is None or bytes_per_token is None else round(n_cells * bytes_per_token)
