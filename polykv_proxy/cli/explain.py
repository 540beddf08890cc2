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
    plain,
    shown,
)

_HELD = {
    "slot": "for a free slot",
    "cells": "for free cells",
    "pool": "until its pool was back in the cache",
    "shared_prefill": "for another request that begins alike",
    "saved_state": "while states of sessions were saved or loaded",
}
_REASONS = {
    "no_pool": "no pool fits: there are none, or not the one that was named",
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
    "family": "a prompt of those it belongs to",
}


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
            which = "" if request_id is None else f" {plain(request_id)}; it keeps the last 1,000"
            raise ServerRefused(f"the proxy knows no request{which}", status=200)
        if as_json:
            echo_json(found[0])
        else:
            typer.echo("\n".join(told(found[0])))


def told(receipt: dict[str, Any]) -> list[str]:
    """A receipt, for a person."""
    received, status = shown("received_ts", receipt["received_ts"]), receipt["status"]
    how = "streamed" if receipt["stream"] else "in one piece"
    end = f"error {plain(receipt['error'])}" if receipt["error"] else f"status {status}" if status else "under way"
    lines = [
        f"request {plain(receipt['request_id'])}: {plain(receipt['path'])}, {how}, {received}, {end}",
        *_who(receipt),
        *_prefix(receipt),
        *_times(receipt),
    ]
    if receipt["divergence"] is not None:
        lines += _divergence(receipt["divergence"])
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
        return ["refused before it was read"]
    if receipt["decision"] is None:
        return ["waits, or its client left while it did"]
    pool = "no pool" if receipt["pool_id"] is None else f"pool {receipt['pool_id']}"
    line = f"prefix  {pool}: {count(receipt['prefix_n_tokens'])} tokens expected"
    if receipt["cached_n_tokens"] is not None:
        line += f", {count(receipt['cached_n_tokens'])} reused, {count(receipt['prompt_n'])} prefilled"
    lines = [line]
    if receipt["miss_reason"] is not None:
        reason = receipt["miss_reason"]
        lines.append(f"missed  {reason}: {_REASONS[reason]}" if reason in _REASONS else f"missed  {reason}")
    return lines


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
    where = _AGAINST[divergence["against"]]
    if divergence["expected_n_tokens"] is not None:
        where += f" of {count(divergence['expected_n_tokens'])} tokens"
    line = f"leaves  {where}"
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
        place = f"        characters {span['start']} to {span['end']}, the first other one at {span['differs_at']}"
        lines.append(place if span["text"] is None else f"{place}:")
        if span["text"] is not None:
            lines.append(f"        {plain(span['text'])}")
    return lines
