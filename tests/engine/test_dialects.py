"""Every dialect of llama-server can attach: native and OpenAI completions, chat, Anthropic Messages, OpenAI Responses.

The proof is the engine's own account of the finished task, since some dialects show no timings.
"""

from typing import Any

import pytest

from .conftest import Launcher
from .hooks import Engine
from .noise import Noise

pytestmark = pytest.mark.engine

SYSTEM = "You are a careful agent. " + "Look twice before you answer, and keep every answer short. " * 12
QUESTION = "Which colour has the sky?"
TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city"}},
    "required": ["city"],
}
OPENAI_TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather now", "parameters": TOOL}}]
TURN = [{"role": "user", "content": QUESTION}]

BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": SYSTEM + QUESTION, "n_predict": 12},
    "/completions": {"prompt": SYSTEM + QUESTION, "n_predict": 12},
    "/v1/completions": {"prompt": SYSTEM + QUESTION, "max_tokens": 12},
    "/chat/completions": {"messages": [{"role": "system", "content": SYSTEM}, *TURN], "max_tokens": 12},
    "/v1/chat/completions": {"messages": [{"role": "system", "content": SYSTEM}, *TURN], "max_tokens": 12},
    "/v1/messages": {"system": SYSTEM, "messages": TURN, "max_tokens": 12},
    "/v1/responses": {"instructions": SYSTEM, "input": QUESTION, "max_output_tokens": 12},
}
WITH_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": BODIES["/v1/chat/completions"] | {"tools": OPENAI_TOOLS},
    "/v1/messages": BODIES["/v1/messages"]
    | {"tools": [{"name": "weather", "description": "Weather now", "input_schema": TOOL}]},
    "/v1/responses": BODIES["/v1/responses"]
    | {"tools": [{"type": "function", "name": "weather", "description": "Weather now", "parameters": TOOL}]},
}
CASES = [
    pytest.param(path, body, id=path + kind)
    for kind, table in (("", BODIES), ("+tools", WITH_TOOLS))
    for path, body in table.items()
]


@pytest.fixture(scope="module")
def engine(launch_shared: Launcher) -> Engine:
    return launch_shared.pooled("dense", "--no-cache-idle-slots")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), CASES)
def test_dialect_attaches(engine: Engine, path: str, body: dict[str, Any], stream: bool) -> None:
    """Render tells the tokens, a pool is made of most of them, the request shares exactly those."""
    engine.free_all()
    tokens = engine.render(path, body)
    shared_n = len(tokens) - 20
    pool = engine.materialize(tokens[:shared_n])
    engine.erase(1)
    fields = {"shared_pool_slot": pool["seq"], "shared_prefix_n_tokens": -1, "id_slot": 1, "temperature": 0}
    fields |= {"shared_pool_gen": pool["gen"], "shared_pool_epoch": engine.stats()["epoch"], "stream": stream}
    response = engine.http.post(path, json=body | fields, headers={"connection": "close"})
    assert response.status_code == 200, response.text
    task = engine.stats()["finished"][-1]
    assert (task["n_prompt"], task["n_cached"], task["n_pool"]) == (len(tokens), shared_n, shared_n)
    assert task["id_slot"] == 1
    assert engine.pool(pool["seq"])["n_attach"] == 1


@pytest.mark.parametrize(("path", "body"), CASES)
def test_dialect_honours_slot_and_cache_prompt(engine: Engine, path: str, body: dict[str, Any]) -> None:
    tokens = engine.render(path, body)
    for id_slot in (2, 0):
        fields = {"id_slot": id_slot, "cache_prompt": False, "temperature": 0}
        assert engine.http.post(path, json=body | fields).status_code == 200
        task = engine.stats()["finished"][-1]
        assert (task["id_slot"], task["n_cached"], task["n_prompt"]) == (id_slot, 0, len(tokens))


def test_render_changes_nothing(engine: Engine) -> None:
    before = engine.stats()
    for path, body in BODIES.items():
        engine.render(path, body)
    after = engine.stats()
    for key in ("n_prompt_cum", "n_decoded_cum", "cells", "finished", "slots"):
        assert after[key] == before[key]


def test_render_of_lists_and_token_arrays(engine: Engine, noise: Noise) -> None:
    tokens = noise(1, 30)
    body = {"path": "/completion", "body": {"prompt": tokens}}
    assert engine.post("/polykv/engine/render", body) == {"tokens": tokens, "has_media": False, "n_prompts": 1}
    body = {"path": "/v1/completions", "body": {"prompt": ["one two", "three"]}}
    several = engine.post("/polykv/engine/render", body)
    assert several["n_prompts"] == 2
    assert several["tokens"] == several["prompts"][0]
