"""With pools switched off the patched server is the stock server: same replies, same routes, same sequences.

The same twelve requests go to both, one after the other, with a fixed seed and temperature 0. Replies are compared as
parsed JSON, or line by line for streams, without the fields that differ between any two runs of one binary: times, ids,
paths and the build's own name.
"""

import json
import re
from typing import Any

import pytest

from .conftest import SMALL, Launcher
from .hooks import Engine
from .noise import Noise

pytestmark = pytest.mark.engine

# Differ between two runs of one binary.
VOLATILE = {"created", "created_at", "id", "id_task", "timings", "model", "model_path"}
VOLATILE |= {"build_info", "system_fingerprint", "media_marker"}

GREEDY: dict[str, Any] = {"seed": 42, "temperature": 0}
CHAT = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Name a colour."}]

POST_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/completion", {"prompt": "The quick brown fox", "n_predict": 24}),
    "completion-probs": ("/completion", {"prompt": "The quick brown fox jumps", "n_predict": 8, "n_probs": 20}),
    "completion-list": ("/completion", {"prompt": ["One two", "Three four"], "n_predict": 8}),
    "completion-stream": ("/completion", {"prompt": "Once upon a time", "n_predict": 16, "stream": True}),
    "openai-completion": ("/v1/completions", {"prompt": "Once upon", "max_tokens": 12, "n": 2}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 16}),
    "chat-stream": (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 16, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat-logprobs": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 6, "logprobs": True, "top_logprobs": 5}),
    "embeddings": ("/embedding", {"content": "A sentence to embed."}),
    "tokenize": ("/tokenize", {"content": "Hello <|im_start|> world", "with_pieces": True}),
    "error": ("/completion", {"n_predict": 4}),
}


@pytest.mark.parametrize("layout", [("--kv-unified",), ()], ids=["unified", "split"])
def test_patched_server_without_pools_answers_as_stock(launch: Launcher, layout: tuple[str, ...]) -> None:
    flags = ("-c", "4096", "--parallel", "4", *layout, "--embeddings", "--pooling", "mean")
    completions_only = ("-c", "4096", "--parallel", "4", *layout)
    for names, own in (({"embeddings"}, flags), (POST_REQUESTS.keys() - {"embeddings"}, completions_only)):
        patched = launch("patched", "chat", *own, "--polykv-max-pools", "0")
        stock = launch("stock", "chat", *own)
        for name in sorted(names):
            assert reply(patched, name) == reply(stock, name), name
        assert props(patched) == props(stock)


def test_without_pools_the_hooks_are_absent(launch: Launcher) -> None:
    """Unknown routes of the patched and the stock server give the same answer."""
    patched, stock = launch("patched", "dense", *SMALL), launch("stock", "dense", *SMALL)
    for method, path in (
        ("GET", "/polykv/engine/pools"),
        ("POST", "/polykv/engine/pools"),
        ("DELETE", "/polykv/engine/pools/5"),
        ("GET", "/polykv/engine/stats"),
        ("POST", "/polykv/engine/render"),
        ("PUT", "/polykv/engine/owner"),
    ):
        ours, theirs = (engine.http.request(method, path, json={}) for engine in (patched, stock))
        assert (ours.status_code, ours.text) == (theirs.status_code, theirs.text)
        assert ours.status_code == 404


def test_without_pools_the_sequences_are_those_of_stock(launch: Launcher) -> None:
    """No sequence is set aside: the context is made with the same parameters."""
    patched, stock = launch("patched", "dense", *SMALL, "-v"), launch("stock", "dense", *SMALL, "-v")
    assert context_parameters(patched) == context_parameters(stock) != []


def test_pools_change_no_request_that_names_none(launch: Launcher, noise: Noise) -> None:
    """With pools in the cache, requests without our fields answer as on a stock server."""
    patched, stock = launch.pooled("chat"), launch.stock("chat")
    patched.materialize(noise(1, 300))
    for name in sorted(POST_REQUESTS.keys() - {"embeddings", "completion-probs", "chat-logprobs"}):
        assert reply(patched, name) == reply(stock, name), name


def reply(engine: Engine, name: str) -> Any:
    """One reply without what is volatile: status, then the body's JSON or the stream's lines."""
    path, body = POST_REQUESTS[name]
    # llama-server says keep-alive and closes after a stream: a connection for each.
    response = engine.http.post(path, json=body | GREEDY, headers={"connection": "close"})
    if "text/event-stream" not in response.headers["content-type"]:
        return response.status_code, steady(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return response.status_code, [steady(json.loads(line)) if line.startswith("{") else line for line in lines]


def props(engine: Engine) -> Any:
    return steady(engine.http.get("/props").json())


def steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [steady(item) for item in value]
    return value


def context_parameters(engine: Engine) -> list[str]:
    """What the log says about sizes of context, sequences and batch, without times and addresses."""
    return re.findall(r"(?:n_seq_max|n_ctx|n_ctx_seq|n_batch|n_ubatch|kv_unified) +=? *[\w.]+", engine.server.log())
