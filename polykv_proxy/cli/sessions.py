"""``polykvctl sessions``: who is attached where."""

import re
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

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
    human_bytes,
    plain,
    show,
    shown,
)

if TYPE_CHECKING:
    from polykv_proxy.cli.fitting import FittedTable

app = typer.Typer(help="Sessions: who is attached where. Without a command: all of them.", invoke_without_command=True)

Id = Annotated[str, typer.Argument(metavar="SESSION", help="Its id, as the client or the proxy named it.")]


@app.callback()
def every_session(
    context: typer.Context, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False
) -> None:
    """List the open sessions, one a line."""
    if context.invoked_subcommand is not None:
        _refuse_options_of(context)
        return
    with ending_well(), control_client(url, admin_key) as control:
        view = control.get("/polykv/sessions")
        if as_json:
            echo_json(view)
            return
        if view.get("hooks") is False:
            typer.echo("note: a llama-server without PolyKV hooks, so there are no pools (see: doctor)", err=True)
        if view["sessions"]:
            show(_table(view["sessions"]))
        else:
            show("No sessions.")


@app.command("show")
def show_session(session: Id, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show one session in full."""
    with ending_well(), control_client(url, admin_key) as control:
        answer = control.get(_path(session))
        if as_json:
            echo_json(answer)
            return
        for field, value in answer.items():
            typer.echo(f"{field:<21}{plain(shown(field, value))}")


@app.command("delete")
def delete_session(session: Id, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Forget a session and give up its slot; what it has running ends by itself."""
    with ending_well(), control_client(url, admin_key) as control:
        answer = control.delete(_path(session))
        if as_json:
            echo_json(answer)
            return
        pool = "no pool" if answer["detached_from"] is None else f"pool {answer['detached_from']}"
        typer.echo(f"forgot session {plain(answer['session_id'])} of {pool}; {count(answer['n_running'])} running")


def _refuse_options_of(context: typer.Context) -> None:
    """An option in front of the command would not reach it, and the command would ask another proxy."""
    from polykv_proxy.cli.client import WrongUsage

    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if getattr(source, "name", None) == "COMMANDLINE"]
    with ending_well():
        if given:
            raise WrongUsage(f"options go behind the command: polykvctl sessions {context.invoked_subcommand} …")


def _path(session: str) -> str:
    """Raises WrongUsage for what would be another path."""
    from polykv_proxy.cli.client import WrongUsage

    if not session or {".", ".."} & set(re.split(r"[/\\]", session)):
        raise WrongUsage(f"{session!r} cannot stand in a path: there, . and .. lead elsewhere")
    return f"/polykv/sessions/{quote(session, safe='')}"


def _table(sessions: list[dict[str, Any]]) -> "FittedTable":
    from rich.text import Text

    from polykv_proxy.cli.fitting import FittedTable, Label, Row

    rows = []
    for session in sorted(sessions, key=lambda session: str(session["session_id"])):
        name, tps = plain(session["session_id"]), session["tps_ewma"]
        numbers = (
            "" if session["pool_id"] is None else str(session["pool_id"]),
            "" if session["slot_id"] is None else str(session["slot_id"]),
            "" if session["prefix_n_tokens"] is None else count(session["prefix_n_tokens"]),
            "" if session["suffix_n_tokens"] is None else count(session["suffix_n_tokens"]),
            "" if session["marginal_kv_bytes"] is None else human_bytes(session["marginal_kv_bytes"]),
            "" if tps is None else f"{tps:.1f}",
        )
        state = [Text(part) for part in _state(session)]
        rows.append(Row(Label("", name, short=name, least=name[:12]), numbers, state))
    headings = ("session", "pool", "slot", "prefix", "own", "KV", "tok/s", "state")
    return FittedTable(headings, rows, label_at=0, label_keeps=12)


def _state(session: dict[str, Any]) -> list[str]:
    """What it does; of one without a slot, how much the engine keeps of it."""
    parked = session["state"] == "parked"
    return [session["state"], human_bytes(session["warm_bytes"])] if parked else [str(session["state"])]
