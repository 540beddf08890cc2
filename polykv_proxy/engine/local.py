"""The command line of a local llama-server, as ``polykvctl up`` wants it."""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.engine.problem import EngineProblem

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of one engine: slots, cells of the cache (shared by all), pools, tokens per batch."""

    binary: Path
    model: Path
    port: int
    n_parallel: int = 4
    n_ctx: int = 16384
    n_max_pools: int = 16
    n_batch: int = 256
    tps_window_tokens: int = 128
    tps_window_ms: int = 2000
    more: Sequence[str] = ()


def engine_command(options: EngineOptions) -> list[str]:
    """Build the command; ``more`` comes last, so it wins over what we chose.

    A small batch, because everything except stats waits for the end of a batch. No saving of idle slots to host
    memory: it would wipe them at every launch, and bring a shared prefix back as private cells.
    """
    command = [str(options.binary), "--model", str(options.model)]
    command += ["--host", LOOPBACK, "--port", str(options.port)]
    command += ["--parallel", str(options.n_parallel), "--ctx-size", str(options.n_ctx), "--kv-unified"]
    command += ["--batch-size", str(options.n_batch), "--no-cache-idle-slots", "--slots", "--metrics"]
    if options.n_max_pools > 0:
        command += ["--polykv-max-pools", str(options.n_max_pools)]
        command += ["--polykv-tps-window-tokens", str(options.tps_window_tokens)]
        command += ["--polykv-tps-window-ms", str(options.tps_window_ms)]
    return [*command, *options.more]


def choose_port(host: str, wanted: int, *, flag: str) -> int:
    """``wanted`` if it is free, any free one for 0.

    Raises:  EngineProblem that names the ``flag`` to change; a foreign server there would otherwise pass for ours
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            raise EngineProblem(
                f"{host}:{wanted} cannot be used ({error.strerror}): choose another with {flag}"
            ) from None
        port: int = probe.getsockname()[1]
        return port
