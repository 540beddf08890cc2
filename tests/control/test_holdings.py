"""Cells that pools and slots hold, alone and together, against the engine's own count."""

import asyncio
from typing import Any

import pytest

from polykv_proxy.control.holdings import Holdings
from polykv_proxy.tree.cells import Run
from tests.control.conftest import Plane
from tests.fake_engine import FakeEngine, Hold

PATH = "/completion"


@pytest.fixture
async def engine():
    async with FakeEngine(n_cells=2000) as engine:
        yield engine


async def send(plane: Plane, id_slot: int, prompt: list[int], pool: Any = None) -> None:
    body = {"prompt": prompt, "n_predict": 0, "id_slot": id_slot}
    if pool is not None:
        body["shared_pool_slot"] = pool.seq_id
    async with plane.session.post(plane.engine.url + PATH, json=body) as r:
        assert r.status == 200


async def look(plane: Plane) -> Holdings:
    stats = await plane.control.watch.refresh()
    assert stats is not None
    ledger = plane.control.residency.ledger
    ledger.sync()
    return Holdings(stats, plane.control.tree.residents(), ledger.book)


async def family(plane: Plane) -> None:
    """A parent of 300, a child of 5 more; slots 0 and 1 rest on the parent."""
    await plane.create(tokens=[1] * 300, name="parent")
    await plane.fork("parent", own_tokens=[2] * 5, name="child")
    for id_slot in (0, 1):
        await send(plane, id_slot, [1] * 300 + [3] * (10 + id_slot), plane.control.tree.get("parent"))
        await look(plane)


async def test_idle_slots_give_what_nobody_else_holds(plane):
    await family(plane)
    pools = {name: plane.control.tree.get(name) for name in ("parent", "child")}
    for name, n_alone in (("parent", 21), ("child", 321)):
        assert (await look(plane)).n_resting_alone() == 21
        await plane.control.residency.evict(pools[name])
        assert (await look(plane)).n_resting_alone() == n_alone  # the 300 of both slots once
    assert plane.engine.cache.used() == 321


async def test_a_busy_slot_holds_what_it_shares_with_a_pool_once(plane):
    await family(plane)
    hold = Hold()
    plane.engine.on(PATH, "prefill", hold)
    running = asyncio.create_task(send(plane, 1, [1] * 300 + [3] * 11 + [4], plane.control.tree.get("parent")))
    await hold.reached()
    await plane.control.residency.evict(plane.control.tree.get("parent"))
    holdings = await look(plane)
    assert [slot.id for slot in holdings.busy] == [1]
    assert (holdings.n_held(), holdings.n_resting_alone()) == (305 + 11, 10)
    assert holdings.n_freed([]) == 5  # 300 of the child's stay with the busy slot
    assert holdings.n_held() + holdings.n_resting_alone() == plane.engine.cache.used()
    hold.release()
    await running


async def test_of_a_slot_that_the_books_do_not_know_what_stats_say_counts(plane):
    await family(plane)
    known = await look(plane)
    plane.control.residency.ledger.book.found_slot(0, (Run(1, 0, 1),), 99)
    assert known.n_resting_alone() == 21
