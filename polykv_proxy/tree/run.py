"""Runs: the stretches of tokens that the index is made of, each with the nodes along it.

A run is one array of tokens, so that a prompt is compared with all of it by memcmp, however many pools end on it or
part from it. Its nodes are in the order of their positions, in blocks that know the best pool of their nodes: the best
of all pools through some position is then found among a few bests, and a change touches one block.

Cost:    for a run of n nodes  find a node  O(log n); the best from a position on  O(BLOCK + n / BLOCK) compares
"""

from bisect import bisect_left
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from polykv_proxy.errors import InvariantError
from polykv_proxy.ids import PoolId
from polykv_proxy.tree.prefix import TOKEN_BYTES

BLOCK = 128
"""Nodes of a block, about the square root of the largest number that stand on one run."""

_CHUNK = 4096 * TOKEN_BYTES


class Key(NamedTuple):
    """Order among pools that match equally far: the smallest is the best."""

    rank: int
    depth: int
    pool_id: PoolId


NOBODY = Key(2**31, 0, PoolId(0))
"""Comes after every pool."""


class Node:
    """A position where pools end, or where other runs leave this one. Both may be so."""

    __slots__ = ("block", "end", "heap", "own", "pools", "sides")

    block: "Block"

    def __init__(self, end: int):
        self.end = end  # tokens from position 0 to this node
        self.pools: list[Key] = []  # pools that end here, sorted
        self.sides: dict[bytes, Run] = {}  # runs that leave here, by their first token
        self.heap: list[tuple[Key, bytes]] = []  # bests of the sides; entries may be stale
        self.own = NOBODY  # the best pool that ends here or on a side; not those further along the run

    def hang(self, side: "Run") -> None:
        """Let a run leave here."""
        self.sides[side.first] = side
        self.push(side)

    def push(self, side: "Run") -> None:
        """Note a side's (new) best."""
        heappush(self.heap, (side.best, side.first))

    def find_own(self) -> Key:
        """Drop what is stale on top of the heap; keep it within a constant factor of the sides."""
        if len(self.heap) > 2 * len(self.sides) + 8:
            self.heap = [(side.best, first) for first, side in self.sides.items()]
            heapify(self.heap)
        while self.heap:
            key, first = self.heap[0]
            side = self.sides.get(first)
            if side is not None and side.best == key:
                break
            heappop(self.heap)
        below = self.heap[0][0] if self.heap else NOBODY
        return min(below, self.pools[0]) if self.pools else below


class Block:
    """Some neighbouring nodes of a run."""

    __slots__ = ("best", "nodes", "run")

    run: "Run"

    def __init__(self, nodes: list[Node]):
        self.nodes = nodes
        for node in nodes:
            node.block = self
        self.find_best()

    @property
    def end(self) -> int:
        return self.nodes[-1].end

    def find_best(self) -> None:
        self.best = min(node.own for node in self.nodes)


class Run:
    """Tokens [start, end) of all pools through it. ``top``: the node it leaves; None for the trunk."""

    __slots__ = ("best", "blocks", "start", "tokens", "top")

    def __init__(self, top: Node | None, tokens: bytes | bytearray, blocks: Iterable[Block]):
        self.top = top
        self.start = top.end if top is not None else 0
        self.tokens = bytearray(tokens)
        self.blocks = list(blocks)
        for block in self.blocks:
            block.run = self
        self.find_best()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def first(self) -> bytes:
        """Its first token: where it hangs on ``top``."""
        return bytes(self.tokens[:TOKEN_BYTES])

    @property
    def last(self) -> Node:
        return self.blocks[-1].nodes[-1]

    def find_best(self) -> None:
        self.best = min((block.best for block in self.blocks), default=NOBODY)

    def n_common(self, at: int, other: bytes, other_from: int) -> int:
        """Count the bytes, in whole tokens, that this run has from position ``at`` and ``other`` from there."""
        begin = (at - self.start) * TOKEN_BYTES
        mine, n = self.tokens, min(len(self.tokens) - begin, len(other) - other_from)
        done, step = 0, _CHUNK
        while done < n:
            size = min(step, n - done)
            if mine[begin + done : begin + done + size] == other[other_from + done : other_from + done + size]:
                done += size
            elif size == TOKEN_BYTES:
                break
            else:
                step = max(TOKEN_BYTES, size // 2 // TOKEN_BYTES * TOKEN_BYTES)
        return done

    # Nodes ---------------------------------------------------------------------------------------------------------

    def node_at(self, at: int) -> Node | None:
        """The node exactly there."""
        i, j = self._place(at)
        node = self.blocks[i].nodes[j] if i < len(self.blocks) else None
        return node if node is not None and node.end == at else None

    def best_from(self, at: int) -> Key:
        """The best of the pools that go through this position."""
        i, j = self._place(at)
        if i == len(self.blocks):
            raise InvariantError(f"position {at} is behind the run's end {self.end}")
        here = min(node.own for node in self.blocks[i].nodes[j:])
        return min([here, *(block.best for block in self.blocks[i + 1 :])])

    def add(self, node: Node) -> Node:
        """Put a new node, of nobody yet, on this run."""
        i, j = self._place(node.end)
        if i == len(self.blocks):  # behind the last one
            i, j = i - 1, len(self.blocks[-1].nodes)
        block = self.blocks[i]
        block.nodes.insert(j, node)
        node.block = block
        if len(block.nodes) > BLOCK:
            behind = Block(block.nodes[BLOCK // 2 :])
            behind.run = self
            del block.nodes[BLOCK // 2 :]
            block.find_best()
            self.blocks.insert(i + 1, behind)
        return node

    def drop(self, node: Node) -> None:
        """Take a node off that nobody needs, and the tokens that lead only to it."""
        block = node.block
        block.nodes.remove(node)
        if block.nodes:
            block.find_best()
        else:
            self.blocks.remove(block)
        if self.end == node.end:
            del self.tokens[(self.last.end - self.start) * TOKEN_BYTES if self.blocks else 0 :]

    def extend(self, tokens: bytes, node: Node) -> None:
        """Go on behind the end, up to a new node."""
        self.tokens += tokens
        self.add(node)

    def cut_behind(self, node: Node) -> "Run | None":
        """Make what follows a node a run that leaves there. It is not hung up yet."""
        if node is self.last:
            return None
        block = node.block
        i, j = self.blocks.index(block), block.nodes.index(node) + 1
        follows = self.blocks[i + 1 :]
        if j < len(block.nodes):
            follows.insert(0, Block(block.nodes[j:]))
            del block.nodes[j:]
            block.find_best()
        del self.blocks[i + 1 :]
        cut = (node.end - self.start) * TOKEN_BYTES
        tail = Run(node, self.tokens[cut:], follows)
        del self.tokens[cut:]
        return tail

    def append(self, side: "Run") -> None:
        """Go on with a run that leaves at the end. Small blocks are joined, so that there are never many."""
        self.tokens += side.tokens
        for block in side.blocks:
            before = self.blocks[-1]
            if len(before.nodes) + len(block.nodes) <= BLOCK:
                for node in block.nodes:
                    node.block = before
                before.nodes += block.nodes
                before.best = min(before.best, block.best)
            else:
                block.run = self
                self.blocks.append(block)

    def _place(self, at: int) -> tuple[int, int]:
        """Block and place in it of the first node at or behind a position."""
        i = bisect_left(self.blocks, at, key=_end)
        return i, bisect_left(self.blocks[i].nodes, at, key=_end) if i < len(self.blocks) else 0


_end = attrgetter("end")
