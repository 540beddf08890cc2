"""What monitoring reads, from memory: no question to the engine, no effect on anything.

Pools are named one by one only while they are resident or somebody is on them, so that a tree of thousands makes no
thousands of series; automatic ones are counted together.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from polykv_proxy.control.door import Door
from polykv_proxy.control.policies import Policies
from polykv_proxy.control.rates import Rates
from polykv_proxy.control.tier import Tier, TierFacts
from polykv_proxy.control.views import Views
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.gate.outcome import Counts
from polykv_proxy.gate.settle import AdmitRecord
from polykv_proxy.ids import PoolId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.tree.accounting import kv_bytes
from polykv_proxy.tree.pool import RESIDENCIES, Pool, Residency
from polykv_proxy.tree.tree import PoolTree

AUTO = "auto"
"""How automatic pools are called together. No pool can have this name."""


@dataclass(slots=True)
class PoolReading:
    """One pool, or all automatic ones. ``tps``: tokens per second of those who decode on it now; None: not known.

    ``target_tps``: the floor of its policy; None: it has none, or these are several pools.
    """

    tps: float | None = 0.0
    target_tps: float | None = None
    kv_bytes: int = 0
    n_sessions: int = 0
    n_queries: int = 0
    n_hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionReading:
    """``n_waiting``: new sessions at the door; ``n_held``: turns; ``n_policies``: pools with one of their own.

    ``forecast_errors``: by estimator, how far from the settled mean it was, on average over the last admissions.
    """

    n_waiting: int = 0
    n_held: int = 0
    n_policies: int = 0
    forecast_errors: Mapping[str, float] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """None: not known, and then not shown. ``epoch``: which start of the engine this is; asleep, the one before.

    ``cells_*``: an engine that sleeps has given its cells back, so none is used; the total is what it has awake.
    ``n_running``, ``n_waiting``: requests that the engine is at, and those that wait, here or there.
    """

    engine_up: bool
    epoch: str | None
    pools: Mapping[str, PoolReading]
    n_pools: Mapping[Residency, int] | None
    n_sessions: Mapping[str, int]
    seq_ids_used: int | None
    seq_ids_max: int | None
    cells_used: int | None
    cells_total: int | None
    cells_high: int | None
    warm: TierFacts
    admission: AdmissionReading
    aggregate_tps: float | None
    mean_active_tps: float | None
    n_running: int
    n_waiting: int
    model: str | None


def take_readings(
    tree: PoolTree,
    watch: EngineWatch,
    views: Views,
    tier: Tier,
    *,
    rates: Rates,
    sessions: SessionBook,
    policies: Policies,
    door: Door,
) -> Readings:
    stats = watch.stats
    up = watch.state == "ready"
    cells = stats.cells if stats is not None and up else None
    asleep = up and watch.sleeping
    per_token = stats.kv_bytes_per_token if stats is not None else None
    facts = views.session_facts()
    on_pool = {session.pool_id for session in facts if session.pool_id is not None}
    own_cells = views.own_cells()
    pools: dict[str, PoolReading] = {}
    n_pools: Counter[Residency] = Counter(dict.fromkeys(RESIDENCIES, 0))
    named: dict[PoolId, str] = {}
    holders = tree.holders()
    for pool in tree:
        holder = holders.get(pool.pool_id)
        n_pools["resident" if holder is not None else pool.residency] += 1
        if holder is None and pool.pool_id not in on_pool:
            continue
        label = named[pool.pool_id] = AUTO if pool.auto else pool.label
        reading = pools.setdefault(label, PoolReading())
        policy = policies.resolve(pool.pool_id).policy if not (pool.auto or policies.is_empty) else None
        reading.target_tps = policy.target_tps_per_session if policy is not None else None
        _add_pool(reading, pool, own_cells.get(pool.pool_id, 0) if up else 0, per_token)
    live = rates.is_live()
    for session in facts:
        if session.pool_id in named:
            reading = pools[named[session.pool_id]]
            reading.n_sessions += 1
            if session.state == "decoding" and session.tps_ewma is not None and reading.tps is not None:
                reading.tps += session.tps_ewma
    for reading in pools.values():
        reading.tps = reading.tps if live else None
    decoding = [s.tps_ewma for s in facts if s.state == "decoding" and s.tps_ewma is not None]
    n_sent = sum(turn.sent_s is not None for turn in sessions.running.values())
    n_deferred = stats.n_deferred if live and stats is not None else 0
    n_busy = sum(not slot.idle for slot in stats.slots) if live and stats is not None else 0
    return Readings(
        engine_up=up,
        epoch=stats.epoch if asleep and stats is not None else watch.epoch,
        pools=pools,
        n_pools=n_pools if up else None,  # what an engine that is away still holds nobody knows
        n_sessions=Counter(session.state or "idle" for session in facts),
        seq_ids_used=len(tree.residents()) if up else None,
        seq_ids_max=stats.max_pools if stats is not None else None,
        cells_used=None if cells is None else 0 if asleep else cells.used,
        cells_total=cells.total if cells is not None else None,
        cells_high=None if cells is None or cells.hi is None else 0 if asleep else cells.hi,
        warm=tier.facts(),
        admission=AdmissionReading(
            door.n_waiting, door.n_held, policies.n_own, forecast_errors(door.records), door.counts
        ),
        aggregate_tps=rates.aggregate_tps(),
        mean_active_tps=sum(decoding) / len(decoding) if live and decoding else None,
        n_running=max(n_sent - n_deferred, n_busy),  # some are relayed unread: the engine's own count has them
        n_waiting=len(sessions.running) - n_sent + n_deferred,
        model=PurePath(stats.model.path).name if stats is not None and stats.model.path else None,
    )


def forecast_errors(records: Iterable[AdmitRecord]) -> dict[str, float]:
    """Mean absolute error of each estimator, in tokens per second; those that forecast nothing are left out.

    A forecast is of one more session: where several were let in before it had settled it says nothing.
    """
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.mean_tps is not None and record.n_admits == 1:
            for by in ("model", "measured", "roofline"):
                forecast = getattr(record.forecasts, by)
                if forecast is not None:
                    errors[by].append(abs(forecast - record.mean_tps))
    return {by: sum(found) / len(found) for by, found in errors.items()}


def _add_pool(reading: PoolReading, pool: Pool, n_cells: int, bytes_per_token: float | None) -> None:
    reading.kv_bytes += kv_bytes(n_cells, bytes_per_token) or 0
    reading.n_queries += pool.n_queries
    reading.n_hits += pool.n_hits
    reading.query_tokens += pool.n_query_tokens
    reading.hit_tokens += pool.n_hit_tokens
