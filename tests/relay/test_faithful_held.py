"""A stream that may be resumed has the engine's bytes alone in front of its last event, also when its turn was held."""

import asyncio

import pytest

from polykv_proxy.relay import kept_alive
from tests.contract.test_admission_serving import Busy, body_of, busy, set_policy
from tests.relay.conftest import Proxy
from tests.relay.raw import until

__all__ = ["busy"]


@pytest.mark.parametrize("counted", [True, False])
async def test_only_a_stream_that_nobody_counts_is_kept_alive_with_comments(
    proxy: Proxy,
    busy: Busy,
    monkeypatch: pytest.MonkeyPatch,
    counted: bool,
) -> None:
    headers = {"x-conversation-id": "old"} if counted else {}
    monkeypatch.setattr(kept_alive, "EVERY_S", 0.01)
    body = body_of("old", stream=True)
    await proxy.client.post("/completion", json=body, headers=headers)
    await set_policy(proxy, max_turn_hold_ms=60_000)
    await busy.begin()
    turn = asyncio.create_task(proxy.client.post("/completion", json=body, headers=headers))
    await until(lambda: proxy.control.door.n_held == 1)
    for _ in range(10):
        await asyncio.sleep(0.01)
    await busy.end()
    said = (await turn).content
    assert said.startswith(b"data: {" if counted else b": hold\n\n")
    assert (b": hold" in said) is not counted
