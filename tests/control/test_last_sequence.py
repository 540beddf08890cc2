"""A request gets its pool whenever that can be resident: the last sequence, one that is on its way back, and an engine
that was not ours a moment ago."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from polykv_proxy.tree.prefix import make_tokens
from polykv_proxy.upstream import EngineClient
from tests.control.conftest import Plane, eventually, planes
from tests.control.test_retention import attach, decide, plant, residencies, run_session, serving_plane
from tests.fake_engine import FakeEngine, Hold
from tests.fake_engine.faults import Received

ROOT = [1] * 60
BRANCH = ROOT[:40] + [2] * 20
DEEP = BRANCH + [3] * 10
FAMILY = {"root": ROOT, "branch": BRANCH, "deep": DEEP}
MIB = 1 << 20


@asynccontextmanager
async def one_sequence_is_left(n_pinned: int, save_ram: int = 0) -> AsyncIterator[tuple[Plane, FakeEngine]]:
    """A family, of which the root is pinned, and pinned others: all sequences are theirs but one."""
    async with FakeEngine(max_pools=n_pinned + 1, save_ram=save_ram) as engine, planes(engine) as plane:
        for i in range(n_pinned - 1):
            await plane.create(tokens=[9 + i] * 20, pin=True)
        if n_pinned:
            await plane.create(tokens=ROOT, name="root", pin=True)
        else:
            plant(plane, ROOT, name="root")
        tree = plane.control.tree
        for name, parent in (("branch", "root"), ("deep", "branch")):
            plan = tree.plan_fork(tree.get(parent).pool_id, make_tokens(FAMILY[name]), name=name)
            tree.commit(plan, now_s=plane.control.clock())
        yield plane, engine


async def ask(plane: Plane, name: str) -> tuple[int | None, int, str | None]:
    got = await attach(plane, [*FAMILY[name], 7, 7], pool_ref=name)
    return got["pool_id"], got["pool_n"], got["reason"]


async def why_not(plane: Plane, name: str) -> str | None:
    """Of a request that is decided and not sent: it stays on its pool as long as this task lives."""
    return (await decide(plane, [*FAMILY[name], 7], pool_ref=name)).miss_reason


def hit(plane: Plane, name: str) -> tuple[int | None, int, str | None]:
    return plane.control.tree.get(name).pool_id, len(FAMILY[name]), None


@pytest.mark.parametrize("save_ram", [0, MIB])
@pytest.mark.parametrize("n_pinned", [0, 1, 3])
async def test_the_last_sequence_goes_from_a_pool_to_one_below_it(n_pinned, save_ram):
    async with one_sequence_is_left(n_pinned, save_ram) as (plane, engine):
        for name in ("root", "branch", "deep", "branch", "root", "deep"):
            assert await ask(plane, name) == hit(plane, name)
        assert residencies(plane)["deep"] == "resident"
        await plane.control.refresh()
        plane.control.residency.ledger.sync()
        assert plane.control.residency.ledger.accounts().total_cells == engine.cache.used()


async def test_a_pool_above_that_is_the_last_to_go_is_the_one_furthest_away():
    async with FakeEngine(max_pools=2) as engine, planes(engine) as plane:
        await plane.create(tokens=ROOT, name="root")
        await plane.fork("root", tokens=BRANCH, name="branch")
        plant(plane, DEEP[60:], "branch", name="deep")
        before = engine.hooks.n_processed
        assert await ask(plane, "deep") == hit(plane, "deep")
        assert residencies(plane) == {"root": "cold", "branch": "resident", "deep": "resident"}
        assert engine.hooks.n_processed - before == 10


async def test_who_asks_at_the_same_time_is_served_by_whoever_came_back_in_the_last_sequence():
    async with one_sequence_is_left(2) as (plane, engine):
        engine.prefill_s = 0.0005
        names = ("deep", "branch", "deep", "root")
        assert await asyncio.gather(*(ask(plane, name) for name in names)) == [hit(plane, name) for name in names]


async def test_a_pool_above_keeps_its_sequence_while_a_request_runs_on_it():
    async with one_sequence_is_left(2) as (plane, _):
        assert await ask(plane, "branch") == hit(plane, "branch")
        run_session(plane, "s", "branch")
        assert await asyncio.create_task(why_not(plane, "deep")) == "not_resident"
        assert residencies(plane)["branch"] == "resident"


async def test_pinned_ones_keep_theirs():
    async with one_sequence_is_left(2) as (plane, _):
        assert (await plane.call("POST", "/polykv/pools/branch/pin"))[0] == 200
        assert await why_not(plane, "deep") == "not_resident"
        assert residencies(plane)["branch"] == "resident"


async def test_a_session_that_moves_on_does_not_keep_the_sequence_of_the_pool_it_leaves():
    async with FakeEngine(max_pools=2) as engine, serving_plane(engine) as (plane, client):
        await plane.create(tokens=[9] * 20, name="pinned", pin=True)
        for i in (1, 2):
            plant(plane, [i] * 20, name=f"p{i}")
        for i in (1, 2, 1, 2):
            body = {"prompt": [i] * 20 + [7], "pool_id": f"p{i}", "session_id": "s", "n_predict": 3}
            told = (await client.post("/completion", json=body)).json()["polykv"]
            assert (told["miss_reason"], told["cached_n_tokens"]) == (None, 20)


async def test_a_sequence_that_is_just_being_given_back_is_waited_for():
    async with FakeEngine(max_pools=2) as engine, planes(engine) as plane:
        await plane.create(tokens=[9] * 20, name="pinned", pin=True)
        await plane.create(tokens=[8] * 20, name="gone")
        plant(plane, ROOT, name="root")

        def orders() -> list[Received]:
            sent = [r for r in engine.requests("/polykv/engine/pools") if r.method == "POST"]
            return [r for r in sent if r.json()["op"] == "materialize"]

        hold = Hold()
        engine.on("free", "request", hold)
        releasing = asyncio.create_task(plane.call("DELETE", "/polykv/pools/gone"))
        await hold.reached()
        asking = asyncio.create_task(ask(plane, "root"))
        await eventually(lambda: orders()[2:] and orders()[2].done)  # it was refused
        hold.release()
        assert await asking == hit(plane, "root")
        assert (await releasing)[0] == 200


async def test_a_sequence_that_nobody_owns_is_given_back_before_anybody_goes_without():
    async with FakeEngine(max_pools=2) as engine, planes(engine, heartbeat_s=3600) as plane:
        await plane.create(tokens=[9] * 20, name="pinned", pin=True)
        plant(plane, ROOT, name="root")
        lost = EngineClient(engine.url)
        lost.owner = plane.control.lease.owner_id
        await lost.materialize(make_tokens([8] * 20), tag="an order whose caller left")
        await lost.close()
        plane.control.residency.unsure = True
        assert await ask(plane, "root") == hit(plane, "root")


# Right after the engine, or we, came back -----------------------------------------------------------------------------


async def test_an_engine_that_was_just_found_is_ours_with_the_first_request(tmp_path: Path):
    """Whoever asks for pools may be the first who sees it: the heartbeat that takes the lease comes later."""
    state = str(tmp_path / "pools.db")
    async with FakeEngine() as engine:
        async with planes(engine, state=state) as plane:
            await plane.create(tokens=ROOT, name="root")
        await engine.kill()
        async with planes(engine, state=state, heartbeat_s=3600) as plane:
            await engine.start()
            assert (await plane.call("GET", "/polykv/health"))[0] == 503
            assert await asyncio.gather(*(ask(plane, "root") for _ in range(5))) == [hit(plane, "root")] * 5
            assert engine.hooks.owner == plane.control.lease.owner_id
            assert engine.hooks.n_materialized == 1


async def test_a_lease_that_ran_out_is_taken_again_with_the_first_request(engine):
    async with planes(engine, lease_ttl_s=0.2, heartbeat_s=3600) as plane:
        await plane.create(tokens=ROOT, name="root")
        time.sleep(0.3)  # noqa: ASYNC251 - nothing of this process may run meanwhile
        assert not plane.control.hooks
        assert await ask(plane, "root") == hit(plane, "root")
        assert engine.hooks.n_materialized == 1


async def test_an_engine_that_another_proxy_manages_is_not_asked_with_every_request(engine):
    async with planes(engine, heartbeat_s=0.1) as plane:
        await plane.create(tokens=ROOT, name="root")
        engine.hooks._owner = ("somebody else", time.monotonic() + 60)
        await eventually(lambda: plane.control.lease.taken_by == "somebody else")
        await plane.control.watch.stop()
        n_asked = len(engine.requests("/polykv/engine/owner"))
        for _ in range(5):
            assert await why_not(plane, "root") == "not_resident"
        assert len(engine.requests("/polykv/engine/owner")) == n_asked


async def test_a_request_does_not_wait_for_ever_for_an_engine_that_does_not_say_whose_it_is(engine, monkeypatch):
    monkeypatch.setattr("polykv_proxy.control.attach.EXPLAIN_S", 0.05)
    async with planes(engine, lease_ttl_s=0.2, heartbeat_s=3600) as plane:
        await plane.create(tokens=ROOT, name="root")
        time.sleep(0.3)  # noqa: ASYNC251 - nothing of this process may run meanwhile
        hold = Hold()
        engine.on("owner", "request", hold)
        assert await why_not(plane, "root") == "not_resident"
        hold.release()
        await eventually(lambda: plane.control.hooks)
        assert await why_not(plane, "root") is None
