"""``polykvctl up``: a local engine and the proxy in the foreground, both kept alive, both gone when we go."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polykv_proxy.cli.output import AdminKey, AsJson

if TYPE_CHECKING:
    from polykv_proxy.config import Settings
    from polykv_proxy.engine.supervisor import Child

# The proxy lets running turns finish for a minute; a second Ctrl-C ends them.
_DRAIN_S = 65.0


def up(
    *,
    engine_args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ENGINE ARGS]", help="Passed to llama-server after ours.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="GGUF file; default: the tests' chat model.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Addresses of the proxy, comma-separated.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port of the proxy, default 8090; 0 = a free one.")] = None,
    engine_port: Annotated[int, typer.Option("--engine-port", min=0, max=65535, help="0 = a free one.")] = 8080,
    parallel: Annotated[int, typer.Option("--parallel", min=1, help="Slots of the engine.")] = 4,
    ctx: Annotated[int, typer.Option("--ctx", min=1, help="Cells of the cache, shared by slots and pools.")] = 16384,
    max_pools: Annotated[int, typer.Option("--max-pools", min=0, help="Pools resident at once.")] = 16,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Tokens per batch.")] = 256,
    mode: Annotated[str | None, typer.Option("--mode", help="auto or explicit.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="Journal of the pools; ':memory:' keeps nothing.")
    ] = None,
    normalise: Annotated[
        str | None, typer.Option("--normalise", help="Pin changing lines of system prompts: billing, date.")
    ] = None,
    admin_key: AdminKey = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with settings of the proxy.")] = None,
    engine: Annotated[
        Path | None,
        typer.Option("--engine", envvar="POLYKV_ENGINE", help="llama-server to run; default: build ours if needed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a local engine and the proxy; Ctrl-C or SIGTERM stops both."""
    # What is wrong is told in this order, before anything is started: usage (status 2), the journal, ports, the engine.
    from polykv_proxy.cli.progress import BuildProgress
    from polykv_proxy.config import load_settings, unread_variables
    from polykv_proxy.doctor import EngineSizes, check_sizes
    from polykv_proxy.engine.build import ensure_engine
    from polykv_proxy.engine.local import LOOPBACK, EngineOptions, choose_port, engine_command, engine_environment
    from polykv_proxy.engine.model import CHAT_MODEL, ensure_model
    from polykv_proxy.engine.supervisor import Child, Supervisor

    sizes = EngineSizes(n_slots=parallel, max_pools=max_pools, n_batch=batch)
    if (refused := check_sizes(sizes)) is not None:
        raise typer.BadParameter(f"{refused.what}: {refused.why} ({refused.do})", param_hint="--max-pools")
    model = model.expanduser() if model is not None else None  # `make MODEL=~/x.gguf` leaves the ~ as it is
    if model is not None and not model.is_file():
        raise typer.BadParameter(f"there is no file {model}", param_hint="--model")
    if engine is not None and shutil.which(engine) is None:
        raise typer.BadParameter(f"there is no program {engine}", param_hint="--engine")
    chosen_engine_port = engine_port or choose_port(LOOPBACK, wanted=0, flag="--engine-port")
    engine_url = f"http://{LOOPBACK}:{chosen_engine_port}"
    asked = load_settings(
        config,
        upstream_url=engine_url,
        host=host,
        port=port,
        mode=mode,
        state=state,
        normalise=normalise,
        admin_key=admin_key,
    )
    for line in unread_variables(os.environ).values():
        _say(line)
    _check_journal(asked)
    choose_port(LOOPBACK, wanted=chosen_engine_port, flag="--engine-port")
    settings = asked.model_copy(update={"port": choose_port(*asked.hosts, wanted=asked.port, flag="--port")})
    with BuildProgress() as progress:
        binary = engine or ensure_engine(progress)
        model = model or ensure_model(CHAT_MODEL, progress.say)
    options = EngineOptions(
        binary=binary,
        model=model,
        port=chosen_engine_port,
        n_parallel=parallel,
        n_ctx=ctx,
        n_max_pools=max_pools,
        n_batch=batch,
        tps_window_tokens=settings.tps_window_tokens,
        tps_window_ms=settings.tps_window_ms,
        save_ram_bytes=settings.warm_ram_bytes,
        save_disk_bytes=settings.warm_disk_bytes,
        save_path=_states_folder(settings),
        more=engine_args or (),
    )
    engine_child = Child(
        name="engine",
        command=engine_command(options),
        ready_url=f"{engine_url}/health",
        log=_fresh_log(settings, chosen_engine_port, is_any=engine_port == 0),
        environment=engine_environment(options) | _engine_key(settings),
    )
    proxy_child = _proxy_child(settings, config)
    supervisor = Supervisor([engine_child, proxy_child], _say)
    for asking in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(asking, lambda *_: supervisor.ask_to_stop())
    _say(f"loading {model.name}; log of the engine: {engine_child.log}")
    supervisor.run(lambda: _announce(settings, engine_child, proxy_child, as_json=as_json))


def _proxy_child(settings: "Settings", config: Path | None) -> "Child":
    from polykv_proxy.config import unread_variables
    from polykv_proxy.engine.supervisor import Child

    command = [sys.executable, "-m", "polykv_proxy.cli", "serve"]
    command += ["--upstream", settings.upstream_url, "--host", settings.host, "--port", str(settings.port)]
    command += ["--mode", settings.mode, "--normalise", ",".join(settings.normalise)]
    command += ["--state", settings.state] if settings.state is not None else []
    command += ["--config", str(config)] if config is not None else []
    key = settings.admin_key.get_secret_value() if settings.admin_key else next(iter(settings.data_keys), None)
    return Child(
        name="proxy",
        command=command,
        ready_url=f"{_proxy_url(settings)}/polykv/health",
        ready_headers={"authorization": f"Bearer {key}"} if key else {},
        log=None,
        # Keys travel in the environment: command lines can be read by everybody on the machine. What was told of is
        # empty there, so that it is not told of twice.
        environment=dict.fromkeys(unread_variables(os.environ), "")
        | ({"POLYKV_ADMIN_KEY": settings.admin_key.get_secret_value()} if settings.admin_key else {}),
        orphan_signal=signal.SIGTERM,
        stop_patience_s=_DRAIN_S,
    )


def _engine_key(settings: "Settings") -> dict[str, str]:
    key = settings.upstream_api_key
    return {"LLAMA_API_KEY": key.get_secret_value()} if key else {}


def _states_folder(settings: "Settings") -> Path | None:
    """None when nothing is to be saved on disk, or when it cannot be, which is said: all else works without.

    A folder of an earlier run that had a budget is given to the engine without one: it removes its files there.
    """
    from polykv_proxy.config import MEMORY_STATE
    from polykv_proxy.engine.local import make_states_folder, states_folder
    from polykv_proxy.engine.problem import EngineProblem

    if settings.warm_disk_bytes == 0:
        left = states_folder(Path(settings.state_path))
        return left if settings.state_path != MEMORY_STATE and left.is_dir() else None
    if settings.state_path == MEMORY_STATE:
        _say(f"no state is saved on disk: it would lie beside the journal, and --state is {MEMORY_STATE}")
        return None
    try:
        return make_states_folder(Path(settings.state_path))
    except EngineProblem as problem:
        _say(f"no state is saved on disk: {problem}")
        return None


def _check_journal(settings: "Settings") -> None:
    """See whether the proxy will get its lock, so that no engine loads a model for nothing. It is not kept.

    Raises:  EngineProblem when another process has it
    """
    from polykv_proxy.config import MEMORY_STATE
    from polykv_proxy.engine.problem import EngineProblem
    from polykv_proxy.store import place

    journal = Path(settings.state_path)
    if settings.state_path == MEMORY_STATE or not place.is_there(journal):
        return
    try:
        real = place.prepare(journal)
        place.unlock(place.lock(real), real)
    except place.Taken as holder:
        raise EngineProblem(
            f"the journal {settings.state_path} is in use by {holder}: stop that one, or start this one beside it with "
            f"{'' if settings.state is None else 'another --state, '}another --engine-port and another --port"
        ) from holder
    except place.Unusable:
        return  # the proxy says so, and keeps its pools in memory


def _fresh_log(settings: "Settings", engine_port: int, *, is_any: bool) -> Path:
    """Beside the journal; the last one of this port is kept under ``.1``. What runs that are over left there goes.

    ``is_any``: nobody chose the port, so no later run writes there.
    """
    from polykv_proxy.config import MEMORY_STATE
    from polykv_proxy.engine.leftovers import tidy_logs
    from polykv_proxy.engine.paths import state_dir
    from polykv_proxy.store import place

    ours = state_dir()
    folder = ours if settings.state_path == MEMORY_STATE else Path(settings.state_path).parent
    log = folder / f"engine-{f'any-{engine_port}' if is_any else engine_port}.log"
    if log.exists():
        os.replace(log, log.with_name(f"{log.name}.1"))
    tidy_logs(log, is_ours=folder == ours)
    place.remove_left_locks(ours)
    return log


def _proxy_url(settings: "Settings") -> str:
    """Where to reach its first address from this machine; one that means "all" is not one to connect to."""
    first = settings.hosts[0]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(first, first)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _announce(settings: "Settings", engine: "Child", proxy: "Child", *, as_json: bool) -> None:
    url = _proxy_url(settings)
    if as_json:
        facts = {"proxy": url, "engine": settings.upstream_url, "engine_pid": engine.pid, "proxy_pid": proxy.pid}
        print(json.dumps(facts), flush=True)
        return
    key = " -H 'authorization: Bearer YOUR_KEY'" if settings.data_keys else ""
    print(f"proxy   {url}\nengine  {settings.upstream_url}\n")
    print(
        f"curl {url}/v1/chat/completions -H 'content-type: application/json'{key} \\\n"
        """  -d '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}'""",
        flush=True,
    )


def _say(line: str) -> None:
    typer.echo(line, err=True)
