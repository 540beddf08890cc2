"""What a request says: fields of body and headers, what makes sharing impossible, who is talking."""

from typing import Any

import orjson
import pytest
from multidict import CIMultiDict

from polykv_proxy.errors import InvalidJson, RequestError
from polykv_proxy.relay.dialects import (
    ATTACHABLE,
    Call,
    Dialect,
    conversation_of,
    may_carry_fields,
    parse_json,
    read_call,
)
from polykv_proxy.relay.fields import header_safe

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def read(
    path: str = CHAT, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **kw: Any
) -> Call:
    body = body or {}
    kw.setdefault("rewrite_tool_choice", True)
    return read_call(path, orjson.dumps(body), body, CIMultiDict(headers or {}), **kw)


def test_body_beats_header() -> None:
    headers = {"X-Pool-Id": "4", "X-Session-Id": "h", "x-polykv-overcommit": "1"}
    call = read(body={"pool_id": 3, "session_id": "b", "overcommit": False}, headers=headers)
    assert (call.fields.pool, call.fields.session, call.fields.overcommit) == (3, "b", False)
    call = read(headers=headers)
    assert (call.fields.pool, call.fields.session, call.fields.overcommit) == (4, "h", True)
    assert call.explicit


def test_a_pool_by_name_and_by_number() -> None:
    assert read(body={"pool_id": "agents"}).fields.pool == "agents"
    assert read(body={"pool_id": "12"}).fields.pool == 12
    assert read(headers={"x-pool-id": "agents"}).fields.pool == "agents"


def test_null_and_minus_one_mean_not_given() -> None:
    call = read(body={"pool_id": None, "shared_pool_slot": None})
    assert not call.explicit
    call = read(body={"shared_pool_slot": -1, "shared_prefix_n_tokens": -1})
    assert (call.fields.legacy_slot, call.fields.explicit_p) == (None, None)
    assert call.explicit


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pool_id", True),
        ("pool_id", 1.5),
        ("pool_id", [1]),
        ("pool_id", ""),
        ("session_id", 5),
        ("session_id", ""),
        ("session_id", "a\r\nx-evil: 1"),
        ("session_id", "x" * 257),
        ("shared_prefix_n_tokens", "7"),
        ("shared_prefix_n_tokens", -2),
        ("shared_prefix_n_tokens", 1.0),
        ("shared_prefix_n_tokens", True),
        ("shared_prefix_n_tokens", 2**31),
        ("shared_pool_slot", "x"),
        ("shared_pool_slot", -7),
        ("overcommit", "yes"),
        ("overcommit", 1),
    ],
)
def test_wrong_types_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(body={field: value})
    assert caught.value.status == 400
    assert caught.value.param == field


def test_fields_are_gone_from_the_body() -> None:
    call = read(body={"messages": [], "pool_id": 1, "session_id": "s", "overcommit": True, "shared_prefix_n_tokens": 3})
    assert call.body == {"messages": []}
    assert call.carried == {"pool_id", "session_id", "overcommit", "shared_prefix_n_tokens"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"cache_prompt": False}),
        (CHAT, {"id_slot": 2}),
        (CHAT, {"lora": [{"id": 0, "scale": 1}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (
            "/v1/messages",
            {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image", "source": {}}]}]}]},
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}),
        ("/completion", {"prompt": ["a", {"prompt_string": "x", "multimodal_data": ["aGk="]}]}),
    ],
)
def test_incompatible(path: str, body: dict[str, Any]) -> None:
    assert read(path, body).incompatible


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"cache_prompt": True, "id_slot": -1, "lora": []}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}, 5]}),
        ("/v1/messages", {"system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "x"}]}),
        (
            "/v1/messages",
            {"messages": [{"content": [{"type": "tool_use", "id": "1"}, {"type": "tool_result", "content": "ok"}]}]},
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call"}, {"role": "user", "content": [{"type": "input_text", "text": "x"}]}]},
        ),
        ("/v1/responses", {"input": "hello"}),
        ("/completion", {"prompt": {"prompt_string": "x"}}),
        ("/completion", {"prompt": [1, 2, "x"]}),
    ],
)
def test_compatible(path: str, body: dict[str, Any]) -> None:
    assert not read(path, body).incompatible


@pytest.mark.parametrize(
    ("path", "body", "n_choices", "n_prompts"),
    [
        (CHAT, {"n": 3}, 3, 1),
        (CHAT, {"n_cmpl": 2, "n": 3}, 2, 1),
        (CHAT, {"n": True}, 1, 1),
        (CHAT, {"n": "3"}, 1, 1),
        ("/v1/messages", {"n": 3}, 1, 1),
        ("/completion", {"prompt": ["a", "b"], "n": 2}, 2, 2),
        ("/completion", {"prompt": [[1, 2], [3]]}, 1, 2),
        ("/completion", {"prompt": [1, 2, 3]}, 1, 1),
        ("/completion", {"prompt": ["a", 3]}, 1, 1),
        ("/completion", {"prompt": []}, 1, 1),
    ],
)
def test_counts(path: str, body: dict[str, Any], n_choices: int, n_prompts: int) -> None:
    call = read(path, body)
    assert (call.n_choices, call.n_prompts) == (n_choices, n_prompts)


def test_a_named_tool_choice_becomes_required() -> None:
    named = {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []}
    assert read(body=named).replace == {"tool_choice": b'"required"'}
    assert read(body=named).body["tool_choice"] == "required"
    assert read("/v1/responses", {"tool_choice": {"type": "function", "name": "f"}}).replace
    assert not read("/v1/messages", {"tool_choice": {"type": "tool", "name": "f"}}).replace
    assert not read(body=named, rewrite_tool_choice=False).replace
    assert not read(body={"tool_choice": "auto"}).replace


def test_agent_headers_are_no_field() -> None:
    assert not read(headers={"x-session-affinity": "x"}).explicit
    assert not read(headers={"x-claude-code-session-id": "x", "session-id": "y"}).explicit


def test_worth_parsing_only_if_a_field_can_be_in_it() -> None:
    assert not may_carry_fields(b'{"messages":[{"content":"the pool_id is 3, session_id"}]}')
    for name in ("pool_id", "session_id", "shared_pool_slot", "shared_prefix_n_tokens", "overcommit"):
        assert may_carry_fields(orjson.dumps({"a": 1, name: 2}))
    assert may_carry_fields(b'{"\\u0070ool_id":1}')


def test_bad_json_says_where() -> None:
    with pytest.raises(InvalidJson) as caught:
        parse_json(b'{"a": 1,\n "b": }')
    assert caught.value.extra == {"position": 15, "line": 2, "column": 7}


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (b'{"a":1,\n"b":["\xff"]}', (14, 2, 7)),
        (b'{"a":"\xc3\xa4\xc3\xa4", "b":"\xed\xa0\x80"}', (16, 1, 17)),
        (b'{\n"a\xc3', (4, 2, 3)),
    ],
)
def test_and_where_it_is_no_utf_8(raw: bytes, place: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidJson, match=r"byte 0x.. is not UTF-8 at line") as caught:
        parse_json(raw)
    assert tuple(caught.value.extra.values()) == place


def test_conversations_of_all_dialects() -> None:
    first = [{"role": "user", "content": "hi"}]
    more = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}]
    for path, key in ((CHAT, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")):
        old, new = (conversation_of(read(path, {key: m, "model": "m"})) for m in (first, more))
        assert old is not None
        assert new is not None
        mark = old.mark()
        assert mark is not None
        assert new.covers(mark)
        assert new.answered_at(1)
        other = conversation_of(read(path, {key: more, "model": "m", "tools": [{"name": "f"}]}))
        assert other is not None
        assert not other.covers(mark)
    for old_prompt, new_prompt in (("ab", "abc"), ([1, 2], [1, 2, 3])):
        old, new = (conversation_of(read("/completion", {"prompt": p})) for p in (old_prompt, new_prompt))
        assert old is not None
        assert new is not None
        mark = old.mark()
        assert mark is not None
        assert new.covers(mark)
        assert not old.covers(new.mark())  # type: ignore[arg-type]
    assert conversation_of(read("/completion", {"prompt": ["a", "b"]})) is None


def test_the_table_is_the_contracts() -> None:
    assert set(ATTACHABLE) == {
        "/completion",
        "/completions",
        "/v1/completions",
        "/chat/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
    }
    assert set(ATTACHABLE.values()) == set(Dialect)


def test_header_values_are_plain() -> None:
    assert header_safe("a b/c:1") == "a b/c:1"
    assert header_safe("Zoë") == "Zo%C3%AB"
