"""Edited JSON means what it should, and untouched members keep their bytes."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.relay.json_bytes import append_to_object, edit, members

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, max_size=6)
layouts = st.sampled_from(
    [{"separators": (",", ":")}, {"indent": 2}, {"indent": "\t", "separators": (" ,", " : ")}, {}]
)


@given(objects, layouts, st.booleans())
def test_members_are_found_where_they_are(obj: dict, layout: dict, ascii_only: bool) -> None:
    text = json.dumps(obj, ensure_ascii=ascii_only, **layout).encode("utf-8", "surrogatepass")
    found, close = members(text)
    assert [m.key for m in found] == list(obj)
    assert text[close:] == b"}"
    for m in found:
        assert json.loads(text[m.value : m.end]) == obj[m.key]
        assert json.loads(b"{" + text[m.start : m.end] + b"}") == {m.key: obj[m.key]}


@given(objects, layouts, st.data())
def test_edit_equals_the_same_change_of_the_parsed_object(obj: dict, layout: dict, data: st.DataObject) -> None:
    keys = list(obj)
    remove = set(data.draw(st.lists(st.sampled_from(keys), max_size=3))) if keys else set()
    rest = [k for k in keys if k not in remove]
    replace = dict.fromkeys(data.draw(st.lists(st.sampled_from(rest), max_size=2)), b'["new"]') if rest else {}
    add = [(k, b"7") for k in data.draw(st.sets(st.text(), max_size=2)) if k not in obj]
    expected = {k: (["new"] if k in replace else v) for k, v in obj.items() if k not in remove} | dict.fromkeys(
        [k for k, _ in add], 7
    )
    out = edit(json.dumps(obj, **layout).encode(), remove=remove, replace=replace, add=add)
    assert json.loads(out) == expected
    assert list(json.loads(out)) == list(expected)


def test_untouched_members_keep_number_text_escapes_and_spacing() -> None:
    text = b' { "seed" : 12345678901234567890123 ,\n "t":1.10E-7, "pool_id":3,"s":"\\u00e9\\/\xc3\xa9" }\n'
    assert edit(text, remove={"pool_id"}, add=[("id_slot", b"2")]) == (
        b' { "seed" : 12345678901234567890123 ,\n "t":1.10E-7,"s":"\\u00e9\\/\xc3\xa9","id_slot":2 }\n'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"pool_id":1}', b'{"x":0}'),
        (b'{ "pool_id" : 1 }', b'{ "x":0 }'),
        (b'{"pool_id":1,"a":2}', b'{"a":2,"x":0}'),
        (b'{"a":2,"pool_id":1}', b'{"a":2,"x":0}'),
        (b'{"a":2,"pool_id":[1,{"pool_id":2}],"b":3,"pool_id":"}"}', b'{"a":2,"b":3,"x":0}'),
        (b'{"a":{"pool_id":1}}', b'{"a":{"pool_id":1},"x":0}'),
        (b'{"pool\\u005fid":1,"a":"\\"pool_id\\":1"}', b'{"a":"\\"pool_id\\":1","x":0}'),
        (b"{}", b'{"x":0}'),
        (b"{ }", b'{ "x":0}'),
    ],
)
def test_removed_at_the_top_only(text: bytes, expected: bytes) -> None:
    out = edit(text, remove={"pool_id"}, add=[("x", b"0")])
    assert orjson.loads(out) == orjson.loads(expected)
    assert out.replace(b" ", b"") == expected.replace(b" ", b"")


def test_adding_only_splices() -> None:
    assert edit(b'{"a": 1.0 }\r\n', add=[("b", b"2"), ("c", b'"x"')]) == b'{"a": 1.0 ,"b":2,"c":"x"}\r\n'
    assert append_to_object(b"[{},{}]", b'"p":1') == b'[{},{"p":1}]'


def test_a_megabyte_in_one_string_is_no_problem() -> None:
    text = orjson.dumps({"messages": [{"content": 'a"\\b' * 250_000}], "pool_id": 1})
    assert orjson.loads(edit(text, remove={"pool_id"})) == {"messages": [{"content": 'a"\\b' * 250_000}]}
