"""``GET /metrics``: llama-server's own, then ours, in the text format of Prometheus.

Ours come from memory and are there also while the engine is away or too busy to answer. Labels name pools, never
sessions. A scrape changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from polykv_proxy.control import Control
from polykv_proxy.control.readings import AdmissionReading, PoolReading, Readings
from polykv_proxy.control.tier import TierFacts
from polykv_proxy.errors import UpstreamError
from polykv_proxy.gate.verdict import REFUSALS
from polykv_proxy.relay.costs import Costs
from polykv_proxy.relay.costs_exposed import as_vllm, of_costs
from polykv_proxy.tree.pool import Residency

log = logging.getLogger("polykv.metrics")

PREFIX = "opencoti_polykv:"

_PoolMetric = tuple[str, str, Callable[[PoolReading], float | None]]

_OF_THE_PAGE = frozenset({"content-length", "content-type", "content-encoding", "etag"})
"""Headers of the engine that are not true of its page with ours behind it."""

ENGINE_PATIENCE_S = 2.0
"""llama-server answers between two batches; who scrapes gives up after 10 s, by default."""


async def metrics_answer(control: Control, costs: Costs, request: web.Request, request_id: str) -> web.Response:
    own, headers = await _of_engine(control, request.headers.getall("Origin", []))
    return web.Response(
        body=own + exposition(control.readings(), costs, aliases=control.settings.metrics_aliases),
        headers=[*headers, ("Content-Type", CONTENT_TYPE_PLAIN_0_0_4), ("x-request-id", request_id)],
    )


async def _of_engine(control: Control, origins: Iterable[str]) -> tuple[bytes, list[tuple[str, str]]]:
    """What llama-server says, with its headers; nothing when it does not (started without --metrics, away, busy).

    Asleep it tells what it counted before, and sleeps on.
    """
    nothing: tuple[bytes, list[tuple[str, str]]] = (b"", [])
    try:
        async with asyncio.timeout(ENGINE_PATIENCE_S):
            asked = [(b"Origin", origin.encode("utf-8", "surrogateescape")) for origin in origins]  # whom it lets read
            async with await control.engine.open("GET", "/metrics", asked) as upstream:
                if upstream.status != 200:
                    return nothing
                text = await upstream.read()
                headers = [(k, v) for k, v in upstream.returnable_headers() if k.lower() not in _OF_THE_PAGE]
    except (TimeoutError, UpstreamError) as e:
        log.info("no metrics from the engine: %s", str(e) or f"no answer within {ENGINE_PATIENCE_S:g} s")
        return nothing
    return text if not text or text.endswith(b"\n") else text + b"\n", headers


def exposition(readings: Readings, costs: Costs, *, aliases: str | None = None) -> bytes:
    """Our part of the page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Ours(readings))
    registry.register(_Given(of_costs(costs)))
    if aliases == "vllm":
        registry.register(_Given(as_vllm(readings, costs)))
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []  # registering must not ask for samples

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class _Ours(Collector):
    def __init__(self, readings: Readings):
        self._readings = readings

    def describe(self) -> list[Metric]:
        return []  # registering must not ask for samples

    def collect(self) -> Iterator[Metric]:
        readings = self._readings
        yield from _of_pools(readings)
        yield _gauge("engine_up", "Whether the engine answers and has its model loaded.", int(readings.engine_up))
        if readings.epoch is not None:
            info = GaugeMetricFamily(PREFIX + "engine_epoch_info", "Which start of the engine.", labels=["epoch"])
            info.add_metric([readings.epoch], 1)
            yield info
        if readings.n_pools is not None:
            yield _by("pools", "Pools of the tree.", "residency", readings.n_pools)
        yield _by("sessions", "Open sessions.", "state", readings.n_sessions)
        known = (
            ("seq_ids_used", "Sequences of the engine that hold a pool.", readings.seq_ids_used),
            ("seq_ids_max", "Sequences that the engine has for pools.", readings.seq_ids_max),
            ("kv_cells_used", "Cells of the KV cache that hold something.", readings.cells_used),
            ("kv_cells_max", "Cells of the KV cache.", readings.cells_total),
            ("kv_cells_high", "Highest used cell + 1: what every decode scans.", readings.cells_high),
            ("aggregate_tps", "Tokens per second that the engine decodes.", readings.aggregate_tps),
            ("mean_active_tps", "Mean tokens per second of the sessions that decode.", readings.mean_active_tps),
        )
        yield from (_gauge(name, what, value) for name, what, value in known if value is not None)
        yield from _of_warm_tier(readings.warm)
        yield from _of_admission(readings.admission)


def _of_pools(readings: Readings) -> Iterator[Metric]:
    gauges: tuple[_PoolMetric, ...] = (
        ("gen_throughput_tps", "Tokens per second of those who decode on this pool.", lambda p: p.tps),
        ("pool_kv_bytes", "Bytes of the KV cache that this pool owns.", lambda p: p.kv_bytes),
        ("pool_sessions", "Open sessions on this pool.", lambda p: p.n_sessions),
        ("pool_target_tps", "Floor of its admission policy, in tokens per second and session.", lambda p: p.target_tps),
    )
    counters: tuple[_PoolMetric, ...] = (
        ("queries", "Requests that were to attach to this pool.", lambda p: p.n_queries),
        ("prefix_cache_hits", "Requests that got from this pool what was planned.", lambda p: p.n_hits),
        ("queries_tokens", "Prompt tokens of the requests that were to attach.", lambda p: p.query_tokens),
        ("prefix_cache_hits_tokens", "Prompt tokens that they did not have to prefill.", lambda p: p.hit_tokens),
    )
    for name, what, of in gauges:
        yield _per_pool(GaugeMetricFamily(PREFIX + name, what, labels=["pool"]), readings, of)
    for name, what, of in counters:
        yield _per_pool(CounterMetricFamily(PREFIX + name, what, labels=["pool"]), readings, of)


def _per_pool(
    metric: GaugeMetricFamily | CounterMetricFamily, readings: Readings, of: Callable[[PoolReading], float | None]
) -> Metric:
    for label, pool in sorted(readings.pools.items()):
        value = of(pool)
        if value is not None:
            metric.add_metric([label], value)
    return metric


def _of_warm_tier(warm: TierFacts) -> Iterator[Metric]:
    counts, places = warm.counts, {"ram": warm.ram, "disk": warm.disk}
    held = {name: place.n_bytes for name, place in places.items() if place.n_bytes is not None}
    budgets = {name: place.max_bytes for name, place in places.items()}
    yield _by("warm_bytes", "Bytes of saved states outside the cache.", "place", held)
    yield _by("warm_max_bytes", "Bytes that saved states may take.", "place", budgets)
    if warm.idle_tax is not None:
        yield _gauge("idle_tax_ratio", "Share of a decode step's time that is due to idle cells.", warm.idle_tax)
    hits = CounterMetricFamily(PREFIX + "warm_hits", "States brought back without a prefill.", labels=["place"])
    for place in places:
        hits.add_metric([place], counts.n_loads.get(place, 0))
    yield hits
    failures = CounterMetricFamily(PREFIX + "warm_failures", "Saves and loads that failed.", labels=["code"])
    for code, n in sorted(counts.n_failures.items()):
        failures.add_metric([code], n)
    yield failures
    totals = (
        ("warm_misses", "Prefills of what had been saved once.", counts.n_misses),
        ("warm_saves", "States saved.", counts.n_saves),
        ("warm_left", "Pools that left the cache because nobody used them.", warm.n_left),
        ("warm_moved", "Pools that were moved to lower cells.", warm.n_moved),
        ("warm_forgotten", "States given up for others, or because nobody can use them.", counts.n_forgotten),
        ("warm_save_seconds", "Time spent on saving.", counts.save_ms / 1e3),
        ("warm_load_seconds", "Time spent on bringing back.", counts.load_ms / 1e3),
    )
    yield from (CounterMetricFamily(PREFIX + name, what, value=value) for name, what, value in totals)


def _of_admission(admission: AdmissionReading) -> Iterator[Metric]:
    """What the gate let in, kept waiting and turned away. All of it is there from the start, so that rates are."""
    yield _gauge("admission_policies", "Pools with an admission policy of their own.", admission.n_policies)
    yield _gauge("admission_waiting", "New sessions that wait to be let in.", admission.n_waiting)
    yield _gauge("turns_held", "Turns of admitted sessions that are held now.", admission.n_held)
    if admission.forecast_errors:
        what = "How far forecasts of the mean rate were from what it was once an admission had settled, on average."
        yield _by("admission_forecast_error_tps", what, "estimator", admission.forecast_errors)
    counts = admission.counts
    by_kind = {
        "guaranteed": counts.n_guaranteed,
        "overcommitted": counts.n_overcommitted,
        "warned": counts.n_warned,
    }
    admitted = CounterMetricFamily(PREFIX + "admissions", "New sessions that were let in.", labels=["kind"])
    for kind, n in {"admitted": counts.n_admitted - sum(by_kind.values()), **by_kind}.items():
        admitted.add_metric([kind], n)
    yield admitted
    refused = CounterMetricFamily(PREFIX + "admission_refusals", "New sessions that were refused.", labels=["reason"])
    for reason in dict.fromkeys((*REFUSALS, *sorted(counts.refused))):
        refused.add_metric([reason], counts.refused[reason])
    yield refused
    totals = (
        (
            "admission_retries_refused",
            "Refusals of what a client's library sent again by itself.",
            counts.n_retries_refused,
        ),
        ("admission_holds", "New sessions that had to wait to be let in.", counts.n_held),
        ("turn_holds", "Turns that were held to keep the floor.", counts.n_turns_held),
        (
            "turn_holds_expired",
            "Held turns that went after the longest hold, not because there was room.",
            counts.n_turns_expired,
        ),
        ("turn_hold_seconds", "Time that held turns waited.", counts.turn_hold_ms / 1e3),
    )
    yield from (CounterMetricFamily(PREFIX + name, what, value=value) for name, what, value in totals)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, what, value=value)


def _by(name: str, what: str, label: str, values: Mapping[Residency, int] | Mapping[str, float]) -> Metric:
    metric = GaugeMetricFamily(PREFIX + name, what, labels=[label])
    for value, n in sorted(values.items()):
        metric.add_metric([value], n)
    return metric
