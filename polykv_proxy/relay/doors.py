"""Which door a request target leads to, whatever way it is spelled.

Pure. ``/polykv`` belongs to the proxy and is never relayed: neither ``/polykv/engine`` nor a control route can be
reached through ``//``, ``%2f``, ``%u002f``, ``..``, ``;`` or another case. The rest goes on as it came, byte for byte.

llama-server decodes a path once before it looks for a route, ``%XX`` and ``%uXXXX``, and the parts of it that are
parameters a second time. So what counts is not only where a path leads when all of it is decoded and tidied up, but
also every way of reading it before that.

A session's id is any text: in ``/polykv/sessions/{id}``, and only there, a slash may stand as ``%2F``, as long as
nobody who decodes it is led out of that place.
"""

import re
from collections.abc import Iterator
from enum import Enum
from functools import lru_cache
from urllib.parse import unquote


class Door(Enum):
    OURS = "a route of the proxy, spelled as it should be"
    SHUT = "would be ours if spelled another way, or leads to the engine's hooks: 404"
    ENGINE = "llama-server's"


_ABSOLUTE = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_NAMED = re.compile(r"/polykv/(?:pools|sessions)/([^/\\;]+)(?:/[a-z]+)?/?\Z")
_SESSION = re.compile(r"/polykv/sessions/([^/\\;]+)\Z")
_HIDDEN = re.compile(r"%(?:2f|5c|2e|3b|00|25|u)", re.IGNORECASE)
_ESCAPE = re.compile(r"%u([0-9A-Fa-f]{4})|%([0-9A-Fa-f]{2})")
_ANY_ESCAPE = re.compile(_ESCAPE.pattern, re.IGNORECASE)
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
    return "/" + "/".join(_tidied(_segments(path)))


@lru_cache(maxsize=512)
def engine_path(target: str) -> str:
    """The path that llama-server looks up for a target: without query and fragment, decoded once."""
    path = target.partition("?")[0].partition("#")[0]
    return (
        _ESCAPE.sub(_character, _bytewise(path)).encode("latin-1").decode("utf-8", "surrogateescape")
        if "%" in path
        else path
    )


def _bytewise(path: str) -> str:
    """Each character stands for a byte."""
    return path.encode("utf-8", "surrogateescape").decode("latin-1")


def _character(escape: re.Match[str]) -> str:
    if escape[2]:
        return chr(int(escape[2], 16))
    # Half of a pair of UTF-16 is nothing to it.
    return chr(int(escape[1], 16)).encode("utf-8", "ignore").decode("latin-1")


def _readings(path: str) -> list[str]:
    """The path as it is, decoded once, twice, and as often as anybody would."""
    readings = [_bytewise(path)]
    while len(readings) <= _MAX_DECODE and (decoded := _ANY_ESCAPE.sub(_character, readings[-1])) != readings[-1]:
        readings.append(decoded)
    return readings


def _segments(path: str) -> list[str]:
    """The names between the slashes, decoded as often as anybody would."""
    return _split(_readings(path)[-1])


def _split(path: str) -> list[str]:
    segments = re.split(r"[/\\]+", path)
    return [segment.partition(";")[0].partition("\0")[0].strip().lower() for segment in segments]


def _tidied(segments: list[str]) -> list[str]:
    parts: list[str] = []
    for name in segments:
        if name == "..":
            if parts:
                parts.pop()
        elif name not in ("", "."):
            parts.append(name)
    return parts


def _could_begin(path: str) -> Iterator[list[str]]:
    """What the names of a path could be to a server that decodes less or more, and tidies it up or not."""
    for reading in _readings(path):
        segments = _split(reading)
        yield _tidied(segments)
        yield [name for name in segments if name not in ("", ".")]


@lru_cache(maxsize=512)
def shows_prompts(target: str) -> bool:
    """llama-server's slots show what others asked."""
    return any(names[:1] and names[0].startswith("slots") for names in _could_begin(target.partition("?")[0]))


@lru_cache(maxsize=512)
def door_of(target: str) -> Door:
    path = target.partition("?")[0].partition("#")[0]
    readings = list(_could_begin(path))
    if all(names[:1] != ["polykv"] for names in readings):
        return Door.ENGINE
    if any(names[:2] == ["polykv", "engine"] for names in readings):
        return Door.SHUT
    flat = canonical(path)
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
