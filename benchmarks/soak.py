"""Half an hour of everything at once, and whether anything is left of it: the real engine and the chat model.

    python -m benchmarks.soak [--minutes 30] [--json]

Pools are made, forked, pinned, compacted and released under an enforced policy, in a cache that is too small for all of
them; sessions begin, chat with and without a stream, leave in the middle of a reply and are forgotten; requests without
a session pass by. Every `ROUND_S` all of it is taken back, and the proxy is counted: asyncio tasks, file descriptors,
what is held or waits (requests, slots, lines, held turns), pools, sessions, cells and sequences of the engine, saved
states, and memory. What counts must be where it was after the first round. Memory first fills what is kept of the last
1,000 requests and of prompts that were seen, up to `FILLS` bytes; once `N_FILLED` things were done it must stay where
it is, but for `MAX_GROWN`.

The proxy runs in a process of its own, as `polykvctl serve` runs it, and writes its counters down when it gets SIGUSR1.
Ends with 1 if anything has grown, if a request failed in a way that is no refusal, or if nothing of a kind happened.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from polykv_proxy.app import CONTROL, RELAY, calm_collector, serving
from polykv_proxy.config import load_settings
from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.harness import EngineServer

N_SLOTS, N_CTX, MAX_POOLS = 4, 4096, 6
ROUND_S = 30.0
FILLS, N_FILLED, MAX_GROWN = 24 << 20, 3000, 0.05
REST_WITHIN_S = 60.0
N_TALKERS = 6
REFUSALS = {404, 409, 429, 503, 507}
"""A pool that was released meanwhile, one in use, the gate, a full cache. Never a 500, a 502, or no answer."""
FLAGS = (
    "-c",
    str(N_CTX),
    "--parallel",
    str(N_SLOTS),
    "--kv-unified",
    "--polykv-max-pools",
    str(MAX_POOLS),
    "-b",
    "256",
)
POLICY = {"target_tps_per_session": 2, "mode": "enforced", "on_saturation": "queue", "queue_timeout_ms": 5000}
SETTINGS: dict[str, Any] = {"warm_after_s": 2.0, "session_gap_s": 1.0, "grace_ttl_s": 2.0, "auto_pool_min_tokens": 64}

WORDS = [f"{one}{vowel}{other}" for one in "bcdfghklmnprstvwz" for vowel in "aeiou" for other in "lmnrst"]


Message = dict[str, str]

# The proxy's process ----------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def serve(upstream: str, state: Path, counters: Path) -> None:
    settings = load_settings(upstream_url=upstream, port=0, state=str(state), **SETTINGS)
    asked, over = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, asked.set)
    loop.add_signal_handler(signal.SIGTERM, over.set)
    async with serving(settings) as (url, app):
        print(url, flush=True)
        ended = asyncio.ensure_future(over.wait())
        while not over.is_set():
            waits = asyncio.ensure_future(asked.wait())
            await asyncio.wait([waits, ended], return_when=asyncio.FIRST_COMPLETED)
            waits.cancel()
            asked.clear()
            gc.collect()
            control, relay = app[CONTROL], app[RELAY]
            tasks = Counter(task.get_name().rstrip("0123456789") for task in asyncio.all_tasks())
            told = {
                "tasks": len(asyncio.all_tasks()) - 2,  # this look itself
                "task_names": tasks,
                "file_descriptors": len(os.listdir("/proc/self/fd")) - 1,
                "requests": relay.n_running,
                "floating": relay.n_floating,
                "waiting_requests": relay.backlog.n_waiting,
                "waiting_bytes": relay.backlog.n_bytes,
                "waiting_for_slots": relay.desk.n_waiting + control.slots.n_waiting,
                "held_slots": control.slots.n_held,
                "turns": control.sessions.n_running,
                "held_at_the_gate": control.door.n_held,
                "policies": control.policies.n_own,
                "rss_bytes": resident_bytes(),
            }
            new = counters.with_suffix(".new")
            new.write_text(json.dumps(told))
            new.rename(counters)


# Who uses it ------------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    """``done``: how often what happened. ``wrong``: what no client should ever see."""

    url: str
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    n_made: int = 0

    def text(self, n_words: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=n_words))

    async def order(self, http: httpx.AsyncClient, verb: str, path: str, what: str, **body: Any) -> Any:
        """Gives the answer, None when it was refused."""
        answer = await http.request(verb, path, json=body or None)
        if answer.is_success:
            self.done[what] += 1
            return answer.json()
        self.refused(answer, what)
        return None

    def refused(self, answer: httpx.Response, what: str) -> None:
        self.done[f"{what}: {answer.status_code}"] += 1
        if answer.status_code not in REFUSALS:
            self.wrong.append(f"{what}: {answer.status_code} {answer.text[:300]}")

    async def keep_a_family(self, http: httpx.AsyncClient) -> None:
        """A trunk with a policy, a working pool behind it that grows, is compacted, and all of it released."""
        self.n_made += 1
        trunk, work = f"trunk-{self.n_made}", f"work-{self.n_made}"
        system: Message = {"role": "system", "content": f"You are number {self.n_made}. {self.text(120)}"}
        if await self.order(http, "POST", "/polykv/pools", "create", messages=[system], name=trunk) is None:
            return
        await self.order(http, "POST", f"/polykv/pools/{trunk}/admission", "policy", **POLICY)

        def asked(n_words: int) -> list[Message]:
            return [system, {"role": "user", "content": self.text(n_words)}]

        pin = self.rng.random() < 0.3
        long, short = asked(150), asked(30)
        made = await self.order(http, "POST", f"/polykv/pools/{trunk}/fork", "fork", messages=long, name=work, pin=pin)
        if made is not None:
            talks = [self.talk(http, work, long) for _ in range(self.rng.randrange(1, 4))]
            path = f"/polykv/pools/{work}/compact"
            await asyncio.gather(*talks, self.order(http, "POST", path, "compact", ancestor=trunk, messages=short))
            await self.talk(http, work, short)
        await self.order(http, "DELETE", f"/polykv/pools/{trunk}?recursive=true", "release")

    async def talk(self, http: httpx.AsyncClient, pool: str | None, messages: list[Message]) -> None:
        """A session of a few turns. Some leave in the middle, some are forgotten at once, some just stay away."""
        self.n_made += 1
        session, messages = f"session-{self.n_made}", [*messages]
        for _ in range(self.rng.randrange(1, 4)):
            body = {"messages": messages, "max_tokens": self.rng.randrange(4, 40), "session_id": session}
            body |= {"pool_id": pool} if pool is not None else {}
            leaves = self.rng.random() < 0.25
            said = await self.stream(http, body, leaves=leaves) if self.rng.random() < 0.6 else None
            if said is None and not leaves:
                answer = await http.post("/v1/chat/completions", json=body)
                if not answer.is_success:
                    self.refused(answer, "chat")
                    break
                self.done["chat"] += 1
                said = answer.json()["choices"][0]["message"]["content"]
            elif said is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.rng.uniform(0.01, 0.5)):
                        await http.post("/v1/chat/completions", json=body)
                self.done["left before the reply"] += 1
                break
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": self.text(12)}]
        if self.rng.random() < 0.7:
            await self.order(http, "DELETE", f"/polykv/sessions/{session}", "forget")

    async def stream(self, http: httpx.AsyncClient, body: dict[str, Any], *, leaves: bool) -> str | None:
        said, n = "", 0
        async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            if not answer.is_success:
                await answer.aread()
                self.refused(answer, "stream")
                return ""
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.wrong.append(f"stream: {line[:300]}")
                    said += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                    n += 1
                if leaves and n > 3:
                    self.done["left in the middle"] += 1
                    return said
        self.done["stream"] += 1
        return said

    async def pass_by(self, http: httpx.AsyncClient) -> None:
        """Who names nothing, and who only looks."""
        body = {"prompt": self.text(80), "n_predict": 4, "temperature": 0}
        await self.order(http, "POST", "/completion", "completion", **body)
        for path in ("/polykv/pools", "/slots", "/metrics", "/polykv/tps", "/polykv/requests?last=5"):
            answer = await http.get(path)
            if not answer.is_success:
                self.refused(answer, path)
        self.done["looks"] += 1
        await asyncio.sleep(self.rng.uniform(0, 0.5))

    async def churn(self, seconds: float) -> None:
        """One round of it; everybody finishes what they do."""
        end_s = time.monotonic() + seconds
        acts: list[Callable[[httpx.AsyncClient], Awaitable[None]]] = [self.keep_a_family, self.keep_a_family]
        acts += [lambda http: self.talk(http, None, [{"role": "user", "content": self.text(60)}]), self.pass_by]

        async def act(do: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
            while time.monotonic() < end_s:
                async with httpx.AsyncClient(base_url=self.url, timeout=300, trust_env=False) as http:
                    await do(http)

        async with asyncio.TaskGroup() as group:
            for i in range(N_TALKERS):
                group.create_task(act(acts[i % len(acts)]))


# Counting ---------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    engine: EngineServer
    proxy: "subprocess.Popen[str]"
    counters: Path
    http: httpx.Client

    def take_back(self) -> None:
        """Release and forget everything, and empty the slots."""
        for pool in self.http.get("/polykv/pools").raise_for_status().json()["pools"]:
            if pool["parent"] == -1:
                self.http.delete(f"/polykv/pools/{pool['pool_id']}?recursive=true")
        for session in self.http.get("/polykv/sessions").raise_for_status().json()["sessions"]:
            self.http.delete(f"/polykv/sessions/{session['session_id']}")
        for slot in range(N_SLOTS):
            self.http.post(f"/slots/{slot}?action=erase").raise_for_status()

    def count(self) -> dict[str, Any]:
        self.counters.unlink(missing_ok=True)
        self.proxy.send_signal(signal.SIGUSR1)
        end_s = time.monotonic() + REST_WITHIN_S
        while not self.counters.exists():
            if self.proxy.poll() is not None or time.monotonic() > end_s:
                raise SystemExit("the proxy does not answer any more")
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(self.counters.read_text())
        stats = self.engine.http.get("/polykv/engine/stats").raise_for_status().json()
        listed = self.engine.http.get("/polykv/engine/pools").raise_for_status().json()
        shown = self.http.get("/polykv/pools").raise_for_status().json()
        found |= {
            "cells": stats["cells"]["used"],
            "deferred": stats["n_deferred"],
            "sequences": sum(pool["state"] != "free" for pool in listed["pools"]),
            "saved_states": len(listed["saved"]),
            "pools": len(shown["pools"]),
            "sessions": len(self.http.get("/polykv/sessions").raise_for_status().json()["sessions"]),
        }
        return found

    def at_rest(self, like: dict[str, Any] | None) -> dict[str, Any]:
        """The counters once they are as they were, or as they still are after a while."""
        end_s = time.monotonic() + REST_WITHIN_S
        while True:
            self.take_back()
            time.sleep(0.5)
            found = self.count()
            is_rest = all(found[name] == 0 for name in ("requests", "turns", "cells", "pools", "sequences"))
            if time.monotonic() > end_s or (is_rest and not (like and grown(like, found))):
                return found


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What there is more of now, memory left out."""
    names = [name for name in after if name not in ("rss_bytes", "task_names", "done")]
    return {name: (before[name], after[name]) for name in names if after[name] > before[name]}


def soak(minutes: float, *, seed: int = 1, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run it. Gives the counters, what happened, and ``faults``: empty if all is well."""
    with ExitStack() as stack:
        dir_ = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = (*FLAGS, "--no-cache-idle-slots", "--slot-save-path", str(dir_), "--slots", "--metrics")
        saves = ("--polykv-save-ram", "64")
        engine = EngineServer(binary_path("patched"), chat_model_path(), *flags, *saves, log_dir=dir_)
        stack.enter_context(engine)
        counters = dir_ / "counters.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.soak",
            "--serve",
            engine.url,
            str(dir_ / "pools.db"),
            str(counters),
        ]
        proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        stack.callback(proxy.wait, 30)
        stack.callback(proxy.terminate)
        assert proxy.stdout is not None
        stack.callback(proxy.stdout.close)
        url = proxy.stdout.readline().strip()
        http = stack.enter_context(httpx.Client(base_url=url, timeout=120, trust_env=False))
        bench = Bench(engine, proxy, counters, http)
        life = Soak(url, random.Random(seed))
        end_s, rounds, n_told = time.monotonic() + minutes * 60, list[dict[str, Any]](), 0
        while time.monotonic() < end_s or len(rounds) < 2:
            asyncio.run(life.churn(min(ROUND_S, minutes * 20)))
            rounds.append(bench.at_rest(rounds[0] if rounds else None) | {"done": sum(life.done.values())})
            last = rounds[-1]
            say(
                f"{minutes * 60 + time.monotonic() - end_s:6.0f} s: {last['done']} done, "
                f"{last['rss_bytes'] / 1e6:.1f} MB, {last['tasks']} tasks, {last['file_descriptors']} descriptors, "
                f"{last['cells']} cells, {len(life.wrong)} wrong"
            )
            for wrong in life.wrong[n_told:]:
                say(wrong)
            n_told = len(life.wrong)
        return report(life, rounds)


def report(life: Soak, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    first, last = rounds[0], rounds[-1]
    faults = [f"{name} has grown: {was} at first, {now} at the end" for name, (was, now) in grown(first, last).items()]
    most, filled = first["rss_bytes"] + FILLS, [found["rss_bytes"] for found in rounds if found["done"] >= N_FILLED]
    if len(filled) > 1:
        most = min(most, int(median(filled[:3]) * (1 + MAX_GROWN)))
    if last["rss_bytes"] > most:
        faults.append(f"memory: {last['rss_bytes'] / 1e6:.1f} MB, and should be {most / 1e6:.1f} at most")
    kinds = ("create", "fork", "compact", "release", "chat", "stream", "left in the middle", "left before the reply")
    faults += [f"nothing happened: {kind}" for kind in kinds if not life.done[kind]]
    faults += life.wrong[:10]
    return {"first": first, "last": last, "done": dict(life.done), "n_rounds": len(rounds), "faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=3, metavar=("ENGINE", "STATE", "COUNTERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        import uvloop

        upstream, state, counters = args.serve
        calm_collector()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(upstream, Path(state), Path(counters)))
        return
    try:
        told = soak(args.minutes, seed=args.seed, say=lambda line: print(line, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        raise SystemExit("broken off: nothing can be said about growth") from None
    if args.json:
        print(json.dumps(told))
    else:
        print(f"{'':24}{'at first':>12}{'at the end':>12}")
        for name, now in told["last"].items():
            if name not in ("task_names", "done"):
                print(f"{name:24}{told['first'][name]:>12,}{now:>12,}")
        print("; ".join(f"{what} {n}" for what, n in sorted(told["done"].items())))
        print("\n".join(told["faults"]) or "nothing has grown, nothing went wrong")
    if told["faults"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
