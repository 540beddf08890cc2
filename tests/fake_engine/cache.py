"""Sequences and cells of a unified KV cache, as exactly as a test needs them.

A cell is a number; a sequence is a list of tokens and of the cells that hold them. Sharing copies cell numbers, so
``used`` is the size of the union: a shared cell counts once and returns with its last holder. New tokens take the
lowest free cells and old ones never move, so ``hi`` stays high until whoever sits there leaves.
"""

import itertools
import struct
from dataclasses import dataclass, field

import xxhash


def tokens_hash(tokens: list[int]) -> str:
    return f"{xxhash.xxh64_intdigest(struct.pack(f'<{len(tokens)}i', *tokens), seed=0):016x}"


def lcp(a: list[int], b: list[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


KEPT_BEFORE_END = (64, 4)


@dataclass
class Sequence:
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    """After so many tokens its state was kept, for a memory that cannot be cut elsewhere."""

    def cut(self, n: int) -> None:
        del self.tokens[n:]
        del self.cells[n:]
        self.kept = {at for at in self.kept if at <= n}

    def share_from(self, other: "Sequence", n: int) -> None:
        """Become ``other[0, n)`` without new cells."""
        self.tokens = other.tokens[:n]
        self.cells = other.cells[:n]
        self.kept = {at for at in other.kept if at <= n}

    def keep_before(self, end: int) -> None:
        """As llama-server does on the way through a prompt that ends there."""
        self.kept |= {end - n for n in KEPT_BEFORE_END if 0 < end - n < len(self.tokens)}


@dataclass
class PoolSeq(Sequence):
    seq: int = -1
    state: str = "free"
    gen: int = 0
    tag: str = ""
    parent_seq: int = -1
    branch_pos: int = 0
    n_attach: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "seq": self.seq,
            "state": self.state,
            "gen": self.gen,
            "tag": self.tag,
            "n_tokens": len(self.tokens),
            "tokens_hash": tokens_hash(self.tokens) if self.tokens else "",
            "parent_seq": self.parent_seq,
            "branch_pos": self.branch_pos,
            "n_attach": self.n_attach,
        }


@dataclass
class Slot(Sequence):
    id: int = 0
    state: str = "idle"
    id_task: int = -1
    n_prompt: int = 0
    n_cached: int = 0
    pool_seq: int = -1
    pool_gen: int = -1
    n_pool_shared: int = 0
    n_of_pool: int = 0
    """Of these, those of the pool in ``pool_seq``: a slot may hold the end of one that is gone behind them."""
    n_decoded: int = 0
    n_decoded_cum: int = 0
    n_in_batch: int = 0
    """Tokens of its prompt that are being decoded: stats count them, and the cells are not taken yet."""
    tps_ewma: float | None = None
    """What the stats tell; nothing in here measures."""
    t_last: float = 0.0


class OutOfCells(Exception):
    def __init__(self, need: int, free: int):
        super().__init__(f"need {need} cells, {free} free")
        self.need, self.free = need, free


class Cache:
    """``n_cells`` cells; ``sequences`` are all that may hold them."""

    def __init__(self, n_cells: int):
        self.n_cells = n_cells
        self.sequences: list[Sequence] = []
        self.slots: list[Slot] = []

    def _held(self) -> set[int]:
        held: set[int] = set()
        for sequence in self.sequences:
            held.update(sequence.cells)
        return held

    def used(self) -> int:
        return len(self._held())

    def hi(self) -> int:
        """Highest used cell + 1."""
        return max(self._held(), default=-1) + 1

    def free(self) -> int:
        return self.n_cells - self.used()

    def lowest_free(self, n: int) -> list[int]:
        """Raises OutOfCells."""
        held = self._held()
        if n > self.n_cells - len(held):
            raise OutOfCells(n, self.n_cells - len(held))
        return list(itertools.islice((cell for cell in range(self.n_cells) if cell not in held), n))

    def available(self) -> int:
        """Free cells, and those of idle slots that nobody else shares."""
        return self.free() + sum(len(s.tokens) - s.n_pool_shared for s in self.slots if s.state == "idle")

    def take(self, sequence: Sequence, tokens: list[int]) -> None:
        """As ``append``, clearing idle slots if need be."""
        for slot in self.slots:
            if self.free() < len(tokens) and slot.state == "idle":
                slot.cut(0)
                slot.n_pool_shared, slot.pool_seq = 0, -1
        self.append(sequence, tokens)

    def append(self, sequence: Sequence, tokens: list[int]) -> None:
        """New cells for ``tokens`` at the end. Raises OutOfCells before anything changed."""
        sequence.cells += self.lowest_free(len(tokens))
        sequence.tokens += tokens
