"""The engine itself: whether it is there, can share, and how its cache is laid out."""

from polykv_proxy.doctor.facts import Facts, PinsOff
from polykv_proxy.doctor.finding import Finding, Severity

SMALL_CONTEXT = 4096
"""Tokens of a slot. A coding agent's tools and system prompt alone are about as long."""

LARGE_STATE_BYTES = 1 << 30


def engine_unreachable(facts: Facts) -> Finding | None:
    if facts.engine_trouble is not None:
        return None  # it is there, see below
    if facts.engine == "loading":
        return Finding(
            "engine_loading",
            "warning",
            f"the engine at {facts.engine_url} loads its model",
            "requests are answered 503 until it is done",
            "wait; its log shows the progress",
        )
    return Finding(
        "engine_unreachable",
        "error",
        f"the engine at {facts.engine_url} does not answer",
        facts.engine_error or "nothing can be served",
        "start llama-server there, or name the right one with --upstream (POLYKV_UPSTREAM_URL)",
    )


_KEYS = (
    "set POLYKV_UPSTREAM_API_KEY to the engine's --api-key, and POLYKV_API_KEY to what clients then have to send to "
    "the proxy: without that, whoever reaches the proxy uses the engine's key"
)


def engine_key(facts: Facts) -> Finding | None:
    if facts.engine_trouble == "key_missing":
        return Finding(
            "engine_key_missing",
            "error",
            f"the engine at {facts.engine_url} asks for a key, and POLYKV_UPSTREAM_API_KEY is not set",
            "every request gets the engine's 401, also one with the right key: a client's own is never sent on",
            _KEYS,
        )
    if facts.engine_trouble == "key_refused":
        return Finding(
            "engine_key_refused",
            "error",
            f"the engine at {facts.engine_url} refuses the key of POLYKV_UPSTREAM_API_KEY",
            "every request gets the engine's 401; a client's own key is never sent on",
            _KEYS,
        )
    return None


def engine_hangs(facts: Facts) -> Finding | None:
    if facts.engine_trouble != "hangs":
        return None
    if facts.engine == "ready":
        why = "requests run, and nothing was decoded or processed for a while"
    else:
        why = facts.engine_error or "nothing can be served"
    return Finding(
        "engine_hangs",
        "error",
        f"the engine at {facts.engine_url} is there and gets nowhere",
        why,
        "see its log, and whether its process is stopped or waits for a device or a disk; restart it if it does not go "
        "on",
    )


def engine_without_pools(facts: Facts) -> Finding | None:
    return Finding(
        "engine_without_pools",
        "error",
        "the engine is a llama-server without PolyKV hooks, or pools are off",
        "requests are relayed and sessions keep their slots at best; nothing is shared, creating a pool is a 501",
        "`polykvctl engine build` makes one with hooks; start it with --polykv-max-pools N, or use `polykvctl up`",
    )


_PINS_OFF: dict[PinsOff, tuple[Severity, str, str]] = {
    "router": ("info", "it is in router mode, and every model has slots of its own", "put a proxy before one model"),
    "one_slot": ("info", "it has one slot", "start it with --parallel N for as many sessions as talk at once"),
    "hidden": ("warning", "it does not show which slots are in use", "start it without --no-slots"),
    "emptied": (
        "warning",
        "it empties slots at rest (--cache-idle-slots, its default, with a unified cache)",
        "start it with --no-cache-idle-slots",
    ),
}


def sessions_not_pinned(facts: Facts) -> Finding | None:
    if facts.pins_off is None:
        return None
    severity, reason, do = _PINS_OFF[facts.pins_off]
    return Finding(
        "sessions_not_pinned",
        severity,
        f"sessions keep no slots of this llama-server: {reason}",
        "it chooses slots by itself, and what one session said may give way to another that begins alike",
        do,
    )


def not_owner(facts: Facts) -> Finding | None:
    if facts.owner is None:
        return None
    return Finding(
        "not_owner",
        "error",
        f"another proxy ({facts.owner}) manages the engine's pools",
        "this one relays without pools; two would free each other's",
        "stop one of them, or give each an engine of its own",
    )


def sharing_refused(facts: Facts) -> Finding | None:
    if facts.share is None or facts.share == "ok":
        return None
    if facts.n_swa and not facts.swa_full:
        return Finding(
            "swa_without_full",
            "error",
            f"the model has a sliding window of {facts.n_swa} tokens and the engine keeps no more than that",
            "a prefix is gone when others need it: every pool is refused, requests go unpooled",
            "start llama-server with --swa-full",
        )
    return Finding(
        "model_cannot_share",
        "error",
        "the engine refuses pools",
        facts.share,
        "use another model, or start without --polykv-max-pools to save the memory of its sequences",
    )


def split_cache(facts: Facts) -> Finding | None:
    if facts.kv_unified is not False or (facts.recurrent and not facts.cells_total):
        return None
    context = f"each slot has {facts.n_ctx_slot} tokens of context" if facts.n_ctx_slot else "a slot has a part of it"
    return Finding(
        "split_cache",
        "info",
        "the engine runs without --kv-unified: every share is a copy",
        f"a pool saves the prefill but not the memory, and of {facts.n_streams} streams {context}",
        "start llama-server with --kv-unified to share cells instead",
    )


def split_context(facts: Facts) -> Finding | None:
    if facts.kv_unified is not False or not facts.n_ctx_slot or facts.n_ctx_slot >= SMALL_CONTEXT:
        return None
    return Finding(
        "split_context_small",
        "warning",
        f"a slot's context is {facts.n_ctx_slot} tokens",
        f"without --kv-unified slots, pools and two more sequences each get a {facts.n_streams}th of the cache",
        "--kv-unified, a larger --ctx-size, or fewer --polykv-max-pools",
    )


def recurrent_state(facts: Facts) -> Finding | None:
    if not facts.recurrent:
        return None
    n_sequences = (facts.n_slots or 0) + (facts.max_pools or 0) + 2
    n_bytes = (facts.recurrent_bytes or 0) * n_sequences
    return Finding(
        "recurrent_model",
        "warning" if n_bytes > LARGE_STATE_BYTES else "info",
        "the model keeps a recurrent state",
        "prefixes are shared at a pool's end or at a checkpoint before it, forks report where they really branch; "
        f"{n_sequences} sequences take {n_bytes / 1e6:,.0f} MB of states",
        "fork and attach at a pool's end; fewer --polykv-max-pools take less memory",
    )
