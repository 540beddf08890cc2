"""The fields of the contract that a client may put into an attachable body, or into headers if it cannot.

Pure. A wrong type is a 400 that names the parameter; ``null`` is the same as absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from polykv_proxy.errors import RequestError
from polykv_proxy.ids import SessionId, SlotId

BODY_FIELDS = frozenset({"pool_id", "session_id", "shared_prefix_n_tokens", "shared_pool_slot", "overcommit"})
ENGINE_FIELDS = frozenset({"shared_pool_gen", "shared_pool_epoch"})
"""The proxy's own words to the engine. A client's are taken out as well."""
OWN_HEADERS = frozenset({"x-pool-id", "x-session-id", "x-polykv-overcommit", "x-polykv-strict"})
"""Headers addressed to the proxy; the engine never sees them."""

MAX_SESSION_ID = 256


@dataclass(slots=True)
class Fields:
    """What the request asks of the proxy. ``given``: at least one field is there."""

    given: bool = False
    pool: int | str | None = None
    session: SessionId | None = None
    explicit_p: int | None = None
    legacy_slot: SlotId | None = None
    overcommit: bool = False
    strict: bool = False


def read_fields(body: Mapping[str, Any], headers: Mapping[str, str]) -> Fields:
    """Body beats header. Raises RequestError (400)."""
    fields = Fields(given=in_headers(headers), strict=_flag(headers.get("x-polykv-strict"), "x-polykv-strict"))
    if not body.keys().isdisjoint(BODY_FIELDS):
        fields.given = fields.given or any(body.get(name) is not None for name in BODY_FIELDS)
    if not fields.given:
        return fields
    pool = body.get("pool_id")
    fields.pool = _pool(pool, "pool_id") if pool is not None else _pool(headers.get("x-pool-id") or None, "x-pool-id")
    session = body.get("session_id")
    if session is None:
        session = headers.get("x-session-id") or None
    if session is not None:
        fields.session = session_id(session, "session_id")
    fields.explicit_p = _count(body, "shared_prefix_n_tokens")
    slot = _count(body, "shared_pool_slot")
    fields.legacy_slot = SlotId(slot) if slot is not None else None
    overcommit = body.get("overcommit")
    if overcommit is None:
        fields.overcommit = _flag(headers.get("x-polykv-overcommit"), "x-polykv-overcommit")
    elif isinstance(overcommit, bool):
        fields.overcommit = overcommit
    else:
        raise RequestError("overcommit must be true or false", param="overcommit")
    return fields


def in_headers(headers: Mapping[str, str]) -> bool:
    """Whether a field comes as a header."""
    return "x-pool-id" in headers or "x-session-id" in headers or "x-polykv-overcommit" in headers


def session_in(body: Mapping[str, Any], headers: Mapping[str, str]) -> SessionId | None:
    """The session that a request names which is refused, if it names one that could be."""
    names = (body.get("session_id"), headers.get("x-session-id"))
    return next((SessionId(str(name)) for name in names if can_be_session_id(name)), None)


def can_be_session_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_SESSION_ID and value.isprintable()


def session_id(value: Any, param: str) -> SessionId:
    if not can_be_session_id(value):
        raise RequestError(f"{param} must be a string of 1 to {MAX_SESSION_ID} printable characters", param=param)
    return SessionId(value)


def header_safe(value: str) -> str:
    """As a header value: plain ASCII stays as it is, anything else percent-encoded."""
    return value if value.isascii() and value.isprintable() else quote(value, safe="/:@ -_.~")


def _pool(value: Any, param: str) -> int | str | None:
    if value is None:
        return None
    if isinstance(value, str) and 0 < len(value) <= 256:
        return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise RequestError(f"{param} must be a pool's id (an integer) or its name (a string)", param=param)


def _count(body: Mapping[str, Any], name: str) -> int | None:
    """A count or an index; -1 is the original design's word for "not given"."""
    value = body.get(name)
    if value is None or (value == -1 and not isinstance(value, bool)):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
        return value
    raise RequestError(f"{name} must be an integer, -1 or above", param=name)


def _flag(value: str | None, name: str) -> bool:
    if value is None or value.strip().lower() in ("", "0", "false"):
        return False
    if value.strip().lower() in ("1", "true"):
        return True
    raise RequestError(f"{name} must be 1 or 0", param=name)
