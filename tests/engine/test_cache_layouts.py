"""Every cache layout and kind of memory that llama.cpp has, with pools, from the client's end: what is shared, how,
and that the answer is that of the stock server after a full prefill. `docs/layouts.md` is the table of these tests.

One `polykvctl up` and one stock server per layout; its tests run one after the other, each with empty slots.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from . import loopback
from .binaries import binary_path
from .divergence import Distribution, bound, mean_divergence
from .harness import EngineServer
from .hooks import N_PROBS, Answer, Engine, answer, forced_grammar
from .noise import Noise
from .pooled_client import N_ANSWER, TRUNK_LEN, Client, Told, client_of, completion
from .tiny_models import tiny_model_path

pytestmark = pytest.mark.engine

BELOW = 200
"""Where prompts and branches leave the trunk before its end."""

How = Literal["zero-copy", "copy", "checkpoint", "none"]


@dataclass(frozen=True)
class Layout:
    """``whole``: how a prefix is shared that ends with its pool. ``below``: one that ends before. ``draft``: with a
    draft model beside it."""

    name: str
    model: str
    flags: tuple[str, ...] = ()
    whole: How = "zero-copy"
    below: How = "zero-copy"
    pools: tuple[str, ...] = ()
    draft: bool = False


SPLIT = ("--no-kv-unified", "-c", "32768")
FEW = ("--polykv-max-pools", "6")
LAYOUTS = [
    Layout("dense-unified", "dense"),
    Layout("dense-split", "dense", SPLIT, "copy", "copy", FEW),
    Layout("sliding-unified", "sliding", ("--swa-full",)),
    Layout("sliding-split", "sliding", ("--swa-full", *SPLIT), "copy", "copy", FEW),
    Layout("hybrid-unified", "hybrid", (), "zero-copy", "checkpoint"),
    Layout("hybrid-split", "hybrid", SPLIT, "copy", "none", FEW),
    Layout("recurrent-unified", "recurrent", (), "zero-copy", "checkpoint"),
    Layout("recurrent-split", "recurrent", SPLIT, "copy", "none", FEW),
    Layout("draft-unified", "dense", ("--spec-type", "draft-simple"), draft=True),
    Layout("draft-sliding", "sliding", ("--swa-full", "--spec-type", "draft-simple"), draft=True),
    Layout("draft-hybrid", "hybrid", ("--spec-type", "draft-simple"), "zero-copy", "checkpoint", draft=True),
    Layout("draft-split", "dense", ("--spec-type", "draft-simple", *SPLIT), "copy", "copy", FEW, draft=True),
]
SLIDING_WITHOUT = Layout("sliding-without", "sliding", (), "none", "none")
QUANTIZED = [
    Layout(f"{kind}-{name}", "dense", ("-ctk", kind, "-ctv", kind, "-fa", "on", *split), how, how, pools)
    for kind in ("q8_0", "q4_0")
    for name, split, how, pools in (("unified", (), "zero-copy", ()), ("split", SPLIT, "copy", FEW))
]
QUANTIZED_FAST = ("q8_0-split", "q4_0-unified")


@dataclass(frozen=True)
class Site:
    """A proxy in front of the patched server, and the stock server with the same flags to compare with."""

    layout: Layout
    client: Client
    stock: Engine

    def ask(self, prompt: list[int], session: str, pool: str = "trunk", **more: Any) -> Told:
        told = self.client.ask("/completion", {**completion(prompt, **more), "session_id": session}, pool=pool)
        assert len(told.tasks) == 1
        return told

    def assert_same(self, told: Told, prompt: list[int]) -> None:
        assert told.tokens == self.stock.full(prompt, N_ANSWER).tokens

    def fork(self, parent: str, **order: Any) -> httpx.Response:
        return self.client.stack.http.post(f"/polykv/pools/{parent}/fork", json=order)

    def listed(self, made: dict[str, Any]) -> dict[str, Any]:
        """A pool as the engine lists it."""
        listing = loopback.get(f"{self.client.stack.engine_url}/polykv/engine/pools").json()
        return next(pool for pool in listing["pools"] if pool["seq"] == made["seq_id"])

    def view(self) -> dict[str, Any]:
        view: dict[str, Any] = self.client.stack.http.get("/polykv/pools").raise_for_status().json()
        return view

    def empty(self) -> None:
        """Let go of every pool, session and cell."""
        http = self.client.stack.http
        for pool in self.view()["pools"]:
            if pool["parent"] == -1:
                http.delete(f"/polykv/pools/{pool['pool_id']}?recursive=true").raise_for_status()
        for session in http.get("/polykv/sessions").json()["sessions"]:
            http.delete(f"/polykv/sessions/{session['session_id']}").raise_for_status()
        for slot in range(4):
            http.post(f"/slots/{slot}?action=erase").raise_for_status()


@contextmanager
def opened(layout: Layout, chat_model: Path, dir_: Path, noise: Noise) -> Iterator[Site]:
    path = tiny_model_path(layout.model, chat_model)
    draft = ("-md", str(path)) if layout.draft else ()
    flags = (*layout.flags, *layout.pools, *draft, "--slot-save-path", str(dir_))
    unified = () if SPLIT[0] in layout.flags else ("--kv-unified", "-c", "16384")
    of_stock = ("--parallel", "4", "-b", "256", *unified, *layout.flags, *draft)
    with (
        client_of(chat_model, dir_, noise, *flags, model_name=layout.model) as client,
        EngineServer(binary_path("stock"), path, *of_stock, log_dir=dir_, name="stock") as stock,
    ):
        yield Site(layout, client, Engine(stock))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.name)
def running(
    request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory, noise: Noise
) -> Iterator[Site]:
    layout: Layout = request.param
    with opened(layout, chat_model, tmp_path_factory.mktemp(layout.name), noise) as site:
        yield site


@pytest.fixture
def site(running: Site) -> Iterator[Site]:
    """With a pool of the trunk, and nothing else."""
    running.client.make_pool()
    yield running
    running.empty()


def private_cells(site: Site) -> int:
    """What slots hold for themselves alone."""
    return sum(slot["n_tokens"] - slot["n_pool_shared"] for slot in site.client.stats()["slots"])


# Sharing ----------------------------------------------------------------------------------------------------------


def test_whole_pool(site: Site, noise: Noise) -> None:
    """Two agents behind all of a pool: nothing of it is prefilled; a copy takes the cells again, zero-copy none."""
    n_copied = TRUNK_LEN if site.layout.whole == "copy" else 0
    for agent in (2, 3):
        prompt = site.client.trunk + noise(agent, 20)
        told = site.ask(prompt, f"agent-{agent}")
        assert told.shared == [(TRUNK_LEN - n_copied, TRUNK_LEN)]
        assert told.receipt["prefix_n_tokens"] == told.receipt["cached_n_tokens"] == TRUNK_LEN
        assert told.receipt["miss_reason"] is None
        site.assert_same(told, prompt)
    assert private_cells(site) == 2 * (n_copied + 20 + N_ANSWER - 1)


def test_part_of_a_pool(site: Site, noise: Noise) -> None:
    """A prompt that leaves the pool before its end. Models with a state can only start from a checkpoint before that,
    and say so."""
    prompt = site.client.trunk[:BELOW] + noise(4, 20)
    told = site.ask(prompt, "agent")
    [(n_pool, n_cached)] = told.shared
    if site.layout.below in ("zero-copy", "copy"):
        assert (n_pool, n_cached) == (BELOW if site.layout.below == "zero-copy" else 0, BELOW)
        assert told.receipt["miss_reason"] == "diverged"
    else:
        assert n_pool == n_cached < BELOW
        assert (n_cached > 0) == (site.layout.below == "checkpoint")
        assert told.receipt["miss_reason"] == "swa_or_recurrent"
    assert told.receipt["cached_n_tokens"] == n_cached
    site.assert_same(told, prompt)


def test_conversation_behind_a_pool(site: Site, noise: Noise) -> None:
    """Turn after turn, the history is cached but for the few tokens between a checkpoint and the end of a prompt."""
    history = list(site.client.trunk)
    for turn in range(3):
        prompt = history + noise(10 + turn, 20)
        told = site.ask(prompt, "agent")
        [(n_pool, n_cached)] = told.shared
        assert n_pool == (TRUNK_LEN if site.layout.whole == "zero-copy" else 0)
        assert n_cached >= len(history) - (N_ANSWER + 4 if turn and site.layout.below in ("checkpoint", "none") else 1)
        assert told.receipt["miss_reason"] is None
        site.assert_same(told, prompt)
        history = prompt + told.tokens


def test_pool_of_a_session(site: Site, noise: Noise) -> None:
    """What a session's slot holds becomes a pool without a prefill; another session goes on behind it."""
    history = site.client.trunk + noise(5, 20)
    site.ask(history, "leader")
    before = site.client.stats()["n_prompt_cum"]
    made = site.client.make_pool(name="history", from_session="leader")
    assert site.client.stats()["n_prompt_cum"] == before
    assert made["prefix_len"] == len(history) + N_ANSWER - 1
    prompt = history + site.stock.full(history, N_ANSWER).tokens[:-1] + noise(6, 20)
    told = site.ask(prompt, "follower", pool="history")
    [(n_pool, n_cached)] = told.shared
    assert n_cached == made["prefix_len"]
    assert n_pool == (n_cached if site.layout.whole == "zero-copy" else 0)
    site.assert_same(told, prompt)


# The tree ---------------------------------------------------------------------------------------------------------


def test_extend(site: Site, noise: Noise) -> None:
    """At its parent's end a child inherits all of it, on every layout."""
    before = site.client.stats()["n_prompt_cum"]
    made = site.fork("trunk", name="child", own_tokens=noise(7, 40), exact=True)
    assert made.status_code == 201, made.text
    assert (made.json()["branch_pos"], site.listed(made.json())["branch_pos"]) == (TRUNK_LEN, TRUNK_LEN)
    assert site.client.stats()["n_prompt_cum"] - before == 40
    prompt = site.client.trunk + noise(7, 40) + noise(8, 20)
    told = site.ask(prompt, "agent", pool="child")
    assert [n_cached for _, n_cached in told.shared] == [TRUNK_LEN + 40]
    site.assert_same(told, prompt)


def test_branch_tells_where_it_really_is(site: Site, noise: Noise) -> None:
    """Before its parent's end: exact where there are cells, else at a checkpoint, which ``exact`` refuses. Both hold
    for the branch of a branch, too."""
    parent, tokens = "trunk", site.client.trunk
    for level, wanted in enumerate((BELOW, BELOW + 30, BELOW - 50)):
        tokens = tokens[:wanted] + noise(20 + level, 100)
        n_pools, n_used = len(site.view()["pools"]), site.view()["seq_ids_used"]
        order = {"tokens": tokens, "branch_pos": wanted}
        exact = site.fork(parent, exact=True, name="exact", **order)
        if site.layout.below in ("zero-copy", "copy"):
            assert (exact.status_code, exact.json()["branch_pos"]) == (201, wanted)
            site.client.release(exact.json())
        else:
            assert (exact.status_code, exact.json()["error"]["code"]) == (409, "branch_not_exact")
        assert (len(site.view()["pools"]), site.view()["seq_ids_used"]) == (n_pools, n_used)
        made = site.fork(parent, name=f"branch-{level}", **order)
        assert made.status_code == 201, made.text
        pool, listed = made.json(), site.listed(made.json())
        assert pool["branch_pos"] == listed["branch_pos"]
        assert pool["own_n_tokens"] == len(tokens) - pool["branch_pos"]
        if site.layout.below in ("zero-copy", "copy"):
            assert pool["branch_pos"] == wanted
        else:
            assert pool["branch_pos"] == exact.json()["error"]["branch_pos"] < wanted
        prompt = tokens + noise(30 + level, 20)
        told = site.ask(prompt, f"agent-{level}", pool=pool["name"])
        assert [n_cached for _, n_cached in told.shared] == [len(tokens)]
        site.assert_same(told, prompt)
        parent = pool["name"]
    view = site.view()
    if site.layout.whole == "zero-copy" and site.layout.model != "recurrent":
        own = sum(p["own_kv_cells"] + sum(s["suffix_n_tokens"] for s in p["sessions"]) for p in view["pools"])
        assert own == view["kv_cells_used"], "every cell has one owner"


# Refused ----------------------------------------------------------------------------------------------------------


def test_sliding_window_without_full_cache(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """No pools, and the refusal names the flag; requests are served unpooled, which they say."""
    with opened(SLIDING_WITHOUT, chat_model, tmp_path, noise) as site:
        assert_refused(site, noise)


def assert_refused(site: Site, noise: Noise) -> None:
    refused = site.client.stack.http.post("/polykv/pools", json={"name": "trunk", "tokens": site.client.trunk})
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, "sharing_unsupported")
    assert "--swa-full" in refused.json()["error"]["message"]
    prompt = site.client.trunk + noise(2, 20)
    told = site.ask(prompt, "agent")
    told.assert_unpooled("swa_or_recurrent")
    site.assert_same(told, prompt)


# Quantized cells --------------------------------------------------------------------------------------------------


def forced_body(tokens: list[int]) -> dict[str, Any]:
    return {"grammar": forced_grammar(tokens), "n_predict": len(tokens), "n_probs": N_PROBS}


# Every kind and both ways of sharing, each once; all four pairs in the slow ones.
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=[] if layout.name in QUANTIZED_FAST else [pytest.mark.slow])
        for layout in QUANTIZED
    ],
)
def test_quantized_cells(layout: Layout, chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """Rounded keys and values depend on the batches they came in, in stock too: as near to a full prefill as a slot's
    own cache is there (the bound of `test_same_answers`)."""
    with opened(layout, chat_model, tmp_path, noise) as site:
        assert_near(site, noise)


def assert_near(site: Site, noise: Noise) -> None:
    trunk, forced = site.client.trunk, noise(3, 40)
    prompt = trunk + noise(2, 20)
    site.stock.warm(trunk, slot=1)
    own = site.stock.ask(prompt, forced=forced, slot=1)
    full = site.stock.full(prompt, forced=forced, slot=2)
    assert own.cache_n == TRUNK_LEN
    site.client.make_pool()
    told = site.ask(prompt, "agent", **forced_body(forced))
    pooled: Answer = answer(told.body)
    assert told.receipt["cached_n_tokens"] == TRUNK_LEN
    assert pooled.pool_n == (TRUNK_LEN if site.layout.whole == "zero-copy" else 0)
    measured, allowed = mean_divergence(full.at, pooled.at), bound(mean_divergence(full.at, own.at))
    print(f"divergence {measured:.2e} nats, allowed {allowed:.2e}")
    assert measured <= allowed
    assert mean_divergence(full.at, changed(site, prompt, forced)) > 10 * allowed, "a wrong token must show"


def changed(site: Site, prompt: list[int], forced: list[int]) -> list[Distribution]:
    """What one other token at the start does."""
    return site.stock.full([prompt[1], *prompt[1:]], forced=forced, slot=2).at
