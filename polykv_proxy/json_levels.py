"""How deep a body may be nested that is read, and written again somewhere on its way. Pure."""

from typing import Any

import orjson

from polykv_proxy.errors import RequestError

MAX_LEVELS = 250
"""Schemas of tools have a dozen."""

TOO_DEEP = f"the body has more than {MAX_LEVELS} levels: fields of the proxy cannot be taken out"


class TooDeep(RequestError):
    """Of a body that says something to the proxy, and cannot be rewritten."""


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
