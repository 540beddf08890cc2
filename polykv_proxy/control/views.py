"""Questions about the state, answered as JSON. They change nothing and log nothing.

Who holds which cells is in the ledger: what a slot holds of pools is theirs, the rest is its session's. Ask
``Control.refresh`` first: views only read.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import orjson

from polykv_proxy.control.ledger import Ledger
from polykv_proxy.control.plain import PlainEngine
from polykv_proxy.control.rates import Rates
from polykv_proxy.control.saved_books import Content, session_tag, state_content
from polykv_proxy.control.saved_room import SavedRoom
from polykv_proxy.control.tier import Tier, TierFacts
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import SessionNotFound
from polykv_proxy.gate.rate import SessionRate
from polykv_proxy.ids import PoolId, SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.store import Journal
from polykv_proxy.tree.accounting import kv_bytes
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.tree.view import EngineFacts, RetentionFacts, SessionFacts, TreePicture
from polykv_proxy.turns import Session
from polykv_proxy.upstream import SavedState, SlotStats


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
    """``unix_offset_s``: Unix time minus the clock of all *_s.

    ``taken_by``: the other proxy that manages the engine, if there is one; what it holds is not ours to show.
    ``measured_rate``: set by who has it (``door``).
    """

    def __init__(
        self,
        tree: PoolTree,
        sessions: SessionBook,
        watch: EngineWatch,
        clock: Callable[[], float],
        unix_offset_s: float,
        *,
        journal: Journal,
        ledger: Ledger,
        in_use: Callable[[], Collection[PoolId]],
        grace_end_s: Callable[[Pool], float],
        saved: SavedRoom,
        taken_by: Callable[[], str | None],
        tier: Tier,
        plain: PlainEngine,
        rates: Rates,
    ):
        self._tree, self._sessions, self._watch, self._clock = tree, sessions, watch, clock
        self._journal, self._unix_offset_s = journal, unix_offset_s
        self._ledger, self._in_use, self._grace_end_s, self._taken_by = ledger, in_use, grace_end_s, taken_by
        self._saved, self._tier, self._plain, self._rates = saved, tier, plain, rates
        self.measured_rate: Callable[[SessionId], SessionRate | None] = lambda _: None

    def pools(self, ref: int | str | None = None) -> dict[str, Any]:
        """The tree, or one subtree.

        Raises:  PoolNotFound (404)
        """
        picture, more = self._picture(ref)
        return picture.whole() | more

    async def pools_json(self, ref: int | str | None = None) -> bytes:
        """The same as JSON: of this very moment, but others have their turns while a large tree is written out.

        Raises:  PoolNotFound (404)
        """
        picture, more = self._picture(ref)
        parts = []
        for part in picture.slices():
            if part:
                parts.append(orjson.dumps(part)[1:-1])
            await asyncio.sleep(0)
        rest = orjson.dumps(picture.rest() | more)
        return b'{"pools":[' + b",".join(parts) + b"]," + rest[1:]

    def _picture(self, ref: int | str | None) -> tuple[TreePicture, dict[str, Any]]:
        top = self._tree.get(ref).pool_id if ref is not None else None
        stats = self._watch.stats
        answers = self._answers()
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
        saved = self._saved_now()
        picture = TreePicture(
            self._tree,
            self.session_facts(),
            facts,
            accounts=self._ledger.accounts(),
            gone=self._ledger.gone(),
            retention=RetentionFacts(in_use=self._in_use(), grace_end_s=self._grace_end_s),
            saved_bytes=lambda pool: self._saved.known_bytes(saved.get((pool.tokens_hash, pool.prefix_len), ())),
            top=top,
            unix_offset_s=self._unix_offset_s,
        )
        return picture, self._warm(self._tier.facts()) | self.streams()

    def _saved_now(self) -> Mapping[Content, list[SavedState]]:
        """States that are saved of pools, by what tells pools apart."""
        saved: dict[Content, list[SavedState]] = defaultdict(list)
        for state in self._saved.last_known():
            if (content := state_content(state)) is not None:
                saved[content].append(state)
        return saved

    def _warm(self, tier: TierFacts) -> dict[str, Any]:
        """What is saved outside the cache, and what idle cells inside cost."""
        places = {"ram": tier.ram, "disk": tier.disk}
        return {
            "kv_cells_high": tier.hi,
            "idle_tax": tier.idle_tax,
            "warm": {
                "why_off": tier.why_off or None,
                **{
                    name: {
                        "bytes": place.n_bytes,
                        "max_bytes": place.max_bytes,
                        "pools": place.n_pools,
                        "sessions": place.n_sessions,
                        "hits": tier.counts.n_loads.get(name, 0),
                    }
                    for name, place in places.items()
                },
                "misses": tier.counts.n_misses,
                "saves": tier.counts.n_saves,
            },
        }

    def sessions(self) -> dict[str, Any]:
        self._ledger.sync()
        self._rates.note()
        sessions = [self._session(session) for session in self._sessions if not session.closed]
        return {"sessions": sessions} | ({"hooks": False} if self._watch.hooks is False else {})

    def session(self, session_id: SessionId) -> dict[str, Any]:
        """One session.

        Raises:  SessionNotFound (404)
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session {str(session_id)[:64]!r}")
        self._ledger.sync()
        self._rates.note()
        return self._session(session)

    def rates(self) -> list[dict[str, Any]]:
        """What the open sessions decode. Of one that runs, what is not known now is None."""
        self._rates.note()
        return [self.rate_of(session) for session in self._sessions if not session.closed]

    def rate_of(self, session: Session) -> dict[str, Any]:
        return {
            "session_id": session.session_id,
            "pool_id": session.running_in,
            "tps_ewma": self._tps(session),
            "n_decoded": self._n_decoded(session),
            "ttft_ms": session.ttft_ms,
            "state": _state(session, self._plain.slot_of(session), self._n_saved(session)),
            **self._stalls_of(session),
            **self.context_of(session),
        }

    def _stalls_of(self, session: Session) -> dict[str, Any]:
        """Whether somebody's prompt keeps it from decoding; measured where there is an admission policy."""
        rate = self.measured_rate(session.session_id)
        return {
            "stalled": rate.stalled if rate is not None else None,
            "stall_ms": round(rate.stall_ms) if rate is not None else None,
        }

    def context_of(self, session: Session) -> dict[str, int | None]:
        """How much of its slot's context a session uses, also while it runs."""
        return self.context(session.ctx_used if self._plain.props is not None else self._rates.ctx_used_of(session))

    def context(self, used: int | None) -> dict[str, int | None]:
        """What is left of a slot's context when so much of it is used."""
        total = self.ctx_total()
        left = max(0, total - used) if total is not None and used is not None else None
        return {"ctx_used": used, "ctx_total": total, "ctx_headroom_tokens": left}

    def ctx_total(self) -> int | None:
        """Tokens that one session can have, the same in every slot."""
        stats, plain = self._watch.stats, self._plain.props
        return plain.n_ctx if plain is not None else stats.n_ctx_slot if stats is not None else None

    def streams(self) -> dict[str, int | None]:
        """The streams of a split cache: one per slot and pool sequence, and two that the engine keeps for itself.

        Free are those that a new session or pool could take now.
        """
        stats = self._watch.stats
        answers = self._answers() and not self._watch.sleeping
        if stats is None or not answers or stats.kv_unified or stats.cells is None or not stats.cells.n_stream:
            return dict.fromkeys(("kv_streams_total", "kv_streams_free", "kv_cells_per_stream"))
        now_s = self._clock()
        of_live = {s.slot_id for s in self._sessions if self._sessions.is_live(s.session_id, now_s)}
        n_taken = sum(not slot.idle or slot.id in of_live for slot in stats.slots)
        return {
            "kv_streams_total": stats.cells.n_stream,
            "kv_streams_free": stats.n_slots - n_taken + stats.max_pools - len(self._tree.residents()),
            "kv_cells_per_stream": stats.cells.total // stats.cells.n_stream,
        }

    def health(self) -> tuple[bool, dict[str, Any]]:
        """(ready, body): whether new work can be served, and what stands in the way."""
        watch = self._watch
        ready = watch.state == "ready"
        status = {"ready": "ok", "loading": "loading"}.get(watch.state, "upstream_unavailable")
        if ready and watch.hangs:
            ready, status = False, "hung"
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
            "journal": self._journal.status,
            "pools": len(self._tree),
            "sessions": sum(1 for session in self._sessions if not session.closed),
        }

    # Cells ---------------------------------------------------------------------------------------------------------

    def session_facts(self) -> list[SessionFacts]:
        """What every open session holds, by the ledger of its slot."""
        self._ledger.sync()
        self._rates.note()
        facts = []
        for session in self._sessions:
            if session.closed:
                continue
            slot, n_saved = self._slot_of(session), self._n_saved(session)
            of_pools, own = self._holds(slot) or (0, 0)
            facts.append(
                SessionFacts(
                    session_id=session.session_id,
                    pool_id=session.running_in,
                    pool_n_tokens=of_pools,
                    suffix_n_tokens=own,
                    tps_ewma=self._tps(session),
                    ttft_ms=session.ttft_ms,
                    state=_state(session, self._plain.slot_of(session), n_saved),
                    warm_bytes=self._warm_bytes(session),
                )
            )
        return facts

    def own_cells(self) -> Mapping[PoolId, int]:
        """Cells that each pool owns; those without any are absent."""
        return self._ledger.accounts().own_cells

    def saved_bytes(self, pool: Pool) -> int:
        """Bytes that are saved of a pool outside the cache."""
        return sum(state.n_bytes for state in self._saved.of_content(pool.tokens_hash, pool.prefix_len))

    def kv_bytes(self, n_cells: int | None) -> int | None:
        stats = self._watch.stats
        return kv_bytes(n_cells, stats.kv_bytes_per_token if stats is not None else None)

    # ---------------------------------------------------------------------------------------------------------------

    def _answers(self) -> bool:
        """The engine is there and ours: what it holds is known."""
        return self._watch.state == "ready" and self._taken_by() is None

    def _slot_of(self, session: Session) -> SlotStats | None:
        stats = self._watch.stats
        if self._plain.props is not None:
            return self._plain.slot_of(session)
        if stats is None or session.slot_id is None:
            return None
        return next((slot for slot in stats.slots if slot.id == session.slot_id), None)

    def _holds(self, slot: SlotStats | None) -> tuple[int, int] | None:
        """(tokens that are pools', tokens of its own); only an engine with hooks tells."""
        if slot is None or self._plain.props is not None or not self._answers():
            return None
        return self._ledger.holds(SlotId(slot.id))

    def _n_saved(self, session: Session) -> int:
        """Bytes of what the engine keeps of a session outside the cache."""
        state = self._saved.find(session_tag(session.session_id))
        return state.n_bytes if state is not None else 0

    def _warm_bytes(self, session: Session) -> int | None:
        """The same as it is shown: None while it is not known."""
        state = self._saved.last_known_of(session_tag(session.session_id))
        return self._saved.known_bytes([state] if state is not None else [])

    def _tps(self, session: Session) -> float | None:
        if self._plain.props is None:
            return self._rates.tps_of(session)
        slot = self._plain.slot_of(session)
        return (slot.tps_ewma if slot is not None else None) or session.tps

    def _n_decoded(self, session: Session) -> int | None:
        if self._plain.props is None:
            return self._rates.n_decoded_of(session)
        slot = self._plain.slot_of(session)
        return session.n_decoded + slot.n_decoded_cum if slot is not None else session.n_decoded

    def _session(self, session: Session) -> dict[str, Any]:
        slot, n_saved = self._slot_of(session), self._n_saved(session)
        holds = self._holds(slot)
        return {
            "session_id": session.session_id,
            "named": session.named,
            "parent_session_id": session.parent,
            "pool_id": session.running_in,
            "slot_id": session.slot_id,
            "state": _state(session, self._plain.slot_of(session), n_saved),
            "parked": n_saved > 0 and session.slot_id is None,
            "n_turns": session.n_turns,
            "n_running": len(session.turns),
            "n_decoded": self._n_decoded(session),
            "prefix_n_tokens": holds[0] if holds is not None else None,
            "suffix_n_tokens": holds[1] if holds is not None else None,
            "marginal_kv_bytes": self.kv_bytes(holds[1]) if holds is not None else None,
            "warm_bytes": self._warm_bytes(session),
            "tps_ewma": self._tps(session),
            "ttft_ms": session.ttft_ms,
            **self.context_of(session),
            "last_access_ts": session.last_s + self._unix_offset_s,
        }


def _state(session: Session, plain: SlotStats | None, n_saved: int) -> str:
    """``plain``: where it runs in an engine without hooks, which tells when its prompt is done; others told the rates.

    Nobody's turn, no slot, and what it said is kept outside the cache: it is parked.
    """
    state = session.state
    if state == "prefilling" and plain is not None and plain.state == "generating":
        return "decoding"
    return "parked" if state == "idle" and session.slot_id is None and n_saved else state
