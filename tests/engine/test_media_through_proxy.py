"""Chats with pictures on the whole way: client, proxy, engine with a projector. Unpooled, right, and nobody else's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import loopback
from .binaries import binary_path
from .noise import Noise
from .pictures import CHAT, N_ANSWER, QUESTION, Json, chat, picture, seeing, text_of
from .stack import ProxyStack
from .tiny_models import tiny_model_path, write_tiny_projector

pytestmark = pytest.mark.engine

CANARY = "The vault opens with marmalade."

# Pictures in every place where a dialect takes one.
SOURCE = {"type": "base64", "media_type": "image/png", "data": picture(1).partition(",")[2]}
ASKED = {"role": "user", "content": QUESTION}
TOOL_USE = {"type": "tool_use", "id": "call", "name": "look", "input": {}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "call", "content": [{"type": "image", "source": SOURCE}]}
TOOL_CALL = {"type": "function_call", "call_id": "call", "name": "look", "arguments": "{}"}
INPUT_IMAGE = [{"type": "input_image", "image_url": picture(1)}]
MESSAGES: dict[str, list[Json]] = {
    "image": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}],
    "tool-result": [ASKED, {"role": "assistant", "content": [TOOL_USE]}, {"role": "user", "content": [TOOL_RESULT]}],
}
INPUTS: dict[str, list[Json]] = {
    "input-image": [{"role": "user", "content": INPUT_IMAGE}],
    "call-output": [ASKED, TOOL_CALL, {"type": "function_call_output", "call_id": "call", "output": INPUT_IMAGE}],
}
CASES = [
    pytest.param(CHAT, {"messages": [{"role": "user", "content": seeing(1)}], "max_tokens": N_ANSWER}, id="chat"),
    *(
        pytest.param("/v1/messages", {"messages": said, "max_tokens": N_ANSWER}, id=name)
        for name, said in MESSAGES.items()
    ),
    *(
        pytest.param("/v1/responses", {"input": said, "max_output_tokens": N_ANSWER}, id=name)
        for name, said in INPUTS.items()
    ),
]


class Seeing:
    """A proxy in front of an engine with eyes, with a pool of the system message."""

    def __init__(self, stack: ProxyStack, system: str) -> None:
        self.stack, self.system, self.http = stack, system, stack.http
        messages = [{"role": "system", "content": system}]
        made = self.http.post("/polykv/pools", json={"name": "trunk", "messages": messages}).raise_for_status()
        self.pool_id, self.prefix_len = made.json()["pool_id"], made.json()["prefix_len"]

    def ask(self, path: str, body: Json) -> httpx.Response:
        return self.http.post(path, json=body).raise_for_status()

    def right(self, path: str, body: Json) -> Json:
        """The engine's own answer after a full prefill."""
        full = {**body, "cache_prompt": False}
        reply: Json = loopback.post(self.stack.engine_url + path, json=full, timeout=120).raise_for_status().json()
        return reply

    def last_task(self) -> Json:
        stats = loopback.get(f"{self.stack.engine_url}/polykv/engine/stats", timeout=60).json()
        task: Json = stats["finished"][-1]
        return task

    def pools(self) -> list[Json]:
        pools: list[Json] = self.http.get("/polykv/pools").raise_for_status().json()["pools"]
        return pools

    def assert_pooled(self, body: Json, session: str) -> int:
        """A text chat that names nothing shares the pool and gets its answer; the slot it ran in."""
        reply = self.ask(CHAT, body | {"session_id": session}).json()
        task = self.last_task()
        # At least the pool: the slot of a session that shared more keeps that.
        assert task["n_pool"] >= self.prefix_len
        assert (reply["polykv"]["pool_id"], reply["polykv"]["miss_reason"]) == (self.pool_id, None)
        assert text_of(reply) == text_of(self.right(CHAT, body))
        assert "marmalade" not in text_of(reply)
        slot: int = task["id_slot"]
        return slot


@pytest.fixture(scope="module")
def proxy(chat_model: Path, tmp_path_factory: pytest.TempPathFactory, noise: Noise) -> Iterator[Seeing]:
    dir_ = tmp_path_factory.mktemp("seeing")
    projector = dir_ / "mmproj.gguf"
    write_tiny_projector(projector)
    flags = ("-t", "1", "--mmproj", str(projector), "--polykv-max-pools", "16", "--kv-unified")
    with ProxyStack(binary_path("patched"), tiny_model_path("dense", chat_model), *flags, log_dir=dir_) as stack:
        yield Seeing(stack, noise.text(1, 200))


def said_in(reply: Json) -> Any:
    """What the model says, in any dialect."""
    if "output" in reply:
        return [part["text"] for item in reply["output"] for part in item.get("content", [])]
    return reply["choices"][0]["message"] if "choices" in reply else reply["content"]


def untouched(proxy: Seeing) -> list[Any]:
    return [[pool[key] for key in ("pool_id", "seq_id", "residency", "hits", "queries")] for pool in proxy.pools()]


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize(("path", "body"), CASES)
def test_picture_goes_unpooled_and_gets_its_answer(proxy: Seeing, path: str, body: Json, named: bool) -> None:
    before = untouched(proxy)
    body = {**body, "temperature": 0}
    if path == CHAT:
        body["messages"] = [{"role": "system", "content": proxy.system}, *body["messages"]]
    else:
        body["system" if path == "/v1/messages" else "instructions"] = proxy.system
    response = proxy.ask(path, body | ({"pool_id": "trunk"} if named else {}))
    assert said_in(response.json()) == said_in(proxy.right(path, body))
    assert "x-pool-id" not in response.headers
    if named:
        receipt = response.json()["polykv"]
        assert (receipt["pool_id"], receipt["miss_reason"], receipt["prefix_n_tokens"]) == (None, "incompatible", 0)
        assert response.headers["x-cached-prefix-tokens"] == "0"
    else:
        assert "polykv" not in response.json()
    assert untouched(proxy) == before


def test_text_before_and_after_a_picture_in_every_slot(proxy: Seeing) -> None:
    """Four sessions on four slots turn from text to a picture and back; nobody reads what was said beside one."""
    plain, looking = chat(proxy.system, "Good day"), chat(proxy.system, seeing(2, CANARY))
    right = text_of(proxy.right(CHAT, looking))
    slots = set()
    for session in ("a", "b", "c", "d"):
        slot = proxy.assert_pooled(plain, session)
        reply = proxy.ask(CHAT, looking | {"session_id": session}).json()
        assert proxy.last_task()["id_slot"] == slot
        assert reply["polykv"]["miss_reason"] == "incompatible"
        assert text_of(reply) == right
        assert proxy.assert_pooled(plain, session) == slot
        slots.add(slot)
    assert len(slots) == 4


def test_picture_in_a_conversation_that_shares(proxy: Seeing) -> None:
    """It may stay, and later turns of the conversation are unpooled as well."""
    first = chat(proxy.system, "Good day")
    proxy.assert_pooled(first, "painter")
    said: list[Any] = ["Good day"]
    body = first
    for following in (seeing(3), "And which colours?"):
        said += [text_of(proxy.right(CHAT, body)), following]
        body = chat(proxy.system, *said)
        reply = proxy.ask(CHAT, body | {"session_id": "painter"}).json()
        assert text_of(reply) == text_of(proxy.right(CHAT, body))
        assert reply["polykv"]["miss_reason"] == "incompatible"
    proxy.assert_pooled(first, "painter")


def test_slot_with_a_picture_named_as_a_pool(proxy: Seeing) -> None:
    """The older field may name a slot instead of a pool: one that holds a picture has nothing to share."""
    proxy.ask(CHAT, chat(proxy.system, seeing(1)) | {"session_id": "viewer"})
    before = untouched(proxy)
    body = chat(proxy.system, "Good day")
    reply = proxy.ask(CHAT, body | {"shared_pool_slot": proxy.last_task()["id_slot"], "session_id": "copier"}).json()
    assert (reply["polykv"]["pool_id"], reply["polykv"]["miss_reason"]) == (None, "not_resident")
    assert text_of(reply) == text_of(proxy.right(CHAT, body))
    assert untouched(proxy) == before


@pytest.mark.parametrize("path", ["/polykv/pools", "/polykv/pools/{trunk}/fork"], ids=["create", "fork"])
def test_no_pool_of_messages_with_a_picture(proxy: Seeing, path: str) -> None:
    before = untouched(proxy)
    messages = chat(proxy.system, seeing(1))["messages"]
    refused = proxy.http.post(path.format(trunk=proxy.pool_id), json={"messages": messages})
    assert refused.status_code == 501
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("sharing_unsupported", "messages")
    assert "images" in error["message"]
    assert untouched(proxy) == before


def test_no_pool_of_a_session_with_a_picture(proxy: Seeing) -> None:
    """Until its slot holds text again."""
    before = untouched(proxy)
    proxy.ask(CHAT, chat(proxy.system, seeing(1)) | {"session_id": "viewer"})
    refused = proxy.http.post("/polykv/pools", json={"from_session": "viewer"})
    assert refused.status_code == 501
    assert refused.json()["error"]["code"] == "sharing_unsupported"
    assert "media" in refused.json()["error"]["message"]
    assert untouched(proxy) == before
    proxy.assert_pooled(chat(proxy.system, "Good day"), "viewer")
    made = proxy.http.post("/polykv/pools", json={"from_session": "viewer"})
    assert made.status_code == 201
    assert made.json()["prefix_len"] > proxy.prefix_len
    proxy.http.delete(f"/polykv/pools/{made.json()['pool_id']}").raise_for_status()


def test_dry_run_says_incompatible(proxy: Seeing) -> None:
    told = proxy.http.post("/polykv/match", json={"messages": chat(proxy.system, seeing(1))["messages"]}).json()
    assert (told["pool_id"], told["prefix_n_tokens"], told["miss_reason"]) == (None, 0, "incompatible")


def test_streamed_picture_carries_the_object_once(proxy: Seeing) -> None:
    body = chat(proxy.system, seeing(1), stream=True, stream_options={"include_usage": True}, pool_id="trunk")
    response = proxy.ask(CHAT, body)
    assert response.text.count('"polykv":') == 1
    assert '"miss_reason":"incompatible"' in response.text
    assert response.text.rstrip().endswith("data: [DONE]")
