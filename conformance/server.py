"""Stands in for llama-server: takes its arguments, starts the server of one arm.

    stock        the binary it is given, with the arguments as they came
    patched-off  the same for the patched binary, which is told to have no pools
    patched      the patched binary with pools
    proxy        that on a port of its own, and the proxy on the addresses and the port that were asked for
    proxy-stock  the same with a stock binary

Cache and context are those that the test asks for: a unified cache only where it says so, and on a split one, of which
every sequence gets an equal share, as much for each slot as without pools.
"""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

from conformance.children import BOUND
from conformance.nursery import Forked
from tests.engine.harness import free_port

ARMS = {"stock": "stock", "patched-off": "patched", "patched": "patched", "proxy": "patched", "proxy-stock": "stock"}
"""Which build each arm runs."""

N_POOLS = 4
_N_EXTRA_SEQ = 2
"""Sequences that the engine adds to slots and pools: the service slot's and a spare one."""

MODEL_FLAGS = {"--model", "--hf-repo", "--model-url"}
IsEnded = Callable[[], bool]

_STOP_WITHIN_S = 2.5
"""Less than the three seconds that the tests find long, and than the five after which they kill us."""


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


def without(arguments: Sequence[str], *flags: str) -> list[str]:
    """The arguments without these flags and their values."""
    kept = list(arguments)
    for flag in flags:
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
    return kept


def padded(n: int) -> int:
    """As llama.cpp rounds the cells of a cache, and of one sequence in it."""
    return -(-n // 256) * 256


def with_pools(arguments: Sequence[str]) -> list[str]:
    """The same server with pools; every slot keeps its context.

    Without ``--parallel`` llama-server takes a unified cache by itself. A router (without a model) and a reranker,
    whose prompts share nothing, take no pools.
    """
    if not MODEL_FLAGS & set(arguments) or "--reranking" in arguments:
        return list(arguments)
    pools = ["--polykv-max-pools", str(N_POOLS)]
    n_ctx, n_slots = value_of(arguments, "--ctx-size"), value_of(arguments, "--parallel")
    if "--kv-unified" in arguments or n_slots is None:
        return [*arguments, *pools]
    if n_ctx is None:
        raise SystemExit("a split cache without --ctx-size: there is no telling what a slot should get")
    n_ctx_slot = padded(padded(int(n_ctx)) // int(n_slots))
    n_ctx_all = n_ctx_slot * (int(n_slots) + N_POOLS + _N_EXTRA_SEQ)
    return [*without(arguments, "--ctx-size"), "--ctx-size", str(n_ctx_all), *pools]


def run_behind_proxy(binary: str, arguments: Sequence[str], is_ended: IsEnded, *, pools: bool) -> int:
    port, key = value_of(arguments, "--port"), value_of(arguments, "--api-key")
    host = value_of(arguments, "--host") or "127.0.0.1"
    engine_port = another_port(port)
    inner = [*without(arguments, "--port", "--host"), "--port", str(engine_port), "--host", "127.0.0.1"]
    upstream = f"http://127.0.0.1:{engine_port}"
    keys = {"POLYKV_UPSTREAM_API_KEY": key, "POLYKV_API_KEY": key} if key else {}
    serve = ["serve", "--upstream", upstream, "--port", str(port), "--host", host, "--state", ":memory:"]
    # The port of llama-server on a prediction platform, which goes before its flag.
    own_port = {"AIP_HTTP_PORT": str(engine_port)} if "AIP_HTTP_PORT" in os.environ else {}
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))

    def proxy() -> None:
        from polykv_proxy.cli import main as polykvctl

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(keys)
        sys.argv = ["polykvctl", *serve]
        polykvctl()

    children: list[subprocess.Popen[bytes] | Forked] = []
    engine = [*BOUND, binary, *(with_pools(inner) if pools else inner)]
    children.append(subprocess.Popen(engine, env=os.environ | own_port))
    while not told and not is_ended() and all(child.poll() is None for child in children):
        if len(children) == 1 and is_healthy(upstream):
            children.append(Forked(proxy))
        time.sleep(0.03)
    for child in children:
        child.terminate()
    end_s = time.monotonic() + _STOP_WITHIN_S
    while any(child.poll() is None for child in children) and time.monotonic() < end_s:
        time.sleep(0.01)
    for child in children:
        child.kill()
    while any(child.poll() is None for child in children):
        time.sleep(0.01)
    return max(abs(child.returncode or 0) for child in children)


def another_port(taken: str | None) -> int:
    """A free port that is not the one the proxy is about to listen on."""
    while (port := free_port()) == int(taken or 0):
        pass
    return port


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main(given: Sequence[str] | None = None, is_ended: IsEnded = lambda: False) -> int:
    """Become the server that ``ARM ARGUMENTS...`` asks for. ``is_ended``: whether it should stop, beside SIGTERM."""
    arm, *arguments = given or sys.argv[1:]
    binary = os.environ["CONFORMANCE_BINARY"]
    if arm == "patched":
        arguments = with_pools(arguments)
    elif arm == "patched-off":
        arguments += ["--polykv-max-pools", "0"]
    if not arm.startswith("proxy"):
        command = [*BOUND, binary, *arguments]
        os.execvp(command[0], command)
    return run_behind_proxy(binary, arguments, is_ended, pools=arm == "proxy")


if __name__ == "__main__":
    sys.exit(main())
