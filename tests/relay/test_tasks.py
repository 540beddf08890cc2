"""A small request is one task's work: that of its connection."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from polykv_proxy.relay.connection import Connection
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy
from tests.relay.raw import until

CHAT = "/v1/chat/completions"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="tasks begin at once there, and aiohttp makes them so")
async def test_no_task_is_made_for_a_request(proxy: Proxy) -> None:
    begun: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **kw: Any) -> asyncio.Task[Any]:
        if isinstance(work.cr_frame.f_locals.get("self"), Connection):  # and not one of the engine's, which is here too
            begun.append(work.__qualname__)
        return asyncio.Task(work, loop=loop, **kw)

    loop = asyncio.get_running_loop()
    assert (await proxy.chat()).status_code == 200
    loop.set_task_factory(factory)
    try:
        for path in (CHAT, "/health", "/polykv/pools"):
            answer = await (proxy.chat() if path == CHAT else proxy.client.get(path))
            assert answer.status_code == 200
    finally:
        loop.set_task_factory(None)
    assert begun == []


async def test_who_leaves_ends_his_request_and_nobody_elses(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold, times=None)
    leaving, staying = asyncio.create_task(proxy.chat("a")), asyncio.create_task(proxy.chat("b"))
    await hold.reached()
    await until(lambda: proxy.at_rest()["running"] == 2)
    leaving.cancel()
    await until(lambda: proxy.at_rest()["running"] == 1)
    hold.release()
    assert (await staying).status_code == 200
    assert (await proxy.chat("c")).status_code == 200
    await until(lambda: not any(proxy.at_rest().values()))
    assert proxy.control.room._promises == {}
