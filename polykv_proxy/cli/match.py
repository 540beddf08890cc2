"""``polykvctl match``: what would a request get? A dry run."""

from typing import Annotated, Any

import typer

from polykv_proxy.cli.output import DEFAULT_URL, AdminKey, AsJson, Url, called, count, echo_json, ending_well

_REASONS = {
    "cold": "the pool is not in the cache now and would be prefilled first",
    "no_pool": "there are no pools",
    "incompatible": "such a prompt cannot share (media, or several prompts)",
    "swa_or_recurrent": "this model and cache layout cannot share",
}


def match(
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The prompt as text.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option("--prompt-file", metavar="FILE", help="The prompt as a text file; - is stdin.")
    ] = None,
    messages: Annotated[
        str | None,
        typer.Option("--messages", metavar="FILE", help="JSON: messages, or an object with messages and tools."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="FILE", help="Token ids: a JSON array, or numbers between spaces.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option("--pool", metavar="POOL", help="Compare with this one instead of finding the deepest.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Say which pool a prompt would get, how much of it is shared, and where it leaves the pool."""
    from polykv_proxy.cli.client import ControlClient
    from polykv_proxy.cli.pool_source import pool_source

    with ending_well():
        body = pool_source(
            prompt=prompt, prompt_file=prompt_file, messages=messages, tokens=tokens, from_sessions=False
        )
        if pool is not None:
            body["pool_id"] = pool
        with ControlClient(url, admin_key) as control:
            answer = control.post("/polykv/match", body)
        if as_json:
            echo_json(answer)
        else:
            typer.echo("\n".join(_told(answer, of_messages=messages is not None)))


def _told(answer: dict[str, Any], *, of_messages: bool) -> list[str]:
    n_shared, n_left = answer["prefix_n_tokens"], answer["uncached_n_tokens"]
    reason, divergence = answer["miss_reason"], answer["divergence"]
    which = "no pool" if answer["pool_id"] is None else called(answer)
    lines = [f"{which}: {count(n_shared)} of {count(n_shared + n_left)} tokens shared, {count(n_left)} to prefill"]
    if of_messages and n_shared and divergence is None:
        lines.append("to prefill: what follows the pool; the template's cue to answer is part of it")
    if divergence is not None:
        lines.append(f"{reason}: {_where(divergence, is_shared=n_shared > 0)}")
    elif reason is not None:
        lines.append(f"{reason}: {_REASONS[reason]}" if reason in _REASONS else reason)
    return lines


def _where(divergence: dict[str, Any], *, is_shared: bool) -> str:
    length, pos = divergence["pool_prefix_len"], divergence["pos"]
    if length is None:
        return "no pool begins with the first token"
    pool = f"pool {divergence['pool_id']} ({count(length)} tokens)"
    if not is_shared and pos:
        return f"only the first {count(pos)} tokens are those of {pool}: too few to share"
    if not is_shared:
        return f"the prompt and {pool} do not even begin with the same token"
    place = f"the prompt leaves {pool} at token {count(pos)}"
    message = divergence.get("message")
    return place if message is None else f"{place}, in message {message}"
