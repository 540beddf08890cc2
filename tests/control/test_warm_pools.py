"""Pools outside the cache: they leave saved, and come back without a prefill; whatever fails costs the prefill only."""

import asyncio
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polykv_proxy.control.saved import pool_tag
from polykv_proxy.errors import UpstreamUnavailable
from tests.control.conftest import Plane, eventually, planes
from tests.control.test_retention import attach, decide, plant, residencies, run_session, shown
from tests.fake_engine import FakeEngine, Hold, drop, reply

MIB = 1 << 20
N_SEQS = 4
LATER = 1000.0
"""Seconds: so soon time sends nobody away."""


@pytest.fixture
async def engine():
    async with FakeEngine(n_cells=1000, n_slots=2, max_pools=N_SEQS, save_ram=MIB, save_disk=MIB) as engine:
        yield engine


@asynccontextmanager
async def warm_planes(engine: FakeEngine, **settings: Any):
    """Time does nothing by itself: neither does it send anybody away, nor write ahead to the disk."""
    async with planes(engine, warm_after_s=LATER, **settings) as plane:
        plane.control.idle_pools._unwritten = lambda: None
        yield plane


@pytest.fixture
async def plane(engine):
    async with warm_planes(engine, warm_disk_bytes=MIB) as plane:
        yield plane


async def evict(plane: Plane, ref: Any, to: str | None = None) -> dict[str, Any]:
    status, answer = await plane.call("POST", f"/polykv/pools/{ref}/evict" + (f"?to={to}" if to else ""))
    assert status == 200, answer
    return answer


async def family(plane: Plane) -> None:
    """A root of 200, a child that leaves it at 150 for 50 of its own, and a grandchild with 30 more."""
    await plane.create(tokens=[1] * 200, name="root")
    await plane.fork("root", tokens=[1] * 150 + [2] * 50, name="child")
    await plane.fork("child", own_tokens=[3] * 30, name="leaf")


LEAF = [1] * 150 + [2] * 50 + [3] * 30


def n_prefilled(plane: Plane) -> int:
    return plane.engine.hooks.n_processed


async def ensure(plane: Plane, name: str) -> None:
    await plane.control.residency.ensure(plane.control.tree.get(name))


async def books_hold(plane: Plane) -> None:
    """Every cell has one owner, and every sequence is one pool's."""
    status, view = await plane.call("GET", "/polykv/pools")
    assert status == 200
    suffixes = sum(s["suffix_n_tokens"] for pool in view["pools"] for s in pool["sessions"])
    own = sum(pool["own_kv_cells"] for pool in view["pools"]) + sum(p["own_kv_cells"] for p in view["released"])
    assert own + suffixes + view["unpooled"]["kv_cells"] == plane.engine.cache.used() == view["kv_cells_used"]
    tree = plane.control.tree
    held = {pool.seq_id: tree.tokens(pool.pool_id).tolist() for pool in tree.residents()}
    assert held == {seq.seq: seq.tokens for seq in plane.engine.ready_pools()}


# Away and back -------------------------------------------------------------------------------------------------------


async def test_an_evicted_pool_is_warm_and_comes_back_without_a_prefill(plane):
    await plane.create(tokens=[1] * 300, name="a")
    answer = await evict(plane, "a")
    assert (answer["residency"], answer["seq_id"]) == ("warm", None)
    assert answer["freed"] == {"seq_ids": 1, "kv_cells": 300, "kv_bytes": 300 * 1024}
    view = await shown(plane, "a")
    assert (view["residency"], view["own_kv_cells"], view["own_kv_bytes"]) == ("warm", 0, 0)
    [state] = plane.control.saved
    assert (state.start, state.n_tokens, state.places) == (0, 300, ("ram", "disk"))
    assert view["warm_bytes"] == state.n_bytes > 300 * 1024
    n = n_prefilled(plane)
    timings = await attach(plane, [1] * 301, pool_ref="a")
    assert (timings["pool_n"], timings["reason"], n_prefilled(plane)) == (300, None, n)
    assert residencies(plane) == {"a": "resident"}
    counts = plane.control.tier.facts().counts
    assert (counts.n_saves, dict(counts.n_loads), counts.n_misses, dict(counts.n_failures)) == (1, {"ram": 1}, 0, {})
    await books_hold(plane)


async def test_own_ranges_are_saved_and_come_back_parents_first_behind_each_other(plane):
    await family(plane)
    for name in ("leaf", "child", "root"):
        await evict(plane, name)
    assert residencies(plane) == {"root": "warm", "child": "warm", "leaf": "warm"}
    assert [(s.start, s.n_tokens) for s in plane.control.saved] == [(200, 230), (150, 200), (0, 200)]
    assert plane.engine.cache.used() == 0
    n = n_prefilled(plane)
    timings = await attach(plane, [*LEAF, 9], pool_ref="leaf")
    assert (timings["pool_n"], n_prefilled(plane)) == (230, n)
    assert residencies(plane) == {"root": "resident", "child": "resident", "leaf": "resident"}
    assert plane.engine.cache.used() == 200 + 50 + 30 + 1  # and the slot's own token
    assert [(await shown(plane, name))["own_kv_cells"] for name in ("root", "child", "leaf")] == [200, 50, 30]
    await books_hold(plane)


async def test_the_parent_of_a_saved_range_is_whoever_holds_the_same_tokens(plane):
    await family(plane)
    await plane.create(tokens=[1] * 180 + [7] * 20, name="other")
    for name in ("leaf", "child", "root"):
        await evict(plane, name)
    n, n_loaded = n_prefilled(plane), plane.engine.saved.n_loaded
    await ensure(plane, "child")
    assert (residencies(plane)["root"], n_prefilled(plane), plane.engine.saved.n_loaded) == ("warm", n, n_loaded + 1)
    assert plane.engine.cache.used() == 200 + 50
    await books_hold(plane)


async def test_a_pool_whose_parent_is_nowhere_is_saved_whole(plane):
    await family(plane)
    await evict(plane, "root", "cold")
    await evict(plane, "child", "cold")
    assert (await evict(plane, "leaf"))["residency"] == "warm"
    assert [(s.start, s.n_tokens) for s in plane.control.saved] == [(0, 230)]
    n = n_prefilled(plane)
    await ensure(plane, "leaf")
    assert n_prefilled(plane) == n
    assert (await shown(plane, "root"))["residency"] == "cold"  # it leaves the leaf's way at 150
    await books_hold(plane)


@pytest.mark.parametrize("cuts", [True, False])
async def test_what_was_saved_whole_shares_its_beginning_when_somebody_holds_that(plane, cuts):
    await family(plane)
    await evict(plane, "root", "cold")
    await evict(plane, "child", "cold")
    await evict(plane, "leaf")
    assert [(s.start, s.n_tokens) for s in plane.control.saved] == [(0, 230)]
    await ensure(plane, "root")
    if not cuts:
        error = {"code": 409, "message": "the saved range starts at 0, not at 150", "type": "polykv_error"}
        plane.engine.on("load", "request", reply(409, {"error": error}))
    n = n_prefilled(plane)
    await ensure(plane, "leaf")
    # It branches from its parent at 200, which only its own sequence holds; of the root it has 150.
    assert (n_prefilled(plane), plane.engine.cache.used()) == (n, 200 + (80 if cuts else 230))
    assert residencies(plane) == {"root": "resident", "child": "cold", "leaf": "resident"}
    assert len(list(plane.control.saved)) == 1, "an engine that cuts nothing is no reason to forget"
    await books_hold(plane)


async def test_a_child_is_loaded_behind_a_parent_that_must_be_prefilled_if_that_is_less(plane):
    await plane.create(tokens=[1] * 40, name="root")
    await plane.fork("root", own_tokens=[2] * 100, name="child")
    await evict(plane, "child")
    await evict(plane, "root", "cold")
    n = n_prefilled(plane)
    await ensure(plane, "child")
    assert (n_prefilled(plane) - n, plane.engine.saved.n_loaded) == (40, 1)
    await books_hold(plane)


async def test_who_asks_at_the_same_time_shares_one_load(plane):
    await plane.create(tokens=[1] * 300, name="a")
    await evict(plane, "a")
    hold = Hold()
    plane.engine.on("load", "request", hold)
    asking = [asyncio.create_task(decide(plane, [1] * 301, pool_ref="a")) for _ in range(5)]
    await hold.reached()
    assert residencies(plane) == {"a": "materializing"}
    hold.release()
    plans = await asyncio.gather(*asking)
    assert {(plan.pool_id, plan.seq_id, plan.gen) for plan in plans} == {(1, plans[0].seq_id, plans[0].gen)}
    assert plane.engine.saved.n_loaded == 1


async def test_a_load_does_not_wait_for_a_prefill_under_way(plane):
    await plane.create(tokens=[1] * 100, name="a")
    await evict(plane, "a")
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    making = asyncio.create_task(plane.create(tokens=[2] * 100, name="b"))
    await hold.reached()
    plan = await asyncio.wait_for(decide(plane, [1] * 101, pool_ref="a"), 5)
    assert (plan.miss_reason, residencies(plane)["a"]) == (None, "resident")
    hold.release()
    await making
    await books_hold(plane)


async def test_saved_once_a_pool_is_not_saved_again(plane):
    await plane.create(tokens=[1] * 300, name="a")
    for _ in range(3):
        await evict(plane, "a")
        await ensure(plane, "a")
    counts = plane.control.tier.facts().counts
    assert (counts.n_saves, dict(counts.n_loads)) == (1, {"ram": 3})


async def test_evict_to_cold_forgets_what_is_saved(plane):
    await plane.create(tokens=[1] * 300, name="a")
    await evict(plane, "a", "warm")
    [state] = plane.control.saved
    answer = await evict(plane, "a", "warm")
    assert (answer["was"], answer["residency"], answer["warm_bytes"]) == ("warm", "warm", state.n_bytes)
    answer = await evict(plane, "a", "cold")
    assert (answer["was"], answer["residency"], answer["warm_bytes"]) == ("warm", "cold", 0)
    assert answer["freed"]["seq_ids"] == 0
    answer = await evict(plane, "a", "warm")
    assert (answer["was"], answer["residency"], answer["warm_bytes"]) == ("cold", "cold", 0)
    assert ((await shown(plane, "a"))["warm_bytes"], plane.engine.saved.ram, plane.engine.saved.files) == (0, {}, [])


async def test_flush_saves_what_it_evicts(plane):
    await family(plane)
    status, answer = await plane.call("POST", "/polykv/pools/root/flush")
    assert (status, answer["kept"], answer["freed"]["kv_cells"]) == (200, [], 280)
    assert set(residencies(plane).values()) == {"warm"}


async def test_without_a_tier_evict_says_why_and_goes_cold(engine):
    for settings, why in (
        ({"warm_ram_bytes": 0}, "POLYKV_WARM_RAM_BYTES"),
        ({"warm_ram_bytes": 1000}, "the budget is smaller"),
    ):
        async with warm_planes(engine, **settings) as plane:
            await plane.create(tokens=[1] * 300, name="a")
            error = await plane.refused(501, "warm_unavailable", "POST", "/polykv/pools/a/evict?to=warm")
            assert why in error["message"]
            assert "?to=cold" in error["message"]
            assert residencies(plane) == {"a": "resident"}
            assert (await evict(plane, "a"))["residency"] == "cold"
            assert (engine.saved.ram, engine.saved.files) == ({}, [])


async def test_a_released_pools_state_is_forgotten_unless_a_twin_has_it(plane):
    for name in ("a", "twin", "b"):
        await plane.create(tokens=[1 if name != "b" else 2] * 100, name=name)
    for name in ("a", "twin", "b"):
        await evict(plane, name)
    for name in ("a", "b"):
        assert (await plane.call("DELETE", f"/polykv/pools/{name}"))[0] == 200
    await eventually(lambda: len(plane.engine.saved.ram) == 1)
    n = n_prefilled(plane)
    await ensure(plane, "twin")
    assert n_prefilled(plane) == n


# Failures ------------------------------------------------------------------------------------------------------------


async def _damaged(plane: Plane) -> None:
    plane.engine.saved.ram.clear()
    plane.engine.saved.damage(pool_tag(plane.control.tree.get("a").tokens_hash, 100, 0))


async def _removed(plane: Plane) -> None:
    plane.engine.saved.ram.clear()
    plane.engine.saved.files.clear()


REFUSALS = {
    "refused": (409, "the saved state does not fit this cache"),
    "unsupported": (501, "media"),
    "no cells": (507, "not enough KV cells"),
    "no sequence": (503, "no free sequence"),
    "nonsense": (500, "?"),
}


@pytest.mark.parametrize("what", ["damaged", "removed", "lost before", *REFUSALS])
async def test_whatever_goes_wrong_with_a_load_the_pool_is_prefilled(plane, what):
    await plane.create(tokens=[1] * 100, name="a")
    await evict(plane, "a")
    n = n_prefilled(plane)
    if what in REFUSALS:
        status, message = REFUSALS[what]
        error = {"code": status, "message": message, "type": "polykv_error"}
        plane.engine.on("load", "request", reply(status, {"error": error}), times=None)
    elif what == "lost before":
        plane.engine.on("load", "request", drop())
    else:
        await {"damaged": _damaged, "removed": _removed}[what](plane)
    timings = await attach(plane, [1] * 101, pool_ref="a")
    assert (timings["pool_n"], timings["reason"], n_prefilled(plane) - n) == (100, None, 100)
    facts = plane.control.tier.facts().counts
    assert (facts.n_misses, sum(facts.n_failures.values()) > 0, dict(facts.n_loads)) == (1, True, {})
    useless = what in ("damaged", "removed", "refused", "unsupported")
    assert (len(list(plane.control.saved)) == 0) is useless
    await eventually(lambda: plane.control.residency.books_true)
    await books_hold(plane)


async def test_a_load_whose_answer_is_lost_is_found_by_its_tag(plane):
    await plane.create(tokens=[1] * 100, name="a")
    await evict(plane, "a")
    n = n_prefilled(plane)
    plane.engine.on("load", "reply", drop())
    timings = await attach(plane, [1] * 101, pool_ref="a")
    assert (timings["pool_n"], n_prefilled(plane), len(plane.engine.ready_pools())) == (100, n, 1)
    await books_hold(plane)


async def test_a_lost_load_is_not_taken_for_a_sequence_that_is_just_given_up(plane):
    """It has the same tag, since that tells the content."""
    await plane.create(tokens=[1] * 100, name="a")
    await evict(plane, "a")
    await ensure(plane, "a")
    plant(plane, [1] * 100, name="twin")
    hold = Hold()
    plane.engine.on("free", "request", hold)
    leaving = asyncio.create_task(evict(plane, "a"))
    await hold.reached()
    plane.engine.on("load", "request", drop())
    await ensure(plane, "twin")
    hold.release()
    await leaving
    await eventually(lambda: plane.control.residency.books_true)
    assert residencies(plane) == {"a": "warm", "twin": "resident"}
    await books_hold(plane)


async def test_a_load_that_is_carried_out_after_all_leaves_no_sequence_behind(plane):
    """Its connection broke while it waited for a batch: nothing was to be seen of it."""

    load, late = plane.control.saved.load_pool, []

    async def later(tag: str) -> None:
        await asyncio.sleep(0.2)
        await load(tag)

    async def lost(tag: str, parent_seq: int = -1, start: int = -1) -> None:
        late.append(asyncio.create_task(later(tag)))
        raise UpstreamUnavailable("nothing was heard of it")

    await plane.create(tokens=[1] * 100, name="a")
    await evict(plane, "a")
    plane.control.saved.load_pool = lost
    await ensure(plane, "a")
    await eventually(lambda: plane.control.residency.books_true)
    await asyncio.gather(*late)
    assert len(plane.engine.ready_pools()) == 2
    await eventually(lambda: len(plane.engine.ready_pools()) == 1)
    await books_hold(plane)


async def test_a_load_that_is_found_behind_somebody_else_is_in_the_books_as_it_is(plane):
    await family(plane)
    for name in ("root", "child"):
        await evict(plane, name, "cold")
    await evict(plane, "leaf")
    await ensure(plane, "root")
    load = plane.control.saved.load_pool

    async def lost(tag: str, parent_seq: int = -1, start: int = -1) -> None:
        await load(tag)
        raise UpstreamUnavailable("it was an earlier one, and shares nothing")

    plane.control.saved.load_pool = lost
    await ensure(plane, "leaf")
    assert plane.engine.cache.used() == 200 + 230
    await eventually(lambda: plane.control.residency.books_true)
    await books_hold(plane)


async def test_a_load_that_is_called_off_leaves_no_sequence_behind(plane):
    await plane.create(tokens=[1] * 100, name="a")
    await evict(plane, "a")
    hold = Hold()
    plane.engine.on("load", "reply", hold)
    asking = asyncio.create_task(decide(plane, [1] * 101, pool_ref="a"))
    await hold.reached()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    hold.release()
    await eventually(lambda: plane.control.residency.books_true and plane.control.residency.at_rest)
    await books_hold(plane)  # adopted, or freed


async def test_an_engine_that_loads_other_tokens_is_not_believed(plane):
    await plane.create(tokens=[1] * 100, name="a")
    await evict(plane, "a")
    [state] = plane.engine.saved.ram.values()
    state.tokens = [5] * 100
    n = n_prefilled(plane)
    timings = await attach(plane, [1] * 101, pool_ref="a")
    assert (timings["pool_n"], n_prefilled(plane) - n) == (100, 100)
    assert pool_tag(plane.control.tree.get("a").tokens_hash, 100, 0) not in plane.engine.saved.ram
    await eventually(lambda: plane.control.residency.books_true)
    await books_hold(plane)


async def test_a_save_of_other_tokens_is_forgotten(plane):
    await plane.create(tokens=[1] * 100, name="a")
    plane.engine.ready_pools()[0].tokens[50] = 7
    assert not await plane.control.residency.save(plane.control.tree.get("a"))
    assert plane.engine.saved.ram == {}


@pytest.mark.parametrize("status", [409, 410, 500, 501, 507])
async def test_what_cannot_be_saved_goes_cold(plane, status):
    await plane.create(tokens=[1] * 100, name="a")
    error = {"code": status, "message": "no", "type": "polykv_error"}
    plane.engine.on("save", "request", reply(status, {"error": error}), times=None)
    assert (await evict(plane, "a"))["residency"] == "cold"
    assert sum(plane.control.tier.facts().counts.n_failures.values()) >= 1
    await eventually(lambda: plane.control.residency.books_true)
    plane.engine.faults.armed.clear()
    await ensure(plane, "a")
    assert (await evict(plane, "a"))["residency"] == "warm"  # made anew, it is tried again


# Pressure ------------------------------------------------------------------------------------------------------------


async def test_pressure_saves_before_it_takes_cells_and_sequences(plane):
    for i in range(N_SEQS + 2):
        await plane.create(tokens=[i] * 190, name=f"p{i}")  # four have sequences, five have cells
    assert list(residencies(plane).values()) == ["warm"] * 2 + ["resident"] * N_SEQS
    n = n_prefilled(plane)
    timings = await attach(plane, [0] * 191, pool_ref="p0")
    assert (timings["pool_n"], n_prefilled(plane)) == (190, n)
    await books_hold(plane)


async def test_an_order_saves_all_that_it_displaces_a_request_waits_for_one(plane):
    for i in range(3):
        await plane.create(tokens=[i] * 300, name=f"p{i}")
    await plane.create(tokens=[8] * 990, name="big")
    assert residencies(plane) == {"p0": "warm", "p1": "warm", "p2": "warm", "big": "resident"}
    for name in ("p0", "p1", "p2"):
        await evict(plane, name, "cold")
    await evict(plane, "big", "cold")
    for name in ("p0", "p1", "p2"):
        await ensure(plane, name)
    n = plane.control.tier.facts().counts.n_saves
    plan = await decide(plane, [9] * 900)
    assert plan.pool_id is None
    assert plane.control.tier.facts().counts.n_saves == n + 1
    assert sorted(residencies(plane).values()) == ["cold", "cold", "cold", "warm"]


async def test_a_pool_that_comes_to_use_while_it_is_saved_stays(plane):
    await plane.create(tokens=[1] * 500, name="a")
    hold = Hold()
    plane.engine.on("save", "request", hold)
    making = asyncio.create_task(plane.call("POST", "/polykv/pools", {"tokens": [2] * 600}))
    await hold.reached()
    run_session(plane, "s", "a")
    hold.release()
    status, answer = await making
    assert (status, answer["error"]["code"], residencies(plane)) == (507, "kv_exhausted", {"a": "resident"})


async def test_a_deep_pool_comes_back_by_loads_alone_on_two_sequences():
    async with (
        FakeEngine(n_cells=1000, max_pools=2, save_ram=MIB) as engine,
        warm_planes(engine) as plane,
    ):
        await plane.create(tokens=[1] * 200, name="root")
        await plane.fork("root", own_tokens=[2] * 50, name="child")
        await plane.fork("child", own_tokens=[3] * 30, name="leaf")
        for name in ("leaf", "child"):
            await evict(plane, name)
        n = n_prefilled(plane)
        assert residencies(plane) == {"root": "warm", "child": "warm", "leaf": "warm"}
        assert sorted((s.start, s.n_tokens) for s in plane.control.saved) == [(0, 200), (200, 250), (250, 280)]
        await ensure(plane, "leaf")
        assert n_prefilled(plane) == n
        await books_hold(plane)


# Restarts ------------------------------------------------------------------------------------------------------------


async def test_after_a_restart_of_the_engine_pools_come_from_their_files(plane):
    await family(plane)
    for name in ("leaf", "child", "root"):
        await evict(plane, name)
    plane.engine.saved.damage(pool_tag(plane.control.tree.get("leaf").tokens_hash, 230, 200))
    await plane.control.watch.stop()  # nobody has noticed yet
    await plane.engine.restart()
    plan = await decide(plane, [1] * 150 + [2] * 50 + [7], pool_ref="child")
    assert (plan.miss_reason, plan.epoch) == (None, plane.engine.epoch)
    assert (n_prefilled(plane), residencies(plane)["leaf"]) == (0, "warm")
    assert dict(plane.control.tier.facts().counts.n_loads)["disk"] >= 2
    await ensure(plane, "leaf")
    assert n_prefilled(plane) == 30  # its file was damaged
    await plane.control.residency.settle()
    await books_hold(plane)


async def test_a_restart_that_is_noticed_while_comparing_costs_no_state(plane):
    await family(plane)
    for name in ("leaf", "child", "root"):
        await evict(plane, name)
    await plane.control.watch.stop()
    await plane.engine.restart()
    await plane.control.residency.reconcile()
    await plane.control.lease.renew()
    await plane.control.residency.reconcile()
    assert set(residencies(plane).values()) == {"warm"}


async def test_memory_only_is_lost_with_the_engine_and_outlives_its_sleep(engine):
    async with warm_planes(engine) as plane:
        await plane.create(tokens=[1] * 100, name="a", ttl_s=0)
        await evict(plane, "a")
        engine.sleep()
        await eventually(lambda: plane.control.watch.sleeping)
        n = n_prefilled(plane)
        timings = await attach(plane, [1] * 101, pool_ref="a")
        assert n_prefilled(plane) == n
        timings = await attach(plane, [1] * 101, pool_ref="a")
        assert (timings["pool_n"], n_prefilled(plane)) == (100, n)
        await evict(plane, "a")
        await engine.restart()
        await eventually(lambda: residencies(plane) == {"a": "cold"})
        await ensure(plane, "a")
        assert n_prefilled(plane) == 100
        assert plane.control.tier.facts().counts.n_misses == 1


async def test_restoring_loads_before_it_prefills(plane):
    await plane.create(tokens=[1] * 100, name="cold", pin=True)
    await plane.create(tokens=[2] * 100, name="warm")
    await evict(plane, "warm")
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    await plane.engine.restart()
    await hold.reached()
    assert residencies(plane) == {"cold": "materializing", "warm": "resident"}
    hold.release()
    await eventually(lambda: residencies(plane)["cold"] == "resident")


async def test_a_killed_proxy_finds_what_is_saved_by_its_content_and_forgets_strangers(engine, tmp_path: Path):
    state = tmp_path / "state" / "pools.db"
    async with warm_planes(engine, state=str(state)) as first:
        await first.create(tokens=[1] * 100, name="a", ttl_s=0)
        await first.create(tokens=[2] * 100, name="b", ttl_s=0)
        await evict(first, "a")
        await evict(first, "b")
        copy = tmp_path / "killed" / "pools.db"
        shutil.copytree(state.parent, copy.parent)
        await first.create(tokens=[3] * 100, name="unknown", ttl_s=0)  # not in the copy
        await evict(first, "unknown")
        assert len(engine.saved.ram) == 3
        await first.control.watch.stop()
        engine.hooks._owner = None
        async with warm_planes(engine, state=str(copy)) as plane:
            assert residencies(plane) == {"a": "warm", "b": "warm"}
            await eventually(lambda: len(engine.saved.ram) == 2)
            n = n_prefilled(plane)
            await ensure(plane, "b")
            assert n_prefilled(plane) == n


async def test_states_of_another_model_are_not_ours(engine, tmp_path: Path):
    async with warm_planes(engine, warm_disk_bytes=MIB, state=str(tmp_path / "p.db")) as plane:
        await plane.create(tokens=[1] * 100, name="a", ttl_s=0)
        await evict(plane, "a")
        engine.fingerprint = "other"
        await engine.restart()
        await eventually(lambda: len(plane.control.tree) == 0)
        await plane.create(tokens=[1] * 100, name="b", ttl_s=0)
        assert (await shown(plane, "b"))["warm_bytes"] == 0
        engine.fingerprint = "toy-model"
        await engine.restart()
        await eventually(lambda: residencies(plane) == {"a": "warm"})


# Budgets -------------------------------------------------------------------------------------------------------------


async def test_the_least_recently_used_states_go_first_within_our_own_budget(engine):
    async with warm_planes(engine, warm_ram_bytes=220 * 1024) as plane:
        for i in range(3):
            await plane.create(tokens=[i] * 100, name=f"p{i}")
        await evict(plane, "p0")
        await evict(plane, "p1")
        await ensure(plane, "p0")
        await evict(plane, "p0")  # used after 1
        await evict(plane, "p2")
        assert residencies(plane) == {"p0": "warm", "p1": "cold", "p2": "warm"}
        facts = plane.control.tier.facts()
        assert (facts.ram.n_pools, facts.ram.max_bytes, facts.counts.n_forgotten) == (2, 220 * 1024, 1)
        assert facts.ram.n_bytes == sum(state.n_bytes for state in engine.saved.ram.values()) <= 220 * 1024


async def test_the_engines_budget_is_made_room_in_and_a_disk_takes_what_memory_cannot(engine):
    engine.saved.ram_max = 220 * 1024
    async with warm_planes(engine, warm_disk_bytes=MIB) as plane:
        for i in range(4):
            await plane.create(tokens=[i] * 100, name=f"p{i}")
            await evict(plane, f"p{i}")
        assert set(residencies(plane).values()) == {"warm"}  # nothing is forgotten while the disk has room
        # Nor while it is on disk: what was used last is in memory.
        assert [s.places for s in plane.control.saved] == [("disk",)] * 2 + [("ram", "disk")] * 2
        assert len(engine.saved.ram) == 2
        await ensure(plane, "p0")
        assert dict(plane.control.tier.facts().counts.n_loads) == {"disk": 1}
        engine.saved.disk_max = 420 * 1024
        await eventually(lambda: plane.control.saved.budget("disk") == 420 * 1024)
        await plane.create(tokens=[5] * 100, name="p5")
        await evict(plane, "p5")
        assert residencies(plane)["p5"] == "warm"
        # The oldest is nowhere any more, the next one of those that left the disk is in memory still.
        assert (residencies(plane)["p1"], plane.control.saved.counts.n_forgotten) == ("cold", 1)


async def test_a_disk_that_fails_leaves_the_copy_in_memory(plane):
    plane.engine.saved.disk_fails = "no space left on device"
    await plane.create(tokens=[1] * 100, name="a")
    assert (await evict(plane, "a"))["residency"] == "warm"
    assert [s.places for s in plane.control.saved] == [("ram",)]
    assert plane.control.tier.facts().counts.n_failures == {"disk_failed": 1}


async def test_what_is_just_being_loaded_is_not_forgotten_for_others(engine):
    async with warm_planes(engine, warm_ram_bytes=220 * 1024) as plane:
        for i in range(3):
            await plane.create(tokens=[i] * 100, name=f"p{i}")
        await evict(plane, "p0")
        await evict(plane, "p1")
        hold = Hold()
        engine.on("load", "request", hold)
        loading = asyncio.create_task(ensure(plane, "p0"))
        await hold.reached()
        await evict(plane, "p2")
        hold.release()
        await loading
        assert residencies(plane) == {"p0": "resident", "p1": "cold", "p2": "warm"}
        assert plane.engine.saved.n_loaded == 1


async def test_a_planted_pool_with_the_same_tokens_is_warm_too(plane):
    await plane.create(tokens=[1] * 100, name="a")
    await evict(plane, "a")
    plant(plane, [1] * 100, name="twin")
    n = n_prefilled(plane)
    await ensure(plane, "twin")
    assert n_prefilled(plane) == n


async def test_a_load_gets_the_cells_of_slots_that_rest(engine):
    """The engine clears them for a prefill, not for a load."""
    async with warm_planes(engine) as plane:
        await plane.create(tokens=[1] * 300, name="a")
        await evict(plane, "a")
        async with plane.session.post(engine.url + "/completion", json={"prompt": [7] * 900, "n_predict": 0}) as r:
            assert r.status == 200
        assert engine.cache.free() < 300
        n = n_prefilled(plane)
        await ensure(plane, "a")
        assert (n_prefilled(plane), residencies(plane)) == (n, {"a": "resident"})
        assert plane.control.tier.facts().counts.n_failures == {}  # nor is it asked for before they are free
        await books_hold(plane)


async def test_in_doubt_about_a_slot_the_engine_is_asked_where_everything_lies(plane):
    await plane.create(tokens=[1] * 100, name="a")
    await attach(plane, [1] * 101, pool_ref="a")
    await books_hold(plane)
    [slot] = [slot for slot in plane.engine.slots if slot.tokens]
    state = plane.engine.saved.save(slot, {"tag": "s", "from": 0, "n_tokens": -1, "to": "ram"})[0]
    plane.engine.saved.load(state, None, slot)  # the same tokens in cells of its own, and nobody was told
    slot.n_pool_shared, slot.pool_seq = 0, -1
    plane.control.residency.doubt_cells()
    await eventually(lambda: plane.control.residency.books_true)
    await books_hold(plane)


async def test_a_session_that_outgrew_the_memory_leaves_no_older_state_there(plane):
    async def say(n: int) -> None:
        body = {"prompt": [7] * n, "n_predict": 0, "id_slot": 0}
        async with plane.session.post(plane.engine.url + "/completion", json=body) as r:
            assert r.status == 200

    saved = plane.control.saved
    await say(50)
    assert (await saved.save(id_slot=0, tag="session-s")).places == ("ram", "disk")
    plane.engine.saved.ram_max = 70 * 1024
    await say(100)
    assert (await saved.save(id_slot=0, tag="session-s")).places == ("disk",)
    assert (await saved.load_slot("session-s", 1)).n_tokens == 100
    saved.found((await plane.control.engine.list_pools()).saved, saved.mark())
    assert [(state.n_tokens, state.places) for state in saved] == [(100, ("disk",))]


async def test_a_pool_that_was_not_freed_after_all_is_in_the_books_with_what_it_shares(plane):
    await plane.create(tokens=[1] * 100, name="root")
    await plane.fork("root", tokens=[1] * 60 + [2] * 30, name="child")
    plane.engine.on("free", "request", reply(500, {"error": {"code": 500, "message": "no", "type": "polykv_error"}}))
    await evict(plane, "root")
    await eventually(lambda: residencies(plane)["root"] == "resident")
    await eventually(lambda: plane.control.residency.books_true)
    assert plane.engine.cache.used() == 130
    await books_hold(plane)
