"""Saved states: what it takes to bring a prefix back, what idle pools cost others, and how long a stream pauses.

    python -m benchmarks.warm_tier [--rounds 5] [--threads 2] [--assert] [--json]

In one run, on the chat model and the patched engine (`-c 16384 --parallel 4 --kv-unified --polykv-max-pools 16`):

back    a prefix of 1,740 tokens: prefilled, loaded from memory, loaded from disk; what the caller waits
idle    tokens per second of one stream and of four: on a server that never had a pool, beside 12 idle pools of 1,000
        tokens, and with these saved away
gap     a stream's longest pause while 1,740 tokens are saved and loaded, in memory and on disk
exact   save, load, save: the same bytes; a fresh process: the same log-probabilities (`benchmarks.warm_exact`)

Arms take turns. Speed is judged by the best round of each arm: whatever else runs here can only slow a round down.
Times and pauses are judged by their medians. `--assert` ends with 1 unless

- loading takes at most 1/100 of the prefill from memory, and at most 1/40 from disk,
- with the pools saved away, one stream and four have at least 0.95 of their speed without any,
- the longest pause of a stream beside a save or a load is at most its usual one and 3 decode steps,
- every file is the same after it was loaded and saved again, and every log-probability in a fresh process, in f16 and
  in q8_0.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.warm_exact import Exact, lines_of, measure_exact
from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.harness import EngineServer
from tests.engine.hooks import Engine, Running
from tests.engine.noise import Noise

N_PREFIX = 1740
N_POOLS = 12
N_POOL = 1000
SIZES = ("-c", "16384", "--parallel", "4", "--kv-unified", "--polykv-max-pools", "16")
N_THREADS = 2

N_PREFILLS = 2
N_LOADS = 9
STREAMS = {1: 128, 4: 96}
"""How many streams at once, and the tokens of each."""
N_OPS = 8
"""Of each kind."""
N_GAP_TOKENS = 4000
N_STEPS = 3

MAX_MEMORY = 1 / 100
MAX_DISK = 1 / 40
MIN_SPEED = 0.95

OPS = ("none", "save ram", "load ram", "save disk", "load disk")


@dataclass
class Pauses:
    """Milliseconds between two tokens of a stream: the usual one, and the longest beside one operation."""

    usual: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)

    @property
    def allowed(self) -> float:
        return (1 + N_STEPS) * median(self.usual)


@dataclass
class Measured:
    """Times in milliseconds, speeds in tokens per second."""

    n_threads: int = N_THREADS
    prefill_ms: list[float] = field(default_factory=list)
    memory_ms: list[float] = field(default_factory=list)
    disk_ms: list[float] = field(default_factory=list)
    engine_ms: dict[str, list[float]] = field(default_factory=dict)
    state_mib: float = 0
    speed: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    hi: dict[str, int] = field(default_factory=dict)
    pauses: dict[str, Pauses] = field(default_factory=lambda: {op: Pauses() for op in OPS})
    exact: dict[str, Exact] = field(default_factory=dict)

    @property
    def of_memory(self) -> float:
        return median(self.memory_ms) / median(self.prefill_ms)

    @property
    def of_disk(self) -> float:
        return median(self.disk_ms) / median(self.prefill_ms)

    def of_speed(self, arm: str, n_streams: int) -> float:
        return max(self.speed[arm][n_streams]) / max(self.speed["none"][n_streams])

    def slow_arms(self) -> list[str]:
        ratios = {n_streams: self.of_speed("saved", n_streams) for n_streams in STREAMS}
        return [
            f"saved away, {n} streams: {ratio:.2f} of the speed" for n, ratio in ratios.items() if ratio < MIN_SPEED
        ]

    def broken_promises(self, judge: Callable[[list[float]], float] = median) -> list[str]:
        """What `--assert` demands and this run does not show. ``judge``: of the longest pauses, the one that counts."""
        checks = {
            f"from memory: 1/{1 / self.of_memory:.0f} of a prefill": self.of_memory > MAX_MEMORY,
            f"from disk: 1/{1 / self.of_disk:.0f} of a prefill": self.of_disk > MAX_DISK,
        }
        for op in OPS[1:]:
            pause, allowed = judge(self.pauses[op].longest), self.pauses[op].allowed
            checks[f"{op}: a pause of {pause:.0f} ms, more than {allowed:.0f}"] = pause > allowed
        inexact = [said for cache, exact in self.exact.items() for said in exact.broken(cache)]
        return [said for said, broken in checks.items() if broken] + self.slow_arms() + inexact


def measure_back(engine: Engine, noise: Noise, found: Measured) -> None:
    """Leaves the prefix saved as ``prefix`` in memory and as ``file`` on disk, and nothing in the cache."""
    for seed in range(N_PREFILLS):
        engine.free_all()
        began = time.perf_counter()
        made = engine.materialize(noise(seed, N_PREFIX))
        found.prefill_ms.append(1000 * (time.perf_counter() - began))
    saved = engine.save("prefix", seq=made["seq"])
    engine.save("file", seq=made["seq"], to="disk")
    found.state_mib = saved["bytes"] / 2**20
    for _ in range(N_LOADS):
        for tag, times in (("prefix", found.memory_ms), ("file", found.disk_ms)):
            engine.free_all()
            began = time.perf_counter()
            loaded = engine.load(tag)
            times.append(1000 * (time.perf_counter() - began))
            if (loaded["n_tokens"], loaded["n_processed"]) != (N_PREFIX, 0):
                raise RuntimeError(f"not what was saved: {loaded}")
            found.engine_ms.setdefault(f"load {tag}", []).append(loaded["t_ms"])
    engine.free_all()


def clear_slots(engine: Engine) -> None:
    """An idle slot that lies above the pools costs as much as they do."""
    for slot in range(4):
        engine.clear(slot)


def speed_of(engine: Engine, n_streams: int, noise: Noise) -> float:
    """Tokens per second of all streams together, each by the engine's own account."""
    clear_slots(engine)
    with ThreadPoolExecutor(n_streams) as threads:
        asked = [
            threads.submit(engine.ask, noise(500 + slot, 20), STREAMS[n_streams], slot=slot)
            for slot in range(n_streams)
        ]
        return sum(float(done.result().body["timings"]["predicted_per_second"]) for done in asked)


def measure_idle(plain: Engine, pooled: Engine, noise: Noise, found: Measured, *, n_rounds: int, up_to: int) -> None:
    """``plain`` never has a pool; the other's are resident, saved away, resident again…"""
    for number in range(N_POOLS):
        made = pooled.materialize(noise(100 + number, N_POOL))
        pooled.save(f"idle-{number}", seq=made["seq"])

    def resident() -> None:
        if not any(pool["state"] == "ready" for pool in pooled.pools()):
            for number in range(N_POOLS):
                pooled.load(f"idle-{number}")

    arms: dict[str, tuple[Engine, Callable[[], None]]] = {
        "none": (plain, lambda: None),
        "resident": (pooled, resident),
        "saved": (pooled, pooled.free_all),
    }
    found.speed = {arm: {n_streams: [] for n_streams in STREAMS} for arm in arms}
    for number in range(up_to):
        if number >= n_rounds and not found.slow_arms():
            break
        for arm in arms if number % 2 == 0 else reversed(arms):
            engine, prepare = arms[arm]
            clear_slots(engine)
            prepare()
            for n_streams in STREAMS:
                found.speed[arm][n_streams].append(speed_of(engine, n_streams, noise))
            found.hi[arm] = engine.stats()["cells"]["hi"]
    clear_slots(pooled)
    pooled.free_all()


@contextmanager
def stream(engine: Engine, noise: Noise, seed: int) -> Iterator[Running]:
    """A stream in its decode, which is left at the end."""
    with Running(engine, noise(seed, 20), N_GAP_TOKENS, id_slot=0) as running:
        yield running
        running.leave()
    while engine.slot(0)["state"] != "idle":
        time.sleep(0.05)


def wait_for_tokens(running: Running, n_more: int) -> None:
    n_wanted = len(running.arrivals) + n_more
    while len(running.arrivals) < n_wanted:
        if not running.is_running():
            raise RuntimeError("the stream ended too soon")
        time.sleep(0.002)


def gaps_ms(arrivals: list[float]) -> list[float]:
    return [1000 * (later - sooner) for sooner, later in pairwise(arrivals)]


def measure_gaps(engine: Engine, noise: Noise, found: Measured) -> None:
    """One operation of each kind after the other beside a stream, in an order that rotates; and as long without any as
    the longest of them takes."""
    longest_s = 0.05
    orders: dict[str, Callable[[], Any]] = {
        "none": lambda: time.sleep(longest_s),
        "save ram": lambda: engine.save("prefix", seq=resident["seq"]),
        "load ram": lambda: engine.load("prefix"),
        "save disk": lambda: engine.save("file", seq=resident["seq"], to="disk"),
        "load disk": lambda: engine.load("file"),
    }
    for number in range(N_OPS):
        clear_slots(engine)
        resident = engine.load("prefix")
        with stream(engine, noise, number) as running:
            for op in OPS[number % len(OPS) :] + OPS[: number % len(OPS)]:
                wait_for_tokens(running, 10)
                n_before = len(running.arrivals)
                began = time.perf_counter()
                done = orders[op]()
                longest_s = max(longest_s, time.perf_counter() - began)
                wait_for_tokens(running, 3)
                found.pauses[op].longest.append(max(gaps_ms(running.arrivals[n_before - 1 :])))
                if op != "none":
                    found.engine_ms.setdefault(op, []).append(done["t_ms"])
                if op.startswith("load"):
                    engine.free(done["seq"])
            usual = median(gaps_ms(running.arrivals))
        for op in OPS:
            found.pauses[op].usual.append(usual)
        engine.free_all()


def measure(n_rounds: int, say: Callable[[str], Any], *, up_to: int = 0, n_threads: int = N_THREADS) -> Measured:
    """``up_to``: while the speeds are not as promised, run more rounds of all arms, up to this many."""
    found, threads = Measured(n_threads), ("-t", str(n_threads))
    noise = Noise(chat_model_path())
    with ExitStack() as stack:
        dir_ = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polykv-warm-tier-")))
        flags = (*threads, *SIZES, "--polykv-save-path", str(dir_ / "states"), "--polykv-save-disk", "1024")

        def start(name: str, *flags: str) -> Engine:
            server = EngineServer(binary_path("patched"), chat_model_path(), *flags, log_dir=dir_, name=name)
            return Engine(stack.enter_context(server))

        found.exact = measure_exact(lambda name, flags: start(name, *threads, *SIZES, *flags), noise, dir_, say)
        pooled = start("pooled", *flags)
        say(f"a prefix of {N_PREFIX} tokens: prefilled, loaded")
        measure_back(pooled, noise, found)
        say("pauses of a stream")
        measure_gaps(pooled, noise, found)
        say(f"{N_POOLS} pools of {N_POOL} tokens")
        plain = start("plain", *threads, *SIZES)
        measure_idle(plain, pooled, noise, found, n_rounds=n_rounds, up_to=max(n_rounds, up_to))
    return found


def report(found: Measured) -> str:
    prefill, memory, disk = median(found.prefill_ms), median(found.memory_ms), median(found.disk_ms)
    lines = [
        f"threads: {found.n_threads}",
        f"back: {N_PREFIX} tokens, {found.state_mib:.1f} MiB, medians",
        f"  prefill      {prefill:8.1f} ms",
        f"  from memory  {memory:8.1f} ms  1/{1 / found.of_memory:.0f}  (at most 1/{1 / MAX_MEMORY:.0f})",
        f"  from disk    {disk:8.1f} ms  1/{1 / found.of_disk:.0f}  (at most 1/{1 / MAX_DISK:.0f})",
        "",
        f"idle: {N_POOLS} pools of {N_POOL} tokens, tokens per second, best of {len(found.speed['none'][1])}",
        f"  {'':10}{'highest cell':>14}" + "".join(f"{f'{n} streams':>22}" for n in STREAMS),
    ]
    for arm, speeds in found.speed.items():
        cells = [f"{max(speeds[n]):.1f} ({100 * found.of_speed(arm, n):.0f} %)" for n in STREAMS]
        lines.append(f"  {arm:10}{found.hi[arm]:>14}" + "".join(f"{cell:>22}" for cell in cells))
    lines += [f"  saved must have {100 * MIN_SPEED:.0f} % of none", ""]
    lines.append(f"gap: pauses of a stream in ms, {N_OPS} of each")
    lines.append(f"  {'':10}{'median':>8}{'longest':>16}{'allowed':>10}{'engine':>10}")
    for op, pauses in found.pauses.items():
        longest = f"{median(pauses.longest):.0f} ({max(pauses.longest):.0f})"
        engine = f"{median(found.engine_ms[op]):.1f}" if op in found.engine_ms else ""
        lines.append(f"  {op:10}{median(pauses.usual):>8.1f}{longest:>16}{pauses.allowed:>10.0f}{engine:>10}")
    lines.append("  longest: the median of all beside such an operation, in brackets the longest of all")
    return "\n".join([*lines, "", *lines_of(found.exact)])


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=N_THREADS, help="more than there are free cores spin")
    parser.add_argument("--assert", dest="strict", action="store_true", help="end with 1 unless the ratios hold")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds, lambda line: print(line, file=sys.stderr, flush=True), n_threads=options.threads)
    broken = found.broken_promises()
    print(json.dumps(asdict(found) | {"broken": broken}) if options.json else report(found))
    for said in broken:
        print(f"not as promised: {said}", file=sys.stderr)
    return 1 if options.strict and broken else 0


if __name__ == "__main__":
    sys.exit(main())
