"""``polykvctl admission`` and ``polykvctl capacity``: the policy of a pool, and whether it has room for a session."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from polykv_proxy.cli.output import (
    DEFAULT_URL,
    AdminKey,
    AsJson,
    Url,
    called,
    control_client,
    count,
    echo_json,
    ending_well,
    shown,
)
from polykv_proxy.cli.pools import Ref

app = typer.Typer(no_args_is_help=True, help="Admission policies: how fast the sessions of a pool shall stay.")

_POLICY = (
    ("on_saturation", "when it is too full"),
    ("guarantee_min_sessions", "sessions that always get in"),
    ("estimator", "estimator"),
    ("settle_tokens", "an admission settles in"),
    ("settle_max_ms", "or in at most"),
    ("max_turn_hold_ms", "a turn is held at most"),
    ("max_queue", "places in line"),
    ("queue_timeout_ms", "and the wait in it"),
)
_MEASURED = (
    ("projected_mean_tps_if_admitted", "rate with one more"),
    ("target_tps_per_session", "floor"),
    ("mean_active_tps", "rate now"),
    ("n_active", "who decode"),
    ("n_warming", "without a rate yet"),
    ("n_pool_sessions", "sessions of the pool"),
    ("drop_per_admit_ewma", "one more costs"),
    ("kv_headroom_pct", "free cells"),
    ("compaction_pressure", "compaction pressure"),
    ("kv_streams_free", "free streams"),
)
_CHOICES = {
    "mode": ("advisory", "enforced"),
    "on_saturation": ("reject", "warn", "queue"),
    "estimator": ("settled", "roofline"),
}
_SATURATED = {"reject": "a new session is refused", "warn": "it is let in and told", "queue": "it waits in line"}


def _ms(flag: str, what: str) -> Any:
    return typer.Option(flag, min=0, metavar="MS", help=what)


def _choice(flag: str, what: str) -> Any:
    name = flag.removeprefix("--").replace("-", "_")
    return typer.Option(flag, metavar="|".join(_CHOICES[name]), help=what)


@app.command("get")
def get(ref: Ref, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Show the policy that holds for a pool, and whose it is."""
    with ending_well(), control_client(url, admin_key) as control:
        _say(control.get(_path(ref)), as_json=as_json)


@app.command("set")
def set_policy(
    ref: Ref,
    *,
    target_tps: Annotated[
        float, typer.Option("--target-tps", metavar="N", help="The floor: tokens per second and session.")
    ],
    mode: Annotated[str | None, _choice("--mode", "advisory only tells, enforced holds for requests.")] = None,
    on_saturation: Annotated[
        str | None, _choice("--on-saturation", "What becomes of a new session that does not fit.")
    ] = None,
    guarantee_min_sessions: Annotated[
        int | None, typer.Option("--guarantee-min-sessions", min=0, metavar="N", help="So many always get in.")
    ] = None,
    settle_tokens: Annotated[
        int | None,
        typer.Option("--settle-tokens", min=0, metavar="N", help="An admission is measured over so many tokens …"),
    ] = None,
    settle_max_ms: Annotated[int | None, _ms("--settle-max-ms", "… or so long.")] = None,
    estimator: Annotated[str | None, _choice("--estimator", "How the rate is forecast.")] = None,
    max_turn_hold_ms: Annotated[
        int | None, _ms("--max-turn-hold-ms", "Hold a turn so long to keep the floor; 0 = never.")
    ] = None,
    max_queue: Annotated[int | None, typer.Option("--max-queue", min=0, metavar="N", help="Places in line.")] = None,
    queue_timeout_ms: Annotated[int | None, _ms("--queue-timeout-ms", "The longest wait in line.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Give a pool a policy of its own, for it and what is below it.

    It replaces the one it had as a whole: an option that is left out has its default, not what was set before.
    """
    from polykv_proxy.cli.client import WrongUsage

    given = {
        "mode": mode,
        "on_saturation": on_saturation,
        "guarantee_min_sessions": guarantee_min_sessions,
        "settle_tokens": settle_tokens,
        "settle_max_ms": settle_max_ms,
        "estimator": estimator,
        "max_turn_hold_ms": max_turn_hold_ms,
        "max_queue": max_queue,
        "queue_timeout_ms": queue_timeout_ms,
    }
    with ending_well():
        for name, choices in _CHOICES.items():
            if given[name] is not None and given[name] not in choices:
                raise WrongUsage(f"--{name.replace('_', '-')} {given[name]!r} is none of {', '.join(choices)}")
        if not 0 < target_tps < float("inf"):
            raise WrongUsage("--target-tps must be more than 0")
        body = {"target_tps_per_session": target_tps} | {k: v for k, v in given.items() if v is not None}
        with control_client(url, admin_key) as control:
            _say(control.post(_path(ref), body), as_json=as_json)


@app.command("drop")
def drop(ref: Ref, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False) -> None:
    """Take a pool's own policy away; from then on it follows the pools above, or the default."""
    with ending_well(), control_client(url, admin_key) as control:
        _say(control.delete(_path(ref)), as_json=as_json)


def capacity(
    ref: Ref,
    *,
    expected_tokens: Annotated[
        int | None, typer.Option("--expected-tokens", min=0, metavar="N", help="What it would add to the cache.")
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Ask for this one: who is known goes on.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a pool has room for one more session, how many more, and what that rests on."""
    from urllib.parse import urlencode

    asked = {"expected_tokens": expected_tokens, "session_id": session}
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    with ending_well(), control_client(url, admin_key) as control:
        answer = control.get(_path(ref, "capacity") + (f"?{query}" if query else ""))
        if as_json:
            echo_json(answer)
        else:
            typer.echo("\n".join(_of_capacity(answer)))


def _path(ref: str, what: str = "admission") -> str:
    """Raises WrongUsage."""
    from polykv_proxy.cli.pools import path_of

    return path_of(ref, what)


def _say(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        echo_json(answer)
    else:
        typer.echo("\n".join(_of_policy(answer)))


def _of_policy(answer: Mapping[str, Any]) -> list[str]:
    before = ", as it was before" if answer.get("changed") is False else ""
    if answer["source"] == "none":
        return [f"{called(answer)}: no policy, nobody is held or refused{before}"]
    whose = {
        "own": "its own policy",
        "inherited": f"that of pool {answer['inherited_from']}",
        "default": "the default of the proxy",
    }[answer["source"]]
    floor = f"{answer['target_tps_per_session']:,.10g} tok/s per session"
    lines = [f"{called(answer)}: {answer['mode']}, {floor}; {whose}{before}"]
    if answer["mode"] == "advisory":
        lines.append("advisory: `polykvctl capacity` tells, and no request is held or refused")
    return lines + [f"{label:<29}{_policy_value(field, answer[field])}" for field, label in _POLICY]


def _policy_value(field: str, value: Any) -> str:
    if field == "on_saturation":
        return f"{value}: {_SATURATED[value]}"
    if field == "settle_tokens":
        return f"{count(value)} tokens"
    return "never" if field == "max_turn_hold_ms" and value == 0 else shown(field, value)


def _of_capacity(answer: Mapping[str, Any]) -> list[str]:
    more = answer["headroom_sessions"]
    if not answer["can_admit"]:
        wait = f", {shown('wait_ms', answer['settle_remaining_ms'])} to go" if answer["settling"] else ""
        lines = [f"{called(answer)}: no room for one more session: {answer['reason']}{wait}"]
    elif answer["known_session"]:
        lines = [f"{called(answer)}: this session is known and goes on"]
    else:
        n = "room for one more session at least" if more is None else f"room for {count(more)} more session"
        lines = [f"{called(answer)}: {n}{'s' if more not in (None, 1) else ''}: {answer['reason']}"]
        if answer["reason"] == "ok" and answer["projected_mean_tps_if_admitted"] is None:
            lines[0] += ", by free cells alone: no rate is known yet"
    values = ((label, _measured_value(field, answer[field])) for field, label in _MEASURED)
    lines += [f"{label:<22}{value}" for label, value in values if value is not None]
    if answer["mode"] == "advisory":
        lines.append("advisory: nobody is held or refused by it")
    return lines


def _measured_value(field: str, value: Any) -> str | None:
    """None: not known, or there is no such thing here."""
    if value is None:
        return None
    if field.endswith("_pct"):
        return f"{value:.0f} %"
    if field == "compaction_pressure":
        return f"{value:.2f}"
    return f"{value:.1f} tok/s" if "tps" in field or field == "drop_per_admit_ewma" else count(value)
