"""A full cache: who is evicted, who waits for whom, and who is told that there is no room."""

import asyncio
from typing import Any

import pytest

from polykv_proxy.control import AttachPlan, AttachRequest, Outcome
from polykv_proxy.errors import KvExhaustedForRequest
from polykv_proxy.slots import Ticket
from tests.control.conftest import Plane, eventually, planes
from tests.fake_engine import FakeEngine, Hold

PATH = "/completion"
PARENT = "/polykv/pools/parent/fork"


async def decide(plane: Plane, prompt: Any, **kw: Any) -> AttachPlan:
    body = {"prompt": prompt, "n_predict": 0}
    return await plane.control.decide_attach(AttachRequest(path=PATH, body=body, **kw))


def residencies(plane: Plane) -> dict[str | None, str]:
    return {pool.name: pool.residency for pool in plane.control.tree}


def n_stats(plane: Plane) -> int:
    return len(plane.engine.requests("/polykv/engine/stats"))


class Running:
    """A request that holds a slot of the engine, and its promise, until ``end``."""

    def __init__(self, plane: Plane, prompt: str, session: str, *, at: str = "prefill"):
        self.hold = Hold()
        plane.engine.on(PATH, at, self.hold)
        self.task = asyncio.create_task(self._run(plane, prompt, session))

    async def _run(self, plane: Plane, prompt: str, session: str) -> None:
        plan = await decide(plane, prompt, session=session)
        books = plane.control.sessions
        turn = books.begin(books.name(session, 0.0), 0.0)
        turn.sent(0.0, 0)
        async with plane.session.post(
            plane.engine.url + PATH, json={"prompt": prompt, "n_predict": 0, "id_slot": 0}
        ) as r:
            assert r.status == 200
        del turn.session.turns[turn.turn_id]
        plane.control.settle(plan, Outcome(status=200))

    async def end(self) -> None:
        self.hold.release()
        await self.task


@pytest.fixture
async def engine():
    async with FakeEngine(n_cells=1000) as engine:
        yield engine


async def test_a_roomy_cache_costs_no_question():
    async with FakeEngine(n_cells=16384) as engine, planes(engine, heartbeat_s=60) as plane:
        await plane.create(tokens=[1] * 300)
        before = n_stats(plane)
        for i in range(20):
            await decide(plane, [1] * 300 + [i])
        assert n_stats(plane) == before


async def test_the_least_recently_used_pools_leave_and_no_more_than_needed(plane):
    for i in range(3):
        await plane.create(tokens=[i] * 300, name=f"p{i}")
    plan = await decide(plane, "x" * 500)
    assert plan.pool_id is None
    assert residencies(plane) == {"p0": "cold", "p1": "cold", "p2": "resident"}
    assert plane.engine.cache.used() == 300


async def test_an_evicted_pool_comes_back_for_who_wants_it(plane):
    for i in range(3):
        await plane.create(tokens=[i] * 300, name=f"p{i}")
    await decide(plane, "x" * 300)
    assert residencies(plane)["p0"] == "cold"
    plane.control.room.settled()
    plan = await decide(plane, [0] * 300 + [7] * 200, pool_ref="p0")
    assert (plan.pool_id, plan.prefix_n_tokens, plan.miss_reason) == (1, 300, None)
    assert residencies(plane) == {"p0": "resident", "p1": "cold", "p2": "resident"}


async def test_the_pool_of_the_request_itself_is_not_evicted_for_it(plane):
    await plane.create(tokens=[1] * 500, name="own")
    await plane.create(tokens=[2] * 300, name="other")
    plan = await decide(plane, [1] * 500 + [3] * 400, pool_ref="own")
    assert (plan.pool_id, residencies(plane)) == (1, {"own": "resident", "other": "cold"})


async def test_what_is_pinned_or_runs_stays_and_the_request_is_told_at_once(plane):
    await plane.create(tokens=[1] * 300, pin=True, name="pinned")
    await plane.create(tokens=[2] * 300, name="runs")
    now_s = plane.control.clock()
    session = plane.control.sessions.name("s", now_s)
    plane.control.sessions.begin(session, now_s).sent(now_s, None, 2)
    session.pool_id = 2
    with pytest.raises(KvExhaustedForRequest) as e:
        await decide(plane, "x" * 500)
    assert (e.value.status, e.value.code, e.value.retry_after_s) == (503, "kv_exhausted", 1.0)
    assert e.value.extra["cells_missing"] == 500 + 1 - 400
    assert set(residencies(plane).values()) == {"resident"}


async def test_pools_of_sessions_between_two_turns_go_last_and_only_for_requests(plane):
    for i, session in enumerate(["named", None, None]):
        await plane.create(tokens=[i] * 250, name=f"p{i}")
        books, now_s = plane.control.sessions, plane.control.clock()
        if i < 2:
            (books.name(session, now_s) if session else books.make(now_s)).pool_id = i + 1
    order = []
    for n in (300, 600, 900):
        before = residencies(plane)
        await decide(plane, "x" * n)
        order += [name for name, where in residencies(plane).items() if where != before[name]]
        plane.control.room.settled()
    assert order == ["p2", "p1", "p0"]
    await decide(plane, [0] * 251, pool_ref="p0")
    plane.control.room.settled()
    error = await plane.refused(507, "kv_exhausted", "POST", "/polykv/pools", {"tokens": [9] * 800})
    assert error["cells_missing"] == 50
    await plane.create(tokens=[8] * 700)


async def test_pools_of_sessions_that_were_away_for_long_go_last(engine):
    async with planes(engine, session_gap_s=0.2) as plane:
        await plane.create(tokens=[1] * 300, name="attached")
        plane.control.sessions.name("s", plane.control.clock()).pool_id = 1
        await plane.create(tokens=[2] * 300, name="nobodys")
        await asyncio.sleep(0.3)
        await decide(plane, "x" * 500)
        assert residencies(plane) == {"attached": "resident", "nobodys": "cold"}
        await decide(plane, "x" * 900)
        assert residencies(plane) == {"attached": "cold", "nobodys": "cold"}


async def test_nothing_is_evicted_in_vain(plane):
    await plane.create(tokens=[1] * 500, pin=True)
    await plane.create(tokens=[2] * 100)
    with pytest.raises(KvExhaustedForRequest):
        await decide(plane, "x" * 500)
    assert set(residencies(plane).values()) == {"resident"}


async def test_cells_that_idle_slots_hold_count_as_free(plane):
    async with plane.session.post(plane.engine.url + PATH, json={"prompt": "y" * 900, "n_predict": 0}):
        pass
    await plane.create(tokens=[1] * 50, name="stays")
    assert plane.engine.cache.used() == 950
    await decide(plane, "x" * 700)
    assert residencies(plane) == {"stays": "resident"}


async def test_a_request_waits_for_one_that_runs_and_goes_when_it_ends(plane):
    await plane.create(tokens=[1] * 16, pin=True)
    running = Running(plane, "y" * 700, "a")
    await running.hold.reached()
    waiting = asyncio.create_task(decide(plane, "x" * 500))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await running.end()
    assert (await waiting).miss_reason == "no_pool"


@pytest.mark.parametrize("books", ["true", "unsure"])
async def test_a_batch_that_is_being_decoded_is_not_free(plane, books):
    """The engine counts its 256 tokens in the slot already, and not in the used cells."""
    plane.engine.n_batch = 256
    running = Running(plane, "y" * 453, "a", at="batch")
    await running.hold.reached()
    stats, room = await plane.control.refresh(), plane.control.room
    assert (stats.cells.used, stats.cells.free) == (0, 1000)
    assert [(s.state, s.n_prompt, s.n_tokens) for s in stats.slots if not s.idle] == [("prompt", 453, 256)]
    plane.control.residency.unsure = books == "unsure"
    assert room.sequences.books_true is (books == "true")
    n_room = 1000 - 453
    assert [room._n_room(stats) >= n for n in (n_room, n_room + 1)] == [True, False]
    assert not room.fits(n_room)
    plane.control.residency.unsure = False
    waiting = asyncio.create_task(decide(plane, [7] * n_room))  # one more for its first token
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await running.end()
    await waiting


async def test_the_margin_for_a_batch_is_no_larger_than_a_batch(plane):
    """Most of the prompt is in the cache: what may not be counted yet is one batch, and nothing by the books."""
    plane.engine.n_batch = 100
    async with plane.session.post(plane.engine.url + PATH, json={"prompt": "y" * 250, "n_predict": 0}):
        pass
    stats = await plane.control.refresh()
    slot = stats.slots[0].model_copy(update={"state": "prompt", "n_prompt": 400})
    busy = stats.model_copy(update={"slots": (slot, *stats.slots[1:])})
    assert (slot.n_tokens, slot.n_cached, stats.cells.used) == (250, 0, 250)
    plane.control.residency.unsure = True
    assert plane.control.room._n_room(busy) == 750 - 150 - 100
    plane.control.residency.unsure = False
    assert plane.control.room._n_room(busy) == 750 - 150
    assert plane.control.room._n_room(stats) == 1000


async def test_a_prompt_that_was_never_counted_is_still_to_come_when_it_starts(plane):
    """Of a request that is relayed unread, or that did not come through the proxy."""
    plane.engine.slots[1].state, plane.engine.slots[1].n_prompt = "started", 400
    assert plane.control.room._n_room(await plane.control.refresh()) == 600
    plane.engine.slots[1].state = "idle"


async def test_a_promise_counts_once_and_until_it_is_settled_or_its_task_has_ended(plane):
    room, go, there = plane.control.room, asyncio.Event(), asyncio.Event()

    async def promised(settles: bool) -> None:
        room.promise(900)
        room.promise(500)  # decided anew: instead of the first
        there.set()
        await go.wait()
        if settles:
            room.settled()

    for settles in (True, False):
        go.clear(), there.clear()
        task = asyncio.create_task(promised(settles))
        await there.wait()
        assert room.fits(200)
        assert not room.fits(300)
        go.set()
        await task
        assert room.fits(900)


async def test_promised_cells_are_not_promised_again(plane):
    """Two requests that would fit alone: the second waits until the first was settled."""
    await plane.create(tokens=[1] * 16, pin=True)
    go = asyncio.Event()

    async def first() -> None:
        plan = await decide(plane, "y" * 700)
        await go.wait()
        plane.control.settle(plan, Outcome(status=200))

    one = asyncio.create_task(first())
    await eventually(lambda: len(plane.control.room._promises) == 1)
    two = asyncio.create_task(decide(plane, "x" * 500))
    await asyncio.sleep(0.1)
    assert not two.done()
    go.set()
    await asyncio.gather(one, two)


async def test_who_waits_is_served_in_order_and_may_leave(plane):
    await plane.create(tokens=[1] * 16, pin=True)
    running = Running(plane, "y" * 700, "a")
    await running.hold.reached()
    order: list[str] = []

    async def wait(name: str, n: int) -> None:
        plan = await decide(plane, name * n)
        order.append(name)
        plane.control.settle(plan, Outcome(status=200))

    tasks = []
    for name, n in (("b", 800), ("c", 500), ("d", 400)):  # the last would be the first to fit
        tasks.append(asyncio.create_task(wait(name, n)))
        await asyncio.sleep(0.02)
    tasks[1].cancel()
    await running.end()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["b", "d"]
    assert not plane.control.room._line.locked()


async def test_the_wait_is_bounded(plane):
    await plane.create(tokens=[1] * 16, pin=True)
    plane.control.room.max_wait_s = 0.1
    running = Running(plane, "y" * 700, "a")
    await running.hold.reached()
    with pytest.raises(KvExhaustedForRequest):
        await decide(plane, "x" * 500)
    await running.end()
    assert (await decide(plane, "x" * 500)).miss_reason == "no_pool"


async def test_who_can_never_fit_does_not_wait(plane):
    await plane.create(tokens=[1] * 500, pin=True)
    running = Running(plane, "y" * 100, "a")
    await running.hold.reached()
    with pytest.raises(KvExhaustedForRequest):
        await asyncio.wait_for(decide(plane, "x" * 500), 2)
    await running.end()


async def test_a_cold_pool_that_does_not_fit_is_no_reason_to_refuse(plane):
    """It diverges early: without the pool the request needs less than with it."""
    await plane.create(tokens=[2] * 600, name="big")
    await plane.engine.restart()
    await plane.control.refresh()
    await plane.create(tokens=[1] * 500, pin=True)
    plan = await decide(plane, [2] * 100 + [3] * 100, pool_ref="big")
    assert (plan.pool_id, plan.miss_reason, plan.asked) == (None, "not_resident", 1)


@pytest.mark.parametrize("n_others", [1, 3])
async def test_who_loses_its_pool_waits_for_nobody_who_waits_for_it(plane, n_others):
    """It was promised cells, and stands in line for more of them behind those who wait for these."""

    async def run(prompt: str, **kw: Any) -> AttachPlan:
        plan = await decide(plane, prompt, **kw)
        plane.control.settle(plan, Outcome(status=200))
        return plan

    await plane.create(prompt="P" * 300, name="p", ttl_s=0)
    assert (await plane.call("POST", "/polykv/pools/p/evict?to=cold"))[0] == 200
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    large = asyncio.create_task(run("P" * 300 + "x" * 500, pool_ref="p"))
    await hold.reached()
    others = [asyncio.create_task(run(f"{i}" * 600)) for i in range(n_others)]
    await eventually(lambda: plane.control.room._n_in_line == n_others)
    assert (await plane.call("DELETE", "/polykv/pools/p"))[0] == 200
    hold.release()
    plans = await asyncio.wait_for(asyncio.gather(large, *others), 5)
    assert [plan.miss_reason for plan in plans] == ["no_pool"] * (n_others + 1)


async def test_running_requests_are_relieved_of_unused_pools(engine):
    async with planes(engine) as plane:
        await plane.create(tokens=[1] * 700, name="idle")
        enough, tight = Running(plane, "y" * 200, "a"), "z" * 280
        await enough.hold.reached()
        await asyncio.sleep(0.2)  # four heartbeats
        assert residencies(plane)["idle"] == "resident"
        await enough.end()
        running = Running(plane, tight, "a")
        await running.hold.reached()
        await eventually(lambda: residencies(plane)["idle"] == "cold")
        await running.end()


async def test_requests_in_line_for_a_slot_are_not_counted_yet(plane):
    """Their turn comes when somebody else is done; then they are decided anew."""
    await plane.create(tokens=[1] * 16, pin=True)
    for i in range(4):
        plane.control.slots.request(Ticket(i), 0.0)
    plans = await asyncio.gather(*(decide(plane, f"{i}" * 900) for i in range(5)))
    assert [plan.miss_reason for plan in plans] == ["no_pool"] * 5


# Orders --------------------------------------------------------------------------------------------------------------


async def test_create_and_fork_evict_but_not_what_they_need():
    async with FakeEngine(n_cells=1000, n_ctx_slot=2000) as engine, planes(engine) as plane:
        await plane.create(tokens=[1] * 400, name="parent")
        await plane.create(tokens=[2] * 400, name="other")
        child = await plane.fork("parent", own_tokens=[3] * 500)
        assert (child["branch_pos"], child["residency"]) == (400, "resident")
        assert residencies(plane) == {"parent": "resident", "other": "cold", None: "resident"}
        error = await plane.refused(507, "kv_exhausted", "POST", PARENT, {"own_tokens": [4] * 650})
        assert error["cells_missing"] == 400 + 650 - 1000  # the child of 500 could go, and it would not be enough
        assert error["message"].startswith("the KV cache is full: this pool needs 650 cells, 50 are missing beside")
        assert residencies(plane)[None] == "resident"


async def test_an_unused_automatic_pool_gives_its_sequence_before_an_ordered_one():
    async with FakeEngine(max_pools=2) as engine, planes(engine) as plane:
        await plane.create(tokens=[9] * 20, name="ordered")
        async with plane.session.post(engine.url + PATH, json={"prompt": "y" * 40, "n_predict": 0, "id_slot": 1}):
            pass
        plan = await decide(plane, "y" * 50, legacy_slot=1)
        assert [pool.auto for pool in plane.control.tree] == [False, True]
        plane.control.tree.get("ordered").pin = True
        error = await plane.refused(503, "seq_ids_exhausted", "POST", "/polykv/pools", {"tokens": [3]})  # it is in use
        assert "pinned or in use" in error["message"]
        plane.control.tree.get("ordered").pin = False
        plane.control.settle(plan, Outcome(status=200))
        await plane.create(tokens=[3], name="new")
        assert [pool.residency for pool in plane.control.tree] == ["resident", "cold", "resident"]


async def test_a_slot_has_one_automatic_pool_and_none_that_nobody_asked_for(plane):
    async def snapshot(text: str, prompt: str) -> AttachPlan:
        async with plane.session.post(plane.engine.url + PATH, json={"prompt": text, "n_predict": 0, "id_slot": 1}):
            pass
        plan = await decide(plane, prompt, legacy_slot=1)
        plane.control.settle(plan, Outcome(status=200))
        return plan

    assert (await snapshot("a" * 40, "b" * 40)).miss_reason == "diverged"
    assert (len(plane.control.tree), plane.engine.ready_pools()) == (0, [])
    for letter in "cde":
        assert (await snapshot(letter * 40, letter * 50)).prefix_n_tokens == 40
        assert [pool.auto for pool in plane.control.tree] == [True]
        assert len(plane.engine.ready_pools()) == 1


# An engine that hangs ------------------------------------------------------------------------------------------------


async def test_a_prefill_that_gets_nowhere_is_given_up(plane):
    plane.control.residency.stall_s = 0.2
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    await plane.refused(504, "upstream_timeout", "POST", "/polykv/pools", {"tokens": [1] * 10})
    hold.release()
    await plane.create(tokens=[1] * 10)


async def test_a_slow_prefill_is_not(plane):
    plane.control.residency.stall_s = 0.3
    plane.engine.prefill_s = 0.002  # 0.13 s for a batch of 64
    assert (await plane.create(tokens=[1] * 400))["residency"] == "resident"


async def test_a_request_whose_pool_hangs_goes_without(plane):
    await plane.create(tokens=[1] * 100, name="base")
    await plane.engine.restart()
    await plane.control.refresh()
    plane.control.residency.stall_s = 0.2
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    plan = await decide(plane, [1] * 110, pool_ref="base")
    assert (plan.pool_id, plan.miss_reason) == (None, "not_resident")
    hold.release()
