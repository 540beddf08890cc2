"""Engine and proxy of the demo: ``polykvctl up`` as a child on free ports, stopped whatever happens."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from polykv_proxy.engine.local import LOOPBACK, choose_port
from polykv_proxy.engine.problem import EngineProblem
from polykv_proxy.engine.supervisor import Child

_TICK_S = 0.1
_STOP_PATIENCE_S = 25.0

# Keys of the caller's own installation must not lock the demo out of its own proxy.
_NO_KEYS = {"POLYKV_API_KEY": "", "POLYKV_ADMIN_KEY": "", "POLYKV_UPSTREAM_API_KEY": ""}


@dataclass(frozen=True)
class Sizes:
    """What the demo starts: slots, cells, pools (0 = plain llama-server)."""

    n_parallel: int = 4
    n_ctx: int = 16384
    n_max_pools: int = 16


class Stack:
    """``with Stack(binary, model, sizes) as stack: stack.start(tick); stack.url``. It stops when the block ends."""

    def __init__(self, binary: Path, model: Path, sizes: Sizes):
        self._scratch = tempfile.TemporaryDirectory(prefix="polykv-demo-")
        port = choose_port(LOOPBACK, wanted=0, flag="--port")
        self.url = f"http://{LOOPBACK}:{port}"
        self._child = Child(
            name="demo's engine and proxy",
            command=_up_command(binary, model, sizes, port),
            ready_url=f"{self.url}/polykv/health",
            log=Path(self._scratch.name) / "up.log",
            environment=_NO_KEYS,
            orphan_signal=signal.SIGTERM,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def start(self, tick: Callable[[], None]) -> None:
        """Start both and wait until they can work; ``tick`` is called now and then.

        Raises:  EngineProblem with the end of the log
        """
        self._child.start()
        while not self._child.is_ready():
            process = self._child.process
            if process is None or process.poll() is not None:
                raise EngineProblem("engine and proxy of the demo did not start", detail=self._child.end_of_log())
            tick()
            time.sleep(_TICK_S)

    def _stop(self) -> None:
        process = self._child.process
        try:
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(_STOP_PATIENCE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            self._scratch.cleanup()


def _up_command(binary: Path, model: Path, sizes: Sizes, port: int) -> Sequence[str]:
    command = [sys.executable, "-m", "polykv_proxy.cli", "up", "--engine", str(binary), "--model", str(model)]
    command += ["--host", LOOPBACK, "--port", str(port), "--engine-port", "0", "--state", ":memory:", "--mode", "auto"]
    command += ["--parallel", str(sizes.n_parallel), "--ctx", str(sizes.n_ctx)]
    return [*command, "--max-pools", str(sizes.n_max_pools)]
