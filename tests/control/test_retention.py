"""What stays in the cache and what goes: pins, grace, sequences that run out, evict and flush."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import pytest

from polykv_proxy.app import CONTROL, serving
from polykv_proxy.config import load_settings
from polykv_proxy.control import AttachPlan, AttachRequest, Outcome
from polykv_proxy.ids import SessionId
from polykv_proxy.tree.prefix import make_tokens
from polykv_proxy.turns import Usage
from tests.control.conftest import Plane, eventually, planes
from tests.fake_engine import FakeEngine, Hold

PATH = "/completion"
N_SEQS = 16


async def decide(plane: Plane, prompt: Any, **kw: Any) -> AttachPlan:
    return await plane.control.decide_attach(AttachRequest(path=PATH, body={"prompt": prompt, "n_predict": 0}, **kw))


async def attach(plane: Plane, prompt: Any, **kw: Any) -> dict[str, Any]:
    """Decide, have the engine answer, settle. Gives the timings."""
    plan = await decide(plane, prompt, **kw)
    body = {"prompt": prompt, "n_predict": 0, "shared_prefix_n_tokens": -1}
    if plan.seq_id is not None:
        body |= {"shared_pool_slot": plan.seq_id, "shared_pool_gen": plan.gen, "shared_pool_epoch": plan.epoch}
    async with plane.session.post(plane.engine.url + PATH, json=body) as r:
        answer = await r.json()
    timings = answer["timings"]
    outcome = Outcome(status=200, cache_n=timings["cache_n"], prompt_n=timings["prompt_n"], pool_n=timings["pool_n"])
    await plane.control.explain(plan, outcome)
    return timings | {"pool_id": plan.pool_id, "reason": plane.control.settle(plan, outcome)}


def attach_session(plane: Plane, session: str, ref: str) -> None:
    books = plane.control.sessions
    books.name(session, plane.control.clock()).pool_id = plane.control.tree.get(ref).pool_id


def run_session(plane: Plane, session: str, ref: str) -> None:
    """A turn that does not end."""
    attach_session(plane, session, ref)
    books, now_s = plane.control.sessions, plane.control.clock()
    books.begin(books.name(session, now_s), now_s).sent(now_s, None, plane.control.tree.get(ref).pool_id)


def end_session(plane: Plane, session: str) -> None:
    """Its turn ends, and it is forgotten."""
    books = plane.control.sessions
    for turn in [turn for turn in books.running.values() if turn.session.session_id == session]:
        books.end(turn, Usage(), plane.control.clock())
    plane.control.drop_session(session)


def residencies(plane: Plane) -> dict[str | None, str]:
    return {pool.name: pool.residency for pool in plane.control.tree}


async def shown(plane: Plane, ref: Any) -> dict[str, Any]:
    status, view = await plane.call("GET", f"/polykv/pools/{ref}")
    assert status == 200
    return view["pools"][0]


def plant(plane: Plane, tokens: list[int], parent: str | None = None, **kw: Any) -> None:
    """A cold pool, as one that left the cache: nothing is prefilled for it."""
    tree = plane.control.tree
    if parent is None:
        plan = tree.plan_root(make_tokens(tokens), name=kw.pop("name", None))
    else:
        plan = tree.plan_fork_own(tree.get(parent).pool_id, make_tokens(tokens), name=kw.pop("name", None))
    tree.commit(plan, now_s=plane.control.clock(), **kw)


@asynccontextmanager
async def serving_plane(engine: FakeEngine) -> AsyncIterator[tuple[Plane, httpx.AsyncClient]]:
    """The whole proxy, for what needs its line for slots."""
    loaded = load_settings(upstream_url=engine.url, state=":memory:", port=0)
    async with (
        aiohttp.ClientSession() as session,
        serving(loaded) as (url, app),
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield Plane(app[CONTROL], engine, url, session), client


# Pins ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def engine():
    async with FakeEngine(n_cells=1000) as engine:
        yield engine


async def test_pin_and_unpin_are_shown_and_pressure_respects_them(plane):
    await plane.create(tokens=[1] * 300, name="a")
    status, answer = await plane.call("POST", "/polykv/pools/a/pin")
    assert (status, answer["pinned"], answer["residency"]) == (200, True, "resident")
    assert (answer["pinned_cells"], answer["budget_cells"]) == (300, 500)
    assert ((await shown(plane, "a"))["pinned"], (await shown(plane, "a"))["expires_ts"]) == (True, None)
    await plane.refused(507, "kv_exhausted", "POST", "/polykv/pools", {"tokens": [2] * 800})
    status, answer = await plane.call("POST", "/polykv/pools/a/unpin")
    assert (status, answer["pinned"], answer["pinned_cells"]) == (200, False, 0)
    await plane.create(tokens=[2] * 800)
    assert residencies(plane)["a"] == "cold"


async def test_the_budget_counts_what_is_inherited_once_and_says_the_numbers(plane):
    await plane.create(tokens=[1] * 300, name="root")
    await plane.fork("root", own_tokens=[2] * 50, name="a", pin=True)  # 350 with the root's
    await plane.fork("root", own_tokens=[3] * 50, name="b", pin=True)  # 50 more
    assert (await plane.call("POST", "/polykv/pools/root/pin"))[1]["pinned_cells"] == 400
    for path, body in (
        ("/polykv/pools", {"tokens": [9] * 101}),
        ("/polykv/pools/root/fork", {"own_tokens": [4] * 101}),
    ):
        error = await plane.refused(409, "pin_budget", "POST", path, body | {"pin": True})
        assert (error["pinned_cells"], error["pinned_cells_after"], error["budget_cells"]) == (400, 501, 500)
        assert plane.headers["x-should-retry"] == "false"
    assert len(plane.control.tree) == 3
    assert plane.engine.cache.used() == 400
    await plane.create(tokens=[9] * 101, name="late")
    await plane.refused(409, "pin_budget", "POST", "/polykv/pools/late/pin")
    await plane.create(tokens=[8] * 100, pin=True)
    for _ in range(2):
        assert (await plane.call("POST", "/polykv/pools/a/pin"))[0] == 200  # it is pinned already


async def test_two_pins_at_once_do_not_both_get_the_last_of_the_budget(plane):
    bodies = [{"tokens": [i] * 300, "pin": True} for i in range(3)]
    answers = await asyncio.gather(*(plane.call("POST", "/polykv/pools", body) for body in bodies))
    assert sorted(status for status, _ in answers) == [201, 409, 409]
    assert len(plane.engine.ready_pools()) == 1


async def test_a_session_that_is_pinned_as_a_pool_is_counted_too(engine):
    async with planes(engine, pin_max_fraction=0.01) as plane:
        async with plane.session.post(engine.url + PATH, json={"prompt": "y" * 40, "n_predict": 0, "id_slot": 1}):
            pass
        session = plane.control.sessions.name("s", plane.control.clock())
        plane.control.slots.resize(4, 0.0)
        session.slot_id, session.ctx_used = 1, 40
        plane.control.slots._own(plane.control.slots._slots[1], SessionId("s"))
        await plane.refused(409, "pin_budget", "POST", "/polykv/pools", {"from_session": "s", "pin": True})
        assert (engine.ready_pools(), plane.control.tree._plans) == ([], {})
        await plane.create(from_session="s")


async def test_a_cold_pool_is_brought_back_by_its_pin_or_the_error_says_why_not(plane):
    await plane.create(tokens=[1] * 300, name="a")
    await plane.engine.restart()
    await plane.control.refresh()
    assert (await plane.call("POST", "/polykv/pools/a/pin"))[1]["residency"] == "resident"
    await plane.call("POST", "/polykv/pools/a/unpin")
    await plane.call("POST", "/polykv/pools/a/evict")
    await plane.create(tokens=[2] * 400, name="b", pin=True)
    await plane.create(tokens=[3] * 400, name="c")
    run_session(plane, "s", "c")
    plane.control.retention.pin_max_fraction = 1.0
    error = await plane.refused(507, "kv_exhausted", "POST", "/polykv/pools/a/pin")
    assert (error["cells_missing"], "unpin" in error["message"]) == (100, True)
    assert not plane.control.tree.get("a").pin


async def test_what_was_ordered_out_is_not_brought_back_by_the_start_before(plane):
    """The heartbeat brings pools back once for each start of the engine, and may come after the order."""
    await plane.create(tokens=[1] * 300, name="a")
    await plane.create(tokens=[2] * 300, name="b")
    await plane.engine.restart()
    await plane.control.refresh()
    brought = plane.control.restorer
    for name in ("a", "b"):
        await plane.control.residency.ensure(plane.control.tree.get(name))
    await plane.call("POST", "/polykv/pools/a/evict")
    brought._brought_epoch = None
    brought.bring_back()
    await eventually(lambda: brought._bringing is None or brought._bringing.done())
    assert residencies(plane) == {"a": "cold", "b": "resident"}
    await plane.engine.restart()
    await plane.control.refresh()
    await eventually(lambda: residencies(plane) == {"a": "resident", "b": "resident"})


async def test_everything_above_a_session_stays_also_what_it_does_not_inherit(plane):
    await plane.create(tokens=[1] * 300, name="root")
    await plane.fork("root", tokens=[1] * 100 + [2] * 100, name="branch")
    attach_session(plane, "s", "branch")
    assert (await shown(plane, "root"))["in_use"] is True
    await plane.refused(507, "kv_exhausted", "POST", "/polykv/pools", {"tokens": [3] * 700})
    assert residencies(plane) == {"root": "resident", "branch": "resident"}
    await plane.call("DELETE", "/polykv/sessions/s")
    await plane.create(tokens=[3] * 700)
    assert residencies(plane)["root"] == "resident"  # the leaf went first, and it was enough
    assert residencies(plane)["branch"] == "cold"


# Grace ---------------------------------------------------------------------------------------------------------------


async def test_a_pool_whose_grace_is_over_goes_first_and_only_under_pressure(engine):
    async with planes(engine, grace_ttl_s=1000) as plane:
        await plane.create(tokens=[1] * 200, name="oldest")
        await plane.create(tokens=[2] * 200, name="short", ttl_s=0)
        await plane.create(tokens=[3] * 200, name="made-by-the-proxy")
        plane.control.tree.get("made-by-the-proxy").auto = True
        await asyncio.sleep(0.2)  # some heartbeats: time alone evicts nobody
        assert set(residencies(plane).values()) == {"resident"}
        short, oldest = await shown(plane, "short"), await shown(plane, "oldest")
        assert short["expires_ts"] == short["last_access_ts"]
        assert oldest["expires_ts"] - oldest["last_access_ts"] == 1000
        order = []
        for n in (500, 700, 900):
            before = residencies(plane)
            await decide(plane, "x" * n)
            order += [name for name, where in residencies(plane).items() if where != before[name]]
        assert order == ["short", "made-by-the-proxy", "oldest"]


async def test_grace_begins_when_the_last_session_is_gone(engine):
    async with planes(engine, session_gap_s=0.3) as plane:
        await plane.create(tokens=[1] * 100, name="root", ttl_s=5)
        await plane.fork("root", own_tokens=[2] * 10, name="leaf", ttl_s=5)
        born = plane.control.tree.get("leaf").last_use_s
        attach_session(plane, "s", "leaf")
        assert (await shown(plane, "root"))["expires_ts"] is None
        await eventually(lambda: not plane.control.room.in_use())
        for name in ("root", "leaf"):
            pool = plane.control.tree.get(name)
            assert pool.last_use_s > born
            assert plane.control.retention.grace_end_s(pool) == pool.last_use_s + 5
        assert (await shown(plane, "root"))["expires_ts"] is not None


# Sequences -----------------------------------------------------------------------------------------------------------


async def test_an_ordered_pool_that_nobody_uses_gives_its_sequence():
    async with FakeEngine(max_pools=2) as engine, planes(engine) as plane:
        for i in range(6):
            await plane.create(tokens=[i] * 10, name=f"p{i}")
        assert [name for name, where in residencies(plane).items() if where == "resident"] == ["p4", "p5"]
        attach_session(plane, "s", "p4")
        await plane.create(tokens=[7] * 10, name="new")
        assert residencies(plane)["p4"] == "resident"
        assert residencies(plane)["p5"] == "cold"
        attach_session(plane, "t", "new")
        error = await plane.refused(503, "seq_ids_exhausted", "POST", "/polykv/pools", {"tokens": [8]})
        assert "pinned or in use" in error["message"]
        run_session(plane, "t", "new")
        plan = await decide(plane, [0] * 12, pool_ref="p0")  # one of them is only between two turns
        assert (plan.pool_id, plan.miss_reason) == (1, None)
        assert {name for name, where in residencies(plane).items() if where == "resident"} == {"p0", "new"}
        plane.control.tree.get("p0").pin = True
        plan = await decide(plane, [1] * 12, pool_ref="p1")
        assert (plan.pool_id, plan.miss_reason, plan.asked) == (None, "not_resident", 2)


async def test_more_agents_than_sequences_each_with_a_pool_of_its_own():
    """Sessions that just had their turn count as live for a minute, and yet keep nobody from his pool."""
    async with FakeEngine(max_pools=4, n_slots=2) as engine, serving_plane(engine) as (plane, client):
        for i in range(30):
            plant(plane, [i] * 20, name=f"p{i}")
        engine.prefill_s = engine.token_s = 0.0005

        async def one(i: int) -> dict[str, Any]:
            body = {"prompt": [i] * 20 + [9], "pool_id": f"p{i}", "session_id": f"s{i}", "n_predict": 3}
            return (await client.post("/completion", json=body)).json()["polykv"]

        receipts = await asyncio.gather(*(one(i) for i in range(30)))
        assert {(r["miss_reason"], r["cached_n_tokens"]) for r in receipts} == {(None, 20)}
        assert engine.hooks.n_materialized == 30  # nobody's pool was taken away before his turn


async def test_two_thousand_pools_on_sixteen_sequences():
    rng = random.Random(3)
    async with FakeEngine(max_pools=N_SEQS, n_cells=4000, n_ctx_slot=4000) as engine, planes(engine) as plane:
        plant(plane, [300 % 256] * 40, name="system")
        for i in range(2000):
            parent = "system" if i % 2 else None
            plant(plane, [1, i // 250, 2, i % 250, 3] * 4, parent, name=f"p{i}")
        for i in rng.sample(range(2000), 60):
            pool = plane.control.tree.get(f"p{i}")
            tokens = plane.control.tree.tokens(pool.pool_id).tolist()
            got = await attach(plane, [*tokens, 9, 9], pool_ref=f"p{i}")
            assert (got["pool_id"], got["pool_n"], got["reason"]) == (pool.pool_id, len(tokens), None)
            assert pool.residency == "resident"
        assert len(plane.control.tree.residents()) == N_SEQS
        await plane.control.refresh()
        plane.control.residency.ledger.sync()
        assert plane.control.residency.ledger.accounts().total_cells == engine.cache.used()


async def test_what_is_in_use_is_not_thrashed_by_a_crowd_and_all_are_served():
    async with FakeEngine(max_pools=4) as engine, planes(engine) as plane:
        await plane.create(tokens=[7] * 30, name="busy")
        run_session(plane, "s", "busy")
        for i in range(40):
            plant(plane, [i] * 20, name=f"p{i}")
        engine.prefill_s = 0.0001

        async def one(i: int) -> dict[str, Any]:
            return await attach(plane, [i] * 20 + [9], pool_ref=f"p{i}")

        results = []
        for first in range(0, 40, 3):  # as many at a time as sequences are left
            results += await asyncio.gather(*(one(i) for i in range(first, min(40, first + 3))))
        assert [r["reason"] for r in results] == [None] * 40
        crowd = await asyncio.gather(*(one(i) for i in range(40)))
        assert {r["reason"] for r in crowd} <= {None, "not_resident", "evicted"}
        assert sum(r["reason"] is None for r in crowd) >= 3
        assert residencies(plane)["busy"] == "resident"
        assert engine.hooks.n_materialized <= 1 + 40 + 40
        again = [await one(i) for i in range(5)]
        assert [r["reason"] for r in again] == [None] * 5


async def test_depth_64_on_16_sequences():
    async with FakeEngine(max_pools=N_SEQS, n_slots=2) as engine, planes(engine) as plane:
        brought = plane.control.restorer
        await plane.create(tokens=[1] * 5, name="l0")
        for level in range(1, 64):
            await plane.fork(f"l{level - 1}", own_tokens=[level] * 5, name=f"l{level}")
            attach_session(plane, f"s{level}", f"l{level}")  # somebody on every level
        assert engine.hooks.n_processed == 64 * 5
        _, view = await plane.call("GET", "/polykv/pools")
        assert view["tree_depth"] == 64
        assert {pool["residency"] for pool in view["pools"]} == {"resident"}
        assert sum(pool["own_kv_cells"] for pool in view["pools"]) == view["kv_cells_used"] == 320
        for cold in (False, True):
            if cold:
                await engine.restart()
                await plane.control.refresh()
                # What it brings back beside the attaches may be given up, and prefilled again.
                await eventually(lambda: brought._bringing is None or brought._bringing.done(), timeout_s=60)
            for level in random.Random(1).sample(range(64), 64):
                tokens = plane.control.tree.tokens(plane.control.tree.get(f"l{level}").pool_id).tolist()
                got = await attach(plane, [*tokens, 250], pool_ref=f"l{level}")
                assert (got["pool_id"], got["pool_n"], got["reason"]) == (level + 1, len(tokens), None)
        assert engine.hooks.n_processed <= 64 * 5  # nobody's tokens were prefilled twice


async def test_a_pool_that_comes_back_shares_what_others_hold_of_it():
    async with FakeEngine(max_pools=2) as engine, planes(engine) as plane:
        await plane.create(tokens=[1] * 100, name="root")
        await plane.fork("root", tokens=[1] * 60 + [2] * 40, name="branch")
        await plane.call("POST", "/polykv/pools/root/evict")
        assert (await shown(plane, "root"))["residency"] == "cold"
        assert (await shown(plane, "root"))["own_kv_cells"] == 60  # the branch holds them
        before = engine.hooks.n_processed
        await decide(plane, [1] * 101, pool_ref="root")
        assert engine.hooks.n_processed - before == 40
        assert engine.cache.used() == 140


async def test_a_hundred_attaches_to_a_cold_pool_are_one_prefill_also_when_sequences_are_short():
    async with FakeEngine(max_pools=1) as engine, planes(engine) as plane:
        await plane.create(tokens=[1] * 40, name="a")
        await plane.create(tokens=[2] * 40, name="b")
        engine.prefill_s = 0.0005
        before = engine.hooks.n_materialized
        plans = await asyncio.gather(*(decide(plane, [1] * 40 + [i]) for i in range(100)))
        assert {(plan.pool_id, plan.miss_reason) for plan in plans} == {(1, None)}
        assert engine.hooks.n_materialized - before == 1


# Evict and flush -----------------------------------------------------------------------------------------------------


async def test_evict_drops_the_cells_and_keeps_the_pool(plane):
    await plane.create(tokens=[1] * 300, name="a")
    for query in ("", "?to=cold"):
        status, answer = await plane.call("POST", f"/polykv/pools/a/evict{query}")
        n = 0 if query else 1
        assert (status, answer["residency"], answer["seq_id"]) == (200, "cold", None)
        assert answer["freed"] == {"seq_ids": n, "kv_cells": 300 * n, "kv_bytes": 300 * 1024 * n}
    view = await shown(plane, "a")
    assert (view["own_kv_bytes"], view["residency"], view["expires_ts"]) == (0, "cold", None)
    assert plane.engine.cache.used() == 0
    plan = await decide(plane, [1] * 301, pool_ref="a")
    assert (plan.pool_id, plan.miss_reason) == (1, None)
    error = await plane.refused(501, "warm_unavailable", "POST", "/polykv/pools/a/evict?to=warm")
    assert "?to=cold" in error["message"]
    await plane.refused(400, "invalid_request", "POST", "/polykv/pools/a/evict?to=hot")
    for verb in ("pin", "unpin", "evict", "flush"):
        await plane.refused(404, "pool_not_found", "POST", f"/polykv/pools/none/{verb}")


async def test_what_was_so_before_is_said(plane):
    """An order that found nothing to do is answered 200 all the same: it can be repeated."""
    await plane.create(tokens=[1] * 300, name="a")
    changed = [
        (await plane.call("POST", f"/polykv/pools/a/{verb}"))[1]["changed"] for verb in ("unpin", "pin", "pin", "unpin")
    ]
    assert changed == [False, True, False, True]
    told = [(await plane.call("POST", "/polykv/pools/a/evict"))[1] for _ in range(2)]
    assert [(answer["was"], answer["residency"]) for answer in told] == [("resident", "cold"), ("cold", "cold")]
    assert [answer["freed"]["seq_ids"] for answer in told] == [1, 0]
    assert {(answer["held_by"], answer["warm_bytes"]) for answer in told} == {(None, 0)}


async def test_evicting_what_another_holds_names_that_one(plane):
    await plane.create(tokens=[1] * 300, name="root")
    child = await plane.fork("root", own_tokens=[2] * 10)
    for n in (1, 0):
        _, answer = await plane.call("POST", "/polykv/pools/root/evict")
        assert (answer["was"], answer["residency"], answer["held_by"]) == ("resident", "resident", 2)
        assert (answer["seq_id"], answer["freed"]["seq_ids"]) == (child["seq_id"], n)


async def test_evict_waits_for_nobody_and_takes_nothing_from_a_running_request(plane):
    await plane.create(tokens=[1] * 100, name="a")
    plan = await decide(plane, [1] * 101, pool_ref="a")
    await plane.refused(409, "pool_in_use", "POST", "/polykv/pools/a/evict")
    status, answer = await plane.call("POST", "/polykv/pools/a/flush")
    assert (status, answer["evicted"], answer["kept"]) == (200, [], [{"pool_id": 1, "reason": "in_use"}])
    plane.control.settle(plan, Outcome(status=200))
    assert (await plane.call("POST", "/polykv/pools/a/evict"))[0] == 200
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    coming = asyncio.create_task(decide(plane, [1] * 101, pool_ref="a"))
    await hold.reached()
    await plane.refused(409, "pool_in_use", "POST", "/polykv/pools/a/evict")
    hold.release()
    await coming


async def test_flush_spares_the_pinned_and_the_busy_and_goes_leaves_first(plane):
    await plane.create(tokens=[1] * 100, name="root")
    await plane.fork("root", own_tokens=[2] * 10, name="pinned", pin=True)
    await plane.fork("root", own_tokens=[3] * 10, name="idle")
    await plane.fork("idle", own_tokens=[4] * 10, name="leaf")
    await plane.create(tokens=[9] * 50, name="outside")
    attach_session(plane, "s", "idle")  # attached, but nothing runs
    status, answer = await plane.call("POST", "/polykv/pools/root/flush")
    assert (status, answer["evicted"]) == (200, [4, 3, 1])
    assert answer["kept"] == [{"pool_id": 2, "reason": "pinned"}]
    assert answer["freed"] == {"seq_ids": 3, "kv_cells": 20, "kv_bytes": 20 * 1024}
    assert plane.engine.cache.used() == 100 + 10 + 50
    assert (await shown(plane, "root"))["residency"] == "resident"  # in the pinned one's sequence


async def test_a_pin_on_a_pool_that_another_holds_keeps_that_one():
    async with FakeEngine(max_pools=2) as engine, planes(engine) as plane:
        await plane.create(tokens=[1] * 10, name="root", pin=True)
        await plane.fork("root", own_tokens=[2] * 10, name="child")
        attach_session(plane, "s", "child")
        await plane.create(tokens=[3] * 10, name="other")  # the root's own sequence was to spare
        assert residencies(plane) == {"root": "cold", "child": "resident", "other": "resident"}
        assert (await shown(plane, "root"))["residency"] == "resident"
        await plane.call("DELETE", "/polykv/sessions/s")
        assert (await plane.call("POST", "/polykv/pools/child/flush"))[1]["evicted"] == []
        await plane.create(tokens=[4] * 10, name="new")
        assert residencies(plane) == {"root": "cold", "child": "resident", "other": "cold", "new": "resident"}


# Books ---------------------------------------------------------------------------------------------------------------


async def test_released_pools_that_sessions_hold_are_on_the_books_once(plane):
    await plane.create(tokens=[1] * 100, name="root")
    await plane.fork("root", own_tokens=[2] * 50, name="leaf")
    prompt = [1] * 100 + [2] * 50
    for slot in (0, 1):
        plan = await decide(plane, [*prompt, slot], pool_ref="leaf")
        body = {"prompt": [*prompt, slot, 7], "n_predict": 0, "id_slot": slot, "shared_pool_slot": plan.seq_id}
        async with plane.session.post(plane.engine.url + PATH, json=body) as r:
            assert (await r.json())["timings"]["pool_n"] == 150
        session = plane.control.sessions.name(f"s{slot}", plane.control.clock())
        session.pool_id, session.slot_id = plan.pool_id, slot
        plane.control.settle(plan, Outcome(status=200))
    status, answer = await plane.call("DELETE", "/polykv/pools/leaf")
    assert (status, answer["freed_now"]["kv_cells"]) == (200, 0)
    assert answer["freed_later"] == {"kv_cells": 50, "kv_bytes": 50 * 1024, "sessions": ["s0", "s1"]}
    for slot in plane.engine.slots:
        slot.n_pool_shared, slot.pool_seq = 0, -1  # as the engine has it: it does not know the pool any more
    _, view = await plane.call("GET", "/polykv/pools")
    assert [(p["pool_id"], p["name"], p["own_kv_cells"]) for p in view["released"]] == [(2, "leaf", 50)]
    assert [s["suffix_n_tokens"] for s in view["unpooled"]["sessions"]] == [2, 2]
    assert view["kv_cells_used"] == plane.engine.cache.used() == 100 + 50 + 2 + 2
    assert view["pools"][0]["own_kv_cells"] + 50 + view["unpooled"]["kv_cells"] == view["kv_cells_used"]
    _, sessions = await plane.call("GET", "/polykv/sessions")
    assert [s["marginal_kv_bytes"] for s in sessions["sessions"]] == [2048, 2048]
