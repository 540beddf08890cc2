"""JSON edited as bytes: what is not touched stays as it was written.

Re-serialising would change number texts, escapes, key order and spacing. Here a member of an object is removed,
replaced or added in place. The text must have been validated before (``orjson.loads``): this finds its way in good JSON
only.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import orjson

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SHALLOW = re.compile(_STRING + rb"|[{}\[\],]", re.DOTALL)
_DEEP = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
_SPACE = b" \t\r\n"
_QUOTE, _OPEN, _CLOSE, _COMMA = ord('"'), b"{[", b"}]", ord(",")


@dataclass(frozen=True, slots=True)
class Member:
    """``text[start:end]`` is ``"key": value``; the value starts at ``value``."""

    key: str
    start: int
    value: int
    end: int


def members(text: bytes, at: int = 0) -> tuple[list[Member], int]:
    """The members of the object that begins at or after ``at``, and where its closing brace is."""
    found: list[Member] = []
    pos = text.index(b"{", at) + 1
    depth, key, start, value = 1, None, 0, 0
    while True:
        match = (_SHALLOW if depth == 1 else _DEEP).search(text, pos)
        if match is None:
            raise ValueError("not a complete JSON object")
        pos = match.end()
        token = text[match.start()]
        if token == _QUOTE:
            if depth == 1 and key is None:
                key, start = orjson.loads(match.group()), match.start()
                value = text.index(b":", pos) + 1
                while text[value] in _SPACE:
                    value += 1
                pos = value
        elif token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth -= 1
        if (depth == 0 and token in _CLOSE) or (depth == 1 and token == _COMMA):
            if key is not None:
                end = match.start()
                while text[end - 1] in _SPACE:
                    end -= 1
                found.append(Member(key, start, value, end))
                key = None
            if depth == 0:
                return found, match.start()


def value_at(text: bytes, path: Sequence[str | int]) -> tuple[int, int]:
    """Where the value lies that keys and indices lead to: ``text[start:end]``. Of a repeated key the last."""
    start, end = 0, len(text)
    for step in path:
        if isinstance(step, str):
            member = next(m for m in reversed(members(text, start)[0]) if m.key == step)
            start, end = member.value, member.end
        else:
            start, end = _element(text, start, step)
    return start, end


def _element(text: bytes, at: int, index: int) -> tuple[int, int]:
    """An element of the array that begins at or after ``at``. Raises ValueError when it has fewer."""
    start = pos = text.index(b"[", at) + 1
    depth = 1
    while True:
        match = (_SHALLOW if depth == 1 else _DEEP).search(text, pos)
        if match is None:
            raise ValueError("not a complete JSON array")
        pos = match.end()
        token = text[match.start()]
        if token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth -= 1
        if depth == 0 or (depth == 1 and token == _COMMA):
            if index == 0:
                piece = text[start : match.start()]
                lead = len(piece) - len(piece.lstrip(_SPACE))
                return start + lead, start + len(piece.rstrip(_SPACE))
            if depth == 0:
                raise ValueError("the array has fewer elements")
            index, start = index - 1, pos


def elements(text: bytes) -> list[tuple[int, int]]:
    """Where the objects and arrays of an array begin and end."""
    found: list[tuple[int, int]] = []
    depth, start = 0, 0
    for match in _DEEP.finditer(text):
        token = text[match.start()]
        if token in _OPEN:
            depth += 1
            if depth == 2:
                start = match.start()
        elif token in _CLOSE:
            depth -= 1
            if depth == 1:
                found.append((start, match.end()))
    return found


def edit(
    text: bytes,
    *,
    remove: Collection[str] = (),
    replace: Mapping[str, bytes] | None = None,
    add: Sequence[tuple[str, bytes]] = (),
) -> bytes:
    """The object with members removed (every one of that name), values replaced, and members added at its end."""
    extra = b",".join(orjson.dumps(key) + b":" + value for key, value in add)
    if not remove and not replace:
        return append_to_object(text, extra) if extra else text
    every, close = members(text)
    out = [text[: every[0].start] if every else text[:close]]
    n_kept = 0
    for i, member in enumerate(every):
        if member.key in remove:
            continue
        if n_kept:
            out.append(text[every[i - 1].end : member.start])
        if replace and member.key in replace:
            out += (text[member.start : member.value], replace[member.key])
        else:
            out.append(text[member.start : member.end])
        n_kept += 1
    if extra:
        out += (b"," if n_kept else b"", extra)
    out.append(text[every[-1].end if every else close :])
    return b"".join(out)


def append_to_object(text: bytes, extra: bytes, close: int | None = None) -> bytes:
    """``extra`` (``"key":value`` pairs) as the last members of the object that ends at ``close``, default the last."""
    if close is None:
        close = text.rindex(b"}")
    before = text[:close].rstrip(_SPACE)
    comma = b"" if before.endswith(b"{") else b","
    return b"".join((text[:close], comma, extra, text[close:]))
