"""Stands in for llama-server in `benchmarks.upstream_tests`: takes its arguments, starts one of the three servers.

    python -m benchmarks.upstream_server stock|patched|proxy LLAMA_SERVER_ARGS...

``stock`` becomes the given binary. ``patched`` becomes the patched one with pools. ``proxy`` starts that on a port of
its own and the proxy on the port that was asked for, and stops both when it is stopped.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import FrameType

from tests.engine.harness import free_port

N_POOLS = 8


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


def without(arguments: Sequence[str], flag: str) -> list[str]:
    """The arguments without a flag and its value."""
    if flag not in arguments:
        return list(arguments)
    at = arguments.index(flag)
    return [*arguments[:at], *arguments[at + 2 :]]


def with_pools(arguments: Sequence[str]) -> list[str]:
    """The same server with pools: a unified cache, and for every slot the context it had on the split one."""
    pooled = [*arguments, "--polykv-max-pools", str(N_POOLS)]
    if "--kv-unified" not in arguments:
        pooled.append("--kv-unified")
        n_ctx, n_slots = value_of(arguments, "--ctx-size"), value_of(arguments, "--parallel")
        if n_ctx and n_slots:
            pooled += ["--kv-unified-per-slot", str(int(n_ctx) // int(n_slots))]
    return pooled


def run_behind_proxy(binary: str, arguments: Sequence[str]) -> int:
    port, key = value_of(arguments, "--port"), value_of(arguments, "--api-key")
    host = value_of(arguments, "--host") or "127.0.0.1"
    engine_port = free_port()
    inner = [*without(without(arguments, "--port"), "--host"), "--port", str(engine_port), "--host", "127.0.0.1"]
    upstream = f"http://127.0.0.1:{engine_port}"
    keys = {"POLYKV_UPSTREAM_API_KEY": key, "POLYKV_API_KEY": key} if key else {}
    serve = [sys.executable, "-m", "polykv_proxy.cli", "serve", "--upstream", upstream, "--port", str(port)]
    serve += ["--host", host, "--state", ":memory:"]
    children = [subprocess.Popen([binary, *with_pools(inner)])]

    def stop(_signal: int, _frame: FrameType | None) -> None:
        for child in children:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    while children[0].poll() is None and not is_healthy(upstream):
        time.sleep(0.05)
    if children[0].poll() is None:
        children.append(subprocess.Popen(serve, env=os.environ | keys))
    while all(child.poll() is None for child in children):
        time.sleep(0.05)
    stop(signal.SIGTERM, None)
    return max(abs(child.wait()) for child in children)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    arm, *arguments = sys.argv[1:]
    binary = os.environ["UPSTREAM_TESTS_BINARY"]
    if arm != "proxy":
        os.execv(binary, [binary, *(with_pools(arguments) if arm == "patched" else arguments)])
    return run_behind_proxy(binary, arguments)


if __name__ == "__main__":
    sys.exit(main())
