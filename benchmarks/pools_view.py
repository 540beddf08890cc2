"""What ``GET /polykv/pools`` costs over many pools, and whether twice as many cost twice as much.

    python -m benchmarks.pools_view [--sizes 1000,3000,10000] [--rounds 15] [--json] [--assert]

The proxy's own view and its JSON bytes, without a socket: a random tree that grows by extending and branching, as many
pools resident as an engine has sequences for, and sessions on some of them. Times are those of the processor, so that a
busy machine does not count. ``slope``: the exponent of the growth, by least squares over the logarithms; 1 is linear.
``longest step``: so long nobody else has a turn, at most, by the wall clock: it is written out in slices.
With --assert, exit 1 when the slope is above 1.2.
"""

import argparse
import gc
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Coroutine
from typing import Any

from polykv_proxy.config import load_settings
from polykv_proxy.control import Control
from polykv_proxy.ids import SeqId, SessionId, SlotId
from polykv_proxy.tree.prefix import make_tokens
from polykv_proxy.upstream import Stats

MAX_SLOPE = 1.2
N_SEQS, N_SLOTS, N_SESSIONS, N_CELLS = 64, 16, 400, 1 << 20


def make_control(n_pools: int, rng: random.Random) -> Control:
    """A control plane that has seen an engine, and has this many pools."""
    control = Control(load_settings(upstream_url="http://127.0.0.1:1", state=":memory:"))
    pool_ids = []
    for _ in range(n_pools):
        own = make_tokens([rng.randrange(1 << 17) for _ in range(8)])
        parent = control.tree.get(rng.choice(pool_ids)) if pool_ids and rng.random() < 0.95 else None
        if parent is None:
            plan = control.tree.plan_root(own)
        else:
            at = parent.prefix_len if rng.random() < 0.7 else rng.randint(1, parent.prefix_len)
            plan = control.tree.plan_fork_own(parent.pool_id, own, branch_pos=at)
        pool_ids.append(control.tree.commit(plan, now_s=0.0).pool_id)
    slots = []
    for i, pool_id in enumerate(rng.sample(pool_ids, N_SEQS)):
        control.tree.set_residency(pool_id, "resident", seq_id=SeqId(N_SLOTS + 1 + i), gen=1)
        if i < N_SLOTS:
            n_shared = control.tree.get(pool_id).prefix_len
            slots.append({"id": i, "state": "idle", "n_tokens": n_shared + 50, "n_pool_shared": n_shared})
            slots[-1]["pool_seq"] = N_SLOTS + 1 + i
    for i in range(N_SESSIONS):
        session = control.sessions.name(SessionId(f"agent-{i}"), control.clock())
        session.pool_id = rng.choice(pool_ids)
        session.slot_id = SlotId(i) if i < N_SLOTS else None
    watch = control.watch
    watch.state, watch.hooks, watch.epoch = "ready", True, "bench"
    cells = {"used": 0, "total": N_CELLS, "free": N_CELLS}
    watch.stats = Stats.model_validate(
        {"epoch": "bench", "n_slots": N_SLOTS, "max_pools": N_SEQS, "slots": slots, "cells": cells}
    )
    return control


def measure(n_pools: int, n_rounds: int) -> dict[str, float]:
    """Median of one answer over a tree of this size."""
    control = make_control(n_pools, random.Random(n_pools))
    spent_ms, longest_ms, n_bytes = [], [], 0
    for _ in range(n_rounds + 1):
        gc.collect()
        began_s = time.process_time()
        steps_ms, n_bytes = step_through(control.views.pools_json())
        spent_ms.append((time.process_time() - began_s) * 1e3)
        longest_ms.append(max(steps_ms))
    row = {"pools": n_pools, "ms": statistics.median(spent_ms[1:]), "bytes": n_bytes}
    return row | {"longest_step_ms": statistics.median(longest_ms[1:])}


def step_through(answer: Coroutine[Any, Any, bytes]) -> tuple[list[float], int]:
    """Do what the event loop does, without anybody else: how long each step took, and how long the answer is."""
    steps_ms = []
    while True:
        began_s = time.perf_counter()
        try:
            answer.send(None)
        except StopIteration as done:
            return steps_ms, len(done.value)
        finally:
            steps_ms.append((time.perf_counter() - began_s) * 1e3)


def slope_of(rows: list[dict[str, float]]) -> float:
    points = [(math.log(row["pools"]), math.log(row["ms"])) for row in rows]
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,3000,10000", help="numbers of pools, comma-separated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="machine-readable on stdout, nothing else there")
    parser.add_argument("--assert", dest="check", action="store_true", help="exit 1 when the limit is missed")
    args = parser.parse_args()
    rows = [measure(int(size), args.rounds) for size in args.sizes.split(",")]
    slope = slope_of(rows)
    if args.json:
        print(json.dumps({"rows": rows, "slope": slope}))
    else:
        print(f"{'pools':>8}{'ms':>10}{'µs/pool':>10}{'longest step':>14}{'bytes':>12}")
        for row in rows:
            each, longest = f"{1e3 * row['ms'] / row['pools']:>10.2f}", f"{row['longest_step_ms']:>14.1f}"
            print(f"{row['pools']:>8,}{row['ms']:>10.1f}{each}{longest}{row['bytes']:>12,}")
        print(f"slope {slope:.2f} (1 is linear)")
    if args.check and slope > MAX_SLOPE:
        print(f"the slope is above {MAX_SLOPE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
