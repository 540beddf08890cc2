"""What the routes of sessions, rates and requests answer, as models (see ``shapes``)."""

from typing import Annotated, Literal

from pydantic import Field

from polykv_proxy.routes.shapes import Count, SessionState, Shape


class SessionShown(Shape):
    """A session."""

    session_id: str
    named: bool
    parent_session_id: str | None
    pool_id: int | None
    slot_id: int | None
    state: SessionState
    parked: bool
    """Its conversation is saved outside the cache, and it has no slot. While nothing of it runs that is its state."""
    n_turns: Count
    n_running: Count
    n_decoded: Count | None
    """What runs included; null while it cannot be known."""
    prefix_n_tokens: Count | None
    """Tokens in its slot that are pools'."""
    suffix_n_tokens: Count | None
    """Tokens in its slot that are its own."""
    marginal_kv_bytes: Count | None
    warm_bytes: Count | None
    """Saved of it outside the cache, also while its slot holds it."""
    tps_ewma: float | None
    ttft_ms: float | None
    """Known of streamed replies."""
    ctx_used: Count | None
    ctx_total: Count | None
    ctx_headroom_tokens: Count | None
    last_access_ts: float


class SessionsShown(Shape):
    """All that are open. ``hooks``: told of an engine without them, where sessions keep slots at best."""

    sessions: list[SessionShown]
    hooks: Literal[False] | None = None


class SessionRate(Shape):
    """What a session decodes."""

    session_id: str
    pool_id: int | None
    tps_ewma: Annotated[float, Field(ge=0)] | None
    """Tokens per second of its own turn now, or when it last decoded; null: none was measured yet, or it runs and
    the engine does not say."""
    n_decoded: Count | None
    ttft_ms: float | None
    state: SessionState
    stalled: bool | None
    """Somebody's prompt keeps it from decoding right now. null: not measured, no admission policy is set."""
    stall_ms: Count | None
    """Of this turn so far, in stalls that are over."""
    ctx_used: Count | None
    ctx_total: Count | None
    ctx_headroom_tokens: Count | None


class Rates(Shape):
    """Tokens per second of now; prefill does not count. null: it is not known what the engine does now."""

    ts: float
    aggregate_tps: Annotated[float, Field(ge=0)] | None
    """Of the whole engine."""
    mean_active_tps: Annotated[float, Field(ge=0)] | None
    """Over the ``n_active`` sessions; null also when there are none."""
    n_active: Count | None
    """Sessions that decode now and have a rate."""
    n_warming: Count | None
    """Sessions at the engine that have had no rate yet."""
    sessions: list[SessionRate]


class SessionDropped(Shape):
    """Forgotten; what it has running ends by itself."""

    session_id: str
    detached_from: int | None
    n_running: Count


class DivergentSpan(Shape):
    """The line that differs, as offsets in characters of its text, cut to what can be shown."""

    start: Count
    end: Count
    differs_at: Count
    """The first other character."""
    text: str | None
    """At most 80 characters. null where data keys may ask: prompts of others are not theirs to read."""


class RequestDivergence(Shape):
    """Where a prompt left what it was expected to begin with."""

    against: Literal["session", "answer", "pool", "family"]
    """The last prompt of its session, that with its answer, the pool it asked for, or one of those it belongs with."""
    expected_n_tokens: Count | None
    """So long was that."""
    position: Count | None
    """The first other token. null: not known, or not yet."""
    field: str | None
    """Of the body: system, tools, messages, … null: the text of the other one is not known any more."""
    message: Count | None
    """Counted from 0 in that field; a system prompt beside the messages is 0."""
    role: str | None
    part: Count | None
    """Of its content, if that is a list."""
    key: str | None
    """Of the message, when not its content differs but, say, its ``reasoning_content``."""
    span: DivergentSpan | None


class RequestAdmission(Shape):
    """How a request came past the gate of its pool."""

    decision: Literal["queued", "admitted", "guaranteed", "overcommitted", "warned", "continuation", "refused"]
    reason: str | None
    """Of the verdict, as in ``capacity``; of an advisory policy also why it would have been refused."""
    scope: int | None
    """The pool whose policy it was."""
    waits_for: Literal["admission", "turn"] | None
    """While it waits: for a place in its pool, or until its turn makes nobody too slow."""
    place: Count | None
    """1: it is the next one."""
    eta_ms: Count | None
    """Until its turn comes; null: not known, or not before its time in line is over (``ends_first``)."""
    left_ms: Count | None
    """So long it waits at most."""
    ends_first: bool | None
    sessions_remaining: Count | None
    projected_mean_tps_model: float | None
    projected_mean_tps_measured: float | None
    projected_mean_tps_roofline: float | None
    settled_mean_tps: float | None
    """What the mean was once it had settled: the projections can be held against it."""


class RequestShown(Shape):
    """The receipt of one request."""

    request_id: str
    path: str
    dialect: Literal["native", "completions", "chat", "messages", "responses"]
    stream: bool | None
    received_ts: float
    sent_ts: float | None
    """When the engine got it."""
    first_token_ts: float | None
    """Known of streamed replies."""
    ended_ts: float | None
    """null: it is under way."""
    status: int | None
    error: str | None
    """The code that the proxy answered with; ``incomplete``: the client left, or the reply broke off; ``truncated``: a
    full cache ended it before its limit."""
    message: str | None
    """What it said, when there was too little room for it."""
    decision: Literal["attached", "unpooled", "refused"] | None
    """null: it waits, or its client left while it did."""
    session_id: str | None
    parent_session_id: str | None
    pool_id: int | None
    prefix_n_tokens: Count
    """Tokens that were expected to be shared."""
    cached_n_tokens: Count | None
    """Tokens that the engine reused."""
    prompt_n: Count | None
    """Tokens that it prefilled."""
    predicted_n: Count | None
    slot_id: Count | None
    displaced: list[str]
    """Sessions that lost their slot by it."""
    hold_ms: Count
    """How long it waited in all, before the engine got it."""
    held_ms: dict[Literal["slot", "cells", "pool", "shared_prefill", "saved_state", "admission", "turn"], Count]
    """What for: a free slot, free cells, a pool that came back, another request's prefill, states saved and loaded, a
    place in its pool, others that would have become too slow."""
    miss_reason: str | None
    divergence: RequestDivergence | None
    normalised: list[str]
    """Which lines of it were pinned (``POLYKV_NORMALISE``)."""
    admission: RequestAdmission | None
    """null: no policy holds for its pool, or it has none."""


class RequestsShown(Shape):
    """The newest first."""

    requests: list[RequestShown]
