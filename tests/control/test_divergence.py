"""Which message, which line: bodies compared as templates read them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.control.divergence import (
    MAX_SHOWN,
    Place,
    Span,
    common_length,
    first_addition,
    first_difference,
    volatile_place,
)

BILLING = "x-anthropic-billing-header: cc_version=2.1.40.{}; cc_entrypoint=cli; cch={};"
RULES = "You are a careful engineer. Read before you write, and say what you do not know.\n" * 4


def chat(*said: str, system: str | None = "Rules.", **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    front = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*front, *({"role": roles[i % 2], "content": t} for i, t in enumerate(said))], **more}


def test_a_prompt_that_goes_on_or_stops_earlier_leaves_nothing() -> None:
    assert first_difference(chat("a"), chat("a", "b", "c")) is None
    assert first_difference(chat("a", "b", "c"), chat("a")) is None
    assert first_difference({"prompt": "one"}, {"prompt": "one two"}) is None


def test_the_message_and_its_line_are_named() -> None:
    old, new = chat("read\nthe file\nnow", "yes", "go"), chat("read\nthat file\nnow", "yes", "go")
    assert first_difference(old, new) == Place("messages", 1, "user", span=Span(5, 14, 7, "that file"))
    assert "read\nthat file\nnow"[5:14] == "that file"


def test_an_earlier_message_beats_a_later_one() -> None:
    place = first_difference(chat("a", "b", "c"), chat("A", "b", "C"))
    assert place is not None
    assert (place.message, place.role) == (1, "user")


def test_a_message_that_is_longer_now_differs() -> None:
    """A moved reminder: what stood at the end of one question stands at the end of the next one."""
    place = first_difference(chat("q1<reminder>", "a"), chat("q1", "a", "q2<reminder>"))
    assert place == Place("messages", 1, "user", span=Span(0, 2, 2, "q1"))


def test_dropped_reasoning_is_named_by_its_key() -> None:
    def thought(text: str | None) -> dict[str, Any]:
        answer = {"role": "assistant", "content": "yes"} | ({"reasoning_content": text} if text is not None else {})
        return {"messages": [{"role": "user", "content": "q"}, answer, {"role": "user", "content": "q2"}]}

    place = first_difference(thought("hm"), thought(None))
    assert place is not None
    assert (place.message, place.role, place.key) == (1, "assistant", "reasoning_content")
    assert first_difference(thought(""), thought(None)) is None


def test_tool_calls_and_roles() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    old = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    new = {"messages": [{"role": "assistant", "content": None, "tool_calls": [{**call, "id": "2"}]}]}
    assert first_difference(old, new) == Place("messages", 0, "assistant", key="tool_calls")
    other = first_difference(chat("a", "b"), {"messages": [*chat("a")["messages"], {"role": "user", "content": "b"}]})
    assert other == Place("messages", 2, "user")


def test_what_comes_after_a_prompt_that_is_all_there() -> None:
    assert first_addition(chat("a"), chat("a", "b", "c")) == Place("messages", 2, "assistant")
    assert first_addition(chat("a"), chat("a")) is None
    assert first_addition(chat("a"), chat("b", "c", "d")) is None


@pytest.mark.parametrize("mark", ["cache_control", "prompt_cache_breakpoint"])
def test_marks_are_no_text_and_a_text_is_a_list_of_one(mark: str) -> None:
    def said(content: Any) -> dict[str, Any]:
        return {"system": [{"type": "text", "text": "Rules."}], "messages": [{"role": "user", "content": content}]}

    plain, marked = said("hello"), said([{"type": "text", "text": "hello", mark: {"type": "ephemeral"}}])
    assert first_difference(plain, marked) is None
    assert first_difference(marked, plain) is None
    other = first_difference(marked, said([{"type": "text", "text": "hallo", mark: {"type": "ephemeral"}}]))
    assert other == Place("messages", 0, "user", part=0, span=Span(0, 5, 1, "hallo"))


def test_a_system_prompt_beside_the_messages_is_message_0_and_compares_with_one_among_them() -> None:
    old = {"system": "Be brief.", "messages": [{"role": "user", "content": "a"}]}
    assert first_difference(old, chat("a", system="Be brief.")) is None
    place = first_difference(chat("a", system="Be brief."), {**old, "system": "Be long."})
    assert place == Place("system", 0, "system", span=Span(0, 8, 3, "Be long."))
    assert first_difference({"input": "a", "instructions": "X"}, {"input": "b", "instructions": "X"}) == Place(
        "input", 0, "user", span=Span(0, 1, 0, "b")
    )


def test_tools_come_between_the_system_prompt_and_the_messages() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert first_difference(chat("a"), chat("b", tools=[tool])) == Place("tools")
    place = first_difference(chat("a"), chat("b", system="Laws.", tools=[tool]))
    assert place is not None
    assert place.of_system
    marked = [{"name": "f", "cache_control": {"type": "ephemeral"}}]
    assert first_difference(chat("a", tools=[{"name": "f"}]), chat("a", tools=marked)) is None


def test_a_line_that_changes_by_itself() -> None:
    one, two = (
        {"system": [{"type": "text", "text": BILLING.format(n, n)}, {"type": "text", "text": RULES}]}
        for n in ("a1f", "b2e")
    )
    place = volatile_place(one, two)
    assert place is not None
    assert (place.field, place.message, place.role, place.part) == ("system", 0, "system", 0)
    assert place.span is not None
    assert place.span.at == len("x-anthropic-billing-header: cc_version=2.1.40.")
    assert place.span.text == BILLING.format("b2e", "b2e")[:MAX_SHOWN]
    days = [chat("a", system=f"Today's date is 2026-11-{n}.\n{RULES}") for n in (29, 30)]
    dated = volatile_place(*days)
    assert dated == Place("messages", 0, "system", span=Span(0, 27, 24, "Today's date is 2026-11-30."))


def test_another_system_prompt_is_not_one_that_changes_by_itself() -> None:
    assert volatile_place(chat("a", system=RULES), chat("a", system="You look at speed. Nothing else matters.")) is None
    assert volatile_place(chat("a", system=RULES), chat("b", system=RULES)) is None
    assert volatile_place(chat("a", system=None), chat("b", system=None)) is None


def test_of_a_long_line_what_differs_is_shown() -> None:
    line = "x" * 300
    place = first_difference({"prompt": line + "a" + line}, {"prompt": line + "b" + line})
    assert place is not None
    assert place.span == Span(280, 360, 300, "x" * 20 + "b" + "x" * 59)


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_a_span_is_of_the_new_text_and_holds_the_first_other_character(front: str, one: str, other: str) -> None:
    old, new = front + one, front + other
    n = common_length(old, new)
    assert old[:n] == new[:n]
    assert old[n : n + 1] != new[n : n + 1] or n == len(old) == len(new)
    place = first_difference(
        {"messages": [{"role": "user", "content": old}]}, {"messages": [{"role": "user", "content": new}]}
    )
    assert (place is None) == (old == new)
    if place is not None and place.span is not None:
        span = place.span
        assert new[span.start : span.end] == span.text
        assert span.start <= span.at <= span.end
        assert span.at == n
        assert len(span.text) <= MAX_SHOWN
        assert "\n" not in span.text


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner),
)


@given(ANYTHING)
def test_whatever_a_body_is_made_of_it_equals_itself(value: Any) -> None:
    for body in ({"messages": value, "system": value}, {"messages": [value, {"role": value, "content": value}]}):
        assert first_difference(body, body) is None
        assert volatile_place(body, body) is None
