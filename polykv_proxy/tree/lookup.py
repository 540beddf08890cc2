"""``PoolLookup``: every question that can be asked of the pools there are, by id, name, parent and tokens. Changes
nothing; ``tree`` does.
"""

from array import array
from collections.abc import Iterator

from polykv_proxy.errors import InvariantError, PoolNotFound
from polykv_proxy.ids import ROOT, PoolId
from polykv_proxy.tree.index import Key, PrefixIndex
from polykv_proxy.tree.pool import Match, Pool, Residency
from polykv_proxy.tree.prefix import Tokens, hash_tokens, lcp_tokens

_RANK: dict[Residency, int] = {"resident": 0, "materializing": 1, "warm": 2, "cold": 3}


class PoolLookup:
    """All pools. Iterates parents before children."""

    def __init__(self) -> None:
        self._pools: dict[PoolId, Pool] = {}
        self._children: dict[PoolId, dict[PoolId, None]] = {ROOT: {}}
        self._residents: dict[PoolId, None] = {}
        self._names: dict[str, PoolId] = {}
        self._index = PrefixIndex()

    def __len__(self) -> int:
        return len(self._pools)

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def __contains__(self, pool_id: object) -> bool:
        return pool_id in self._pools

    # Look up --------------------------------------------------------------------------------------------------------

    def find(self, ref: int | str) -> Pool | None:
        """Give the pool of an id, of an id's digits, or of a name."""
        if isinstance(ref, str):
            if ref.isascii() and ref.isdigit():
                return self._pools.get(PoolId(int(ref))) if len(ref) < 20 else None
            return self._pools.get(self._names.get(ref, ROOT))
        return self._pools.get(PoolId(ref))

    def get(self, ref: int | str) -> Pool:
        """Give the pool of an id or a name.

        Raises:  PoolNotFound (404)
        """
        pool = self.find(ref)
        if pool is None:
            raise PoolNotFound(f"no pool {str(ref)[:64]!r}" if isinstance(ref, str) else f"no pool {ref}")
        return pool

    def children(self, pool_id: PoolId) -> list[Pool]:
        return [self._pools[child] for child in self._children[pool_id]]

    def roots(self) -> list[Pool]:
        return self.children(ROOT)

    def ancestors(self, pool_id: PoolId) -> list[Pool]:
        """Give the pools above this one, nearest first."""
        above = []
        pool = self._pools[pool_id]
        while not pool.is_root:
            pool = self._pools[pool.parent]
            above.append(pool)
        return above

    def subtree(self, pool_id: PoolId) -> list[Pool]:
        """Give this pool and everything below it, parents before children."""
        order = [self._pools[pool_id]]
        for pool in order:
            order.extend(self.children(pool.pool_id))
        return order

    def residents(self) -> list[Pool]:
        """Give the pools that have a sequence: few, however many there are in all."""
        return [self._pools[pool_id] for pool_id in self._residents]

    def depth(self) -> int:
        """Count the levels of the tree: 0 without pools, 1 with roots only."""
        return 1 + max((pool.depth for pool in self), default=-1)

    # Tokens ---------------------------------------------------------------------------------------------------------

    def tokens(self, pool_id: PoolId) -> Tokens:
        """Give the full prefix [0, L), put together from the ranges of the ancestors."""
        full = array("i")
        for pool, end in self._ranges(pool_id, self._pools[pool_id].prefix_len):
            full += pool.own[: end - pool.branch_pos]
        return full

    def hash_at(self, pool_id: PoolId, n_tokens: int) -> int:
        """Give the hash of the first ``n_tokens`` tokens; without touching a token unless the pool was restored."""
        if not 0 < n_tokens <= self._pools[pool_id].prefix_len:
            raise InvariantError(f"position {n_tokens} is outside pool {pool_id}")
        pool = self._pools[pool_id]
        while n_tokens <= pool.branch_pos:
            pool = self._pools[pool.parent]
        if pool.own_hashes is not None:
            return pool.own_hashes[n_tokens - pool.branch_pos - 1]
        return pool.tokens_hash if n_tokens == pool.prefix_len else hash_tokens(self.tokens(pool.pool_id)[:n_tokens])

    def lcp(self, pool_id: PoolId, tokens: Tokens) -> int:
        """Count how many leading tokens a prompt shares with a pool. Token-exact."""
        n = 0
        for pool, end in self._ranges(pool_id, self._pools[pool_id].prefix_len):
            want = end - pool.branch_pos
            got = lcp_tokens(pool.own, tokens, b_from=pool.branch_pos, n_max=want)
            n += got
            if got < want:
                break
        return n

    def match(self, tokens: Tokens) -> Match | None:
        """Find the pool that a prompt shares the longest prefix with. None when not even the first token fits.

        The contract, for the longest common prefix P over all pools; among the pools that share P tokens:
            1. a pool that the prompt contains entirely (L == P) beats one that it leaves midway;
            2. then the cheapest to have: resident, materializing, warm, cold;
            3. then the one nearest to its root: of a pool and its heirs that is the one owning token P - 1, so that
               nobody is held resident for tokens he only inherited;
            4. then the lowest id.
        Costs O(len(tokens)), whatever the number of pools.
        """
        found = self._index.longest(tokens.tobytes())
        return None if found is None else Match(found.pool_id, found.n_tokens, found.whole)

    def match_whole(self, tokens: Tokens) -> Match | None:
        """Find the longest pool that a prompt contains entirely. None when there is none."""
        found = self._index.longest(tokens.tobytes())
        for pool_id in self._index.beginnings(found.pool_id) if found is not None else ():
            n_tokens = self._pools[pool_id].prefix_len
            if found is not None and n_tokens <= found.n_tokens:
                return Match(pool_id, n_tokens, whole=True)
        return None

    def holder(self, pool_id: PoolId, n_tokens: int | None = None) -> Pool | None:
        """Give a resident pool whose sequence holds the first ``n_tokens`` tokens of this one (default: all).

        The pool itself if it is resident, else a descendant, or any other pool that starts with the same tokens.
        """
        pool = self._pools[pool_id]
        if pool.residency == "resident":
            return pool
        best = self._index.best_through(pool_id, pool.prefix_len if n_tokens is None else n_tokens)
        return self._pools[best.pool_id] if best.rank == _RANK["resident"] else None

    def holders(self) -> dict[PoolId, Pool]:
        """Give ``holder`` of all pools that have one: few, however many there are in all."""
        residents, held = sorted(self.residents(), key=key_of), {}
        for pool in residents:
            for begins in self._index.beginnings(pool.pool_id):
                if begins in held:  # and so are those that are shorter, by the same or a better one
                    break
                held[begins] = pool
        return held | {pool.pool_id: pool for pool in residents}

    def twins(self, pool_id: PoolId) -> list[Pool]:
        """Give all pools with just the tokens of this one, itself included."""
        return [self._pools[twin] for twin in self._index.equals(pool_id)]

    def is_continued(self, pool_id: PoolId) -> bool:
        """Whether another pool starts with all tokens of this one, and has more."""
        return self._index.goes_on(pool_id)

    # Inside ---------------------------------------------------------------------------------------------------------

    def _ranges(self, pool_id: PoolId, end: int) -> list[tuple[Pool, int]]:
        """Split [0, end) of a pool into who owns what: (owner, end of his part), from position 0."""
        parts = []
        pool = self._pools[pool_id]
        while True:
            if pool.branch_pos < end:
                parts.append((pool, end))
                end = pool.branch_pos
            if end == 0:
                return parts[::-1]
            pool = self._pools[pool.parent]


def key_of(pool: Pool) -> Key:
    return Key(_RANK[pool.residency], pool.depth, pool.pool_id)
