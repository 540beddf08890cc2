"""Four agents at once whose prefix of 1,740 tokens nobody has seen: requests as they are, against llama-server alone.

    python -m benchmarks.cold_fan_out [--rounds 5] [--threads 2] [--assert] [--json]

In one run, on the chat model, 48 tokens per agent, every server with `-c 16384 --parallel 4 --kv-unified`:

unnamed  `polykvctl up`, chats that name no pool and no session
named    the same, chats that name a session each, as agents do that have ids
ready    the same: a pool of such a prefix is made, then four agents attach to it by its name
eight    the same as unnamed, with eight agents on the four slots; once
stock    a stock build of the same commit with its defaults
no-ram   the same with `--cache-ram 0`

Every round of every arm is a new start of its server, so nothing is cached anywhere, with words that no other round
had. The arms take turns, in an order that rotates; each is judged by the median of its rounds. `--assert` ends with 1
unless, for agents with and without names,

- the engine processed at most 1.02 times the prompt tokens of the prefix and the suffixes, eight agents included,
- a round takes at most 1.15 times as long as making the pool and the round on it,
- and at most 1/3 of a round of either stock server.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.fan_out import N_AGENTS, N_PREDICT, N_PREFIX, SIZES, AgentRun, chat, fan_out
from polykv_proxy.tree.prefix import lcp_tokens
from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.harness import EngineServer
from tests.engine.stack import ProxyStack

N_THREADS = 2
MAX_TOKENS, MAX_OF_READY, MAX_OF_STOCK = 1.02, 1.15, 1 / 3
COLD = ("unnamed", "named")
STOCK: dict[str, tuple[str, ...]] = {"stock": (), "no-ram": ("--cache-ram", "0")}
ARMS = (*COLD, "ready", *STOCK)
PARTS = ("Names", "Errors", "Tests", "Docs", "Speed", "Types", "Logs", "Build")

WHO = ("The reviewer", "An agent", "Whoever reports", "The author", "A new colleague", "The one who merges")
DOES = ("reads", "checks", "names", "keeps", "questions", "repeats", "writes down", "compares", "measures")
WHAT = ("interface", "test", "assumption", "error", "change", "limit", "module", "log", "build", "example", "unit")
WHEN = ("before anything is changed", "after every run", "without being asked", "as long as there is doubt", "first")
WHY = ("small", "certain", "easy to undo", "true", "understood by others", "as it was", "worth the time")


@dataclass(frozen=True)
class Cold:
    """One round. ``n_due``: tokens of the prefix and of all suffixes; ``n_processed``: what the engine counted.

    ``prefill_ms``: of the pool that was made before a ready round, else 0.
    """

    wall_ms: float
    agents: tuple[AgentRun, ...]
    n_prefix: int = 0
    n_due: int = 0
    n_processed: int = 0
    prefill_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.prefill_ms + self.wall_ms

    @property
    def of_due(self) -> float:
        return self.n_processed / self.n_due


@dataclass
class Measured:
    n_threads: int = N_THREADS
    rounds: dict[str, list[Cold]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    eight: list[Cold] = field(default_factory=list)

    def ms(self, arm: str) -> float:
        return median(done.total_ms for done in self.rounds[arm])

    def broken_promises(self) -> list[str]:
        """What `--assert` demands and this run does not show."""
        said = []
        for arm in (*COLD, "eight"):
            rounds = self.eight if arm == "eight" else self.rounds[arm]
            said += [
                f"{arm}: {done.n_processed} prompt tokens instead of {done.n_due}"
                for done in rounds
                if done.of_due > MAX_TOKENS
            ]
        for arm in COLD:
            limits = {"ready": MAX_OF_READY, **dict.fromkeys(STOCK, MAX_OF_STOCK)}
            ratios = {other: self.ms(arm) / self.ms(other) for other in limits}
            said += [
                f"{arm} / {other} = {ratio:.2f} > {limits[other]:.2f}"
                for other, ratio in ratios.items()
                if ratio > limits[other]
            ]
        return said


def new_text(seed: str, n_tokens: int, http: httpx.Client) -> str:
    """Instructions of about so many tokens, drawn anew for every seed: two of them differ from the first words on."""
    draw = random.Random(seed).choice
    sentences = [f"{seed.capitalize()} is the name of this task."]
    sentences += [
        f"{draw(WHO)} {draw(DOES)} the {draw(WHAT)} {draw(WHEN)}, so that it stays {draw(WHY)}."
        for _ in range(n_tokens // 8)
    ]
    tokens = http.post("/tokenize", json={"content": " ".join(sentences)}).raise_for_status().json()["tokens"]
    if len(tokens) < n_tokens:
        raise RuntimeError(f"{len(tokens)} tokens are fewer than {n_tokens}")
    text: str = http.post("/detokenize", json={"tokens": tokens[:n_tokens]}).raise_for_status().json()["content"]
    return text


def bodies_of(system: str, n_agents: int = N_AGENTS) -> list[dict[str, Any]]:
    return [chat(system, f"{part} of module seven: what would you check first?") for part in PARTS[:n_agents]]


def n_due(engine: httpx.Client, bodies: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """How many tokens the prompts share at their beginning, and that plus what each has beyond it."""
    prompts = []
    for body in bodies:
        asked = {"path": "/v1/chat/completions", "body": body}
        prompts.append(engine.post("/polykv/engine/render", json=asked).raise_for_status().json()["tokens"])
    n_prefix = min(lcp_tokens(prompts[0], prompt) for prompt in prompts[1:])
    return n_prefix, n_prefix + sum(len(prompt) - n_prefix for prompt in prompts)


def n_processed(engine: httpx.Client) -> int:
    n: int = engine.get("/polykv/engine/stats").raise_for_status().json()["n_prompt_cum"]
    return n


class Bench:
    """``say``: told what comes next."""

    def __init__(self, dir_: Path, say: Callable[[str], Any], n_threads: int):
        self.dir, self.say, self.n_threads = dir_, say, n_threads
        self.model = chat_model_path()

    def proxied(self, seed: str, *, named: bool = False, ready: bool = False, n_agents: int = N_AGENTS) -> Cold:
        threads = ("-t", str(self.n_threads))
        with (
            ProxyStack(binary_path("patched"), self.model, *threads, log_dir=self.dir) as proxy,
            httpx.Client(base_url=proxy.engine_url, timeout=300) as engine,
        ):
            system = new_text(seed, N_PREFIX, engine)
            bodies = bodies_of(system, n_agents)
            own: list[dict[str, Any]] = [{"session_id": f"agent-{i}"} for i in range(n_agents)]
            if named or ready:
                bodies = [body | fields for body, fields in zip(bodies, own, strict=True)]
            prefill_ms = 0.0
            if ready:
                pool = {"messages": [{"role": "system", "content": system}], "name": "project"}
                began = time.perf_counter()
                proxy.http.post("/polykv/pools", json=pool).raise_for_status()
                prefill_ms = 1000 * (time.perf_counter() - began)
                bodies = [body | {"pool_id": "project"} for body in bodies]
            n_prefix, due = n_due(engine, bodies)
            before = n_processed(engine)
            done = fan_out(proxy.url, bodies)
            after = n_processed(engine)
            return Cold(done.wall_ms, done.agents, n_prefix, due, after - before, prefill_ms)

    def stock(self, seed: str, *flags: str) -> Cold:
        flags = ("-t", str(self.n_threads), *SIZES, *flags)
        with EngineServer(binary_path("stock"), self.model, *flags, log_dir=self.dir, name="stock") as server:
            done = fan_out(server.url, bodies_of(new_text(seed, N_PREFIX, server.http)))
            return Cold(done.wall_ms, done.agents, n_processed=sum(agent.prompt_n for agent in done.agents))

    def round(self, arm: str, seed: str) -> Cold:
        if arm in STOCK:
            return self.stock(seed, *STOCK[arm])
        return self.proxied(seed, named=arm == "named", ready=arm == "ready")


def measure(n_rounds: int, say: Callable[[str], Any], n_threads: int = N_THREADS) -> Measured:
    found = Measured(n_threads)
    with tempfile.TemporaryDirectory(prefix="polykv-cold-fan-out-") as folder:
        bench = Bench(Path(folder), say, n_threads)
        for number in range(n_rounds):
            first = number % len(ARMS)
            for arm in ARMS[first:] + ARMS[:first]:
                say(f"round {number + 1} of {n_rounds}: {arm}")
                found.rounds[arm].append(bench.round(arm, f"{arm} {number}"))
        say("eight agents on four slots")
        found.eight.append(bench.proxied("eight", n_agents=8))
    return found


def report(found: Measured) -> str:
    n_prefix = found.eight[0].n_prefix
    lines = [
        f"{N_AGENTS} agents at once, {N_PREDICT} tokens each, behind {n_prefix} tokens that nobody has seen; "
        f"medians of {len(found.rounds['ready'])}, -t {found.n_threads}",
        "",
        f"{'':10}{'wall ms':>10}{'TTFT ms by agent':>50}{'prompt tokens':>16}{'due':>14}",
    ]
    for arm in (*ARMS, "eight"):
        rounds = found.eight if arm == "eight" else found.rounds[arm]
        ttfts = zip(*(sorted(agent.ttft_ms for agent in done.agents) for done in rounds), strict=True)
        told = " ".join(f"{median(of_one):.0f}" for of_one in ttfts)
        n = f"{median(done.n_processed for done in rounds):.0f}"
        due = "" if arm == "ready" or arm in STOCK else f"{rounds[0].n_due}"
        lines.append(f"{arm:10}{median(done.wall_ms for done in rounds):>10.0f}{told:>50}{n:>16}{due:>14}")
    made = median(done.prefill_ms for done in found.rounds["ready"])
    lines += ["", f"ready: the pool was made in {made:.0f} ms; together {found.ms('ready'):.0f} ms", ""]
    for arm in COLD:
        worst = max(done.of_due for done in found.rounds[arm])
        lines.append(
            f"{arm:8} / (pool made and used) {found.ms(arm) / found.ms('ready'):.2f} (at most {MAX_OF_READY})"
            + "".join(f"   / {other} 1/{found.ms(other) / found.ms(arm):.1f}" for other in STOCK)
            + f" (at most 1/3)   prompt tokens at most {worst:.3f} of what is due (at most {MAX_TOKENS})"
        )
    return "\n".join(lines)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=N_THREADS, help="more than there are free cores spin")
    parser.add_argument("--assert", dest="strict", action="store_true", help="end with 1 unless it all holds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds, lambda line: print(line, file=sys.stderr, flush=True), options.threads)
    broken = found.broken_promises()
    print(json.dumps(asdict(found) | {"broken": broken}) if options.json else report(found))
    for said in broken:
        print(f"not as promised: {said}", file=sys.stderr)
    return 1 if options.strict and broken else 0


if __name__ == "__main__":
    sys.exit(main())
