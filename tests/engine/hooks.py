"""What the tests say to an engine: the PolyKV hooks, and completions in the exact form the comparisons need.

Prompts are token arrays, so nothing depends on where a tokenizer would cut. Answers are greedy and run to their full
length. A continuation can be forced token by token with a grammar of token ids; the log-probabilities reported are
those of the model before any sampler, so one request gives a teacher-forced distribution per position.
"""

import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from .divergence import Distribution
from .harness import EngineServer

N_PROBS = 1000
Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One finished completion. ``at`` holds a distribution per generated position when they were asked for."""

    tokens: list[int]
    cache_n: int
    pool_n: int
    prompt_n: int
    at: list[Distribution]
    body: Json


class Refused(AssertionError):
    """The engine answered with an error; carries it."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(
            f"{response.request.method} {response.request.url}: {response.status_code} {response.text[:600]}"
        )
        self.response = response


class Engine:
    """The hooks and the completion route of one running server."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.http = server.http

    # Hooks ---------------------------------------------------------------------------------------------------------

    def materialize(self, tokens: Sequence[int], *, parent: int = -1, branch_pos: int = 0, **more: Any) -> Json:
        body = {"op": "materialize", "tokens": list(tokens), "seq": -1, "parent_seq": parent, "branch_pos": branch_pos}
        return self.post("/polykv/engine/pools", body | more)

    def snapshot(self, id_slot: int, n_tokens: int = -1, **more: Any) -> Json:
        return self.post("/polykv/engine/pools", {"op": "snapshot", "id_slot": id_slot, "n_tokens": n_tokens} | more)

    def free(self, seq: int) -> Json:
        return _body(self.http.delete(f"/polykv/engine/pools/{seq}"))

    def free_all(self) -> None:
        for pool in self.pools():
            if pool["state"] != "free":
                self.free(pool["seq"])

    def clear(self, id_slot: int) -> Json:
        return self.post("/polykv/engine/pools", {"op": "clear", "id_slot": id_slot})

    def save(self, tag: str, *, seq: int = -1, slot: int = -1, start: int = 0, to: str = "ram", **more: Any) -> Json:
        body = {"op": "save", "tag": tag, "seq": seq, "id_slot": slot, "from": start, "to": to}
        return self.post("/polykv/engine/pools", body | more)

    def load(self, tag: str, *, parent: int = -1, **more: Any) -> Json:
        """Into a free pool sequence, or with ``id_slot`` into an idle slot."""
        return self.post("/polykv/engine/pools", {"op": "load", "tag": tag, "parent_seq": parent} | more)

    def forget(self, tag: str) -> Json:
        return _body(self.http.delete(f"/polykv/engine/saved/{tag}"))

    def saved(self) -> list[Json]:
        """What is saved; a tag in memory and on disk is there twice."""
        saved: list[Json] = self.listing()["saved"]
        return saved

    def runs(self, seq: int) -> list[list[int]]:
        """Where a pool lies: ``[first position, position behind the last, first cell]`` of each stretch."""
        cells = self.post("/polykv/engine/pools", {"op": "cells"})
        runs: list[list[int]] = next(pool["runs"] for pool in cells["pools"] if pool["seq"] == seq)
        return runs

    def listing(self) -> Json:
        return self.get("/polykv/engine/pools")

    def pools(self) -> list[Json]:
        pools: list[Json] = self.listing()["pools"]
        return pools

    def pool(self, seq: int) -> Json:
        return next(pool for pool in self.pools() if pool["seq"] == seq)

    def stats(self) -> Json:
        return self.get("/polykv/engine/stats")

    def cells_used(self) -> int:
        used: int = self.stats()["cells"]["used"]
        return used

    def slot(self, id_slot: int) -> Json:
        return next(slot for slot in self.stats()["slots"] if slot["id"] == id_slot)

    def render(self, path: str, body: Json) -> list[int]:
        tokens: list[int] = self.post("/polykv/engine/render", {"path": path, "body": body})["tokens"]
        return tokens

    # Completions ---------------------------------------------------------------------------------------------------

    def ask(
        self,
        tokens: Sequence[int],
        n: int = 64,
        *,
        slot: int = -1,
        pool: int = -1,
        limit: int = -1,
        forced: Sequence[int] = (),
        probs: int = 0,
        **more: Any,
    ) -> Answer:
        """Complete greedily. ``pool`` attaches to a pool's sequence, ``limit`` is an upper limit for its prefix.

        With ``forced`` the continuation is these tokens and ``at`` their teacher-forced distributions.
        """
        body: Json = {"prompt": list(tokens), "n_predict": n, "id_slot": slot}
        body |= {"temperature": 0, "ignore_eos": True, "return_tokens": True, "n_probs": probs}
        if forced:
            body |= {"grammar": forced_grammar(forced), "n_predict": len(forced), "n_probs": probs or N_PROBS}
        if pool >= 0:
            body |= {"shared_pool_slot": pool, "shared_prefix_n_tokens": limit}
        return answer(self.post("/completion", body | more))

    def full(self, tokens: Sequence[int], n: int = 64, **more: Any) -> Answer:
        """Complete after a full prefill: nothing cached, nothing shared."""
        done = self.ask(tokens, n, cache_prompt=False, **more)
        assert (done.cache_n, done.pool_n, done.prompt_n) == (0, 0, len(tokens))
        return done

    def warm(self, tokens: Sequence[int], slot: int) -> None:
        """Leave these tokens in a slot's cache, as a request that has just been evaluated does."""
        self.ask(tokens, 0, slot=slot)

    def erase(self, slot: int) -> None:
        """Empty a slot (needs ``--slot-save-path``)."""
        _body(self.http.post(f"/slots/{slot}?action=erase"))

    # HTTP ----------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Json:
        return _body(self.http.get(path))

    def post(self, path: str, body: Json) -> Json:
        return _body(self.http.post(path, json=body))


def answer(body: Json) -> Answer:
    timings = body["timings"]
    at = [
        {token["id"]: token["logprob"] for token in position["top_logprobs"]}
        for position in body.get("completion_probabilities", [])
    ]
    return Answer(body["tokens"], timings["cache_n"], timings.get("pool_n", 0), timings["prompt_n"], at, body)


def forced_grammar(tokens: Iterable[int]) -> str:
    return "root ::= " + " ".join(f"<[{token}]>" for token in tokens)


def _body(response: httpx.Response) -> Json:
    if response.status_code != 200:
        raise Refused(response)
    body: Json = response.json()
    return body


class Running:
    """A greedy completion that streams in a thread of its own, so that a test can do things beside it."""

    def __init__(self, engine: Engine, tokens: Sequence[int], n: int, **fields: Any) -> None:
        body = {"prompt": list(tokens), "n_predict": n, "temperature": 0, "ignore_eos": True, "stream": True}
        self._body = body | fields
        self._engine = engine
        self.events: list[Json] = []
        self.arrivals: list[float] = []
        self.error: BaseException | None = None
        self._started = threading.Event()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        assert self._started.wait(120), "no first token"
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(300)

    def _run(self) -> None:
        try:
            # llama-server says keep-alive and closes after a stream: let nobody else meet that connection.
            closing = {"connection": "close"}
            with self._engine.http.stream("POST", "/completion", json=self._body, headers=closing) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if self._left.is_set():
                        return
                    if line.startswith(("data: {", "error: {")):
                        self.arrivals.append(time.perf_counter())
                        self.events.append(json.loads(line[line.index("{") :]))
                        self._started.set()
        except BaseException as error:
            self.error = error
        finally:
            self._started.set()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def leave(self) -> None:
        """Close the connection at the next event, as a client that goes away."""
        self._left.set()

    def last_event(self) -> Json:
        """Wait for the end, whatever it is; the last event, with the whole text as its ``content``."""
        self._thread.join(300)
        assert self.error is None, repr(self.error)
        assert self.events, "the stream was empty"
        return self.events[-1] | {"content": "".join(event.get("content", "") for event in self.events)}

    def finished(self) -> Json:
        """Wait for a regular end."""
        last = self.last_event()
        assert last.get("stop") is True, last
        return last
