"""With a disk, resident pools are written to it at rest: a restart of the engine costs none of them a prefill."""

import pytest

from tests.control.conftest import Plane, eventually, planes
from tests.control.test_idle_pools import idle_planes, some_beats
from tests.control.test_retention import attach, residencies, run_session
from tests.control.test_warm_pools import LATER, MIB, books_hold, n_prefilled
from tests.fake_engine import FakeEngine


@pytest.fixture
async def engine():
    async with FakeEngine(n_cells=4000, n_slots=2, max_pools=8, save_ram=8 * MIB, save_disk=8 * MIB) as engine:
        yield engine


async def plant(plane: Plane) -> None:
    await plane.create(tokens=[1] * 200, name="root")
    await plane.fork("root", own_tokens=[2] * 50, name="child")
    await plane.create(tokens=[3] * 100, name="pinned", pin=True)


def places(plane: Plane) -> dict[tuple[int, int], tuple[str, ...]]:
    """Of what is saved: [start, n) → where."""
    return {(state.start, state.n_tokens): state.places for state in plane.control.saved}


ON_DISK = {(0, 200): ("disk",), (200, 250): ("disk",), (0, 100): ("disk",)}


async def test_resident_pools_are_on_disk_and_stay_where_they_are(engine):
    async with idle_planes(engine, after_s=LATER, warm_disk_bytes=MIB) as plane:
        await plant(plane)
        run_session(plane, "s", "child")
        await eventually(lambda: places(plane) == ON_DISK)
        assert set(residencies(plane).values()) == {"resident"}
        n_saves = plane.control.tier.facts().counts.n_saves
        await some_beats(plane)
        assert plane.control.tier.facts().counts.n_saves == n_saves == 3
        await books_hold(plane)


async def test_after_a_kill_nothing_is_prefilled(engine):
    async with idle_planes(engine, after_s=LATER, warm_disk_bytes=MIB) as plane:
        await plant(plane)
        await eventually(lambda: places(plane) == ON_DISK)
        await engine.kill()
        await engine.start()
        await eventually(lambda: plane.control.watch.epoch == engine.epoch)
        for name, tokens in (("child", [1] * 200 + [2] * 50), ("pinned", [3] * 100), ("root", [1] * 200)):
            timings = await attach(plane, [*tokens, 9], pool_ref=name)
            assert (timings["pool_n"], timings["reason"]) == (len(tokens), None)
        assert n_prefilled(plane) == 0
        await books_hold(plane)


async def test_who_leaves_is_kept_in_memory_too(engine):
    async with idle_planes(engine, warm_disk_bytes=MIB) as plane:
        await plane.create(tokens=[1] * 200, name="root")
        await eventually(lambda: residencies(plane) == {"root": "warm"})
        assert places(plane) == {(0, 200): ("ram", "disk")}


async def test_a_disk_that_fails_is_not_asked_again_and_again(engine):
    engine.saved.disk_fails = "no space left on device"
    async with idle_planes(engine, after_s=LATER, warm_disk_bytes=MIB) as plane:
        await plane.create(tokens=[1] * 200, name="root")
        await some_beats(plane)
        assert places(plane) == {}
        assert residencies(plane) == {"root": "resident"}
        assert sum(plane.control.tier.facts().counts.n_failures.values()) == 1


async def test_without_a_disk_nothing_is_copied_for_it(engine):
    async with idle_planes(engine, after_s=LATER) as plane:
        await plant(plane)
        await some_beats(plane)
        assert places(plane) == {}


async def test_automatic_pools_go_last(engine):
    async with planes(engine, warm_after_s=LATER, warm_disk_bytes=MIB, heartbeat_s=3600) as plane:
        await plant(plane)
        plane.control.tree.get("root").auto = True
        plane.control.tree.get("pinned").pin = False
        await plane.control.idle_pools._tend()
        assert [len(file.tokens) for file in engine.saved.files][-1] == 200


async def test_a_disk_that_fails_keeps_nobody_from_leaving_for_memory(engine):
    engine.saved.disk_fails = "no space left on device"
    async with idle_planes(engine, warm_disk_bytes=MIB) as plane:
        await plane.create(tokens=[1] * 200, name="root")
        await eventually(lambda: residencies(plane) == {"root": "warm"})
        assert places(plane) == {(0, 200): ("ram",)}


async def test_a_disk_that_is_too_small_for_all_is_not_written_to_again_and_again(engine):
    async with idle_planes(engine, after_s=LATER, warm_disk_bytes=270 * 1024) as plane:
        for i in range(3):
            await plane.create(tokens=[i] * 200, name=f"p{i}")
        await some_beats(plane)
        counts = plane.control.tier.facts().counts
        assert (len(engine.saved.files), counts.n_saves, counts.n_forgotten) == (1, 1, 0)
