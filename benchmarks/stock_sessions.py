"""Six sessions in turn on a stock llama-server with four slots: with its own choice of slots, and with the proxy's.

    python -m benchmarks.stock_sessions [--turns 8] [--json]

No hooks anywhere: the same stock build, the same flags, the same prompts, a fresh server per arm. All sessions begin
with the same 400 tokens and grow by 60 and an answer of 12 per turn; session by session, turn by turn. What counts is
how many prompt tokens come from a cache (``timings.cache_n``), so a tiny model will do. Three ways to start the server:

kept      `--parallel 4 --cache-ram 0`: slots keep what they hold, and nothing else does
copied    `--parallel 4`: slots at rest are copied to memory as well
emptied   no `--parallel`: a unified cache, slots at rest are saved and emptied, so that no session can keep one
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.harness import EngineServer
from tests.engine.restarts import ProxyProcess
from tests.engine.tiny_models import tiny_model_path

N_SESSIONS = 6
N_PREFIX, N_TURN, N_ANSWER = 400, 60, 12
STARTS = {
    "kept": ("-c", "16384", "--parallel", "4", "--cache-ram", "0"),
    "copied": ("-c", "16384", "--parallel", "4"),
    "emptied": ("-c", "16384"),
}


@dataclass(frozen=True)
class Arm:
    """Prompt tokens of all turns: found in a cache, and prefilled. ``slots``: how many slots were used."""

    cached: int
    prefilled: int
    slots: int


@dataclass(frozen=True)
class Measured:
    start: str
    alone: Arm
    proxy: Arm

    @property
    def ratio(self) -> float:
        """Cached tokens with the proxy, over those without."""
        return self.proxy.cached / self.alone.cached

    @property
    def of_prefilled(self) -> float:
        return self.proxy.prefilled / self.alone.prefilled


def run_sessions(http: httpx.Client, n_turns: int, *, named: bool) -> Arm:
    """Every session in its turn. ``named``: they say who they are, as agents do."""
    draw = random.Random(1)

    def noise(n: int) -> list[int]:
        return [draw.randrange(1000, 4000) for _ in range(n)]

    prefix = noise(N_PREFIX)
    said = {f"session-{number}": list(prefix) for number in range(N_SESSIONS)}
    cached = prefilled = 0
    slots = set()
    for _ in range(n_turns):
        for name, prompt in said.items():
            prompt.extend(noise(N_TURN))
            body = {
                "prompt": prompt,
                "n_predict": N_ANSWER,
                "return_tokens": True,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = http.post("/completion", json=body, headers={"x-session-affinity": name} if named else {})
            answer.raise_for_status()
            reply = answer.json()
            prompt.extend(reply["tokens"])
            cached += reply["timings"]["cache_n"]
            prefilled += reply["timings"]["prompt_n"]
            slots.add(reply["id_slot"])
    return Arm(cached, prefilled, len(slots))


def measure(start: str, n_turns: int) -> Measured:
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polykv-stock-")))
        model = tiny_model_path("dense", chat_model_path())

        def server(name: str) -> EngineServer:
            return stack.enter_context(
                EngineServer(binary_path("stock"), model, *STARTS[start], log_dir=logs, name=name)
            )

        alone = run_sessions(server("alone").http, n_turns, named=True)
        proxy = ProxyProcess(server("behind").url, logs / "pools.db", logs / "proxy.log")
        stack.callback(proxy.kill)
        proxy.start()
        with httpx.Client(base_url=proxy.url, timeout=300, limits=httpx.Limits(keepalive_expiry=1)) as http:
            return Measured(start, alone, run_sessions(http, n_turns, named=True))


def report(found: list[Measured]) -> str:
    lines = [f"{'':9}{'cached: alone':>14}{'proxy':>8}{'ratio':>8}{'prefilled: alone':>18}{'proxy':>8}{'ratio':>8}"]
    lines += [
        f"{one.start:9}{one.alone.cached:>14}{one.proxy.cached:>8}{one.ratio:>8.2f}"
        f"{one.alone.prefilled:>18}{one.proxy.prefilled:>8}{one.of_prefilled:>8.2f}"
        f"   slots used: {one.alone.slots} and {one.proxy.slots}"
        for one in found
    ]
    return "\n".join(lines)


def main(say: Callable[[str], None] = print) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [measure(start, options.turns) for start in STARTS]
    say(json.dumps([asdict(one) for one in found]) if options.json else report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
