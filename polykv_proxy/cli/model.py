"""``polykvctl model``: the chat model of tests and demo."""

import json

import typer

from polykv_proxy.cli.output import AsJson

app = typer.Typer(no_args_is_help=True, help="The chat model of tests and demo.")


@app.callback()
def _group() -> None:
    """Keeps ``path`` a subcommand: a group of one command would swallow its name."""


@app.command("path")
def path(
    as_json: AsJson = False,
) -> None:
    """Print the path of SmolLM2-135M-Instruct (GGUF); fetches it into the per-user cache first if needed."""
    from polykv_proxy.engine.model import CHAT_MODEL, ensure_model

    found = ensure_model(CHAT_MODEL, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps({"path": str(found)}) if as_json else found)
