"""An engine and a proxy with a journal, each killed and started again on its own, as machines and operators do it."""

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from . import loopback
from .binaries import binary_path
from .harness import EngineServer
from .restarts import ProxyProcess, kill_engine

READY_TIMEOUT_S = 60


class Deployment:
    """`llama-server` and `polykvctl serve` beside it. ``http`` talks to the proxy.

    ``settings``: of the proxy, as in its TOML file.
    """

    def __init__(self, model: Path, *engine_args: str, dir_: Path, settings: dict[str, float] | None = None) -> None:
        self.engine = EngineServer(binary_path("patched"), model, *engine_args, log_dir=dir_)
        self.log = dir_ / "proxy.log"
        file = dir_ / "polykv.toml"
        file.write_text("".join(f"{name} = {value}\n" for name, value in (settings or {}).items()))
        self._proxy = ProxyProcess(self.engine.url, dir_ / "pools.db", self.log, ["--config", str(file)])
        self.http = httpx.Client(base_url=self._proxy.url, timeout=120, limits=httpx.Limits(keepalive_expiry=1))

    def __enter__(self) -> Self:
        self.engine.start()
        try:
            self._proxy.start()
            self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._proxy.kill()
        self.http.close()
        self.engine.stop()

    def restart_proxy(self) -> None:
        """kill -9; the journal is all that is left of it, and the engine is still busy with what it asked for.

        The next one does not wait until the lease has run out; `test_restarts` and `test_owner` do.
        """
        self._proxy.kill()
        self._end_lease()
        self._proxy.start()
        self.wait_ready()

    def restart_engine(self) -> None:
        """kill -9, and a new start on the same port."""
        kill_engine(self.engine)
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
            assert time.monotonic() < deadline, f"not ready: {health.text}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)

    def stats(self) -> dict[str, Any]:
        return self._engine("/polykv/engine/stats")

    def sequences(self) -> list[dict[str, Any]]:
        """The engine's pool sequences that are not free."""
        return [pool for pool in self._engine("/polykv/engine/pools")["pools"] if pool["state"] != "free"]

    def _end_lease(self) -> None:
        owner = f"{self.engine.url}/polykv/engine/owner"
        refused = httpx.put(owner, json={"id": "nobody", "ttl_s": 0}, timeout=60)
        assert refused.status_code == 409, refused.text
        holder = refused.json()["error"]["owner"]
        httpx.put(owner, json={"id": holder, "ttl_s": 0}, timeout=60).raise_for_status()

    def _engine(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = loopback.get(self.engine.url + path, timeout=60).raise_for_status().json()
        return answer
