"""Two bodies share a key exactly when what the engine renders is the same for all that is known."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.control.seen import MARGIN_TOKENS, Seen, SeenBook, chain_of, whole_key

CHAT = "/v1/chat/completions"
ONE, TWO = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}


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
    book = SeenBook(max_entries=2)
    book.remember(1, None, Seen(None, 0, version=1))
    book.remember(2, 7, Seen(7, 10, version=1))
    assert book.find([1, 2], None, 1) == Seen(None, 0, version=1)
    assert book.find([1, 2], None, 2) is None  # the tree changed
    assert book.find([1, 2], 7, 2) == Seen(7, 10, version=1)  # what was compared with one pool stays true
    book.remember(3, 7, Seen(7, 11, version=2))
    book.remember(4, 7, Seen(7, 12, version=2))
    assert len(book) == 2
    assert book.find([2, 3, 4], 7, 2).n_tokens == 12
    assert MARGIN_TOKENS > 0
