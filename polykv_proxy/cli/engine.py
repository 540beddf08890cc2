"""``polykvctl engine``: build the patched llama-server, and keep the patch series in order."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Fetch, patch and build llama-server.")


@app.command("export-patches")
def export_patches(
    tree: Annotated[Path, typer.Argument(help="git tree: first commit = the base, then one commit per patch")],
    to: Annotated[Path | None, typer.Option("--to", help="folder to write (default: the project's patches/)")] = None,
) -> None:
    """Write the patch series from a git tree."""
    from polykv_proxy.engine.patches import export_series
    from polykv_proxy.engine.paths import patches_dir

    for name in export_series(tree.resolve(), to or patches_dir()):
        typer.echo(name)
