"""The official anthropic client: messages, streams, tools, counting."""

import asyncio
from typing import Any

import anthropic
import pytest

from conformance.scenarios.conftest import ANTHROPIC_TOOL, SYSTEM, Told, call_for

ASKED: Any = {
    "model": "smol",
    "system": SYSTEM,
    "messages": [{"role": "user", "content": "Which shelf is open on Monday?"}],
    "extra_body": {"temperature": 0},  # newer models of Anthropic's own take none, so the client has no argument for it
}

CALLED: Any = ASKED | {"messages": [{"role": "user", "content": call_for("Paris")}]}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_messages(claude: anthropic.Anthropic, told: Told) -> None:
    reply = claude.messages.create(**ASKED, max_tokens=12)
    assert (reply.type, reply.role) == ("message", "assistant")
    assert text_of(reply)
    assert reply.stop_reason in ("max_tokens", "end_turn")
    assert reply.usage.output_tokens <= 12
    told.of(reply.model_extra)


def test_a_second_turn(claude: anthropic.Anthropic, told: Told) -> None:
    first = claude.messages.create(**ASKED, max_tokens=8)
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": [{"type": "text", "text": "And on Tuesday?"}]},
    ]
    reply = claude.messages.create(**ASKED | {"messages": messages}, max_tokens=8)
    assert text_of(reply)
    assert reply.usage.cache_read_input_tokens
    told.of(reply.model_extra)


def test_a_prompt_in_marked_blocks(claude: anthropic.Anthropic, told: Told) -> None:
    """As agents write it: every long part in a block, marked for a cache."""
    mark = {"type": "ephemeral"}
    blocks: Any = {
        "system": [{"type": "text", "text": SYSTEM, "cache_control": mark}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "And shelf 9?", "cache_control": mark}]}],
    }
    reply = claude.messages.create(**ASKED | blocks, max_tokens=6)
    assert text_of(reply)
    told.of(reply.model_extra)


def test_raw_events(claude: anthropic.Anthropic) -> None:
    kinds = [event.type for event in claude.messages.create(**ASKED, max_tokens=6, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert "content_block_delta" in kinds


def test_the_clients_streaming_helper(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(**ASKED, max_tokens=8) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == text_of(final)
    assert said
    assert final.usage.output_tokens <= 8


def test_a_stream_that_is_left(claude: anthropic.Anthropic, told: Told) -> None:
    with claude.messages.stream(**ASKED, max_tokens=400) as stream:
        next(iter(stream.text_stream))
    reply = claude.messages.create(**ASKED, max_tokens=2)
    assert reply.usage.output_tokens <= 2
    told.of(reply.model_extra)


def test_stop_sequences(claude: anthropic.Anthropic) -> None:
    reply = claude.messages.create(**ASKED, max_tokens=24, stop_sequences=["e"])
    assert "e" not in text_of(reply)


def test_a_tool_call(claude: anthropic.Anthropic, told: Told) -> None:
    reply = claude.messages.create(**CALLED, max_tokens=60, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"})
    assert reply.stop_reason == "tool_use"
    (call,) = [block for block in reply.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    assert call.input == {"city": "Paris", "unit": "c"}
    told.of(reply.model_extra, "tools")


def test_a_tool_call_streamed(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(**CALLED, max_tokens=60, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris", "unit": "c"})


def test_a_tool_by_name(claude: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "get_weather"}
    reply = claude.messages.create(**CALLED, max_tokens=60, tools=[ANTHROPIC_TOOL], tool_choice=choice)
    assert reply.content


def test_the_answer_of_a_tool(claude: anthropic.Anthropic) -> None:
    messages = [
        *ASKED["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome", "unit": "c"}}
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "22 degrees"}]},
    ]
    reply = claude.messages.create(**ASKED | {"messages": messages}, max_tokens=8, tools=[ANTHROPIC_TOOL])
    assert reply.content


def test_count_tokens(claude: anthropic.Anthropic) -> None:
    few = claude.messages.count_tokens(model="smol", messages=[{"role": "user", "content": "Hello."}])
    many = claude.messages.count_tokens(model="smol", system=SYSTEM, messages=[{"role": "user", "content": "Hello."}])
    assert 0 < few.input_tokens < many.input_tokens


def test_count_tokens_is_what_the_reply_counts(claude: anthropic.Anthropic) -> None:
    asked: Any = {name: ASKED[name] for name in ("model", "system", "messages")} | {"tools": [ANTHROPIC_TOOL]}
    counted = claude.messages.count_tokens(**asked)
    usage = claude.messages.create(**asked, max_tokens=2).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models(claude: anthropic.Anthropic) -> None:
    assert [model.id for model in claude.models.list().data] == ["smol"]


def test_what_is_wrong_is_a_bad_request(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**ASKED | {"messages": [{"role": "user", "content": 7}]}, max_tokens=2)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]


def test_a_stream_of_what_is_wrong_is_a_bad_request(claude: anthropic.Anthropic) -> None:
    wrong: Any = ASKED | {"messages": [{"role": "user", "content": 7}]}
    with pytest.raises(anthropic.BadRequestError), claude.messages.stream(**wrong, max_tokens=2) as stream:
        stream.get_final_message()


def test_an_unknown_path(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.post("/no/such/thing", cast_to=object, body={})


def test_too_long_for_the_context(claude: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "too long " * 9000}]
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(**ASKED | {"messages": long}, max_tokens=2)


async def test_several_at_once(aclaude: anthropic.AsyncAnthropic, told: Told) -> None:
    async def ask(n: int) -> Any:
        asked = ASKED | {"messages": [{"role": "user", "content": f"Where is shelf {n}?"}]}
        return await aclaude.messages.create(**asked, max_tokens=4)

    for reply in await asyncio.gather(*(ask(n) for n in range(1, 7))):
        assert text_of(reply)
        told.of(reply.model_extra)


async def test_streams_at_once(aclaude: anthropic.AsyncAnthropic) -> None:
    async def ask(n: int) -> str:
        asked = ASKED | {"messages": [{"role": "user", "content": f"Where is shelf {n}?"}]}
        async with aclaude.messages.stream(**asked, max_tokens=6) as stream:
            return text_of(await stream.get_final_message())

    assert all(await asyncio.gather(*(ask(n) for n in range(1, 5))))


async def test_a_tool_call_of_the_asynchronous_client(aclaude: anthropic.AsyncAnthropic, told: Told) -> None:
    reply = await aclaude.messages.create(**CALLED, max_tokens=60, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"})
    (call,) = [block for block in reply.content if block.type == "tool_use"]
    assert call.input == {"city": "Paris", "unit": "c"}
    told.of(reply.model_extra, "tools")
