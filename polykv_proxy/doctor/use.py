"""Pools and sessions as they are used now, and the settings of the proxy."""

from polykv_proxy.doctor.facts import Facts, is_loopback
from polykv_proxy.doctor.finding import Finding
from polykv_proxy.doctor.sizes import MAX_SEQUENCES

IDLE_CELLS_MIN, IDLE_SHARE = 2048, 0.25
"""Idle pools are told about from so many cells and so large a part of what is scanned."""


def more_pools_than_sequences(facts: Facts) -> Finding | None:
    if facts.n_pools is None or facts.max_pools is None or facts.n_pools <= facts.max_pools:
        return None
    return Finding(
        "max_pools_small",
        "info",
        f"the tree has {facts.n_pools} pools, the engine sequences for {facts.max_pools}",
        "they take turns: one that comes back is prefilled first",
        f"more --polykv-max-pools (slots + pools + 2 up to {MAX_SEQUENCES}), if requests miss with `cold` often",
    )


def more_sessions_than_slots(facts: Facts) -> Finding | None:
    if facts.n_live_sessions is None or facts.n_slots is None or facts.n_live_sessions <= facts.n_slots:
        return None
    return Finding(
        "more_sessions_than_slots",
        "info",
        f"{facts.n_live_sessions} live sessions share {facts.n_slots} slots",
        "they displace each other: who comes back is loaded from what was saved; where nothing is saved, it prefills "
        "what it had beyond its pool",
        "more --parallel, or put what they have in common into pools",
    )


def idle_pools(facts: Facts) -> Finding | None:
    n_idle, hi = facts.n_idle_cells, facts.cells_hi
    if facts.kv_unified is False or n_idle is None or not hi or n_idle < IDLE_CELLS_MIN or n_idle < IDLE_SHARE * hi:
        return None
    share = min(1.0, n_idle / hi)
    return Finding(
        "idle_pools_tax",
        "warning" if share >= 0.5 else "info",
        f"{facts.n_idle_pools} resident pools that nobody uses hold {n_idle:,} of the {hi:,} cells up to the highest "
        "in use",
        f"every token of every session scans all of these: about {share:.0%} of its attention reads are for idle pools",
        "`polykvctl pools evict` or release them",
    )


def orphaned_pins(facts: Facts) -> Finding | None:
    if not facts.n_orphaned_pins:
        return None
    n = facts.n_orphaned_pins
    return Finding(
        "orphaned_pins",
        "info",
        f"{n} pinned pool{' has' if n == 1 else 's have'} neither sessions nor children",
        "pinned pools stay in the cache under pressure, used or not",
        "`polykvctl pools unpin` those that nobody waits for (orphaned_pin in `polykvctl pools ls --json`)",
    )


def no_admin_key(facts: Facts) -> Finding | None:
    if facts.has_admin_key is not False or all(is_loopback(host) for host in facts.hosts):
        return None
    where = ", ".join(facts.hosts)
    if facts.has_data_keys:
        why = "every data key may create, evict and release pools, and read prompts in /slots"
    else:
        why = "anybody may send requests; pools can be managed from this machine only"
    return Finding(
        "no_admin_key",
        "warning",
        f"the proxy listens on {where} without an admin key",
        why,
        "set POLYKV_ADMIN_KEY (and POLYKV_API_KEY for the data plane)",
    )


def engine_key_for_all(facts: Facts) -> Finding | None:
    if not facts.has_engine_key or facts.has_data_keys is not False:
        return None
    return Finding(
        "engine_key_for_all",
        "warning",
        "POLYKV_UPSTREAM_API_KEY is set, and POLYKV_API_KEY is not",
        f"whoever reaches the proxy ({', '.join(facts.hosts)}) uses the engine with that key and needs none",
        "set POLYKV_API_KEY: clients then have to send one of its keys",
    )


def default_mode_alone(facts: Facts) -> Finding | None:
    if facts.idle_default_mode is None:
        return None
    return Finding(
        "default_mode_alone",
        "warning",
        f"POLYKV_DEFAULT_MODE is {facts.idle_default_mode}, and there is no POLYKV_DEFAULT_TARGET_TPS",
        "without a floor there is no default policy: no pool is gated unless it was given a policy",
        "set POLYKV_DEFAULT_TARGET_TPS to the tokens per second that every session shall have, or neither",
    )


def journal(facts: Facts) -> Finding | None:
    if facts.journal == "off":
        return Finding(
            "journal_in_memory",
            "warning",
            "pools are kept in memory only (--state :memory:)",
            "they are gone, names and ids too, when the proxy ends",
            "--state FILE, or leave it out for the default",
        )
    if facts.journal in ("unusable", "failing"):
        return Finding(
            "journal_not_written",
            "error",
            "the journal of pools cannot be written",
            facts.journal_error or "what is made now is gone when the proxy ends",
            "free the disk or name another file with --state, and start the proxy again",
        )
    return None


def damaged_journal(facts: Facts) -> Finding | None:
    if facts.journal_saved_copy is None:
        return None
    return Finding(
        "journal_was_damaged",
        "warning",
        "the journal of pools was damaged when the proxy started",
        "pools that it could not give back are gone",
        f"the damaged file is {facts.journal_saved_copy}; delete it when nobody misses them",
    )


def pools_of_other_models(facts: Facts) -> Finding | None:
    if not facts.n_pools_of_other_models:
        return None
    n = facts.n_pools_of_other_models
    return Finding(
        "pools_of_other_models",
        "info",
        f"the journal has {n} pool{'s' if n > 1 else ''} of another model",
        "pools are bound to their model; these are back when it is",
        "start the engine with that model, or another --state for this one",
    )


def warm(facts: Facts) -> Finding | None:
    if not facts.warm_off or facts.share != "ok":
        return None
    return Finding(
        "warm_unavailable",
        "warning" if facts.warm_settings else "info",
        f"there is no warm tier: {facts.warm_off}",
        "what nobody uses stays in the cache, where every token scans it, and comes back by a prefill once it left",
        "start the engine that `polykvctl engine build` makes with --kv-unified and --polykv-save-ram, and leave "
        "POLYKV_WARM_RAM_BYTES above 0",
    )


def warm_disk(facts: Facts) -> Finding | None:
    if facts.warm_off or not facts.warm_disk_off:
        return None
    return Finding(
        "warm_disk_unavailable",
        "warning",
        f"POLYKV_WARM_DISK_BYTES is set, and nothing is saved on disk: {facts.warm_disk_off}",
        "what is saved is lost when the engine restarts, and comes back by a prefill",
        "start llama-server with --polykv-save-path and --polykv-save-disk, as `polykvctl up` does",
    )


def left_states(facts: Facts) -> Finding | None:
    if not facts.n_left_states:
        return None
    n, size = facts.n_left_states, f"{(facts.left_states_bytes or 0) / 1e6:,.1f} MB"
    return Finding(
        "saved_states_left",
        "warning",
        f"{n} file{'s' if n > 1 else ''} of saved states ({size}) lie in {facts.states_folder}, and "
        "POLYKV_WARM_DISK_BYTES is 0",
        "no engine uses them, and they hold prompts",
        "start again with `polykvctl up`: its engine removes them; or set POLYKV_WARM_DISK_BYTES, to use them again",
    )


def warm_under_pressure_only(facts: Facts) -> Finding | None:
    if facts.warm_off != "" or facts.warm_after_s != 0:
        return None
    return Finding(
        "warm_under_pressure_only",
        "info",
        "POLYKV_WARM_AFTER_S is 0",
        "idle pools and sessions stay in the cache until somebody needs their room, and every token scans them",
        "nothing, if that is what it is for; else leave it out",
    )
