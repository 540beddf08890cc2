"""``polykvctl compact``: a shorter pool in the place of one that grew too long."""

from typing import Annotated, Any

import typer

from polykv_proxy.cli.output import DEFAULT_URL, AdminKey, AsJson, Url, called, count, echo_json, ending_well, shown
from polykv_proxy.cli.pools import Messages, Prompt, PromptFile, Ref, Tokens


def compact(
    ref: Ref,
    *,
    ancestor: Annotated[
        str, typer.Option("--ancestor", metavar="POOL", help="The pool that stays; the new one is a fork of it.")
    ],
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    messages: Messages = None,
    tokens: Tokens = None,
    session: Annotated[
        list[str] | None,
        typer.Option("--session", metavar="ID", help="Move only this one (again for more). Default: all on POOL."),
    ] = None,
    keep_old: Annotated[bool, typer.Option("--keep-old", help="Do not release POOL and what is below it.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Of the new pool. Default: POOL's own, when that is released.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Fork --ancestor with the shorter text, move sessions, pins and policy from POOL to it, and release POOL."""
    from polykv_proxy.cli.client import pool_path
    from polykv_proxy.cli.output import control_client
    from polykv_proxy.cli.pool_source import pool_source

    with ending_well():
        body = pool_source(
            prompt=prompt, prompt_file=prompt_file, messages=messages, tokens=tokens, from_sessions=False
        )
        body |= {"ancestor": ancestor, "release_old": not keep_old}
        body |= {} if session is None else {"sessions": session}
        body |= {} if name is None else {"name": name}
        with control_client(url, admin_key) as control:
            answer = control.post(pool_path(ref, "compact"), body)
        if as_json:
            echo_json(answer)
        else:
            typer.echo("\n".join(_told(answer)))


def _told(answer: dict[str, Any]) -> list[str]:
    above = called({"pool_id": answer["parent"], "name": None})
    lines = [
        f"{called(answer)}: {count(answer['prefix_len'])} tokens, {count(answer['branch_pos'])} of them from {above}"
        f"{'; pinned' if answer['pinned'] else ''}"
    ]
    moved = [f"{session['session_id']}{' (running)' if session['n_running'] else ''}" for session in answer["moved"]]
    lines.append(f"moved        {', '.join(moved) or 'no session'}")
    lines.append(f"released     {', '.join(map(str, answer['released'])) or 'none'}")
    lines += [
        f"{field.replace('_', ' '):<12} {shown(field, answer[field])}"
        for field in ("freed_now", "freed_later")
        if answer[field] is not None
    ]
    return lines
