"""The proxy's own costs in the format of Prometheus, and the gauges that dashboards of vLLM know by its names."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from polykv_proxy.control.readings import Readings
from polykv_proxy.relay.costs import BUCKETS_S, Costs, Histogram

PREFIX = "opencoti_polykv:"
VLLM = "vllm:"
_LIMITS = [*map(floatToGoString, BUCKETS_S), "+Inf"]


def of_costs(costs: Costs) -> Iterator[Metric]:
    overhead = HistogramMetricFamily(
        PREFIX + "proxy_overhead_seconds",
        "Time of the proxy on a request before it is sent (without holds) and after the engine's last byte.",
        labels=["phase"],
    )
    for phase, histogram in (("before", costs.before), ("after", costs.after)):
        overhead.add_metric([phase], _buckets(histogram), histogram.sum_s)
    yield overhead
    holds = CounterMetricFamily(PREFIX + "holds", "Requests that waited in the proxy.", labels=["reason"])
    seconds = CounterMetricFamily(PREFIX + "hold_seconds", "Time that they waited.", labels=["reason"])
    for reason, n in sorted(costs.n_holds.items()):
        holds.add_metric([reason], n)
        seconds.add_metric([reason], costs.held_s[reason])
    yield holds
    yield seconds
    cut = "Answers that ended before their limit because the cache was full."
    yield CounterMetricFamily(PREFIX + "truncated", cut, value=costs.n_truncated)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return list(zip(_LIMITS, map(float, accumulate(histogram.n)), strict=True))


def as_vllm(readings: Readings, costs: Costs) -> Iterator[Metric]:
    """What is the same thing there: requests at the engine and in line, cells in use, tokens of prompts."""
    labels = {"model_name": readings.model or "unknown", "engine": "0"}
    gauges = (
        ("num_requests_running", "Requests that the engine is at.", readings.n_running),
        ("num_requests_waiting", "Requests that wait.", readings.n_waiting),
    )
    for name, what, n in gauges:
        yield _labelled(GaugeMetricFamily(VLLM + name, what, labels=list(labels)), labels, n)
    if readings.cells_used is not None and readings.cells_total:
        usage = GaugeMetricFamily(
            VLLM + "kv_cache_usage_perc", "Cells of the KV cache in use; 1 is all.", labels=list(labels)
        )
        yield _labelled(usage, labels, readings.cells_used / readings.cells_total)
    counters = (
        ("prefix_cache_queries", "Tokens of prompts.", costs.n_prompt_tokens),
        ("prefix_cache_hits", "Tokens of prompts that were in the cache.", costs.n_cached_tokens),
    )
    for name, what, n in counters:
        yield _labelled(CounterMetricFamily(VLLM + name, what, labels=list(labels)), labels, n)


def _labelled(
    metric: GaugeMetricFamily | CounterMetricFamily, labels: dict[str, str], value: float
) -> GaugeMetricFamily | CounterMetricFamily:
    metric.add_metric(list(labels.values()), value)
    return metric
