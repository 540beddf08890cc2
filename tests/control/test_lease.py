"""One proxy per engine: the second says who has it, and takes over when the first is dead."""

import asyncio
import time

import pytest
from aiohttp import web

from polykv_proxy.config import load_settings
from polykv_proxy.control import AttachRequest, Control
from polykv_proxy.errors import EngineOwned
from polykv_proxy.tree.prefix import make_tokens
from polykv_proxy.upstream import EngineClient
from tests.control.conftest import eventually, planes
from tests.fake_engine import FakeEngine

OWNER = "/polykv/engine/owner"


def second(engine: FakeEngine) -> Control:
    return Control(load_settings(upstream_url=engine.url, state=":memory:"), heartbeat_s=0.05, lease_ttl_s=0.3)


async def test_a_second_proxy_refuses_to_start_and_says_who_holds_the_engine(engine):
    async with planes(engine) as plane:
        await plane.create(tokens=[1, 2, 3])
        other = second(engine)
        holder, told = plane.control.lease.owner_id, []

        async def nearly_over(request):
            """The first time, so that it need not wait for the rest of the lease."""
            if (await request.json())["id"] == holder or told:
                return None
            told.append(request)
            refused = {"code": 409, "message": "", "type": "polykv_error", "owner": holder, "ttl_ms": 10}
            return web.json_response({"error": refused}, status=409)

        engine.on("owner", "request", nearly_over, times=None)
        with pytest.raises(EngineOwned) as e:
            await other.start()
        assert holder in e.value.message
        assert told
        assert len(engine.ready_pools()) == 1
        await plane.create(tokens=[4])  # the first goes on


async def test_after_a_kill_the_lease_runs_out_and_the_next_takes_over(engine):
    first = second(engine)
    await first.start()
    await first.watch.stop()  # killed: it neither renews nor gives up
    _, until_s = engine.hooks._owner
    next_one = second(engine)
    await next_one.start()
    assert time.monotonic() >= until_s
    assert engine.hooks._owner[0] == next_one.lease.owner_id
    await next_one.stop()
    await first.engine.close()


async def test_a_proxy_that_stops_leaves_the_engine_to_the_next_at_once(engine):
    async with planes(engine):
        pass
    assert engine.hooks.owner is None
    n_asked = len(engine.requests(OWNER))
    async with planes(engine, heartbeat_s=60) as plane:
        assert engine.hooks.owner == plane.control.lease.owner_id
        assert len(engine.requests(OWNER)) == n_asked + 1


async def test_a_proxy_whose_lease_was_taken_changes_nothing_and_serves_unpooled(engine):
    async with planes(engine) as plane:
        await plane.create(prompt="A" * 40, name="a")
        engine.hooks._owner = ("somebody else", time.monotonic() + 60)
        await eventually(lambda: not plane.control.hooks)
        error = await plane.refused(503, "engine_owned", "POST", "/polykv/pools", {"tokens": [1]})
        assert error["owner"] == "somebody else"
        await plane.refused(503, "engine_owned", "DELETE", "/polykv/pools/a")
        status, health = await plane.call("GET", "/polykv/health")
        assert (status, health["status"], health["engine"]["owner"]) == (503, "not_owner", "somebody else")
        status, view = await plane.call("GET", "/polykv/pools/a")
        assert status == 200
        assert [(pool["residency"], pool["seq_id"]) for pool in view["pools"]] == [(None, None)]
        plan = await plane.control.decide_attach(AttachRequest(path="/completion", body={"prompt": "A" * 41}))
        assert (plan.pool_id, plan.miss_reason) == (None, "not_resident")
        await asyncio.sleep(0.2)
        assert len(engine.ready_pools()) == 1
        engine.hooks._owner = None
        await eventually(lambda: plane.control.hooks)
        await plane.create(tokens=[1])
        assert plane.control.tree.get("a").residency == "resident"  # nobody touched it meanwhile
        assert (await plane.call("GET", "/polykv/health"))[0] == 200


async def test_an_engine_that_restarts_learns_its_owner_again(engine):
    async with planes(engine) as plane:
        await engine.restart()
        await eventually(lambda: engine.hooks.owner == plane.control.lease.owner_id)


async def test_a_sequence_of_another_proxy_in_an_old_number_is_never_taken_for_ours_nor_freed_in_its_stead(engine):
    async with planes(engine) as plane:
        two = await plane.create(tokens=[1, 2, 3], name="two", ttl_s=0)
        engine.hooks._owner = ("somebody else", time.monotonic() + 60)
        await eventually(lambda: not plane.control.hooks)
        assert plane.control.tree.get("two").seq_id is None
        other = EngineClient(engine.url)
        other.owner = "somebody else"
        await other.free(two["seq_id"])
        theirs = await other.materialize(make_tokens([1, 2, 4]), tag="pool-1.1")
        assert theirs.seq == two["seq_id"]
        await other.close()

        engine.hooks._owner = None
        await eventually(lambda: plane.control.hooks)
        assert plane.control.tree.get("two").seq_id is None  # theirs is not ours by its number alone
        await eventually(lambda: engine.ready_pools() == [])  # it has no owner any more
        back = await plane.create(tokens=[7, 8, 9], name="back")
        assert back["seq_id"] == two["seq_id"]
        status, _ = await plane.call("DELETE", "/polykv/pools/two")
        assert status == 200
        assert [pool.seq for pool in engine.ready_pools()] == [back["seq_id"]]


async def test_a_sequence_that_another_proxy_left_is_adopted_for_its_tokens(engine):
    async with planes(engine) as plane:
        pool = await plane.create(tokens=[1, 2, 3], name="a", ttl_s=0)
        engine.hooks._owner = ("somebody else", time.monotonic() + 60)
        await eventually(lambda: not plane.control.hooks)
        other = EngineClient(engine.url)
        other.owner = "somebody else"
        await other.free(pool["seq_id"])
        shorter = await other.materialize(make_tokens([1, 2]), tag="theirs-1")
        same = await other.materialize(make_tokens([1, 2, 3]), tag="theirs-2")
        await other.close()
        engine.hooks._owner = None
        await eventually(lambda: plane.control.hooks)
        assert plane.control.tree.get("a").seq_id == same.seq != shorter.seq
        await eventually(lambda: [pool.seq for pool in engine.ready_pools()] == [same.seq])


async def test_a_proxy_that_was_suspended_past_its_lease_asks_the_engine_and_finds_its_own_again(engine):
    async with planes(engine, lease_ttl_s=0.3) as plane:
        pool = await plane.create(tokens=[1, 2, 3], name="a")
        control, n_before = plane.control, engine.hooks.n_materialized
        time.sleep(0.4)  # noqa: ASYNC251 - nothing of this process may run meanwhile
        assert not control.hooks
        await eventually(lambda: control.hooks)
        assert control.tree.get("a").seq_id == pool["seq_id"]
        assert engine.hooks.n_materialized == n_before
        assert len(engine.ready_pools()) == 1
