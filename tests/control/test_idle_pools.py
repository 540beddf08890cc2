"""Pools that nobody uses leave the cache by time; what lies high moves down: one at a time, at rest, never in vain."""

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import Any

import pytest

from polykv_proxy.control import Outcome
from tests.control.conftest import Plane, eventually, planes
from tests.control.test_retention import attach_session, decide, end_session, residencies, run_session
from tests.control.test_warm_pools import books_hold, evict, n_prefilled
from tests.fake_engine import FakeEngine, Hold, reply

MIB = 1 << 20
SOON = 0.2


@pytest.fixture
async def engine():
    async with FakeEngine(n_cells=4000, n_slots=2, max_pools=6, save_ram=8 * MIB) as engine:
        yield engine


@asynccontextmanager
async def idle_planes(engine: FakeEngine, after_s: float = SOON, **settings: Any):
    async with planes(engine, warm_after_s=after_s, heartbeat_s=0.02, **settings) as plane:
        plane.control.idle_pools.look_again_s = 0.0
        yield plane


@pytest.fixture
async def plane(engine):
    async with idle_planes(engine) as plane:
        yield plane


async def some_beats(plane: Plane, n: int = 25) -> None:
    """Long enough for everything that is going to happen."""
    await asyncio.sleep(SOON + n * 0.02)


async def test_unused_pools_leave_leaves_first_and_pinned_ones_stay(plane):
    await plane.create(tokens=[1] * 200, name="root")
    await plane.fork("root", own_tokens=[2] * 50, name="child")
    await plane.create(tokens=[3] * 100, name="pinned", pin=True)
    order = []
    real = plane.control.residency.evict

    async def evict_and_note(pool):
        order.append(pool.name)
        await real(pool)

    plane.control.residency.evict = evict_and_note
    await eventually(lambda: residencies(plane) == {"root": "warm", "child": "warm", "pinned": "resident"})
    assert order == ["child", "root"]
    await eventually(lambda: plane.engine.cache.used() == 100)  # the sequence is freed right after
    assert plane.control.tier.facts().n_left == 2
    n = n_prefilled(plane)
    plan = await decide(plane, [1] * 200 + [2] * 51, pool_ref="child")
    assert (plan.miss_reason, n_prefilled(plane)) == (None, n)
    await books_hold(plane)


async def test_a_pool_in_use_stays_and_leaves_when_its_time_is_over_again(plane):
    await plane.create(tokens=[1] * 200, name="root")
    await plane.fork("root", own_tokens=[2] * 50, name="child")
    run_session(plane, "s", "child")
    await some_beats(plane)
    assert residencies(plane) == {"root": "resident", "child": "resident"}
    end_session(plane, "s")
    await eventually(lambda: residencies(plane)["child"] == "warm")
    assert plane.control.clock() - plane.control.tree.get("child").last_use_s >= SOON
    await eventually(lambda: residencies(plane)["root"] == "warm")


async def test_a_promised_pool_stays(plane):
    await plane.create(tokens=[1] * 200, name="a")
    plan = await decide(plane, [1] * 201, pool_ref="a")
    await some_beats(plane)
    assert residencies(plane) == {"a": "resident"}
    plane.control.settle(plan, Outcome(status=200))
    await eventually(lambda: residencies(plane) == {"a": "warm"})


async def test_a_pool_whose_cells_a_sessions_slot_holds_stays_until_that_is_gone(plane):
    """It would free nothing, and to load it later would have its cells twice."""
    await plane.create(tokens=[1] * 200, name="a")
    plan = await decide(plane, [1] * 201, pool_ref="a")
    body = {"prompt": [1] * 201, "n_predict": 1, "id_slot": 0, "shared_pool_slot": plan.seq_id}
    async with plane.session.post(plane.engine.url + "/completion", json=body) as r:
        assert (await r.json())["timings"]["pool_n"] == 200
    plane.control.settle(plan, Outcome(status=200))
    attach_session(plane, "s", "a")
    session = plane.control.sessions.get("s")
    session.pool_id, session.slot_id = None, 0
    await some_beats(plane)
    assert residencies(plane) == {"a": "resident"}
    plane.control.drop_session("s")
    await eventually(lambda: residencies(plane) == {"a": "warm"})
    await books_hold(plane)


async def test_a_parent_stays_as_long_as_its_child_does(plane):
    await plane.create(tokens=[1] * 200, name="root")
    await plane.fork("root", tokens=[1] * 100 + [2] * 50, name="child")
    run_session(plane, "s", "child")
    plane.control.tree.get("root").used_s = -1000.0
    plane.control.retention.touch = lambda in_use: None
    await some_beats(plane)
    assert residencies(plane) == {"root": "resident", "child": "resident"}


async def test_nobody_leaves_while_an_order_is_under_way(plane):
    await plane.create(tokens=[1] * 200, name="a")
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    making = asyncio.create_task(plane.create(tokens=[2] * 100, name="b"))
    await hold.reached()
    await some_beats(plane)
    assert residencies(plane) == {"a": "resident"}
    hold.release()
    await making
    await eventually(lambda: residencies(plane) == {"a": "warm", "b": "warm"})


async def test_what_cannot_be_saved_stays(plane):
    error = {"code": 501, "message": "media cannot be saved", "type": "polykv_error"}
    plane.engine.on("save", "request", reply(501, {"error": error}), times=None)
    await plane.create(tokens=[1] * 200, name="a")
    await some_beats(plane)
    assert residencies(plane) == {"a": "resident"}
    assert sum(r.body is not None and b'"save"' in r.body for r in plane.engine.received) <= 2


async def test_a_pool_that_comes_to_use_while_it_is_saved_does_not_leave(plane):
    hold = Hold()
    plane.engine.on("save", "request", hold)
    await plane.create(tokens=[1] * 200, name="a")
    await hold.reached()
    run_session(plane, "s", "a")
    hold.release()
    await some_beats(plane)
    assert residencies(plane) == {"a": "resident"}
    assert len(plane.engine.saved.ram) == 1


@pytest.mark.parametrize("settings", [{"after_s": 0.0}, {"warm_ram_bytes": 0}])
async def test_time_takes_nothing_without_a_time_or_a_tier(engine, settings):
    async with idle_planes(engine, **settings) as plane:
        await plane.create(tokens=[1] * 200, name="a")
        await some_beats(plane)
        assert (residencies(plane), engine.saved.ram) == ({"a": "resident"}, {})


async def test_the_heartbeat_does_not_wait_for_a_save(plane):
    hold = Hold()
    plane.engine.on("save", "request", hold)
    await plane.create(tokens=[1] * 200, name="a")
    await hold.reached()
    asked_s = plane.control.watch.asked_s
    await eventually(lambda: plane.control.watch.asked_s > asked_s)
    hold.release()


# Down ----------------------------------------------------------------------------------------------------------------


async def hole(plane: Plane, *, pin: bool = True, n_hole: int = 1000) -> None:
    """A pool of 200 cells on top of a hole."""
    await plane.create(tokens=[1] * n_hole, name="below")
    await plane.create(tokens=[2] * 200, name="top", pin=pin)
    await evict(plane, "below", "cold")


async def test_a_pinned_pool_on_top_of_a_hole_moves_down_and_stays_resident(engine):
    async with idle_planes(engine, after_s=1000.0) as plane:
        await hole(plane)
        assert engine.cache.hi() == 1200
        await eventually(lambda: engine.cache.hi() == 200)
        await eventually(lambda: residencies(plane)["top"] == "resident")
        await some_beats(plane)
        counts = plane.control.tier.facts().counts
        assert (counts.n_saves, dict(counts.n_loads), plane.control.tier.facts().n_moved) == (1, {"ram": 1}, 1)
        assert n_prefilled(plane) == 1200
        await books_hold(plane)


async def test_a_child_moves_down_behind_its_parent(engine):
    async with idle_planes(engine, after_s=1000.0) as plane:
        await plane.create(tokens=[1] * 100, name="root", pin=True)
        await plane.create(tokens=[3] * 1000, name="below")
        await plane.fork("root", tokens=[1] * 60 + [2] * 50, name="child", pin=True)
        await evict(plane, "below", "cold")
        await eventually(lambda: engine.cache.hi() == 150)
        await eventually(lambda: residencies(plane)["child"] == "resident")
        assert (engine.cache.used(), n_prefilled(plane)) == (150, 1150)
        await books_hold(plane)


async def test_nothing_moves_for_nothing(engine):
    async with idle_planes(engine, after_s=1000.0) as plane:
        await hole(plane)
        run_session(plane, "s", "top")  # who is on top is in use
        await plane.create(tokens=[4] * 10, name="low", pin=True)
        await some_beats(plane)
        assert (engine.cache.hi(), plane.control.tier.facts().n_moved) == (1200, 0)
        end_session(plane, "s")
        await eventually(lambda: engine.cache.hi() == 210)
        assert plane.control.tier.facts().n_moved == 1


async def test_a_little_hole_is_left_alone(engine):
    async with idle_planes(engine, after_s=1000.0) as plane:
        await hole(plane, n_hole=300)
        await some_beats(plane)
        assert (engine.cache.hi(), plane.control.tier.facts().n_moved) == (500, 0)
        asked = [r for r in engine.received if r.body and b'"cells"' in r.body]
        assert len(asked) == 1  # only at the start


async def test_a_pool_that_cannot_come_back_by_a_load_is_prefilled_again(engine):
    async with idle_planes(engine, after_s=1000.0) as plane:
        await hole(plane)
        engine.on("load", "request", reply(409, {"error": {"code": 409, "message": "no", "type": "polykv_error"}}))
        await eventually(lambda: engine.cache.hi() == 200)
        await eventually(lambda: residencies(plane)["top"] == "resident")
        assert n_prefilled(plane) == 1400
        await books_hold(plane)


async def test_who_asks_for_a_pool_that_just_moves_waits_for_its_load(engine):
    async with idle_planes(engine, after_s=1000.0) as plane:
        hold = Hold()
        engine.on("load", "request", hold)
        await hole(plane)
        await hold.reached()
        asking = asyncio.create_task(decide(plane, [2] * 201, pool_ref="top"))
        await asyncio.sleep(0.05)
        hold.release()
        plan = await asking
        assert (plan.miss_reason, engine.saved.n_loaded, n_prefilled(plane)) == (None, 1, 1200)


async def test_the_log_tells_since_when_nobody_used_a_pool_that_leaves_nor_one_below(plane, caplog):
    await plane.create(tokens=[1] * 200, name="root")
    await plane.fork("root", own_tokens=[2] * 50, name="child")
    now_s = plane.control.clock()
    root, child = (plane.control.tree.get(name) for name in ("root", "child"))
    root.last_access_s, child.last_access_s = now_s - 500, now_s - 100
    root.used_s = child.used_s = 0.0
    with caplog.at_level(logging.INFO, "polykv.pools"):
        await eventually(lambda: residencies(plane) == {"root": "warm", "child": "warm"})
    said = [r.getMessage() for r in caplog.records if "leaves the cache" in r.getMessage()]
    assert said == [
        "pool child leaves the cache: unused for 100 s",
        "pool root leaves the cache: unused by itself for 500 s, and below it, by pool child, for 100 s",
    ]
