"""Engines that come late, go away, come back, load, are not patched; proxies that start over; sessions as pools."""

import asyncio

import aiohttp
import pytest

from polykv_proxy.config import load_settings
from polykv_proxy.control import AttachRequest, Control
from polykv_proxy.ids import PoolId, SessionId, SlotId
from polykv_proxy.slots import Ticket
from tests.control.conftest import eventually, planes
from tests.fake_engine import FakeEngine, Hold, delay, drop, reply


async def test_proxy_boots_without_its_engine_and_finds_it_later():
    engine = FakeEngine()
    await engine.start()
    await engine.kill()
    async with planes(engine) as plane:
        status, health = await plane.call("GET", "/polykv/health")
        assert (status, health["status"], health["engine"]["reachable"]) == (503, "upstream_unavailable", False)
        assert plane.headers["Retry-After"] == "1"
        for method, path, body in (
            ("POST", "/polykv/pools", {"tokens": [1]}),
            ("GET", "/polykv/pools", None),
            ("POST", "/polykv/match", {"tokens": [1]}),
        ):
            await plane.refused(503, "upstream_unavailable", method, path, body)
        assert (await plane.call("GET", "/polykv/sessions"))[1] == {"sessions": []}
        await engine.start()
        await plane.create(tokens=[1, 2])
        status, health = await plane.call("GET", "/polykv/health")
        assert (status, health["status"], health["pools"]) == (200, "ok", 1)
        assert health["engine"]["epoch"] == engine.epoch
        assert plane.control.slots.n_slots == 4
        await engine.kill()


async def test_loading_is_a_503_of_its_own(engine):
    engine.loading = True
    async with planes(engine) as plane:
        await plane.refused(503, "loading", "POST", "/polykv/pools", {"tokens": [1]})
        status, health = await plane.call("GET", "/polykv/health")
        assert (status, health["status"], health["engine"]["loading"]) == (503, "loading", True)
        engine.loading = False
        await eventually(lambda: plane.control.hooks)
        await plane.create(tokens=[1])


async def test_an_unpatched_engine_is_a_501_on_the_control_plane_and_no_pool_on_the_data_plane():
    async with FakeEngine(hooks=False) as engine, planes(engine) as plane:
        for method, path, body in (
            ("POST", "/polykv/pools", {"tokens": [1]}),
            ("GET", "/polykv/pools", None),
            ("POST", "/polykv/match", {"tokens": [1]}),
        ):
            error = await plane.refused(501, "engine_unpatched", method, path, body)
            assert "polykvctl engine build" in error["message"]
        status, health = await plane.call("GET", "/polykv/health")
        assert (status, health["engine"]["hooks"]) == (200, False)
        plan = await plane.control.decide_attach(AttachRequest(path="/completion", body={"prompt": "x"}))
        assert (plan.pool_id, plan.miss_reason) == (None, "no_pool")
        assert plane.control.slots.n_slots == 4
        # The same address gets a patched engine: noticed without a restart of the proxy.
        engine.with_hooks = True
        await engine.restart()
        await eventually(lambda: plane.control.hooks)
        await plane.create(tokens=[1])


async def test_a_restart_drops_every_residency_and_the_tree_stays(plane):
    await plane.create(tokens=[1, 2, 3], name="a")
    await plane.fork("a", own_tokens=[4], name="b")
    session = plane.control.sessions.name("s", plane.control.clock())
    session.slot_id = 0
    await plane.engine.restart()
    _, view = await plane.call("GET", "/polykv/pools")
    assert [(p["name"], p["residency"], p["seq_id"], p["own_kv_bytes"]) for p in view["pools"]] == [
        ("a", "cold", None, 0),
        ("b", "cold", None, 0),
    ]
    assert session.slot_id is None
    child = await plane.fork("b", own_tokens=[5])
    assert (child["branch_pos"], plane.engine.cache.used()) == (4, 5)


async def test_an_engine_that_is_away_still_lets_the_tree_be_seen_and_released(plane):
    await plane.create(tokens=[1, 2, 3], name="a")
    await plane.create(tokens=[5, 6], name="b")
    await plane.engine.kill()
    now_s = plane.control.clock()
    session = plane.control.sessions.name(SessionId("s"), now_s)
    plane.control.sessions.begin(session, now_s).sent(now_s, SlotId(0), PoolId(1))
    await eventually(lambda: plane.control.watch.state != "ready")
    status, view = await plane.call("GET", "/polykv/pools")
    assert (status, len(view["pools"])) == (200, 2)
    (shown,) = view["pools"][0]["sessions"]
    (told,) = (await plane.call("GET", "/polykv/sessions"))[1]["sessions"]
    for one in (shown, told):
        assert one["session_id"] == "s"
        assert (one["prefix_n_tokens"], one["suffix_n_tokens"], one["marginal_kv_bytes"]) == (None, None, None)
    status, answer = await plane.call("DELETE", "/polykv/pools/a")
    assert (status, answer["released"]) == (200, [1])
    await plane.refused(503, "upstream_unavailable", "POST", "/polykv/pools", {"tokens": [1]})
    await plane.engine.start()
    await eventually(lambda: plane.control.watch.epoch == plane.engine.epoch)


async def test_an_engine_that_hangs_is_noticed(engine, monkeypatch):
    monkeypatch.setattr("polykv_proxy.upstream.client.READ_S", 0.1)
    async with planes(engine) as plane:
        assert (await plane.call("GET", "/polykv/health"))[0] == 200
        engine.on("stats", "request", delay(3), times=None)
        await eventually(lambda: not plane.control.health()[0])
        engine.faults.armed.clear()
        await eventually(lambda: plane.control.health()[0])


async def test_starting_frees_what_nobody_owns(engine):
    async with aiohttp.ClientSession() as session:
        for i in range(3):
            op = {"op": "materialize", "tokens": [i + 1, 2], "tag": f"old-{i}"}
            async with session.post(engine.url + "/polykv/engine/pools", json=op) as r:
                assert r.status == 200
    async with planes(engine) as plane:
        await eventually(lambda: engine.cache.used() == 0)
        await plane.create(tokens=[1, 2])
        await asyncio.sleep(0.2)  # some heartbeats
        assert len(engine.ready_pools()) == 1


async def test_a_sequence_that_could_not_be_freed_is_freed_later(plane):
    await plane.create(tokens=[1, 2, 3])
    plane.engine.on("free", "request", reply(500, {"error": {"message": "no"}}))
    assert (await plane.call("DELETE", "/polykv/pools/1"))[0] == 200
    assert plane.engine.cache.used() == 3
    await eventually(lambda: plane.engine.cache.used() == 0)


async def test_release_while_turns_run_keeps_their_cells_and_says_so(plane):
    text = "A" * 40
    await plane.create(prompt=text, name="a")
    control = plane.control
    plan = await control.decide_attach(AttachRequest(path="/completion", body={"prompt": text + "x"}))
    session = control.sessions.name("s", control.clock())
    session.pool_id, session.slot_id = plan.pool_id, 0
    hold = Hold()
    plane.engine.on("/completion", "prefill", hold)
    body = {"prompt": text + "x", "id_slot": 0, "shared_pool_slot": plan.seq_id, "n_predict": 2}
    running = asyncio.create_task(_post(plane, body))
    await hold.reached()
    status, answer = await plane.call("DELETE", "/polykv/pools/a")
    assert status == 200
    assert answer["freed_now"] == {"seq_ids": 1, "kv_cells": 0, "kv_bytes": 0}
    assert answer["freed_later"] == {"kv_cells": 40, "kv_bytes": 40 * 1024, "sessions": ["s"]}
    assert session.pool_id is None
    hold.release()
    assert (await running)["timings"]["pool_n"] == 40


async def _post(plane, body: dict) -> dict:
    async with plane.session.post(plane.engine.url + "/completion", json=body) as r:
        return await r.json()


async def a_session_that_answered(plane, prompt: str, slot: int = 1):
    """A session whose turn ran in a slot, with the books as the relay leaves them."""
    control = plane.control
    answer = await _post(plane, {"prompt": prompt, "id_slot": slot, "n_predict": 4})
    session = control.sessions.name("s", control.clock())
    for other in range(slot):
        control.slots.request(Ticket(100 + other, None), control.clock())
    (grant,) = control.slots.request(Ticket(1, "s"), control.clock())
    assert grant.slots == (slot,)
    control.slots.release(1, control.clock())
    for other in range(slot):
        control.slots.release(100 + other, control.clock())
    session.slot_id = slot
    session.ctx_used = answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] + answer["timings"]["predicted_n"]
    return session, answer["content"]


async def test_a_session_becomes_a_pool_without_a_prefill(plane):
    _, said = await a_session_that_answered(plane, "Hello")
    answer = await plane.create(from_session="s", name="from")
    assert (answer["prefix_len"], answer["parent"]) == (9, -1)
    assert plane.control.tree.tokens(answer["pool_id"]).tolist() == plane.tokens("Hello" + said)
    assert plane.engine.hooks.n_processed == 0
    assert plane.engine.cache.used() == 9


async def test_fork_from_a_session_branches_where_it_leaves_the_parent(plane):
    await plane.create(prompt="Hello world", name="a")
    await a_session_that_answered(plane, "Hello there")
    answer = await plane.fork("a", from_session="s")
    assert (answer["parent"], answer["branch_pos"], answer["prefix_len"]) == (1, 6, 15)
    await plane.create(prompt="other", name="b")
    error = await plane.refused(409, "prefix_mismatch", "POST", "/polykv/pools/b/fork", {"from_session": "s"})
    assert error["divergence_pos"] == 0
    assert len(plane.engine.ready_pools()) == 3


async def test_releasing_a_pool_whose_cells_others_hold_frees_nothing_and_says_so(plane):
    await a_session_that_answered(plane, "Hello")
    await plane.create(from_session="s", name="from")
    _, answer = await plane.call("DELETE", "/polykv/pools/from")
    assert answer["freed_now"] == {"seq_ids": 1, "kv_cells": 0, "kv_bytes": 0}
    assert plane.engine.cache.used() == 9


async def test_a_session_without_its_slot_is_not_resident(plane):
    await plane.refused(404, "session_not_found", "POST", "/polykv/pools", {"from_session": "none"})
    session, _ = await a_session_that_answered(plane, "Hello")
    session.slot_id = None
    await plane.refused(409, "session_not_resident", "POST", "/polykv/pools", {"from_session": "s"})
    session.slot_id = 2
    await plane.refused(409, "session_not_resident", "POST", "/polykv/pools", {"from_session": "s"})
    assert plane.engine.ready_pools() == []


async def test_nobody_gets_anothers_text_into_his_pool(plane):
    """The engine itself put another request into the slot that the book thinks is the session's."""
    await a_session_that_answered(plane, "Hello")
    await _post(plane, {"prompt": "a secret of somebody else", "id_slot": 1})
    await plane.refused(409, "session_not_resident", "POST", "/polykv/pools", {"from_session": "s"})
    assert plane.engine.ready_pools() == []


async def test_a_pool_of_a_slot_holds_what_is_there_when_room_for_it_was_made():
    """Another pool gives its sequence for it, and meanwhile the slot has a turn that prefills the same text anew."""
    async with FakeEngine(max_pools=2) as engine, planes(engine, heartbeat_s=60) as plane:
        await plane.create(tokens=[1] * 30, name="goes")
        await a_session_that_answered(plane, "Hello")
        await plane.create(from_session="s", name="before")
        await plane.call("POST", "/polykv/pools/before/pin")

        async def begin_anew(request):
            await _post(plane, {"prompt": "Hello", "id_slot": 1, "n_predict": 4, "cache_prompt": False})

        engine.on("free", "request", begin_anew)
        await plane.create(from_session="s", name="after")
        await plane.control.refresh()
        _, view = await plane.call("GET", "/polykv/pools")
        own = {pool["name"]: pool["own_kv_cells"] for pool in view["pools"]}
        assert own == {"goes": 0, "before": 9, "after": 9}
        assert view["kv_cells_used"] == engine.cache.used() == 18


async def test_snapshot_refused_by_the_engine(plane):
    await a_session_that_answered(plane, "Hello")
    plane.engine.slots[1].cut(0)
    await plane.refused(409, "session_not_resident", "POST", "/polykv/pools", {"from_session": "s"})
    plane.engine.on("snapshot", "request", drop())
    await plane.refused(503, "upstream_unavailable", "POST", "/polykv/pools", {"from_session": "s"})


async def test_a_lost_snapshot_answer_leaks_nothing(plane):
    await a_session_that_answered(plane, "Hello")
    plane.engine.on("snapshot", "reply", drop())
    await plane.refused(503, "upstream_unavailable", "POST", "/polykv/pools", {"from_session": "s"})
    await eventually(lambda: not plane.engine.ready_pools())


async def test_sessions_are_shown_and_dropped(plane):
    session, _ = await a_session_that_answered(plane, "Hello")
    session.pool_id = 1
    _, answer = await plane.call("GET", "/polykv/sessions")
    assert [s["session_id"] for s in answer["sessions"]] == ["s"]
    _, one = await plane.call("GET", "/polykv/sessions/s")
    assert (one["slot_id"], one["ctx_used"], one["ctx_total"], one["state"]) == (1, 9, 16384, "idle")
    assert one["ctx_headroom_tokens"] == 16375
    status, answer = await plane.call("DELETE", "/polykv/sessions/s")
    assert (status, answer) == (200, {"session_id": "s", "detached_from": 1, "n_running": 0})
    assert plane.control.slots.owner_of(1) is None
    await plane.refused(404, "session_not_found", "DELETE", "/polykv/sessions/s")
    await plane.refused(404, "session_not_found", "GET", "/polykv/sessions/s")


async def test_draining_is_unhealthy(plane):
    plane.control.draining = True
    status, health = await plane.call("GET", "/polykv/health")
    assert (status, health["status"]) == (503, "draining")


@pytest.mark.parametrize("phase", ["request", "reply"])
@pytest.mark.parametrize("place", ["materialize", "stats"])
async def test_an_engine_that_dies_while_a_pool_is_made_leaves_a_clean_tree(plane, place, phase):
    plane.engine.on(place, phase, plane.engine.die())
    status, _ = await plane.call("POST", "/polykv/pools", {"tokens": [1, 2, 3], "name": "n"})
    assert status == 503
    assert len(plane.control.tree) == 0
    await plane.engine.start()
    await plane.create(tokens=[1, 2, 3], name="n")
    assert len(plane.engine.ready_pools()) == 1


async def test_a_restart_in_the_middle_of_a_create_is_seen(plane):
    hold = Hold()
    plane.engine.on("materialize", "request", hold)
    task = asyncio.create_task(plane.call("POST", "/polykv/pools", {"tokens": [1, 2, 3], "name": "n"}))
    await hold.reached()
    await plane.engine.restart()
    status, answer = await task
    assert (status, answer["error"]["code"] in ("upstream_unavailable", "upstream_restarted")) == (503, True)
    assert len(plane.control.tree) == 0
    await plane.create(tokens=[1, 2, 3], name="n")


async def test_stop_ends_everything(engine):
    control = Control(load_settings(upstream_url=engine.url, state=":memory:"), heartbeat_s=0.01)
    await control.start()
    hold = Hold()
    engine.on("materialize", "request", hold)
    from polykv_proxy.control import CreatePool, Source

    task = asyncio.create_task(control.create_pool(CreatePool(source=Source(tokens=[1]))))
    await hold.reached()
    await control.stop()
    await asyncio.wait([task])
    assert task.cancelled()
    names = {t.get_name() for t in asyncio.all_tasks()}
    assert not {n for n in names if n.startswith("polykv")}


async def test_a_sleeping_engine_wakes_up_to_a_new_epoch_and_the_pool_is_right(plane):
    await plane.create(prompt="A" * 40, name="a")
    plane.engine.sleep()
    await eventually(lambda: plane.control.tree.get("a").residency == "cold")
    assert plane.engine.sleeping  # looking does not wake it
    status, health = await plane.call("GET", "/polykv/health")
    assert (status, health["status"]) == (200, "ok")
    plan = await plane.control.decide_attach(AttachRequest(path="/completion", body={"prompt": "A" * 41}))
    assert (plan.pool_id, plan.epoch) == (1, plane.engine.epoch)
    assert (await plane.create(tokens=[1, 2]))["residency"] == "resident"
    await asyncio.sleep(0.2)
    assert len(plane.engine.ready_pools()) == 2


async def test_an_engine_that_slept_since_the_proxy_came_gets_its_first_pool(engine):
    engine.sleep()
    async with planes(engine) as plane:
        assert (await plane.create(tokens=[1, 2, 3]))["residency"] == "resident"
        assert plane.control.restorer.is_bound
