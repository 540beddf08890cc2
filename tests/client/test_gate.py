"""Pacers and couriers at the gate that the proxy has."""

import asyncio

import pytest

from polykv_proxy.client import (
    AdmissionPacer,
    AdmissionPolicy,
    AsyncAdmissionPacer,
    AsyncPolyKVClient,
    Courier,
    Job,
    PolyKVClient,
    PoolSaturatedError,
)
from tests.client.conftest import Asked
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy

A = [65] * 20
NEVER = AdmissionPolicy(target_tps_per_session=1e6, mode="enforced", settle_tokens=4)
"""Nothing decodes so fast: whoever comes beyond the guarantee is one too many."""


async def test_capacity_says_why(asked: Asked) -> None:
    await asked("create_pool", tokens=A, name="p")
    free = await asked("capacity", "p")
    assert (free.can_admit, free.target_tps_per_session) == (True, None)
    assert (free.guaranteed, free.known_session) == (False, False)
    await asked("set_admission", "p", NEVER)
    empty = await asked("capacity", "p", expected_tokens=10)
    assert (empty.can_admit, empty.guaranteed, empty.reason) == (True, True, "guaranteed minimum")
    assert empty.n_pool_sessions == 0
    await asked("complete", [*A, 66], n_predict=3, session_id="s", pool_id="p")
    known = await asked("capacity", "p", session_id="s")
    assert (known.known_session, known.reason, known.n_pool_sessions) == (True, "continuation", 1)
    too_long = await asked("capacity", "p", expected_tokens=10**6)
    assert (too_long.can_admit, too_long.reason) == (False, "context headroom exhausted")


async def test_a_refusal_tells_when_to_come_back_and_overcommit_goes_past_it(
    asked: Asked, proxy: Proxy, engine: FakeEngine
) -> None:
    engine.token_s = 0.01
    await asked("create_pool", tokens=A, name="p")
    await asked("set_admission", "p", NEVER)
    async with AsyncPolyKVClient(proxy.url) as other:
        busy = asyncio.create_task(other.complete([*A, 65], n_predict=5000, session_id="busy", pool_id="p"))
        async with asyncio.timeout(10):
            while "below floor" not in str((await asked("capacity", "p")).reason):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises(PoolSaturatedError) as caught:
            await asked("complete", [*A, 67], n_predict=2, session_id="second", pool_id="p")
        past = await asked("complete", [*A, 67], n_predict=2, session_id="second", pool_id="p", overcommit=True)
        newest, *_ = await asked("requests", last=1)
        again = await asked("complete", [*A, 67, 1], n_predict=2, session_id="second", pool_id="p")
        busy.cancel()
        await asyncio.wait([busy])
    error = caught.value
    assert (error.status_code, error.code, error.pool_id) == (429, "pool_saturated", "p")
    assert error.reason == "projected mean tps below floor"
    assert error.retry_after is not None
    assert 0 < error.retry_after <= 60
    assert (past.polykv.pool_id, newest.admission["decision"]) == (again.polykv.pool_id, "overcommitted")
    assert again.polykv.session_id == "second"  # from then on it just goes on


async def test_couriers_go_one_by_one_where_only_one_is_guaranteed(proxy: Proxy, engine: FakeEngine) -> None:
    engine.token_s = 0.02
    live: set[str] = set()
    together: list[int] = []
    async with AsyncPolyKVClient(proxy.url) as client:
        await client.create_pool(tokens=A, name="p")
        await client.set_admission("p", NEVER)

        async def work(job: Job[int]) -> int:
            live.add(job.session_id)
            together.append(len(live))
            prompt = [*A, 70 + job.item]
            for step in range(2):
                reply = await client.complete(
                    [*prompt, *range(step)], n_predict=12, session_id=job.session_id, pool_id=job.pool_id
                )
            live.remove(job.session_id)
            await client.drop_session(job.session_id)
            assert reply.polykv is not None
            return reply.polykv.prefix_n_tokens or 0

        pacer = AsyncAdmissionPacer(client, "p", poll_interval=0.02)
        courier = Courier(client, "p", work, pacer=pacer)
        deliveries = await asyncio.wait_for(courier.arun(range(3)), 30)
        receipts = await client.requests(last=100)
    assert [d.result for d in deliveries] == [20] * 3
    assert together == [1] * 3
    assert [e.kind for e in courier.events].count("guarantee") == 3
    decisions = [r.admission["decision"] for r in receipts if r.admission is not None]
    assert sorted(decisions) == ["continuation"] * 3 + ["guaranteed"] * 3


async def test_threads_too(proxy: Proxy) -> None:
    with PolyKVClient(proxy.url) as client:

        def run() -> list[str]:
            client.create_pool(tokens=A, name="p")
            client.set_admission("p", NEVER)

            def work(job: Job[int]) -> str:
                client.complete([*A, 70 + job.item], n_predict=4, session_id=job.session_id, pool_id=job.pool_id)
                client.drop_session(job.session_id)
                return job.session_id

            pacer = AdmissionPacer(client, "p", poll_interval=0.02)
            courier = Courier(client, "p", work, pacer=pacer, session_key=lambda item, _: f"job-{item}")
            return [d.result for d in courier.run(range(3))]

        assert await asyncio.wait_for(asyncio.to_thread(run), 20) == ["job-0", "job-1", "job-2"]
