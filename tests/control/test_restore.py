"""Proxies that start over with a journal: the same tree, its sequences adopted or freed, its pools brought back."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polykv_proxy.config import load_settings
from polykv_proxy.control import AttachRequest, Control
from polykv_proxy.control.residency import Held
from polykv_proxy.errors import JournalInUse
from polykv_proxy.ids import SessionId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.turns import Usage
from tests.control.conftest import Plane, eventually, planes
from tests.fake_engine import FakeEngine, Hold

KEPT = ("pool_id", "name", "parent", "branch_pos", "prefix_len", "own_n_tokens", "pinned", "ttl_s", "auto")
SHORT = 40


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "pools.db")


async def family(plane: Plane, ttl_s: float | None = 0) -> None:
    """``a`` with a branch ``b`` and its heir ``c``, a pinned ``p``, and an id that was released."""
    await plane.create(prompt="A" * SHORT, name="a", ttl_s=ttl_s)
    await plane.create(tokens=[9, 9, 9], name="gone")
    await plane.fork("a", prompt="A" * 30 + "B" * 20, name="b", ttl_s=ttl_s)
    await plane.fork("b", prompt="A" * 30 + "B" * 20 + "C" * 5, name="c", ttl_s=ttl_s)
    await plane.create(prompt="P" * SHORT, name="p", pin=True)
    assert (await plane.call("DELETE", "/polykv/pools/gone"))[0] == 200


async def tree_of(plane: Plane) -> list[dict[str, Any]]:
    status, view = await plane.call("GET", "/polykv/pools")
    assert status == 200
    return [{key: pool[key] for key in KEPT} for pool in view["pools"]]


@asynccontextmanager
async def after_a_kill(first: Plane, state: str, tmp_path: Path, **settings: Any) -> AsyncIterator[Plane]:
    """A proxy that finds what the first one would have left if it had been killed at this moment."""
    copy = tmp_path / "killed" / "pools.db"
    shutil.copytree(Path(state).parent, copy.parent)
    await first.control.watch.stop()  # it neither renews its lease nor gives it up
    first.engine.hooks._owner = None
    async with planes(first.engine, state=str(copy), **settings) as plane:
        yield plane


async def test_a_killed_proxy_comes_back_with_its_tree_and_adopts_its_sequences(engine, state, tmp_path):
    async with planes(engine, state=state) as first:
        await family(first)
        before, n_made = await tree_of(first), engine.hooks.n_materialized
        held = {p.name: (p.seq_id, p.gen) for p in first.control.tree}
        _, view = await first.call("GET", "/polykv/pools")
        async with after_a_kill(first, state, tmp_path) as plane:
            assert await tree_of(plane) == before
            assert {p.name: (p.seq_id, p.gen) for p in plane.control.tree} == held
            assert engine.hooks.n_materialized == n_made
            assert len(engine.ready_pools()) == 4
            assert (await plane.call("GET", "/polykv/sessions"))[1] == {"sessions": []}
            _, again = await plane.call("GET", "/polykv/pools")
            for one, other in zip(view["pools"], again["pools"], strict=True):
                assert other["created_ts"] == pytest.approx(one["created_ts"], abs=0.1)
                assert other["last_access_ts"] == pytest.approx(one["last_access_ts"], abs=0.1)
            body = {"prompt": "A" * 30 + "B" * 20 + "C" * 5 + "x"}
            plan = await plane.control.decide_attach(AttachRequest(path="/completion", body=body))
            assert (plan.pool_id, plan.prefix_n_tokens, plan.seq_id) == (4, 55, held["c"][0])
            assert (await plane.create(tokens=[1]))["pool_id"] == 6
            await plane.refused(409, "name_taken", "POST", "/polykv/pools", {"tokens": [1], "name": "a"})


async def test_cells_add_up_after_a_kill_whatever_was_shared_with_whom(engine, state, tmp_path):
    """Nothing of the order in which things were made and went is in the journal: the engine tells what is shared."""
    async with planes(engine, state=state) as first:
        await first.create(prompt="A" * SHORT, name="a")
        await first.fork("a", prompt="A" * 30 + "B" * 20, name="b")
        await first.create(prompt="G" * SHORT, name="gone")
        gone = first.control.tree.get("gone")
        shared = next(seq for seq in engine.ready_pools() if seq.seq == gone.seq_id)
        for slot in engine.slots[:2]:  # both go on with the cells of a pool that nobody knows any more
            slot.share_from(shared, SHORT)
            engine.cache.append(slot, [1, 2, 3, slot.id])
            slot.pool_seq, slot.pool_gen, slot.n_pool_shared = shared.seq, shared.gen, SHORT
        assert (await first.call("DELETE", "/polykv/pools/gone"))[0] == 200
        # b keeps its cells of a, and a is made anew: what the tree shares is there twice.
        a = first.control.tree.get("a")
        made = next(seq for seq in engine.ready_pools() if seq.seq == a.seq_id)
        tokens = list(made.tokens)
        made.cut(0)
        engine.cache.append(made, tokens)
        used = engine.cache.used()
        async with after_a_kill(first, state, tmp_path) as plane:
            assert len(engine.ready_pools()) == 2
            _, view = await plane.call("GET", "/polykv/pools")
    own = {pool["name"]: pool["own_kv_cells"] for pool in view["pools"]}
    assert own == {"a": SHORT + 30, "b": 20}
    assert view["unpooled"]["kv_cells"] == used - sum(own.values())
    assert used == SHORT + 30 + 20 + SHORT + 2 * 4


async def test_the_last_use_of_a_pool_is_kept(engine, state):
    async with planes(engine, state=state, heartbeat_s=3600) as plane:
        await plane.create(prompt="A" * SHORT, name="a")
        pool = plane.control.tree.get("a")
        created_s = pool.created_s
        await asyncio.sleep(0.05)
        request = AttachRequest(path="/completion", body={"prompt": "A" * 41})
        plan = await plane.control.decide_attach(request)
        from polykv_proxy.control import Outcome

        plane.control.settle(plan, Outcome(status=200, cache_n=40, prompt_n=1))
        used_s = pool.last_access_s
    async with planes(engine, state=state) as plane:
        pool = plane.control.tree.get("a")
        assert pool.created_s == pytest.approx(created_s, abs=0.02)
        assert pool.last_access_s == pytest.approx(used_s, abs=0.02)
        assert pool.last_access_s - pool.created_s > 0.03


async def test_what_was_not_acknowledged_or_was_released_is_freed_not_adopted(engine, state, tmp_path):
    """Killed while a pool was being made: the engine holds it, the journal does not know it."""
    async with planes(engine, state=state) as first:
        await family(first)
        before = await tree_of(first)
        hold = Hold()
        engine.on("materialize", "reply", hold)
        making = asyncio.create_task(first.call("POST", "/polykv/pools", {"tokens": [7, 7], "name": "half"}))
        await hold.reached()
        assert len(engine.ready_pools()) == 5
        async with after_a_kill(first, state, tmp_path) as plane:
            assert await tree_of(plane) == before
            assert len(engine.ready_pools()) == 4
            hold.release()
            await asyncio.wait([making])
            await plane.create(tokens=[7, 7], name="half")


async def test_a_proxy_without_its_engine_shows_the_tree_and_compares_when_it_comes(engine, state):
    async with planes(engine, state=state) as plane:
        await family(plane)
        before = await tree_of(plane)
    await engine.kill()
    async with planes(engine, state=state) as plane:
        assert await tree_of(plane) == before
        assert {pool.residency for pool in plane.control.tree} == {"cold"}
        _, health = await plane.call("GET", "/polykv/health")
        assert (health["status"], health["pools"], health["journal"]["state"]) == ("upstream_unavailable", 4, "ok")
        await plane.refused(503, "upstream_unavailable", "POST", "/polykv/pools", {"tokens": [1]})
        status, answer = await plane.call("DELETE", "/polykv/pools/c")
        assert (status, answer["released"]) == (200, [4])
        await engine.start()
        await eventually(lambda: plane.control.owns_engine)
        plan = await plane.control.decide_attach(AttachRequest(path="/completion", body={"prompt": "A" * 41}))
        assert (plan.pool_id, plan.prefix_n_tokens) == (1, 40)
    async with planes(engine, state=state) as plane:
        assert [pool["name"] for pool in await tree_of(plane)] == ["a", "b", "p"]


async def test_pinned_and_recent_pools_come_back_by_themselves_and_others_on_demand(engine, state):
    async with planes(engine, state=state) as plane:
        await family(plane)
        await plane.create(prompt="R" * SHORT, name="recent")
        await engine.restart()
        await eventually(lambda: {p.label for p in plane.control.tree.residents()} == {"p", "recent"})
        await asyncio.sleep(0.2)  # some heartbeats
        assert engine.hooks.n_materialized == 2
    await engine.restart()
    async with planes(engine, state=state) as plane:
        await eventually(lambda: {p.label for p in plane.control.tree.residents()} == {"p", "recent"})
        plan = await plane.control.decide_attach(AttachRequest(path="/completion", body={"prompt": "A" * 41}))
        assert (plan.pool_id, engine.hooks.n_materialized) == (1, 3)


async def test_parents_come_back_before_their_children_and_nothing_is_prefilled_twice(engine, state):
    async with planes(engine, state=state) as plane:
        await family(plane, ttl_s=None)
        await engine.restart()
        await eventually(lambda: engine.hooks.n_materialized == 4 and len(plane.control.tree.residents()) == 4)
        assert engine.hooks.n_processed == 40 + 20 + 5 + 40
        assert engine.cache.used() == engine.hooks.n_processed


async def test_a_pinned_pool_gets_its_sequence_back_from_one_that_is_not(state):
    async with FakeEngine(max_pools=2) as engine, planes(engine, state=state) as plane:
        await plane.create(prompt="P" * SHORT, name="p", pin=True)
        engine.max_pools = 1
        hold = Hold()
        engine.on("list", "request", hold)
        await engine.restart()
        await hold.reached()  # before anything is brought back somebody else is faster
        plane.control.restorer._brought_epoch = plane.control.watch.epoch
        hold.release()
        await eventually(lambda: plane.control.hooks)
        await plane.create(prompt="U" * SHORT, name="u", ttl_s=0)
        plane.control.restorer._brought_epoch = None
        await eventually(lambda: [p.label for p in plane.control.tree.residents()] == ["p"])


async def test_pins_are_kept_and_one_that_cannot_be_written_is_not_set(engine, state):
    async with planes(engine, state=state) as plane:
        await family(plane)
        assert (await plane.call("POST", "/polykv/pools/a/pin"))[0] == 200
        assert (await plane.call("POST", "/polykv/pools/p/unpin"))[0] == 200
        full(plane, "query_only = 1")
        await plane.refused(503, "journal_failed", "POST", "/polykv/pools/b/pin")
        await plane.refused(503, "journal_failed", "POST", "/polykv/pools/a/unpin")
        before = await tree_of(plane)
        assert {pool["name"]: pool["pinned"] for pool in before} == {"a": True, "b": False, "c": False, "p": False}
        full(plane, "query_only = 0")
    async with planes(engine, state=state) as plane:
        assert await tree_of(plane) == before


async def test_bringing_back_evicts_nobody_and_stops_when_the_engine_is_full(state):
    async with FakeEngine(max_pools=3) as engine, planes(engine, state=state) as plane:
        for i in range(3):
            await plane.create(prompt=f"{i}" * SHORT, name=f"n{i}")
        engine.max_pools = 2
        await engine.restart()
        await eventually(lambda: len(plane.control.tree.residents()) == 2)
        await asyncio.sleep(0.2)
        assert {p.label for p in plane.control.tree.residents()} == {"n1", "n2"}
        assert engine.hooks.n_materialized == 2
    async with FakeEngine(n_cells=1000) as engine, planes(engine) as plane:
        for name in "xyz":
            await plane.create(prompt=name * 300, name=name)
        engine.n_cells = engine.n_ctx_slot = 700
        await engine.restart()
        await eventually(lambda: len(plane.control.tree.residents()) == 2)
        await asyncio.sleep(0.2)
        assert {p.label for p in plane.control.tree.residents()} == {"y", "z"}
        assert engine.hooks.n_materialized == 2


async def test_room_that_somebody_takes_meanwhile_is_not_taken_back_from_him(state, monkeypatch):
    """While it is asked whether a pool fits that nobody waits for, another one is ordered."""
    async with FakeEngine(n_cells=1000) as engine, planes(engine, state=state) as plane:
        control, ordered = plane.control, []
        await plane.create(tokens=[1] * 500, name="recent")
        hold, asked = Hold(), control.room.fits_now

        async def fits_now(n_cells: int) -> bool:
            if not ordered:
                engine.on("materialize", "request", hold)
                ordered.append(asyncio.create_task(plane.create(tokens=[2] * 600, name="ordered")))
                await hold.reached()
                asyncio.get_running_loop().call_later(0.05, hold.release)
                return True
            return await asked(n_cells)

        monkeypatch.setattr(control.room, "fits", lambda n_cells: False)
        monkeypatch.setattr(control.room, "fits_now", fits_now)
        await engine.restart()
        await eventually(lambda: control.restorer._bringing is not None and control.restorer._bringing.done())
        await ordered[0]
        assert {pool.label for pool in control.tree.residents()} == {"ordered"}


async def test_room_that_is_not_known_yet_is_asked_for(engine, state, monkeypatch):
    """Between two heartbeats what was just brought back is counted twice: in the stats and as new."""
    async with planes(engine, state=state) as plane:
        for name in "xyz":
            await plane.create(prompt=name * SHORT, name=name)
        monkeypatch.setattr(plane.control.room, "fits", lambda n_cells: False)
        await engine.restart()
        await eventually(lambda: engine.hooks.n_materialized == 3)


async def test_who_needs_a_pool_now_does_not_wait_for_those_that_come_back(engine, state):
    """Many come back, one prefill at a time: a request gets its turn after the one that is under way."""
    async with planes(engine, state=state) as plane:
        for i in range(10):
            await plane.create(tokens=[i + 1] * 20, name=f"n{i}")
        await plane.create(prompt="A" * SHORT, name="cold", ttl_s=0)
        hold = Hold()
        engine.on("materialize", "request", hold)
        await engine.restart()
        await hold.reached()
        order = AttachRequest(path="/completion", body={"prompt": "A" * 41})
        asked = asyncio.create_task(plane.control.decide_attach(order))
        await eventually(lambda: plane.control.tree.get("cold").residency == "materializing")
        n_before = engine.hooks.n_materialized
        hold.release()
        assert (await asked).pool_id == 11
        assert engine.hooks.n_materialized - n_before <= 2
        await eventually(lambda: len(plane.control.tree.residents()) == 11)


@pytest.mark.parametrize("pin", [False, True])
async def test_what_comes_back_for_nobody_gives_way_in_the_middle(engine, state, pin):
    """A prefill that nobody waits for is called off for who needs another pool, and done after that."""
    async with planes(engine, state=state) as plane:
        await plane.create(prompt="A" * SHORT, name="cold", ttl_s=0)
        await plane.create(prompt="R" * SHORT, name="recent", pin=pin)
        hold = Hold()
        engine.on("materialize", "request", hold)
        await engine.restart()
        await hold.reached()
        order = AttachRequest(path="/completion", body={"prompt": "A" * 41})
        asked = asyncio.create_task(plane.control.decide_attach(order))
        await eventually(lambda: plane.control.tree.get("recent").residency == "cold")
        hold.release()
        assert (await asked).pool_id == 1
        await eventually(lambda: {p.label for p in plane.control.tree.residents()} == {"cold", "recent"})


async def test_what_comes_back_for_nobody_does_not_slow_down_a_request(engine, state):
    async with planes(engine, state=state) as plane:
        await plane.create(prompt="R" * SHORT, name="recent")
        await plane.create(prompt="P" * SHORT, name="p", pin=True)
        sessions = plane.control.sessions
        turn = sessions.begin(sessions.name(SessionId("busy"), 0.0), 0.0)
        await engine.restart()
        await eventually(lambda: [pool.label for pool in plane.control.tree.residents()] == ["p"])
        await asyncio.sleep(0.2)  # some heartbeats
        assert engine.hooks.n_materialized == 1
        sessions.end(turn, Usage(), 0.0)
        await eventually(lambda: {p.label for p in plane.control.tree.residents()} == {"p", "recent"})


async def test_one_that_is_released_while_it_waits_to_come_back_keeps_no_other_away(engine, state):
    async with planes(engine, state=state) as plane:
        for name in "abc":
            await plane.create(prompt=name * SHORT, name=name)
        sessions = plane.control.sessions
        turn = sessions.begin(sessions.name(SessionId("busy"), 0.0), 0.0)
        await engine.restart()
        await eventually(lambda: plane.control.restorer._bringing is not None)
        await asyncio.sleep(0.2)
        assert (await plane.call("DELETE", "/polykv/pools/c"))[0] == 200  # the last used, so the first to come
        await asyncio.sleep(0.2)
        assert engine.hooks.n_materialized == 0
        sessions.end(turn, Usage(), 0.0)
        await eventually(lambda: {p.label for p in plane.control.tree.residents()} == {"a", "b"})


async def test_pinned_pools_come_back_behind_one_that_has_no_room(state):
    """Saved ones come before what must be prefilled, pinned or not."""
    async with FakeEngine(max_pools=3) as engine, planes(engine, state=state) as plane:
        for name, pin in (("s", False), ("t", False), ("p", True)):
            await plane.create(prompt=name * SHORT, name=name, pin=pin)
        plane.control.restorer._is_saved = lambda pool: not pool.pin
        engine.max_pools = 1
        await engine.restart()
        await eventually(lambda: engine.hooks.n_materialized == 2)
        await eventually(lambda: [pool.label for pool in plane.control.tree.residents()] == ["p"])


async def test_a_pinned_pool_comes_back_though_others_are_asked_for_without_end(engine, state, monkeypatch):
    monkeypatch.setattr("polykv_proxy.control.restore.MAX_GIVEN_WAY", 2)
    async with planes(engine, state=state) as plane:
        await plane.create(prompt="P" * SHORT, name="p", pin=True)
        n_tries = 0
        residency = plane.control.residency
        ensure = residency.ensure

        async def ensure_counted(pool: Pool) -> Held:
            nonlocal n_tries
            n_tries += pool.label == "p"
            if pool.label == "p":
                residency.n_orders += 1  # somebody else orders, whenever it is begun
                try:
                    await asyncio.sleep(0.15)
                    return await ensure(pool)
                finally:
                    residency.n_orders -= 1
            return await ensure(pool)

        monkeypatch.setattr(residency, "ensure", ensure_counted)
        residency.n_orders += 1
        await engine.restart()
        await eventually(lambda: n_tries > 2 and [pool.label for pool in plane.control.tree.residents()] == ["p"])
        assert n_tries == 3
        residency.n_orders -= 1


# Another model -----------------------------------------------------------------------------------------------------


async def test_another_model_gets_a_tree_of_its_own_and_the_first_ones_comes_back_with_it(engine, state, caplog):
    async with planes(engine, state=state) as plane:
        await family(plane)
        before = await tree_of(plane)
        session = plane.control.sessions.name("s", plane.control.clock())
        session.pool_id = 1
        engine.fingerprint = "other-model"
        await engine.restart()
        await eventually(lambda: plane.control.hooks and not len(plane.control.tree))
        assert "runs another model (other-model, was toy-model): 4 pools are set aside" in caplog.text
        _, health = await plane.call("GET", "/polykv/health")
        assert (health["pools"], health["journal"]["pools_of_other_models"]) == (0, 4)
        assert session.pool_id is None
        plan = await plane.control.decide_attach(AttachRequest(path="/completion", body={"prompt": "A" * 41}))
        assert (plan.pool_id, plan.miss_reason) == (None, "no_pool")
        await plane.refused(404, "pool_not_found", "POST", "/polykv/pools/a/fork", {"tokens": [1, 2]})
        assert (await plane.create(tokens=[1, 2, 3], name="a"))["pool_id"] == 6
        assert len(engine.ready_pools()) == 1
        engine.fingerprint = "toy-model"
        await engine.restart()
        await eventually(lambda: plane.control.hooks and len(plane.control.tree) == 4)
        assert await tree_of(plane) == before
        plan = await plane.control.decide_attach(AttachRequest(path="/completion", body={"prompt": "A" * 41}))
        assert plan.pool_id == 1
        assert (await plane.create(tokens=[4]))["pool_id"] == 7


@pytest.mark.parametrize("with_engine", [True, False])
async def test_another_model_at_the_start_of_the_proxy(engine, state, with_engine):
    async with planes(engine, state=state) as plane:
        await family(plane)
    engine.fingerprint = "other-model"
    await engine.kill()
    if with_engine:
        await engine.start()
    async with planes(engine, state=state) as plane:
        if not with_engine:
            assert len(plane.control.tree) == 4
            await engine.start()
        await eventually(lambda: plane.control.hooks)
        assert len(plane.control.tree) == 0
        assert (await plane.create(tokens=[1, 2, 3]))["pool_id"] == 6
    async with planes(engine, state=state) as plane:
        assert [pool["pool_id"] for pool in await tree_of(plane)] == [6]
        engine.fingerprint = "toy-model"
        await engine.restart()
        await eventually(lambda: plane.control.hooks and len(plane.control.tree) == 4)
        await engine.kill()


async def test_sequences_that_another_model_left_are_never_adopted(engine, state):
    """The same epoch cannot have two models; a list that still has the tokens' hash is another context's."""
    async with planes(engine, state=state) as plane:
        pool = await plane.create(prompt="A" * SHORT, name="a", ttl_s=0)
    engine.fingerprint = "other-model"  # whoever changed it left sequences with the very same tokens
    async with planes(engine, state=state) as plane:
        assert len(plane.control.tree) == 0
        await eventually(lambda: not engine.ready_pools())
        assert pool["seq_id"] is not None


@pytest.mark.parametrize("place", ["render", "materialize"])
async def test_a_pool_that_was_begun_for_one_model_is_never_made_for_another(engine, state, place):
    async with planes(engine, state=state) as plane:
        await plane.create(prompt="A" * SHORT, name="a", ttl_s=0)
        hold = Hold()
        engine.on(place, "request", hold)
        making = asyncio.create_task(plane.call("POST", "/polykv/pools", {"prompt": "B" * 20, "name": "b"}))
        await hold.reached()
        engine.fingerprint = "other-model"
        engine.epoch = "another start"  # the connection holds: the worst case
        engine.cache.sequences[-1].cut(0)
        await eventually(lambda: plane.control.restorer.n_models == 2)
        hold.release()
        status, answer = await making
        assert (status, answer["error"]["code"]) == (503, "upstream_restarted")
        await eventually(lambda: plane.control.owns_engine and not engine.ready_pools())
        assert len(plane.control.tree) == 0
        assert (await plane.create(prompt="B" * 20, name="b"))["pool_id"] == 3


async def test_models_that_change_faster_than_they_are_loaded(engine, state):
    async with planes(engine, state=state) as plane:
        await family(plane)
        before = await tree_of(plane)
        for fingerprint in ("b", "toy-model", "c", "toy-model"):
            engine.fingerprint = fingerprint
            engine.epoch = f"start of {fingerprint} {time.monotonic()}"
            for seq in engine.ready_pools():
                engine.hooks._clear(seq)
            await plane.control.refresh()
        await eventually(lambda: plane.control.hooks)
        assert await tree_of(plane) == before


# The journal itself ------------------------------------------------------------------------------------------------


async def test_memory_keeps_nothing(engine):
    async with planes(engine) as plane:
        await plane.create(tokens=[1, 2, 3])
    async with planes(engine) as plane:
        assert len(plane.control.tree) == 0
        assert engine.ready_pools() == []


async def test_a_second_proxy_with_the_same_journal_refuses_to_start(engine, state, monkeypatch):
    monkeypatch.setattr("polykv_proxy.store.place.LOCK_WAIT_S", 0.1)
    async with planes(engine, state=state) as plane, FakeEngine() as other_engine:
        await family(plane)
        second = Control(load_settings(upstream_url=other_engine.url, state=state))
        second.journal._lock_wait_s = 0.1
        with pytest.raises(JournalInUse, match="in use by process"):
            await second.start()
        await plane.create(tokens=[5])


async def test_a_damaged_journal_is_an_empty_tree_and_said_in_health(engine, state):
    async with planes(engine, state=state) as plane:
        await family(plane)
    spoil(state)
    async with planes(engine, state=state) as plane:
        _, health = await plane.call("GET", "/polykv/health")
        assert (health["status"], health["pools"], health["journal"]["state"]) == ("ok", 0, "ok")
        assert ".corrupt-" in health["journal"]["saved_copy"]
        assert engine.ready_pools() == []
        assert (await plane.create(tokens=[1]))["pool_id"] == 1


def spoil(path: str) -> None:
    raw = bytearray(Path(path).read_bytes())
    raw[200:20000] = bytes(len(raw[200:20000]))
    Path(path).write_bytes(raw)


def full(plane: Plane, pragma: str) -> None:
    """The disk takes no more, or all again."""
    journal = plane.control.journal
    journal._thread.submit(journal._db._db.execute, f"PRAGMA {pragma}").result()


async def test_a_full_disk_fails_what_would_not_survive_and_leaves_no_trace_of_it(engine, state, monkeypatch):
    monkeypatch.setattr("polykv_proxy.store.journal.OWED_EVERY_S", 0.0)
    async with planes(engine, state=state) as plane:
        await family(plane)
        before = await tree_of(plane)
        full(plane, "query_only = 1")
        error = await plane.refused(503, "journal_failed", "POST", "/polykv/pools", {"tokens": [1], "name": "n"})
        assert state in error["message"]
        assert plane.headers["Retry-After"] == "5"
        await plane.refused(503, "journal_failed", "POST", "/polykv/pools/a/fork", {"own_tokens": [1]})
        assert await tree_of(plane) == before
        assert len(engine.ready_pools()) == 4
        _, health = await plane.call("GET", "/polykv/health")
        assert (health["status"], health["journal"]["state"]) == ("ok", "failing")
        plan = await plane.control.decide_attach(AttachRequest(path="/completion", body={"prompt": "A" * 41}))
        assert plan.pool_id == 1  # what is there goes on
        await plane.refused(503, "journal_failed", "DELETE", "/polykv/pools/p")
        assert [pool["name"] for pool in await tree_of(plane)] == ["a", "b", "c"]
        await eventually(lambda: len(engine.ready_pools()) == 3)
        full(plane, "query_only = 0")
        await eventually(lambda: plane.control.journal.status["state"] == "ok")
        assert (await plane.create(tokens=[1], name="n"))["name"] == "n"
    async with planes(engine, state=state) as plane:
        assert [pool["name"] for pool in await tree_of(plane)] == ["a", "b", "c", "n"]


async def test_a_caller_is_answered_after_the_disk_has_it(engine, state):
    async with planes(engine, state=state) as plane:
        release = hold_the_disk(plane)
        making = asyncio.create_task(plane.create(tokens=[1, 2, 3], name="a"))
        await eventually(lambda: len(engine.ready_pools()) == 1)
        done, _ = await asyncio.wait([making], timeout=0.2)
        assert not done
        release()
        await making
        release = hold_the_disk(plane)
        releasing = asyncio.create_task(plane.call("DELETE", "/polykv/pools/a"))
        await eventually(lambda: not engine.ready_pools())
        done, _ = await asyncio.wait([releasing], timeout=0.2)
        assert not done
        release()
        assert (await releasing)[0] == 200


def hold_the_disk(plane: Plane) -> Any:
    import threading

    go = threading.Event()
    plane.control.journal._thread.submit(go.wait, 10)
    return go.set


async def test_the_context_of_a_slot_as_a_pool_is_kept_like_any_other(engine, state):
    async with planes(engine, state=state) as plane:
        async with aiohttp.ClientSession() as http:
            body = {"prompt": "Hello", "id_slot": 1, "n_predict": 4}
            async with http.post(engine.url + "/completion", json=body) as answer:
                said = (await answer.json())["content"]
        request = AttachRequest(path="/completion", body={"prompt": f"Hello{said}, and on"}, legacy_slot=1)
        plan = await plane.control.decide_attach(request)
        before = await tree_of(plane)
        assert [(pool["pool_id"], pool["auto"]) for pool in before] == [(plan.pool_id, True)]
    async with planes(engine, state=state) as plane:
        assert await tree_of(plane) == before
