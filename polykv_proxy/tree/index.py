"""The longest-prefix index over all pools: a compressed trie over tokens, laid out in runs.

Every node stands for a prefix: one where a pool ends, or where pools part. The way from the root to a node leads over
runs (``run``): a run is one array of tokens with all nodes along it, and the pools that part from it go on in runs of
their own. A look-up compares the prompt with a run by memcmp, takes the last node that is reached, and goes on where
the prompt leaves. So it costs what the prompt is long and how often its way changes runs, not how many pools part.

Which way is a run and which leaves it has no meaning; it only decides how often a way changes. Tokens behind a run's
end prolong it, and a new pool whose way changes more than ``MAX_CHANGES`` times gets a way that is one run from the
root on (``_straighten``). That adds at most one change to any other way, and it is rare: it needs as many insertions
that each add a change.

Cost:    longest  O(len(prompt)) memcmp, and a few bisections per run passed, whatever the number of pools
         insert   O(own range); remove, rekey  O(runs above, until the best no longer changes)
         (``n_steps`` in the answers counts runs passed and bests looked at, so that tests can hold these to account)
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from polykv_proxy.errors import InvariantError
from polykv_proxy.ids import PoolId
from polykv_proxy.tree.prefix import TOKEN_BYTES
from polykv_proxy.tree.run import Block, Key, Node, Run

__all__ = ["MAX_CHANGES", "Found", "Key", "PrefixIndex"]

MAX_CHANGES = 32


@dataclass(frozen=True, slots=True)
class Found:
    """The longest match. ``whole``: some pool ends exactly there and ``pool_id`` is one that does."""

    pool_id: PoolId
    n_tokens: int
    whole: bool
    n_steps: int


class PrefixIndex:
    """All pools by their tokens. Knows keys and positions, nothing else about a pool."""

    def __init__(self) -> None:
        self._root = Node(0)
        self._trunk = Run(None, b"", [Block([self._root])])
        self._at: dict[PoolId, tuple[Node, Key]] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, pool_id: PoolId) -> bool:
        return pool_id in self._at

    def insert(self, key: Key, own: bytes, *, parent: PoolId | None, branch_pos: int) -> int:
        """Add a pool that follows ``parent`` up to ``branch_pos`` and has the token bytes ``own`` after it."""
        if key.pool_id in self._at:
            raise InvariantError(f"pool {key.pool_id} is indexed already")
        at = branch_pos if parent is not None else 0
        run, n_steps = self._trunk, 0
        if parent is not None and at > 0:
            run, n_steps = self._run_through(parent, at)
        # 1. Follow what is there already.
        pos = 0
        while True:
            n_steps += 1
            same = run.n_common(at, own, pos)
            pos += same
            at += same // TOKEN_BYTES
            node = run.node_at(at)
            side = node.sides.get(own[pos : pos + TOKEN_BYTES]) if node is not None else None
            if side is None:
                break
            run = side
        # 2. We stand inside a run: a node comes here. 3. Go on with what is new.
        if node is None:
            node = run.add(Node(at))
        new = own[pos:]
        if new:
            leaf = Node(at + len(new) // TOKEN_BYTES)
            if run.end == at:
                run.extend(new, leaf)
            else:
                node.hang(Run(node, new, [Block([leaf])]))
            node = leaf
        insort(node.pools, key)
        self._at[key.pool_id] = (node, key)
        n_steps += self._refresh(node)
        if len(way := self._way(node)) > MAX_CHANGES:
            n_steps += self._straighten(way)
        return n_steps

    def remove(self, pool_id: PoolId) -> int:
        """Take a pool out, and the nodes that nobody needs any more."""
        node, key = self._at.pop(pool_id)
        del node.pools[bisect_left(node.pools, key)]
        n_steps = self._refresh(node)
        self._prune(node)
        return n_steps

    def rekey(self, key: Key) -> int:
        """Give a pool another place in the order."""
        node, old = self._at[key.pool_id]
        if old == key:
            return 0
        del node.pools[bisect_left(node.pools, old)]
        insort(node.pools, key)
        self._at[key.pool_id] = (node, key)
        return self._refresh(node)

    def longest(self, prompt: bytes) -> Found | None:
        """Find the longest prefix of the prompt (token bytes) that any pool starts with, and the best pool for it."""
        run, at, n_steps = self._trunk, 0, 0
        while True:
            n_steps += 1
            at += run.n_common(at, prompt, at * TOKEN_BYTES) // TOKEN_BYTES
            node = run.node_at(at)
            begin = at * TOKEN_BYTES
            side = node.sides.get(prompt[begin : begin + TOKEN_BYTES]) if node is not None else None
            if side is None:
                break
            run = side
        if at == 0:
            return None
        if node is not None and node.pools:
            return Found(node.pools[0].pool_id, at, True, n_steps)
        return Found(run.best_from(at).pool_id, at, False, n_steps)

    def best_through(self, pool_id: PoolId, n_tokens: int) -> Key:
        """Give the best pool among all that start with the first ``n_tokens`` tokens of this one."""
        return self._run_through(pool_id, n_tokens)[0].best_from(n_tokens)

    def equals(self, pool_id: PoolId) -> list[PoolId]:
        """Give all pools with just the tokens of this one, itself included, the best first."""
        return [key.pool_id for key in self._at[pool_id][0].pools]

    def goes_on(self, pool_id: PoolId) -> bool:
        """Whether another pool starts with all tokens of this one, and has more."""
        node = self._at[pool_id][0]
        return bool(node.sides) or node is not node.block.run.last

    def beginnings(self, pool_id: PoolId) -> Iterator[PoolId]:
        """Give all pools that this one starts with, itself and its equals first, then the longest first."""
        node = self._at[pool_id][0]
        end, run = node.end, node.block.run
        while True:
            for block in reversed(run.blocks):
                for node in reversed(block.nodes) if block.nodes[0].end <= end else ():
                    if node.end <= end:
                        yield from (key.pool_id for key in node.pools)
            if run.top is None:
                return
            end, run = run.top.end, run.top.block.run

    def _run_through(self, pool_id: PoolId, n_tokens: int) -> tuple[Run, int]:
        """The run on the way to a pool that has token ``n_tokens`` - 1, and how many runs were looked at."""
        node, n_steps = self._at[pool_id][0], 1
        if not 0 < n_tokens <= node.end:
            raise InvariantError(f"position {n_tokens} is outside pool {pool_id}")
        run = node.block.run
        while run.top is not None and run.start >= n_tokens:
            run, n_steps = run.top.block.run, n_steps + 1
        return run, n_steps

    def _way(self, node: Node) -> list[Run]:
        """The runs that lead to a node, without the trunk: the last one first."""
        way, run = [], node.block.run
        while run.top is not None:
            way.append(run)
            run = run.top.block.run
        return way

    def _refresh(self, node: Node) -> int:
        """Bring the bests at and above a node up to date, as far as they change."""
        n_steps = 0
        while True:
            n_steps += 1
            old, new = node.own, node.find_own()
            if new == old:
                return n_steps
            node.own = new
            block, run = node.block, node.block.run
            if new < block.best:
                block.best = new
            elif old == block.best:
                n_steps += len(block.nodes)
                block.find_best()
            if new < run.best:
                run.best = new
            elif old == run.best:
                n_steps += len(run.blocks)
                run.find_best()
            else:
                return n_steps
            if run.top is None or run.best == old:
                return n_steps
            run.top.push(run)
            node = run.top

    def _prune(self, node: Node) -> None:
        """Take away a dead end, then the node before it if that only passes through now. No best changes by it."""
        run = node.block.run
        if not node.pools and not node.sides and node is run.last and node is not self._root:
            first = run.first
            run.drop(node)
            if run.blocks:
                node = run.last
            elif run.top is not None:
                node, run = run.top, run.top.block.run
                del node.sides[first]
        if node.pools or node is self._root:
            return
        if node is run.last and len(node.sides) == 1:
            (side,) = node.sides.values()
            run.append(side)
            run.drop(node)
        elif node is not run.last and not node.sides:
            run.drop(node)

    def _straighten(self, way: list[Run]) -> int:
        """Make a way one run from the root on. What went on along its runs leaves them now."""
        for run in way:
            node = run.top
            if node is None:
                raise InvariantError("the trunk leaves no other run")
            tail = node.block.run.cut_behind(node)
            del node.sides[run.first]
            if tail is not None:
                node.hang(tail)
            node.own = node.find_own()
            node.block.find_best()
        for run in reversed(way):
            self._trunk.append(run)
        self._trunk.find_best()
        return len(way)
