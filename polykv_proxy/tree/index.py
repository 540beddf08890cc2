"""The longest-prefix index over all pools: a compressed trie over tokens.

Every node stands for a prefix; its label is the run of tokens between its parent's prefix and its own, kept as bytes
so that one memcmp compares a whole run. A pool sits at the node of its full prefix. Nodes exist only where a pool
ends or two pools diverge, so there are fewer than twice as many nodes as pools.

Each node knows the best pool of its subtree by ``Key`` (smallest first). Bests of the children wait in a heap with
lazy deletion, so a change climbs only as far as it alters the best, and costs O(log fan-out) per level, also below
a node with 100,000 children.

Cost:    longest  O(len(prompt)) memcmp plus one dict look-up per node passed, whatever the number of pools
         insert   O(own range); remove, rekey  O(nodes above, until the best no longer changes)
         (``n_steps`` in the answers counts nodes touched, so that tests can hold these to account)
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from polykv_proxy.errors import InvariantError
from polykv_proxy.ids import PoolId
from polykv_proxy.tree.prefix import TOKEN_BYTES

_CHUNK = 4096 * TOKEN_BYTES


class Key(NamedTuple):
    """Order among pools that match equally far: the smallest is the best."""

    rank: int
    depth: int
    pool_id: PoolId


@dataclass(frozen=True, slots=True)
class Found:
    """The longest match. ``whole``: some pool ends exactly there and ``pool_id`` is one that does."""

    pool_id: PoolId
    n_tokens: int
    whole: bool
    n_steps: int


class _Node:
    __slots__ = ("best", "children", "end", "heap", "label", "parent", "pools")

    def __init__(self, parent: "_Node | None", label: bytes, end: int):
        self.parent = parent
        self.label = label
        self.end = end  # tokens from position 0 to this node
        self.children: dict[bytes, _Node] = {}  # by the first token of the child's label
        self.pools: list[Key] = []  # pools that end here, sorted
        self.heap: list[tuple[Key, bytes]] = []  # bests of the children; entries may be stale
        self.best: Key | None = None

    @property
    def start(self) -> int:
        return self.end - len(self.label) // TOKEN_BYTES

    def push_child(self, child: "_Node") -> None:
        """Note a child's (new) best."""
        if child.best is None:
            raise InvariantError("a trie node without a pool below it")
        heappush(self.heap, (child.best, child.label[:TOKEN_BYTES]))

    def find_best(self) -> Key | None:
        """Drop what is stale on top; keep the heap within a constant factor of the fan-out."""
        if len(self.heap) > 2 * len(self.children) + 8:
            self.heap = [(c.best, first) for first, c in self.children.items() if c.best is not None]
            heapify(self.heap)
        while self.heap:
            key, first = self.heap[0]
            child = self.children.get(first)
            if child is not None and child.best == key:
                break
            heappop(self.heap)
        below = self.heap[0][0] if self.heap else None
        here = self.pools[0] if self.pools else None
        if below is None or here is None:
            return here if below is None else below
        return min(below, here)


class PrefixIndex:
    """All pools by their tokens. Knows keys and positions, nothing else about a pool."""

    def __init__(self) -> None:
        self._root = _Node(None, b"", 0)
        self._at: dict[PoolId, tuple[_Node, Key]] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, pool_id: PoolId) -> bool:
        return pool_id in self._at

    def insert(self, key: Key, own: bytes, *, parent: PoolId | None, branch_pos: int) -> int:
        """Add a pool that follows ``parent`` up to ``branch_pos`` and has the token bytes ``own`` after it."""
        if key.pool_id in self._at:
            raise InvariantError(f"pool {key.pool_id} is indexed already")
        n_steps = 0
        if parent is None or branch_pos == 0:
            node, over = self._root, 0
        else:
            node, over, n_steps = self._locate(parent, branch_pos)
        # 1. Follow what is there already. ``over``: tokens of node.label that lie beyond our position.
        pos, end = 0, len(own)
        while pos < end:
            n_steps += 1
            if over:
                begin = len(node.label) - over * TOKEN_BYTES
                same = _common(node.label, begin, own, pos)
                pos += same
                over -= same // TOKEN_BYTES
                if over:
                    break
            elif (child := node.children.get(own[pos : pos + TOKEN_BYTES])) is not None:
                node, over = child, len(child.label) // TOKEN_BYTES
            else:
                break
        # 2. We stand inside a label: cut it there. 3. Hang up what is new.
        if over:
            node = self._split(node, over)
        if pos < end:
            leaf = _Node(node, own[pos:], node.end + (end - pos) // TOKEN_BYTES)
            node.children[own[pos : pos + TOKEN_BYTES]] = leaf
            node = leaf
        insort(node.pools, key)
        self._at[key.pool_id] = (node, key)
        return n_steps + self._climb(node)

    def remove(self, pool_id: PoolId) -> int:
        """Take a pool out and fold nodes that nobody needs any more."""
        node, key = self._at.pop(pool_id)
        del node.pools[bisect_left(node.pools, key)]
        n_steps = 1
        parent = node.parent
        if parent is not None and not node.pools:
            if not node.children:
                del parent.children[node.label[:TOKEN_BYTES]]
                node = parent
            if len(node.children) == 1 and not node.pools and node.parent is not None:
                node = self._fold(node)
        return n_steps + self._climb(node)

    def rekey(self, key: Key) -> int:
        """Give a pool another place in the order."""
        node, old = self._at[key.pool_id]
        if old == key:
            return 0
        del node.pools[bisect_left(node.pools, old)]
        insort(node.pools, key)
        self._at[key.pool_id] = (node, key)
        return 1 + self._climb(node)

    def longest(self, prompt: bytes) -> Found | None:
        """Find the longest prefix of the prompt (token bytes) that any pool starts with, and the best pool for it."""
        node, pos, n_steps = self._root, 0, 0
        while True:
            child = node.children.get(prompt[pos : pos + TOKEN_BYTES])
            if child is None:
                break
            n_steps += 1
            if not prompt.startswith(child.label, pos):
                pos += _common(child.label, 0, prompt, pos)
                return Found(_best(child).pool_id, pos // TOKEN_BYTES, False, n_steps)
            node, pos = child, pos + len(child.label)
        if pos == 0:
            return None
        if node.pools:
            return Found(node.pools[0].pool_id, node.end, True, n_steps)
        return Found(_best(node).pool_id, node.end, False, n_steps)

    def best_through(self, pool_id: PoolId, n_tokens: int) -> Key:
        """Give the best pool among all that start with the first ``n_tokens`` tokens of this one."""
        return _best(self._locate(pool_id, n_tokens)[0])

    def _locate(self, pool_id: PoolId, n_tokens: int) -> tuple[_Node, int, int]:
        """Find the node whose label covers position n_tokens of a pool, and by how many tokens it goes beyond."""
        node, n_steps = self._at[pool_id][0], 1
        if not 0 < n_tokens <= node.end:
            raise InvariantError(f"position {n_tokens} is outside pool {pool_id}")
        while node.parent is not None and node.parent.end >= n_tokens:
            node, n_steps = node.parent, n_steps + 1
        return node, node.end - n_tokens, n_steps

    def _split(self, node: _Node, over: int) -> _Node:
        """Cut a node's label so that ``over`` tokens stay with it; the new node above takes the rest."""
        parent = node.parent
        if parent is None:
            raise InvariantError("the root has no label")
        cut = len(node.label) - over * TOKEN_BYTES
        upper = _Node(parent, node.label[:cut], node.end - over)
        node.label = node.label[cut:]
        node.parent = upper
        upper.children[node.label[:TOKEN_BYTES]] = node
        upper.best = node.best
        upper.push_child(node)
        parent.children[upper.label[:TOKEN_BYTES]] = upper
        return upper

    def _fold(self, node: _Node) -> _Node:
        """Join a node that only passes through with its one child. Its place in the parent stays."""
        (child,) = node.children.values()
        parent = node.parent
        if parent is None:
            raise InvariantError("the root is never folded")
        child.label = node.label + child.label
        child.parent = parent
        first = child.label[:TOKEN_BYTES]
        parent.children[first] = child
        if child.best != node.best:
            parent.push_child(child)
        return parent

    def _climb(self, node: _Node) -> int:
        """Bring the bests above up to date, as far as they change."""
        n_steps = 0
        while True:
            n_steps += 1
            best = node.find_best()
            if best == node.best:
                return n_steps
            node.best = best
            if node.parent is None:
                return n_steps
            node.parent.push_child(node)
            node = node.parent


def _best(node: _Node) -> Key:
    if node.best is None:
        raise InvariantError("a trie node without a pool below it")
    return node.best


def _common(label: bytes, label_from: int, other: bytes, other_from: int) -> int:
    """Count equal bytes, in whole tokens."""
    n = min(len(label) - label_from, len(other) - other_from)
    done = 0
    step = _CHUNK
    while done < n:
        size = min(step, n - done)
        if label[label_from + done : label_from + done + size] == other[other_from + done : other_from + done + size]:
            done += size
        elif size == TOKEN_BYTES:
            break
        else:
            step = max(TOKEN_BYTES, size // 2 // TOKEN_BYTES * TOKEN_BYTES)
    return done
