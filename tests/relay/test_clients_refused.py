"""What the official openai and anthropic clients make of our 429: how often they try, after how long, what they raise.

The fake engine's session decodes far below the pool's floor, so whoever comes beside it is one too many.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy
from tests.relay.dialect_cases import SYSTEM
from tests.relay.raw import until

FLOOR_TPS = 1e6
MESSAGES: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is 2+2?"}]
NEW = {"session_id": "one-too-many"}


class Tries:
    """When each try was sent, and how it was answered; for the clients' event hooks."""

    def __init__(self) -> None:
        self.sent_s: list[float] = []
        self.answers: list[tuple[int, dict[str, str]]] = []

    async def sent(self, request: Any) -> None:
        self.sent_s.append(time.monotonic())

    async def answered(self, response: Any) -> None:
        self.answers.append((response.status_code, dict(response.headers)))

    @property
    def hooks(self) -> dict[str, list[Any]]:
        return {"request": [self.sent], "response": [self.answered]}

    def assert_waited_as_asked(self) -> None:
        for n in range(1, len(self.sent_s)):
            headers = self.answers[n - 1][1]
            assert 1 <= int(headers["retry-after"]) <= 60
            assert self.sent_s[n] - self.sent_s[n - 1] >= int(headers["retry-after-ms"]) / 1000


@pytest.fixture
def tries() -> Tries:
    return Tries()


@pytest_asyncio.fixture
async def busy(engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Task[Any]]:
    """A session that decodes in a pool with a floor; who is refused is asked to come back after a second or so."""
    monkeypatch.setattr("polykv_proxy.gate.entry.DEFAULT_RETRY_S", 1.0)
    engine.token_s = 0.01
    made = await proxy.client.post("/polykv/pools", json={"messages": MESSAGES[:1], "name": "base"})
    assert made.status_code == 201, made.text
    policy = {"target_tps_per_session": FLOOR_TPS, "mode": "enforced", "settle_max_ms": 0}
    assert (await proxy.client.post("/polykv/pools/base/admission", json=policy)).status_code == 200
    turn = asyncio.create_task(proxy.client.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2000, "session_id": "busy"}
    ))  # fmt: skip
    rate_of = proxy.control.door.rate_of
    await until(lambda: (rate := rate_of("busy")) is not None and rate.tps is not None and rate.tps > 0, 15)
    yield turn
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)


def openai_client(proxy: Proxy, tries: Tries, **more: Any) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(event_hooks=tries.hooks)
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="sk-none", http_client=http, **more)


async def ask(client: openai.AsyncOpenAI) -> Any:
    return await client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=2, extra_body=NEW)


async def test_openai_waits_as_asked_and_raises_in_the_end(proxy: Proxy, busy: asyncio.Task[Any], tries: Tries) -> None:
    async with openai_client(proxy, tries, max_retries=1) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
    assert [status for status, _ in tries.answers] == [429, 429]
    tries.assert_waited_as_asked()
    assert (caught.value.code, caught.value.type) == ("pool_saturated", "rate_limit_error")
    assert caught.value.request_id == tries.answers[-1][1]["x-request-id"]


async def test_openai_gets_its_answer_when_there_is_room(proxy: Proxy, busy: asyncio.Task[Any], tries: Tries) -> None:
    async with openai_client(proxy, tries) as client:
        asking = asyncio.create_task(ask(client))
        await until(lambda: len(tries.answers) == 1)
        busy.cancel()
        reply = await asking
    assert len(reply.choices[0].message.content) == 2
    assert [status for status, _ in tries.answers] == [429, 200]
    tries.assert_waited_as_asked()


async def test_anthropic_waits_as_asked_and_raises_in_the_end(
    proxy: Proxy, busy: asyncio.Task[Any], tries: Tries
) -> None:
    http = anthropic.DefaultAsyncHttpxClient(event_hooks=tries.hooks)
    async with anthropic.AsyncAnthropic(
        base_url=proxy.url, api_key="sk-none", http_client=http, max_retries=1
    ) as client:
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(
                model="toy", system=SYSTEM, messages=MESSAGES[1:], max_tokens=2, extra_body=NEW
            )
    assert [status for status, _ in tries.answers] == [429, 429]
    tries.assert_waited_as_asked()
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"], body["error"]["code"]) == (
        "error",
        "rate_limit_error",
        "pool_saturated",
    )


async def test_a_conflict_on_the_control_plane_is_not_repeated(proxy: Proxy, tries: Tries) -> None:
    """409 is among what the client repeats, unless it is told not to."""
    async with openai_client(proxy, tries) as client:
        for n, kind in ((1, None), (2, openai.ConflictError)):
            making = client.with_options(base_url=proxy.url).post(
                "/polykv/pools", cast_to=object, body={"messages": MESSAGES[:1], "name": "twice"}
            )
            if kind is None:
                await making
            else:
                with pytest.raises(kind):
                    await making
            assert len(tries.sent_s) == n
    assert tries.answers[-1][1]["x-should-retry"] == "false"
