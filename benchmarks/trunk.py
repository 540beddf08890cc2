"""Four branches on one trunk of 3,000 tokens that nobody has seen: what is prefilled, how fast, and how right it is.

    python -m benchmarks.trunk [--rounds 2] [--threads 2] [--assert] [--json]

In one run, on the chat model, with `-c 16384 --parallel 4 --kv-unified`, completions of 48 tokens, all four at once and
as they are (no pool, no session is named): a conversation, and four ways to go on with it.

wall    through `polykvctl up`, and a stock build of the same commit with its defaults; every round is a new start of
        the server and has a trunk of its own, the two take turns, medians
tokens  of each branch's prompt that were prefilled
nats    how far the log-probability of each token of an answer is from that of the same token when the branch is
        prefilled alone and in full by the same server. The tokens are those of the full prefill's greedy answer, and a
        grammar forces them, so that all positions can be compared. Beside it, as the measure, the same for stock, once
        with its own slot cache (the trunk is in the slot already) against its full prefill. Quantized weights round
        differently in batches of other sizes, so this is not 0 there either.

`--assert` ends with 1 unless the branches have the trunk prefilled once, and the mean and the largest difference of
nats are at most twice stock's own.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx

from benchmarks.cold_fan_out import new_text
from benchmarks.fan_out import SIZES
from polykv_proxy.tree.prefix import lcp_tokens
from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.harness import EngineServer
from tests.engine.hooks import forced_grammar
from tests.engine.stack import ProxyStack

N_TRUNK, N_ANSWER, N_THREADS = 3000, 48, 2
BATCH = ("-b", "256")
"""What `polykvctl up` gives its engine; stock gets the same where answers are compared."""
TASKS = (
    "Write down the three rules that matter most, and why.",
    "Which of these rules contradict each other? Name two.",
    "Make a checklist of what was said, in the order of the work.",
    "Explain to a new colleague what is expected of them.",
)
ARMS = ("proxy", "stock")
MAX_OF_STOCK = 2.0


@dataclass(frozen=True)
class Branches:
    """One round. ``prefilled``: tokens of each branch's prompt; ``n_trunk``: that all of them share."""

    wall_ms: float
    n_trunk: int
    n_prompts: tuple[int, ...]
    prefilled: tuple[int, ...]

    @property
    def n_due(self) -> int:
        return self.n_trunk + sum(n - self.n_trunk for n in self.n_prompts)


@dataclass(frozen=True)
class Difference:
    """Of one branch, in nats; ``n_same``: tokens of its greedy answer before it leaves the full prefill's."""

    mean: float
    largest: float
    n_same: int


@dataclass
class Measured:
    n_threads: int = N_THREADS
    rounds: dict[str, list[Branches]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    nats: dict[str, list[Difference]] = field(default_factory=dict)

    def ms(self, arm: str) -> float:
        return median(done.wall_ms for done in self.rounds[arm])

    def mean(self, arm: str) -> float:
        return fmean(one.mean for one in self.nats[arm])

    def largest(self, arm: str) -> float:
        return max(one.largest for one in self.nats[arm])

    def broken_promises(self) -> list[str]:
        said = [
            f"{sum(done.prefilled)} tokens were prefilled instead of {done.n_due}"
            for done in self.rounds["proxy"]
            if sum(done.prefilled) > done.n_due
        ]
        for what, of in (("mean", self.mean), ("largest", self.largest)):
            if of("proxy") > MAX_OF_STOCK * of("stock"):
                said.append(f"{what} difference {of('proxy'):.2e} nats, stock's own {of('stock'):.2e}")
        return said


def prompts_of(engine: httpx.Client, seed: str) -> list[list[int]]:
    """Four prompts in tokens. ``engine``: a patched one, which tells the tokens of a chat."""
    n_system, n_turn = N_TRUNK // 2, N_TRUNK // 8
    talk = [{"role": "system", "content": new_text(f"{seed} system", n_system, engine)}]
    for turn in range(2):
        talk.append({"role": "user", "content": new_text(f"{seed} question {turn}", n_turn, engine)})
        talk.append({"role": "assistant", "content": new_text(f"{seed} answer {turn}", n_turn, engine)})
    prompts = []
    for task in TASKS:
        body = {"messages": [*talk, {"role": "user", "content": task}]}
        asked = {"path": "/v1/chat/completions", "body": body}
        prompts.append(engine.post("/polykv/engine/render", json=asked).raise_for_status().json()["tokens"])
    return prompts


def body_of(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": list(prompt), "n_predict": N_ANSWER, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return body | more


def at_once(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
    async def together() -> tuple[float, list[dict[str, Any]]]:
        async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
            began = time.perf_counter()
            answers = await asyncio.gather(*(http.post("/completion", json=body) for body in bodies))
            wall_ms = 1000 * (time.perf_counter() - began)
            return wall_ms, [answer.raise_for_status().json() for answer in answers]

    return asyncio.run(together())


def n_common(prompts: Sequence[list[int]]) -> int:
    return min(lcp_tokens(prompts[0], prompt) for prompt in prompts[1:])


def logprobs(answer: dict[str, Any]) -> list[float]:
    """Of the tokens that were answered, before any sampler."""
    return [float(token["logprob"]) for token in answer["completion_probabilities"]]


def forced(prompt: Sequence[int], tokens: Sequence[int], **more: Any) -> dict[str, Any]:
    return body_of(prompt, n_predict=len(tokens), grammar=forced_grammar(tokens), n_probs=1, **more)


class Full:
    """Answers to prompts alone, prefilled in full."""

    def __init__(self, http: httpx.Client, prompts: Sequence[list[int]]) -> None:
        self._http, self.prompts = http, prompts
        answers = [self._ask(body_of(prompt, n_probs=1)) for prompt in prompts]
        self.tokens: list[list[int]] = [answer["tokens"] for answer in answers]
        self.logprobs = [logprobs(answer) for answer in answers]

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.post("/completion", json=body | {"cache_prompt": False}).json()
        if answer["timings"]["cache_n"]:
            raise RuntimeError("a full prefill was not full")
        return answer

    def differences(self, answers: Sequence[dict[str, Any]], greedy: Sequence[list[int]]) -> list[Difference]:
        """``answers``: forced ones; ``greedy``: tokens of those that were not."""
        found = []
        for tokens, full, answer, own in zip(self.tokens, self.logprobs, answers, greedy, strict=True):
            if answer["tokens"] != tokens:
                raise RuntimeError("the grammar did not force the answer")
            apart = [abs(one - other) for one, other in zip(full, logprobs(answer), strict=True)]
            found.append(Difference(fmean(apart), max(apart), lcp_tokens(tokens, own)))
        return found


class Bench:
    def __init__(self, dir_: Path, n_threads: int):
        self._dir, self._model = dir_, chat_model_path()
        self._threads = ("-t", str(n_threads))

    @contextmanager
    def proxy(self) -> Iterator[tuple[ProxyStack, httpx.Client]]:
        with (
            ProxyStack(binary_path("patched"), self._model, *self._threads, log_dir=self._dir) as proxy,
            httpx.Client(base_url=proxy.engine_url, timeout=300) as engine,
        ):
            yield proxy, engine

    def stock(self, *flags: str) -> EngineServer:
        flags = (*self._threads, *SIZES, *flags)
        return EngineServer(binary_path("stock"), self._model, *flags, log_dir=self._dir, name="stock")

    def round(self, seed: str) -> dict[str, Branches]:
        """Both arms on prompts of the same lengths, each with words of its own."""
        done = {}
        with self.proxy() as (proxy, engine):
            prompts, others = prompts_of(engine, seed), prompts_of(engine, f"{seed} again")
            done["proxy"] = self._branches(proxy.url, prompts)
        with self.stock() as server:
            done["stock"] = self._branches(server.url, others)
        return done

    def _branches(self, url: str, prompts: Sequence[list[int]]) -> Branches:
        wall_ms, answers = at_once(url, [body_of(prompt) for prompt in prompts])
        prefilled = tuple(answer["timings"]["prompt_n"] for answer in answers)
        return Branches(wall_ms, n_common(prompts), tuple(map(len, prompts)), prefilled)

    def nats(self) -> dict[str, list[Difference]]:
        found = {}
        with self.proxy() as (_, engine):
            prompts = prompts_of(engine, "nats")
            full = Full(engine, prompts)
        with self.proxy() as (proxy, _):
            _, answers = at_once(proxy.url, [forced(*pair) for pair in zip(prompts, full.tokens, strict=True)])
        with self.proxy() as (proxy, _):
            _, own = at_once(proxy.url, [body_of(prompt) for prompt in prompts])
        found["proxy"] = full.differences(answers, [answer["tokens"] for answer in own])
        with self.stock(*BATCH) as server:
            full = Full(server.http, prompts)
            server.http.post("/completion", json=body_of(prompts[0][: n_common(prompts)], n_predict=0, id_slot=0))
            answers, greedy = [], []
            for prompt, tokens in zip(prompts, full.tokens, strict=True):
                answers.append(server.http.post("/completion", json=forced(prompt, tokens, id_slot=0)).json())
                greedy.append(server.http.post("/completion", json=body_of(prompt, id_slot=0)).json()["tokens"])
            if any(answer["timings"]["cache_n"] < n_common(prompts) - 1 for answer in answers):
                raise RuntimeError("stock's slot did not have the trunk")
            found["stock"] = full.differences(answers, greedy)
        return found


def measure(n_rounds: int, say: Callable[[str], Any], n_threads: int = N_THREADS) -> Measured:
    found = Measured(n_threads)
    with tempfile.TemporaryDirectory(prefix="polykv-trunk-") as folder:
        bench = Bench(Path(folder), n_threads)
        for number in range(n_rounds):
            say(f"round {number + 1} of {n_rounds}")
            for arm, done in bench.round(f"round {number}").items():
                found.rounds[arm].append(done)
                say(f"  {arm}: {done.wall_ms:.0f} ms, {sum(done.prefilled)} tokens prefilled, {done.n_due} due")
        say("log-probabilities")
        found.nats = bench.nats()
    return found


def report(found: Measured) -> str:
    n_trunk = found.rounds["proxy"][0].n_trunk
    lines = [
        f"{len(TASKS)} branches at once on {n_trunk} tokens that nobody has seen, {N_ANSWER} tokens each; "
        f"medians of {len(found.rounds['proxy'])}, -t {found.n_threads}",
        "",
        f"{'':8}{'wall ms':>10}{'prefilled by branch':>28}{'together':>10}{'due':>8}",
    ]
    for arm in ARMS:
        last = found.rounds[arm][-1]
        told = " ".join(map(str, sorted(last.prefilled)))
        lines.append(f"{arm:8}{found.ms(arm):>10.0f}{told:>28}{sum(last.prefilled):>10}{last.n_due:>8}")
    lines += ["", f"stock / proxy {found.ms('stock') / found.ms('proxy'):.2f}", ""]
    lines.append(f"{'nats against a full prefill':30}{'mean by branch':>40}{'largest':>40}{'same tokens':>16}")
    for arm, label in (("proxy", "at once, through the proxy"), ("stock", "stock, from its slot")):
        told = [
            " ".join(f"{value:.1e}" for value in values)
            for values in zip(*((one.mean, one.largest) for one in found.nats[arm]), strict=True)
        ]
        same = " ".join(str(one.n_same) for one in found.nats[arm])
        lines.append(f"{label:30}{told[0]:>40}{told[1]:>40}{same:>16}")
    return "\n".join(lines)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
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
