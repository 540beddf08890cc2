"""What idle pools in the cache cost those who decode, and what the proxy's live estimate says of it at that moment.

    python -m benchmarks.idle_tax [--rounds 3] [--threads 2] [--json]

On the chat model, patched engine and proxy (`-c 16384 --parallel 4 --kv-unified --polykv-max-pools 16`): tokens per
second of one stream and of four beside 0, 4 and 12 pools of 1,000 tokens that are in the cache (pinned) and that nobody
uses. Before each measurement the other pools and all sessions have left the cache. Numbers of pools take turns, speeds
are medians. What is lost is compared with `idle_tax` of GET /polykv/pools, read while the streams decode: the share of
a step's time that is due to cells which nobody at work holds. The proxy has to learn it first, from what it sees, so
it may say nothing at the beginning.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.warm_agents import SETTINGS, SIZES, create, speed_of, view, wait_until
from tests.engine.binaries import chat_model_path
from tests.engine.deployment import Deployment
from tests.engine.noise import Noise

N_IDLE = (0, 4, 12)
N_POOL = 1000
STREAMS = {1: 768, 4: 384}
"""How many streams at once, and the tokens of each: some seconds, since the proxy looks once in a second."""
LOOK_S = 0.25


@dataclass
class Found:
    """By number of streams and of idle pools. Tokens per second; estimates as shares of a step's time."""

    n_threads: int
    speed: dict[int, dict[int, list[float]]] = field(
        default_factory=lambda: {n: {m: [] for m in N_IDLE} for n in STREAMS}
    )
    estimates: dict[int, dict[int, list[float]]] = field(
        default_factory=lambda: {n: {m: [] for m in N_IDLE} for n in STREAMS}
    )
    hi: dict[int, int] = field(default_factory=dict)

    def lost(self, n_streams: int, n_idle: int) -> float:
        """Share of the speed without idle pools that is gone: as much of a step's time is due to them."""
        return 1 - median(self.speed[n_streams][n_idle]) / median(self.speed[n_streams][0])

    def estimate(self, n_streams: int, n_idle: int) -> float | None:
        told = self.estimates[n_streams][n_idle]
        return median(told) if told else None


class Bench:
    def __init__(self, site: Deployment, noise: Noise, found: Found):
        self._site, self._noise, self._found = site, noise, found
        for number in range(max(N_IDLE)):
            create(site, f"idle-{number}", noise(100 + number, N_POOL))

    def measure(self, n_idle: int) -> None:
        for n_streams, n_tokens in STREAMS.items():
            self._prepare(n_idle)
            self._found.hi[n_idle] = self._site.stats()["cells"]["hi"]
            told: list[float] = []
            done = threading.Event()
            looker = threading.Thread(target=self._look, args=(done, told))
            looker.start()
            try:
                speed = speed_of(self._site.http, n_streams, self._noise, n_tokens)
            finally:
                done.set()
                looker.join()
            self._found.speed[n_streams][n_idle].append(speed)
            self._found.estimates[n_streams][n_idle] += told

    def _prepare(self, n_idle: int) -> None:
        """So many pools are in the cache, and nothing else."""
        for number in range(max(N_IDLE)):
            order = "pin" if number < n_idle else "unpin"
            self._site.http.post(f"/polykv/pools/idle-{number}/{order}").raise_for_status()
        wait_until(lambda: self._is_prepared(n_idle), lambda: (self._resident(), self._site.stats()["cells"]))

    def _resident(self) -> list[str]:
        return [pool["name"] for pool in view(self._site)["pools"] if pool["residency"] == "resident"]

    def _is_prepared(self, n_idle: int) -> bool:
        cells = self._site.stats()["cells"]
        return len(self._resident()) == n_idle and cells["used"] == n_idle * N_POOL

    def _look(self, done: threading.Event, told: list[float]) -> None:
        while not done.wait(LOOK_S):
            estimate = view(self._site)["idle_tax"]
            if estimate is not None:
                told.append(estimate)


def run(n_rounds: int, say: Callable[[str], Any], n_threads: int) -> Found:
    found, noise = Found(n_threads), Noise(chat_model_path())
    with tempfile.TemporaryDirectory(prefix="polykv-idle-tax-") as folder:
        dir_ = Path(folder)
        flags = ("-t", str(n_threads), *SIZES)
        with Deployment(chat_model_path(), *flags, dir_=dir_, settings=SETTINGS | {"warm_disk_bytes": 0}) as site:
            say(f"{max(N_IDLE)} pools of {N_POOL} tokens")
            bench = Bench(site, noise, found)
            for number in range(n_rounds):
                for n_idle in N_IDLE if number % 2 == 0 else reversed(N_IDLE):
                    say(f"round {number + 1} of {n_rounds}: {n_idle} pools")
                    bench.measure(n_idle)
    return found


def report(found: Found) -> str:
    n_rounds = len(found.speed[1][0])
    lines = [
        f"idle pools of {N_POOL} tokens in the cache; tokens per second, medians of {n_rounds}, -t {found.n_threads}",
        "",
        f"{'streams':>8}{'idle pools':>12}{'highest cell':>14}{'tokens/s':>10}{'lost':>8}{'idle_tax':>18}",
    ]
    for n_streams in STREAMS:
        for n_idle in N_IDLE:
            told, estimate = found.estimates[n_streams][n_idle], found.estimate(n_streams, n_idle)
            said = f"{estimate:.0%} ({min(told):.0%}-{max(told):.0%})" if estimate is not None else "not known"
            lines.append(
                f"{n_streams:>8}{n_idle:>12}{found.hi[n_idle]:>14}{median(found.speed[n_streams][n_idle]):>10.1f}"
                f"{found.lost(n_streams, n_idle):>8.0%}{said:>18}"
            )
    return "\n".join(lines)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="more than there are free cores spin")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options.rounds, lambda line: print(line, file=sys.stderr, flush=True), options.threads)
    told = {"lost": {n: {m: found.lost(n, m) for m in N_IDLE} for n in STREAMS}}
    print(json.dumps(asdict(found) | told) if options.json else report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
