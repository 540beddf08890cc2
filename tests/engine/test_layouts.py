"""Kinds of requests and layouts that share in a way of their own, or do not and say why: client, proxy, engine.

One tiny model in f32, so that an answer with a pool is compared token by token with the engine's own to the same
request. Prompts are token arrays unless a dialect is what is tested.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .noise import Noise
from .pooled_client import GREEDY, N_ANSWER, TRUNK_LEN, Client, client_of, completion
from .tiny_models import write_tiny_lora

pytestmark = pytest.mark.engine

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)


@pytest.fixture(scope="module")
def plain_stack(chat_model: Path, tmp_path_factory: pytest.TempPathFactory, noise: Noise) -> Iterator[Client]:
    with client_of(chat_model, tmp_path_factory.mktemp("plain"), noise) as client:
        yield client


@pytest.fixture
def client(plain_stack: Client) -> Iterator[Client]:
    """With a pool of the trunk."""
    made = plain_stack.make_pool()
    yield plain_stack
    plain_stack.release(made)


# Prompts ----------------------------------------------------------------------------------------------------------


def test_token_array(client: Client, noise: Noise) -> None:
    prompt = client.trunk + noise(2, 20)
    told = client.complete(prompt)
    assert told.shared == [(TRUNK_LEN, TRUNK_LEN)]
    assert told.receipt["prefix_n_tokens"] == told.receipt["cached_n_tokens"] == TRUNK_LEN
    assert told.receipt["miss_reason"] is None
    assert told.tokens == client.full(prompt)


def test_list_of_prompts_that_all_match(client: Client, noise: Noise) -> None:
    """One pool for all, as far as all agree with it; the last reply carries the object."""
    prompts = [client.trunk + noise(3, 20), client.trunk[:200] + noise(4, 20), client.trunk + noise(5, 20)]
    told = client.complete(prompts)
    assert [n_pool for n_pool, _ in told.shared] == [200] * 3
    assert told.receipt["prefix_n_tokens"] == 200
    assert ["polykv" in reply for reply in told.body] == [False, False, True]
    assert [reply["tokens"] for reply in told.body] == [client.full(prompt) for prompt in prompts]


def test_list_of_prompts_with_one_that_does_not_match(client: Client, noise: Noise) -> None:
    prompts = [client.trunk + noise(6, 20), noise(7, 60)]
    told = client.complete(prompts)
    told.assert_unpooled("incompatible")
    assert [reply["tokens"] for reply in told.body] == [client.full(prompt) for prompt in prompts]


def test_cache_prompt_false(client: Client, noise: Noise) -> None:
    prompt = client.trunk + noise(8, 20)
    told = client.complete(prompt, cache_prompt=False)
    told.assert_unpooled("incompatible")
    assert told.shared == [(0, 0)]
    assert told.tokens == client.full(prompt)


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_several_choices(plain_stack: Client, noise: Noise, path: str) -> None:
    """``n`` slots, one prompt, one pool: every choice shares, and they say the same where nothing is random."""
    client = plain_stack
    system = [{"role": "system", "content": noise.text(9, 200)}]
    if path == "/completion":
        made = client.make_pool()
        body = completion(client.trunk + noise(10, 20), n_cmpl=3)
    else:
        made = client.make_pool(messages=system)
        turn = {"role": "user", "content": noise.text(11, 10)}
        body = {"messages": [*system, turn], "max_tokens": N_ANSWER, "n": 3, **GREEDY}
    told = client.ask(path, body)
    assert [n_pool for n_pool, _ in told.shared] == [made["prefix_len"]] * 3
    assert len({task["id_slot"] for task in told.tasks}) == 3
    assert told.receipt["prefix_n_tokens"] == made["prefix_len"]
    said = [c["tokens"] for c in told.body] if path == "/completion" else [c["message"] for c in told.body["choices"]]
    assert len(said) == 3
    assert said[1:] == said[:-1]
    client.release(made)


# Media ------------------------------------------------------------------------------------------------------------

SYSTEM = "You are a careful agent. " + "Look twice before you answer, and keep every answer short. " * 5
IMAGE = {"type": "image_url", "image_url": {"url": PIXEL}}
QUESTION = {"type": "text", "text": "What is this?"}


@pytest.fixture
def chatting(plain_stack: Client) -> Iterator[Client]:
    """With a pool of the system message."""
    made = plain_stack.make_pool(messages=[{"role": "system", "content": SYSTEM}])
    yield plain_stack
    plain_stack.release(made)


def untouched(pool: dict[str, Any]) -> list[Any]:
    return [pool[key] for key in ("seq_id", "residency", "hits", "queries", "last_access_ts")]


@pytest.mark.parametrize("given", [{}, {"pool_id": "trunk"}], ids=["unnamed", "named"])
def test_image_for_a_model_without_eyes(chatting: Client, given: dict[str, str]) -> None:
    """The engine's own words, and the pool never hears of it."""
    before = untouched(chatting.pool())
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": [QUESTION, IMAGE]}]
    body = {"messages": messages, "max_tokens": N_ANSWER}
    direct, relayed = chatting.direct("/v1/chat/completions", body), chatting.post("/v1/chat/completions", body | given)
    assert direct.status_code >= 400
    assert (relayed.status_code, relayed.content) == (direct.status_code, direct.content)
    assert "x-pool-id" not in relayed.headers
    assert untouched(chatting.pool()) == before


def test_medium_that_the_engine_leaves_out(chatting: Client) -> None:
    """Documents of a Messages request are dropped by llama-server, which then answers: unpooled, as it says."""
    before = untouched(chatting.pool())
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    body = {"system": SYSTEM, "messages": [{"role": "user", "content": [document, QUESTION]}], "max_tokens": 8}
    told = chatting.ask("/v1/messages", body)
    told.assert_unpooled("incompatible")
    assert untouched(chatting.pool()) == before


# Adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(chat_model: Path, tmp_path: Path, noise: Noise) -> Iterator[Client]:
    """A server with an adapter at full scale, and a pool made with it."""
    adapter = tmp_path / "lora.gguf"
    write_tiny_lora(adapter)
    with client_of(chat_model, tmp_path, noise, "--lora", str(adapter)) as client:
        client.make_pool()
        yield client


def test_adapters(adapted: Client, noise: Noise) -> None:
    """Adapters change every cell. Who brings its own goes without the pool. When the scale for all changes, so does
    the first one who asks; then the pool is made anew and shared again."""
    prompt = adapted.trunk + noise(2, 20)
    as_made = adapted.complete(prompt)
    assert as_made.shared == [(TRUNK_LEN, TRUNK_LEN)]
    assert as_made.tokens == adapted.full(prompt)

    for own in ([{"id": 0, "scale": 0.0}], [{"id": 0, "scale": 0.5}]):
        told = adapted.complete(prompt, lora=own)
        told.assert_unpooled("incompatible")
        assert told.tokens == adapted.full(prompt, lora=own) != as_made.tokens

    changed = adapted.stack.http.post("/lora-adapters", json=[{"id": 0, "scale": 0.25}])
    assert changed.json() == {"success": True}
    told = adapted.complete(prompt)
    assert told.shared == [(0, 0)]
    assert (told.receipt["cached_n_tokens"], told.receipt["miss_reason"]) == (0, "incompatible")
    assert told.tokens == adapted.full(prompt) != as_made.tokens

    anew = adapted.complete(prompt)
    assert [n_pool for n_pool, _ in anew.shared] == [TRUNK_LEN]
    assert anew.receipt["miss_reason"] is None
    assert anew.tokens == told.tokens


# Embeddings -------------------------------------------------------------------------------------------------------


def cells_of(pool: dict[str, Any]) -> list[Any]:
    return [pool[key] for key in ("seq_id", "residency", "own_kv_bytes")]


def test_embeddings_in_between(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """They take slots of the engine's choice. Pools keep their cells, and whoever lost its slot's cells shares anew."""
    with client_of(chat_model, tmp_path, noise, "--embeddings", "--pooling", "last") as client:
        client.make_pool()
        prompts = [client.trunk + noise(20 + agent, 20) for agent in range(4)]
        before = [client.complete(prompt, session_id=f"agent-{i}") for i, prompt in enumerate(prompts)]
        pool = client.pool()
        for path, body, n in (
            ("/v1/embeddings", {"input": [noise.text(30 + i, 40) for i in range(6)]}, 6),
            ("/embedding", {"content": noise.text(40, 40)}, 1),
        ):
            embedded = client.post(path, body).raise_for_status().json()
            assert len(embedded["data"] if path.startswith("/v1") else embedded) == n
        assert cells_of(client.pool()) == cells_of(pool)
        after = [client.complete(prompt, session_id=f"agent-{i}") for i, prompt in enumerate(prompts)]
        for told, again in zip(before, after, strict=True):
            assert again.tokens == told.tokens == client.full(prompts[before.index(told)])
            assert again.shared == [(TRUNK_LEN, TRUNK_LEN)], "its slot has none of its cells any more"
            assert again.receipt["cached_n_tokens"] == TRUNK_LEN
            assert again.receipt["miss_reason"] is None


# Split cache ------------------------------------------------------------------------------------------------------


def test_split_cache(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    """Every slot has a stream of its own: sharing is a copy, which saves the prefill and costs the cells."""
    with client_of(chat_model, tmp_path, noise, "--no-kv-unified", "-c", "32768", "--polykv-max-pools", "6") as client:
        empty = client.stats()
        assert empty["kv_unified"] is False
        client.make_pool()
        assert client.stats()["cells"]["used"] - empty["cells"]["used"] == TRUNK_LEN
        for n, agent in enumerate(range(3), 1):
            prompt = client.trunk + noise(50 + agent, 20)
            told = client.complete(prompt, session_id=f"agent-{agent}")
            assert told.shared == [(0, TRUNK_LEN)]
            assert told.receipt["prefix_n_tokens"] == told.receipt["cached_n_tokens"] == TRUNK_LEN
            assert told.receipt["miss_reason"] is None
            n_slot = TRUNK_LEN + 20 + N_ANSWER - 1
            assert client.stats()["cells"]["used"] - empty["cells"]["used"] == TRUNK_LEN + n * n_slot
        assert told.tokens == client.full(prompt)
