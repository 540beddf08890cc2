"""``polykvctl``: one module per command group, heavy imports only inside the command that needs them.

Exit status of every command: 0 done, 1 an error that the server (or this machine) answered, 2 wrong usage, 3 the proxy
cannot be reached. Errors are one line on stderr; a failed build prints the step that failed above it.
"""

import sys

import typer

from polykv_proxy.cli import (
    admission,
    compact,
    demo,
    doctor,
    engine,
    explain,
    match,
    model,
    pools,
    serve,
    sessions,
    top,
    tps,
    up,
)

app = typer.Typer(
    name="polykvctl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Shared-prefix KV pools for llama-server.",
)
app.command("demo")(demo.demo)
app.command("up")(up.up)
app.command("serve")(serve.serve)
app.command("capacity")(admission.capacity)
app.command("match")(match.match)
app.command("compact")(compact.compact)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.command("tps")(tps.tps)
app.command("top")(top.top)
app.add_typer(pools.app, name="pools")
app.add_typer(sessions.app, name="sessions")
app.add_typer(admission.app, name="admission")
app.add_typer(engine.app, name="engine")
app.add_typer(model.app, name="model")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from polykv_proxy import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: turns whatever went wrong into one line and the right exit status."""
    try:
        status = app(prog_name="polykvctl", standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        status = _report(error)
    sys.exit(status if isinstance(status, int) else 0)


def _report(error: Exception) -> int:
    """Print what a person needs to know and return the exit status; re-raise our own bugs."""
    from polykv_proxy.cli.output import complain
    from polykv_proxy.config import ConfigError
    from polykv_proxy.engine.problem import EngineProblem

    if isinstance(error, EngineProblem):
        if error.detail:
            print(error.detail, file=sys.stderr)
        complain(f"polykvctl: {error.message}")
        return 1
    if isinstance(error, ConfigError):
        complain(f"polykvctl: {error}")
        return 2
    if isinstance(error, OSError):  # a full disk, a folder that is not ours, a closed pipe
        complain(f"polykvctl: {error}")
        return 1
    # typer's own exceptions (wrong usage), wherever its version keeps them
    message = getattr(error, "format_message", None)
    if message is None:
        raise error
    path = getattr(getattr(error, "ctx", None), "command_path", "polykvctl")
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message(), file=sys.stderr)
    else:
        complain(f"{path}: {_one_line(message())}")
    return int(getattr(error, "exit_code", 2))


def _one_line(text: str) -> str:
    return " ".join(text.split())
