"""Who owns which KV cells: by ownership, never by membership.

A shared cell belongs to many sequences, so adding up per sequence counts it many times. Here every cell has one
owner: position p of a pool belongs to the pool with D <= p < L on the path to its root, what a session has beyond
its pool belongs to the session. So own cells add up to the engine's used cells.

A pool's own cells exist as long as anybody's sequence holds them: its own, a descendant's (which holds the parent's
[0, D) in front of its own range) or that of a session attached to it. A cold pool nobody holds has none.

Units:   *_cells one token's keys and values; *_bytes = cells * bytes_per_token, None while that is not known
Source:  design §4.2, §3.4 (implicit reference counting)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.tree.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCells:
    """What a session's slot holds: ``pool_n_tokens`` shared with its pool, ``suffix_n_tokens`` behind them."""

    session_id: SessionId
    pool_id: PoolId | None
    pool_n_tokens: int
    suffix_n_tokens: int


@dataclass(frozen=True, slots=True)
class Accounts:
    """Cells by pool. ``unpooled_cells``: sessions without a pool, or whose pool is not among those counted."""

    own_cells: dict[PoolId, int] = field(default_factory=dict)
    subtree_cells: dict[PoolId, int] = field(default_factory=dict)
    sessions_cells: int = 0
    unpooled_cells: int = 0

    @property
    def total_cells(self) -> int:
        """What the engine's used cells are when nothing runs (unified cache, dense model)."""
        return sum(self.own_cells.values()) + self.sessions_cells + self.unpooled_cells


def account(pools: Sequence[Pool], sessions: Iterable[SessionCells] = ()) -> Accounts:
    """Count own and subtree cells of pools (parents before children) and of the sessions attached to them.

    One pass up: O(pools + sessions).
    """
    known = {pool.pool_id for pool in pools}
    held = {pool.pool_id: pool.prefix_len if pool.residency == "resident" else 0 for pool in pools}
    subtree = dict.fromkeys(held, 0)
    sessions_cells = unpooled_cells = 0
    for session in sessions:
        if session.pool_id is None or session.pool_id not in known:
            unpooled_cells += session.pool_n_tokens + session.suffix_n_tokens
            continue
        held[session.pool_id] = max(held[session.pool_id], session.pool_n_tokens)
        subtree[session.pool_id] += session.suffix_n_tokens
        sessions_cells += session.suffix_n_tokens
    own: dict[PoolId, int] = {}
    for pool in reversed(pools):
        # Everybody below has been here: held is now the highest position that any sequence below still holds.
        own[pool.pool_id] = max(0, held[pool.pool_id] - pool.branch_pos)
        subtree[pool.pool_id] += own[pool.pool_id]
        if pool.parent in known:
            held[pool.parent] = max(held[pool.parent], min(held[pool.pool_id], pool.branch_pos))
            subtree[pool.parent] += subtree[pool.pool_id]
    return Accounts(own, subtree, sessions_cells, unpooled_cells)


def copied_cells(pools: Iterable[Pool], sessions: Iterable[SessionCells]) -> int:
    """Count the cells the same residents would need if nobody shared: every prefix in full, for pool and session."""
    resident = sum(pool.prefix_len for pool in pools if pool.residency == "resident")
    return resident + sum(session.pool_n_tokens + session.suffix_n_tokens for session in sessions)


def kv_bytes(n_cells: int | None, bytes_per_token: float | None) -> int | None:
    """Turn cells into bytes; unknown stays unknown."""
    return None if n_cells is None or bytes_per_token is None else round(n_cells * bytes_per_token)
