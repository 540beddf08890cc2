"""What the gate is told: the engine as last measured, a new session at the door, a turn that is about to go out.

Facts are measured by others and come in whole; nothing here is looked up. ``None`` means unknown.

Units:  *_s seconds of one monotonic clock; tokens and cells as counts; a cell holds one token
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from polykv_proxy.gate.policy import Ruling
from polykv_proxy.ids import PoolId, SessionId

State = Literal["idle", "waiting", "prefilling", "decoding"]


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A live session: in a turn, or not long after one.

    ``scope``: whose policy holds for its pool. ``n_decoded``: accepted tokens of all its turns, ``decoding_s``: how
    long it took to decode them, stalls included (None: not measured, the states tell). ``own_cells``: what it holds
    beyond its pool. ``reply_tps``: the rate that the engine or its last reply told, used until one is measured.
    """

    session_id: SessionId
    pool_id: PoolId | None
    scope: PoolId | None = None
    state: State = "idle"
    n_turns: int = 0
    n_decoded: int = 0
    ctx_used: int = 0
    own_cells: int = 0
    reply_tps: float | None = None
    decoding_s: float | None = None

    @property
    def processing(self) -> bool:
        return self.state in ("prefilling", "decoding")


@dataclass(frozen=True, slots=True)
class Streams:
    """A split cache: each slot has cells of its own. ``n_free``: streams in which no turn runs."""

    n_total: int
    n_free: int
    cells_per_stream: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One reading. ``n_prefilled``: prompt tokens processed since the engine's start, those of pools as well.

    ``cells_free``: what a new session could have, with what would be evicted for it. ``ctx_total``: the context that
    one session may fill. ``epoch``: counters of different epochs are not compared. ``still_s``: for so long nothing had
    moved though there was something to do: what it says of rates is that much older.
    """

    measured_s: float
    sessions: Sequence[SessionFacts] = ()
    n_prefilled: int = 0
    cells_total: int | None = None
    cells_used: int | None = None
    cells_free: int | None = None
    ctx_total: int | None = None
    streams: Streams | None = None
    epoch: str = ""
    still_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A session at the door of a pool.

    ``known``: it was served before, so this is a continuation. ``expected_tokens``: what it will add to the cache,
    ``uncached_tokens``: what of its prompt has to be prefilled. ``is_retry``: the client's own retry of a refusal.
    ``since_s``: it has waited since then, at the door of a pool that was released; None: it comes new.
    """

    session_id: SessionId
    pool_id: PoolId
    ruling: Ruling
    known: bool = False
    overcommit: bool = False
    prefix_len: int = 0
    expected_tokens: int | None = None
    uncached_tokens: int = 0
    n_bytes: int = 0
    tenant: str = ""
    is_retry: bool = False
    since_s: float | None = None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn of an admitted session, about to be forwarded. ``turn_id`` is the caller's. ``session_since_s``: when its
    session began. ``ctx_tokens``: its context with the prompt, ``uncached_tokens``: what of it has to be prefilled.
    """

    turn_id: int
    session_id: SessionId
    pool_id: PoolId
    ruling: Ruling
    session_since_s: float
    ctx_tokens: int = 0
    uncached_tokens: int = 0
    n_bytes: int = 0
    tenant: str = ""
