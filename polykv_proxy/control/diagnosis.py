"""The facts that the doctor looks at, collected from the engine's last stats, the settings and the tree; and what of
its findings goes to the log when an engine was found."""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polykv_proxy.config import MEMORY_STATE, Settings
from polykv_proxy.control.lease import Lease
from polykv_proxy.control.plain import PlainEngine
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved import SavedStates
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.doctor import EngineFlagFacts, Facts, examine
from polykv_proxy.doctor.facts import Trouble
from polykv_proxy.engine.local import states_folder
from polykv_proxy.errors import EngineKeyRefused, UpstreamTimeout
from polykv_proxy.sessions import SessionBook
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import Stats

_STATE_FILE = re.compile(r"[0-9a-f]{16}-[0-9]+\.state(\.tmp)?")
"""What the engine calls its files of saved states, finished or not."""

_TOLD_AT_BOOT = frozenset({"split_cache", "recurrent_model"})
"""Of what is only good to know, this changes what every pool is."""


def collect_facts(
    *,
    settings: Settings,
    watch: EngineWatch,
    plain: PlainEngine,
    lease: Lease,
    tree: PoolTree,
    sessions: SessionBook,
    room: Room,
    saved: SavedStates,
    journal: Mapping[str, Any],
    now_s: float,
) -> Facts:
    """What is known now. Ask ``Control.refresh`` first: this only reads.

    ``journal``: its status as ``GET /polykv/health`` shows it.

    Units:   now_s seconds, the clock of the sessions
    """
    answers = watch.state == "ready" and bool(watch.hooks)
    stats = (watch.stats if answers and not watch.sleeping else None) or Stats()
    known = bool(stats.epoch)
    cells = stats.cells
    in_use = room.in_use()
    residents = tree.residents()
    folder = states_folder(Path(settings.state_path)) if settings.state_path != MEMORY_STATE else None
    # An engine with a budget of its own may be using them.
    unused = known and not settings.warm_disk_bytes and not stats.saved.disk.n_bytes_max
    left = _state_files(folder) if folder is not None and unused else None
    attached = {session.pool_id for session in sessions if not session.closed}
    return Facts(
        engine=watch.state,
        engine_url=settings.upstream_url,
        engine_error=watch.failure.message if watch.failure is not None else None,
        engine_trouble=_trouble(watch),
        hooks=watch.hooks,
        owner=lease.taken_by if answers else None,
        sleeping=watch.sleeping,
        pins_off=plain.pins_off,
        share=stats.share if known else None,
        n_swa=stats.swa.n_swa if stats.swa is not None else None,
        swa_full=stats.swa.full if stats.swa is not None else None,
        recurrent=stats.recurrent if known else None,
        recurrent_bytes=stats.recurrent_bytes_per_seq,
        kv_unified=stats.kv_unified if known else None,
        n_slots=stats.n_slots if known else None,
        max_pools=stats.max_pools if known else None,
        n_streams=cells.n_stream if cells is not None else None,
        n_ctx_slot=stats.n_ctx_slot,
        cells_total=cells.total if cells is not None else None,
        cells_hi=cells.hi if cells is not None else None,
        flags=EngineFlagFacts(
            hosts=stats.flags.hosts,
            has_api_key=stats.flags.has_api_key,
            n_batch=stats.flags.n_batch,
            prefill_quota=stats.flags.prefill_quota,
            cache_ram_mib=stats.flags.cache_ram_mib,
            cache_idle_slots=stats.flags.cache_idle_slots,
            cache_reuse=stats.flags.cache_reuse,
            context_shift=stats.flags.context_shift,
            sleep_idle_s=stats.flags.sleep_idle_s,
            n_lora=stats.flags.n_lora,
            has_media=stats.flags.has_media,
        ),
        n_pools=len(tree),
        n_resident=len(residents) if answers else None,
        n_idle_pools=sum(not pool.pin and pool.pool_id not in in_use for pool in residents),
        n_idle_cells=room.n_evictable() if known else None,
        n_orphaned_pins=sum(
            pool.pin and not tree.children(pool.pool_id) and pool.pool_id not in attached for pool in tree
        ),
        n_live_sessions=sum(sessions.is_live(session.session_id, now_s) for session in sessions),
        hosts=settings.hosts,
        has_admin_key=settings.admin_key is not None,
        has_data_keys=bool(settings.data_keys),
        has_engine_key=settings.upstream_api_key is not None,
        journal=journal["state"],
        journal_error=journal["error"],
        journal_saved_copy=journal["saved_copy"],
        n_pools_of_other_models=journal["pools_of_other_models"],
        idle_default_mode=settings.default_mode if settings.default_target_tps is None else None,
        warm_off=saved.why_off if known else None,
        warm_disk_off=stats.saved.disk.why_off if settings.warm_disk_bytes else None,
        warm_after_s=settings.warm_after_s,
        states_folder=str(folder) if folder is not None else None,
        n_left_states=len(left) if left is not None else None,
        left_states_bytes=sum(left) if left is not None else None,
        warm_settings=tuple(sorted(name for name in settings.model_fields_set if name.startswith("warm_"))),
    )


def _trouble(watch: EngineWatch) -> Trouble | None:
    if isinstance(watch.failure, EngineKeyRefused):
        return "key_missing" if watch.failure.missing else "key_refused"
    # Its threads that answer questions stand still, or only those that compute.
    return "hangs" if isinstance(watch.failure, UpstreamTimeout) or watch.hangs else None


def _state_files(folder: Path) -> list[int] | None:
    """Sizes of the files that an engine made in this folder; None where it cannot be seen, as on another machine."""
    try:
        with os.scandir(folder) as entries:
            files = [entry for entry in entries if _STATE_FILE.fullmatch(entry.name)]
            return [file.stat(follow_symlinks=False).st_size for file in files if file.is_file(follow_symlinks=False)]
    except OSError:
        return None


def boot_lines(facts: Facts) -> list[tuple[int, str]]:
    """What an operator should know about the engine that was found: level and line."""
    lines = []
    if facts.hooks and facts.sleeping:
        lines.append((logging.INFO, "the engine is ready and sleeps"))
    elif facts.hooks:
        lines.append((logging.INFO, f"the engine is ready: {facts.n_slots} slots, up to {facts.max_pools} pools"))
    for finding in examine(facts):
        if finding.severity != "info":
            lines.append((logging.WARNING, finding.as_line()))
        elif finding.id in _TOLD_AT_BOOT:
            lines.append((logging.INFO, finding.as_line()))
    return lines
