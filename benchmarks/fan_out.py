"""Four agents at once on one prefix of about 1,740 tokens: pools behind the proxy against llama-server alone.

    python -m benchmarks.fan_out [--rounds 6] [--assert] [--json]

In one run, on the same chat model and the same questions, 48 tokens per agent:

cold   a stock build of the same commit with its defaults (`-c 16384 --parallel 4 --kv-unified`), a prefix it never saw
warm   the same server, all four slots have seen the prefix
pool   `polykvctl up` (the same sizes, `--polykv-max-pools 16`), the prefix is a pool, agents name it

Warm and pool rounds alternate, so that both see the same machine, and each arm is judged by its best round: whatever
else runs here can only slow a round down. Building a pool and a cold prefill of the same text take turns as well, each
first in every other pair, and are judged by their medians. `--assert` ends with 1 unless

- a pool round takes at most 0.95 of a warm one and at most 1/10 of the cold one,
- every agent reuses the whole pool (or all but its last token),
- the cells in use are the pool plus one suffix per agent,
- building the pool takes no longer than one cold prefill (5 % allowed for noise).
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.harness import EngineServer
from tests.engine.stack import ProxyStack

N_AGENTS = 4
N_PREDICT = 48
N_PREFIX = 1740
SIZES = ("-c", "16384", "--parallel", str(N_AGENTS), "--kv-unified")
N_THREADS = 2

PREFILLS = ("Birch", "Cedar", "Elder", "Hazel", "Maple", "Rowan")

MAX_OF_WARM = 0.95
MAX_OF_COLD = 0.1
MAX_OF_PREFILL = 1.05

RULE = (
    "Read the file before you change it and keep every change as small as the task allows. Name what you are not sure "
    "of, never invent an interface, and run the tests of the module you touched before you report that it works. "
)


@dataclass(frozen=True)
class AgentRun:
    """What one agent saw: milliseconds at the client, counts from the engine's own timings."""

    ttft_ms: float
    wall_ms: float
    cache_n: int
    pool_n: int
    prompt_n: int
    predicted_n: int

    @property
    def suffix_cells(self) -> int:
        """Cells beyond the shared prefix; the last token of an answer is sampled and never evaluated."""
        return self.cache_n + self.prompt_n - self.pool_n + self.predicted_n - 1


@dataclass(frozen=True)
class Round:
    agents: tuple[AgentRun, ...]
    wall_ms: float


@dataclass
class Measured:
    """Everything one run found. Times in milliseconds."""

    n_threads: int = N_THREADS
    prefix_n: int = 0
    prefill_ms: list[float] = field(default_factory=list)
    build_ms: list[float] = field(default_factory=list)
    cold: list[Round] = field(default_factory=list)
    warm: list[Round] = field(default_factory=list)
    pool: list[Round] = field(default_factory=list)
    cells_expected: int = 0
    cells_used: int = 0

    def best(self, arm: str) -> float:
        rounds: list[Round] = getattr(self, arm)
        return min(round_.wall_ms for round_ in rounds)

    @property
    def of_warm(self) -> float:
        return self.best("pool") / self.best("warm")

    @property
    def of_cold(self) -> float:
        return self.best("pool") / self.best("cold")

    @property
    def of_prefill(self) -> float:
        return median(self.build_ms) / median(self.prefill_ms)

    @property
    def best_of_prefill(self) -> float:
        """By the best of each: less strict, and hardly moved by what else runs."""
        return min(self.build_ms) / min(self.prefill_ms)

    def broken_promises(self) -> list[str]:
        """What `--assert` demands and this run does not show."""
        reused = [agent.cache_n for agent in self.pool[0].agents]
        checks = {
            f"pool / warm = {self.of_warm:.2f} > {MAX_OF_WARM}": self.of_warm > MAX_OF_WARM,
            f"pool / cold = {self.of_cold:.3f} > {MAX_OF_COLD}": self.of_cold > MAX_OF_COLD,
            f"build / prefill = {self.of_prefill:.2f} > {MAX_OF_PREFILL}": self.of_prefill > MAX_OF_PREFILL,
            f"agents reused {reused} of {self.prefix_n}": not {*reused} <= {self.prefix_n, self.prefix_n - 1},
            f"{self.cells_used} cells instead of {self.cells_expected}": self.cells_used != self.cells_expected,
        }
        return [said for said, broken in checks.items() if broken]


def system_text(name: str, n_repeats: int) -> str:
    """Instructions of an agent, different from the first word on for every name."""
    return f"{name} is your project. " + RULE * n_repeats


def chat(system: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": N_PREDICT, "temperature": 0, "ignore_eos": True}


def questions(round_: int) -> list[str]:
    return [f"{part} of module {round_}: what would you check first?" for part in ("Names", "Errors", "Tests", "Docs")]


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> AgentRun:
    """One streamed chat, on a connection of its own (llama-server closes it after a stream)."""
    began = time.perf_counter()
    first: float | None = None
    timings: dict[str, Any] = {}
    streamed = body | {"stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=streamed, headers={"connection": "close"}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code} {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            choices = event.get("choices") or [{}]
            if first is None and choices[0].get("delta", {}).get("content"):
                first = time.perf_counter()
            timings = event.get("timings") or timings
    if first is None or not timings:
        raise RuntimeError("a stream without text or timings")
    return AgentRun(
        ttft_ms=1000 * (first - began),
        wall_ms=1000 * (time.perf_counter() - began),
        cache_n=timings["cache_n"],
        pool_n=timings.get("pool_n", 0),
        prompt_n=timings["prompt_n"],
        predicted_n=timings["predicted_n"],
    )


def fan_out(url: str, bodies: Sequence[dict[str, Any]]) -> Round:
    async def together() -> Round:
        async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
            began = time.perf_counter()
            agents = await asyncio.gather(*(ask(http, body) for body in bodies))
            return Round(tuple(agents), 1000 * (time.perf_counter() - began))

    return asyncio.run(together())


def stock_round(stock: EngineServer, system: str, number: int) -> Round:
    return fan_out(stock.url, [chat(system, question) for question in questions(number)])


def pool_round(proxy: ProxyStack, system: str, number: int) -> Round:
    named = [{"pool_id": "project", "session_id": f"agent-{agent}"} for agent in range(N_AGENTS)]
    asked = [chat(system, question) for question in questions(number)]
    return fan_out(proxy.url, [body | own for body, own in zip(asked, named, strict=True)])


def build_pool(proxy: ProxyStack, system: str, name: str) -> dict[str, Any]:
    body = {"messages": [{"role": "system", "content": system}], "name": name}
    response = proxy.http.post("/polykv/pools", json=body)
    response.raise_for_status()
    made: dict[str, Any] = response.json()
    return made


def build_alone(proxy: ProxyStack, system: str) -> float:
    """A pool that is built and released again: milliseconds of its prefill."""
    made = build_pool(proxy, system, "alone")
    proxy.http.delete(f"/polykv/pools/{made['pool_id']}").raise_for_status()
    return float(made["materialize_ms"])


def prefill_alone(stock: EngineServer, system: str) -> float:
    """One request on a server that never saw its prompt: milliseconds of its prefill."""
    response = stock.http.post("/v1/chat/completions", json=chat(system, "Begin.") | {"max_tokens": 1})
    response.raise_for_status()
    timings = response.json()["timings"]
    if timings["cache_n"] > 64:
        raise RuntimeError(f"a cold prompt was not cold: {timings['cache_n']} tokens cached")
    return float(timings["prompt_ms"])


def repeats_for(stock: EngineServer) -> int:
    """How often the rule fits into N_PREFIX tokens."""
    n_tokens = [
        len(stock.http.post("/tokenize", json={"content": system_text("Alder", n)}).json()["tokens"]) for n in (1, 11)
    ]
    return (N_PREFIX - n_tokens[0]) * 10 // (n_tokens[1] - n_tokens[0]) + 2


def measure(
    n_rounds: int,
    say: Any,
    *,
    up_to: int | None = None,
    enough: float | None = None,
    shorter: int = 1,
    n_threads: int = N_THREADS,
) -> Measured:
    """``up_to``: while a ratio of the rounds is not met, run more of both kinds, up to this many of each.

    ``enough``: after an even number of pairs of prefills whose bests are in this ratio or below, run no more of them.
    ``shorter``: their texts are that many times shorter than the prefix of the rounds.
    """
    found, threads = Measured(n_threads), ("-t", str(n_threads))
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polykv-fan-out-")))
        model = chat_model_path()
        stock = stack.enter_context(EngineServer(binary_path("stock"), model, *threads, *SIZES, log_dir=logs))
        proxy = stack.enter_context(ProxyStack(binary_path("patched"), model, *threads, log_dir=logs))
        n_repeats = repeats_for(stock)
        for number, name in enumerate(PREFILLS):
            say(f"a cold prefill and a pool of the same length ({name})")
            arms = [
                lambda text: found.prefill_ms.append(prefill_alone(stock, text)),
                lambda text: found.build_ms.append(build_alone(proxy, text)),
            ]
            for measure_arm in arms if number % 2 else reversed(arms):
                measure_arm(system_text(name, n_repeats // shorter))
            if number % 2 and enough is not None and found.best_of_prefill <= enough:
                break
        system = system_text("Alder", n_repeats)
        say("four agents on a cold stock server")
        found.cold.append(stock_round(stock, system, 0))
        found.prefix_n = build_pool(proxy, system, "project")["prefix_len"]
        before = cells_used(proxy) - found.prefix_n
        for number in range(1, (up_to or n_rounds) + 1):
            if number > n_rounds and found.of_warm <= MAX_OF_WARM and found.of_cold <= MAX_OF_COLD:
                break
            say(f"round {number}: warm, then pool")
            found.warm.append(stock_round(stock, system, number))
            found.pool.append(pool_round(proxy, system, number))
            if number == 1:
                suffixes = sum(agent.suffix_cells for agent in found.pool[0].agents)
                found.cells_expected = found.prefix_n + suffixes
                found.cells_used = cells_used(proxy) - before
    return found


def cells_used(proxy: ProxyStack) -> int:
    used: int = httpx.get(f"{proxy.engine_url}/polykv/engine/stats", timeout=60).json()["cells"]["used"]
    return used


def report(found: Measured) -> str:
    lines = [f"{N_AGENTS} agents, {N_PREDICT} tokens each, prefix of {found.prefix_n} tokens", ""]
    lines.append(f"{'':6}{'wall ms':>22}{'TTFT ms':>18}{'cached':>14}{'prefilled':>12}")
    for arm in ("cold", "warm", "pool"):
        rounds: list[Round] = getattr(found, arm)
        walls = [round_.wall_ms for round_ in rounds]
        agents = [agent for round_ in rounds for agent in round_.agents]
        ttfts = sorted(agent.ttft_ms for agent in agents)
        cached = sorted(agent.cache_n for agent in agents)
        prefilled = sorted(agent.prompt_n for agent in agents)
        lines.append(
            f"{arm:6}{f'{min(walls):.0f} best {median(walls):.0f} med':>22}{f'{ttfts[0]:.0f}-{ttfts[-1]:.0f}':>18}"
            f"{f'{cached[0]}-{cached[-1]}':>14}{f'{prefilled[0]}-{prefilled[-1]}':>12}"
        )
    private = sum(agent.cache_n + agent.prompt_n + agent.predicted_n - 1 for agent in found.warm[0].agents)
    lines += [
        "",
        f"pool / warm      {found.of_warm:.2f}  (at most {MAX_OF_WARM})",
        f"pool / cold      {found.of_cold:.3f}  (at most {MAX_OF_COLD})",
        f"build / prefill  {found.of_prefill:.2f}  "
        f"(medians {median(found.build_ms):.0f} and {median(found.prefill_ms):.0f} ms)",
        f"cells in use     {found.cells_used}, expected {found.cells_expected}; four private copies: {private}",
        f"stock flags      {' '.join(SIZES)} -t {found.n_threads}, all others at their defaults",
    ]
    return "\n".join(lines)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--assert", dest="strict", action="store_true", help="end with 1 unless the ratios hold")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds, lambda line: print(line, file=sys.stderr, flush=True))
    broken = found.broken_promises()
    print(json.dumps(asdict(found) | {"broken": broken}) if options.json else report(found))
    for said in broken:
        print(f"not as promised: {said}", file=sys.stderr)
    return 1 if options.strict and broken else 0


if __name__ == "__main__":
    sys.exit(main())
