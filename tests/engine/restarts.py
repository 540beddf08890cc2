"""A proxy and an engine that are killed at any moment, and clients that go on: what each of them may believe."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .harness import EngineServer, free_port

Json = dict[str, Any]
GREEDY: Json = {"temperature": 0, "ignore_eos": True, "n_predict": 6}
START_WITHIN_S = 60
MAX_PINNED = 3
"""Of each manager: one sequence is not pinned. If all were, nobody else's pool could be resident, and a proxy that says
so would be right.
"""


def clean_env() -> dict[str, str]:
    """The environment without settings of the product."""
    return {name: value for name, value in os.environ.items() if not name.startswith("POLYKV_")}


class ProxyProcess:
    """``polykvctl serve`` with a journal, on one port for all its lives. ``args``: more for the command."""

    def __init__(self, upstream: str, state: Path, log: Path, args: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "polykv_proxy.cli", "serve", "--json", "--upstream", upstream]
        self.command += ["--port", str(self.port), "--state", str(state), *args]
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=clean_env()
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), f"the proxy did not start\n{self._log.read_text()[-4000:]}"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


def kill_engine(server: EngineServer) -> None:
    process, server.process = server.process, None
    assert process is not None
    process.kill()
    process.wait()


@dataclass(frozen=True)
class Pool:
    """What a client was told of a pool."""

    pool_id: int
    name: str
    parent: int
    branch_pos: int
    tokens: tuple[int, ...]
    pinned: bool


@dataclass
class Manager:
    """Makes, forks, pins and releases pools of its own. What was not answered may have happened or not.

    ``held``: acknowledged. ``maybe``: names of orders without an answer, with what they would have made;
    ``maybe_gone``: names of releases without an answer.
    """

    name: str
    url: str
    rng: random.Random
    draw: Callable[[int, int], list[int]]
    held: dict[str, Pool] = field(default_factory=dict)
    maybe: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    maybe_gone: set[str] = field(default_factory=set)
    maybe_pinned: set[str] = field(default_factory=set)
    ids_seen: dict[int, str] = field(default_factory=dict)
    n_made: int = 0
    n_done: int = 0

    def step(self, client: httpx.Client) -> None:
        choices = [self._create, self._fork, self._fork, self._release, self._pin]
        self.rng.choice(choices if len(self.held) < 12 else [self._release])(client)

    def _create(self, client: httpx.Client) -> None:
        tokens = self.draw(self.rng.randrange(10**6), self.rng.randrange(40, 160))
        self._make(client, "/polykv/pools", {"tokens": tokens}, -1, tokens)

    def _fork(self, client: httpx.Client) -> None:
        parent = self._any()
        if parent is None:
            return self._create(client)
        at = self.rng.choice([len(parent.tokens), self.rng.randrange(20, len(parent.tokens))])
        own = self.draw(self.rng.randrange(10**6), self.rng.randrange(5, 60))
        body = {"own_tokens": own, "branch_pos": at}
        return self._make(
            client, f"/polykv/pools/{parent.name}/fork", body, parent.pool_id, [*parent.tokens[:at], *own]
        )

    def _make(self, client: httpx.Client, path: str, body: Json, parent: int, tokens: Sequence[int]) -> None:
        self.n_made += 1
        name = f"{self.name}-{self.n_made}"
        self.maybe[name] = (parent, tuple(tokens))
        answer = client.post(path, json=body | {"name": name})
        if answer.status_code == 201:
            told = answer.json()
            assert (told["name"], told["parent"], told["prefix_len"]) == (name, parent, len(tokens)), told
            del self.maybe[name]
            self._learn(Pool(told["pool_id"], name, parent, told["branch_pos"], tuple(tokens), False))
            self.n_done += 1
        else:
            assert answer.status_code in (502, 503, 504), answer.text

    def _learn(self, pool: Pool) -> None:
        assert self.ids_seen.setdefault(pool.pool_id, pool.name) == pool.name, "an id was given twice"
        self.held[pool.name] = pool

    def _release(self, client: httpx.Client) -> None:
        pool = self._any(leaf=True)
        if pool is None:
            return
        self.maybe_gone.add(pool.name)
        answer = client.delete(f"/polykv/pools/{pool.name}")
        if answer.status_code == 200:
            assert answer.json()["released"] == [pool.pool_id]
            self.maybe_gone.discard(pool.name)
            del self.held[pool.name]
            self.n_done += 1
        else:
            assert answer.status_code in (502, 503, 504), answer.text

    def _pin(self, client: httpx.Client) -> None:
        pool = self._any()
        if pool is None:
            return
        n_pinned = sum(held.pinned or name in self.maybe_pinned for name, held in self.held.items())
        verb = self.rng.choice(["pin", "unpin", "unpin"] if n_pinned < MAX_PINNED else ["unpin"])
        self.maybe_pinned.add(pool.name)
        answer = client.post(f"/polykv/pools/{pool.name}/{verb}")
        if answer.status_code == 200:
            self.maybe_pinned.discard(pool.name)
            self.held[pool.name] = Pool(
                pool.pool_id, pool.name, pool.parent, pool.branch_pos, pool.tokens, verb == "pin"
            )
        else:
            assert answer.status_code in (502, 503, 504, 507), answer.text

    def _any(self, *, leaf: bool = False) -> Pool | None:
        unsure = self.maybe_gone | self.maybe_pinned
        parents = {pool.parent for pool in self.held.values()} | {parent for parent, _ in self.maybe.values()}
        pools = [p for p in self.held.values() if p.name not in unsure and not (leaf and p.pool_id in parents)]
        return self.rng.choice(pools) if pools else None

    def reconcile(self, shown: Json) -> None:
        """Compare with the tree; what was not answered is known from here on."""
        mine = {pool["name"]: pool for pool in shown["pools"] if (pool["name"] or "").startswith(f"{self.name}-")}
        for name, (parent, tokens) in self.maybe.items():
            if (pool := mine.get(name)) is not None:
                assert (pool["parent"], pool["prefix_len"]) == (parent, len(tokens)), pool
                self._learn(Pool(pool["pool_id"], name, parent, pool["branch_pos"], tokens, pool["pinned"]))
        for name in self.maybe_gone - mine.keys():
            del self.held[name]
        for name in self.maybe_pinned & mine.keys():
            pool = self.held[name]
            told = bool(mine[name]["pinned"])
            self.held[name] = Pool(pool.pool_id, name, pool.parent, pool.branch_pos, pool.tokens, told)
        self.maybe, self.maybe_gone, self.maybe_pinned = {}, set(), set()
        facts = {n: (p["pool_id"], p["parent"], p["branch_pos"], p["prefix_len"], p["pinned"]) for n, p in mine.items()}
        assert facts == {
            p.name: (p.pool_id, p.parent, p.branch_pos, len(p.tokens), p.pinned) for p in self.held.values()
        }


@dataclass(frozen=True)
class Question:
    """A prompt, the pool that it starts with, and the answer of an engine that shares nothing."""

    pool: str
    prompt: list[int]
    tokens: list[int]
    text: str


@dataclass
class Reader:
    """Asks through pools that are always there. A whole answer is the right one; a stream that was cut says so."""

    name: str
    rng: random.Random
    questions: Sequence[Question]
    proxy_lives: bool = True
    """It is not going to be killed in this round: whoever is cut is told."""
    n_whole: int = 0
    n_pooled: int = 0
    n_cut: int = 0

    def step(self, client: httpx.Client) -> None:
        question = self.rng.choice(self.questions)
        fields = {"prompt": question.prompt, "session_id": f"{self.name}-{self.rng.randrange(3)}"}
        if self.rng.random() < 0.7:
            fields["pool_id"] = question.pool
        if self.rng.random() < 0.5:
            self._whole(client, question, fields)
        else:
            self._stream(client, question, fields)

    def _whole(self, client: httpx.Client, question: Question, fields: Json) -> None:
        answer = client.post("/completion", json=GREEDY | {"return_tokens": True} | fields)
        if answer.status_code == 200:
            body = answer.json()
            assert body["tokens"] == question.tokens, (body["tokens"], question.tokens)
            self._count(body["polykv"])
        else:
            assert answer.status_code in (502, 503, 504), answer.text
            assert answer.json()["error"]["code"]

    def _stream(self, client: httpx.Client, question: Question, fields: Json) -> None:
        got = ""
        body = GREEDY | {"n_predict": None, "max_tokens": GREEDY["n_predict"], "stream": True} | fields
        try:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    assert answer.status_code in (502, 503, 504)
                    return
                for piece in answer.iter_text():
                    got += piece
        except httpx.TransportError:
            if got and "[DONE]" not in got:
                self.n_cut += 1
                assert "event: error" in got or not self.proxy_lives, got[-300:]
            assert "[DONE]" not in got or "event: error" not in got
            return
        events = [line.removeprefix("data: ") for line in got.splitlines() if line.startswith("data: ")]
        assert "event: error" not in got, f"a stream that was cut ended as if it was not: {got[-300:]!r}"
        assert events[-1] == "[DONE]", f"a stream ended without its end: {got[-300:]!r}"
        chunks = [json.loads(event) for event in events[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == question.text
        (receipt,) = (chunk["polykv"] for chunk in chunks if "polykv" in chunk)
        self._count(receipt)

    def _count(self, receipt: Json) -> None:
        self.n_whole += 1
        self.n_pooled += receipt["miss_reason"] is None and receipt["pool_id"] is not None


class Crowd:
    """Runs each actor in a thread; ``rest`` returns when none of them is in the middle of a step."""

    def __init__(self, url: str, actors: Sequence[Manager | Reader]) -> None:
        self._url, self._go, self._end = url, threading.Event(), threading.Event()
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(actor,)) for actor in actors]
        self._resting = [threading.Event() for _ in actors]
        for thread in self._threads:
            thread.start()

    def go(self) -> None:
        for resting in self._resting:
            resting.clear()
        self._go.set()

    def rest(self) -> None:
        self._go.clear()
        for resting in self._resting:
            assert resting.wait(90), "a client waits for ever"
        if self.errors:
            raise self.errors[0]

    def end(self) -> None:
        self._end.set()
        self._go.set()
        for thread in self._threads:
            thread.join(90)

    def _run(self, actor: Manager | Reader) -> None:
        resting = self._resting[[thread is threading.current_thread() for thread in self._threads].index(True)]
        while not self._end.is_set():
            if not self._go.is_set():
                resting.set()
                self._go.wait(0.05)
                continue
            try:
                with httpx.Client(base_url=self._url, timeout=60, trust_env=False, verify=False) as client:
                    while self._go.is_set() and not self._end.is_set():
                        actor.step(client)
            except httpx.TransportError:
                time.sleep(0.05)
            except BaseException as e:
                self.errors.append(e)
                resting.set()
                return
        resting.set()


def wait_until_nothing(is_wrong: Callable[[], str | None], within_s: float = START_WITHIN_S) -> None:
    """``is_wrong`` says what still is."""
    end_s = time.monotonic() + within_s
    while (wrong := is_wrong()) is not None:
        assert time.monotonic() < end_s, f"it stayed so: {wrong}"
        time.sleep(0.05)
