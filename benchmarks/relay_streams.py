"""Many streams at once through each way: whether all comes through in time, and what memory does meanwhile."""

import asyncio
import json
import os
import time
from typing import Any

import uvloop

from benchmarks.idle_engine import EVENT_S
from benchmarks.raw_client import Asker, Heard, Listener, place, request
from benchmarks.relay_lines import Lines, lines

MIN_DELIVERED, MAX_LATE_MS = 0.99, 100
MAX_GROWTH = 0.1
"""A burst that had to wait for a busy machine needs room once, and the allocator keeps it."""

N_EVENTS = 500
"""Of one stream; then the client asks again on the same connection."""

WARM_UP_S, SAMPLE_S = 60.0, 1.0
"""Books of the last so many requests fill up in a minute. Without it, growth says nothing."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def slope(samples: list[tuple[float, float]]) -> float:
    """Of the straight line that fits (t, value) best, per unit of t."""
    t_mean = sum(t for t, _ in samples) / len(samples)
    v_mean = sum(v for _, v in samples) / len(samples)
    return sum((t - t_mean) * (v - v_mean) for t, v in samples) / sum((t - t_mean) ** 2 for t, _ in samples)


def growth_10_min(samples: list[tuple[float, int]]) -> float | None:
    """Of the memory at the end of the warm-up, from (s, bytes); None: it was watched for less than two minutes more."""
    later = [(t, float(n)) for t, n in samples if t >= WARM_UP_S]
    if not later or later[-1][0] - later[0][0] < 2 * WARM_UP_S - 2 * SAMPLE_S:
        return None
    return slope(later) * 600 / later[0][1]


def alone_on_a_core(way: Lines, name: str) -> bool:
    """The relay on the last core, everybody else on the others. False: there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return False
    for other, process in way.processes.items():
        if process.pid is not None:
            os.sched_setaffinity(process.pid, {cores[-1]} if other == name else set(cores[:-1]))
    os.sched_setaffinity(0, set(cores[:-1]))
    return True


async def emitted(asker: Asker, url: str) -> int:
    n: int = json.loads(await asker.ask(request(url, None, "/emitted")))["emitted"]
    return n


async def listen(way: Lines, name: str, n_streams: int, seconds: float) -> dict[str, Any]:
    """What came of what the engine wrote meanwhile. Raises RuntimeError when a stream broke off."""
    url, heard = way.urls[name], Heard()
    pid = way.processes[name].pid if name != "direct" else None
    body = {"messages": [{"role": "user", "content": "hello " * 40}], "max_tokens": N_EVENTS}
    asked = request(url, json.dumps(body | {"stream": True}, separators=(",", ":")).encode())
    loop, listeners = asyncio.get_running_loop(), []
    for _ in range(n_streams):
        made = await loop.create_connection(lambda: Listener(asked, heard), *place(url))
        listeners.append(made[1])
        await asyncio.sleep(N_EVENTS * EVENT_S / n_streams / 4)  # so that they do not all end at once either
    engine, samples = await Asker.to(way.urls["direct"]), []
    heard.late_ms.clear()
    n_before, n_written = heard.n_events, await emitted(engine, way.urls["direct"])
    began_s = time.monotonic()
    used_s = cpu_s(pid) if pid is not None else 0.0
    while (passed_s := time.monotonic() - began_s) < seconds:
        if pid is not None:
            samples.append((passed_s, rss_bytes(pid)))
        await asyncio.sleep(min(SAMPLE_S, seconds - passed_s))
    n_came, n_written = heard.n_events - n_before, await emitted(engine, way.urls["direct"]) - n_written
    took_s = time.monotonic() - began_s
    used_s = cpu_s(pid) - used_s if pid is not None else 0.0
    if heard.n_lost:
        raise RuntimeError(f"{name}: {heard.n_lost} of {n_streams} connections broke off")
    for listener in listeners:
        listener.close()
    engine.close()
    return {
        "events_per_s": n_came / took_s,
        "of_nominal": n_written / took_s * EVENT_S / n_streams,
        "delivered": n_came / n_written,
        "n_ended": heard.n_ended,
        "late_ms": {"p50": heard.quantile_ms(0.5), "p99": heard.quantile_ms(0.99), "max": heard.quantile_ms(1)},
        "cpu": used_s / took_s,
        "memory": {
            "mib": samples[-1][1] / 2**20 if samples else None,
            "growth_10_min": growth_10_min(samples),
            "samples": samples[:: max(1, len(samples) // 60)],
        },
    }


def measure_streams(n_streams: int, seconds: float, proxy_s: float) -> dict[str, Any]:
    """Each way for ``seconds``, the proxy for ``proxy_s``."""
    found, cores = {}, os.sched_getaffinity(0)
    for name in ("direct", "bare", "proxy"):
        with lines(n_streams) as way:
            try:
                alone_on_a_core(way, name if name != "direct" else "bare")
                found[name] = uvloop.run(listen(way, name, n_streams, proxy_s if name == "proxy" else seconds))
            finally:
                os.sched_setaffinity(0, cores)
    return found
