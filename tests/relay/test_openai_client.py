"""The official OpenAI client as it is, against the proxy: every call it offers here, and our errors as its own classes.

``max_retries`` stays at the client's default: what it repeats is part of what is checked.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import SYSTEM

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is 2+2?"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest_asyncio.fixture
async def client(proxy: Proxy) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="sk-none") as client:
        yield client


@pytest_asyncio.fixture
async def pool(proxy: Proxy, client: openai.AsyncOpenAI) -> dict[str, Any]:
    """What all chats of this module begin with."""
    answer = await proxy.client.post("/polykv/pools", json={"messages": MESSAGES[:1], "name": "base"})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["toy"]


async def test_chat(client: openai.AsyncOpenAI, pool: dict[str, Any]) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="toy", messages=MESSAGES, max_tokens=5, extra_body={"pool_id": "base", "session_id": "a"}
    )
    reply = raw.parse()
    assert len(reply.choices[0].message.content or "") == 5
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == pool["prefix_len"]
    told = (reply.model_extra or {})["polykv"]
    assert (told["pool_id"], told["session_id"], told["miss_reason"]) == (pool["pool_id"], "a", None)
    assert told["cached_n_tokens"] == told["prefix_n_tokens"] == pool["prefix_len"]
    assert raw.headers["x-pool-id"] == str(pool["pool_id"])
    assert raw.headers["x-session-id"] == "a"


async def test_fields_as_headers(client: openai.AsyncOpenAI, pool: dict[str, Any]) -> None:
    raw = await client.with_options(default_headers={"x-pool-id": "base"}).chat.completions.with_raw_response.create(
        model="toy", messages=MESSAGES, max_tokens=2
    )
    assert raw.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])


@pytest.mark.parametrize("include_usage", [False, True])
async def test_chat_stream(client: openai.AsyncOpenAI, pool: dict[str, Any], include_usage: bool) -> None:
    whole = await client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=7)
    stream = await client.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        max_tokens=7,
        stream=True,
        stream_options={"include_usage": include_usage},
        extra_body={"pool_id": "base"},
    )
    chunks = [chunk async for chunk in stream]
    said = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert said == whole.choices[0].message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    told = [chunk.model_extra["polykv"] for chunk in chunks if chunk.model_extra and "polykv" in chunk.model_extra]
    assert [t["pool_id"] for t in told] == [pool["pool_id"]]
    assert (chunks[-1].usage is not None) == include_usage


async def test_the_clients_own_streaming_helper(client: openai.AsyncOpenAI, pool: dict[str, Any]) -> None:
    """It adds up the events itself and minds every field that it does not know."""
    async with client.chat.completions.stream(
        model="toy", messages=MESSAGES, max_tokens=6, extra_body={"pool_id": "base"}
    ) as stream:
        kinds = [event.type async for event in stream]
        final = stream.current_completion_snapshot
    assert kinds.count("content.delta") == 6
    assert len(final.choices[0].message.content or "") == 6


async def test_a_stream_that_is_left_frees_its_slot(
    client: openai.AsyncOpenAI, proxy: Proxy, engine: FakeEngine
) -> None:
    engine.token_s = 0.01
    stream = await client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=500, stream=True)
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(2):
        while engine.slots[0].state != "idle" or proxy.relay.n_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert engine.requests(CHAT)[-1].left


async def test_choices(client: openai.AsyncOpenAI, pool: dict[str, Any]) -> None:
    reply = await client.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=4, n=3, extra_body={"pool_id": "base"}
    )
    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert (reply.model_extra or {})["polykv"]["pool_id"] == pool["pool_id"]


async def test_tools_reach_the_engine(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    """A named tool becomes ``required``: llama-server takes no other word for it."""
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    await client.chat.completions.create(
        model="toy", messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=2, extra_body={"session_id": "s"}
    )
    got = engine.requests(CHAT)[-1].json()
    assert got["tools"] == [TOOL]
    assert got["tool_choice"] == "required"
    assert "session_id" not in got


async def test_completions(client: openai.AsyncOpenAI, proxy: Proxy) -> None:
    made = await proxy.pool([ord(c) for c in SYSTEM])
    reply = await client.completions.create(
        model="toy", prompt=SYSTEM + "Go on.", max_tokens=3, extra_body={"pool_id": made["pool_id"]}
    )
    assert len(reply.choices[0].text) == 3
    assert (reply.model_extra or {})["polykv"]["cached_n_tokens"] == len(SYSTEM)
    stream = await client.completions.create(model="toy", prompt=SYSTEM + "Go on.", max_tokens=3, stream=True)
    assert "".join([c.text async for chunk in stream for c in chunk.choices]) == reply.choices[0].text
    several = await client.completions.create(
        model="toy", prompt=[SYSTEM + "a", SYSTEM + "b"], max_tokens=2, extra_body={"pool_id": made["pool_id"]}
    )
    assert len(several.choices) == 2


async def test_responses(client: openai.AsyncOpenAI, pool: dict[str, Any]) -> None:
    asked: Any = {"model": "toy", "instructions": SYSTEM, "input": "What is 2+2?", "max_output_tokens": 6}
    reply = await client.responses.create(**asked, extra_body={"pool_id": "base"})
    assert len(reply.output_text) == 6
    assert (reply.model_extra or {})["polykv"]["pool_id"] == pool["pool_id"]
    stream = await client.responses.create(**asked, stream=True, extra_body={"pool_id": "base"})
    events = [event async for event in stream]
    completed = events[-1]
    assert completed.type == "response.completed"
    assert completed.response.output_text == reply.output_text
    assert (completed.response.model_extra or {})["polykv"]["pool_id"] == pool["pool_id"]


# Errors -----------------------------------------------------------------------------------------------------------


async def test_refusals_have_the_clients_own_classes_and_are_not_repeated(
    client: openai.AsyncOpenAI, proxy: Proxy, engine: FakeEngine, pool: dict[str, Any]
) -> None:
    strict = {"x-polykv-strict": "1"}
    cases: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str | None]] = [
        ({"pool_id": "nobody"}, openai.NotFoundError, "pool_not_found", "pool_id"),
        ({"shared_prefix_n_tokens": 9999}, openai.BadRequestError, "prefix_mismatch", "shared_prefix_n_tokens"),
        ({"pool_id": []}, openai.BadRequestError, "invalid_request", "pool_id"),
    ]
    count = 0
    handle = proxy.relay.handle

    async def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return await handle(*args)

    proxy.relay.handle = counted  # type: ignore[method-assign]
    for n, (fields, kind, code, param) in enumerate(cases, 1):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(
                model="toy", messages=MESSAGES, max_tokens=2, extra_body=fields, extra_headers=strict
            )
        assert type(caught.value) is kind
        assert (caught.value.code, caught.value.param) == (code, param)
        assert caught.value.request_id
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["message"]
        assert count == n
    assert engine.requests(CHAT) == []


async def test_too_long_for_the_context_is_the_engines_own_word(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "x" * 20_000}])
    assert caught.value.type == "exceed_context_size_error"
    assert len(engine.requests(CHAT)) == 1


async def test_keys(make_proxy: ProxyMaker, engine: FakeEngine) -> None:
    async with make_proxy(engine.url, api_key="sk-good") as proxy:
        for key in ("sk-bad", "sk-good"):
            async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key) as client:
                if key == "sk-good":
                    await client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=2)
                    continue
                with pytest.raises(openai.AuthenticationError) as caught:
                    await client.chat.completions.create(model="toy", messages=MESSAGES)
                assert caught.value.code == "invalid_api_key"
    assert len(engine.requests(CHAT)) == 1
    assert b"sk-" not in b"".join(v for _, v in engine.requests(CHAT)[0].raw_headers)


async def test_an_engine_that_is_away_is_tried_again_when_we_say(
    client: openai.AsyncOpenAI, engine: FakeEngine, proxy: Proxy
) -> None:
    """503 with Retry-After: the client waits that long and gets its answer."""
    await engine.kill()
    asking = asyncio.create_task(client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=2))
    await asyncio.sleep(0.3)
    await engine.start()
    reply = await asyncio.wait_for(asking, 10)
    assert len(reply.choices[0].message.content or "") == 2


async def test_a_stream_that_breaks_is_an_error_for_the_client(
    client: openai.AsyncOpenAI, engine: FakeEngine, proxy: Proxy
) -> None:
    engine.on(CHAT, "chunk:3", engine.die())
    stream = await client.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=50, stream=True, extra_body={"session_id": "s"}
    )
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "upstream_unavailable"
