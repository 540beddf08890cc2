"""What the calls give back. A field that the server does not know, or does not send, is None; fields of newer servers
are kept, and are attributes too (``model_extra``).

Shapes:  docs/api.md, "Control plane"
Units:   in the names; ``_ts`` Unix seconds
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Result(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_unknown(cls, given: Any) -> Any:
        """A list or an object that is null is an empty one here."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}


class PoolState(Result):
    pool_id: int
    name: str | None = None
    parent: int | None = None
    """-1: a root."""
    branch_pos: int | None = None
    prefix_len: int | None = None
    own_n_tokens: int | None = None
    seq_id: int | None = None
    residency: str | None = None
    """``resident``, ``materializing``, ``warm`` or ``cold``."""


class PoolCreated(PoolState):
    materialize_ms: float | None = None
    same_as: int | None = None
    """The oldest other pool with the very same tokens."""


class PoolPinned(PoolState):
    pinned: bool | None = None
    changed: bool | None = None
    pinned_cells: int | None = None
    budget_cells: int | None = None


class Freed(Result):
    """All None: the engine could not be asked; they are freed when it is back."""

    seq_ids: int | None = None
    kv_cells: int | None = None
    kv_bytes: int | None = None


class FreedLater(Result):
    kv_cells: int | None = None
    kv_bytes: int | None = None
    sessions: list[str] = Field(default_factory=list)


class PoolEvicted(PoolState):
    was: str | None = None
    held_by: int | None = None
    warm_bytes: int | None = None
    freed: Freed = Field(default_factory=Freed)


class KeptPool(Result):
    pool_id: int
    reason: str | None = None


class Flushed(Result):
    evicted: list[int] = Field(default_factory=list)
    kept: list[KeptPool] = Field(default_factory=list)
    freed: Freed = Field(default_factory=Freed)


class Released(Result):
    """``released``: pools that are off the tree, leaves first."""

    released: list[int] = Field(default_factory=list)
    freed_now: Freed = Field(default_factory=Freed)
    freed_later: FreedLater = Field(default_factory=FreedLater)


class Moved(Result):
    """A session whose next turn attaches to the new pool. ``n_running``: turns that go on with the old cells."""

    session_id: str
    from_pool_id: int | None = None
    n_running: int | None = None


class Compacted(PoolCreated, Released):
    """The new pool, who moves to it, and what was freed with the old one."""

    pinned: bool | None = None
    moved: list[Moved] = Field(default_factory=list)


class PoolSession(Result):
    session_id: str
    prefix_n_tokens: int | None = None
    suffix_n_tokens: int | None = None
    marginal_kv_bytes: int | None = None
    tps_ewma: float | None = None
    ttft_ms: float | None = None
    state: str | None = None
    warm_bytes: int | None = None


class PoolInfo(PoolState):
    """A pool of the tree."""

    pinned: bool | None = None
    orphaned_pin: bool | None = None
    """Pinned, without children and sessions: nobody will miss it, and it blocks its cells."""
    in_use: bool | None = None
    auto: bool | None = None
    ttl_s: float | None = None
    expires_ts: float | None = None
    created_ts: float | None = None
    last_access_ts: float | None = None
    queries: int | None = None
    hits: int | None = None
    own_kv_cells: int | None = None
    own_kv_bytes: int | None = None
    subtree_kv_cells: int | None = None
    subtree_kv_bytes: int | None = None
    warm_bytes: int | None = None
    children: list[int] = Field(default_factory=list)
    sessions: list[PoolSession] = Field(default_factory=list)


class PoolTree(Result):
    """Parents before children."""

    pools: list[PoolInfo] = Field(default_factory=list)
    tree_depth: int | None = None
    seq_ids_used: int | None = None
    seq_ids_max: int | None = None
    kv_cells_used: int | None = None
    kv_cells_total: int | None = None
    kv_cells_high: int | None = None
    idle_tax: float | None = None
    kv_bytes_per_token: float | None = None
    kv_streams_total: int | None = None
    kv_streams_free: int | None = None
    kv_cells_per_stream: int | None = None
    warm: dict[str, Any] | None = None
    released: list[dict[str, Any]] | None = None
    unpooled: dict[str, Any] | None = None

    def find(self, pool: int | str) -> PoolInfo | None:
        """A pool by id or name."""
        return next((p for p in self.pools if pool in (p.pool_id, p.name)), None)


class SessionInfo(Result):
    session_id: str
    named: bool | None = None
    parent_session_id: str | None = None
    pool_id: int | None = None
    slot_id: int | None = None
    state: str | None = None
    """``waiting``, ``prefilling``, ``decoding``, ``idle``, ``parked`` or ``closed``."""
    parked: bool | None = None
    n_turns: int | None = None
    n_running: int | None = None
    n_decoded: int | None = None
    prefix_n_tokens: int | None = None
    suffix_n_tokens: int | None = None
    marginal_kv_bytes: int | None = None
    warm_bytes: int | None = None
    tps_ewma: float | None = None
    ttft_ms: float | None = None
    ctx_used: int | None = None
    ctx_total: int | None = None
    ctx_headroom_tokens: int | None = None
    last_access_ts: float | None = None


class SessionDropped(Result):
    session_id: str
    detached_from: int | None = None
    n_running: int | None = None


class SessionRate(Result):
    session_id: str
    pool_id: int | None = None
    tps_ewma: float | None = None
    n_decoded: int | None = None
    ttft_ms: float | None = None
    state: str | None = None
    stalled: bool | None = None
    """Somebody's prompt keeps it from decoding right now."""
    stall_ms: float | None = None
    ctx_used: int | None = None
    ctx_total: int | None = None
    ctx_headroom_tokens: int | None = None


class TpsSample(Result):
    """Tokens per second of now. ``mean_active_tps`` is over the ``n_active`` sessions that decode and have a rate."""

    ts: float
    aggregate_tps: float | None = None
    mean_active_tps: float | None = None
    n_active: int | None = None
    n_warming: int | None = None
    sessions: list[SessionRate] = Field(default_factory=list)


class AdmissionPolicy(Result):
    """The policy of a pool; fields left out have the server's defaults, and None is not sent."""

    target_tps_per_session: float
    """The floor: tokens per second and session."""
    mode: Literal["advisory", "enforced"] | None = None
    on_saturation: Literal["reject", "warn", "queue"] | None = None
    guarantee_min_sessions: int | None = None
    settle_tokens: int | None = None
    settle_max_ms: int | None = None
    estimator: Literal["settled", "roofline"] | None = None
    max_turn_hold_ms: int | None = None
    max_queue: int | None = None
    queue_timeout_ms: int | None = None


class AdmissionInfo(Result):
    """What holds for new sessions of a pool. ``target_tps_per_session`` None: no policy, nobody is refused.

    ``source``: ``own``, ``inherited``, ``default`` or ``none``. ``scope``: the pool whose policy it is.
    """

    pool_id: int | None = None
    name: str | None = None
    source: str | None = None
    inherited_from: int | str | None = None
    scope: int | None = None
    changed: bool | None = None
    target_tps_per_session: float | None = None
    mode: str | None = None
    on_saturation: str | None = None
    guarantee_min_sessions: int | None = None
    settle_tokens: int | None = None
    settle_max_ms: int | None = None
    estimator: str | None = None
    max_turn_hold_ms: int | None = None
    max_queue: int | None = None
    queue_timeout_ms: int | None = None


class Capacity(Result):
    """May one more session come in, and what that rests on."""

    pool_id: int | None = None
    name: str | None = None
    can_admit: bool
    reason: str | None = None
    projected_mean_tps_if_admitted: float | None = None
    projected_mean_tps_model: float | None = None
    projected_mean_tps_measured: float | None = None
    projected_mean_tps_roofline: float | None = None
    projected_idle_estimate: bool | None = None
    drop_per_admit_ewma: float | None = None
    mean_active_tps: float | None = None
    n_active: int | None = None
    n_warming: int | None = None
    n_pool_sessions: int | None = None
    guaranteed: bool | None = None
    known_session: bool | None = None
    settling: bool | None = None
    settle_remaining_ms: float | None = None
    headroom_sessions: int | None = None
    kv_headroom_pct: float | None = None
    compaction_pressure: float | None = None
    ctx_used: int | None = None
    ctx_total: int | None = None
    ctx_headroom_tokens: int | None = None
    kv_streams_total: int | None = None
    kv_streams_free: int | None = None
    kv_cells_per_stream: int | None = None
    target_tps_per_session: float | None = None
    mode: str | None = None
    estimator: str | None = None
    seq_ids_used: int | None = None
    seq_ids_max: int | None = None


class Match(Result):
    """What a request would get. ``miss_reason`` None: a full hit."""

    pool_id: int | None = None
    name: str | None = None
    prefix_n_tokens: int | None = None
    uncached_n_tokens: int | None = None
    miss_reason: str | None = None
    divergence: dict[str, Any] | None = None


class RequestInfo(Result):
    """The receipt of one request, as the proxy keeps it."""

    request_id: str
    path: str | None = None
    dialect: str | None = None
    stream: bool | None = None
    received_ts: float | None = None
    sent_ts: float | None = None
    first_token_ts: float | None = None
    ended_ts: float | None = None
    status: int | None = None
    error: str | None = None
    message: str | None = None
    decision: str | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    pool_id: int | None = None
    prefix_n_tokens: int | None = None
    cached_n_tokens: int | None = None
    prompt_n: int | None = None
    predicted_n: int | None = None
    slot_id: int | None = None
    displaced: list[str] = Field(default_factory=list)
    hold_ms: float | None = None
    held_ms: dict[str, float] = Field(default_factory=dict)
    miss_reason: str | None = None
    divergence: dict[str, Any] | None = None
    normalised: list[str] | None = None
    admission: dict[str, Any] | None = None
    """How it came past the gate, what had been projected then and what the mean was once it had settled."""


class Health(Result):
    """``status`` is ``ok`` when new work is served."""

    status: str
    engine: dict[str, Any] = Field(default_factory=dict)
    journal: dict[str, Any] = Field(default_factory=dict)
    pools: int | None = None
    sessions: int | None = None


class Receipt(Result):
    """The ``polykv`` object of a reply."""

    pool_id: int | None = None
    session_id: str | None = None
    prefix_n_tokens: int | None = None
    cached_n_tokens: int | None = None
    miss_reason: str | None = None
    session_tps: float | None = None
    ctx_used: int | None = None
    ctx_total: int | None = None
    ctx_headroom_tokens: int | None = None
    sessions_remaining: int | None = None
    hold_ms: float | None = None


class Reply(Result):
    """A reply, or one piece of a streamed one; every field of the body is here. ``polykv`` is in the last piece."""

    polykv: Receipt | None = None


class ChatReply(Reply):
    choices: list[dict[str, Any]] = Field(default_factory=list)
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """What the first choice says, or the piece of it that is here."""
        for choice in self.choices[:1]:
            said = choice.get("message") or choice.get("delta") or {}
            return said.get("content") or ""
        return ""

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].get("finish_reason") if self.choices else None


class CompletionReply(Reply):
    content: str | None = None
    tokens: list[int] | None = None
    """With ``return_tokens``."""
    stop: bool | None = None
    timings: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return self.content or ""
