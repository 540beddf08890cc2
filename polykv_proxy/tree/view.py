"""The JSON of ``GET /polykv/pools``, made from plain facts: the tree, the sessions, what the engine last said.

Two steps, so that a large tree keeps nobody waiting and is one picture all the same: what changes is copied at once
(``TreePicture``), and written out slice by slice whenever there is time. What never changes of a pool (tokens, parent,
name) is read while it is written; pools that are released meanwhile are still shown.

Pure, so that a view of 10,000 pools can be tested without a server. Cost: O(pools + sessions) shown; the first step a
tenth of that.

Source:  design §4.2; unknown is ``null``, never 0
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polykv_proxy.ids import PoolId
from polykv_proxy.tree.accounting import Accounts, Gone, SessionCells, kv_bytes, subtree_cells
from polykv_proxy.tree.pool import Pool, Residency
from polykv_proxy.tree.tree import PoolTree

SLICE = 200
"""Pools that are written out at once: a millisecond or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts(SessionCells):
    """A session as the view shows it. ``state``: what it does.

    ``warm_bytes``: saved of it outside the cache; None: not known.
    """

    tps_ewma: float | None = None
    ttft_ms: float | None = None
    state: str | None = None
    warm_bytes: int | None = 0


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


_Row = tuple[Pool, Residency, bool, float, int, int]
"""A pool, and of it what may change: residency, pin, last access, queries, hits."""


class TreePicture:
    """The whole tree, or the subtree of ``top``, as it is now. Its JSON can be asked for later.

    ``saved_bytes``: of what is saved of a pool outside the cache, also while it is resident; asked later, so it must
    answer for now. None: not known.

    Units:   unix_offset_s: Unix time minus the clock of the pools' *_s
    """

    def __init__(
        self,
        tree: PoolTree,
        sessions: Iterable[SessionFacts],
        engine: EngineFacts,
        *,
        accounts: Accounts | None = None,
        gone: Mapping[PoolId, Gone] | None = None,
        retention: RetentionFacts | None = None,
        saved_bytes: Callable[[Pool], int | None] = lambda _: 0,
        top: PoolId | None = None,
        unix_offset_s: float = 0.0,
    ):
        accounts, retention = accounts or Accounts(), retention or RetentionFacts()
        self._engine, self._accounts, self._top, self._unix_offset_s = engine, accounts, top, unix_offset_s
        self._saved_bytes = saved_bytes
        self._gone = dict(gone or {})
        self._rows: list[_Row] = [
            (pool, pool.residency, pool.pin, pool.last_access_s, pool.n_queries, pool.n_hits)
            for pool in (tree if top is None else tree.subtree(top))
        ]
        self._of_pool: dict[PoolId | None, list[SessionFacts]] = defaultdict(list)
        of_sessions: dict[PoolId, int] = defaultdict(int)
        for session in sessions:
            pool_id = session.pool_id if session.pool_id in tree else None
            self._of_pool[pool_id].append(session)
            if pool_id is not None:
                of_sessions[pool_id] += session.suffix_n_tokens
        self._subtree = subtree_cells(tree, accounts.own_cells, of_sessions)
        self._n_unpooled = sum(accounts.slot_cells.values()) - sum(of_sessions.values())
        holders = tree.holders()
        # All of it in another's sequence is as good as in one of its own.
        self._seq_ids = {pool_id: holder.seq_id for pool_id, holder in holders.items()}
        self._in_use = frozenset(retention.in_use)
        self._grace_ends_s: dict[PoolId, float] = {}
        for pool_id in holders:
            pool = tree.get(pool_id)
            if engine.answers and retention.grace_end_s is not None and not pool.pin and pool_id not in self._in_use:
                self._grace_ends_s[pool_id] = retention.grace_end_s(pool)

    def slices(self, n_pools: int = SLICE) -> Iterator[list[dict[str, Any]]]:
        """Give the pools, parents before children, so many at a time; some slices at the beginning are empty."""
        children: dict[PoolId, list[PoolId]] = defaultdict(list)
        for rows in _parts(self._rows, 10 * n_pools):
            for row in rows:
                children[row[0].parent].append(row[0].pool_id)
            yield []
        for rows in _parts(self._rows, n_pools):
            yield [self._pool_json(row, children.get(row[0].pool_id, [])) for row in rows]

    def whole(self) -> dict[str, Any]:
        """All of it at once."""
        return {"pools": [pool for part in self.slices() for pool in part]} | self.rest()

    def rest(self) -> dict[str, Any]:
        """All but the pools."""
        engine, bytes_per_token = self._engine, self._engine.bytes_per_token
        depths = [row[0].depth for row in self._rows]
        rest = {
            "tree_depth": 1 + max(depths) - min(depths) if depths else 0,
            "seq_ids_used": engine.seq_ids_used,
            "seq_ids_max": engine.seq_ids_max,
            "kv_cells_used": engine.kv_cells_used,
            "kv_cells_total": engine.kv_cells_total,
            "kv_bytes_per_token": bytes_per_token,
        }
        if self._top is not None:
            return rest
        # What else holds cells, so that the whole adds up.
        n_unpooled = self._n_unpooled if engine.answers else None
        return rest | {
            "released": _released_json(self._accounts, self._gone, bytes_per_token) if engine.answers else None,
            "unpooled": {
                "kv_cells": n_unpooled,
                "kv_bytes": kv_bytes(n_unpooled, bytes_per_token),
                "sessions": [_session_json(session, engine) for session in self._of_pool.get(None, [])],
            },
        }

    def _pool_json(self, row: _Row, children: Sequence[PoolId]) -> dict[str, Any]:
        pool, residency, pinned, last_access_s, n_queries, n_hits = row
        engine, bytes_per_token = self._engine, self._engine.bytes_per_token
        pool_id = pool.pool_id
        sessions = self._of_pool.get(pool_id, [])
        own_cells = self._accounts.own_cells.get(pool_id, 0) if engine.answers else None
        subtree_cells = self._subtree.get(pool_id, 0) if engine.answers else None
        residency = "resident" if pool_id in self._seq_ids else residency
        end_s = self._grace_ends_s.get(pool_id)
        return {
            "pool_id": pool_id,
            "name": pool.name,
            "parent": pool.parent,
            "branch_pos": pool.branch_pos,
            "prefix_len": pool.prefix_len,
            "own_n_tokens": pool.own_n_tokens,
            "residency": residency if engine.answers else None,
            "seq_id": self._seq_ids.get(pool_id) if engine.answers else None,
            "pinned": pinned,
            "orphaned_pin": pinned and not children and not sessions,
            "in_use": pool_id in self._in_use,
            "auto": pool.auto,
            "ttl_s": pool.ttl_s,
            "expires_ts": end_s + self._unix_offset_s if end_s is not None else None,
            "created_ts": pool.created_s + self._unix_offset_s,
            "last_access_ts": last_access_s + self._unix_offset_s,
            "queries": n_queries,
            "hits": n_hits,
            "own_kv_cells": own_cells,
            "own_kv_bytes": kv_bytes(own_cells, bytes_per_token),
            "subtree_kv_cells": subtree_cells,
            "subtree_kv_bytes": kv_bytes(subtree_cells, bytes_per_token),
            "warm_bytes": self._saved_bytes(pool),
            "children": list(children),
            "sessions": [_session_json(session, engine) for session in sessions],
        }


def _parts(rows: Sequence[_Row], n: int) -> Iterator[Sequence[_Row]]:
    return (rows[at : at + n] for at in range(0, len(rows), n))


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


def _session_json(session: SessionFacts, engine: EngineFacts) -> dict[str, Any]:
    own = session.suffix_n_tokens if engine.answers else None
    return {
        "session_id": session.session_id,
        "prefix_n_tokens": session.pool_n_tokens if engine.answers else None,
        "suffix_n_tokens": own,
        "marginal_kv_bytes": kv_bytes(own, engine.bytes_per_token),
        "tps_ewma": session.tps_ewma,
        "ttft_ms": session.ttft_ms,
        "state": session.state,
        "warm_bytes": session.warm_bytes,
    }
