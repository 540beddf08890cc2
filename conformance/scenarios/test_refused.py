"""What both clients make of our own refusals: which they repeat, how often, and after how long.

Only in front of pools: a llama-server refuses nobody. The pool's floor is a rate that nothing decodes at, so whoever
comes beside the one session that it guarantees is one too many.
"""

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from conformance.scenarios.conftest import POOLED, SYSTEM, URL, chat

pytestmark = pytest.mark.skipif(not POOLED, reason="only the proxy with pools refuses anybody")

FLOOR_TPS = 1e6


class Tries:
    """When each try of a client was sent, with its headers and those of its answer; for the clients' event hooks."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, dict[str, str]]] = []
        self.answered: list[tuple[int, dict[str, str]]] = []

    def hooks(self) -> dict[str, list[Any]]:
        return {
            "request": [lambda request: self.sent.append((time.monotonic(), dict(request.headers)))],
            "response": [lambda answer: self.answered.append((answer.status_code, dict(answer.headers)))],
        }

    def assert_waited(self) -> None:
        """As long as each refusal asked."""
        for n, (_, headers) in enumerate(self.answered[: len(self.sent) - 1]):
            waited_s = self.sent[n + 1][0] - self.sent[n][0]
            assert waited_s >= int(headers["retry-after-ms"]) / 1000
            assert 1 <= int(headers["retry-after"]) <= 60


@pytest.fixture
def busy(http: httpx.Client) -> Iterator[None]:
    """The pool has a floor and a session that decodes."""
    policy = {"target_tps_per_session": FLOOR_TPS, "mode": "enforced", "settle_max_ms": 0}
    assert http.post("/polykv/pools/house/admission", json=policy).status_code == 200
    leave, begun = threading.Event(), threading.Event()

    def decode() -> None:
        asked = {"messages": chat("Tell me everything."), "max_tokens": 4000, "stream": True, "ignore_eos": True}
        own_fields = {"session_id": "busy", "overcommit": True}  # it comes in whoever was here before
        with (
            httpx.Client(base_url=URL, timeout=300, trust_env=False) as own,
            own.stream("POST", "/v1/chat/completions", json=asked | own_fields) as answer,
        ):
            for n, _ in enumerate(answer.iter_lines()):
                if n > 20:
                    begun.set()
                if leave.is_set():
                    return

    thread = threading.Thread(target=decode)
    thread.start()
    assert begun.wait(60)
    give_up = time.monotonic() + 60
    # With no time to settle, what is not measured yet refuses nobody.
    while http.get("/polykv/pools/house/capacity").json()["mean_active_tps"] is None:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    yield
    leave.set()
    thread.join(60)
    assert http.delete("/polykv/pools/house/admission").status_code in (200, 404)


@pytest.fixture
def new(request: pytest.FixtureRequest) -> dict[str, str]:
    """A session that nobody knows: a known one is never refused."""
    return {"session_id": request.node.name}


def ask(client: openai.OpenAI, new: dict[str, str]) -> Any:
    return client.chat.completions.create(model="smol", messages=chat(), max_tokens=2, extra_body=new)


def anthropic_asked(new: dict[str, str]) -> Any:
    said = {"system": SYSTEM, "messages": [{"role": "user", "content": "Hello."}]}
    return {"model": "smol", "max_tokens": 2, "extra_body": new, **said}


def test_openai_tries_three_times_and_waits_as_asked(busy: None, new: dict[str, str]) -> None:
    tries = Tries()
    with (
        openai.OpenAI(
            base_url=f"{URL}/v1", api_key="sk-none", http_client=openai.DefaultHttpxClient(event_hooks=tries.hooks())
        ) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        ask(client, new)
    assert [status for status, _ in tries.answered] == [429] * 3
    assert [headers["x-stainless-retry-count"] for _, headers in tries.sent] == ["0", "1", "2"]
    tries.assert_waited()
    assert (caught.value.code, caught.value.type) == ("pool_saturated", "rate_limit_error")
    assert caught.value.request_id == tries.answered[-1][1]["x-request-id"]


def test_openai_is_served_when_there_is_room(busy: None, new: dict[str, str], http: httpx.Client) -> None:
    """Here: when the floor is lifted."""
    tries = Tries()

    def make_room(answer: Any) -> None:
        http.delete("/polykv/pools/house/admission")

    hooks = tries.hooks()
    hooks["response"].append(make_room)
    with openai.OpenAI(
        base_url=f"{URL}/v1", api_key="sk-none", http_client=openai.DefaultHttpxClient(event_hooks=hooks)
    ) as client:
        reply = ask(client, new)
    assert reply.choices[0].message.content
    assert [status for status, _ in tries.answered] == [429, 200]
    tries.assert_waited()


def test_openai_without_retries_fails_at_once(busy: None, new: dict[str, str]) -> None:
    tries = Tries()
    with (
        openai.OpenAI(
            base_url=f"{URL}/v1",
            api_key="sk-none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(event_hooks=tries.hooks()),
        ) as client,
        pytest.raises(openai.RateLimitError),
    ):
        ask(client, new)
    assert len(tries.sent) == 1


async def test_openai_asynchronous_tries_three_times_and_waits_as_asked(busy: None, new: dict[str, str]) -> None:
    tries = Tries()
    hooks = {name: [_asynchronous(hook) for hook in hooks] for name, hooks in tries.hooks().items()}
    async with openai.AsyncOpenAI(
        base_url=f"{URL}/v1", api_key="sk-none", http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks)
    ) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="smol", messages=chat(), max_tokens=2, extra_body=new)
    assert [status for status, _ in tries.answered] == [429] * 3
    tries.assert_waited()
    assert caught.value.code == "pool_saturated"


def _asynchronous(hook: Callable[[Any], None]) -> Callable[[Any], Awaitable[None]]:
    async def call(about: Any) -> None:
        hook(about)

    return call


def test_openai_streams_are_refused_before_they_begin(busy: None, new: dict[str, str]) -> None:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="sk-none", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="smol", messages=chat(), max_tokens=2, extra_body=new, stream=True)
        assert caught.value.code == "pool_saturated"
        with pytest.raises(openai.RateLimitError) as caught:
            client.responses.create(model="smol", instructions=SYSTEM, input="Hello.", extra_body=new, stream=True)
        assert caught.value.code == "pool_saturated"


def test_anthropic_tries_three_times_and_waits_as_asked(busy: None, new: dict[str, str]) -> None:
    tries = Tries()
    with (
        anthropic.Anthropic(
            base_url=URL, api_key="sk-none", http_client=anthropic.DefaultHttpxClient(event_hooks=tries.hooks())
        ) as client,
        pytest.raises(anthropic.RateLimitError) as caught,
    ):
        client.messages.create(**anthropic_asked(new))
    assert [status for status, _ in tries.answered] == [429] * 3
    tries.assert_waited()
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert (body["error"]["type"], body["error"]["code"]) == ("rate_limit_error", "pool_saturated")


def test_anthropic_streams_are_refused_before_they_begin(busy: None, new: dict[str, str]) -> None:
    with (
        anthropic.Anthropic(base_url=URL, api_key="sk-none", max_retries=0) as client,
        pytest.raises(anthropic.RateLimitError) as caught,
        client.messages.stream(**anthropic_asked(new)) as stream,
    ):
        stream.get_final_message()
    body: Any = caught.value.body
    assert body["error"]["code"] == "pool_saturated"


def test_anthropic_is_served_when_there_is_room(busy: None, new: dict[str, str], http: httpx.Client) -> None:
    tries = Tries()
    hooks = tries.hooks()
    hooks["response"].append(lambda answer: http.delete("/polykv/pools/house/admission"))
    with anthropic.Anthropic(
        base_url=URL, api_key="sk-none", http_client=anthropic.DefaultHttpxClient(event_hooks=hooks)
    ) as client:
        reply = client.messages.create(**anthropic_asked(new))
    assert reply.content
    assert [status for status, _ in tries.answered] == [429, 200]
    tries.assert_waited()


def test_a_conflict_on_the_control_plane_is_not_repeated() -> None:
    """409 is among what the client repeats unless it is told not to."""
    tries = Tries()
    with (
        openai.OpenAI(
            base_url=URL, api_key="sk-none", http_client=openai.DefaultHttpxClient(event_hooks=tries.hooks())
        ) as client,
        pytest.raises(openai.ConflictError),
    ):
        client.post("/polykv/pools", cast_to=object, body={"messages": chat()[:1], "name": "tools"})
    assert len(tries.sent) == 1
    assert tries.answered[0][1]["x-should-retry"] == "false"
