"""What ``ChatPolyKV`` sends, and what it makes of the answers."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from pydantic.v1 import BaseModel as BaseModelV1

from polykv_proxy.langgraph import ChatPolyKV, OpencotiChatModel
from tests.langgraph.toy_server import RECEIPT, TIMINGS, ToyServer


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return word


@tool
def count(word: str) -> int:
    """Count its letters."""
    return len(word)


def joined(pieces: Any) -> AIMessageChunk:
    whole: AIMessageChunk | None = None
    for piece in pieces:
        whole = piece if whole is None else whole + piece
    assert whole is not None
    return whole


async def ways(model: Any, asked: Any, **kwargs: Any) -> list[AIMessage]:
    """The answer by invoke, ainvoke, stream and astream."""
    streamed = joined(model.stream(asked, **kwargs))
    astreamed = joined([piece async for piece in model.astream(asked, **kwargs)])
    return [model.invoke(asked, **kwargs), await model.ainvoke(asked, **kwargs), streamed, astreamed]


@pytest.mark.parametrize("often", [False, True])
async def test_every_way_to_ask_tells_text_usage_and_metadata_once(toy: ToyServer, often: bool) -> None:
    toy.often, toy.thinks = often, "hm"
    for answer in await ways(toy.model(model="toy"), "hi"):
        assert answer.content == "hello world"
        assert answer.additional_kwargs["reasoning_content"] == "hm"
        assert answer.usage_metadata is not None
        assert (answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == (10, 2)
        assert answer.usage_metadata["input_token_details"] == {"cache_read": 7}
        told = answer.response_metadata
        assert told["polykv"] == RECEIPT
        assert told["timings"] == TIMINGS
        assert (told["pool_id"], told["session_tps"]) == (3, 12.5)
        assert told["backpressure"] == {"sessions_remaining": 2, "ctx_headroom_tokens": 70, "hold_ms": 1.5}
        assert (told["model_provider"], told["model_name"], told["finish_reason"]) == ("polykv", "toy", "stop")


async def test_fields_of_the_instance_hold_until_a_call_gives_its_own(toy: ToyServer) -> None:
    model = toy.model(pool_id=3, session_id="a", extra_body={"top_k": 5, "cache_prompt": True})
    await ways(model, "hi")
    assert [body["pool_id"] for body in toy.bodies] == [3] * 4
    assert {(body["session_id"], body["top_k"], body["cache_prompt"]) for body in toy.bodies} == {("a", 5, True)}
    assert all("overcommit" not in body for body in toy.bodies)
    toy.bodies.clear()
    call = {"session_id": "b", "overcommit": True, "extra_body": {"top_k": 9}}
    await ways(model, "hi", chat_template_kwargs={"enable_thinking": False}, **call)
    for body in toy.bodies:
        assert (body["pool_id"], body["session_id"], body["overcommit"]) == (3, "b", True)
        assert (body["top_k"], body["cache_prompt"]) == (9, True)
        assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_session_and_a_pool_can_be_bound(toy: ToyServer) -> None:
    toy.model(pool_id=1).with_pool("review", "agent-7").invoke("hi")
    assert (toy.bodies[0]["pool_id"], toy.bodies[0]["session_id"]) == ("review", "agent-7")
    toy.model(pool_id=1, session_id="a").bind_tools([look_up], pool_id=2).invoke("hi")
    assert (toy.bodies[1]["pool_id"], toy.bodies[1]["session_id"]) == (2, "a")
    toy.model(pool_id=1).invoke("hi", pool_id=None)
    assert "pool_id" not in toy.bodies[2]


def test_nothing_of_the_environment_of_others_is_shown(toy: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {
        "OPENAI_API_KEY": "sk-secret",
        "OPENAI_ORG_ID": "org",
        "OPENAI_PROJECT_ID": "project",
        "OPENAI_BASE_URL": "http://elsewhere",
        "OPENAI_API_BASE": "http://elsewhere",
        "LANGSMITH_GATEWAY": "true",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    toy.model().invoke("hi")
    (request,) = toy.requests
    assert request.url == "http://toy/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer none"
    assert not {name for name in request.headers if name in ("openai-organization", "openai-project")}
    monkeypatch.setenv("POLYKV_API_KEY", "first, second")
    toy.model().invoke("hi")
    assert toy.requests[1].headers["authorization"] == "Bearer first"


def test_names_of_other_models_change_nothing(toy: ToyServer) -> None:
    for name in ("gpt-5-codex", "gpt-6", "o1"):
        toy.model(model=name, max_tokens=7).invoke("hi")
    assert {request.url.path for request in toy.requests} == {"/v1/chat/completions"}
    assert [body["max_tokens"] for body in toy.bodies] == [7] * 3
    assert all("max_completion_tokens" not in body for body in toy.bodies)


def test_a_named_tool_is_required_and_all_tools_stay(toy: ToyServer) -> None:
    toy.model().bind_tools([look_up, count], tool_choice="look_up").invoke("hi")
    assert toy.bodies[0]["tool_choice"] == "required"
    assert [each["function"]["name"] for each in toy.bodies[0]["tools"]] == ["look_up", "count"]
    toy.model().bind_tools([look_up]).invoke("hi")
    assert "tool_choice" not in toy.bodies[1]


class Word(BaseModel):
    """A word."""

    text: str = Field(description="as it is written")
    length: int = 0


async def test_structured_output_leaves_tools_and_messages_alone(toy: ToyServer) -> None:
    asked = [SystemMessage("be brief"), HumanMessage("one word")]
    model = toy.model().with_structured_output(Word)
    assert [model.invoke(asked), await model.ainvoke(asked)] == [Word(text="one word", length=3)] * 2
    assert list(model.stream(asked))[-1] == Word(text="one word", length=3)
    for body in toy.bodies:
        assert "tools" not in body
        assert body["messages"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one word"},
        ]
        assert body["response_format"]["json_schema"]["schema"]["required"] == ["text"]


def test_structured_output_with_instructions_changes_the_last_message_only(toy: ToyServer) -> None:
    model = toy.model(include_format_instructions=True).with_structured_output(Word)
    model.invoke([SystemMessage("be brief"), HumanMessage("hi"), AIMessage("yes?"), HumanMessage("one word")])
    said = [message["content"] for message in toy.bodies[0]["messages"]]
    assert said[:3] == ["be brief", "hi", "yes?"]
    assert said[3].startswith("one word\n\n")
    assert "as it is written" in said[3]
    assert toy.bodies[0]["response_format"]["type"] == "json_schema"


def test_structured_output_that_was_cut_off_is_told_beside_the_raw_message(toy: ToyServer) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": '{"te'}, "finish_reason": "length"}
    toy.answer = lambda request: httpx.Response(200, json={"model": "toy", "choices": [choice]})
    made: Any = toy.model().with_structured_output(Word, include_raw=True).invoke("hi")
    assert made["raw"].response_metadata["finish_reason"] == "length"
    assert made["parsed"] is None
    assert made["parsing_error"] is not None


def test_thoughts_go_back_with_the_message_they_belong_to(toy: ToyServer) -> None:
    toy.thinks = "hm"
    model = toy.model()
    first = model.invoke("hi")
    model.invoke([HumanMessage("hi"), first, HumanMessage("and?")])
    assert toy.bodies[1]["messages"][1] == {"role": "assistant", "content": "hello world", "reasoning_content": "hm"}


def test_tokens_are_counted_by_the_server(toy: ToyServer) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/apply-template":
            assert body["add_generation_prompt"] is True
            names = [each["function"]["name"] for each in body.get("tools", [])]
            return httpx.Response(200, json={"prompt": str([m["content"] for m in body["messages"]] + names)})
        assert request.url.path == "/tokenize"
        return httpx.Response(200, json={"tokens": list(body["content"].encode())})

    toy.answer = answer
    model = toy.model()
    assert model.get_num_tokens("abc") == 3
    assert model.get_num_tokens_from_messages([HumanMessage("abc")]) == len("['abc']")
    assert model.get_num_tokens_from_messages([HumanMessage("a")], tools=[look_up]) == len("['a', 'look_up']")


async def test_the_profile_is_what_the_server_shows(toy: ToyServer) -> None:
    assert toy.model(context_window=9).profile == {
        "tool_calling": True,
        "structured_output": False,
        "max_input_tokens": 9,
    }
    props = {
        "default_generation_settings": {"n_ctx": 4096},
        "model_alias": "/models/toy.gguf",
        "model_path": "/models/toy.gguf",
        "modalities": {"vision": True},
    }
    toy.answer = lambda request: httpx.Response(200, json=props) if request.url.path == "/props" else None
    fields = {name: getattr(toy.model(), name) for name in ("http_client", "http_async_client", "sdk", "async_sdk")}
    fields["base_url"] = "http://toy"
    for model in (ChatPolyKV.from_server(**fields), await ChatPolyKV.afrom_server(**fields)):
        assert (model.model_name, model.context_window) == ("toy.gguf", 4096)
        assert model.profile is not None
        assert (model.profile["max_input_tokens"], model.profile["image_inputs"]) == (4096, True)
    assert ChatPolyKV.from_server(**fields, model="mine").model_name == "mine"


def test_models_of_pydantic_v1_are_no_tools_either(toy: ToyServer) -> None:
    class Old(BaseModelV1):
        text: str

    found = toy.model().with_structured_output(Old).invoke("hi")
    assert isinstance(found, Old)
    (body,) = toy.bodies
    assert "tools" not in body
    assert body["response_format"]["json_schema"]["schema"]["properties"]["text"]["type"] == "string"


def test_a_template_that_shows_no_tools_is_told(toy: ToyServer) -> None:
    for caps, calls in (({"supports_tool_calls": False}, False), ({"supports_tool_calls": True}, True), ({}, True)):
        toy.answer = lambda request, caps=caps: httpx.Response(200, json={"chat_template_caps": caps})  # type: ignore[misc]
        profile = ChatPolyKV.from_server(base_url="http://toy", sdk=toy.model().sdk).profile
        assert profile is not None
        assert profile["tool_calling"] is calls


def test_who_it_is(toy: ToyServer) -> None:
    model = toy.model(model="toy", pool_id=3)
    assert OpencotiChatModel is ChatPolyKV
    assert model._llm_type == "polykv-chat"
    assert model._get_ls_params()["ls_provider"] == model.invoke("hi").response_metadata["model_provider"] == "polykv"
    assert model.lc_secrets == {"openai_api_key": "POLYKV_API_KEY"}
    assert "sk-mine" not in repr(toy.model(api_key="sk-mine"))
    assert toy.model(base_url="http://toy:1/v1/").openai_api_base == "http://toy:1/v1"


def test_one_model_serves_several_event_loops() -> None:
    async def serve(n: int) -> int:
        """Ask a server of this loop; the model was used in another one before."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            choice = {"index": 0, "message": {"role": "assistant", "content": str(n)}, "finish_reason": "stop"}
            body = json.dumps({"model": "toy", "choices": [choice]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", port[0])
        port[0] = server.sockets[0].getsockname()[1]
        async with server:
            if not models:
                models.append(ChatPolyKV(base_url=f"http://127.0.0.1:{port[0]}"))
            both = await asyncio.gather(models[0].ainvoke("hi"), models[0].ainvoke("hi"))
        return [int(str(each.content)) for each in both] == [n, n]

    port, models = [0], []
    assert asyncio.run(serve(1))
    assert asyncio.run(serve(2))
