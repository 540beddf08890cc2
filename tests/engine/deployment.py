"""An engine and a proxy with a journal, each killed and started again on its own, as machines and operators do it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from .binaries import binary_path
from .harness import EngineServer

READY_TIMEOUT_S = 60


class Deployment:
    """`llama-server` and `polykvctl serve` beside it. ``http`` talks to the proxy of the moment."""

    def __init__(self, model: Path, *engine_args: str, dir_: Path, env: dict[str, str] | None = None) -> None:
        self.dir = dir_
        self.engine = EngineServer(binary_path("patched"), model, *engine_args, log_dir=dir_)
        self._state = dir_ / "pools.db"
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("POLYKV_")} | (env or {})
        self._proxy: subprocess.Popen[str] | None = None
        self.http = httpx.Client()

    def __enter__(self) -> Self:
        self.engine.start()
        try:
            self.start_proxy()
        except BaseException:
            self.engine.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill_proxy()
        self.engine.stop()

    @property
    def proxy_log(self) -> Path:
        return self.dir / "proxy.log"

    def start_proxy(self) -> None:
        command = [sys.executable, "-m", "polykv_proxy.cli", "serve", "--json", "--upstream", self.engine.url]
        command += ["--port", "0", "--state", str(self._state)]
        with self.proxy_log.open("a") as log:
            self._proxy = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=self._env
            )
        assert self._proxy.stdout is not None
        line = self._proxy.stdout.readline()
        assert line, f"the proxy did not start\n{self.proxy_log.read_text()[-4000:]}"
        self.http.close()
        limits = httpx.Limits(keepalive_expiry=1)
        self.http = httpx.Client(base_url=json.loads(line)["proxy"], timeout=120, limits=limits)
        self.wait_ready()

    def kill_proxy(self) -> None:
        """kill -9; the journal is all that is left of it."""
        process, self._proxy = self._proxy, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.http.close()

    def restart_proxy(self) -> None:
        self.kill_proxy()
        self.start_proxy()

    def restart_engine(self) -> None:
        """kill -9, and a new start on the same port."""
        process = self.engine.process
        assert process is not None
        process.kill()
        process.wait()
        self.engine.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until the proxy found the engine and calls itself ready."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        epoch = self.stats()["epoch"]
        while True:
            health = self.http.get("/polykv/health")
            if health.status_code == 200 and health.json()["engine"]["epoch"] == epoch:
                return
            assert time.monotonic() < deadline, f"not ready: {health.text}\n{self.proxy_log.read_text()[-4000:]}"
            time.sleep(0.05)

    def stats(self) -> dict[str, Any]:
        return self._engine("/polykv/engine/stats")

    def sequences(self) -> list[dict[str, Any]]:
        """The engine's pool sequences that are not free."""
        return [pool for pool in self._engine("/polykv/engine/pools")["pools"] if pool["state"] != "free"]

    def _engine(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(self.engine.url + path, timeout=60).raise_for_status().json()
        return answer
