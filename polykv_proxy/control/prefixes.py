"""Who begins with what, as the tree knows it: for states that begin behind a pool's tokens."""

from polykv_proxy.ids import PoolId, SeqId
from polykv_proxy.tree.tree import PoolTree


class Prefixes:
    """Asks nobody, and answers None where the tree does not know."""

    def __init__(self, tree: PoolTree):
        self._tree = tree

    def hash_in(self, seq_id: SeqId, n_tokens: int) -> int | None:
        """Hash of the first tokens that a pool's sequence holds."""
        pool = next((pool for pool in self._tree.residents() if pool.seq_id == seq_id), None)
        return self.hash_of(pool.pool_id, n_tokens) if pool is not None else None

    def hash_of(self, pool_id: PoolId | None, n_tokens: int) -> int | None:
        """Hash of a pool's first tokens."""
        pool = self._tree.find(pool_id) if pool_id is not None else None
        if pool is None or not 0 < n_tokens <= pool.prefix_len:
            return None
        return self._tree.hash_at(pool.pool_id, n_tokens)

    def sequence_with(self, pool_id: PoolId | None, n_tokens: int) -> SeqId | None:
        """The sequence of a resident pool that begins with the first tokens of this one."""
        pool = self._tree.find(pool_id) if pool_id is not None else None
        if pool is None or n_tokens > pool.prefix_len:
            return None
        holder = self._tree.holder(pool.pool_id, n_tokens)
        return holder.seq_id if holder is not None else None

    def is_warm(self, pool_id: PoolId | None) -> bool:
        """The pool is saved, and in nobody's sequence."""
        pool = self._tree.find(pool_id) if pool_id is not None else None
        return pool is not None and pool.residency == "warm"
