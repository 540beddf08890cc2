"""Couriers: every item is delivered once, as many at a time as there is room for, whatever the gate says meanwhile."""

import asyncio
import itertools
import threading
from typing import Any

import pytest

from polykv_proxy.client import (
    AdmissionPacer,
    AsyncAdmissionPacer,
    AsyncPolyKVClient,
    Courier,
    Job,
    PolyKVClient,
    PoolSaturatedError,
)
from tests.client.toy_gate import ToyGate

SOON_S = 10.0


class Site:
    """A toy gate and a courier of either kind in front of it; a worker chats twice and leaves."""

    def __init__(self, gate: ToyGate, kind: str):
        self.gate, self.kind = gate, kind
        self.client: PolyKVClient | AsyncPolyKVClient = gate.sync() if kind == "sync" else gate.asynchronous()
        self.courier: Courier[Any, Any] | None = None

    async def deliver(self, items: list[Any], **options: Any) -> list[Any]:
        fast = {"poll_interval": 0.01}
        options.setdefault("session_key", lambda item, index: f"s{item}")
        if isinstance(self.client, PolyKVClient):
            options.setdefault("pacer", AdmissionPacer(self.client, "p", **fast))
            self.courier = Courier(self.client, "p", self.work, **options)
            return await asyncio.wait_for(asyncio.to_thread(self.courier.run, items), SOON_S)
        options.setdefault("pacer", AsyncAdmissionPacer(self.client, "p", **fast))
        self.courier = Courier(self.client, "p", self.awork, **options)
        return await asyncio.wait_for(self.courier.arun(items), SOON_S)

    def kinds(self) -> list[str]:
        assert self.courier is not None
        return [event.kind for event in self.courier.events]

    def work(self, job: Job[Any]) -> str:
        assert isinstance(self.client, PolyKVClient)
        fields = {"session_id": job.session_id, "pool_id": job.pool_id, "overcommit": job.overcommit or None}
        for _ in range(2):
            reply = self.client.chat([], **fields)
        self.gate.leave(job.session_id)
        return self.done(job, reply.text)

    async def awork(self, job: Job[Any]) -> str:
        assert isinstance(self.client, AsyncPolyKVClient)
        fields = {"session_id": job.session_id, "pool_id": job.pool_id, "overcommit": job.overcommit or None}
        for _ in range(2):
            reply = await self.client.chat([], **fields)
            await asyncio.sleep(0)
        self.gate.leave(job.session_id)
        return self.done(job, reply.text)

    def done(self, job: Job[Any], text: str) -> str:
        if job.item == "bad":
            raise KeyError(job.item)
        return f"{text} #{job.attempt}"


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


async def test_every_item_is_delivered_in_its_place(kind: str) -> None:
    site = Site(ToyGate(room=3), kind)
    deliveries = await site.deliver(list(range(12)))
    assert [d.result for d in deliveries] == [f"s{i} #0" for i in range(12)]
    assert [d.item for d in deliveries] == list(range(12))
    assert {d.attempts for d in deliveries} == {1}
    assert all(d.started_s <= d.ended_s for d in deliveries)
    assert 1 <= site.gate.most <= 3
    assert site.gate.order == [f"s{i}" for i in range(12)]
    assert site.kinds().count("spawn") == 12


async def test_never_more_than_there_is_room_for_however_eager(kind: str) -> None:
    """An admission stays open until the server knows the session: a slow first request lets nobody else slip in."""
    gate = ToyGate(room=2)
    seen: list[int] = []
    gate.on_chat = lambda session_id: seen.append(len(gate.live))
    site = Site(gate, kind)
    await site.deliver(list(range(8)))
    assert gate.most <= 2


async def test_a_refused_worker_is_started_again_with_its_session(kind: str) -> None:
    site = Site(ToyGate(room=4, refuse=3), kind)
    deliveries = await site.deliver([1, 2, 3])
    assert {d.result[:2] for d in deliveries} == {"s1", "s2", "s3"}
    assert sum(d.attempts - 1 for d in deliveries) == 3
    assert site.kinds().count("spawn") == 6
    assert site.courier is not None
    refusals = [e for e in site.courier.events if e.kind == "saturated" and e.wait_s == 0.02]
    assert [e.reason for e in refusals] == ["projected mean tps below floor"] * 3
    spawns = [e.at_s for e in site.courier.events if e.kind == "spawn"]
    for refusal in refusals:  # as long as the gate told, nobody is let in
        assert all(at_s < refusal.at_s or at_s - refusal.at_s >= 0.0195 for at_s in spawns)


async def test_a_refusal_can_be_the_items_own_affair(kind: str) -> None:
    site = Site(ToyGate(room=4, refuse=1), kind)
    first, second = await site.deliver([1, 2], requeue_on_saturated=False)
    assert isinstance(first.error, PoolSaturatedError)
    with pytest.raises(PoolSaturatedError):
        _ = first.result
    assert second.result == "s2 #0"
    endless = Site(ToyGate(room=4, refuse=10**6), kind)
    (given_up,) = await endless.deliver([1], max_attempts=3)
    assert isinstance(given_up.error, PoolSaturatedError)
    assert given_up.attempts == 3


async def test_one_that_fails_stops_nobody(kind: str) -> None:
    site = Site(ToyGate(room=1), kind)
    good, bad, last = await site.deliver([1, "bad", 3])
    assert (good.result, last.result) == ("s1 #0", "s3 #0")
    assert isinstance(bad.error, KeyError)
    with pytest.raises(KeyError):
        _ = bad.result


async def test_a_ceiling_besides_the_gates(kind: str) -> None:
    site = Site(ToyGate(room=99), kind)
    await site.deliver(list(range(9)), max_workers=2)
    assert site.gate.most <= 2


async def test_overcommit_goes_past_the_floor_and_says_so(kind: str) -> None:
    site = Site(ToyGate(room=0), kind)
    (delivery,) = await site.deliver(["vip"], overcommit=lambda item: item == "vip")
    assert delivery.result == "svip #0"
    assert site.kinds() == ["overcommit", "spawn"]


async def test_settling_is_waited_for(kind: str) -> None:
    site = Site(ToyGate(room=9, settle_s=0.05), kind)
    heard: list[Any] = []
    deliveries = await site.deliver([1, 2, 3], on_event=heard.append)
    starts = [d.started_s for d in deliveries]
    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(starts))
    assert site.kinds().count("settle") >= 2
    assert site.courier is not None
    assert heard == site.courier.events


async def test_sessions_must_differ(kind: str) -> None:
    site = Site(ToyGate(room=1), kind)
    with pytest.raises(ValueError, match="same session"):
        await site.deliver([1, 2], session_key=lambda item, index: "s")
    assert await site.deliver([]) == []


async def test_sessions_have_names_of_their_own_in_every_run() -> None:
    gate = ToyGate(room=9)
    async with gate.asynchronous() as client:
        names: list[set[str]] = []
        for _ in range(2):
            courier: Courier[int, str] = Courier(client, "p", lambda job: str(job.session_id))
            names.append({d.result for d in await courier.arun([1, 2])})
    assert len(names[0] | names[1]) == 4


async def test_a_plain_function_runs_beside_the_loop() -> None:
    async with ToyGate(room=9).asynchronous() as client:
        courier: Courier[int, int] = Courier(client, "p", lambda job: threading.get_ident())
        (delivery,) = await courier.arun([1])
    assert delivery.result != threading.get_ident()


async def test_cancelled_it_cancels_its_workers_and_leaves_the_line() -> None:
    gate = ToyGate(room=1)
    started, ended = asyncio.Event(), []

    async def work(job: Job[int]) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(job.item)

    async with gate.asynchronous() as client:
        running = asyncio.create_task(Courier(client, "p", work).arun([1, 2]))
        await asyncio.wait_for(started.wait(), SOON_S)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended == [1]
        assert (await asyncio.wait_for(AsyncAdmissionPacer(client, "p").acquire(), SOON_S)).reason == "ok"


async def test_a_pacer_that_gives_up_ends_it() -> None:
    gate = ToyGate(room=0)
    with gate.sync() as client:
        pacer = AdmissionPacer(client, "p", poll_interval=0.01, max_wait=0.05)
        with pytest.raises(PoolSaturatedError, match=r"within 0\.05 s"):
            await asyncio.to_thread(Courier(client, "p", lambda job: None, pacer=pacer).run, [1])


async def test_a_listener_that_fails_leaves_the_line_free() -> None:
    gate = ToyGate(room=1)

    def listen(event: Any) -> None:
        raise KeyError(event.kind)

    async with gate.asynchronous() as client:
        with pytest.raises(KeyError, match="spawn"):
            await Courier(client, "p", lambda job: None, on_event=listen).arun([1])
        assert (await asyncio.wait_for(AsyncAdmissionPacer(client, "p").acquire(), SOON_S)).reason == "ok"


async def test_the_wrong_client_is_told() -> None:
    gate = ToyGate(room=1)
    async with gate.asynchronous() as aclient:
        with pytest.raises(TypeError, match="await arun"):
            Courier(aclient, "p", lambda job: None).run([1])
    with gate.sync() as client, pytest.raises(TypeError, match="call run"):
        await Courier(client, "p", lambda job: None).arun([1])
