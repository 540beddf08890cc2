"""The warm tier as agents meet it, through the proxy: idle pools leave, sessions take turns, the engine is killed.

    python -m benchmarks.warm_agents [--rounds 3] [--assert] [--json]

In one run, on the chat model, patched engine and proxy (`-c 16384 --parallel 4 --kv-unified --polykv-max-pools 16`):

sessions  twelve of them in turn on four slots, behind a pool of 1,740 tokens, three turns of 60 new tokens each
idle      12 pools of 1,000 tokens; tokens per second of one stream and of four on a server that never had a pool, with
          all of them pinned, and when they have left by themselves
restart   the engine is killed with 8 pools, and started again: the first request to each pool

`--assert` ends with 1 unless

- every turn but the first of each session has no more prefilled than what is new in it, and its answer's last token,
- with the pools gone, one stream and four have at least 0.95 of their speed without any,
- after the kill the first request to each pool has only its own tokens prefilled, and nothing else was.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.deployment import Deployment
from tests.engine.harness import EngineServer
from tests.engine.noise import Noise

N_PREFIX, N_SESSIONS, N_TURNS, N_NEW, N_ANSWER = 1740, 12, 3, 60, 8
N_POOLS, N_POOL = 12, 1000
N_KILLED, N_KILLED_POOL, N_SUFFIX = 8, 300, 5
STREAMS = {1: 128, 4: 96}
MIN_SPEED = 0.95
WITHIN_S = 120.0

MIB = 1 << 20
SIZES = ("-c", "16384", "--parallel", "4", "--kv-unified", "--polykv-max-pools", "16", "-b", "256")
SETTINGS: dict[str, float] = {
    "warm_after_s": 1.0,
    "session_gap_s": 0.5,
    "warm_disk_bytes": 1024 * MIB,
    "pin_max_fraction": 0.9,
}


@dataclass
class Turn:
    """What was new (with the token that the last answer ended with), what was prefilled, and how long that took."""

    n_new: int
    n_prefilled: int
    prompt_ms: float


@dataclass
class Found:
    """Speeds in tokens per second, by arm and number of streams; ``hi``: the highest used cell of each arm."""

    prefill_ms: float = 0.0
    first_turns: list[Turn] = field(default_factory=list)
    later_turns: list[Turn] = field(default_factory=list)
    hits: int = 0
    speed: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    hi: dict[str, int] = field(default_factory=dict)
    idle_tax: float | None = None
    after_kill: dict[str, int] = field(default_factory=dict)
    n_prefilled_after_kill: int = 0
    after_kill_ms: list[float] = field(default_factory=list)

    def of_speed(self, arm: str, n_streams: int) -> float:
        return max(self.speed[arm][n_streams]) / max(self.speed["none"][n_streams])

    def slow(self) -> list[str]:
        ratios = {n: self.of_speed("left", n) for n in STREAMS}
        return [f"with the pools gone, {n} streams: {r:.2f} of the speed" for n, r in ratios.items() if r < MIN_SPEED]

    def broken_promises(self) -> list[str]:
        """What `--assert` demands and this run does not show."""
        twice = [turn for turn in self.later_turns if turn.n_prefilled > turn.n_new]
        said = [f"{len(twice)} turns had more prefilled than was new: {twice[:3]}"] if twice else []
        own = {name: n for name, n in self.after_kill.items() if n != N_SUFFIX}
        said += [f"after the kill: {own} tokens were prefilled, not {N_SUFFIX} each"] if own else []
        n_due = N_SUFFIX * len(self.after_kill)
        if self.n_prefilled_after_kill != n_due:
            said.append(f"after the kill: {self.n_prefilled_after_kill} tokens were prefilled in all, not {n_due}")
        return said + self.slow()


def ask(site: Deployment, prompt: list[int], n: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True} | fields
    answer: dict[str, Any] = site.http.post("/completion", json=body, timeout=300).raise_for_status().json()
    return answer


def create(site: Deployment, name: str, tokens: list[int]) -> None:
    site.http.post("/polykv/pools", json={"name": name, "tokens": tokens}, timeout=300).raise_for_status()


def view(site: Deployment) -> dict[str, Any]:
    shown: dict[str, Any] = site.http.get("/polykv/pools").raise_for_status().json()
    return shown


def wait_until(is_so: Callable[[], bool], what: Callable[[], Any]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"it did not come to that in {WITHIN_S:.0f} s: {what()}")
        time.sleep(0.1)


def measure_sessions(site: Deployment, noise: Noise, found: Found) -> None:
    prefix = noise(1, N_PREFIX)
    began = time.perf_counter()
    create(site, "shared", prefix)
    found.prefill_ms = 1000 * (time.perf_counter() - began)
    talks = [list(prefix) for _ in range(N_SESSIONS)]
    for turn in range(N_TURNS):
        for number, talk in enumerate(talks):
            talk.extend(noise(1000 + 100 * turn + number, N_NEW))
            answer = ask(site, talk, N_ANSWER, session_id=f"agent-{number}", pool_id="shared")
            told = answer["timings"]
            done = Turn(N_NEW + (1 if turn else 0), told["prompt_n"], told["prompt_ms"])
            (found.later_turns if turn else found.first_turns).append(done)
            talk.extend(answer["tokens"])
    found.hits = sum(view(site)["warm"][place]["hits"] for place in ("ram", "disk"))
    for number in range(N_SESSIONS):
        site.http.delete(f"/polykv/sessions/agent-{number}").raise_for_status()
    site.http.delete("/polykv/pools/shared").raise_for_status()


def speed_of(http: httpx.Client, n_streams: int, noise: Noise, n_tokens: int) -> float:
    """Tokens per second of all streams together, each of so many tokens, by the engine's own account."""

    def one(number: int) -> float:
        body = {"prompt": noise(500 + number, 20), "n_predict": n_tokens, "session_id": f"stream-{number}"}
        answer = http.post("/completion", json=body | {"ignore_eos": True}, timeout=300).raise_for_status().json()
        return float(answer["timings"]["predicted_per_second"])

    with ThreadPoolExecutor(n_streams) as threads:
        return sum(threads.map(one, range(n_streams)))


def measure_idle(
    site: Deployment, plain: httpx.Client, noise: Noise, found: Found, *, n_rounds: int, up_to: int
) -> None:
    """What nobody uses leaves by itself; pinned, all of it is in the cache. ``plain`` never has a pool."""
    idle = {f"idle-{number}": noise(100 + number, N_POOL) for number in range(N_POOLS)}

    def measure(arm: str, http: httpx.Client) -> None:
        for n_streams, n_tokens in STREAMS.items():
            speed = speed_of(http, n_streams, noise, n_tokens)
            found.speed.setdefault(arm, {}).setdefault(n_streams, []).append(speed)

    def order(what: str) -> None:
        for name in idle:
            site.http.post(f"/polykv/pools/{name}/{what}").raise_for_status()

    def have_left() -> bool:
        return all(pool["residency"] == "warm" for pool in view(site)["pools"]) and cells_high(site) < N_POOL

    for name, tokens in idle.items():
        create(site, name, tokens)
    for number in range(max(n_rounds, up_to)):
        if number >= n_rounds and not found.slow():
            break
        measure("none", plain)
        order("pin")
        measure("resident", site.http)
        found.hi["resident"] = cells_high(site)
        found.idle_tax = view(site)["idle_tax"]
        order("unpin")
        wait_until(have_left, lambda: view(site)["warm"])
        measure("left", site.http)
        found.hi["left"] = cells_high(site)


def cells_high(site: Deployment) -> int:
    high: int = site.stats()["cells"]["hi"]
    return high


def measure_kill(site: Deployment, noise: Noise, found: Found) -> None:
    pools = {f"kept-{i}": noise(200 + i, N_KILLED_POOL) for i in range(N_KILLED)}
    for name, tokens in pools.items():
        create(site, name, tokens)
    wait_until(lambda: view(site)["warm"]["disk"]["pools"] == N_KILLED, lambda: view(site)["warm"])
    site.restart_engine()
    for name, tokens in pools.items():
        began = time.perf_counter()
        answer = ask(site, tokens + tokens[:N_SUFFIX], 1, pool_id=name, session_id=f"of-{name}")
        found.after_kill_ms.append(1000 * (time.perf_counter() - began))
        found.after_kill[name] = answer["timings"]["prompt_n"]
    found.n_prefilled_after_kill = site.stats()["n_prompt_cum"]


def run(n_rounds: int, say: Callable[[str], Any], *, up_to: int = 0, n_threads: int = 2) -> Found:
    """``up_to``: while the speeds are not as promised, run more rounds, up to this many."""
    found, noise = Found(), Noise(chat_model_path())
    with tempfile.TemporaryDirectory(prefix="polykv-warm-agents-") as folder:
        dir_ = Path(folder)
        sizes = ("-t", str(n_threads), *SIZES)
        flags = (*sizes, "--polykv-save-path", str(dir_ / "states"), "--polykv-save-disk", "1024")
        with Deployment(chat_model_path(), *flags, dir_=dir_, settings=SETTINGS) as site:
            say(f"{N_SESSIONS} sessions on 4 slots, behind {N_PREFIX} tokens")
            measure_sessions(site, noise, found)
            say(f"{N_KILLED} pools, and the engine is killed")
            measure_kill(site, noise, found)
        for name in ("pools.db", "pools.db-wal", "pools.db-shm"):
            (dir_ / name).unlink(missing_ok=True)
        with Deployment(chat_model_path(), *flags, dir_=dir_, settings=SETTINGS) as site:
            say(f"{N_POOLS} pools of {N_POOL} tokens that nobody uses")
            with (
                EngineServer(binary_path("patched"), chat_model_path(), *sizes, log_dir=dir_, name="plain") as server,
                httpx.Client(base_url=server.url) as plain,
            ):
                measure_idle(site, plain, noise, found, n_rounds=n_rounds, up_to=up_to)
    return found


def report(found: Found) -> str:
    def told(turns: list[Turn]) -> str:
        n_tokens, took_ms = median(t.n_prefilled for t in turns), median(t.prompt_ms for t in turns)
        return f"{n_tokens:.0f} tokens prefilled in {took_ms:.0f} ms"

    most = max(turn.n_prefilled - turn.n_new for turn in found.later_turns)
    each = sorted(set(found.after_kill.values()))
    lines = [
        f"sessions: {N_SESSIONS} in turn on 4 slots, behind {N_PREFIX} tokens (made in {found.prefill_ms:.0f} ms)",
        f"  first turns     {told(found.first_turns)}",
        f"  later turns     {told(found.later_turns)}, at most {most} more than was new; {found.hits} states loaded",
        "",
        f"restart: the engine killed with {N_KILLED} pools of {N_KILLED_POOL} tokens",
        f"  first requests  {each} tokens prefilled each, {found.n_prefilled_after_kill} in all; "
        f"{median(found.after_kill_ms):.0f} ms",
        "",
        f"idle: {N_POOLS} pools of {N_POOL} tokens, tokens per second, best of {len(found.speed['none'][1])}",
        f"  {'':10}{'highest cell':>14}" + "".join(f"{f'{n} streams':>22}" for n in STREAMS),
    ]
    for arm, speeds in found.speed.items():
        cells = [f"{max(speeds[n]):.1f} ({100 * found.of_speed(arm, n):.0f} %)" for n in STREAMS]
        lines.append(f"  {arm:10}{found.hi.get(arm, ''):>14}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--assert", dest="strict", action="store_true", help="end with 1 unless it all holds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options.rounds, lambda line: print(line, file=sys.stderr, flush=True))
    broken = found.broken_promises()
    print(json.dumps(asdict(found) | {"broken": broken}) if options.json else report(found))
    for said in broken:
        print(f"not as promised: {said}", file=sys.stderr)
    return 1 if options.strict and broken else 0


if __name__ == "__main__":
    sys.exit(main())
