"""What the checks look at: plain values, None where something is not known."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlagFacts:
    """Flags of llama-server as they took effect."""

    hosts: tuple[str, ...] | None = None
    has_api_key: bool | None = None
    n_batch: int | None = None
    prefill_quota: int | None = None
    cache_ram_mib: int | None = None
    cache_idle_slots: bool | None = None
    cache_reuse: int | None = None
    context_shift: bool | None = None
    sleep_idle_s: int | None = None
    n_lora: int | None = None
    has_media: bool | None = None


PinsOff = Literal["router", "one_slot", "hidden", "emptied"]
"""Several models with slots of their own; one slot; slots are not shown; slots at rest are emptied."""


Trouble = Literal["key_missing", "key_refused", "hangs"]
"""It asks for a key and the proxy has none; it does not take the proxy's; it is there and gets nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """``engine``: as the proxy sees it. ``engine_trouble``: what keeps it from serving though it is there.
    ``share``: ``ok``, or why the engine refuses pools.

    ``pins_off``: of an engine without hooks: why sessions keep no slots; None = they do.
    ``owner``: another proxy that manages the engine's pools. ``n_idle_pools``, ``n_idle_cells``: resident pools that
    nobody uses, and their cells.
    ``hosts``: where the proxy listens. ``journal``: off = pools are forgotten when the proxy ends.
    ``journal_saved_copy``: where a damaged one was put. ``idle_default_mode``: a default admission mode without floor.
    ``warm_off``: why no state is saved outside the cache, empty = it is; ``warm_disk_off``: why none is
    on disk although that was asked for. ``warm_settings``: those of the warm tier that somebody set.
    ``warm_after_s``: 0 = idle pools leave under pressure only. ``n_left_states``: files of saved
    states in ``states_folder`` that no engine uses, since it has no budget for them.
    Units:   *_cells cells of the cache; n_ctx_slot tokens; recurrent_bytes bytes of one sequence's state;
             left_states_bytes bytes of all those files
    """

    engine: Literal["ready", "loading", "away", "unknown"] = "ready"
    engine_url: str = ""
    engine_error: str | None = None
    engine_trouble: Trouble | None = None
    hooks: bool | None = None
    owner: str | None = None
    sleeping: bool = False
    pins_off: PinsOff | None = None
    share: str | None = None
    n_swa: int | None = None
    swa_full: bool | None = None
    recurrent: bool | None = None
    recurrent_bytes: int | None = None
    kv_unified: bool | None = None
    n_slots: int | None = None
    max_pools: int | None = None
    n_streams: int | None = None
    n_ctx_slot: int | None = None
    cells_total: int | None = None
    cells_hi: int | None = None
    flags: EngineFlagFacts = field(default_factory=EngineFlagFacts)

    n_pools: int | None = None
    n_resident: int | None = None
    n_idle_pools: int | None = None
    n_idle_cells: int | None = None
    n_orphaned_pins: int | None = None
    n_live_sessions: int | None = None

    hosts: tuple[str, ...] = ()
    has_admin_key: bool | None = None
    has_data_keys: bool | None = None
    has_engine_key: bool | None = None
    journal: Literal["ok", "off", "unusable", "failing"] | None = None
    journal_error: str | None = None
    journal_saved_copy: str | None = None
    n_pools_of_other_models: int | None = None
    idle_default_mode: str | None = None
    warm_off: str | None = None
    warm_disk_off: str | None = None
    warm_after_s: float | None = None
    warm_settings: tuple[str, ...] = ()
    states_folder: str | None = None
    n_left_states: int | None = None
    left_states_bytes: int | None = None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A UNIX socket is one of those."""
    if host == "localhost" or host.endswith(".sock"):
        return True
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False
