"""What automatic pools cost who has no use for them: prompts of 16 kB that are like none before, and switched off.

    python -m benchmarks.unrelated_prompts [--rounds 600] [--repeat 3] [--json] [--assert]

Two proxies that differ in one setting (POLYKV_AUTO_POOL_MIN_TOKENS: its default, and 0), each in front of a fake engine
of its own that answers a fixed reply, all in one process. Every prompt is a chat of a new client and goes to both, and
to an engine itself, in turn. Times are lower quartiles: those of requests that nobody else kept from the processor.
With --assert, exit 1 when that is more than 1.2 times as long with automatic pools as without (median of the
repetitions; the engine takes next to no time of it), or when there is a pool in the end.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvloop

from benchmarks.idle_engine import CHAT, idle_engine
from benchmarks.relay_lines import PATIENT, require_managed
from polykv_proxy.app import calm_collector, serving
from polykv_proxy.config import load_settings

N_BYTES, N_FIRST = 16 << 10, 20
MAX_RATIO = 1.2
ARMS = ("direct", "off", "on")


TIMINGS = {"cache_n": 0, "prompt_n": N_BYTES // 4, "predicted_n": 3, "predicted_per_second": 50.0}
REPLY = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": {}, "timings": TIMINGS}).encode()
"""By the length of a prompt the proxy tells whether it may be worth a look."""


@contextlib.asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[tuple[str, str]]:
    """A proxy and its engine."""
    async with (
        idle_engine(4, REPLY) as upstream,
        serving(load_settings(upstream_url=upstream, state=":memory:", port=0, **settings)) as (url, _app),
    ):
        await require_managed(url)
        yield url, upstream


def new_body(number: int) -> bytes:
    """Like none before from its first words on."""
    text = f"Conversation {number} is about number {number}. "
    messages = [{"role": "system", "content": text * (N_BYTES // len(text))}, {"role": "user", "content": "Go on."}]
    return json.dumps({"messages": messages, "max_tokens": 3}).encode()


async def ask_all(urls: dict[str, str], n_rounds: int) -> tuple[dict[str, list[float]], int]:
    """Milliseconds of each request, and the pools that there are in the end."""
    took: dict[str, list[float]] = {name: [] for name in urls}
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}, timeout=PATIENT) as client:
        for number in range(n_rounds + N_FIRST):
            body = new_body(number)
            for name in urls if number % 2 else reversed(urls):
                began = time.perf_counter()
                async with client.post(urls[name] + CHAT, data=body) as reply:
                    await reply.read()
                if number >= N_FIRST:
                    took[name].append((time.perf_counter() - began) * 1e3)
        async with client.get(urls["on"] + "/polykv/pools") as reply:
            return took, len((await reply.json())["pools"])


async def run(n_rounds: int) -> tuple[dict[str, list[float]], int]:
    calm_collector()  # as `polykvctl serve` does
    async with site(auto_pool_min_tokens=0) as (off, direct), site() as (on, _):
        return await ask_all({"direct": direct, "off": off, "on": on}, n_rounds)


def measure(n_rounds: int) -> dict[str, Any]:
    took, n_pools = uvloop.run(run(n_rounds))
    took_ms = {name: statistics.quantiles(took[name])[0] for name in ARMS}
    told = {name: round(ms, 3) for name, ms in took_ms.items()}
    return {"quartile_ms": told, "ratio": round(took_ms["on"] / took_ms["off"], 3), "n_pools": n_pools}


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--assert", action="store_true", dest="check")
    asked = parser.parse_args()
    runs = [measure(asked.rounds) for _ in range(asked.repeat)]
    ratio, n_pools = statistics.median(run["ratio"] for run in runs), max(run["n_pools"] for run in runs)
    if asked.json:
        print(json.dumps({"ratio": ratio, "n_pools": n_pools, "runs": runs}))
    else:
        for run in runs:
            print("  ".join(f"{key} {value}" for key, value in run.items()))
        print(f"a prompt like no other: {ratio:.3f} x of what it takes with automatic pools off, {n_pools} pools")
    return int(asked.check and (ratio > MAX_RATIO or n_pools > 0))


if __name__ == "__main__":
    sys.exit(main())
