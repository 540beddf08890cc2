"""``polykvctl serve``: the proxy alone, beside an engine that already runs."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    *,
    upstream: Annotated[str | None, typer.Option("--upstream", help="URL of the llama-server.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 = a free one.")] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="auto or explicit.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="Journal of the pools; ':memory:' keeps nothing.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option("--admin-key", envvar="POLYKV_ADMIN_KEY", help="Control-plane key.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")] = None,
) -> None:
    """Run the proxy in front of a llama-server that already runs.

    Every setting has an environment variable too (POLYKV_HOST, POLYKV_UPSTREAM_URL, …); a flag beats it.
    """
    from polykv_proxy.app import run
    from polykv_proxy.config import load_settings

    settings = load_settings(
        config, upstream_url=upstream, host=host, port=port, mode=mode, state=state, admin_key=admin_key
    )
    run(settings)
