"""A context that runs out: who shares ends at it, nothing that others read has moved, who shares nothing is shifted as
ever; and what is left of it is told alike by every view, whatever the layout of the cache.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from .noise import Noise
from .pooled_client import N_ANSWER, TRUNK_LEN, Client, client_of, completion

pytestmark = pytest.mark.engine

N_CTX = 512
CONTEXT = ("ctx_used", "ctx_total", "ctx_headroom_tokens")
UNIFIED = ("-c", str(2 * N_CTX), "--kv-unified-per-slot", str(N_CTX))
"""More cells than one session may have, so that it is the context that ends and not the cache."""
SPLIT = ("--no-kv-unified", "-c", str(12 * N_CTX), "--polykv-max-pools", "6")
"""Four slots, six pools and two sequences that the engine keeps for itself: a twelfth of the context each."""
SHIFT = "slot context shift"
"""What llama-server says when it does it."""


def json_of(client: Client, path: str) -> Any:
    return client.stack.http.get(path).raise_for_status().json()


def engine_log(client: Client) -> str:
    said = re.search(r"log of the engine: (.+)", client.stack.log_path.read_text())
    assert said is not None
    return Path(said[1]).read_text(errors="replace")


def test_a_pooled_session_ends_at_its_context_and_the_pool_is_whole(
    chat_model: Path, tmp_path: Path, noise: Noise
) -> None:
    with client_of(chat_model, tmp_path, noise, *UNIFIED, "--parallel", "1", "--context-shift") as client:
        assert "--context-shift: a slot that shares cells with a pool stops at the end" in engine_log(client)
        assert "[context_shift_not_for_pools]" in client.stack.log_path.read_text()
        pool = client.make_pool()
        prompt = client.trunk + noise(2, 20)
        alone = client.full(prompt)
        assert client.complete(prompt, session_id="first").tokens == alone

        told = client.complete(client.trunk + noise(3, 20), session_id="agent", n_predict=10 * N_CTX)
        assert (told.body["stop_type"], told.body["truncated"]) == ("limit", True)
        assert told.body["timings"]["pool_n"] == TRUNK_LEN
        n = told.body["tokens_evaluated"] + told.body["tokens_predicted"]
        assert N_CTX - 2 <= n <= N_CTX, "all of its context, and no more"
        assert SHIFT not in engine_log(client)

        # The pool is what it was: all of it is attached, and read as if it were computed anew.
        again = client.complete(prompt, session_id="second")
        assert (again.body["timings"]["cache_n"], again.body["timings"]["pool_n"]) == (TRUNK_LEN, TRUNK_LEN)
        assert again.receipt["miss_reason"] is None
        assert again.tokens == alone

        # And a session that shares nothing is shifted once no pool is in its way, and beside one, too.
        n_shifts = 0
        for name in ("beside", "after"):
            lone = client.ask("/completion", completion(noise(4, 300), n_predict=N_CTX, session_id=name), pool="nobody")
            assert len(lone.tokens) == N_CTX, "more than there was room for"
            n_before, n_shifts = n_shifts, engine_log(client).count(SHIFT)
            assert n_shifts > n_before
            if name == "beside":
                assert client.complete(prompt, session_id="third").tokens == alone
                client.release(pool)


@pytest.mark.parametrize("layout", [UNIFIED, SPLIT], ids=["unified", "split"])
def test_what_is_left_is_right_and_told_alike(
    chat_model: Path, tmp_path: Path, noise: Noise, layout: tuple[str, ...]
) -> None:
    with client_of(chat_model, tmp_path, noise, *layout) as client:
        client.make_pool()
        prompt = client.trunk + noise(2, 20)
        told = client.complete(prompt, session_id="agent")
        used = len(prompt) + N_ANSWER
        want = {"ctx_used": used, "ctx_total": N_CTX, "ctx_headroom_tokens": N_CTX - used}
        assert {name: told.receipt[name] for name in CONTEXT} == want

        [slot] = [slot for slot in json_of(client, "/slots") if slot["session_id"] == "agent"]
        props = json_of(client, "/props")
        [session] = [s for s in json_of(client, "/polykv/tps")["sessions"] if s["session_id"] == "agent"]
        views = {
            "/slots": slot,
            "/props": props["opencoti"]["polykv"]["slots"][slot["id"]],
            "/polykv/tps": session,
            "/capacity": json_of(client, "/polykv/pools/trunk/capacity?session_id=agent"),
        }
        assert {view: {name: found[name] for name in CONTEXT} for view, found in views.items()} == dict.fromkeys(
            views, want
        )
        # As the engine has it, which counts the last token of an answer once it is used.
        engine = client.stats()["slots"][slot["id"]]
        assert (engine["n_ctx"], engine["n_tokens"]) == (N_CTX, used - 1)
        assert slot["n_ctx"] == props["default_generation_settings"]["n_ctx"] == N_CTX

        # A new session begins with the pool; and what is left is what there is room for.
        new = json_of(client, "/polykv/pools/trunk/capacity")
        assert [new[name] for name in CONTEXT] == [TRUNK_LEN, N_CTX, N_CTX - TRUNK_LEN]
        longest = client.complete(client.trunk + noise(3, 20), session_id="longest", n_predict=10 * N_CTX)
        assert longest.body["truncated"] is True
        assert N_CTX - 2 <= longest.receipt["ctx_used"] <= N_CTX
        assert longest.receipt["ctx_headroom_tokens"] == N_CTX - longest.receipt["ctx_used"]


def test_how_near_the_wall_a_pool_is(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """For who decides when to compact: nothing while nobody is there, then the longest session's share of its context;
    what does not fit any more is refused by the context arm; and a pin that was left behind is told."""
    with client_of(chat_model, tmp_path, noise, *UNIFIED) as client:
        client.make_pool(tokens=client.trunk, pin=True)

        def capacity(query: str = "") -> Any:
            return json_of(client, f"/polykv/pools/trunk/capacity{query}")

        assert capacity()["compaction_pressure"] == 0
        assert client.pool()["orphaned_pin"] is True
        told = client.complete(client.trunk + noise(2, 150), session_id="agent")
        near = capacity()
        assert near["ctx_total"] == N_CTX
        assert near["compaction_pressure"] == pytest.approx(told.receipt["ctx_used"] / N_CTX, abs=0.01)
        assert client.pool()["orphaned_pin"] is False
        cells = client.stats()["cells"]
        assert capacity(f"?expected_tokens={cells['total'] - cells['used']}")["reason"] == "ok"
        wall = capacity(f"?expected_tokens={cells['total']}")
        assert (wall["can_admit"], wall["reason"]) == (False, "context headroom exhausted")
