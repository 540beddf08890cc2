"""``polykvctl explain``: what happened to a request."""

from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from polykv_proxy.cli.output import (
    DEFAULT_URL,
    AdminKey,
    AsJson,
    Url,
    control_client,
    count,
    echo_json,
    ending_well,
    nth,
    plain,
    shown,
    to_go,
)

_HELD = {
    "slot": "for a free slot",
    "cells": "for free cells",
    "pool": "until its pool was back in the cache",
    "shared_prefill": "for another request that begins alike",
    "saved_state": "while saved state of a pool or session was written or loaded for it",
    "admission": "to be let into its pool",
    "turn": "while it would have pushed others below the floor",
}
_GATE = {
    "queued": "waits to be let in",
    "admitted": "let in",
    "guaranteed": "let in by the guarantee",
    "overcommitted": "let in by overcommit",
    "warned": "let in although there is no room, as the policy warns only",
    "continuation": "known, it goes on",
    "refused": "not let in",
}
_REASONS = {
    "no_pool": "no pool begins like this prompt, or there is not the one that was named",
    "diverged": "the prompt leaves what it was expected to begin with",
    "incompatible": "such a request cannot share (media, an own slot, an adapter, several prompts)",
    "not_resident": "its pool could not be brought back, or the engine did not have it any more",
    "evicted": "its pool left the cache while it was on its way",
    "upstream_restarted": "the engine was restarted while it was on its way",
    "swa_or_recurrent": "this model and cache layout cannot share there",
}
_AGAINST = {
    "session": "its session's last prompt",
    "answer": "its session's last prompt and the answer to it",
    "pool": "its pool",
    "family": "an earlier prompt of those it belongs together with",
}
_UNREAD = ("invalid_json", "body_timeout", "body_too_large")
_WIDTH = 80


def explain(
    request_id: Annotated[
        str | None, typer.Argument(metavar="REQUEST", help="Its x-request-id; without it the latest request.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Say what was matched, what was prefilled, what it waited for, and which message diverged first."""
    from polykv_proxy.cli.client import ServerRefused

    query = {"last": "1"} | ({"request_id": request_id} if request_id is not None else {})
    with ending_well():
        with control_client(url, admin_key) as control:
            found = control.get(f"/polykv/requests?{urlencode(query)}")["requests"]
        if not found:
            if request_id is None:
                nothing = "the proxy knows no request yet: send one to its /v1/chat/completions, /v1/messages, …"
                raise ServerRefused(f"{nothing} (base URL {url}/v1), and ask again", status=200)
            nothing = f"the proxy knows no request {plain(request_id)}; it keeps the last 1,000"
            raise ServerRefused(f"{nothing} since it was started (GET /polykv/requests)", status=200)
        if as_json:
            echo_json(found[0])
        else:
            typer.echo("\n".join(line for fact in told(found[0]) for line in _folded(fact)))


def _folded(line: str) -> list[str]:
    """Break it between words at 80 columns, behind the column of what it is about; what a client said stays whole."""
    import textwrap

    if line.startswith(" "):
        return [line]
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)


def told(receipt: dict[str, Any]) -> list[str]:
    """A receipt, for a person."""
    received, status = shown("received_ts", receipt["received_ts"]), receipt["status"]
    how = "streamed" if receipt["stream"] else "in one piece"
    ends = [f"status {status}"] if status else []
    ends += [f"error {plain(receipt['error'])}"] if receipt["error"] else []
    end = ", ".join(ends) or "under way"
    lines = [
        f"request {plain(receipt['request_id'])}: {plain(receipt['path'])}, {how}",
        f"at      {received}, {end}",
        *_who(receipt),
        *_prefix(receipt),
        *_admission(receipt),
        *_times(receipt),
    ]
    if receipt["error"] == "truncated":
        lines.append("cut     the cache was full before the answer had its tokens: fewer at once, or a larger --ctx")
    if receipt["divergence"] is not None:
        lines += _divergence(receipt["divergence"]) + _remedy(receipt["divergence"])
    if receipt["normalised"]:
        lines.append(f"pinned  {', '.join(receipt['normalised'])}: the engine got what came first there")
    return lines


def _who(receipt: dict[str, Any]) -> list[str]:
    if receipt["session_id"] is None:
        return []
    line = f"session {plain(receipt['session_id'])}"
    if receipt["parent_session_id"] is not None:
        line += f", of {plain(receipt['parent_session_id'])}"
    if receipt["slot_id"] is not None:
        line += f", in slot {receipt['slot_id']}"
    if receipt["displaced"]:
        line += f", which was {', '.join(map(plain, receipt['displaced']))}'s"
    return [line]


def _prefix(receipt: dict[str, Any]) -> list[str]:
    if receipt["session_id"] is None:
        return [f"refused{' before it was read' if receipt['error'] in _UNREAD else ''}: {_refusal(receipt['error'])}"]
    if receipt["decision"] is None:
        return ["waits, or its client left while it did"]
    if receipt["decision"] == "refused" and receipt.get("message") is not None:
        return [f"refused {plain(receipt['message'])}"]
    pool = "no pool" if receipt["pool_id"] is None else f"pool {receipt['pool_id']}"
    line = f"prefix  {pool}: {count(receipt['prefix_n_tokens'])} tokens expected"
    if receipt["cached_n_tokens"] is not None:
        line += f", {count(receipt['cached_n_tokens'])} reused, {count(receipt['prompt_n'])} prefilled"
    lines = [line]
    if receipt["miss_reason"] is not None:
        reason = receipt["miss_reason"]
        lines.append(f"missed  {reason}: {_REASONS[reason]}" if reason in _REASONS else f"missed  {reason}")
    return lines


def _admission(receipt: dict[str, Any]) -> list[str]:
    """How it came past the gate; nothing where no policy holds."""
    gate = receipt.get("admission")
    if gate is None:
        return []
    line = f"gate    {_GATE.get(gate['decision'], gate['decision'])}"
    if gate["reason"] not in (None, "ok", "continuation", "guaranteed minimum", "overcommit"):
        line += f": {gate['reason']}"
    if gate["waits_for"] is not None:
        line += "" if gate["decision"] == "queued" else "; its turn is held"
        line += f", {nth(gate['place'])} in line" if gate["place"] else ""
        line += to_go(gate)
    parts = [
        (gate[f"projected_mean_tps_{by}"], f"tok/s forecast {how}")
        for by, how in (
            ("model", "for a saturated engine"),
            ("measured", "by earlier admissions"),
            ("roofline", "by the fit"),
        )
    ]
    parts.append((gate["settled_mean_tps"], "tok/s once it had settled"))
    known = ", ".join(f"{value:.1f} {what}" for value, what in parts if value is not None)
    return [f"{line}; {known}" if known else line]


def _times(receipt: dict[str, Any]) -> list[str]:
    lines = [f"held    {ms:,} ms {_HELD.get(why, why)}" for why, ms in receipt["held_ms"].items()]
    received, sent = receipt["received_ts"], receipt["sent_ts"]
    first, ended = receipt["first_token_ts"], receipt["ended_ts"]
    steps = []
    if sent is not None:
        steps.append(f"sent after {_ms(sent - received)}")
    if first is not None:
        steps.append(f"first token after {_ms(first - received)}")
    if ended is not None:
        steps.append(f"ended after {_ms(ended - received)}")
    if receipt["predicted_n"] is not None:
        steps.append(f"{count(receipt['predicted_n'])} tokens answered")
    return [*lines, f"times   {', '.join(steps)}"] if steps else lines


def _ms(seconds: float) -> str:
    return f"{max(0.0, seconds) * 1e3:,.0f} ms"


def _divergence(divergence: dict[str, Any]) -> list[str]:
    line = f"differs from {_AGAINST[divergence['against']]}"
    if divergence["expected_n_tokens"] is not None:
        line += f" ({count(divergence['expected_n_tokens'])} tokens)"
    if divergence["position"] is not None:
        line += f" at token {count(divergence['position'])}"
    if divergence["field"] is not None:
        line += f", in {divergence['field']}"
        if divergence["message"] is not None and divergence["field"] in ("messages", "input"):
            line += f"[{divergence['message']}]"
        if divergence["role"] is not None:
            line += f" ({plain(divergence['role'])})"
        if divergence["key"] is not None:
            line += f", {plain(divergence['key'])}"
        if divergence["part"] is not None:
            line += f", part {divergence['part']}"
    lines, span = [line], divergence["span"]
    if span is not None:
        which = nth(span["differs_at"] - span["start"] + 1)
        place = f"        the line at character {count(span['start'])}, from its {which} character on"
        lines.append(place if span["text"] is None else f"{place}:")
        if span["text"] is not None:
            lines.append(f"        {plain(span['text'])}")
    return lines


def _remedy(divergence: dict[str, Any]) -> list[str]:
    """Where a line that changes by itself is what differs: that it can be pinned."""
    from polykv_proxy.relay.normalise import kind_of

    span = divergence["span"]
    if span is None or span["text"] is None or divergence["role"] not in (None, "system", "developer"):
        return []
    kind = kind_of(span["text"], is_first=span["start"] == 0)
    if kind is None:
        return []
    return [f"remedy  start the proxy with POLYKV_NORMALISE={kind}: the engine then gets this line as it came first"]


def _refusal(error: str | None) -> str:
    if error == "pool_not_found":
        return "there is no such pool, and x-polykv-strict asks for an error then (`polykvctl pools ls`)"
    return plain(error or "its client left")
