"""How deep a body may be nested that is read, and written again somewhere on its way. Pure."""

from typing import Any

import orjson

MAX_LEVELS = 250
"""Schemas of tools have a dozen."""


def is_too_deep(raw: bytes, body: Any) -> bool:
    """It can be read, but not be written again: orjson takes apart more levels than it puts together.

    Some are kept for what a body is put into on its way.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_LEVELS:
        return False
    try:
        orjson.dumps([[[[body]]]], option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:
        return True
    return False
