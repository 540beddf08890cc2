"""Each finding: when it is there, how bad it is, and that nothing is claimed of what is not known."""

from pathlib import Path
from typing import Any

import pytest

from polykv_proxy.doctor import EngineFlagFacts, EngineSizes, Facts, check_sizes, examine, status_of
from polykv_proxy.doctor.facts import is_loopback

ROOT = Path(__file__).parents[2]

GOOD: dict[str, Any] = {
    "hooks": True,
    "share": "ok",
    "n_swa": 0,
    "swa_full": False,
    "recurrent": False,
    "recurrent_bytes": 0,
    "kv_unified": True,
    "n_slots": 4,
    "max_pools": 16,
    "n_streams": 1,
    "n_ctx_slot": 16384,
    "cells_total": 16384,
    "cells_hi": 10000,
    "n_pools": 3,
    "n_resident": 3,
    "n_idle_pools": 1,
    "n_idle_cells": 1000,
    "n_orphaned_pins": 0,
    "n_live_sessions": 4,
    "hosts": ("127.0.0.1",),
    "has_admin_key": False,
    "has_data_keys": False,
    "journal": "ok",
    "n_pools_of_other_models": 0,
    "warm_off": "",
    "warm_after_s": 20.0,
}
FLAGS: dict[str, Any] = {
    "hosts": ("127.0.0.1",),
    "has_api_key": False,
    "n_batch": 256,
    "prefill_quota": 256,
    "cache_ram_mib": 0,
    "cache_idle_slots": False,
    "cache_reuse": 0,
    "context_shift": False,
    "sleep_idle_s": -1,
    "n_lora": 0,
    "has_media": False,
}


def facts(flags: dict[str, Any] | None = None, **changed: Any) -> Facts:
    return Facts(**GOOD | changed, flags=EngineFlagFacts(**FLAGS | (flags or {})))


def found(flags: dict[str, Any] | None = None, **changed: Any) -> list[tuple[str, str]]:
    return [(finding.id, finding.severity) for finding in examine(facts(flags, **changed))]


def test_a_good_set_up_has_no_findings():
    assert found() == []
    assert status_of([]) == "ok"


def test_what_is_not_known_makes_no_finding():
    assert examine(Facts(hooks=True)) == []


SPLIT = {"kv_unified": False, "n_streams": 22}

CASES = [
    ("engine_unreachable", "error", {"engine": "away", "engine_error": "connection refused"}),
    ("engine_unreachable", "error", {"engine": "unknown", "hooks": None}),
    ("engine_loading", "warning", {"engine": "loading"}),
    ("engine_key_missing", "error", {"engine": "unknown", "hooks": None, "engine_trouble": "key_missing"}),
    ("engine_key_refused", "error", {"engine": "unknown", "hooks": None, "engine_trouble": "key_refused"}),
    ("engine_hangs", "error", {"engine": "away", "engine_trouble": "hangs"}),
    ("engine_hangs", "error", {"engine_trouble": "hangs"}),
    ("engine_key_for_all", "warning", {"has_engine_key": True}),
    ("engine_without_pools", "error", {"hooks": False}),
    ("not_owner", "error", {"owner": "host:1:ab"}),
    ("swa_without_full", "error", {"share": "the model has a sliding window", "n_swa": 1024}),
    ("model_cannot_share", "error", {"share": "this model keeps no KV cache"}),
    ("engine_open", "warning", {"flags": {"hosts": ("0.0.0.0",)}}),
    ("engine_sleeps", "info", {"sleeping": True}),
    ("sleep_loses_pools", "warning", {"flags": {"sleep_idle_s": 900}}),
    ("split_cache", "info", SPLIT),
    ("recurrent_model", "info", {"recurrent": True, "recurrent_bytes": 1 << 20}),
    ("recurrent_model", "warning", {"recurrent": True, "recurrent_bytes": 60 << 20}),
    ("batch_large", "warning", {"flags": {"n_batch": 2048}}),
    ("prefill_quota_off", "warning", {"flags": {"prefill_quota": 0}}),
    ("idle_slots_cleared", "warning", {"flags": {"cache_idle_slots": True}}),
    ("cache_ram_unpooled_only", "info", {"flags": {"cache_ram_mib": 4096}}),
    ("cache_ram_unpooled_only", "info", {"flags": {"cache_ram_mib": -1}}),
    ("cache_ram_unpooled_only", "info", {"flags": {"cache_ram_mib": 8192, "cache_idle_slots": None}}),
    ("context_shift_not_for_pools", "warning", {"flags": {"context_shift": True}}),
    ("cache_reuse_not_for_pools", "info", {"flags": {"cache_reuse": 256}}),
    ("adapters_bind_pools", "info", {"flags": {"n_lora": 2}}),
    ("media_unpooled", "info", {"flags": {"has_media": True}}),
    ("idle_pools_tax", "info", {"n_idle_cells": 3000}),
    ("idle_pools_tax", "warning", {"n_idle_cells": 6000}),
    ("orphaned_pins", "info", {"n_orphaned_pins": 2}),
    ("max_pools_small", "info", {"n_pools": 17}),
    ("more_sessions_than_slots", "info", {"n_live_sessions": 5}),
    ("default_mode_alone", "warning", {"idle_default_mode": "enforced"}),
    ("no_admin_key", "warning", {"hosts": ("127.0.0.1", "0.0.0.0")}),
    ("no_admin_key", "warning", {"hosts": ("192.168.1.7",), "has_data_keys": True}),
    ("journal_in_memory", "warning", {"journal": "off"}),
    ("journal_not_written", "error", {"journal": "unusable", "journal_error": "no such folder"}),
    ("journal_not_written", "error", {"journal": "failing"}),
    ("journal_was_damaged", "warning", {"journal_saved_copy": "/state/pools.db.damaged"}),
    ("pools_of_other_models", "info", {"n_pools_of_other_models": 3}),
    ("warm_unavailable", "info", {"warm_off": "the cache is split", "warm_disk_off": "no path"}),
    ("warm_unavailable", "warning", {"warm_off": "no memory", "warm_settings": ("warm_ram_bytes",)}),
    ("warm_disk_unavailable", "warning", {"warm_disk_off": "no path"}),
    ("warm_under_pressure_only", "info", {"warm_after_s": 0.0}),
    ("saved_states_left", "warning", {"n_left_states": 1, "left_states_bytes": 38_500_000, "states_folder": "/s"}),
]


@pytest.mark.parametrize(("id_", "severity", "changed"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_each_finding_alone(id_: str, severity: str, changed: dict[str, Any]):
    """Changing these facts of a good set-up makes this one finding and no other."""
    assert found(**changed) == [(id_, severity)]


@pytest.mark.parametrize(
    ("why", "severity", "do"),
    [
        ("emptied", "warning", "--no-cache-idle-slots"),
        ("hidden", "warning", "--no-slots"),
        ("router", "info", "before one model"),
        ("one_slot", "info", "--parallel"),
    ],
)
def test_why_sessions_keep_no_slots_of_a_plain_llama_server(why: str, severity: str, do: str):
    [pools, pins] = examine(Facts(**GOOD | {"hooks": False, "pins_off": why}))
    assert (pools.id, pins.id, pins.severity) == ("engine_without_pools", "sessions_not_pinned", severity)
    assert do in pins.do
    assert found(hooks=True, pins_off=why) == []


def test_how_much_is_left_on_disk_and_what_removes_it():
    [left] = examine(
        Facts(**GOOD | {"n_left_states": 12, "left_states_bytes": 1_234_500_000, "states_folder": "/state/x.db.states"})
    )
    assert left.what == (
        "12 files of saved states (1,234.5 MB) lie in /state/x.db.states, and POLYKV_WARM_DISK_BYTES is 0"
    )
    assert "polykvctl up" in left.do


def test_a_small_context_on_a_split_cache():
    assert found(**SPLIT, n_ctx_slot=744) == [("split_context_small", "warning"), ("split_cache", "info")]


@pytest.mark.parametrize(
    "changed",
    [
        {"hosts": ("127.0.0.1", "::1", "localhost")},
        {"hosts": ("0.0.0.0",), "has_admin_key": True},
        {"flags": {"hosts": ("0.0.0.0",), "has_api_key": True}},
        {"flags": {"hosts": ("/run/engine.sock",)}},
        {"n_idle_cells": 2000, "cells_hi": 2000},
        {"n_idle_cells": 3000, "kv_unified": False, "recurrent": True, "cells_total": 0},
        {"flags": {"n_batch": 512}},
        {"n_pools": 16, "n_live_sessions": 4},
        {"warm_off": None, "warm_after_s": 0.0},
        {"warm_settings": ("warm_ram_bytes",)},
        {"flags": {"cache_ram_mib": 8192}},
        {"has_engine_key": True, "has_data_keys": True},
        {"has_engine_key": True, "has_data_keys": None},
    ],
)
def test_no_finding_at_the_edge(changed: dict[str, Any]):
    assert [id_ for id_, severity in found(**changed) if id_ != "recurrent_model"] == []


def test_the_worst_comes_first():
    severities = [severity for _, severity in found({"cache_ram_mib": 1, "n_batch": 2048}, owner="x", n_pools=40)]
    assert severities == ["error", "warning", "info", "info"]
    assert status_of(examine(facts(owner="x"))) == "errors"
    assert status_of(examine(facts({"n_batch": 2048}))) == "warnings"
    assert status_of(examine(facts(n_pools=40))) == "ok"


def test_every_finding_says_what_why_and_what_to_do():
    for _, _, changed in CASES:
        for finding in examine(facts(**changed)):
            assert all([finding.what, finding.why, finding.do])
            assert not any(text.endswith(".") for text in (finding.what, finding.why))


def test_the_page_names_every_finding():
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    ids = {case[0] for case in CASES} | {"split_context_small", "too_many_sequences", "batch_too_small"}
    assert [id_ for id_ in ids if f"`{id_}`" not in page] == []


@pytest.mark.parametrize(
    ("sizes", "id_"),
    [
        ((4, 16, 256), None),
        ((4, 250, 256), None),
        ((4, 251, 512), "too_many_sequences"),
        ((4, 16, 21), "batch_too_small"),
        ((4, 0, 1), None),
    ],
)
def test_sizes_that_llama_server_would_refuse(sizes: tuple[int, int, int], id_: str | None):
    finding = check_sizes(EngineSizes(*sizes))
    assert (finding.id if finding is not None else None) == id_


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "/run/engine.sock"])
def test_only_this_machine_reaches(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "engine"])
def test_others_reach(host: str):
    assert not is_loopback(host)
