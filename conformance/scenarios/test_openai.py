"""The official openai client, synchronous: every call of it that llama-server answers."""

import json
from typing import Any

import openai
import pydantic
import pytest

from conformance.scenarios.conftest import SYSTEM, TOOL, Told, call_for, chat

MODEL = "smol"
GREEDY: Any = {"model": MODEL, "temperature": 0}


class Shelf(pydantic.BaseModel):
    number: int
    topic: str


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat(client: openai.OpenAI, told: Told) -> None:
    reply = client.chat.completions.create(**GREEDY, messages=chat(), max_tokens=12)
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.completion_tokens <= 12
    assert (reply.model_extra or {})["timings"]["predicted_n"] == reply.usage.completion_tokens
    told.of(reply.model_extra)


def test_chat_with_fields_of_the_proxy(client: openai.OpenAI, told: Told) -> None:
    """llama-server knows none of them and minds none."""
    reply = client.chat.completions.create(
        **GREEDY, messages=chat(), max_tokens=4, extra_body={"pool_id": "house", "session_id": "reader-1"}
    )
    assert reply.choices[0].message.content
    told.of(reply.model_extra)


def test_a_second_turn(client: openai.OpenAI, told: Told) -> None:
    messages = chat("Say hello.")
    for question in ("And now goodbye.", "Thank you."):
        reply = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=8)
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": question},
        ]
    reply = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=8)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens
    told.of(reply.model_extra)


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_stream(client: openai.OpenAI, told: Told, include_usage: bool) -> None:
    stream = client.chat.completions.create(
        **GREEDY, messages=chat(), max_tokens=12, stream=True, stream_options={"include_usage": include_usage}
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends in (["length"], ["stop"])
    assert (chunks[-1].usage is not None) == include_usage
    extras = [chunk.model_extra for chunk in chunks if chunk.model_extra and "polykv" in chunk.model_extra]
    told.of(extras[0] if extras else None)


def test_a_stream_and_a_whole_reply_say_the_same(client: openai.OpenAI) -> None:
    asked = GREEDY | {"messages": chat("Count to five."), "max_tokens": 16, "extra_body": {"cache_prompt": False}}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True)
    said = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert said == whole.choices[0].message.content


def test_the_clients_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY, messages=chat(), max_tokens=6) as stream:
        kinds = [event.type for event in stream]
        final = stream.current_completion_snapshot
    assert "content.delta" in kinds
    assert final.choices[0].message.content


def test_a_stream_that_is_left(client: openai.OpenAI, told: Told) -> None:
    stream = client.chat.completions.create(**GREEDY, messages=chat(), max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    reply = client.chat.completions.create(**GREEDY, messages=chat(), max_tokens=2)
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 2
    told.of(reply.model_extra)


def test_raw_response(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**GREEDY, messages=chat(), max_tokens=2)
    assert raw.status_code == 200
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.retries_taken == 0
    assert raw.parse().choices[0].message.content


def test_streaming_response(client: openai.OpenAI) -> None:
    with client.chat.completions.with_streaming_response.create(
        **GREEDY, messages=chat(), max_tokens=2, stream=True
    ) as raw:
        lines = [line for line in raw.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"


def test_stop_words(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**GREEDY, messages=chat("Say one two three."), max_tokens=24, stop=["e"])
    assert "e" not in (reply.choices[0].message.content or "")


def test_log_probabilities(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**GREEDY, messages=chat(), max_tokens=4, logprobs=True, top_logprobs=3)
    assert reply.choices[0].logprobs is not None
    tokens = reply.choices[0].logprobs.content or []
    assert tokens
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in tokens)


def test_several_choices(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, temperature=1, messages=chat(), max_tokens=4, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1]


# Tools ------------------------------------------------------------------------------------------------------------


def test_a_tool_call(client: openai.OpenAI, told: Told) -> None:
    reply = client.chat.completions.create(
        **GREEDY, messages=chat(call_for("Paris")), tools=[TOOL], tool_choice="required", max_tokens=60
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.id
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris", "unit": "c"}
    told.of(reply.model_extra, "tools")


def test_a_tool_by_name(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    reply = client.chat.completions.create(
        **GREEDY, messages=chat(call_for("Oslo")), tools=[TOOL], tool_choice=choice, max_tokens=60
    )
    assert reply.choices[0].message is not None


def test_a_tool_call_streamed(client: openai.OpenAI) -> None:
    """The pieces of the arguments add up, and only the first has a name."""
    stream = client.chat.completions.create(
        **GREEDY,
        messages=chat(call_for("Rome")),
        tools=[TOOL],
        tool_choice="required",
        max_tokens=60,
        stream=True,
    )
    deltas = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or []]
    names = [call.function.name for call in deltas if call.function and call.function.name]
    assert names == ["get_weather"]
    arguments = "".join(call.function.arguments or "" for call in deltas if call.function)
    assert json.loads(arguments) == {"city": "Rome", "unit": "c"}


def test_the_answer_of_a_tool(client: openai.OpenAI, told: Told) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *chat("The weather in Rome?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "22 degrees"},
    ]
    reply = client.chat.completions.create(**GREEDY, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=8)
    assert reply.choices[0].message.content
    told.of(reply.model_extra, "tools")


# Structured output ------------------------------------------------------------------------------------------------


def test_a_json_object(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        **GREEDY,
        messages=chat("A shelf as JSON."),
        max_tokens=60,
        response_format={"type": "json_object"},
    )
    content = reply.choices[0].message.content or ""
    assert content.lstrip().startswith("{")
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


def test_a_schema(client: openai.OpenAI, told: Told) -> None:
    days = ["Monday", "Friday"]
    schema: Any = {
        "type": "object",
        "properties": {"day": {"type": "string", "enum": days}, "open": {"type": "boolean"}},
        "required": ["day", "open"],
        "additionalProperties": False,
    }
    reply = client.chat.completions.create(
        **GREEDY,
        messages=chat("Is shelf 2 open?"),
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "opening", "strict": True, "schema": schema}},
    )
    said = json.loads(reply.choices[0].message.content or "")
    assert said.keys() == {"day", "open"}
    assert said["day"] in days
    assert isinstance(said["open"], bool)
    told.of(reply.model_extra)


def test_a_parsed_answer(client: openai.OpenAI, told: Told) -> None:
    reply = client.chat.completions.parse(
        **GREEDY, messages=chat("Shelf 3 as JSON."), max_tokens=120, response_format=Shelf
    )
    assert isinstance(reply.choices[0].message.parsed, Shelf)
    told.of(reply.model_extra)


def test_a_parsed_answer_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        **GREEDY, messages=chat("Shelf 4 as JSON."), max_tokens=120, response_format=Shelf
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Shelf)


# Completions and Responses ----------------------------------------------------------------------------------------


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(**GREEDY, prompt="One, two, three,", max_tokens=6)
    assert reply.object == "text_completion"
    assert reply.choices[0].text
    stream = client.completions.create(**GREEDY, prompt="One, two, three,", max_tokens=6, stream=True)
    assert "".join(choice.text for chunk in stream for choice in chunk.choices) == reply.choices[0].text


def test_several_prompts(client: openai.OpenAI) -> None:
    reply = client.completions.create(**GREEDY, prompt=["One, two,", "Red, green,"], max_tokens=3)
    assert len(reply.choices) == 2


def test_responses(client: openai.OpenAI, told: Told) -> None:
    reply = client.responses.create(
        **GREEDY, instructions=SYSTEM, input="Which shelf is open on Monday?", max_output_tokens=12
    )
    assert reply.status == "completed"
    assert reply.output_text
    assert reply.usage is not None
    assert reply.usage.output_tokens <= 12
    told.of(reply.model_extra)


def test_responses_streamed(client: openai.OpenAI, told: Told) -> None:
    stream = client.responses.create(
        **GREEDY, instructions=SYSTEM, input="Which shelf is open on Monday?", max_output_tokens=12, stream=True
    )
    events = list(stream)
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.completed"
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == last.response.output_text
    told.of(last.response.model_extra)


def test_a_tool_call_of_responses(client: openai.OpenAI, told: Told) -> None:
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    reply = client.responses.create(
        **GREEDY,
        instructions=SYSTEM,
        input=call_for("Oslo"),
        tools=[tool],
        tool_choice="required",
        max_output_tokens=60,
    )
    (call,) = [item for item in reply.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Oslo", "unit": "c"}
    told.of(reply.model_extra, "tools")


def test_the_answer_of_a_tool_to_responses(client: openai.OpenAI, told: Told) -> None:
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    said: Any = [
        {"role": "user", "content": "The weather in Rome?"},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "22 degrees"},
    ]
    reply = client.responses.create(**GREEDY, instructions=SYSTEM, input=said, tools=[tool], max_output_tokens=8)
    assert reply.output_text
    told.of(reply.model_extra, "tools")


def test_the_clients_helper_for_responses(client: openai.OpenAI) -> None:
    with client.responses.stream(**GREEDY, instructions=SYSTEM, input="Hello.", max_output_tokens=6) as stream:
        kinds = [event.type for event in stream]
    assert "response.output_text.delta" in kinds


# Errors -----------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_a_bad_request(client: openai.OpenAI) -> None:
    wrong: Any = [{"role": "user", "content": 7}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY, messages=wrong)
    assert caught.value.type == "invalid_request_error"


def test_too_long_for_the_context(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY, messages=chat("too long " * 9000), max_tokens=2)
    assert caught.value.type == "exceed_context_size_error"


def test_an_unknown_path(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.post("/no/such/thing", cast_to=object, body={})
