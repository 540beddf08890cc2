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
