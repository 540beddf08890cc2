"""``polykvctl tps``: who decodes how fast, now or followed."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polykv_proxy.cli.output import (
    DEFAULT_URL,
    UNKNOWN,
    AdminKey,
    AsJson,
    Url,
    control_client,
    count,
    echo_json,
    ending_well,
    make_console,
    plain,
    show,
)

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType

_ORDER = ("decoding", "prefilling", "waiting")


def tps(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, drawing it anew.")] = False,
    interval_ms: Annotated[
        int, typer.Option("--interval-ms", min=100, max=60_000, help="With --follow: time between two looks.")
    ] = 500,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Show the tokens per second of the engine and of every session; prefill does not count.

    With --json one object per line.
    """
    with ending_well(), control_client(url, admin_key) as control:
        if not follow:
            sample = control.get("/polykv/tps")
            if as_json:
                echo_json(sample)
            else:
                show(_picture(sample))
            return
        samples = control.events(f"/polykv/tps?stream=1&interval_ms={interval_ms}")
        if as_json:
            for sample in samples:
                echo_json(sample)
        else:
            draw_on(map(_picture, samples), make_console())
        typer.echo("the proxy ended the stream: it is shutting down", err=True)


def draw_on(pictures: "Iterable[RenderableType]", console: "Console") -> None:
    """On a terminal in one place, elsewhere one under the other."""
    from rich.live import Live

    if not console.is_terminal:
        for picture in pictures:
            console.print(picture, crop=False)
            console.print()
        return
    with Live(console=console, auto_refresh=False) as live:
        for picture in pictures:
            live.update(picture, refresh=True)


def _picture(sample: dict[str, Any]) -> "Group":
    """The sum, then those who are at work, then the others."""
    from rich.console import Group

    from polykv_proxy.cli.fitting import FittedTable, Footer

    summary = Footer(rates_in(sample))
    if not sample["sessions"]:
        return Group(summary)
    headings = ("session", "pool", "tok/s", "decoded", "first", "context", "left", "state")
    return Group(summary, FittedTable(headings, map(_row, _sorted(sample)), label_at=0, label_keeps=12))


def rates_in(sample: Mapping[str, Any]) -> list[str]:
    """What the engine as a whole does, as facts of one line."""
    facts = [f"{_rate(sample['aggregate_tps'])} tok/s in all"]
    if sample["mean_active_tps"] is not None:
        facts.append(f"{_rate(sample['mean_active_tps'])} on average")
    return [*facts, f"{count(sample['n_active'])} decoding", f"{count(sample['n_warming'])} warming up"]


def _sorted(sample: dict[str, Any]) -> list[dict[str, Any]]:
    def place(session: dict[str, Any]) -> tuple[int, str]:
        at_work = session["state"] in _ORDER
        return _ORDER.index(session["state"]) if at_work else len(_ORDER), str(session["session_id"])

    return sorted(sample["sessions"], key=place)


def _row(session: dict[str, Any]) -> Any:
    from rich.text import Text

    from polykv_proxy.cli.fitting import Label, Row

    name, ttft_ms = plain(session["session_id"]), session["ttft_ms"]
    numbers = (
        "" if session["pool_id"] is None else str(session["pool_id"]),
        "" if session["tps_ewma"] is None else _rate(session["tps_ewma"]),
        count(session["n_decoded"]),
        "" if ttft_ms is None else f"{ttft_ms:,.0f} ms",
        "" if session["ctx_used"] is None else count(session["ctx_used"]),
        "" if session["ctx_headroom_tokens"] is None else count(session["ctx_headroom_tokens"]),
    )
    return Row(Label("", name, short=name, least=name[:12]), numbers, [Text(str(session["state"]))])


def _rate(tps: float | None) -> str:
    return UNKNOWN if tps is None else f"{tps:,.1f}"
