"""The JSON of ``GET /polykv/pools``, made from plain facts: the tree, the sessions, what the engine last said.

Pure, so that a view of 10,000 pools can be tested without a server. Cost: O(pools + sessions) shown.

Source:  design §4.2; unknown is ``null``, never 0
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polykv_proxy.ids import PoolId
from polykv_proxy.tree.accounting import Accounts, Gone, SessionCells, kv_bytes, subtree_cells
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionFacts:
    """``in_use``: pools with somebody on them or below. ``grace_end_s``: of a pool that nobody uses."""

    in_use: Collection[PoolId] = ()
    grace_end_s: Callable[[Pool], float] | None = None


def pools_view(
    tree: PoolTree,
    sessions: Iterable[SessionFacts],
    engine: EngineFacts,
    *,
    accounts: Accounts | None = None,
    gone: Mapping[PoolId, Gone] | None = None,
    retention: RetentionFacts | None = None,
    saved_bytes: Callable[[Pool], int] = lambda _: 0,
    top: PoolId | None = None,
    unix_offset_s: float = 0.0,
) -> dict[str, Any]:
    """Show the whole tree, or the subtree of ``top``.

    ``saved_bytes``: of what is saved of a pool outside the cache, also while it is resident.

    Units:   unix_offset_s: Unix time minus the clock of the pools' *_s
    """
    accounts, retention = accounts or Accounts(), retention or RetentionFacts()
    pools: Sequence[Pool] = list(tree) if top is None else tree.subtree(top)
    of_pool: dict[PoolId | None, list[SessionFacts]] = defaultdict(list)
    of_sessions: dict[PoolId, int] = defaultdict(int)
    for session in sessions:
        pool_id = session.pool_id if session.pool_id in tree else None
        of_pool[pool_id].append(session)
        if pool_id is not None:
            of_sessions[pool_id] += session.suffix_n_tokens
    subtree = subtree_cells(pools, accounts.own_cells, of_sessions)
    base_depth = 0 if top is None else tree.get(top).depth
    bytes_per_token = engine.bytes_per_token
    view = {
        "pools": [
            _pool_json(
                pool,
                tree.holder(pool.pool_id),
                [child.pool_id for child in tree.children(pool.pool_id)],
                of_pool.get(pool.pool_id, []),
                own_cells=accounts.own_cells.get(pool.pool_id, 0) if engine.answers else None,
                subtree_cells=subtree[pool.pool_id] if engine.answers else None,
                engine=engine,
                retention=retention,
                warm_bytes=saved_bytes(pool),
                unix_offset_s=unix_offset_s,
            )
            for pool in pools
        ],
        "tree_depth": 1 + max((pool.depth for pool in pools), default=base_depth - 1) - base_depth,
        "seq_ids_used": engine.seq_ids_used,
        "seq_ids_max": engine.seq_ids_max,
        "kv_cells_used": engine.kv_cells_used,
        "kv_cells_total": engine.kv_cells_total,
        "kv_bytes_per_token": bytes_per_token,
    }
    if top is not None:
        return view
    # What else holds cells, so that the whole adds up.
    n_unpooled = sum(accounts.slot_cells.values()) - sum(of_sessions.values()) if engine.answers else None
    return view | {
        "released": _released_json(accounts, gone or {}, bytes_per_token) if engine.answers else None,
        "unpooled": {
            "kv_cells": n_unpooled,
            "kv_bytes": kv_bytes(n_unpooled, bytes_per_token),
            "sessions": [_session_json(session, bytes_per_token) for session in of_pool.get(None, [])],
        },
    }


def _pool_json(
    pool: Pool,
    holder: Pool | None,
    children: Sequence[PoolId],
    sessions: Sequence[SessionFacts],
    *,
    own_cells: int | None,
    subtree_cells: int | None,
    engine: EngineFacts,
    retention: RetentionFacts,
    warm_bytes: int,
    unix_offset_s: float,
) -> dict[str, Any]:
    bytes_per_token = engine.bytes_per_token
    in_use = pool.pool_id in retention.in_use
    expires = holder is not None and engine.answers and not pool.pin and not in_use
    end_s = retention.grace_end_s(pool) if expires and retention.grace_end_s is not None else None
    # All of it in another's sequence is as good as in one of its own.
    residency = "resident" if holder is not None else pool.residency
    return {
        "pool_id": pool.pool_id,
        "name": pool.name,
        "parent": pool.parent,
        "branch_pos": pool.branch_pos,
        "prefix_len": pool.prefix_len,
        "own_n_tokens": pool.own_n_tokens,
        "residency": residency if engine.answers else None,
        "seq_id": holder.seq_id if holder is not None and engine.answers else None,
        "pinned": pool.pin,
        "orphaned_pin": pool.pin and not children and not sessions,
        "in_use": in_use,
        "auto": pool.auto,
        "ttl_s": pool.ttl_s,
        "expires_ts": end_s + unix_offset_s if end_s is not None else None,
        "created_ts": pool.created_s + unix_offset_s,
        "last_access_ts": pool.last_access_s + unix_offset_s,
        "queries": pool.n_queries,
        "hits": pool.n_hits,
        "own_kv_cells": own_cells,
        "own_kv_bytes": kv_bytes(own_cells, bytes_per_token),
        "subtree_kv_cells": subtree_cells,
        "subtree_kv_bytes": kv_bytes(subtree_cells, bytes_per_token),
        "warm_bytes": warm_bytes,
        "children": list(children),
        "sessions": [_session_json(session, bytes_per_token) for session in sessions],
    }


def _released_json(
    accounts: Accounts, gone: Mapping[PoolId, Gone], bytes_per_token: float | None
) -> list[dict[str, Any]]:
    return [
        {
            "pool_id": pool_id,
            "name": gone[pool_id].name,
            "parent": gone[pool_id].parent,
            "branch_pos": gone[pool_id].branch_pos,
            "prefix_len": gone[pool_id].prefix_len,
            "own_kv_cells": n_cells,
            "own_kv_bytes": kv_bytes(n_cells, bytes_per_token),
        }
        for pool_id, n_cells in sorted(accounts.released_cells.items())
    ]


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
