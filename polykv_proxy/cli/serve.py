"""``polykvctl serve``: the proxy alone, beside an engine that already runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from polykv_proxy.cli.output import AdminKey, AsJson


def serve(
    *,
    upstream: Annotated[str | None, typer.Option("--upstream", "--upstream-url", help="The llama-server.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Addresses to listen on, comma-separated.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 = a free one.")] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="auto or explicit.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="Journal of the pools; ':memory:' keeps nothing.")
    ] = None,
    normalise: Annotated[
        str | None, typer.Option("--normalise", help="Pin changing lines of system prompts: billing, date.")
    ] = None,
    admin_key: AdminKey = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the proxy in front of a llama-server that already runs.

    Every setting has an environment variable too (POLYKV_HOST, POLYKV_UPSTREAM_URL, …); a flag beats it.
    """
    import logging
    import os

    from polykv_proxy.config import load_settings, unread_variables
    from polykv_proxy.engine.local import choose_port

    settings = load_settings(
        config,
        upstream_url=upstream,
        host=host,
        port=port,
        mode=mode,
        state=state,
        normalise=normalise,
        admin_key=admin_key,
    )
    if settings.port or len(settings.hosts) > 1:
        chosen = choose_port(*settings.hosts, wanted=settings.port, flag="--port")
        settings = settings.model_copy(update={"port": chosen})

    from polykv_proxy.app import run  # after the checks: a wrong setting is told before the heavy imports

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for line in unread_variables(os.environ).values():
        logging.getLogger("polykv.settings").warning(line)

    def ready(url: str) -> None:
        print(json.dumps({"proxy": url, "upstream": settings.upstream_url}) if as_json else f"proxy  {url}", flush=True)

    run(settings, ready=ready)
