"""The command line and environment of a local llama-server, as ``polykvctl up`` wants them."""

import contextlib
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.engine.problem import EngineProblem

LOOPBACK = "127.0.0.1"
MIB = 1 << 20
_TRIES = 20


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of one engine: slots, cells of the cache (shared by all), pools, tokens per batch, and of saved states."""

    binary: Path
    model: Path
    port: int
    n_parallel: int = 4
    n_ctx: int = 16384
    n_max_pools: int = 16
    n_batch: int = 256
    tps_window_tokens: int = 128
    tps_window_ms: int = 2000
    save_ram_bytes: int = 2 << 30
    save_disk_bytes: int = 0
    save_path: Path | None = None
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


def engine_environment(options: EngineOptions) -> dict[str, str]:
    """Where saved states go, in whole MiB, rounded down. An older engine has no flags for it and would refuse to start.

    A variable that it does not know it ignores; a flag in ``more`` beats it.
    """
    if options.n_max_pools == 0:
        return {}
    disk_bytes = options.save_disk_bytes if options.save_path is not None else 0
    environment = {
        "LLAMA_ARG_POLYKV_SAVE_RAM": str(options.save_ram_bytes // MIB),
        "LLAMA_ARG_POLYKV_SAVE_DISK": str(disk_bytes // MIB),
    }
    if options.save_path is not None:
        environment["LLAMA_ARG_POLYKV_SAVE_PATH"] = str(options.save_path)
    return environment


def states_folder(journal: Path) -> Path:
    """Where the engine's files of saved states are, beside the journal; it need not be there."""
    return journal.with_name(f"{journal.name}.states").absolute()


def make_states_folder(journal: Path) -> Path:
    """The folder of saved states, made if need be; they hold prompts, so only we may enter.

    Raises:  EngineProblem
    """
    folder = states_folder(journal)
    try:
        if journal.exists() and not journal.is_file():
            raise EngineProblem(f"{journal} is no file, so there is no folder beside it for saved states")
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise EngineProblem(f"{folder} cannot be made ({error.strerror})") from error
    return folder


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
