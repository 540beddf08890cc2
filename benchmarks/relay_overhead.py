"""What the proxy costs: what it adds to requests, and many streams through one core, in front of an idle engine.

    python -m benchmarks.relay_overhead [--rounds 1500] [--repeat 5] [--streams 256] [--seconds 10 | --minutes 10]
                                        [--only requests|streams] [--json] [--assert]

Four processes: an engine that computes nothing, a bare aiohttp relay of a few lines, the proxy, and this client.

requests  Direct, bare and proxied requests are interleaved, so that all see the same machine; what a way *adds* is its
          median less the direct one's, without the time that the engine had it.
          Chats that attach to nothing: one at a time, and 32 at a time to an engine with 32 slots that takes 10 to
          30 ms for each. Chats, one at a time, whose first 2,000 tokens are a pool that the proxy has seen in others.
          Beside it how many requests per second get through at most, 32 at a time, when the engine takes no time.
          Every repetition starts new processes: where their memory happens to lie makes several percent.
streams   256 at once, 50 events per second each, begun anew every 10 s. The relay has one core for itself (where there
          are two), engine and client share the others. How late an event is counts from when it was due in the engine.
          With --minutes the proxy's memory is watched for so long.

With --assert, exit 1 when
    a chat that attaches to nothing costs more than 1.3 times what the bare relay adds, at 1 or at 32 at a time,
    one with a seen pool costs 1 ms more than what the bare relay adds to it,
    fewer than 99 % of the events that the engine wrote come through the proxy, or the last percent 100 ms late, or
    the proxy's memory grows by more than 10 % in 10 minutes (with --minutes 3 or more)
(medians of the repetitions).
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.idle_engine import TOOK
from benchmarks.raw_client import Asker, request
from benchmarks.relay_lines import Lines, lines
from benchmarks.relay_streams import MAX_GROWTH, MAX_LATE_MS, MIN_DELIVERED, measure_streams

MAX_ADDED_RATIO, MAX_POOLED_MS = 1.3, 1.0
N_POOL_TOKENS = 2000
AT_ONCE, REPLY_S = 32, 0.02
SYSTEM = " ".join(f"rule{i}" for i in range(N_POOL_TOKENS))


def chat(content: str, *, system: str | None = None) -> bytes:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return json.dumps({"messages": [*messages, {"role": "user", "content": content}], "max_tokens": 3}).encode()


@dataclass
class Took:
    """Of one way: milliseconds of each request, without the engine's, and how long all of them took together."""

    ms: list[float] = field(default_factory=list)
    together_s: float = 0.0


async def interleaved(
    urls: dict[str, str], rounds: int, n_at_once: int, body: Callable[[int], bytes]
) -> dict[str, Took]:
    """``body``: makes the n-th."""
    took = {name: Took() for name in urls}
    askers = {name: [await Asker.to(url) for _ in range(n_at_once)] for name, url in urls.items()}
    n_each = 1 if n_at_once == 1 else 8

    async def ask(asker: Asker, asked: list[bytes], of: Took) -> None:
        for one in asked:
            began = time.perf_counter()
            told = await asker.ask(one)
            at = told.index(TOOK) + len(TOOK)
            of.ms.append((time.perf_counter() - began) * 1e3 - int(told[at : at + 8]) / 1e3)

    n_first = rounds // 10 + 1
    for i in range(rounds + n_first):
        for name in urls if i % 2 else reversed(urls):
            of = took[name] if i >= n_first else Took()
            numbers = (
                range(k, k + n_each) for k in range(i * n_at_once * n_each, (i + 1) * n_at_once * n_each, n_each)
            )
            asked = [[request(urls[name], body(number)) for number in some] for some in numbers]
            began = time.perf_counter()
            await asyncio.gather(*(ask(*each, of) for each in zip(askers[name], asked, strict=True)))
            of.together_s += time.perf_counter() - began
    for asker in (one for some in askers.values() for one in some):
        asker.close()
    return took


async def make_pool(url: str) -> None:
    """Raises RuntimeError when it has not about as many tokens as it should."""
    asker = await Asker.to(url)
    made = json.loads(await asker.ask(request(url, chat_front(), "/polykv/pools")))
    asker.close()
    if not N_POOL_TOKENS <= made["prefix_len"] <= N_POOL_TOKENS + 16:
        raise RuntimeError(f"the pool is not what it should be: {made}")


def chat_front() -> bytes:
    return json.dumps({"messages": [{"role": "system", "content": SYSTEM}]}).encode()


async def require_attached(url: str, n_last: int) -> None:
    """Raises RuntimeError when one of the last requests did not attach to the pool."""
    asker = await Asker.to(url)
    told = json.loads(await asker.ask(request(url, None, f"/polykv/requests?last={n_last}")))["requests"]
    asker.close()
    if not all(one["decision"] == "attached" and one["prefix_n_tokens"] >= N_POOL_TOKENS for one in told):
        raise RuntimeError(f"the chats that were measured did not attach to the pool: {told[-1]}")


async def measure_small(way: Lines, rounds: int, n_at_once: int) -> dict[str, Took]:
    return await interleaved(way.urls, rounds, n_at_once, lambda _: chat("hello " * 40))


async def measure_pooled(way: Lines, rounds: int) -> dict[str, Took]:
    """The proxy has a pool; the other two ways get the same bodies. Raises RuntimeError when nothing attached."""
    await make_pool(way.urls["proxy"])
    took = await interleaved(way.urls, rounds, 1, lambda n: chat(f"Question {n}: what comes first?", system=SYSTEM))
    await require_attached(way.urls["proxy"], min(rounds, 50))
    return took


def added(took: dict[str, Took]) -> dict[str, float]:
    """What a way adds, in ms. ``ratio``: the proxy's to the bare relay's; ``more``: their difference."""
    median = {name: statistics.median(of.ms) for name, of in took.items()}
    bare, proxy = median["bare"] - median["direct"], median["proxy"] - median["direct"]
    return {"direct": median["direct"], "bare": bare, "proxy": proxy, "ratio": proxy / bare, "more": proxy - bare}


def per_second(took: dict[str, Took]) -> dict[str, float]:
    return {name: len(of.ms) / of.together_s for name, of in took.items()}


def repetition(rounds: int) -> dict[str, dict[str, float]]:
    found, n_blocks = {}, max(2, rounds // 50)
    with lines(4) as way:  # as many slots as `polykvctl up` starts
        found["1 at a time"] = added(uvloop.run(measure_small(way, rounds, 1)))
    with lines(AT_ONCE, REPLY_S) as way:
        found[f"{AT_ONCE} at a time"] = added(uvloop.run(measure_small(way, n_blocks, AT_ONCE)))
    with lines(4) as way:
        found["pooled"] = added(uvloop.run(measure_pooled(way, rounds // 2)))
    with lines(AT_ONCE) as way:
        found["per second"] = per_second(uvloop.run(measure_small(way, n_blocks, AT_ONCE)))
    return found


def measure(rounds: int, repeat: int) -> dict[str, dict[str, float]]:
    """Medians of the repetitions, each value by itself."""
    runs = [repetition(rounds) for _ in range(repeat)]
    return {
        name: {key: round(statistics.median(run[name][key] for run in runs), 4) for key in runs[0][name]}
        for name in runs[0]
    }


def missed(requests: dict[str, Any], streams: dict[str, Any]) -> list[str]:
    """The bars that were not reached, in words."""
    said = []
    for name in [name for name in requests if name.endswith("at a time")]:
        if requests[name]["ratio"] > MAX_ADDED_RATIO:
            said.append(f"{name}: {requests[name]['ratio']:.2f} x what the bare relay adds, not {MAX_ADDED_RATIO}")
    if requests and requests["pooled"]["more"] > MAX_POOLED_MS:
        said.append(f"pooled: {requests['pooled']['more']:.2f} ms more than the bare relay, not {MAX_POOLED_MS}")
    if streams:
        proxy = streams["proxy"]
        if proxy["delivered"] < MIN_DELIVERED:
            said.append(f"streams: {proxy['delivered']:.2%} of what the engine wrote, not {MIN_DELIVERED:.0%}")
        if proxy["late_ms"]["p99"] > MAX_LATE_MS:
            said.append(f"streams: the last percent is {proxy['late_ms']['p99']} ms late, not {MAX_LATE_MS}")
        growth = proxy["memory"]["growth_10_min"]
        if growth is not None and growth > MAX_GROWTH:
            said.append(f"streams: the memory grows by {growth:.1%} in 10 minutes, not {MAX_GROWTH:.0%}")
    return said


def table(requests: dict[str, Any], streams: dict[str, Any]) -> str:
    rows = []
    if requests:
        rows.append(f"{'ms':16}{'direct':>9}{'bare +':>9}{'proxy +':>9}{'ratio':>8}{'more':>9}")
        rows += [
            f"{name:16}{of['direct']:9.3f}{of['bare']:9.3f}{of['proxy']:9.3f}{of['ratio']:8.2f}{of['more']:9.3f}"
            for name, of in requests.items()
            if name != "per second"
        ]
        most = requests["per second"]
        rows.append(f"{'at most, per s':16}{most['direct']:9.0f}{most['bare']:9.0f}{most['proxy']:9.0f}")
    if streams:
        rows.append(
            f"{'streams':16}{'events/s':>9}{'came':>9}{'p50 ms':>9}{'p99 ms':>8}{'max ms':>9}{'CPU':>7}{'MiB':>8}"
        )
        for name, of in streams.items():
            late, mib = of["late_ms"], of["memory"]["mib"]
            rows.append(
                f"{name:16}{of['events_per_s']:9.0f}{of['delivered']:9.2%}{late['p50']:9}{late['p99']:8}{late['max']:9}"
                + (f"{of['cpu']:7.0%}{mib:8.1f}" if mib else "")
            )
        memory = streams["proxy"]["memory"]
        if memory["growth_10_min"] is not None:
            rows.append(f"memory of the proxy: {memory['growth_10_min']:+.2%} in 10 minutes, after the first one")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--only", choices=("requests", "streams"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--assert", action="store_true", dest="check")
    asked = parser.parse_args()
    requests = measure(asked.rounds, asked.repeat) if asked.only != "streams" else {}
    streams = {}
    if asked.only != "requests":
        streams = measure_streams(asked.streams, asked.seconds, asked.minutes * 60 or asked.seconds)
    said = missed(requests, streams)
    if asked.json:
        print(json.dumps({"requests": requests, "streams": streams, "missed": said}))
    else:
        print("\n".join([table(requests, streams), *said]))
    return int(asked.check and bool(said))


if __name__ == "__main__":
    sys.exit(main())
