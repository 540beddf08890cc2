"""The official openai client, asynchronous: several at once, and what differs from the synchronous one."""

import asyncio
from typing import Any

import openai
import pydantic
import pytest

from conformance.scenarios.conftest import SYSTEM, TOOL, Told, call_for, chat

GREEDY: Any = {"model": "smol", "temperature": 0}


async def test_chat(aclient: openai.AsyncOpenAI, told: Told) -> None:
    reply = await aclient.chat.completions.create(**GREEDY, messages=chat(), max_tokens=4)
    assert reply.choices[0].message.content
    told.of(reply.model_extra)


async def test_more_at_once_than_there_are_slots(aclient: openai.AsyncOpenAI, told: Told) -> None:
    async def ask(n: int) -> Any:
        return await aclient.chat.completions.create(**GREEDY, messages=chat(f"Where is shelf {n}?"), max_tokens=6)

    for reply in await asyncio.gather(*(ask(n) for n in range(1, 9))):
        assert reply.choices[0].message.content
        told.of(reply.model_extra)


async def test_streams_at_once(aclient: openai.AsyncOpenAI) -> None:
    async def ask(n: int) -> list[str | None]:
        stream = await aclient.chat.completions.create(
            **GREEDY, messages=chat(f"Where is shelf {n}?"), max_tokens=6, stream=True
        )
        return [choice.finish_reason async for chunk in stream for choice in chunk.choices]

    for reasons in await asyncio.gather(*(ask(n) for n in range(1, 5))):
        assert [reason for reason in reasons if reason] in (["length"], ["stop"])


async def test_a_stream_that_is_left(aclient: openai.AsyncOpenAI, told: Told) -> None:
    stream = await aclient.chat.completions.create(**GREEDY, messages=chat(), max_tokens=400, stream=True)
    async for _ in stream:
        break
    await stream.close()
    reply = await aclient.chat.completions.create(**GREEDY, messages=chat(), max_tokens=2)
    told.of(reply.model_extra)


async def test_a_request_that_is_cancelled(aclient: openai.AsyncOpenAI, told: Told) -> None:
    asking = asyncio.create_task(aclient.chat.completions.create(**GREEDY, messages=chat(), max_tokens=400))
    await asyncio.sleep(0.3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    reply = await aclient.chat.completions.create(**GREEDY, messages=chat(), max_tokens=2)
    told.of(reply.model_extra)


async def test_the_clients_streaming_helper_with_tools(aclient: openai.AsyncOpenAI) -> None:
    async with aclient.chat.completions.stream(
        **GREEDY, messages=chat(call_for("Bonn")), tools=[TOOL], tool_choice="required", max_tokens=60
    ) as stream:
        kinds = [event.type async for event in stream]
    assert "tool_calls.function.arguments.done" in kinds


async def test_responses(aclient: openai.AsyncOpenAI, told: Told) -> None:
    reply = await aclient.responses.create(**GREEDY, instructions=SYSTEM, input="Hello.", max_output_tokens=4)
    told.of(reply.model_extra)


async def test_responses_streamed(aclient: openai.AsyncOpenAI, told: Told) -> None:
    stream = await aclient.responses.create(
        **GREEDY, instructions=SYSTEM, input="Hello.", max_output_tokens=6, stream=True
    )
    events = [event async for event in stream]
    last = events[-1]
    assert last.type == "response.completed"
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == last.response.output_text
    told.of(last.response.model_extra)


async def test_a_parsed_answer(aclient: openai.AsyncOpenAI, told: Told) -> None:
    class Shelf(pydantic.BaseModel):
        number: int
        topic: str

    reply = await aclient.chat.completions.parse(
        **GREEDY, messages=chat("Shelf 6 as JSON."), max_tokens=120, response_format=Shelf
    )
    assert isinstance(reply.choices[0].message.parsed, Shelf)
    told.of(reply.model_extra)


async def test_what_is_wrong_is_a_bad_request(aclient: openai.AsyncOpenAI) -> None:
    wrong: Any = [{"role": "user", "content": 7}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await aclient.chat.completions.create(**GREEDY, messages=wrong, stream=stream)
        assert caught.value.type == "invalid_request_error"
