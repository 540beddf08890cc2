"""``polykvctl top``: rates, who waits to be let in, and the tree of pools, drawn anew until Ctrl-C."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polykv_proxy.cli.output import (
    DEFAULT_URL,
    AdminKey,
    AsJson,
    Url,
    control_client,
    echo_json,
    ending_well,
    make_console,
    nth,
    plain,
    to_go,
)

if TYPE_CHECKING:
    from rich.console import Group

    from polykv_proxy.cli.client import ControlClient

_LAST = 200
"""So many of the last requests are looked at for those that wait."""
_WAITING_MAX = 5


def top(
    *,
    interval_ms: Annotated[
        int, typer.Option("--interval-ms", min=100, max=60_000, help="Time between two looks.")
    ] = 1000,
    n_looks: Annotated[
        int | None, typer.Option("--count", "-n", min=1, metavar="N", help="End after so many looks.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Watch the engine: tokens per second, sessions that wait to be let in, and the tree of pools.

    With --json one object per line.
    """
    from polykv_proxy.cli.tps import draw_on

    with ending_well(), control_client(url, admin_key) as control:
        looks = islice(_looks(control, interval_ms), n_looks)
        if as_json:
            for look in looks:
                echo_json(look)
        else:
            draw_on(map(_picture, looks), make_console())
        if n_looks is None:
            typer.echo("the proxy ended the stream: it is shutting down", err=True)


def _looks(control: "ControlClient", interval_ms: int) -> Iterator[dict[str, Any]]:
    for rates in control.events(f"/polykv/tps?stream=1&interval_ms={interval_ms}"):
        last = control.get(f"/polykv/requests?last={_LAST}")["requests"]
        yield {
            "rates": rates,
            "waiting": [r for r in last if (r.get("admission") or {}).get("waits_for") is not None],
            "tree": control.get("/polykv/pools"),
        }


def _picture(look: Mapping[str, Any]) -> "Group":
    from rich.console import Group

    from polykv_proxy.cli.fitting import Footer
    from polykv_proxy.cli.pool_tree import draw_tree, has_unpooled, summary
    from polykv_proxy.cli.tps import rates_in

    tree = look["tree"]
    shown_tree = [draw_tree(tree)] if tree["pools"] or has_unpooled(tree) else []
    return Group(Footer(rates_in(look["rates"])), *_waiting(look["waiting"]), *shown_tree, summary(tree))


def _waiting(receipts: list[dict[str, Any]]) -> list[str]:
    """Those who are next first."""
    receipts = sorted(receipts, key=lambda receipt: (receipt["admission"]["place"] or 0, receipt["received_ts"]))
    lines = []
    for receipt in receipts[:_WAITING_MAX]:
        gate = receipt["admission"]
        what = "waits to be let in" if gate["waits_for"] == "admission" else "is held before its turn"
        place = f", {nth(gate['place'])} in line" if gate["place"] else ""
        why = "others are ahead" if gate["reason"] == "ok" else gate["reason"]
        lines.append(f"{plain(receipt['session_id'])} {what}{place}{to_go(gate)}: {why}")
    if len(receipts) > _WAITING_MAX:
        lines.append(f"… and {len(receipts) - _WAITING_MAX} more wait")
    return lines
