"""Proxies on a loop of their own, so that hypothesis can play many clients against the same ones."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web

from polykv_proxy.app import CONTROL, RELAY, serving
from polykv_proxy.config import load_settings
from polykv_proxy.control import CreatePool, Source
from tests.fake_engine import FakeEngine
from tests.relay.raw import exchange, until

SETTLED_S = 10.0


class Loop:
    """``start``, ``do`` and ``stop``. ``errors``: what was logged as one since it was last cleared."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()
        self._listener = _Listener(self.errors)

    def start(self) -> None:
        self._thread.start()
        self.do(self._start())
        logging.getLogger("polykv").addHandler(self._listener)

    def stop(self) -> None:
        logging.getLogger("polykv").removeHandler(self._listener)
        self.do(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _start(self) -> None:
        raise NotImplementedError


class Stage(Loop):
    """One fake engine and proxy per mode."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: dict[str, str] = {}
        self.engines: dict[str, FakeEngine] = {}
        self._apps: dict[str, Any] = {}
        self._usual: Counter[str] = Counter()

    async def _start(self) -> None:
        for mode in ("auto", "explicit"):
            url, app = await self._stack.enter_async_context(self._one(mode))
            self.urls[mode], self._apps[mode] = url, app
        await asyncio.sleep(0.1)
        self._usual = tasks()

    @asynccontextmanager
    async def _one(self, mode: str) -> AsyncIterator[Any]:
        settings = {"state": ":memory:", "port": 0, "mode": mode, "session_idle_s": 3600}
        async with (
            FakeEngine(n_cells=2048, n_slots=3, save_ram=1 << 20) as engine,
            serving(load_settings(upstream_url=engine.url, **settings)) as (url, app),
        ):
            self.engines[mode] = engine
            await app[CONTROL].create_pool(CreatePool(source=Source(prompt="You are "), name="base"))
            yield url, app

    async def play(self, mode: str, requests: list[bytes]) -> list[tuple[bytes, bytes]]:
        """All at once. Gives heads and bodies; nobody is left behind when it returns."""
        engine = self.engines[mode]
        engine.received.clear()
        replies = await asyncio.gather(*(exchange(self.urls[mode], request, SETTLED_S) for request in requests))
        await until(lambda: not at_work(self._apps[mode]) and not busy_slots(engine), SETTLED_S)
        await until(lambda: not tasks() - self._usual, SETTLED_S)
        return replies


def at_work(app: web.Application) -> list[int]:
    """What is not zero of all that counts requests."""
    relay, control = app[RELAY], app[CONTROL]
    counts = [relay.n_running, relay.n_floating, relay.desk.n_waiting, relay.backlog.n_waiting, relay.backlog.n_bytes]
    counts += [control.slots.n_held, control.slots.n_waiting, control.sessions.n_running]
    return [n for n in counts if n]


def busy_slots(engine: FakeEngine) -> list[int]:
    return [slot.id for slot in engine.slots if slot.state != "idle"]


def tasks() -> Counter[str]:
    """The proxies' own, by name; those that serve a connection have none."""
    names = (task.get_name() for task in asyncio.all_tasks())
    return Counter(name for name in names if name.startswith("polykv"))


class _Listener(logging.Handler):
    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        self._errors.append(self.format(record))
