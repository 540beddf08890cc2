"""A client of the proxy that sees both sides: what the reply says, and what the engine's own books say about it.

Prompts are token arrays of one tiny model in f32, so that an answer with a pool is compared token by token with the
engine's own to the same request.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from . import loopback
from .binaries import binary_path
from .noise import Noise
from .stack import ProxyStack
from .tiny_models import tiny_model_path

TRUNK_LEN = 300
N_ANSWER = 12
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
CLOSING = {"connection": "close"}


@dataclass(frozen=True)
class Told:
    """What a reply says, and what the engine's own books say about the same request."""

    body: Any
    headers: httpx.Headers
    receipt: dict[str, Any]
    tasks: list[dict[str, Any]]

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.body["tokens"]
        return tokens

    @property
    def shared(self) -> list[tuple[int, int]]:
        """Per task what it had from a pool and what was cached at all."""
        return [(task["n_pool"], task["n_cached"]) for task in self.tasks]

    def assert_unpooled(self, reason: str) -> None:
        assert {n_pool for n_pool, _ in self.shared} == {0}
        assert (self.receipt["pool_id"], self.receipt["miss_reason"]) == (None, reason)
        assert self.receipt["prefix_n_tokens"] == 0
        assert "x-pool-id" not in self.headers
        assert self.headers["x-cached-prefix-tokens"] == "0"


class Client:
    """One pool named trunk, and requests through the proxy or around it."""

    def __init__(self, stack: ProxyStack, trunk: Sequence[int]) -> None:
        self.stack = stack
        self.trunk = list(trunk)

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = loopback.get(f"{self.stack.engine_url}/polykv/engine/stats", timeout=60).json()
        return stats

    def make_pool(self, **source: Any) -> dict[str, Any]:
        source = source or {"tokens": self.trunk}
        made = self.stack.http.post("/polykv/pools", json={"name": "trunk", **source})
        assert made.status_code == 201, made.text
        pool: dict[str, Any] = made.json()
        return pool

    def pool(self) -> dict[str, Any]:
        view = self.stack.http.get("/polykv/pools").raise_for_status().json()
        return next(pool for pool in view["pools"] if pool["name"] == "trunk")

    def release(self, pool: dict[str, Any]) -> None:
        self.stack.http.delete(f"/polykv/pools/{pool['pool_id']}").raise_for_status()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.stack.http.post(path, json=body)

    def ask(self, path: str, body: dict[str, Any], pool: str = "trunk") -> Told:
        """Ask through the proxy for a pool."""
        before = {task["id_task"] for task in self.stats()["finished"]}
        response = self.post(path, {**body, "pool_id": pool})
        assert response.status_code == 200, response.text
        reply = response.json()
        tasks = [task for task in self.stats()["finished"] if task["id_task"] not in before]
        last = reply[-1] if isinstance(reply, list) else reply
        return Told(reply, response.headers, last["polykv"], tasks)

    def complete(self, prompt: Any, **more: Any) -> Told:
        return self.ask("/completion", completion(prompt, **more))

    def direct(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return loopback.post(self.stack.engine_url + path, json=body, headers=CLOSING, timeout=120)

    def full(self, prompt: Any, **more: Any) -> list[int]:
        """The engine's own answer after a full prefill."""
        reply = self.direct("/completion", completion(prompt, cache_prompt=False, **more)).raise_for_status().json()
        assert reply["timings"]["cache_n"] == 0
        tokens: list[int] = reply["tokens"]
        return tokens


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "n_predict": N_ANSWER, "return_tokens": True, **GREEDY, **more}


@contextmanager
def client_of(
    chat_model: Path, dir_: Path, noise: Noise, *engine_args: str, model_name: str = "dense"
) -> Iterator[Client]:
    """``polykvctl up`` with a tiny model, and flags for llama-server after its own."""
    model = tiny_model_path(model_name, chat_model)
    with ProxyStack(binary_path("patched"), model, "-t", "1", *engine_args, log_dir=dir_) as stack:
        yield Client(stack, noise(1, TRUNK_LEN))
