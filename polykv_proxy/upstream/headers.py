"""Which headers travel between client and engine: everything but what belongs to one hop, and never a client's key.

Hop-by-hop headers and those that ``Connection`` names are dropped in both directions (RFC 9110 §7.6.1). ``Host`` and
``Content-Length`` are made anew by whoever sends.
"""

from collections.abc import Iterable

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


def connection_named(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Give the header names, in lower case, that ``Connection`` marks as belonging to this hop."""
    return frozenset(
        part.strip().lower() for name, value in headers if name.lower() == "connection" for part in value.split(",")
    )


def forwardable(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Keep what may go on to the engine, in the order it came, doubles included.

    Doubles take the spelling of the first: aiohttp keeps only the last of two that differ in case.
    """
    listed = list(headers)
    dropped = HOP_BY_HOP | REMADE | KEYS | connection_named(listed)
    spelling: dict[str, str] = {}
    return [(spelling.setdefault(name.lower(), name), value) for name, value in listed if name.lower() not in dropped]


def returnable(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Keep what may go back to the client; ``Content-Length`` stays, because the body does."""
    listed = list(headers)
    dropped = HOP_BY_HOP | connection_named(listed)
    return [(name, value) for name, value in listed if name.lower() not in dropped]
