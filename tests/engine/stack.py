"""Starts `polykvctl up`, engine and proxy together, as a user does; free ports, nothing kept, stopped by its pid."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

STOP_TIMEOUT_S = 80


class ProxyStack:
    """A proxy in front of an engine. ``url`` and ``http`` are the proxy's, ``engine_url`` the engine's.

    ``engine_args`` go to llama-server after those of `polykvctl up`.
    """

    def __init__(
        self,
        binary: Path,
        model: Path,
        *engine_args: str,
        log_dir: Path,
        mode: str = "auto",
        up_args: tuple[str, ...] = (),
    ) -> None:
        command = [sys.executable, "-m", "polykv_proxy.cli", "up", "--json", "--engine", str(binary)]
        command += ["--model", str(model), "--port", "0", "--engine-port", "0", "--mode", mode, "--state", ":memory:"]
        self._command = [*command, *up_args, "--", *engine_args]
        self.log_path = log_dir / "polykvctl-up.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("POLYKV_")}
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=kept
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__(None, None, None)
            raise AssertionError(f"polykvctl up did not start\n{self.log_path.read_text()}")
        facts = json.loads(line)
        self.url: str = facts["proxy"]
        self.engine_url: str = facts["engine"]
        self.engine_pid: int = facts["engine_pid"]
        self.proxy_pid: int = facts["proxy_pid"]
        self.http = httpx.Client(base_url=self.url, timeout=300, verify=False, limits=httpx.Limits(keepalive_expiry=1))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"polykvctl up did not stop\n{self.log_path.read_text()}") from None
        if process.stdout is not None:
            process.stdout.close()
        if hasattr(self, "http"):
            self.http.close()
