"""A state in memory, on disk, or both: nobody waits for a file, what leaves one place stays in the other, a disk that
fails is left alone for a while."""

import asyncio
import logging
import random
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from polykv_proxy.control.disk_trouble import DiskTrouble
from polykv_proxy.errors import PolyKVError
from tests.control.conftest import Plane, eventually, planes
from tests.control.test_retention import residencies
from tests.control.test_warm_pools import LATER, MIB, books_hold, ensure, evict, n_prefilled, warm_planes
from tests.fake_engine import FakeEngine, Hold, delay, drop, reply

KIB = 1 << 10
FULL = "cannot write /states/{}.state.tmp: No space left on device"


@pytest.fixture
async def engine():
    async with FakeEngine(n_cells=1000, n_slots=2, max_pools=4, save_ram=MIB, save_disk=MIB) as engine:
        yield engine


@pytest.fixture
async def plane(engine):
    async with warm_planes(engine, warm_disk_bytes=MIB) as plane:
        yield plane


def places(plane: Plane) -> dict[int, tuple[str, ...]]:
    """By the number of tokens."""
    return {state.n_tokens: state.places for state in plane.control.saved}


def in_engine(engine: FakeEngine) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {len(state.tokens): ("ram",) for state in engine.saved.ram.values()}
    for file in engine.saved.files:
        found[len(file.tokens)] = (*found.get(len(file.tokens), ()), "disk")
    return found


def saves(engine: FakeEngine) -> list[Any]:
    return [
        r for r in engine.received if r.body is not None and b'"op":"save"' in r.body and b'"nothing"' not in r.body
    ]


async def books_are_the_engines(plane: Plane) -> None:
    assert places(plane) == in_engine(plane.engine)
    facts, usage = plane.control.tier.facts(), plane.engine.saved.usage()
    assert facts.ram.n_bytes == usage["ram"]["bytes"] <= facts.ram.max_bytes
    assert facts.disk.n_pools == len(plane.engine.saved.files)


# Later ---------------------------------------------------------------------------------------------------------------


async def test_who_needs_cells_does_not_wait_for_a_file(plane):
    hold = Hold()
    plane.engine.on("save", "write", hold)
    await plane.create(tokens=[1] * 500, name="a")
    await plane.create(tokens=[2] * 600, name="b")  # it takes the cells of a
    await hold.reached()
    assert (residencies(plane), places(plane)) == ({"a": "warm", "b": "resident"}, {500: ("ram",)})
    hold.release()
    await eventually(lambda: places(plane) == {500: ("ram", "disk")})
    assert plane.control.tier.facts().counts.n_saves == 1
    await books_are_the_engines(plane)


async def test_files_are_written_one_after_the_other_and_not_what_was_forgotten_meanwhile(plane):
    hold = Hold()
    plane.engine.on("save", "write", hold)
    for i, n in enumerate((100, 110, 120)):
        await plane.create(tokens=[i] * n, name=f"p{i}")
        assert await plane.control.residency.save(plane.control.tree.get(f"p{i}"))
    await hold.reached()
    await asyncio.sleep(0.1)
    assert plane.engine.saved.files == []
    await evict(plane, "p1", "cold")
    hold.release()
    await eventually(lambda: places(plane) == {100: ("ram", "disk"), 120: ("ram", "disk")})
    await books_are_the_engines(plane)


async def test_what_is_forgotten_while_it_is_written_is_nowhere(plane):
    hold = Hold()
    plane.engine.on("save", "write", hold)
    await plane.create(tokens=[1] * 100, name="a")
    await plane.control.residency.save(plane.control.tree.get("a"))
    await hold.reached()
    await evict(plane, "a", "cold")
    hold.release()
    await asyncio.sleep(0.1)
    assert (places(plane), residencies(plane)) == ({}, {"a": "cold"})
    await books_are_the_engines(plane)


async def test_a_proxy_that_ends_lets_its_files_be_written(engine):
    async with warm_planes(engine, warm_disk_bytes=MIB) as plane:
        engine.on("save", "write", delay(0.3))
        await plane.create(tokens=[1] * 100, name="a")
        await plane.control.residency.save(plane.control.tree.get("a"))
    assert in_engine(engine) == {100: ("ram", "disk")}


async def test_a_proxy_that_ends_leaves_what_takes_too_long_and_the_next_one_has_it_written(
    engine, monkeypatch, tmp_path
):
    monkeypatch.setattr("polykv_proxy.control.parking.LEAVE_S", 0.1)
    hold, state = Hold(), str(tmp_path / "pools.db")
    async with warm_planes(engine, warm_disk_bytes=MIB, state=state) as plane:
        await plane.create(tokens=[1] * 100, name="a", ttl_s=0)
        engine.on("save", "write", hold)
        await plane.control.residency.save(plane.control.tree.get("a"))
        await hold.reached()
    assert in_engine(engine) == {100: ("ram",)}
    async with warm_planes(engine, warm_disk_bytes=MIB, state=state) as plane:
        await eventually(lambda: places(plane) == {100: ("ram", "disk")})
        await books_are_the_engines(plane)


async def test_an_order_of_the_operator_waits_for_the_file(plane):
    await plane.create(tokens=[1] * 100, name="a")
    await evict(plane, "a")
    assert in_engine(plane.engine) == {100: ("ram", "disk")}


def as_before(engine: FakeEngine) -> None:
    """An engine that writes no file of what is in memory, and forgets in both places."""

    async def action(request: web.Request) -> web.StreamResponse | None:
        asked = await request.json()
        if "seq" in asked or "id_slot" in asked:
            return None
        said = 'exactly one of "seq" and "id_slot" must be given'
        return web.json_response({"error": {"code": 400, "message": said, "type": "polykv_error"}}, status=400)

    engine.on("save", "request", action, times=None)
    forget = engine.saved.forget
    engine.saved.forget = lambda tag, place=None: forget(tag)


async def test_an_engine_that_knows_no_places_writes_at_once_and_forgets_in_both(engine):
    as_before(engine)
    engine.saved.ram_max = 220 * KIB
    async with warm_planes(engine, warm_disk_bytes=420 * KIB) as plane:
        for i, n in enumerate((100, 101, 102, 103, 104)):
            await plane.create(tokens=[i] * n, name=f"p{i}")
            await plane.control.residency.save(plane.control.tree.get(f"p{i}"))
        assert places(plane) == {101: ("ram", "disk"), 102: ("disk",), 103: ("disk",), 104: ("ram", "disk")}
        assert plane.control.saved.counts.n_forgotten == 1
        assert not [r for r in engine.received if "in=" in r.path]
        await books_are_the_engines(plane)


async def test_the_heartbeat_does_not_wait_to_hear_what_the_engine_can(engine):
    hold = Hold()
    engine.on("save", "request", hold)
    async with planes(engine, warm_after_s=LATER, warm_disk_bytes=MIB, heartbeat_s=0.02) as plane:
        await hold.reached()
        asked_s = plane.control.watch.asked_s
        await eventually(lambda: plane.control.watch.asked_s > asked_s + 0.1)
        hold.release()
        await plane.create(tokens=[1] * 100, name="a")
        await eventually(lambda: places(plane) == {100: ("disk",)})


async def test_what_is_forgotten_is_not_remembered_for_a_disk_that_fails(plane):
    plane.engine.saved.disk_fails = FULL.format("a")
    for i in range(3):
        await plane.create(tokens=[i] * 100, name=f"p{i}")
        await evict(plane, f"p{i}")
    assert len(plane.control.saved._files._due) == 3
    for i in range(3):
        await evict(plane, f"p{i}", "cold")
    assert (plane.control.saved._files._due, places(plane)) == ({}, {})


# One place -----------------------------------------------------------------------------------------------------------


async def test_what_leaves_memory_stays_on_disk(engine):
    async with warm_planes(engine, warm_ram_bytes=220 * KIB, warm_disk_bytes=MIB) as plane:
        for i, n in enumerate((100, 101, 102)):
            await plane.create(tokens=[i] * n, name=f"p{i}")
            await evict(plane, f"p{i}")
        assert places(plane) == {100: ("disk",), 101: ("ram", "disk"), 102: ("ram", "disk")}
        assert plane.control.tier.facts().counts.n_forgotten == 0
        await books_are_the_engines(plane)
        n = n_prefilled(plane)
        await ensure(plane, "p0")
        assert (n_prefilled(plane), dict(plane.control.saved.counts.n_loads)) == (n, {"disk": 1})


async def test_what_leaves_memory_before_its_file_was_written_is_written_first(engine):
    """The engine takes more of its memory than the cells alone, which only its answer says."""
    async with warm_planes(engine, warm_ram_bytes=400 * KIB, warm_disk_bytes=MIB) as plane:
        hold = Hold()
        engine.on("save", "write", hold)
        for i, n in enumerate((100, 101, 102)):
            await plane.create(tokens=[i] * n, name=f"p{i}")
            await plane.control.residency.save(plane.control.tree.get(f"p{i}"))
        await hold.reached()  # with the first; the others wait for it
        plane.control.saved._wanted_bytes["ram"] = 220 * KIB
        with plane.control.saved.working_on(next(s.tag for s in plane.control.saved if s.n_tokens == 102)):
            keeping = asyncio.create_task(plane.control.saved._keep_within_budgets(list(plane.control.saved)[-1]))
            await asyncio.sleep(0.05)
            hold.release()
            await keeping
        await eventually(lambda: places(plane)[102] == ("ram", "disk"))
        assert plane.control.saved.counts.n_forgotten == 0
        assert places(plane)[101] == ("disk",)
        await books_are_the_engines(plane)


async def test_what_leaves_the_disk_stays_in_memory_until_the_engine_ends(engine):
    async with warm_planes(engine, warm_disk_bytes=220 * KIB) as plane:
        for i, n in enumerate((100, 101, 102)):
            await plane.create(tokens=[i] * n, name=f"p{i}", ttl_s=0)
            await evict(plane, f"p{i}")
        assert places(plane) == {100: ("ram",), 101: ("ram", "disk"), 102: ("ram", "disk")}
        await books_are_the_engines(plane)
        await engine.restart()
        await eventually(lambda: residencies(plane) == {"p0": "cold", "p1": "warm", "p2": "warm"})


async def test_a_file_takes_no_place_of_what_was_used_later(engine):
    """It waited for its turn for so long."""
    async with warm_planes(engine, warm_disk_bytes=220 * KIB) as plane:
        saved = plane.control.saved
        for i, n in enumerate((100, 101, 102)):
            await plane.create(tokens=[i] * n, name=f"p{i}")
        hold = Hold()
        engine.on("save", "request", hold)
        engine.saved.disk_max, before = 0, engine.saved.disk_max
        hold.release()
        for i in range(3):
            engine.saved.disk_max = before if i else 0
            await plane.control.refresh()
            await plane.control.residency.save(plane.control.tree.get(f"p{i}"), durable=True)
        assert places(plane) == {100: ("ram",), 101: ("ram", "disk"), 102: ("ram", "disk")}
        [oldest] = [state.tag for state in saved if state.n_tokens == 100]
        assert not await saved.write(oldest)
        assert places(plane) == {100: ("ram",), 101: ("ram", "disk"), 102: ("ram", "disk")}
        await books_are_the_engines(plane)


# Useless calls -------------------------------------------------------------------------------------------------------


async def test_what_cannot_fit_is_not_asked_for(engine):
    async with warm_planes(engine, warm_ram_bytes=100 * KIB, warm_disk_bytes=150 * KIB) as plane:
        await plane.create(tokens=[1] * 300, name="large")
        assert (await evict(plane, "large"))["residency"] == "cold"
        assert saves(engine) == []
        await plane.create(tokens=[2] * 120, name="a")  # it fits on the disk
        assert (await evict(plane, "a"))["residency"] == "warm"
        assert (places(plane), len(saves(engine))) == ({120: ("disk",)}, 1)


@pytest.mark.parametrize("status", [409, 500, 501])
async def test_an_order_gives_up_what_cannot_be_saved_after_one_try(plane, status):
    error = {"error": {"code": status, "message": "no", "type": "polykv_error"}}
    await plane.create(tokens=[1] * 500, name="a")
    plane.engine.on("save", "request", reply(status, error), times=None)
    await asyncio.wait_for(plane.create(tokens=[2] * 600, name="b"), 5)
    assert (residencies(plane), len(saves(plane.engine))) == ({"a": "cold", "b": "resident"}, 1)


async def test_an_order_does_not_copy_what_is_on_disk_into_a_memory_that_is_full(engine):
    async with warm_planes(engine, warm_ram_bytes=520 * KIB, warm_disk_bytes=MIB) as plane:
        await plane.create(tokens=[1] * 500, name="a")
        await evict(plane, "a")
        await plane.control.saved.drop(next(iter(plane.control.saved)).tag, "ram")
        await plane.create(tokens=[2] * 480, name="b")
        await evict(plane, "b")
        await ensure(plane, "a")
        n = len(saves(engine))
        await asyncio.wait_for(plane.create(tokens=[3] * 700, name="c"), 5)
        assert (residencies(plane), len(saves(engine))) == ({"a": "warm", "b": "warm", "c": "resident"}, n)


# A disk that fails ---------------------------------------------------------------------------------------------------


def test_a_disk_is_left_alone_longer_each_time_and_talked_about_once_per_cause(caplog):
    now_s = 0.0
    disk = DiskTrouble(lambda: now_s)
    with caplog.at_level(logging.INFO, "polykv.saved"):
        pauses = []
        for i in range(9):
            assert disk.may_try
            disk.failed(FULL.format(i))
            disk.failed(FULL.format("b"))
            began_s = now_s
            while not disk.may_try:
                now_s += 1.0
            pauses.append(now_s - began_s)
        disk.failed("cannot write /states/9.state.tmp: Read-only file system")
        disk.worked(1)
        disk.worked(1)
        disk.failed(FULL.format(10))
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert [(r.levelname, r.getMessage().rpartition(": ")[2]) for r in caplog.records] == [
        ("WARNING", "No space left on device"),
        ("WARNING", "Read-only file system"),
        ("INFO", "states are saved on disk again"),
        ("WARNING", "No space left on device"),
    ]


def test_a_disk_that_is_nearly_full_takes_small_files_and_is_not_said_to_work_again(caplog):
    now_s, pauses = 0.0, []
    disk = DiskTrouble(lambda: now_s)
    with caplog.at_level(logging.INFO, "polykv.saved"):
        for i in range(4):
            disk.failed(FULL.format(i), 1000)
            began_s = now_s
            while not disk.may_try:
                now_s += 1.0
            pauses.append(now_s - began_s)
            disk.worked(999)
            assert (disk.may_try, disk.why) == (True, FULL.format(i))
        disk.worked(1000)
    assert (pauses, disk.why) == ([5, 10, 20, 40], "")
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


async def test_a_full_disk_costs_the_copies_there_and_nothing_else(engine, caplog):
    async with planes(engine, warm_after_s=LATER, warm_disk_bytes=MIB, heartbeat_s=0.01) as plane:
        plane.control.saved.disk.first_pause_s = LATER
        engine.saved.disk_fails = FULL.format("a")
        with caplog.at_level(logging.INFO, "polykv.saved"):
            for i, n in enumerate((100, 101, 102)):
                await plane.create(tokens=[i] * n, name=f"p{i}")
            await eventually(lambda: plane.control.saved.disk_fails)
            await evict(plane, "p0")
            await evict(plane, "p1")
            assert places(plane) == {100: ("ram",), 101: ("ram",)}
            assert "No space left on device" in plane.control.saved.disk_fails
            n, watch = len(saves(engine)), plane.control.watch
            for _ in range(5):
                asked_s = watch.asked_s
                await eventually(lambda: watch.asked_s > asked_s)  # noqa: B023 (awaited in its turn)
            assert len(saves(engine)) == n, "it is not asked with each heartbeat"
            engine.saved.disk_fails = None
            plane.control.saved.disk.end_pause()
            await eventually(
                lambda: places(plane) == dict.fromkeys((100, 101, 102), ("ram", "disk")) | {102: ("disk",)}
            )
        assert plane.control.saved.disk_fails == ""
        said = [r.getMessage() for r in caplog.records if "states are" in r.getMessage()]
        assert (len(said), said[-1]) == (2, "states are saved on disk again")
        assert plane.control.saved.counts.n_failures.keys() == {"disk_failed"}
        await books_are_the_engines(plane)


async def test_on_a_full_disk_alone_pools_go_cold_and_warm_again_when_it_works(engine):
    async with warm_planes(engine, warm_ram_bytes=0, warm_disk_bytes=MIB) as plane:
        engine.saved.disk_fails = FULL.format("a")
        await plane.create(tokens=[1] * 100, name="a")
        error = await plane.refused(501, "warm_unavailable", "POST", "/polykv/pools/a/evict?to=warm")
        assert "No space left on device" in error["message"]
        assert (await evict(plane, "a"))["residency"] == "cold"
        assert len(saves(engine)) == 1
        engine.saved.disk_fails = None
        plane.control.saved.disk.end_pause()
        await plane.create(tokens=[2] * 100, name="b")
        assert (await evict(plane, "b"))["residency"] == "warm"


# What is expected of a new start -------------------------------------------------------------------------------------


@asynccontextmanager
async def with_two_states(engine: FakeEngine):
    """A pool that is on disk too, and one that is in memory only; the list of the next start is held back."""
    async with warm_planes(engine, warm_disk_bytes=MIB) as plane:
        for name, tokens in (("disk", [1] * 100), ("ram", [2] * 110)):
            await plane.create(tokens=tokens, name=name, ttl_s=0)
            await evict(plane, name)
        await plane.control.saved.drop(next(s.tag for s in plane.control.saved if s.n_tokens == 110), "disk")
        assert residencies(plane) == {"disk": "warm", "ram": "warm"}
        yield plane


async def test_until_the_list_is_known_a_restart_leaves_warm_what_was_on_disk(engine):
    async with with_two_states(engine) as plane:
        hold = Hold()
        engine.on("list", "request", hold)
        await engine.restart()
        await hold.reached()
        assert (plane.control.saved.known, residencies(plane)) == (False, {"disk": "warm", "ram": "cold"})
        engine.saved.files.clear()
        hold.release()
        await eventually(lambda: residencies(plane) == {"disk": "cold", "ram": "cold"})


def warm_bytes(plane: Any) -> dict[str, int | None]:
    view = plane.control.views.pools()
    places = {place: view["warm"][place]["bytes"] for place in ("ram", "disk")}
    return {pool["name"]: pool["warm_bytes"] for pool in view["pools"]} | {f"in {at}": n for at, n in places.items()}


async def test_what_was_in_the_memory_of_an_engine_that_is_away_is_unknown_and_what_is_on_disk_is_shown(engine):
    async with with_two_states(engine) as plane:
        before = warm_bytes(plane)
        assert None not in before.values()
        assert before["in ram"] > before["in disk"] == before["disk"] > 0
        on_disk = {"disk": before["disk"], "ram": None, "in ram": None, "in disk": before["disk"]}
        await engine.kill()
        await eventually(lambda: plane.control.watch.state == "away")
        assert {pool["residency"] for pool in plane.control.views.pools()["pools"]} == {None}
        assert warm_bytes(plane) == on_disk
        hold = Hold()
        engine.on("list", "request", hold)
        await engine.start()
        await hold.reached()
        assert (warm_bytes(plane), residencies(plane)) == (on_disk, {"disk": "warm", "ram": "cold"})
        hold.release()
        await eventually(lambda: plane.control.saved.known)
        listed = plane.engine.saved.usage()["disk"]["bytes"]  # with the header of the file
        assert warm_bytes(plane) == {"disk": listed, "ram": 0, "in ram": 0, "in disk": listed}


async def test_until_the_list_is_known_a_sleep_leaves_warm_what_is_saved(engine):
    async with with_two_states(engine) as plane:
        engine.sleep()
        await eventually(lambda: plane.control.watch.sleeping)
        assert residencies(plane) == {"disk": "warm", "ram": "warm"}
        hold = Hold()
        engine.on("list", "request", hold)
        engine.wake()
        await hold.reached()
        assert (plane.control.saved.known, residencies(plane)) == (False, {"disk": "warm", "ram": "warm"})
        hold.release()
        await eventually(lambda: plane.control.saved.known)
        assert residencies(plane) == {"disk": "warm", "ram": "warm"}


async def test_an_engine_that_was_away_while_it_slept_is_not_expected_to_have_kept_its_memory(engine):
    async with with_two_states(engine) as plane:
        engine.sleep()
        await eventually(lambda: plane.control.watch.sleeping)
        hold = Hold()
        await engine.kill()
        await eventually(lambda: plane.control.watch.state == "away")
        engine.on("list", "request", hold)
        await engine.start()
        await hold.reached()
        assert residencies(plane) == {"disk": "warm", "ram": "cold"}
        hold.release()


# Why something failed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "message", "code"),
    [
        ("load", "there is no parent pool in sequence 5", "parent_gone"),
        ("load", "nothing is saved under 'x'", "saved_gone"),
        ("save", "there is no pool in sequence 5", "source_gone"),
        ("save", "'x' was forgotten or saved again while it was written", "saved_gone"),
    ],
)
async def test_what_failed_is_counted_under_its_reason(plane, op, message, code):
    await plane.create(tokens=[1] * 100, name="a")
    error = {"error": {"code": 410, "message": message, "type": "polykv_error"}}
    if op == "save":
        plane.engine.on("save", "request", reply(410, error))
        await plane.control.residency.save(plane.control.tree.get("a"))
    else:
        await evict(plane, "a")
        plane.engine.on("load", "request", reply(410, error))
        await ensure(plane, "a")
    assert plane.control.tier.facts().counts.n_failures == {code: 1}


# All at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_the_books_are_the_engines(seed):
    """Little room in both places, a disk that comes and goes, accidents, sleeps and restarts."""
    rng = random.Random(seed)
    async with (
        FakeEngine(n_cells=1500, n_slots=2, max_pools=4, save_ram=MIB, save_disk=MIB) as engine,
        planes(
            engine, warm_after_s=LATER, warm_ram_bytes=420 * KIB, warm_disk_bytes=720 * KIB, heartbeat_s=0.02
        ) as plane,
    ):
        control = plane.control
        control.saved.disk.first_pause_s = 0.02
        sizes = iter(range(100, 200))

        async def step() -> None:
            pools = list(control.tree)
            kind = rng.randrange(12)
            if not pools or (kind < 3 and len(pools) < 10):
                await plane.create(tokens=[rng.randrange(9)] * next(sizes))
            elif kind < 6:
                await control.residency.save(rng.choice(pools), durable=rng.random() < 0.5)
            elif kind < 8:
                await plane.call("POST", f"/polykv/pools/{rng.choice(pools).pool_id}/evict")
            elif kind < 10:
                await control.residency.ensure(rng.choice(pools))
            elif kind == 10:
                await plane.call("POST", f"/polykv/pools/{rng.choice(pools).pool_id}/evict?to=cold")
            else:
                engine.saved.disk_fails = rng.choice([None, FULL.format("x")])

        async def wake_again() -> None:
            engine.sleep()
            await asyncio.sleep(0.03)
            engine.wake()

        for place in ("save", "load", "forget"):
            for phase in ("request", "reply", "write"):
                engine.on(place, phase, accident(rng, says_no=phase != "reply"), times=None)
        for _ in range(40):
            steps = [asyncio.create_task(step()) for _ in range(rng.randrange(1, 4))]
            if rng.random() < 0.15:
                steps.append(asyncio.create_task(rng.choice([engine.restart, wake_again])()))
            for result in await asyncio.gather(*steps, return_exceptions=True):
                assert result is None or isinstance(result, PolyKVError | AssertionError), result
        engine.faults.armed.clear()
        engine.saved.disk_fails = None
        await control.refresh()
        await eventually(lambda: control.residency.books_true and control.residency.at_rest)
        control.saved.known = False
        await control.saved.look()
        for name in [pool.pool_id for pool in control.tree]:
            await control.residency.ensure(control.tree.get(name))
        await eventually(lambda: not control.saved._files._due)
        await control.saved.finish_writing()
        await eventually(lambda: control.residency.books_true and not control.residency._evictions)
        await eventually(lambda: len(engine.ready_pools()) == len(control.tree.residents()))
        await control.saved.tend()
        assert {(state.tag, *state.places) for state in control.saved} == in_engine_by_tag(engine)
        facts = control.tier.facts()
        assert facts.ram.n_bytes <= 420 * KIB
        assert sum(file.n_bytes for file in engine.saved.files) <= 720 * KIB
        await books_hold(plane)


def in_engine_by_tag(engine: FakeEngine) -> set[tuple[str, ...]]:
    on_disk = {file.tag for file in engine.saved.files}
    both = {(tag, "ram", "disk") if tag in on_disk else (tag, "ram") for tag in engine.saved.ram}
    return both | {(tag, "disk") for tag in on_disk - engine.saved.ram.keys()}


def accident(rng: random.Random, *, says_no: bool) -> Any:
    """``says_no``: it may be refused. Not what was done: an engine that says so is believed, and need not be."""

    async def action(request: web.Request) -> Any:
        kind = rng.randrange(25)
        if kind == 0:
            return await drop()(request)
        if kind == 1 and says_no:
            status = rng.choice([409, 410, 500, 507])
            return await reply(status, {"error": {"code": status, "message": "no", "type": "polykv_error"}})(request)
        if kind == 2:
            await asyncio.sleep(0.02)
        return None

    return action
