"""What the routes of admission answer, as models (see ``shapes``)."""

from typing import Annotated, Literal

from pydantic import Field

from polykv_proxy.routes.shapes import Count, Shape

Tps = Annotated[float, Field(ge=0)]


class AdmissionShown(Shape):
    """The policy that holds for new sessions of a pool. ``source`` none: nobody is gated, all its fields are null."""

    pool_id: Annotated[int, Field(ge=1)]
    name: str | None
    source: Literal["own", "inherited", "default", "none"]
    inherited_from: int | Literal["default"] | None
    """The nearest pool above that has it, or the proxy's settings; null: it is its own, or there is none."""
    scope: Annotated[int, Field(ge=1)]
    """Admissions are measured and forecast together for all pools of the same scope."""
    target_tps_per_session: Annotated[float, Field(gt=0)] | None
    """The floor: tokens per second and session."""
    mode: Literal["advisory", "enforced"] | None
    on_saturation: Literal["reject", "warn", "queue"] | None
    guarantee_min_sessions: Count | None
    settle_tokens: Count | None
    settle_max_ms: Count | None
    estimator: Literal["settled", "roofline"] | None
    max_turn_hold_ms: Count | None
    max_queue: Count | None
    queue_timeout_ms: Count | None


class AdmissionChanged(AdmissionShown):
    """What holds from now on."""

    changed: bool
    """false: its own policy was so before."""


class CapacityShown(Shape):
    """Whether one more session may come in, and what that rests on. null: not known, or there is no such thing here."""

    pool_id: Annotated[int, Field(ge=1)]
    name: str | None
    can_admit: bool
    reason: str
    """``ok``, ``continuation``, ``guaranteed minimum``, ``measurement settling``, ``context headroom exhausted``, …"""
    projected_mean_tps_if_admitted: Tps | None
    """What the verdict compares with the floor: one of the three below."""
    projected_mean_tps_model: Tps | None
    projected_mean_tps_measured: Tps | None
    projected_mean_tps_roofline: Tps | None
    projected_idle_estimate: bool
    """From the last settled mean, since everybody is between two turns."""
    drop_per_admit_ewma: Tps | None
    """What an admission cost the mean, on average."""
    mean_active_tps: Tps | None
    n_active: Count
    n_warming: Count
    """At work, and no rate was measured yet: they are not in the mean."""
    n_pool_sessions: Count
    guaranteed: bool
    known_session: bool
    """``session_id`` was served before: it goes on, whatever the numbers say."""
    settling: bool
    settle_remaining_ms: Count | None
    headroom_sessions: Count | None
    """So many more would fit now."""
    kv_headroom_pct: Annotated[float, Field(ge=0, le=100)] | None
    compaction_pressure: Annotated[float, Field(ge=0, le=1)] | None
    """How near the wall the cache or the longest conversation is; 0 when nobody is there."""
    ctx_used: Count | None
    """Of the session that ``session_id`` names; a new one begins with what the pool has."""
    ctx_total: Count | None
    ctx_headroom_tokens: Count | None
    kv_streams_total: Count | None
    kv_streams_free: Count | None
    kv_cells_per_stream: Count | None
    """null on a unified cache."""
    target_tps_per_session: Annotated[float, Field(gt=0)] | None
    mode: Literal["advisory", "enforced"] | None
    estimator: Literal["settled", "roofline"] | None
    seq_ids_used: Count | None
    seq_ids_max: Count | None
