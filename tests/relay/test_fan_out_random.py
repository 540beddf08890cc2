"""Any crowd of requests that begin alike, and of which some leave: everybody is answered, and nothing is left."""

import asyncio
import random

import pytest

from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import body_of
from tests.relay.raw import until

CHAT = "/v1/chat/completions"
TASKS = (
    "",
    "Read all files in this folder and tell what each is for. " * 3,
    "Write the tests that are missing here. " * 4,
)
WITHIN_S = 60
TELLING = (2, 8, 31, 59, 146, 185, 198, 304)
"""Seeds in which requests once waited for each other, or for themselves."""


@pytest.mark.parametrize("seed", [*TELLING, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(320, 400))])
async def test_everybody_is_answered(make_proxy: ProxyMaker, seed: int) -> None:
    draw = random.Random(seed)
    n_slots, has_pools = draw.choice((1, 2, 4)), draw.random() < 0.7
    async with FakeEngine(n_slots=n_slots, max_pools=16 if has_pools else 1) as engine, make_proxy(engine.url) as proxy:
        if not has_pools:
            pool = await proxy.pool(tokens=[1, 2, 3])
            await proxy.client.post(f"/polykv/pools/{pool['pool_id']}/pin")
        engine.prefill_s, engine.token_s = draw.choice((0.0, 0.0002)), draw.choice((0.0, 0.01))
        requests = [asyncio.create_task(one(proxy, draw.random(), draw.randrange(1000), seed)) for _ in range(10)]
        for request in draw.sample(requests, 4):
            await asyncio.sleep(draw.random() * 0.15)
            request.cancel()
        done = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), WITHIN_S)
        assert {status for status in done if not isinstance(status, asyncio.CancelledError)} <= {200}
        await until(lambda: proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0))
        assert proxy.control.fan_out.n_waiting == 0


async def one(proxy: Proxy, when: float, number: int, seed: int) -> int:
    draw = random.Random(number)
    await asyncio.sleep(when * 0.2)
    text = draw.choice(TASKS) + draw.choice(TASKS) + str(number)
    named = {"session_id": f"{seed}-{number % 6}"} if draw.random() < 0.5 else {}
    stream = draw.random() < 0.5
    return (await proxy.client.post(CHAT, json=body_of(CHAT, text, stream=stream, **named))).status_code
