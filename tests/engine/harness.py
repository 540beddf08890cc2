"""Starts one real llama-server, waits until it serves, and proves at the end that it did not crash.

Every server listens on a free loopback port, writes its log to a file whose tail is part of any failure, and is
stopped by its own pid. A server that dies of a signal fails the test that used it, whatever the test asserted: an
assert or an abort in the engine takes every agent down with it.
"""

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30


class EngineDied(AssertionError):
    """The server is gone; the message carries the end of its log."""


class EngineServer:
    """A llama-server process and an HTTP client for it. Use it as a context manager.

    ``flags`` come after the host, the port, the model and ``-t 1``. One thread, because two split the attention over a
    cache at a point that moves with it, which changes sums; and because servers with more threads than free cores spin.
    """

    def __init__(self, binary: Path, model: Path, *flags: str, log_dir: Path, name: str = "engine") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [str(binary), "--host", "127.0.0.1", "--port", str(self.port)]
        self.command += ["-m", str(model), "-t", "1", *flags]
        self.log_path = log_dir / f"{name}-{self.port}.log"
        # llama-server closes a connection that was idle for 5 s; giving it up sooner avoids meeting it half closed.
        self.http = httpx.Client(base_url=self.url, timeout=300, verify=False, limits=httpx.Limits(keepalive_expiry=1))
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    def start(self) -> None:
        with self.log_path.open("wb") as log:
            command = bound_to_this_process() + self.command
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self.assert_alive()
            if time.monotonic() > deadline:
                self.stop()
                raise EngineDied(f"no /health after {START_TIMEOUT_S} s\n{self.log_tail()}")
            try:
                if self.http.get("/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop by pid and assert that the server lived until then and ended in its own time."""
        self.http.close()
        process, self.process = self.process, None
        if process is None:
            return
        died = process.poll()
        if died is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise EngineDied(f"did not stop within {STOP_TIMEOUT_S} s\n{self.log_tail()}") from None
        if process.returncode not in (0, -signal.SIGTERM):
            raise EngineDied(f"ended with {process.returncode}\n{self.log_tail()}")
        if died is not None:
            raise EngineDied(f"stopped on its own with {died}\n{self.log_tail()}")

    def kill(self) -> None:
        """End it as the kernel does when memory runs out: without a chance to tidy up."""
        self.http.close()
        self.assert_alive()
        process, self.process = self.process, None
        assert process is not None, "not started"
        process.kill()
        process.wait()

    def assert_alive(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            raise EngineDied(f"ended with {self.process.returncode}: {' '.join(self.command)}\n{self.log_tail()}")

    def log_tail(self, n_lines: int = 40) -> str:
        return "\n".join(self.log().splitlines()[-n_lines:])

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def bound_to_this_process() -> list[str]:
    """A prefix that ends the server when the test process is killed without a tear-down (util-linux has it)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []
