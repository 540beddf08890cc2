"""Flags and slot operations of llama-server beside pools, from the client's end.

Each is decided: it works, or slots that share are left out of it and the reply says what happened. Answers are always
those of a full prefill. `docs/layouts.md` lists these tests.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from .noise import Noise
from .pooled_client import N_ANSWER, TRUNK_LEN, Client, Told, client_of, completion

pytestmark = pytest.mark.engine

FULL_SLOT = 3


def ask(client: Client, prompt: list[int], session: str, **more: Any) -> Told:
    told = client.ask("/completion", {**completion(prompt, **more), "session_id": session})
    assert len(told.tasks) == 1
    return told


def used(client: Client) -> int:
    n_used: int = client.stats()["cells"]["used"]
    return n_used


def slot_of(client: Client, session: str) -> int:
    slot_id: int = client.stack.http.get(f"/polykv/sessions/{session}").raise_for_status().json()["slot_id"]
    return slot_id


# Host memory ------------------------------------------------------------------------------------------------------


def test_cache_ram_leaves_slots_that_share_alone(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """Three rounds of six sessions on four slots, the host prompt cache on: every turn shares, cells do not grow."""
    with client_of(chat_model, tmp_path, noise, "--cache-ram", "1024") as client:
        client.make_pool()
        after_round = []
        for round_ in range(3):
            for agent in range(6):
                prompt = client.trunk + noise(100 * round_ + agent, 40)
                told = ask(client, prompt, f"agent-{agent}")
                assert told.shared == [(TRUNK_LEN, TRUNK_LEN)]
                assert told.receipt["miss_reason"] is None
            after_round.append(used(client))
        assert after_round == [TRUNK_LEN + 4 * (40 + N_ANSWER - 1)] * 3
        assert told.tokens == client.full(prompt)


def test_cache_ram_still_serves_those_without_a_pool(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """What the flag is for: a conversation that lost its slot comes back from host memory, beside pools."""
    with client_of(chat_model, tmp_path, noise, "--cache-ram", "1024", "--parallel", "1") as client:
        client.make_pool()
        own = noise(2, 200)
        for prompt in (own, noise(3, 200), own + noise(4, 10)):
            told = client.ask("/completion", completion(prompt), pool="nobody")
        [(n_pool, n_cached)] = told.shared
        assert (n_pool, told.receipt["miss_reason"]) == (0, "no_pool")
        assert n_cached >= 200 - 1
        assert told.tokens == client.full(own + noise(4, 10))


def test_idle_slots_that_share_are_not_emptied(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """--cache-idle-slots: another request starts, a session behind a pool keeps what it has beyond it."""
    with client_of(chat_model, tmp_path, noise, "--cache-idle-slots") as client:
        client.make_pool()
        history = client.trunk + noise(2, 40)
        ask(client, history, "agent")
        for seed in (3, 4):
            client.direct("/completion", completion(noise(seed, 50), id_slot=FULL_SLOT)).raise_for_status()
        prompt = history + noise(5, 20)
        told = ask(client, prompt, "agent")
        assert told.shared == [(TRUNK_LEN, len(history))]
        assert told.tokens == client.full(prompt)


def test_slots_that_were_emptied_get_back_what_was_saved(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """--cache-idle-slots with --cache-ram, llama-server's defaults: conversations without a pool take turns, each named
    into its own slot, which is empty by then. As where llama-server chooses, they come back from host memory."""
    with client_of(chat_model, tmp_path, noise, "--cache-idle-slots", "--cache-ram", "1024") as client:
        client.make_pool()
        said = [noise(2, 150), noise(3, 150)]
        for turn in range(3):
            for agent in range(2):
                told = ask(client, said[agent], f"agent-{agent}")
                [(n_pool, n_cached)] = told.shared
                assert n_pool == 0
                assert n_cached >= (len(said[agent]) - 20 if turn else 0)
                assert told.tokens == client.full(said[agent])
                said[agent] += noise(10 * turn + agent + 20, 20)
        pooled = ask(client, client.trunk + said[0], "pooled")
        assert pooled.shared == [(TRUNK_LEN, TRUNK_LEN)]


# Shifting ---------------------------------------------------------------------------------------------------------


def test_context_shift_ends_a_session_that_shares(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """Cells that others hold cannot move: the answer ends at the context, as truncated, and others read the same."""
    with client_of(chat_model, tmp_path, noise, "--context-shift", "--kv-unified-per-slot", "640") as client:
        client.make_pool()
        other = client.trunk + noise(2, 20)
        before = ask(client, other, "other").tokens
        told = ask(client, client.trunk + noise(3, 20), "agent", n_predict=1000)
        assert (told.body["stop_type"], told.body["truncated"]) == ("limit", True)
        assert 638 <= told.receipt["ctx_used"] <= 640
        assert told.receipt["ctx_headroom_tokens"] == 640 - told.receipt["ctx_used"]
        again = ask(client, other, "another")
        assert (again.tokens, again.shared) == (before, [(TRUNK_LEN, TRUNK_LEN)])
        unpooled = client.ask("/completion", completion(noise(4, 300), n_predict=500), pool="nobody")
        assert len(unpooled.tokens) == 500, "who shares nothing is shifted as ever"


def test_cache_reuse_leaves_shared_cells_where_they_are(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """A turn that drops a piece from inside the pool: stock would move the cells behind it."""
    with client_of(chat_model, tmp_path, noise, "--cache-reuse", "16") as client:
        client.make_pool()
        turn = noise(2, 60)
        other = client.trunk + noise(3, 20)
        before = ask(client, other, "other").tokens
        ask(client, client.trunk + turn, "agent")
        shorter = client.trunk[:150] + client.trunk[200:] + turn
        told = ask(client, shorter, "agent")
        assert told.shared == [(150, 150)]
        assert told.tokens == client.full(shorter, id_slot=FULL_SLOT)
        assert ask(client, other, "another").tokens == before


# Slots ------------------------------------------------------------------------------------------------------------


def test_slot_save_restore_and_erase(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """A saved slot that shares is saved whole; restored it holds private cells, and shares again at its next turn.
    Erasing one gives up its part only."""
    with client_of(chat_model, tmp_path, noise, "--slot-save-path", str(tmp_path)) as client:

        def slot(action: str) -> dict[str, Any]:
            answer = client.stack.http.post(f"/slots/{slot_id}?action={action}", json={"filename": "agent.bin"})
            done: dict[str, Any] = answer.raise_for_status().json()
            return done

        client.make_pool()
        history = client.trunk + noise(2, 20)
        first = ask(client, history, "agent")
        slot_id = slot_of(client, "agent")
        n_slot = len(history) + N_ANSWER - 1
        assert slot("save")["n_saved"] == n_slot
        slot("erase")
        assert used(client) == TRUNK_LEN
        assert slot("restore")["n_restored"] == n_slot
        assert used(client) == TRUNK_LEN + n_slot, "private cells"
        prompt = history + first.tokens + noise(3, 20)
        told = ask(client, prompt, "agent")
        assert told.shared == [(TRUNK_LEN, n_slot)], "the prefix is shared again, the rest was restored"
        assert used(client) == len(prompt) + N_ANSWER - 1
        assert told.tokens == client.full(prompt, id_slot=FULL_SLOT)
        slot("erase")
        again = ask(client, prompt, "agent")
        assert again.shared == [(TRUNK_LEN, TRUNK_LEN)]
        assert again.tokens == told.tokens


def test_idle_slots_that_were_purged(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """A full cache empties idle slots. Pools stay, and a session that lost its slot's cells shares its pool again.

    Without memory for saved states: else the session is saved as soon as cells are low, and comes back whole.
    """
    with client_of(chat_model, tmp_path, noise, "-c", "1024", "--polykv-save-ram", "0") as client:
        client.make_pool()
        history = client.trunk + noise(2, 200)
        ask(client, history, "agent")
        client.direct("/completion", completion(noise(3, 600), id_slot=FULL_SLOT, n_predict=4)).raise_for_status()
        assert client.stats()["slots"][slot_of(client, "agent")]["n_tokens"] == 0
        prompt = history + noise(4, 20)
        told = ask(client, prompt, "agent")
        assert told.shared == [(TRUNK_LEN, TRUNK_LEN)]
        assert told.receipt["miss_reason"] is None
        assert told.tokens == client.full(prompt, id_slot=FULL_SLOT)


# Sleep ------------------------------------------------------------------------------------------------------------


def test_a_sleeping_engine_wakes_with_its_pools_coming_back(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """--sleep-idle-seconds: the heartbeat does not keep it awake; its cache is gone; the next turn wakes it, and the
    pool is there again, under its id."""
    with client_of(chat_model, tmp_path, noise, "--sleep-idle-seconds", "5") as client:
        made = client.make_pool()
        prompt = client.trunk + noise(2, 20)
        before = ask(client, prompt, "agent")
        deadline = time.monotonic() + 30
        while not client.stats().get("sleeping"):
            assert time.monotonic() < deadline, "something keeps it awake"
            time.sleep(0.2)
        assert client.stack.http.get("/polykv/health").status_code == 200
        body = {**completion(prompt), "pool_id": "trunk", "session_id": "agent"}
        for _ in range(2):
            reply = client.post("/completion", body).raise_for_status().json()
            assert reply["tokens"] == before.tokens
        assert reply["timings"]["pool_n"] == TRUNK_LEN
        assert reply["polykv"]["miss_reason"] is None
        pool = client.pool()
        assert (pool["pool_id"], pool["residency"]) == (made["pool_id"], "resident")


# Splits and drafts ------------------------------------------------------------------------------------------------


def test_a_copy_of_a_copy_before_anything_is_decoded(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """On a split cache copies are made at the next decode, in order: a pool of a session, a fork of it and an agent of
    that, ordered one after the other, all read the right cells."""
    split = ("--no-kv-unified", "-c", "32768", "--polykv-max-pools", "6", "--slot-save-path", str(tmp_path))
    with client_of(chat_model, tmp_path, noise, *split) as client:
        history = noise(2, 250)
        first = client.ask("/completion", {**completion(history), "session_id": "leader"}, pool="nobody")
        whole = history + first.tokens[:-1]
        made = client.make_pool(name="history", from_session="leader")
        assert made["prefix_len"] == len(whole)
        http = client.stack.http
        http.post(f"/slots/{slot_of(client, 'leader')}?action=erase").raise_for_status()
        fork = http.post("/polykv/pools/history/fork", json={"name": "fork", "own_tokens": noise(3, 30)})
        assert fork.status_code == 201, fork.text
        prompt = whole + noise(3, 30) + noise(4, 20)
        told = client.ask("/completion", completion(prompt), pool="fork")
        assert [n_cached for _, n_cached in told.shared] == [len(whole) + 30]
        assert told.tokens == client.full(prompt)


@pytest.mark.parametrize("kind", ["ngram-simple", "ngram-mod"])
def test_drafts_of_n_grams(chat_model: Path, tmp_path: Path, noise: Noise, kind: str) -> None:
    """Drafts without a model: they are made of the tokens, whoever computed the cells."""
    with client_of(chat_model, tmp_path, noise, "--spec-type", kind) as client:
        client.make_pool()
        prompt = client.trunk + noise(2, 20)
        told = ask(client, prompt, "agent", n_predict=48)
        assert told.shared == [(TRUNK_LEN, TRUNK_LEN)]
        assert told.tokens == client.full(prompt, n_predict=48)


def test_requests_around_the_proxy(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """Requests of others overwrite what sessions had in their slots. Pools stay, and nobody gets another's text into
    his pool."""
    with client_of(chat_model, tmp_path, noise) as client:
        client.make_pool()
        prompt = client.trunk + noise(2, 20)
        before = ask(client, prompt, "agent").tokens
        for slot in range(4):
            client.direct("/completion", completion(noise(10 + slot, 60), id_slot=slot)).raise_for_status()
        refused = client.stack.http.post("/polykv/pools", json={"from_session": "agent"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_not_resident")
        told = ask(client, prompt, "agent")
        assert told.shared == [(TRUNK_LEN, TRUNK_LEN)]
        assert told.tokens == before
