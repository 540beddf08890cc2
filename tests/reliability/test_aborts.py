"""Clients that leave in every phase, 210 of them at random moments: upstream is closed within a second, place, slot and
permit are free again, and those who stay get every byte of theirs.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.contract.conftest import made
from tests.fake_engine import FakeEngine, Hold, Received
from tests.fake_engine.cache import Slot
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import body_of, events_of
from tests.relay.raw import connected, until
from tests.reliability.conftest import leave_nothing, post_json

PATH = "/v1/completions"
SHARED = "Everybody who is let in here begins with this. "
N_ABORTS, N_SLOTS = 15, 3
CLOSED_WITHIN_S = 1.0


@dataclass
class Stage:
    """Where a leaver is brought to. ``fields``: of its request; ``is_there``: it is in the phase now."""

    engine: FakeEngine
    proxy: Proxy
    n_stayers: int = 2
    stayers_begin: str = "Something else. "
    n_tokens: int = 20
    prompt: str = "leaver"
    fields: dict[str, Any] = field(default_factory=dict)
    is_there: Callable[[], object] = lambda: False
    before_each: Callable[[], Awaitable[object]] | None = None
    reaches_engine: bool = True

    def sent(self) -> list[Received]:
        return [r for r in self.engine.requests(PATH) if b"leaver" in r.body]

    def slot(self) -> Slot | None:
        """That of the leaver."""
        busy = [s for s in self.engine.slots if s.state != "idle"]
        return next((s for s in busy if "leaver" in self.engine.template.tokenizer.decode(s.tokens)), None)

    async def set_policy(self, **policy: Any) -> None:
        body = {"target_tps_per_session": 1e6, "mode": "enforced", "settle_max_ms": 0, **policy}
        answer = await self.proxy.client.post("/polykv/pools/root/admission", json=body)
        assert answer.status_code == 200, answer.text
        capacity = self.proxy.control.door.capacity
        await until(lambda: capacity(1)["mean_active_tps"], 15)

    def in_pool(self) -> None:
        self.fields, self.prompt, self.reaches_engine = {"pool_id": "root"}, SHARED + "leaver", False


async def queued(stage: Stage) -> None:
    stage.reaches_engine = False
    stage.is_there = lambda: stage.proxy.relay.desk.n_waiting == 1


async def at_the_door(stage: Stage) -> None:
    stage.in_pool()
    await stage.set_policy(on_saturation="queue", guarantee_min_sessions=0)
    stage.is_there = lambda: stage.proxy.control.door.n_waiting == 1


async def held(stage: Stage) -> None:
    stage.in_pool()
    await stage.set_policy(max_turn_hold_ms=60_000, guarantee_min_sessions=1000)
    stage.is_there = lambda: stage.proxy.control.door.n_held == 1


async def materializing(stage: Stage) -> None:
    """For nobody else, so it is made in vain."""
    stage.in_pool()
    holds: list[Hold] = []

    async def evict() -> None:
        for _ in range(1000):
            answer = await stage.proxy.client.post("/polykv/pools/root/evict?to=cold")
            if answer.status_code != 409:  # else it is still being made
                break
            await asyncio.sleep(0.01)
        assert answer.status_code == 200, answer.text
        stage.engine.faults.armed.clear()
        holds.append(Hold())
        stage.engine.on("materialize", "request", holds[-1])

    stage.before_each = evict
    stage.is_there = lambda: holds[-1].n == 1


async def prefilling(stage: Stage) -> None:
    stage.prompt = "leaver" + "x" * 300
    stage.engine.prefill_s = 0.01
    stage.is_there = lambda: any(s.state == "prompt" and s.n_prompt > 300 for s in stage.engine.slots)


async def decoding(stage: Stage) -> None:
    stage.n_tokens = 5000
    stage.is_there = lambda: (slot := stage.slot()) is not None and slot.n_decoded > 1


async def answering(stage: Stage) -> None:
    """All is decoded, the last bytes are on their way."""

    async def slow(request: Any) -> None:
        await asyncio.sleep(10)

    stage.n_tokens = 2
    stage.engine.on(PATH, "reply", slow, times=None)
    stage.is_there = lambda: stage.engine.finished


class Stayer:
    """Reads one long stream, and knows what is in it."""

    def __init__(self, stage: Stage, name: str):
        self.stage, self.prompt, self.name = stage, stage.stayers_begin + name, name
        self.got = b""

    async def run(self) -> None:
        body = {"prompt": self.prompt, "max_tokens": 15_000, "stream": True, "session_id": self.name}
        async with self.stage.proxy.client.stream("POST", PATH, json=body) as answer:
            async for piece in answer.aiter_bytes():
                self.got += piece

    def text(self) -> str:
        whole = self.got[: self.got.rfind(b"\n\n") + 2]
        return "".join(choice["text"] for event in events_of(whole) for choice in event["choices"])

    def expected(self, n: int) -> str:
        """What is decoded from this context, whatever shares it."""
        tokens = self.stage.engine.template.tokenizer.encode(self.prompt)
        for _ in range(n):
            tokens.append(self.stage.engine._next_token(tokens, 0))
        return bytes(tokens[len(tokens) - n :]).decode()


@asynccontextmanager
async def stayers(stage: Stage) -> AsyncIterator[list[Stayer]]:
    there = [Stayer(stage, f"stayer-{i}") for i in range(stage.n_stayers)]
    tasks = [asyncio.create_task(stayer.run()) for stayer in there]
    try:
        await until(lambda: all(len(stayer.got) > 1000 for stayer in there), 20)
        yield there
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for stayer in there:
        text = stayer.text()
        assert text == stayer.expected(len(text))
        assert b"error" not in stayer.got


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(n_slots=N_SLOTS) as engine:
        engine.token_s = 0.004
        yield engine


PHASES = [queued, at_the_door, held, materializing, prefilling, decoding, answering]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", PHASES, ids=[phase.__name__ for phase in PHASES])
async def test_who_leaves_leaves_nothing_and_disturbs_nobody(
    engine: FakeEngine, make_proxy: ProxyMaker, phase: Any, stream: bool
) -> None:
    rng = random.Random(f"{phase.__name__} {stream}")
    async with make_proxy(engine.url, auto_pool_min_tokens=0) as proxy:
        await made(proxy, prompt=SHARED, name="root")
        stage = Stage(engine, proxy, n_stayers=N_SLOTS if phase is queued else 2)
        if phase in (at_the_door, held):
            stage.stayers_begin = SHARED
        async with stayers(stage) as there:
            await phase(stage)
            for number in range(N_ABORTS):
                n_got = [len(stayer.got) for stayer in there]
                await abort(stage, f" {number}", stream, rng)
                await until(lambda n_got=n_got: all(len(s.got) > n for s, n in zip(there, n_got, strict=True)))
        engine.faults.armed.clear()
        await leave_nothing(proxy)
    assert all(slot.state == "idle" for slot in engine.slots)


async def abort(stage: Stage, which: str, stream: bool, rng: random.Random) -> None:
    if stage.before_each is not None:
        await stage.before_each()
    stage.engine.finished.clear()
    n_before = len(stage.sent())
    body = {"prompt": stage.prompt + which, "max_tokens": stage.n_tokens, "stream": stream, **stage.fields}
    async with connected(stage.proxy.url) as (_, writer):
        writer.write(post_json(PATH, body))
        await until(stage.is_there, 60)
        await asyncio.sleep(rng.random() * 0.03)
        assert len(stage.sent()) - n_before == stage.reaches_engine
    for _ in range(round(CLOSED_WITHIN_S / 0.005)):  # of the time that this process gets
        if not what_is_left(stage):
            break
        await asyncio.sleep(0.005)
    assert what_is_left(stage) == {}
    assert len(stage.sent()) - n_before == stage.reaches_engine


def what_is_left(stage: Stage) -> dict[str, int]:
    """Of a leaver: of those who stay there is one of each, in a slot of the engine."""
    rest, door, n = stage.proxy.at_rest(), stage.proxy.control.door, stage.n_stayers
    counts = {name: rest[name] - n for name in ("running", "turns", "held")}
    counts |= {"waiting": rest["waiting"], "door": door.n_waiting + door.n_held}
    counts |= {"upstream": sum(not r.left for r in stage.sent()), "backlog": stage.proxy.relay.backlog.n_waiting}
    return {name: count for name, count in counts.items() if count}


async def test_who_comes_for_a_pool_just_as_the_last_one_leaves_is_served(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    """What was called off is not joined: who did was cancelled with it, his connection closed without a word."""
    async with make_proxy(engine.url, auto_pool_min_tokens=0) as proxy:
        await made(proxy, prompt=SHARED, name="root")
        pool, ensure = proxy.control.tree.get("root"), proxy.control.residency.ensure
        for _ in range(3):
            assert (await proxy.client.post("/polykv/pools/root/evict?to=cold")).status_code == 200
            hold = Hold()
            engine.on("materialize", "request", hold)
            first = asyncio.create_task(ensure(pool))
            await hold.reached()
            first.cancel()
            others = [asyncio.create_task(ensure(pool)) for _ in range(3)]
            held = await asyncio.wait_for(asyncio.gather(*others), 10)
            assert {sequence.seq_id for sequence in held} == {pool.seq_id}
            assert first.cancelled()
            hold.release()
        await leave_nothing(proxy)


# Who waits when the proxy ends -------------------------------------------------------------------------------------


async def told_to_come_back(proxy: Proxy, asking: "asyncio.Task[httpx.Response]") -> None:
    proxy.relay.drain()
    answer = await asyncio.wait_for(asking, 10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("phase", [queued, at_the_door, held, materializing], ids=lambda phase: phase.__name__)
async def test_who_waits_is_told_when_the_proxy_ends(engine: FakeEngine, make_proxy: ProxyMaker, phase: Any) -> None:
    async with make_proxy(engine.url, auto_pool_min_tokens=0) as proxy:
        await made(proxy, prompt=SHARED, name="root")
        stage = Stage(engine, proxy, n_stayers=N_SLOTS if phase is queued else 2)
        if phase in (at_the_door, held):
            stage.stayers_begin = SHARED
        async with stayers(stage):
            await phase(stage)
            if stage.before_each is not None:
                await stage.before_each()
            body = {"prompt": stage.prompt, **stage.fields, "stream": True}
            asking = asyncio.create_task(proxy.client.post(PATH, json=body))
            await until(stage.is_there, 10)
            await told_to_come_back(proxy, asking)
            assert stage.sent() == []
        engine.faults.armed.clear()
        await leave_nothing(proxy)


async def test_who_waits_for_anothers_prefill_is_told_when_the_proxy_ends(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(PATH, "prefill", hold)
    first = asyncio.create_task(proxy.client.post(PATH, json=body_of(PATH, "first")))
    await hold.reached()
    second = asyncio.create_task(proxy.client.post(PATH, json=body_of(PATH, "second")))
    await until(lambda: proxy.control.fan_out.n_waiting == 1)
    await told_to_come_back(proxy, second)
    hold.release()
    assert (await first).status_code == 200, "what runs goes on"
    assert len(engine.requests(PATH)) == 1
    await leave_nothing(proxy)
