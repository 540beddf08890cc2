"""``polykvctl``: one module per command group, heavy imports only inside the command that needs them.

Exit status of every command: 0 done, 1 an error that the server (or this machine) answered, 2 wrong usage, 3 the proxy
cannot be reached. Errors are one line on stderr.
"""

import typer

from polykv_proxy.cli import engine

app = typer.Typer(name="polykvctl", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(engine.app, name="engine")


def main() -> None:
    """Entry point: turns the problems of this machine into one line and exit status 1."""
    from polykv_proxy.engine.problem import EngineProblem

    try:
        app()
    except EngineProblem as problem:
        if problem.detail:
            typer.echo(problem.detail, err=True)
        typer.echo(f"polykvctl: {problem.message}", err=True)
        raise SystemExit(1) from None
