"""Which headers travel between client and engine: everything but what belongs to one hop, and never a client's key.

Hop-by-hop headers and those that ``Connection`` names are dropped in both directions (RFC 9110 §7.6.1). ``Host`` and
``Content-Length`` are made anew by whoever sends.
"""

from collections.abc import Iterable
from functools import lru_cache

RawHeaders = Iterable[tuple[bytes, bytes]]
"""As they came: in order, casing kept."""

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
REMADE = frozenset({"host", "content-length", "expect"})
KEYS = frozenset({"authorization", "x-api-key", "api-key"})
_NOT_FORWARDED = HOP_BY_HOP | REMADE | KEYS


def text_of(value: bytes) -> str:
    """A header's value as it can be sent on: UTF-8 as it is, anything else as the Latin-1 that it was long ago.

    aiohttp sends UTF-8 only, and leaves out what is none without a word.
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def connection_named(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Give the header names, in lower case, that ``Connection`` marks as belonging to this hop."""
    return frozenset(
        part.strip().lower() for name, value in headers if name.lower() == "connection" for part in value.split(",")
    )


def forwardable(headers: RawHeaders, drop: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """Keep what may go on to the engine, in the order it came, doubles included. ``drop``: what else may not.

    Doubles take the spelling of the first: aiohttp keeps only the last of two that differ in case.
    """
    spelling: dict[str, str] = {}
    return [(spelling.setdefault(lower, name), value) for lower, name, value in _without(headers, _besides(drop))]


@lru_cache(maxsize=16)
def _besides(drop: frozenset[str]) -> frozenset[str]:
    return _NOT_FORWARDED | drop


def returnable(headers: RawHeaders) -> list[tuple[str, str]]:
    """Keep what may go back to the client; ``Content-Length`` stays, because the body does."""
    return [(name, value) for _, name, value in _without(headers, HOP_BY_HOP)]


def _without(headers: RawHeaders, dropped: frozenset[str]) -> list[tuple[str, str, str]]:
    """(lower-case name, name, value) of those that are neither ``dropped`` nor named by ``Connection``, which is."""
    kept: list[tuple[str, str, str]] = []
    connection: list[tuple[str, str]] = []
    for raw, value in headers:
        name = raw.decode("latin-1")
        lower = name.lower()
        if lower not in dropped:
            kept.append((lower, name, text_of(value)))
        elif lower == "connection":
            connection.append((name, text_of(value)))
    if connection and (named := connection_named(connection)):
        return [header for header in kept if header[0] not in named]
    return kept
