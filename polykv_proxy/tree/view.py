"""The JSON of ``GET /polykv/pools``, made from plain facts: the tree, the sessions, what the engine last said.

Pure, so that a view of 10,000 pools can be tested without a server. Cost: O(pools + sessions) shown.

Source:  design §4.2; unknown is ``null``, never 0
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from polykv_proxy.ids import PoolId
from polykv_proxy.tree.accounting import Accounts, SessionCells, account, kv_bytes
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts(SessionCells):
    """A session as the view shows it. ``state``: what its slot does, in the engine's word."""

    tps_ewma: float | None = None
    ttft_ms: float | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the engine's stats said last; None = not known.

    ``answers`` False: it is away, and what it holds by now nobody knows.
    """

    answers: bool = True
    bytes_per_token: float | None = None
    seq_ids_used: int | None = None
    seq_ids_max: int | None = None
    kv_cells_used: int | None = None
    kv_cells_total: int | None = None


def pools_view(
    tree: PoolTree,
    sessions: Iterable[SessionFacts],
    engine: EngineFacts,
    *,
    top: PoolId | None = None,
    unix_offset_s: float = 0.0,
) -> dict[str, Any]:
    """Show the whole tree, or the subtree of ``top``.

    Units:   unix_offset_s: Unix time minus the clock of the pools' *_s
    """
    pools: Sequence[Pool] = list(tree) if top is None else tree.subtree(top)
    of_pool: dict[PoolId | None, list[SessionFacts]] = defaultdict(list)
    shown = {pool.pool_id for pool in pools}
    counted = [session for session in sessions if top is None or session.pool_id in shown]
    for session in counted:
        of_pool[session.pool_id].append(session)
    accounts = account(pools, counted)
    base_depth = 0 if top is None else tree.get(top).depth
    return {
        "pools": [
            _pool_json(
                pool,
                [child.pool_id for child in tree.children(pool.pool_id)],
                of_pool.get(pool.pool_id, []),
                accounts=accounts,
                engine=engine,
                unix_offset_s=unix_offset_s,
            )
            for pool in pools
        ],
        "tree_depth": 1 + max((pool.depth for pool in pools), default=base_depth - 1) - base_depth,
        "seq_ids_used": engine.seq_ids_used,
        "seq_ids_max": engine.seq_ids_max,
        "kv_cells_used": engine.kv_cells_used,
        "kv_cells_total": engine.kv_cells_total,
        "kv_bytes_per_token": engine.bytes_per_token,
    }


def _pool_json(
    pool: Pool,
    children: Sequence[PoolId],
    sessions: Sequence[SessionFacts],
    *,
    accounts: Accounts,
    engine: EngineFacts,
    unix_offset_s: float,
) -> dict[str, Any]:
    own_cells = accounts.own_cells[pool.pool_id] if engine.answers else None
    subtree_cells = accounts.subtree_cells[pool.pool_id] if engine.answers else None
    bytes_per_token = engine.bytes_per_token
    return {
        "pool_id": pool.pool_id,
        "name": pool.name,
        "parent": pool.parent,
        "branch_pos": pool.branch_pos,
        "prefix_len": pool.prefix_len,
        "own_n_tokens": pool.own_n_tokens,
        "residency": pool.residency if engine.answers else None,
        "seq_id": pool.seq_id if engine.answers else None,
        "pinned": pool.pin,
        "orphaned_pin": pool.pin and not children and not sessions,
        "auto": pool.auto,
        "ttl_s": pool.ttl_s,
        "created_ts": pool.created_s + unix_offset_s,
        "last_access_ts": pool.last_access_s + unix_offset_s,
        "queries": pool.n_queries,
        "hits": pool.n_hits,
        "own_kv_cells": own_cells,
        "own_kv_bytes": kv_bytes(own_cells, bytes_per_token),
        "subtree_kv_cells": subtree_cells,
        "subtree_kv_bytes": kv_bytes(subtree_cells, bytes_per_token),
        "warm_bytes": 0,  # there is no warm tier yet
        "children": list(children),
        "sessions": [_session_json(session, bytes_per_token) for session in sessions],
    }


def _session_json(session: SessionFacts, bytes_per_token: float | None) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "prefix_n_tokens": session.pool_n_tokens,
        "suffix_n_tokens": session.suffix_n_tokens,
        "marginal_kv_bytes": kv_bytes(session.suffix_n_tokens, bytes_per_token),
        "tps_ewma": session.tps_ewma,
        "ttft_ms": session.ttft_ms,
        "state": session.state,
    }
