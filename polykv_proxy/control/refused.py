"""The gate's refusals as errors: what happened, why, and what to do next."""

from polykv_proxy.errors import AdmissionRefused, LoadUnknown, PoolSaturated, QueueFull, QueueTimeout
from polykv_proxy.gate.outcome import RefusalCode, Refused, retry_after
from polykv_proxy.gate.policy import Policy
from polykv_proxy.gate.verdict import FLOOR_IDLE, HARD
from polykv_proxy.tree.pool import Pool

CLASSES: dict[RefusalCode, type[AdmissionRefused]] = {
    "pool_saturated": PoolSaturated,
    "queue_full": QueueFull,
    "queue_timeout": QueueTimeout,
    "upstream_unavailable": LoadUnknown,
}


def refusal_of(refused: Refused, pool: Pool, policy: Policy, u: float, gap_s: float) -> AdmissionRefused:
    """``u``: a random number from 0 to 1. ``gap_s``: so long a session counts after a turn."""
    capacity = refused.capacity
    after_s, after_ms = retry_after(refused.retry_after_s, u)
    projected = capacity.projected_mean_tps_if_admitted
    why = refused.reason
    if projected is not None and refused.reason not in HARD:
        why += f" ({projected:.1f} tokens per second and session, the floor is {policy.target_tps_per_session:,.10g})"
    happened = {
        "pool_saturated": f"pool {pool.label} takes no new session now",
        "queue_full": f"the line of new sessions for pool {pool.label} is full ({policy.max_queue} at most)",
        "queue_timeout": f"no place in pool {pool.label} came free within {policy.queue_timeout_ms / 1e3:,.10g} s",
        "upstream_unavailable": f"the engine's load is not known, so pool {pool.label} takes no new session",
    }[refused.code]
    if refused.reason == FLOOR_IDLE:
        n = capacity.n_at_rest
        at_rest = "1 session at rest counts" if n == 1 else f"{n} sessions at rest count"
        why += (
            f"; {at_rest} as live for {gap_s:,.10g} s after a turn (POLYKV_SESSION_GAP_S), and DELETE "
            "/polykv/sessions/{id} (polykvctl sessions delete) of those that are done gives their place up at once"
        )
    next_step = f"try again in {after_s} s"
    if refused.reason not in HARD:
        next_step += ', or send "overcommit": true to go past the floor'
    return CLASSES[refused.code](
        f"{happened}: {why}; {next_step}",
        reason=refused.reason,
        retry_after_s=after_s,
        retry_after_ms=after_ms,
        pool_id=pool.pool_id,
        projected_mean_tps_if_admitted=round(projected, 3) if projected is not None else None,
        target_tps_per_session=policy.target_tps_per_session,
    )
