"""The command line of a local llama-server, as ``polykvctl up`` wants it."""

import contextlib
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.engine.problem import EngineProblem

LOOPBACK = "127.0.0.1"
_TRIES = 20


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


def choose_port(*hosts: str, wanted: int, flag: str) -> int:
    """``wanted`` if it is free on every one of the addresses, any that is for 0.

    Raises:  EngineProblem that names the ``flag`` to change; a foreign server there would otherwise pass for ours
    """
    for _ in range(_TRIES):
        port = wanted
        with contextlib.ExitStack() as probes:
            for host in hosts:
                try:
                    port = probes.enter_context(_bound(host, port)).getsockname()[1]
                except OSError as error:
                    if not wanted and port and error.errno == errno.EADDRINUSE:
                        break  # free on the first address, but not on this one
                    raise EngineProblem(
                        f"{host}:{port} cannot be used ({error.strerror}): choose another with {flag}"
                    ) from None
            else:
                return port
    raise EngineProblem(f"no port is free on all of {', '.join(hosts)}: choose one with {flag}")


def _bound(host: str, port: int) -> socket.socket:
    """A socket as the proxy's own would be; one of IPv6 leaves IPv4 alone."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe
