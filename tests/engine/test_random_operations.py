"""Random operations on a real engine and a proxy with a journal, against a model that is a dict of token lists.

After every step: the tree is what was acknowledged, no sequence belongs to two pools or to none, what the engine holds
of a pool are its tokens, and the cells add up. Every answer is compared with that of a full prefill, so a session that
saw another's cells, or a pool whose cells changed, is a wrong answer. Engine and proxy are killed in between.
"""

import json
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from polykv_proxy.tree.prefix import hash_tokens

from .binaries import binary_path
from .deployment import Deployment
from .harness import EngineServer
from .noise import Noise

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

N_POOL_SEQUENCES = 4
N_SLOTS = 3
N_ANSWER = 8
N_STREAM = 120
N_PROBS = 20
TIE = 0.1
"""Log-probability. Where other requests' cells lie moves the sums of attention: between two layouts of its cache stock
moves its own by up to 0.06 on this model. One other token in the prefix moves them by ten times that."""
MAX_STREAMS = N_SLOTS - 1
MAX_CONTEXT = 250
"""What two sessions begin with becomes a pool when it is a little longer."""
STEPS_BETWEEN_DEATHS = 4
"""At least. Each costs a second, and what is to be lost must be made first."""
SIZES = ("-c", "2048", "--parallel", str(N_SLOTS), "--kv-unified")
BATCH = ("-b", "64")
ENGINE = (*SIZES, *BATCH, "--polykv-max-pools", str(N_POOL_SEQUENCES))
SETTLE_S = 20

picks = st.integers(0, 10**6)
lengths = st.integers(1, 90)


@dataclass
class Known:
    """A pool as it was acknowledged."""

    tokens: list[int]
    parent: int
    branch_pos: int
    name: str | None
    pinned: bool = False


@dataclass
class Stream:
    """A streamed completion in a thread. ``ended``: it ended as a complete one does."""

    pool_id: int
    prompt: list[int]
    began: threading.Event = field(default_factory=threading.Event)
    text: str = ""  # not tokens: while a character is incomplete the engine keeps text back, and skips its tokens
    n_predicted: int | None = None
    ended: bool = False
    status: int | None = None
    thread: threading.Thread | None = None

    def run(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/completion", json=body, timeout=120) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        self.text += event.get("content", "")
                        self.ended = bool(event.get("stop"))
                        self.n_predicted = event.get("tokens_predicted")
                        self.began.set()
        except httpx.TransportError:
            self.ended = False  # cut: what a client sees when either side is killed
        finally:
            self.began.set()


class World:
    """What all examples share: the model, and an engine that never shares anything."""

    model: Path
    noise: Noise
    dir: Path
    reference: EngineServer
    answers: ClassVar[dict[tuple[int, ...], dict[str, Any]]] = {}

    def answer(self, prompt: list[int], n: int) -> dict[str, Any]:
        key = (n, *prompt)
        if key not in self.answers:
            body = {**ask(prompt, n), "cache_prompt": False}
            reply = self.reference.http.post("/completion", json=body).raise_for_status().json()
            assert reply["timings"]["cache_n"] == 0
            self.answers[key] = reply
        return self.answers[key]

    def difference(self, prompt: list[int], tokens: list[int]) -> str | None:
        """Where an answer leaves that of a full prefill, unless the model is undecided there (see ``TIE``)."""
        right: list[int] = self.answer(prompt, len(tokens))["tokens"]
        at = common(right, tokens)
        if at == len(right) or tokens[at] in self.as_good(prompt, right[:at]):
            return None
        return f"token {at} is {tokens[at]} instead of {right[at]}: {tokens}, {right}"

    def difference_of_text(self, prompt: list[int], text: str, n: int) -> str | None:
        """The same for the text of an answer of ``n`` tokens, or for the beginning of one."""
        full = self.answer(prompt, n)
        if full["content"].startswith(text):
            return None
        right: list[int] = full["tokens"]
        at = next(i for i in range(len(right) + 1) if not text.startswith(self.text_of(right[: i + 1])))
        for token in self.as_good(prompt, right[:at]):
            other = self.text_of([*right[:at], token])
            if text.startswith(other) or other.startswith(text) or "\ufffd" in other:
                return None
        return f"token {at} is not {right[at]}: {text!r}, {full['content']!r}"

    def as_good(self, prompt: list[int], continued: list[int]) -> set[int]:
        """Tokens that the model finds about as likely as its first choice."""
        body = ask(prompt + continued, 1) | {"cache_prompt": False, "n_probs": N_PROBS}
        told = self.reference.http.post("/completion", json=body).raise_for_status().json()
        if "completion_probabilities" not in told:
            return set(range(self.noise.n_vocab))  # half a character: the engine does not tell
        tops = told["completion_probabilities"][0]["top_logprobs"]
        return {top["id"] for top in tops if tops[0]["logprob"] - top["logprob"] <= TIE}

    def text_of(self, tokens: list[int]) -> str:
        text: str = (
            self.reference.http.post("/detokenize", json={"tokens": tokens}).raise_for_status().json()["content"]
        )
        return text


def ask(prompt: list[int], n: int) -> dict[str, Any]:
    return {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "return_tokens": True}


def hash_of(tokens: list[int]) -> int:
    return hash_tokens(array("i", tokens))


class Operations(RuleBasedStateMachine):
    world: ClassVar[World]

    @initialize()
    def start(self) -> None:
        self.stack = ExitStack()
        dir_ = Path(tempfile.mkdtemp(dir=self.world.dir))
        self.served = self.stack.enter_context(Deployment(self.world.model, *ENGINE, dir_=dir_))
        self.pools: dict[int, Known] = {}
        self.streams: list[Stream] = []
        self.contexts: dict[str, list[int]] = {}
        self.ids_seen: set[int] = set()
        self.n_drawn = 0
        self.n_steps_alive = 0

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        with self.stack:
            for stream in self.streams:
                if stream.thread is not None:
                    stream.thread.join(60)

    # Pools ---------------------------------------------------------------------------------------------------------

    @rule(n=lengths, named=st.booleans(), pin=st.sampled_from([False, False, False, True]))
    def create(self, n: int, named: bool, pin: bool) -> None:
        self.made(None, {"tokens": self.draw(n + 10)}, named, pin)

    @precondition(lambda self: self.pools)
    @rule(pick=picks, cut=picks, n=lengths, named=st.booleans())
    def fork(self, pick: int, cut: int, n: int, named: bool) -> None:
        parent = self.pick(pick)
        kept = self.pools[parent].tokens[: 1 + cut % len(self.pools[parent].tokens)]
        self.made(parent, {"tokens": kept + self.draw(n)}, named, False)

    @precondition(lambda self: self.pools)
    @rule(pick=picks, cut=picks, n=lengths, extend=st.booleans())
    def fork_own(self, pick: int, cut: int, n: int, extend: bool) -> None:
        parent = self.pick(pick)
        body: dict[str, Any] = {"own_tokens": self.draw(n)}
        if not extend:
            body["branch_pos"] = 1 + cut % len(self.pools[parent].tokens)
        self.made(parent, body, False, False)

    def made(self, parent: int | None, source: dict[str, Any], named: bool, pin: bool) -> None:
        name = f"pool-{self.n_drawn}" if named else None
        body = source | ({"name": name} if named else {}) | ({"pin": True} if pin else {})
        path = "/polykv/pools" if parent is None else f"/polykv/pools/{parent}/fork"
        reply = self.served.http.post(path, json=body)
        if reply.status_code in (503, 507):
            # Everything is in use or pinned.
            assert self.streams or any(pool.pinned for pool in self.pools.values()), reply.text
            return
        if pin and reply.status_code == 409:
            assert reply.json()["error"]["code"] == "pin_budget", reply.text
            return
        assert reply.status_code == 201, reply.text
        made = reply.json()
        tokens = source.get("tokens")
        if tokens is None:
            assert parent is not None
            branch_pos = source.get("branch_pos", len(self.pools[parent].tokens))
            tokens = self.pools[parent].tokens[:branch_pos] + source["own_tokens"]
        else:
            branch_pos = 0 if parent is None else common(tokens, self.pools[parent].tokens)
        assert made["pool_id"] not in self.ids_seen, "an id was used again"
        assert (made["prefix_len"], made["branch_pos"]) == (len(tokens), branch_pos)
        self.ids_seen.add(made["pool_id"])
        self.pools[made["pool_id"]] = Known(tokens, -1 if parent is None else parent, branch_pos, name, pin)

    @precondition(lambda self: self.contexts)
    @rule(pick=picks)
    def create_from_session(self, pick: int) -> None:
        session = sorted(self.contexts)[pick % len(self.contexts)]
        reply = self.served.http.post("/polykv/pools", json={"from_session": session})
        if reply.status_code != 201:
            assert reply.json()["error"]["code"] in SESSION_REFUSALS, reply.text
            return
        made, context = reply.json(), self.contexts[session]
        assert made["pool_id"] not in self.ids_seen, "an id was used again"
        assert len(context) - 1 <= made["prefix_len"] <= len(context)  # the last one may not be in the cache yet
        self.ids_seen.add(made["pool_id"])
        self.pools[made["pool_id"]] = Known(context[: made["prefix_len"]], -1, 0, None)

    @precondition(lambda self: self.pools)
    @rule(pick=picks, recursive=st.booleans())
    def release(self, pick: int, recursive: bool) -> None:
        pool_id = self.pick(pick)
        below = self.below(pool_id)
        reply = self.served.http.delete(f"/polykv/pools/{pool_id}", params={"recursive": str(recursive).lower()})
        if len(below) > 1 and not recursive:
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "pool_has_children"), reply.text
            return
        assert reply.status_code == 200, reply.text
        for gone in below:
            del self.pools[gone]

    @precondition(lambda self: self.pools)
    @rule(pick=picks)
    def pin(self, pick: int) -> None:
        pool_id = self.pick(pick)
        reply = self.served.http.post(f"/polykv/pools/{pool_id}/pin")
        assert reply.status_code == 200 or reply.json()["error"]["code"] in PIN_REFUSALS, reply.text
        self.pools[pool_id].pinned |= reply.status_code == 200

    @precondition(lambda self: self.pools)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        pool_id = self.pick(pick)
        self.served.http.post(f"/polykv/pools/{pool_id}/unpin").raise_for_status()
        self.pools[pool_id].pinned = False

    @precondition(lambda self: self.pools)
    @rule(pick=picks)
    def evict(self, pick: int) -> None:
        pool_id = self.pick(pick)
        reply = self.served.http.post(f"/polykv/pools/{pool_id}/evict", params={"to": "cold"})
        if reply.status_code == 409:
            code = reply.json()["error"]["code"]
            # A stream on it or on a pool below, or the pin of a pool below, may hold it.
            assert code in ("pool_in_use", "pool_pinned"), reply.text
            held = [s.pool_id for s in self.streams] + [p for p, known in self.pools.items() if known.pinned]
            assert held, reply.text
            return
        assert reply.status_code == 200, reply.text

    @precondition(lambda self: self.pools)
    @rule(pick=picks)
    def flush(self, pick: int) -> None:
        self.served.http.post(f"/polykv/pools/{self.pick(pick)}/flush").raise_for_status()

    # Answers -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pools)
    @rule(pick=picks, cut=picks, whole=st.booleans(), n=st.integers(1, 40), session=st.none() | st.integers(1, 4))
    def attach(self, pick: int, cut: int, whole: bool, n: int, session: int | None) -> None:
        pool_id = self.pick(pick)
        tokens = self.pools[pool_id].tokens
        kept = tokens if whole else tokens[: 1 + cut % len(tokens)]
        prompt = kept + self.draw(n)
        body = ask(prompt, N_ANSWER) | {"pool_id": pool_id}
        if session is not None:
            body["session_id"] = f"agent-{session}"
        reply = self.served.http.post("/completion", json=body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert not (wrong := self.world.difference(prompt, answer["tokens"])), (wrong, answer["polykv"])
        if session is not None:
            self.contexts[f"agent-{session}"] = prompt + answer["tokens"]
        receipt = answer["polykv"]
        if receipt["pool_id"] is None:
            assert receipt["miss_reason"] == "not_resident", receipt
        elif receipt["miss_reason"] is None:
            assert receipt["cached_n_tokens"] >= len(kept) - 1, receipt

    @rule(n=st.integers(1, 60), session=st.integers(1, 4))
    def ask_without_a_pool(self, n: int, session: int) -> None:
        prompt = self.draw(n)
        body = ask(prompt, N_ANSWER) | {"session_id": f"agent-{session}"}
        reply = self.served.http.post("/completion", json=body)
        assert reply.status_code == 200, reply.text
        assert not (wrong := self.world.difference(prompt, reply.json()["tokens"])), wrong
        self.contexts[f"agent-{session}"] = prompt + reply.json()["tokens"]

    @precondition(lambda self: self.contexts)
    @rule(pick=picks, cut=st.integers(0, 40), n=st.integers(1, 20), pool=st.none() | picks)
    def go_on(self, pick: int, cut: int, n: int, pool: int | None) -> None:
        """From a place near a session's end, whatever pool is named now: it may begin as the session did."""
        session = sorted(self.contexts)[pick % len(self.contexts)]
        context = self.contexts[session]
        prompt = context[: max(1, len(context) - cut)] + self.draw(n)
        if len(prompt) > MAX_CONTEXT:
            return
        body = ask(prompt, N_ANSWER) | {"session_id": session}
        if pool is not None and self.pools:
            body["pool_id"] = self.alike(prompt, pool)
        reply = self.served.http.post("/completion", json=body)
        assert reply.status_code == 200, reply.text
        assert not (wrong := self.world.difference(prompt, reply.json()["tokens"])), (wrong, reply.json()["polykv"])
        self.contexts[session] = prompt + reply.json()["tokens"]

    @precondition(lambda self: self.pools and len(self.streams) < MAX_STREAMS)
    @rule(pick=picks, n=st.integers(1, 20))
    def begin_stream(self, pick: int, n: int) -> None:
        pool_id = self.pick(pick)
        stream = Stream(pool_id, self.pools[pool_id].tokens + self.draw(n))
        body = ask(stream.prompt, N_STREAM) | {"pool_id": pool_id, "stream": True}
        stream.thread = threading.Thread(target=stream.run, args=(str(self.served.http.base_url), body))
        stream.thread.start()
        assert stream.began.wait(60), "no first token"
        self.streams.append(stream)

    @precondition(lambda self: self.streams)
    @rule()
    def finish_streams(self) -> None:
        for stream in self.taken_streams():
            assert (stream.status, stream.ended, stream.n_predicted) == (200, True, N_STREAM)
            assert not (wrong := self.world.difference_of_text(stream.prompt, stream.text, N_STREAM)), wrong

    # Deaths --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.n_steps_alive >= STEPS_BETWEEN_DEATHS)
    @rule()
    def kill_engine(self) -> None:
        self.served.restart_engine()
        self.cut_streams()

    @precondition(lambda self: self.n_steps_alive >= STEPS_BETWEEN_DEATHS)
    @rule()
    def kill_proxy(self) -> None:
        self.served.restart_proxy()
        self.cut_streams()

    def cut_streams(self) -> None:
        """A stream that was cut never looks complete, and what came of it is right."""
        self.n_steps_alive = 0
        for stream in self.taken_streams():
            assert not (wrong := self.world.difference_of_text(stream.prompt, stream.text, N_STREAM)), wrong
            assert not stream.ended or stream.n_predicted == N_STREAM

    # Always --------------------------------------------------------------------------------------------------------

    @invariant()
    def the_tree_is_what_was_acknowledged(self) -> None:
        if not hasattr(self, "served"):
            return
        self.n_steps_alive += 1
        shown = {pool["pool_id"]: pool for pool in self.view()["pools"]}
        assert shown.keys() == self.pools.keys()
        for pool_id, known in self.pools.items():
            pool = shown[pool_id]
            got = (pool["parent"], pool["branch_pos"], pool["prefix_len"], pool["name"], pool["pinned"])
            assert got == (known.parent, known.branch_pos, len(known.tokens), known.name, known.pinned)

    @invariant()
    def sequences_have_one_owner_each_and_its_tokens(self) -> None:
        if not hasattr(self, "served") or self.streams:
            return
        for wrong in self.settling():
            wrong.extend(self.wrong_sequences() + self.wrong_sum())

    def wrong_sequences(self) -> list[str]:
        held = {pool["seq"]: pool for pool in self.served.sequences() if pool["state"] == "ready"}
        hashes = {seq: int(pool["tokens_hash"], 16) for seq, pool in held.items()}
        ours = {hash_of(known.tokens) for known in self.pools.values()}
        wrong = [f"sequence {seq} is no pool's" for seq, hash_ in hashes.items() if hash_ not in ours]
        for pool in self.view()["pools"]:
            seq, known = pool["seq_id"], self.pools[pool["pool_id"]]
            if seq is None:
                continue
            if seq not in held:
                wrong.append(f"pool {pool['pool_id']} is said to be in sequence {seq}, which is free")
            elif held[seq]["n_tokens"] < len(known.tokens):
                wrong.append(f"pool {pool['pool_id']} is longer than what sequence {seq} holds")
            elif held[seq]["n_tokens"] == len(known.tokens) and hashes[seq] != hash_of(known.tokens):
                wrong.append(f"sequence {seq} holds other tokens than pool {pool['pool_id']}")
        return wrong

    def wrong_sum(self) -> list[str]:
        view = self.view()
        n_own = sum(pool["own_kv_cells"] for pool in view["pools"])
        n_sessions = sum(session["suffix_n_tokens"] for pool in view["pools"] for session in pool["sessions"])
        n_released = sum(pool["own_kv_cells"] for pool in view["released"])
        n_all = n_own + n_sessions + n_released + view["unpooled"]["kv_cells"]
        n_used = view["kv_cells_used"]
        if n_all == n_used:
            return []
        return [f"{n_used} cells used, {n_own} + {n_sessions} + {n_released} + {view['unpooled']['kv_cells']} owned"]

    def settling(self) -> Iterator[list[str]]:
        """Look again for a while: pools come back in the background after a restart."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            wrong: list[str] = []
            yield wrong
            if not wrong:
                return
            assert time.monotonic() < deadline, wrong
            time.sleep(0.1)

    # ---------------------------------------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        view: dict[str, Any] = self.served.http.get("/polykv/pools").raise_for_status().json()
        return view

    def draw(self, n: int) -> list[int]:
        """Tokens nobody had before: whoever shows them anywhere else was given them."""
        self.n_drawn += 1
        return self.world.noise(self.n_drawn, n)

    def alike(self, prompt: list[int], pick: int) -> int:
        """A pool that begins as the prompt does, if there is any."""
        alike = [pool_id for pool_id, known in self.pools.items() if known.tokens[0] == prompt[0]]
        return sorted(alike or self.pools)[pick % len(alike or self.pools)]

    def pick(self, pick: int) -> int:
        return sorted(self.pools)[pick % len(self.pools)]

    def below(self, pool_id: int) -> list[int]:
        """The pool and everything under it."""
        found = [pool_id]
        for above in found:
            found += [child for child, known in self.pools.items() if known.parent == above]
        return found

    def taken_streams(self) -> list[Stream]:
        streams, self.streams = self.streams, []
        for stream in streams:
            assert stream.thread is not None
            stream.thread.join(120)
            assert not stream.thread.is_alive(), "a stream that does not end"
        return streams


SESSION_REFUSALS = ("session_not_found", "session_not_resident", "seq_ids_exhausted", "kv_exhausted")
PIN_REFUSALS = ("pin_budget", "kv_exhausted", "seq_ids_exhausted")


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@contextmanager
def world_in(model: Path, noise: Noise, dir_: Path) -> Iterator[World]:
    world = World()
    world.model, world.noise, world.dir = model, noise, dir_
    reference = EngineServer(binary_path("stock"), world.model, *SIZES, *BATCH, log_dir=dir_, name="reference")
    with reference:
        world.reference = reference
        yield world


def test_another_token_in_the_prefix_is_noticed(dense_path: Path, noise: Noise, tmp_path: Path) -> None:
    """The comparison sees what it is for: one token of ninety is another, as if somebody else's cell were there."""
    with world_in(dense_path, noise, tmp_path) as world:
        noticed = []
        for seed in range(10):
            prompt, other = world.noise(seed, 90), world.noise(100 + seed, 1)
            swapped = prompt[:45] + other + prompt[46:]
            answer = world.answer(swapped, N_STREAM)
            tokens, text = answer["tokens"], answer["content"]
            noticed.append(world.difference(prompt, tokens[:N_ANSWER]) is not None)
            noticed.append(world.difference_of_text(prompt, text, N_STREAM) is not None)
            assert world.difference(swapped, tokens) is None
            assert world.difference_of_text(swapped, text[: len(text) // 2], N_STREAM) is None
        assert sum(noticed) >= 0.7 * len(noticed), noticed


@pytest.mark.parametrize(
    ("n_examples", "n_steps"),
    [pytest.param(4, 30, id="some"), pytest.param(25, 40, id="many", marks=pytest.mark.slow)],
)
def test_random_operations_leave_nothing_wrong(
    n_examples: int, n_steps: int, dense_path: Path, noise: Noise, tmp_path: Path
) -> None:
    with world_in(dense_path, noise, tmp_path) as world:
        Operations.world = world
        checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
        run_state_machine_as_test(
            Operations,
            settings=settings(
                max_examples=n_examples,
                stateful_step_count=n_steps,
                deadline=None,
                derandomize=n_examples == 4,
                suppress_health_check=checks,
                print_blob=True,
            ),
        )
