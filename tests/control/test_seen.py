"""Two bodies share a key exactly when what the engine renders is the same for all that is known."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.control.seen import CUE_TOKENS, Conversation, Seen, SeenBook

CHAT = "/v1/chat/completions"
ONE, TWO = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}


def chain_of(path: str, body: dict[str, Any]) -> list[int]:
    return list(Conversation.of(path, body).chain)


def whole_key(path: str, body: dict[str, Any]) -> int:
    return Conversation.of(path, body).whole


def test_the_chain_of_a_longer_chat_begins_with_that_of_a_shorter_one():
    short, long = chain_of(CHAT, {"messages": [ONE]}), chain_of(CHAT, {"messages": [ONE, TWO]})
    assert long[:1] == short
    assert len(long) == 2
    assert chain_of(CHAT, {"messages": [TWO]}) != short
    assert chain_of("/chat/completions", {"messages": [ONE]}) == short
    assert chain_of("/v1/messages", {"messages": [ONE]}) != short


def test_sampling_does_not_count_and_everything_unknown_does():
    base = chain_of(CHAT, {"messages": [ONE]})
    assert chain_of(CHAT, {"messages": [ONE], "temperature": 1, "stream": True, "max_tokens": 5}) == base
    for more in (
        {"tools": []},
        {"chat_template_kwargs": {}},
        {"tool_choice": "required"},
        {"reasoning_effort": "low"},
        {"response_format": {"type": "json_object"}},
        {"something_new": 1},
    ):
        assert chain_of(CHAT, {"messages": [ONE], **more}) != base
        assert whole_key(CHAT, {"messages": [ONE], **more}) != whole_key(CHAT, {"messages": [ONE]})


def test_the_order_of_keys_counts_inside_and_not_outside():
    """Templates print tools as they come."""
    a = {"tools": [{"name": "x", "description": "y"}], "messages": [ONE]}
    b = {"messages": [ONE], "tools": [{"name": "x", "description": "y"}]}
    c = {"messages": [ONE], "tools": [{"description": "y", "name": "x"}]}
    assert chain_of(CHAT, a) == chain_of(CHAT, b) != chain_of(CHAT, c)


def test_what_is_no_list_of_messages_has_no_chain():
    for path, body in (
        ("/completion", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        (CHAT, {"messages": "x"}),
        (CHAT, {}),
    ):
        assert chain_of(path, body) == []
    assert len(chain_of("/v1/responses", {"input": [ONE]})) == 1


@given(st.lists(st.dictionaries(st.sampled_from(["role", "content"]), st.text(max_size=3)), max_size=4), st.data())
def test_messages_cannot_be_cut_differently_into_the_same_chain(messages, data):
    other = data.draw(st.lists(st.dictionaries(st.sampled_from(["role", "content"]), st.text(max_size=3)), max_size=4))
    same = chain_of(CHAT, {"messages": messages}) == chain_of(CHAT, {"messages": other})
    assert same == ([list(m.items()) for m in messages] == [list(m.items()) for m in other])


def test_the_book_forgets_the_oldest_and_what_belongs_to_another_tree():
    a, b = (Conversation.of("/completion", {"prompt": text}) for text in "ab")
    book = SeenBook(max_entries=2)
    book.remember(a.whole, None, Seen(None, 0, version=1))
    book.remember(b.whole, 7, Seen(7, 10, version=1))
    assert book.find(a, None, 1) == Seen(None, 0, version=1)
    assert book.find(a, None, 2) is None  # the tree changed
    assert book.find(b, 7, 2) == Seen(7, 10, version=1)  # what was compared with one pool stays true
    book.remember(a.whole, 7, Seen(7, 11, version=2))
    book.remember(a.whole, 8, Seen(8, 12, version=2))
    assert len(book) == 2
    assert book.find(b, 7, 2) is None
    assert book.find(a, 8, 2).n_tokens == 12


# Conversations that grew --------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "rules"}
ANSWER = {"role": "assistant", "content": "well"}
SAID = [SYSTEM, ONE, ANSWER, TWO]
MORE = [ANSWER, ONE]
TOKENS = array("i", range(200))
KEPT = TOKENS + array("i", range(90))
CHANGED = TOKENS[:100] + array("i", [9]) + KEPT[101:]


def chat(messages: list[Any], **more: Any) -> Conversation:
    return Conversation.of(CHAT, {"messages": messages, **more})


def book_of(after: "array[int]" = KEPT, said: list[Any] = SAID, more: list[Any] = MORE, **fields: Any) -> SeenBook:
    """It has seen ``said`` match pool 7 for 50 tokens, and rendered it with ``more`` once in another conversation."""
    book = SeenBook()
    other = [SYSTEM | {"content": "other rules"}, *said[1:]]
    book.rendered(chat(other, **fields), TOKENS)
    book.rendered(chat(other + more, **fields), after)
    book.rendered(chat(said, **fields), TOKENS)
    book.remember(chat(said, **fields).chain[-1], 7, Seen(7, 50, version=1))
    return book


def test_what_grows_as_another_did_without_a_change_is_known():
    assert book_of().find(chat(SAID + MORE), 7, 1) == Seen(7, 50, version=1)
    assert book_of().find(chat(SAID + MORE + MORE, temperature=1), 7, 1) == Seen(7, 50, version=1)
    assert book_of().find(chat(SAID), 7, 1) == Seen(7, 50, version=1)


def test_what_was_rendered_differently_once_it_grew_is_not_trusted_again():
    book = book_of(CHANGED)
    assert book.find(chat(SAID + MORE), 7, 1) is None
    book.rendered(chat([ONE, *SAID[1:]]), TOKENS)
    book.rendered(chat([ONE, *SAID[1:], *MORE]), KEPT)  # another time it went well
    assert book.find(chat(SAID + MORE), 7, 1) is None


def test_only_the_cue_to_answer_may_go_when_a_conversation_grows():
    for n_kept, known in ((CUE_TOKENS, True), (CUE_TOKENS + 1, False)):
        after = TOKENS[: len(TOKENS) - n_kept] + array("i", [5] * 90)
        assert (book_of(after).find(chat(SAID + MORE), 7, 1) is not None) == known
    assert book_of(TOKENS[:100]).find(chat(SAID + MORE), 7, 1) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "look"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"parallel_tool_calls": True},
        {"reasoning_effort": "high"},
        {"reasoning_format": "none"},
        {"add_generation_prompt": False},
        {"grammar": "root ::= [a-z]"},
        {"json_schema": {"type": "object"}},
        {"lora": []},
        {"anything_new": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_with_other_fields_nothing_is_known(fields: dict[str, Any]):
    for messages in (SAID, SAID + MORE):
        assert book_of().find(chat(messages, **fields), 7, 1) is None
        assert book_of(**fields).find(chat(messages), 7, 1) is None
        assert book_of(**fields).find(chat(messages, **fields), 7, 1) is not None


@pytest.mark.parametrize("at", range(len(SAID)))
@pytest.mark.parametrize(
    "edit",
    [
        {"content": "edited"},
        {"content": [{"type": "text", "text": "one"}]},
        {"name": "ann"},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"type": "function"}]},
        {"tool_call_id": "1"},
        {"role": "developer"},
        {"cache_control": {"type": "ephemeral"}},
    ],
    ids=lambda edit: next(iter(edit)),
)
def test_with_an_edited_message_nothing_is_known(at: int, edit: dict[str, Any]):
    edited = [*SAID[:at], SAID[at] | edit, *SAID[at + 1 :]]
    assert book_of().find(chat(edited + MORE), 7, 1) is None
    assert book_of(said=edited).find(chat(SAID + MORE), 7, 1) is None


@pytest.mark.parametrize(
    "more",
    [
        [ANSWER | {"reasoning_content": "hm"}, ONE],
        [ANSWER | {"tool_calls": [{"type": "function"}]}, {"role": "tool", "content": "1"}],
        [ANSWER | {"content": "<think>hm</think>well"}, ONE],
        [ANSWER, ONE | {"name": "ann"}],
        [ANSWER, ONE | {"content": [{"type": "text", "text": "one"}]}],
        [ANSWER, ONE | {"content": "<tool_response>1</tool_response>"}],
        [ANSWER, SYSTEM],
        [ANSWER],
        [ONE, ANSWER],
        ["no object"],
    ],
)
def test_growing_in_another_way_is_another_question(more: list[Any]):
    assert book_of().find(chat(SAID + more), 7, 1) is None
    assert book_of(more=more).find(chat(SAID + more), 7, 1) is not None
    assert book_of(more=more).find(chat(SAID + MORE), 7, 1) is None


def test_what_comes_before_counts_too():
    """Reasoning in the old part: whether it stays is known only of conversations that had some."""
    thought = [SYSTEM, ONE, ANSWER | {"reasoning_content": "hm"}, TWO]
    book = book_of()
    book.remember(chat(thought).chain[-1], 7, Seen(7, 50, version=1))
    assert book.find(chat(thought + MORE), 7, 1) is None


def test_a_pools_own_messages_need_no_proof():
    """The pool was cut where continuations of all kinds part."""
    book = SeenBook()
    book.remember(chat([SYSTEM]).chain[-1], None, Seen(7, 50, version=1, for_all=True))
    assert book.find(chat(SAID), None, 1).n_tokens == 50
    assert book.find(chat(SAID), None, 2) is None
    assert book.find(chat(SAID[1:]), None, 1) is None


def test_the_next_start_of_the_engine_knows_nothing():
    book = book_of()
    book.open(None)
    assert book.find(chat(SAID + MORE), 7, 1) is not None
    book.open("2")
    assert book.find(chat(SAID + MORE), 7, 1) is None
    assert len(book) == 0


def test_the_memory_is_bounded():
    book = SeenBook(max_entries=3)
    for i in range(50):
        messages = [SYSTEM, ONE | {"content": str(i)}]
        book.rendered(chat(messages, n_new=i), TOKENS)
        book.rendered(chat(messages + MORE, n_new=i), KEPT)
    assert len(book._stems) == len(book._keeps) == 3
