"""``GET /slots`` and ``GET /props``: llama-server's own answer, with what only the proxy knows beside it.

Members are put into the bytes as they came; nothing else of them changes, no number's text and no space. An answer that
is not what it always was (another status, no JSON, another shape) goes on untouched.
"""

from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

import polykv_proxy
from polykv_proxy.control import Control
from polykv_proxy.control.policies import FIELDS as POLICY_FIELDS
from polykv_proxy.ids import SlotId
from polykv_proxy.relay.json_bytes import edit, elements, members
from polykv_proxy.relay.pump import begin, pump_plain, relayed_body
from polykv_proxy.turns import Session
from polykv_proxy.upstream import SlotStats

_CONTEXT = ("ctx_used", "ctx_total", "ctx_headroom_tokens")
_UNPACKED = frozenset({"accept-encoding"})
"""What comes compressed could not be read here."""


async def engine_view(
    request: web.Request, control: Control, target: str, path: str, request_id: str
) -> web.StreamResponse:
    """Serve one of ``VIEWS``. Raises UpstreamError and its heirs."""
    body, extra = await relayed_body(request), [("x-request-id", request_id)]
    async with await control.engine.open("GET", target, request.raw_headers, body, drop=_UNPACKED) as upstream:
        if upstream.status != 200:
            return await pump_plain(request, upstream, extra, None)
        text = await upstream.read()
        await control.feed.fresh()
        text = VIEWS[path](text, control)
        response = await begin(request, upstream, [*extra, ("Content-Length", str(len(text)))])
    await response.write(text)
    await response.write_eof()
    return response


def with_slots(text: bytes, control: Control) -> bytes:
    """Every entry of ``/slots`` with whose slot that is. ``null``: nobody's that is known, or not known."""
    entries = _parsed(text)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return text
    control.rates.note()
    owners = _owners(control)
    parts: list[bytes] = []
    done = 0
    for entry, (start, end) in zip(entries, elements(text), strict=True):
        parts += (text[done:start], _put(text[start:end], entry, _of_slot(entry, owners, control)))
        done = end
    return b"".join((*parts, text[done:]))


def with_policy(text: bytes, control: Control) -> bytes:
    """``/props`` with ``opencoti.polykv``; another ``opencoti`` keeps what it has."""
    props = _parsed(text)
    if not isinstance(props, dict):
        return text
    control.rates.note()
    policy = {"polykv": _policy(control) | {"ctx_total": control.views.ctx_total(), "slots": _contexts(control)}}
    if "opencoti" not in props:
        return _put(text, props, {"opencoti": policy})
    if not isinstance(props["opencoti"], dict):
        return text
    last = [member for member in members(text)[0] if member.key == "opencoti"][-1]
    inner = _put(text[last.value : last.end], props["opencoti"], policy)
    return text[: last.value] + inner + text[last.end :]


VIEWS: dict[str, Callable[[bytes, Control], bytes]] = {"/slots": with_slots, "/props": with_policy}


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _put(text: bytes, parsed: dict[str, Any], values: dict[str, Any]) -> bytes:
    """An object with these members, in place of any that it had by these names."""
    added = [(key, orjson.dumps(value)) for key, value in values.items()]
    return edit(text, remove=values.keys() & parsed.keys(), add=added)


def _owners(control: Control) -> dict[int, Session]:
    """By slot: whose turn runs there, else who was there last and goes on there."""
    owners = {turn.slot_id: turn.session for turn in control.sessions.running.values() if turn.slot_id is not None}
    for session in control.sessions:
        if session.slot_id is not None and not session.closed:
            owners.setdefault(session.slot_id, session)
    return {int(slot_id): session for slot_id, session in owners.items()}


def _of_slot(entry: dict[str, Any], owners: dict[int, Session], control: Control) -> dict[str, Any]:
    given = entry.get("id")
    slot_id = SlotId(given) if isinstance(given, int) and not isinstance(given, bool) else None
    session = owners.get(slot_id) if slot_id is not None else None
    if session is not None and entry.get("is_processing") is True and not session.is_sent:
        session = None  # somebody else's task, who did not come through here
    if session is not None:
        rate = control.views.rate_of(session)
        return {key: rate[key] for key in ("pool_id", "session_id", "tps_ewma", *_CONTEXT)}
    slot = control.rates.slot(slot_id) if slot_id is not None else None
    return {
        "pool_id": _pool_in(slot, control),
        "session_id": None,
        "tps_ewma": control.rates.tps_in(slot),
        **(control.views.context(control.rates.used_in(slot)) if slot is not None else dict.fromkeys(_CONTEXT)),
    }


def _contexts(control: Control) -> list[dict[str, Any]]:
    """What of its context every slot uses, as ``/slots`` shows it, which may be off. Not whose it is: that is for those
    who may see prompts."""
    stats, owners = control.watch.stats, _owners(control)
    found = []
    for slot in stats.slots if stats is not None else ():
        shown = _of_slot({"id": int(slot.id), "is_processing": not slot.idle}, owners, control)
        found.append({"id": int(slot.id)} | {key: shown[key] for key in _CONTEXT})
    return found


def _pool_in(slot: SlotStats | None, control: Control) -> int | None:
    if slot is None or slot.pool_seq < 0 or not slot.n_pool_shared:
        return None
    return next((pool.pool_id for pool in control.tree.residents() if pool.seq_id == slot.pool_seq), None)


def _policy(control: Control) -> dict[str, Any]:
    """How the proxy was set up. ``floor``: tokens per second and session of the default policy, which is ``admission``;
    None: only pools that were given a policy have one.
    """
    settings, default = control.settings, control.policies.default
    return {
        "mode": settings.mode,
        "floor": default.target_tps_per_session if default is not None else None,
        "admission": (default.to_json() if default is not None else dict.fromkeys(POLICY_FIELDS))
        | {"n_pool_policies": control.policies.n_own},
        "pin": {"max_fraction": settings.pin_max_fraction},
        "ttl": {
            "grace_s": settings.grace_ttl_s,
            "warm_after_s": settings.warm_after_s,
            "session_gap_s": settings.session_gap_s,
            "session_idle_s": settings.session_idle_s,
        },
        "versions": {"polykv_proxy": polykv_proxy.__version__, "engine_hooks": control.watch.hooks},
    }
