"""The whole way: client, proxy, engine. Explicit mode relays, pools attach on every dialect, the SDK works as it is."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from . import loopback
from .binaries import binary_path
from .stack import ProxyStack
from .test_dialects import BODIES, OPENAI_TOOLS, SYSTEM, TURN
from .test_off_path import GREEDY, POST_REQUESTS, steady
from .tiny_models import tiny_model_path

pytestmark = pytest.mark.engine

THREADS = ("-t", "1")


@pytest.fixture(scope="module")
def model(chat_model: Path) -> Path:
    """The chat model's tokenizer and template; its answers make no sense, which nothing here needs."""
    return tiny_model_path("dense", chat_model)


@pytest.fixture(scope="module")
def explicit(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyStack]:
    dir_ = tmp_path_factory.mktemp("explicit")
    with ProxyStack(binary_path("patched"), model, *THREADS, log_dir=dir_, mode="explicit") as stack:
        yield stack


@pytest.fixture(scope="module")
def auto(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyStack]:
    dir_ = tmp_path_factory.mktemp("auto")
    with ProxyStack(binary_path("patched"), model, *THREADS, log_dir=dir_) as stack:
        yield stack


@pytest.fixture
def pool(auto: ProxyStack) -> Iterator[dict[str, Any]]:
    """A pool of the system message that all dialects begin with."""
    messages = [{"role": "system", "content": SYSTEM}]
    made = auto.http.post("/polykv/pools", json={"messages": messages, "name": "careful"}).raise_for_status().json()
    yield made
    auto.http.delete(f"/polykv/pools/{made['pool_id']}").raise_for_status()


def finished(stack: ProxyStack) -> list[dict[str, Any]]:
    tasks: list[dict[str, Any]] = loopback.get(f"{stack.engine_url}/polykv/engine/stats", timeout=60).json()["finished"]
    return tasks


def comparable(response: httpx.Response) -> Any:
    """Status, type and content without what differs between any two runs."""
    kind = response.headers["content-type"]
    if "text/event-stream" in kind:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
        content = [steady(json.loads(line)) if line.startswith("{") else line for line in lines]
    else:
        content = steady(response.json())
    return response.status_code, kind, content


@pytest.mark.parametrize("name", sorted(POST_REQUESTS))
def test_explicit_mode_relays_the_engines_own_reply(explicit: ProxyStack, name: str) -> None:
    path, body = POST_REQUESTS[name]
    # The same slot with the same content each time, so that cached counts agree, too.
    sent = body | GREEDY | ({"cache_prompt": False} if "prompt" in body or "messages" in body else {})
    closing = {"connection": "close"}
    direct, relayed = (loopback.post(url + path, json=sent, headers=closing, timeout=120) for url in urls(explicit))
    assert comparable(relayed) == comparable(direct)


@pytest.mark.parametrize("path", ["/props", "/v1/models", "/health", "/slots", "/nope", "/v1/health"])
def test_explicit_mode_relays_reads(explicit: ProxyStack, path: str) -> None:
    direct, relayed = (loopback.get(url + path, timeout=60) for url in urls(explicit))
    assert relayed.status_code == direct.status_code
    theirs, ours = steady(direct.json()), steady(relayed.json())
    if path == "/props":
        ours.pop("opencoti", None)
    if path == "/slots":
        theirs, ours = ([{key: slot[key] for key in ("n_ctx", "is_processing")} for slot in s] for s in (theirs, ours))
    assert ours == theirs


def urls(stack: ProxyStack) -> tuple[str, str]:
    return stack.engine_url, stack.url


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_named_pool_is_shared_on_every_chat_dialect(
    auto: ProxyStack, pool: dict[str, Any], path: str, stream: bool
) -> None:
    body = BODIES[path] | {"pool_id": "careful", "stream": stream, "temperature": 0}
    response = auto.http.post(path, json=body).raise_for_status()
    assert response.headers["x-pool-id"] == str(pool["pool_id"])
    (told,) = polykv_objects(response)
    assert told["pool_id"] == pool["pool_id"]
    assert told["miss_reason"] is None
    task = finished(auto)[-1]
    assert task["n_pool"] == pool["prefix_len"] == told["prefix_n_tokens"]
    assert task["n_cached"] == told["cached_n_tokens"] >= pool["prefix_len"]


def test_pool_in_a_header_and_unnamed(auto: ProxyStack, pool: dict[str, Any]) -> None:
    """For clients that cannot add fields; and for those that name nothing, since the prefix matches."""
    for headers in ({"x-pool-id": "careful"}, {}):
        auto.http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"], headers=headers).raise_for_status()
        assert finished(auto)[-1]["n_pool"] == pool["prefix_len"]


def test_pooled_answer_is_the_unpooled_answer(auto: ProxyStack, explicit: ProxyStack, pool: dict[str, Any]) -> None:
    """The same question with a pool and to a server that has none."""
    body = BODIES["/v1/chat/completions"] | {"temperature": 0, "max_tokens": 8}
    pooled = auto.http.post("/v1/chat/completions", json=body | {"pool_id": pool["pool_id"]}).raise_for_status().json()
    alone = explicit.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert pooled["choices"][0]["message"] == alone["choices"][0]["message"]


def polykv_objects(response: httpx.Response) -> list[dict[str, Any]]:
    """Every `polykv` object of a reply, wherever it lies."""
    if "text/event-stream" in response.headers["content-type"]:
        lines = [line.removeprefix("data:").strip() for line in response.text.splitlines() if line.startswith("data:")]
        bodies = [json.loads(line) for line in lines if line.startswith("{")]
    else:
        bodies = [response.json()]
    places = [place for body in bodies for place in (body, body.get("response", {})) if isinstance(place, dict)]
    return [place["polykv"] for place in places if "polykv" in place]


# The official client ----------------------------------------------------------------------------------------------


@pytest.fixture
def sdk(auto: ProxyStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{auto.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_messages() -> Any:
    return [{"role": "system", "content": SYSTEM}, *TURN]


def test_openai_client_chat(sdk: openai.OpenAI, pool: dict[str, Any]) -> None:
    reply = sdk.chat.completions.create(
        model="any", messages=chat_messages(), max_tokens=12, temperature=0, extra_body={"pool_id": "careful"}
    )
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 12
    assert reply.model_extra is not None
    assert reply.model_extra["polykv"]["prefix_n_tokens"] == pool["prefix_len"]


def test_openai_client_stream(sdk: openai.OpenAI, pool: dict[str, Any]) -> None:
    chunks = list(
        sdk.chat.completions.create(
            model="any",
            messages=chat_messages(),
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"pool_id": "careful"},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    told = [chunk.model_extra["polykv"] for chunk in chunks if chunk.model_extra and "polykv" in chunk.model_extra]
    assert [one["pool_id"] for one in told] == [pool["pool_id"]]


def test_openai_client_tools(sdk: openai.OpenAI, auto: ProxyStack) -> None:
    """Tools belong to the prompt: a pool made with them is shared, and the prompt is the engine's own for that request.

    The model calls no tool, and its template leaves tools out; what counts is the request's way.
    """
    messages = [{"role": "system", "content": SYSTEM}]
    made = auto.http.post("/polykv/pools", json={"messages": messages, "tools": OPENAI_TOOLS, "name": "tooled"})
    tooled = made.raise_for_status().json()
    asked: Any = {"messages": chat_messages(), "tools": OPENAI_TOOLS, "tool_choice": "auto", "max_tokens": 24}
    reply = sdk.chat.completions.create(model="any", temperature=0, extra_body={"pool_id": "tooled"}, **asked)
    assert finished(auto)[-1]["n_pool"] == tooled["prefix_len"]
    direct = loopback.post(
        f"{auto.engine_url}/v1/chat/completions", json=asked | {"temperature": 0}, timeout=120
    ).json()
    assert reply.choices[0].message.content == direct["choices"][0]["message"]["content"] != ""
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
    auto.http.delete(f"/polykv/pools/{tooled['pool_id']}").raise_for_status()


def test_openai_client_responses(sdk: openai.OpenAI, auto: ProxyStack, pool: dict[str, Any]) -> None:
    reply = sdk.responses.create(
        model="any", instructions=SYSTEM, input="Which colour?", max_output_tokens=12, extra_body={"pool_id": "careful"}
    )
    assert reply.output_text
    assert finished(auto)[-1]["n_pool"] == pool["prefix_len"]


def test_openai_client_sees_our_errors_as_its_own(sdk: openai.OpenAI) -> None:
    strict = {"x-polykv-strict": "1"}
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(
            model="any", messages=chat_messages(), extra_body={"pool_id": "nobody"}, extra_headers=strict
        )
    assert caught.value.code == "pool_not_found"
