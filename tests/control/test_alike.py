"""Which bodies begin alike, before anybody has rendered them."""

from typing import Any

import pytest

from polykv_proxy.control import alike
from polykv_proxy.control.alike import PromptBook, alike_bytes
from polykv_proxy.ids import SessionId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.tree.prefix import make_tokens
from polykv_proxy.turns import Turn

CHAT = "/v1/chat/completions"
SYSTEM = "You are an agent with many tools. " * 20
TOOLS = [{"type": "function", "function": {"name": f"tool_{i}", "description": "does something"}} for i in range(9)]


class Book:
    def __init__(self, min_tokens: int = 256):
        self.sessions, self.prompts = SessionBook(), PromptBook(min_tokens)

    def enter(self, name: str, body: dict[str, Any], *, path: str = CHAT, over: bool = True) -> alike.Prompt | None:
        turn = self.sessions.begin(self.sessions.name(SessionId(name), 0.0), 0.0)
        prompt = self.prompts.enter(turn, path, body, len(str(body)))
        if over:
            self.end(turn)
        return prompt

    def end(self, turn: Turn) -> None:
        turn.session.turns.pop(turn.turn_id)

    def alike(self, prompt: alike.Prompt | None) -> list[str]:
        assert prompt is not None
        return [str(other.session.session_id) for other in self.prompts.alike(prompt)]


def chat(text: str, system: str = SYSTEM, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}], **fields}


BODIES = {
    CHAT: chat,
    "/v1/messages": lambda text: {"system": SYSTEM, "messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"instructions": SYSTEM, "input": text},
    "/completion": lambda text: {"prompt": SYSTEM + text},
    "/v1/completions": lambda text: {"prompt": [*SYSTEM.encode(), *text.encode()]},
}


def test_two_dialects_are_told_by_tokens_once_both_are_rendered() -> None:
    book = Book(min_tokens=4)
    one = book.enter("one", BODIES["/completion"]("Find it"), path="/completion")
    two = book.enter("two", BODIES["/v1/messages"]("Write it"), path="/v1/messages")
    assert one is not None
    assert two is not None
    book.prompts.rendered(one, make_tokens([1, 2, 3, 4, 5]))
    assert (book.alike(one), book.alike(two)) == ([], [])
    book.prompts.rendered(two, make_tokens([1, 2, 3, 4, 6]))
    assert (book.alike(one), book.alike(two)) == (["two"], ["one"])
    book.prompts.settle(two, [one], version=1)
    assert not book.prompts.is_settled(two, [one], version=1), "to compare tokens again costs nothing"
    book.prompts.leave_out(one)
    assert (book.alike(two), len(book.prompts)) == ([], 1)


@pytest.mark.parametrize("path", BODIES)
def test_in_every_dialect(path: str) -> None:
    book = Book()
    one = book.enter("one", BODIES[path]("Find it"), path=path)
    two = book.enter("two", BODIES[path]("Write it"), path=path)
    assert one is not None
    assert two is not None
    assert book.alike(two) == ["one"]
    assert len(SYSTEM) <= alike_bytes(one, two) < len(one.text)


def test_another_beginning_is_not_alike() -> None:
    book = Book()
    book.enter("one", chat("x"))
    assert book.alike(book.enter("two", chat("x", system="Z" + SYSTEM))) == []


def test_a_short_body_is_nobodys_business() -> None:
    assert Book().enter("one", chat("Hi", system="Short.")) is None
    # A byte a token at least: there cannot be 256 tokens in less.
    assert Book().enter("one", {"prompt": "x" * 255}, path="/completion") is None
    assert Book().enter("one", {"prompt": "x" * 256}, path="/completion") is not None
    assert Book(128).enter("one", {"prompt": "x" * 128}, path="/completion") is not None


def test_tools_alone_are_a_beginning() -> None:
    """Templates print them before or behind the system prompt."""
    book = Book()
    one = book.enter("one", chat("x", system="A.", tools=TOOLS))
    two = book.enter("two", chat("y", system="Another one.", tools=TOOLS))
    assert one is not None
    assert two is not None
    assert book.alike(two) == ["one"]
    assert alike_bytes(one, two) >= one.n_tools > 256
    assert book.alike(book.enter("three", chat("y", system="Third.", tools=TOOLS[:8]))) == []


def test_the_order_of_keys_does_not_matter() -> None:
    book = Book()
    book.enter("one", {"messages": [{"role": "system", "content": SYSTEM}]})
    assert book.alike(book.enter("two", {"messages": [{"content": SYSTEM, "role": "system"}]})) == ["one"]


def test_what_shares_most_comes_first() -> None:
    book = Book()
    for name, text in (("far", "B" * 300), ("near", "A" * 300), ("nearer", "A" * 400)):
        book.enter(name, chat(text))
    assert book.alike(book.enter("me", chat("A" * 399 + "."))) == ["nearer", "near", "far"]


def test_a_session_is_not_alike_itself_unless_both_run() -> None:
    book = Book()
    book.enter("one", chat("first"))
    assert book.alike(book.enter("one", chat("second"), over=False)) == []
    assert book.alike(book.enter("one", chat("third"), over=False)) == ["one"]
    assert len(book.prompts) == 2, "the first was replaced by the second, which still runs"


def test_tokens_take_the_place_of_the_body() -> None:
    book = Book()
    prompt = book.enter("one", chat("x" * 10_000))
    assert prompt is not None
    before = book.prompts._n_bytes
    book.prompts.rendered(prompt, make_tokens(range(100)))
    assert (prompt.body, prompt.tokens is not None) == ({}, True)
    assert book.prompts._n_bytes < before
    book.prompts.leave_out(prompt)
    assert book.prompts._n_bytes == 0
    assert not book.prompts._by_beginning
    assert not book.prompts._of_session


@pytest.mark.parametrize(("limit", "value"), [("MAX_PROMPTS", 3), ("MAX_BYTES", 5000)])
def test_it_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(alike, limit, value)
    book = Book()
    for i in range(9):
        last = book.enter(f"s{i}", chat(f"{i}"))
    assert len(book.prompts) == 3
    assert sorted(book.alike(last)) == ["s6", "s7"]


def test_what_was_compared_in_vain_is_settled_for_all_that_begin_so() -> None:
    book = Book()
    one, two = book.enter("one", chat("A", system=SYSTEM)), book.enter("two", chat("B", system=SYSTEM))
    assert one is not None
    assert two is not None
    assert not book.prompts.is_settled(two, [one], 1)
    book.prompts.settle(two, [one], 1)
    assert book.prompts.is_settled(one, [two], 1)
    assert not book.prompts.is_settled(one, [two], 2), "another tree, another answer"
    longer, other = (book.enter(name, chat("A" * 1000 + name, system=SYSTEM)) for name in ("three", "four"))
    assert longer is not None
    assert other is not None
    assert not book.prompts.is_settled(longer, [other, one], 1), "so much more may be worth a pool"


def test_where_every_token_counts_it_is_settled_to_the_byte() -> None:
    book = Book()
    book.prompts.to_the_byte = lambda: True
    one, two, three = (book.enter(name, chat(text)) for name, text in (("1", "Task 1"), ("2", "Task 2"), ("3", "Go")))
    assert one is not None
    assert two is not None
    assert three is not None
    book.prompts.settle(two, [one], 1)
    assert not book.prompts.is_settled(three, [two, one], 1)
    book.prompts.to_the_byte = lambda: False
    book.prompts.settle(two, [one], 1)
    assert book.prompts.is_settled(three, [two, one], 1)


# Families ------------------------------------------------------------------------------------------------------------


def in_parts(text: str, **fields: Any) -> dict[str, Any]:
    """The same prompt as ``chat``, written otherwise."""
    body = chat(text, **fields)
    for message in body["messages"]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    return body


def test_a_family_is_compared_whatever_its_bodies_begin_with() -> None:
    book = Book()
    one = book.enter("one", chat("Find it", prompt_cache_key="agents"))
    two = book.enter("two", in_parts("Write it", prompt_cache_key="agents"))
    assert one is not None
    assert two is not None
    assert alike_bytes(one, two) < book.prompts.min_bytes
    assert (book.alike(one), book.alike(two)) == (["two"], ["one"])
    assert book.alike(book.enter("three", in_parts("Go", prompt_cache_key="others"))) == ["two"], "they begin alike"
    assert book.alike(book.enter("four", chat("Go", system=SYSTEM[::-1]))) == []
    assert book.alike(book.enter("five", chat("Go", system=SYSTEM[::-1], prompt_cache_key=""))) == ["four"], "no key"


def test_a_large_family_leaves_room_for_those_who_begin_alike() -> None:
    book = Book()
    for i in range(20):
        book.enter(f"member {i}", chat("Go", system=f"{i} " * 300, prompt_cache_key="agents"))
    book.enter("stranger", chat("Find it"))
    last = book.enter("last", chat("Write it", prompt_cache_key="agents"))
    assert book.alike(last) == ["stranger", *(f"member {i}" for i in reversed(range(16, 20)))]


def test_a_family_is_settled_for_those_of_it_who_begin_so() -> None:
    book = Book()
    one = book.enter("one", chat("Go", system="1 " * 300, prompt_cache_key="agents"))
    two = book.enter("two", chat("Go", system="2 " * 300, prompt_cache_key="agents"))
    assert one is not None
    assert two is not None
    book.prompts.settle(two, [one], 1)
    same = book.enter("same", chat("Run", system="2 " * 300, prompt_cache_key="agents"))
    other = book.enter("other", chat("Run", system="3 " * 300, prompt_cache_key="agents"))
    assert same is not None
    assert other is not None
    assert book.prompts.is_settled(same, [one], 1)
    assert not book.prompts.is_settled(other, [one], 1)
    assert not book.prompts.is_settled(same, [two, one], 1), "with one that begins so it was not compared"
