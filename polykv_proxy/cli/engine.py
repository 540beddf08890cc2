"""``polykvctl engine``: build llama-server with our patches, and keep the patch series in order."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from polykv_proxy.cli.output import AsJson

app = typer.Typer(no_args_is_help=True, help="Fetch, patch and build llama-server.")

Stock = Annotated[bool, typer.Option("--stock", help="The same tree without our patches, for comparisons.")]


@app.command("build")
def build(stock: Stock = False, as_json: AsJson = False) -> None:
    """Build llama-server into the per-user cache; returns at once when it is there already."""
    path = _ensure(stock)
    typer.echo(json.dumps({"path": str(path), "stock": stock}) if as_json else path)


@app.command("path")
def path(stock: Stock = False, as_json: AsJson = False) -> None:
    """Print the path of the binary; builds it first if needed (progress goes to stderr)."""
    build(stock=stock, as_json=as_json)


@app.command("info")
def info(stock: Stock = False, as_json: AsJson = False) -> None:
    """Print commit, patches, flags and path of the binary that belongs to them; builds nothing."""
    from polykv_proxy.engine.build import describe_engine

    facts = asdict(describe_engine(stock=stock))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"commit    {facts['base']}")
    _echo_list("patches", facts["patches"] or ["none"])
    _echo_list("flags", facts["flags"])
    typer.echo(f"compiler  {facts['compiler']}")
    typer.echo(f"cpu       {facts['cpu']}")
    typer.echo(f"key       {facts['key']}")
    typer.echo(f"path      {facts['path']} ({'built' if facts['built'] else 'not built'})")


@app.command("check-patches")
def check_patches() -> None:
    """Apply the series to the pinned commit without fuzz, export it again and compare byte for byte."""
    from polykv_proxy.engine.paths import patches_dir
    from polykv_proxy.engine.series import check_series, load_series
    from polykv_proxy.engine.source import pinned_tree

    series = load_series(patches_dir())
    check_series(pinned_tree(_say), series)
    typer.echo(f"{len(series.patches)} patches apply to {series.base[:8]} and export to the same bytes")


@app.command("export-patches")
def export_patches(
    tree: Annotated[Path, typer.Argument(help="Git tree: its first commit is the base, then one commit per patch.")],
    to: Annotated[Path | None, typer.Option("--to", help="Folder to write; default: the project's patches/.")] = None,
) -> None:
    """Write the patch series from a git tree."""
    from polykv_proxy.engine.paths import patches_dir
    from polykv_proxy.engine.series import export_series

    for name in export_series(tree.resolve(), to or patches_dir()):
        typer.echo(name)


def _ensure(stock: bool) -> Path:
    from polykv_proxy.cli.progress import BuildProgress
    from polykv_proxy.engine.build import ensure_engine

    with BuildProgress() as progress:
        return ensure_engine(progress, stock=stock)


def _echo_list(title: str, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        typer.echo(f"{'' if number else title:<10}{line}")


def _say(line: str) -> None:
    typer.echo(line, err=True)
