"""Which door a request target leads to, whatever way it is spelled.

Pure. ``/polykv`` belongs to the proxy and is never relayed: neither ``/polykv/engine`` nor a control route can be
reached through ``//``, ``%2f``, ``..``, ``;`` or another case. The rest goes on as it came, byte for byte.

A session's id is any text: in ``/polykv/sessions/{id}``, and only there, a slash may stand as ``%2F``, as long as
nobody who decodes it is led out of that place.
"""

import re
from enum import Enum
from functools import lru_cache
from urllib.parse import unquote, unquote_to_bytes


class Door(Enum):
    OURS = "a route of the proxy, spelled as it should be"
    SHUT = "would be ours if spelled another way, or leads to the engine's hooks: 404"
    ENGINE = "llama-server's"


_ABSOLUTE = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_NAMED = re.compile(r"/polykv/(?:pools|sessions)/([^/\\;]+)(?:/[a-z]+)?/?\Z")
_SESSION = re.compile(r"/polykv/sessions/([^/\\;]+)\Z")
_HIDDEN = re.compile(r"%(?:2f|5c|2e|3b|00|25)", re.IGNORECASE)
_MAX_DECODE = 4


def target_of(raw_path: str) -> str:
    """The request target in origin form: an absolute one loses scheme and authority."""
    if raw_path.startswith("/"):
        return raw_path
    match = _ABSOLUTE.match(raw_path)
    if match:
        raw_path = raw_path[match.end() :]
    return raw_path if raw_path.startswith(("/", "*")) else "/" + raw_path


def canonical(path: str) -> str:
    """What a lenient server could make of it: decoded, lower case, without parameters, dots and double slashes."""
    parts: list[str] = []
    for name in _segments(path):
        if name == "..":
            if parts:
                parts.pop()
        elif name not in ("", "."):
            parts.append(name)
    return "/" + "/".join(parts)


def _segments(path: str) -> list[str]:
    """The names between the slashes, decoded as often as anybody would."""
    for _ in range(_MAX_DECODE):
        decoded = unquote_to_bytes(path).decode("latin-1")
        if decoded == path:
            break
        path = decoded
    segments = re.split(r"[/\\]+", path)
    return [segment.partition(";")[0].partition("\0")[0].strip().lower() for segment in segments]


@lru_cache(maxsize=512)
def shows_prompts(target: str) -> bool:
    """llama-server's slots show what others asked."""
    return canonical(target.partition("?")[0]).startswith("/slots")


@lru_cache(maxsize=512)
def door_of(target: str) -> Door:
    path = target.partition("?")[0].partition("#")[0]
    flat = canonical(path)
    if flat != "/polykv" and not flat.startswith("/polykv/"):
        return Door.ENGINE
    if flat == "/polykv/engine" or flat.startswith("/polykv/engine/"):
        return Door.SHUT
    if path.rstrip("/") == flat:
        return Door.OURS
    # Names of pools and sessions stand in the path: upper case and harmless escapes are theirs.
    named = _NAMED.match(path)
    if named and not _HIDDEN.search(named[1]) and named[1] not in (".", ".."):
        return Door.OURS
    return Door.OURS if _names_session(path, flat) else Door.SHUT


def _names_session(path: str, flat: str) -> bool:
    """Whether it can only be read as one session's path: what is escaped in its id climbs nowhere and ends nothing."""
    session = _SESSION.match(path)
    if session is None or not flat.startswith("/polykv/sessions/"):
        return False
    segments = _segments(session[1])
    return "." not in segments and ".." not in segments and "\0" not in unquote(session[1])
