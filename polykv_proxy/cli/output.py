"""What the commands share: their three common options, how errors end, how numbers and tables look.

Human output is made for 80 columns. Text that came from clients (session ids) is shown escaped: neither the terminal
nor rich interprets it.
"""

import contextlib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polykv_proxy.cli.client import ControlProblem

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from polykv_proxy.cli.client import ControlClient

Url = Annotated[str, typer.Option("--url", envvar="POLYKV_URL", help="The proxy.")]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", envvar="POLYKV_ADMIN_KEY", help="Control-plane key.", show_envvar=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable on stdout, nothing else there.")]

DEFAULT_URL = "http://127.0.0.1:8090"
UNKNOWN = "?"


@contextlib.contextmanager
def ending_well() -> Iterator[None]:
    """Turn a problem into one line on stderr and its exit status.

    Raises:  typer.Exit
    """
    try:
        yield
    except ControlProblem as problem:
        complain(f"polykvctl: {problem}")
        raise typer.Exit(problem.exit_code) from None


def complain(line: str) -> None:
    """Print an error: for a terminal broken between words, else one line, for scripts and logs."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr)


def control_client(url: str, admin_key: str | None) -> "ControlClient":
    """Raises WrongUsage."""
    from polykv_proxy.cli.client import ControlClient

    return ControlClient(url, admin_key)


def echo_json(answer: Any) -> None:
    typer.echo(json.dumps(answer, ensure_ascii=False))


def make_console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=False)


def show(what: "RenderableType") -> None:
    """Print it; what does not fit into a line runs over, nothing is cropped away."""
    make_console().print(what, crop=False)


def human_bytes(n_bytes: float | None) -> str:
    """``82.3 MB``: three digits and a decimal unit."""
    if n_bytes is None:
        return UNKNOWN
    size = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def called(pool: Mapping[str, Any]) -> str:
    """``pool 7 (reviewers)``: what a person typed, or can type, of a pool."""
    return f"pool {pool['pool_id']}" + (f" ({pool['name']})" if pool.get("name") else "")


def count(n: int | None) -> str:
    return UNKNOWN if n is None else f"{n:,}"


def nth(n: int) -> str:
    """``1st``, ``2nd``, ``11th``."""
    return f"{n:,}{'th' if n % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def to_go(gate: Mapping[str, Any]) -> str:
    """How long one in line still waits, as far as that is known; else nothing."""
    if gate["eta_ms"] is not None:
        return f", about {_seconds(gate['eta_ms'])} to go"
    if gate.get("ends_first"):
        return f", but its time in line ends first, in {_seconds(gate['left_ms'])}"
    return ""


def _seconds(ms: float) -> str:
    return f"{max(1, round(ms / 1e3)):,} s"


def plain(text: str) -> str:
    """Make foreign text harmless for a terminal: whatever does not print is shown escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(field: str, value: Any) -> str:
    """One field of an answer for a person, by what its name says it is."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.endswith("_bytes"):
        return human_bytes(value)
    if field in ("tps", "tps_ewma"):
        return f"{value:.1f} tok/s"
    if field.endswith("_ms"):
        return f"{value:,.0f} ms"
    if field.endswith("_s"):
        return f"{value:,g} s"
    if field.endswith("_ts"):
        from datetime import UTC, datetime

        return datetime.fromtimestamp(value, UTC).isoformat(sep=" ", timespec="seconds")
    if isinstance(value, dict):
        return ", ".join(f"{name.removesuffix('_bytes')} {shown(name, part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int) and not field.endswith("_id") and field != "parent":
        return count(value)
    return str(value)
