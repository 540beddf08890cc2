"""What the proxy costs in front of a real engine: time to first token of a seen prefix, and idle polling.

    python -m benchmarks.engine_overhead [--rounds 60] [--pairs 8] [--json] [--assert]

first token  a streamed chat of about 2,000 tokens, of which the proxy and a pool have seen all but the last question;
             through the proxy, and straight to the engine with the fields that the proxy adds (same slot, same pool).
             The two take turns, every question is new, every request has a connection of its own. Beside the plain
             medians stands what is left without the engine's own time for the prompt (``timings.prompt_ms``), which
             is where nearly all of the noise is: that difference is judged.
polling      tokens/s of one stream straight at the engine while the proxy is stopped (SIGSTOP) and while it runs idle,
             in turns. Its heartbeat is too rare to be seen above the machine's noise, so a third arm asks the same
             question 50 times as often: a fiftieth of what that takes is the heartbeat's share.

With --assert, exit 1 when the proxy adds more than 5 ms (median), or the heartbeat takes more than 1 % of the tokens/s.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from tests.engine.binaries import binary_path, chat_model_path
from tests.engine.stack import ProxyStack

CHAT = "/v1/chat/completions"
STATS = "/polykv/engine/stats"
N_PREFIX = 1960
N_PREDICT = 128
FLOOD_HZ = 50
MAX_ADDED_MS, MAX_SHARE = 5.0, 0.01
THREADS = ("-t", "1")  # two would wait for each other on a machine that does something else too
RULE = "Read the file before you change it, keep every change small, and run the tests of the module you touched. "


class Bench:
    def __init__(self, stack: ProxyStack, client: aiohttp.ClientSession):
        self.stack, self.client = stack, client
        self.direct = httpx.Client(base_url=stack.engine_url, timeout=60)
        self.system = {"role": "system", "content": RULE}

    def close(self) -> None:
        self.direct.close()

    def body(self, question: str, **fields: Any) -> dict[str, Any]:
        messages = [self.system, {"role": "user", "content": question}]
        return {"messages": messages, "max_tokens": 2, "temperature": 0, "stream": True, **fields}

    def n_tokens(self) -> int:
        asked = {"path": CHAT, "body": self.body("Question 100: what comes first?")}
        return len(self.direct.post("/polykv/engine/render", json=asked).raise_for_status().json()["tokens"])

    def lengthen(self) -> int:
        """Make the system message so long that a chat has about 2,000 tokens."""
        one = self.n_tokens()
        self.system = {"role": "system", "content": RULE * 2}
        per_rule = self.n_tokens() - one
        self.system = {"role": "system", "content": RULE * ((N_PREFIX - one) // per_rule + 2)}
        return self.n_tokens()

    async def first_token_ms(self, url: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Until the first event with text; and the timings of the last."""
        began, first, last = time.perf_counter(), None, {}
        async with self.client.post(url + CHAT, json=body) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if first is None and any(c["delta"].get("content") for c in event["choices"]):
                    first = (time.perf_counter() - began) * 1e3
                last = event
        if first is None:
            raise RuntimeError("a reply without text")
        return first, last["timings"]

    async def measure_first_token(self, rounds: int) -> dict[str, Any]:
        n_tokens = self.lengthen()
        made = self.stack.http.post("/polykv/pools", json={"messages": [self.system]}).raise_for_status().json()
        await self.first_token_ms(self.stack.url, self.body("Question 99: what comes first?", session_id="bench"))
        slot = self.direct.get(STATS).json()["finished"][-1]["id_slot"]
        held = self.direct.get("/polykv/engine/pools").json()
        pool = next(p for p in held["pools"] if p["seq"] == made["seq_id"])
        engine_fields = {
            "id_slot": slot,
            "shared_pool_slot": pool["seq"],
            "shared_prefix_n_tokens": -1,
            "shared_pool_gen": pool["gen"],
            "shared_pool_epoch": held["epoch"],
        }
        took: dict[str, list[float]] = {"direct": [], "proxy": []}
        around: dict[str, list[float]] = {"direct": [], "proxy": []}
        prompt_n: dict[str, list[int]] = {"direct": [], "proxy": []}
        for i in range(100, 100 + rounds + 3):
            arms = [
                ("direct", self.stack.engine_url, engine_fields),
                ("proxy", self.stack.url, {"session_id": "bench"}),
            ]
            for k, (name, url, fields) in enumerate(arms if i % 2 else arms[::-1]):
                question = f"Question {2 * i + k}: what comes first?"
                ms, timings = await self.first_token_ms(url, self.body(question, **fields))
                if timings["cache_n"] < made["prefix_len"]:
                    raise RuntimeError(f"{name}: {timings['cache_n']} tokens of {made['prefix_len']} were reused")
                if i >= 103:
                    took[name].append(ms)
                    around[name].append(ms - timings["prompt_ms"])
                    prompt_n[name].append(timings["prompt_n"])
        medians = {name: statistics.median(times) for name, times in took.items()}
        rest = {name: statistics.median(times) for name, times in around.items()}
        return {
            "n_tokens": n_tokens,
            "prompt_n": {name: statistics.mean(counts) for name, counts in prompt_n.items()},
            "prefix_len": made["prefix_len"],
            "direct_ms": round(medians["direct"], 2),
            "proxy_ms": round(medians["proxy"], 2),
            "added_ms": round(medians["proxy"] - medians["direct"], 2),
            "around_the_prompt_direct_ms": round(rest["direct"], 2),
            "around_the_prompt_proxy_ms": round(rest["proxy"], 2),
            "added_around_the_prompt_ms": round(rest["proxy"] - rest["direct"], 2),
        }

    async def tokens_per_s(self) -> float:
        """Of one stream straight at the engine, between its first token and its last."""
        body = {"prompt": "Once upon a time", "n_predict": N_PREDICT, "ignore_eos": True, "id_slot": 3, "stream": False}
        async with self.client.post(self.stack.engine_url + "/completion", json=body) as reply:
            rate = (await reply.json())["timings"]["predicted_per_second"]
        return float(rate)

    @contextmanager
    def proxy_stopped(self) -> Iterator[None]:
        os.kill(self.stack.proxy_pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.stack.proxy_pid, signal.SIGCONT)

    @asynccontextmanager
    async def flood(self) -> AsyncIterator[None]:
        async def ask() -> None:
            async with aiohttp.ClientSession() as client:
                due = time.perf_counter()
                while True:
                    async with client.get(self.stack.engine_url + STATS) as reply:
                        await reply.read()
                    due += 1 / FLOOD_HZ
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))

        task = asyncio.create_task(ask())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def measure_polling(self, pairs: int) -> dict[str, Any]:
        rates: dict[str, list[float]] = {"quiet": [], "heartbeat": [], "flood": []}
        await self.tokens_per_s()
        for i in range(pairs):
            for name in ("quiet", "heartbeat", "flood") if i % 2 else ("flood", "heartbeat", "quiet"):
                if name == "heartbeat":
                    rates[name].append(await self.tokens_per_s())
                    continue
                with self.proxy_stopped():
                    if name == "quiet":
                        rates[name].append(await self.tokens_per_s())
                    else:
                        async with self.flood():
                            rates[name].append(await self.tokens_per_s())
        lost = {
            name: statistics.median(1 - r / q for r, q in zip(rates[name], rates["quiet"], strict=True))
            for name in ("heartbeat", "flood")
        }
        return {
            "tokens_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
            "lost_to_heartbeat": round(lost["heartbeat"], 4),
            f"lost_at_{FLOOD_HZ}_hz": round(lost["flood"], 4),
            "heartbeat_share": round(max(0.0, lost["flood"]) / FLOOD_HZ, 5),
        }


async def measure(rounds: int, pairs: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ProxyStack(binary_path("patched"), chat_model_path(), *THREADS, log_dir=Path(folder)) as stack,
    ):
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as client:
            bench = Bench(stack, client)
            try:
                first_token = await bench.measure_first_token(rounds)
                return {"first_token": first_token, "polling": await bench.measure_polling(pairs)}
            finally:
                bench.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--assert", action="store_true", dest="check")
    asked = parser.parse_args()
    result = asyncio.run(measure(asked.rounds, asked.pairs))
    added, share = result["first_token"]["added_around_the_prompt_ms"], result["polling"]["heartbeat_share"]
    if asked.json:
        print(json.dumps(result))
    else:
        for part, found in result.items():
            print(part, "  ".join(f"{key} {value}" for key, value in found.items()))
        print(f"first token: {added:+.2f} ms (at most {MAX_ADDED_MS})")
        print(f"idle polling: {share:.3%} of the engine's tokens/s (at most {MAX_SHARE:.0%})")
    return int(asked.check and (added > MAX_ADDED_MS or share > MAX_SHARE))


if __name__ == "__main__":
    sys.exit(main())
