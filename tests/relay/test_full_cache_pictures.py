"""A full cache and pictures: only the engine knows what they take, and it is asked when the room might not do."""

import asyncio
from typing import Any

import pytest

from polykv_proxy.control import CreatePool, Source
from tests.fake_engine import FakeEngine, reply
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import until
from tests.relay.test_full_cache import IMAGE, RENDER, ask, held, residency


@pytest.fixture
async def engine():
    async with FakeEngine(n_cells=1000) as engine:
        yield engine


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
SHOWN = {"type": "input_image", "image_url": PICTURE["image_url"]["url"]}
COUNTS = ["/v1/chat/completions/input_tokens", "/v1/messages/count_tokens", "/v1/responses/input_tokens"]
LOOKS = [
    (COUNTS[0], "/v1/chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}], "max_tokens": 4}),
    (COUNTS[0], "/chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}], "max_tokens": 4}),
    (
        COUNTS[1],
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}], "max_tokens": 4},
    ),
    (COUNTS[2], "/v1/responses", {"input": [{"role": "user", "content": [SHOWN]}], "max_output_tokens": 4}),
]


def n_counted(engine: FakeEngine) -> int:
    return sum(len(engine.requests(path)) for path in COUNTS)


@pytest.mark.parametrize(("count", "path", "body"), LOOKS)
async def test_unused_pools_leave_for_a_picture(
    engine: FakeEngine, proxy: Proxy, count: str, path: str, body: dict[str, Any]
) -> None:
    engine.template.image = "x" * 550
    await proxy.pool(tokens=[1] * 300, name="old")
    await proxy.pool(tokens=[2] * 300, name="new")
    answer = await proxy.client.post(path, json=body | {"session_id": "viewer"})
    assert answer.status_code == 200, answer.text
    assert '"miss_reason":"incompatible"' in answer.text
    assert residency(proxy) == {"old": "cold", "new": "resident"}
    (counted,) = engine.requests(count)
    assert (counted.json(), n_counted(engine)) == (body, 1)
    assert engine.requests(RENDER) == []


async def test_a_picture_is_not_counted_while_a_whole_context_has_room(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(n_ctx_slot=1000) as engine, make_proxy(engine.url) as proxy:
        await proxy.pool(tokens=[1] * 300)
        for _, path, body in LOOKS:
            assert (await proxy.client.post(path, json=body)).status_code == 200
        assert n_counted(engine) == 0


async def test_a_picture_waits_in_line_for_its_cells(engine: FakeEngine, proxy: Proxy) -> None:
    engine.template.image = "x" * 550
    hold, running = await held(engine, proxy, "r" * 700)
    looking = asyncio.create_task(proxy.client.post(LOOKS[0][1], json=LOOKS[0][2]))
    await until(lambda: proxy.control.room.has_line)
    hold.release()
    assert [(await task).status_code for task in (running, looking)] == [200, 200]
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


async def test_nothing_leaves_for_a_picture_that_would_not_fit_all_the_same(engine: FakeEngine, proxy: Proxy) -> None:
    engine.template.image = "x" * 550
    await proxy.control.create_pool(CreatePool(source=Source(tokens=[1] * 500), pin=True))
    await proxy.pool(tokens=[2] * 50, name="unused")
    answer = await proxy.client.post(LOOKS[0][1], json=LOOKS[0][2])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "kv_exhausted"
    n_prompt = len(engine.template.render(*LOOKS[0][1:])[0][0])
    assert answer.json()["error"]["cells_missing"] == n_prompt + 1 - 500
    assert residency(proxy)["unused"] == "resident"
    assert engine.requests(LOOKS[0][1]) == []


async def test_a_picture_that_cannot_be_counted_is_left_to_the_engine(engine: FakeEngine, proxy: Proxy) -> None:
    """It refuses it in its own words, and nobody else waits for it or leaves."""
    await proxy.pool(tokens=[1] * 900, name="stays")
    refused = {"error": {"code": 400, "message": "Failed to load image", "type": "invalid_request_error"}}
    for place in LOOKS[0][:2]:
        engine.on(place, "request", reply(400, refused))
    answer = await proxy.client.post(LOOKS[0][1], json=LOOKS[0][2])
    assert (answer.status_code, answer.json()) == (400, refused)
    assert residency(proxy) == {"stays": "resident"}


async def test_unused_pools_leave_for_a_picture_that_nobody_can_count(make_proxy: ProxyMaker) -> None:
    """Not all of them: as many as a guess says."""
    async with FakeEngine(n_cells=4000) as engine, make_proxy(engine.url) as proxy:
        for name in ("oldest", "older", "young"):
            await proxy.pool(tokens=[ord(name[-1])] * 1300, name=name)
        assert (await ask(proxy, IMAGE)).status_code == 200
        assert residency(proxy) == {"oldest": "cold", "older": "resident", "young": "resident"}
        assert (engine.requests(RENDER), n_counted(engine)) == ([], 0)


async def test_a_picture_that_nobody_can_count_waits_for_nobody(engine: FakeEngine, proxy: Proxy) -> None:
    hold, running = await held(engine, proxy, "r" * 700)
    waiting = ask(proxy, "w" * 600)
    await until(lambda: proxy.control.room.has_line)
    assert (await ask(proxy, IMAGE)).status_code == 200
    hold.release()
    assert [(await task).status_code for task in (running, waiting)] == [200, 200]
