"""Questions about the state, answered as JSON. They change nothing and log nothing.

Cells of sessions come from the engine's stats of their slots; what a slot shares with a pool is the pool's, the rest
is the session's. Ask ``Control.refresh`` first: views only read.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import SessionNotFound
from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.sessions import Session, SessionBook
from polykv_proxy.tree.accounting import Accounts, account, kv_bytes
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.tree.view import EngineFacts, SessionFacts, pools_view
from polykv_proxy.upstream import SlotStats


def pool_answer(pool: Pool) -> dict[str, Any]:
    """What create and fork say about a pool."""
    return {
        "pool_id": pool.pool_id,
        "name": pool.name,
        "parent": pool.parent,
        "branch_pos": pool.branch_pos,
        "prefix_len": pool.prefix_len,
        "own_n_tokens": pool.own_n_tokens,
        "seq_id": pool.seq_id,
        "residency": pool.residency,
    }


class Views:
    """``taken_by``: the other proxy that manages the engine, if there is one; what it holds is not ours to show."""

    def __init__(
        self,
        tree: PoolTree,
        sessions: SessionBook,
        watch: EngineWatch,
        clock: Callable[[], float],
        *,
        taken_by: Callable[[], str | None],
    ):
        self._tree, self._sessions, self._watch, self._clock = tree, sessions, watch, clock
        self._taken_by = taken_by
        # Taken once: the time of one thing must not differ between two answers.
        self._unix_offset_s = time.time() - clock()

    def pools(self, ref: int | str | None = None) -> dict[str, Any]:
        """The tree, or one subtree.

        Raises:  PoolNotFound (404)
        """
        top = self._tree.get(ref).pool_id if ref is not None else None
        stats = self._watch.stats
        answers = self._watch.state != "away" and self._taken_by() is None
        cells = stats.cells if stats is not None and answers and not self._watch.sleeping else None
        resident = len(self._tree.residents())
        facts = EngineFacts(
            answers=answers,
            bytes_per_token=stats.kv_bytes_per_token if stats is not None else None,
            seq_ids_used=resident if stats is not None and answers else None,
            seq_ids_max=stats.max_pools if stats is not None else None,
            kv_cells_used=cells.used if cells is not None else None,
            kv_cells_total=cells.total if cells is not None else None,
        )
        return pools_view(self._tree, self.session_facts(), facts, top=top, unix_offset_s=self._unix_offset_s)

    def sessions(self) -> dict[str, Any]:
        return {"sessions": [self._session(session) for session in self._sessions if not session.closed]}

    def session(self, session_id: SessionId) -> dict[str, Any]:
        """One session.

        Raises:  SessionNotFound (404)
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session {str(session_id)[:64]!r}")
        return self._session(session)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """(ready, body): whether new work can be served, and what stands in the way."""
        watch = self._watch
        ready = watch.state == "ready"
        status = {"ready": "ok", "loading": "loading"}.get(watch.state, "upstream_unavailable")
        taken_by = self._taken_by() if ready and watch.hooks else None
        if taken_by is not None:
            ready, status = False, "not_owner"
        return ready, {
            "status": status,
            "engine": {
                "reachable": watch.state in ("ready", "loading"),
                "loading": watch.state == "loading",
                "hooks": watch.hooks,
                "epoch": watch.epoch,
                "share": watch.stats.share if watch.stats is not None else None,
                "owner": taken_by,
                "error": watch.failure.message if watch.failure is not None else None,
            },
            "pools": len(self._tree),
            "sessions": sum(1 for session in self._sessions if not session.closed),
        }

    # Cells ---------------------------------------------------------------------------------------------------------

    def session_facts(self) -> list[SessionFacts]:
        """What every open session holds, by the stats of its slot."""
        facts = []
        for session in self._sessions:
            if session.closed:
                continue
            slot = self._slot_of(session)
            pool = self._tree.find(session.pool_id) if session.pool_id is not None else None
            shared = slot.n_pool_shared if slot is not None else 0
            # A slot may share more than its session's pool has: what an earlier attach left there is another pool's.
            of_pool = shared if pool is None else min(shared, pool.prefix_len)
            facts.append(
                SessionFacts(
                    session_id=session.session_id,
                    pool_id=session.pool_id,
                    pool_n_tokens=of_pool,
                    suffix_n_tokens=max(0, slot.n_tokens - shared) if slot is not None else 0,
                    tps_ewma=self._tps(session, slot),
                    ttft_ms=session.ttft_ms,
                    state=session.state,
                )
            )
        return facts

    def accounts(self, facts: Sequence[SessionFacts]) -> Accounts:
        return account(list(self._tree), facts)

    def kv_bytes(self, n_cells: int | None) -> int | None:
        stats = self._watch.stats
        return kv_bytes(n_cells, stats.kv_bytes_per_token if stats is not None else None)

    def kept_by_sessions(self, released: Sequence[Pool], users: Sequence[SessionFacts]) -> dict[str, Any]:
        """Cells of pools just released (leaves first) that stay while these sessions' slots hold them."""
        held: dict[PoolId, int] = {}
        for user in users:
            if user.pool_id is not None:
                held[user.pool_id] = max(held.get(user.pool_id, 0), user.pool_n_tokens)
        n_cells = 0
        for pool in released:
            reach = held.get(pool.pool_id, 0)
            n_cells += max(0, reach - pool.branch_pos)
            held[pool.parent] = max(held.get(pool.parent, 0), min(reach, pool.branch_pos))
        return {
            "kv_cells": n_cells,
            "kv_bytes": self.kv_bytes(n_cells),
            "sessions": sorted(user.session_id for user in users if user.pool_n_tokens),
        }

    # ---------------------------------------------------------------------------------------------------------------

    def _slot_of(self, session: Session) -> SlotStats | None:
        stats = self._watch.stats
        if stats is None or session.slot_id is None:
            return None
        return next((slot for slot in stats.slots if slot.id == session.slot_id), None)

    def _tps(self, session: Session, slot: SlotStats | None) -> float | None:
        live = slot.tps_ewma if slot is not None and session.turns else None
        return live or session.tps

    def _session(self, session: Session) -> dict[str, Any]:
        slot = self._slot_of(session)
        total = self._watch.stats.n_ctx_slot if self._watch.stats is not None else None
        used = session.ctx_used
        return {
            "session_id": session.session_id,
            "named": session.named,
            "parent_session_id": session.parent,
            "pool_id": session.pool_id,
            "slot_id": session.slot_id,
            "state": session.state,
            "n_turns": session.n_turns,
            "n_running": len(session.turns),
            "n_decoded": session.n_decoded,
            "prefix_n_tokens": slot.n_pool_shared if slot is not None else None,
            "tps_ewma": self._tps(session, slot),
            "ttft_ms": session.ttft_ms,
            "ctx_used": used,
            "ctx_total": total,
            "ctx_headroom_tokens": max(0, total - used) if total is not None and used is not None else None,
            "last_access_ts": session.last_s + self._unix_offset_s,
        }
