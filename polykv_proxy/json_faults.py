"""What is wrong with a body that is no JSON, and where. Pure."""

import orjson

from polykv_proxy.errors import InvalidJson


def invalid_json(raw: bytes, error: orjson.JSONDecodeError) -> InvalidJson:
    """``error``: what orjson said of ``raw``. Positions are characters, from 0; lines and columns count from 1."""
    what, position, line, column = error.msg, error.pos, error.lineno, error.colno
    try:
        raw.decode()
    except UnicodeDecodeError as e:  # orjson does not say where
        before = raw[: e.start].decode()
        what, position = f"byte {raw[e.start]:#04x} is not UTF-8", len(before)
        line, column = before.count("\n") + 1, position - before.rfind("\n")
    return InvalidJson(
        f"the body is not valid JSON: {what} at line {line} column {column}",
        position=position,
        line=line,
        column=column,
    )


def is_only_too_deep(error: orjson.JSONDecodeError) -> bool:
    """Nothing is wrong with it so far: it has more levels than orjson reads, 1,024."""
    return any(word in error.msg.lower() for word in ("depth", "recursion"))
