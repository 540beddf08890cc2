"""What the control plane answers, as models: the schemas of ``GET /polykv/openapi.json``.

Answers are made by ``control`` as plain objects; a test holds every one of them against its model here, so a field that
is not named (or not there any more) fails it. The bodies' models are those that parse them (``body``).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polykv_proxy.doctor.facts import Facts
from polykv_proxy.doctor.finding import Finding

Count = Annotated[int, Field(ge=0)]
Residency = Literal["resident", "materializing", "warm", "cold"]
MissReason = Literal["diverged", "no_pool", "incompatible", "swa_or_recurrent", "cold"]
SessionState = Literal["waiting", "prefilling", "decoding", "idle", "parked", "closed"]


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorDetail(BaseModel):
    """What went wrong. Some codes carry more fields; the common ones are named here."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    message: str
    """For a person: what happened, and what to do next."""
    type: str
    code: str
    """Stable, snake_case."""
    param: str | None = None
    """The field of the body that is wrong."""
    divergence_pos: Count | None = None
    """``prefix_mismatch``: the first position that differs."""
    cells_missing: Count | None = None
    """``kv_exhausted``: how many cells short."""
    n_prompt_tokens: Count | None = None
    n_ctx: Count | None = None
    """``context_length_exceeded``: tokens that a slot takes."""


class Error(Shape):
    """Every error of the proxy."""

    error: ErrorDetail
    src: Literal["polykv_proxy"]


class PoolState(Shape):
    """A pool, and where it is now."""

    pool_id: Annotated[int, Field(ge=1)]
    """The proxy's own; stays the same over restarts of the engine."""
    name: str | None
    parent: Annotated[int, Field(ge=-1)]
    """-1: a root."""
    branch_pos: Count
    """Tokens inherited from the parent: as the engine really branched."""
    prefix_len: Annotated[int, Field(ge=1)]
    own_n_tokens: Annotated[int, Field(ge=1)]
    seq_id: Count | None
    """The engine's sequence; null when it is not resident."""
    residency: Residency


class PoolMade(PoolState):
    """A pool that is there now."""

    materialize_ms: Annotated[float, Field(ge=0)]
    same_as: Annotated[int, Field(ge=1)] | None
    """The oldest other pool with the very same tokens, whose cells it can share; null: there is none."""


class PoolPinned(PoolState):
    """A pool that was pinned or unpinned."""

    pinned: bool
    changed: bool
    """false: it was so before."""
    pinned_cells: Count
    """Cells of all pinned pools and what they inherit, each once."""
    budget_cells: Count | None
    """So many may be pinned."""


class PoolSession(Shape):
    """A session, as its pool shows it."""

    session_id: str
    prefix_n_tokens: Count | None
    """Tokens that are pools'."""
    suffix_n_tokens: Count | None
    """Tokens of its own."""
    marginal_kv_bytes: Count | None
    tps_ewma: float | None
    ttft_ms: float | None
    state: SessionState | None
    warm_bytes: Count | None
    """Saved of it outside the cache, also while its slot holds it."""


class PoolShown(Shape):
    """A pool of the tree. Cells, bytes, residency and sequence are null while the engine cannot be reached."""

    pool_id: Annotated[int, Field(ge=1)]
    name: str | None
    parent: Annotated[int, Field(ge=-1)]
    branch_pos: Count
    prefix_len: Annotated[int, Field(ge=1)]
    own_n_tokens: Annotated[int, Field(ge=1)]
    residency: Residency | None
    seq_id: Count | None
    pinned: bool
    orphaned_pin: bool
    """Pinned, without children and sessions."""
    in_use: bool
    """A live session is attached to it or below it, or a request or order needs it."""
    auto: bool
    """Made by the proxy."""
    ttl_s: Annotated[float, Field(ge=0)] | None
    expires_ts: float | None
    """When the grace of a pool that nobody uses ends, or ended."""
    created_ts: float
    last_access_ts: float
    queries: Count
    hits: Count
    own_kv_cells: Count | None
    own_kv_bytes: Count | None
    subtree_kv_cells: Count | None
    subtree_kv_bytes: Count | None
    warm_bytes: Count | None
    children: list[int]
    sessions: list[PoolSession]


class ReleasedShown(Shape):
    """A pool that was released while slots hold cells of it."""

    pool_id: Annotated[int, Field(ge=1)]
    name: str | None
    parent: Annotated[int, Field(ge=-1)]
    branch_pos: Count
    prefix_len: Annotated[int, Field(ge=1)]
    own_kv_cells: Count
    own_kv_bytes: Count | None


class Unpooled(Shape):
    """Cells of nobody's pool, and sessions without one."""

    kv_cells: Count | None
    kv_bytes: Count | None
    sessions: list[PoolSession]


class WarmPlace(Shape):
    """Saved states in one place. ``max_bytes`` 0: it is not used. ``hits``: states that came back from there.

    null: not known, in memory while the engine cannot be reached.
    """

    bytes: Count | None
    max_bytes: Count
    pools: Count | None
    sessions: Count | None
    hits: Count


class WarmShown(Shape):
    """What is saved outside the cache. ``misses``: prefills of what had been saved once."""

    why_off: str | None
    ram: WarmPlace
    disk: WarmPlace
    misses: Count
    saves: Count


class PoolSubtreeShown(Shape):
    """A pool and what is below it: parents before children."""

    pools: list[PoolShown]
    tree_depth: Count
    seq_ids_used: Count | None
    seq_ids_max: Count | None
    kv_cells_used: Count | None
    kv_cells_total: Count | None
    kv_cells_high: Count | None
    """Highest used cell + 1: what every decode scans."""
    idle_tax: Annotated[float, Field(ge=0, le=1)] | None
    """Share of the present decode steps' time that is due to cells nobody at work holds; learned."""
    warm: WarmShown
    kv_bytes_per_token: float | None
    kv_streams_total: Count | None
    kv_streams_free: Count | None
    kv_cells_per_stream: Count | None


class PoolTreeShown(PoolSubtreeShown):
    """The tree: parents before children. Own cells of pools, released ones, sessions and ``unpooled`` add up."""

    released: list[ReleasedShown] | None
    unpooled: Unpooled


class Freed(Shape):
    """All null when the engine could not be asked: they are freed when it is back."""

    seq_ids: Count | None
    kv_cells: Count | None
    kv_bytes: Count | None


class Kept(Shape):
    """What slots of sessions still hold."""

    kv_cells: Count
    kv_bytes: Count | None
    sessions: list[str]


class Released(Shape):
    """Pools that are off the tree, leaves first."""

    released: list[int]
    freed_now: Freed
    freed_later: Kept


class PoolEvicted(PoolState):
    """A pool that has no sequence of its own any more."""

    was: Residency
    """Where it was before. ``cold``: there was nothing to save, and nothing to drop."""
    held_by: Annotated[int, Field(ge=1)] | None
    """Another pool, whose sequence holds all of it: it is still resident."""
    warm_bytes: Count
    """What is saved of it now."""
    freed: Freed


class KeptPool(Shape):
    """A pool that was not evicted."""

    pool_id: int
    reason: Literal["pinned", "in_use"]


class Flushed(Shape):
    """What was evicted of a subtree, leaves first, and what was not."""

    evicted: list[int]
    kept: list[KeptPool]
    freed: Freed


class Divergence(Shape):
    """Where a prompt leaves a pool."""

    pos: Count
    """The first token that the pool does not have."""
    pool_id: int | None
    """That pool, also when too little of it is shared for the prompt to get it."""
    pool_prefix_len: Count | None
    """null: no pool has even the first token."""
    message: Count | None = None
    """Of messages: which one that token is of, counted from 0. null: of none of them, or it cannot be told."""


class Matched(Shape):
    """What a request would get."""

    pool_id: int | None
    name: str | None
    """The pool's, if it has one."""
    prefix_n_tokens: Count
    uncached_n_tokens: Count
    miss_reason: MissReason | None
    """null: a full hit. cold: the pool would be prefilled first."""
    divergence: Divergence | None


class EngineHealth(Shape):
    """The llama-server behind the proxy."""

    reachable: bool
    loading: bool
    hooks: bool | None
    """false: an engine without PolyKV's patches."""
    epoch: str | None
    """One start of the engine."""
    share: str | None
    """``ok``, or why this model and cache layout cannot share."""
    owner: str | None
    """Another proxy that manages the engine's pools."""
    error: str | None


class JournalHealth(Shape):
    """Where pools are kept over restarts."""

    state: Literal["ok", "off", "unusable", "failing"]
    """off: nothing is kept. unusable: pools live in memory instead. failing: the last write failed."""
    path: str | None
    error: str | None
    saved_copy: str | None
    """Where a journal that could not be read was put."""
    pools_of_other_models: Count
    """They wait until their model is the engine's again."""


class Health(Shape):
    """Whether new work is served, and what stands in the way."""

    status: Literal["ok", "loading", "upstream_unavailable", "hung", "not_owner", "draining"]
    engine: EngineHealth
    journal: JournalHealth
    pools: Count
    sessions: Count


class Examined(Shape):
    """What the doctor found, worst first, and the facts it judged by."""

    status: Literal["ok", "warnings", "errors"]
    findings: list[Finding]
    facts: Facts


class OpenApiDocument(BaseModel):
    """This page."""

    model_config = ConfigDict(extra="allow")

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
