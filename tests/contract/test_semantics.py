"""§3.1: which pool, which slot, and what happens to who is under way."""

import asyncio

from tests.contract.conftest import ask, made
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import until

ROOT = "You are one of many agents who share this text. "
LEAF = ROOT + "You are the leaf among them, with a task of its own. "


async def test_explicit_beats_the_sessions_pool_beats_the_deepest_match(proxy: Proxy) -> None:
    await made(proxy, prompt=ROOT, name="root")
    assert (await ask(proxy, ROOT + "Go.", session_id="s"))["pool_id"] == 1
    await made(proxy, "/polykv/pools/root/fork", prompt=LEAF, name="leaf")
    assert (await ask(proxy, LEAF + "Go.", session_id="s"))["pool_id"] == 1
    assert (await ask(proxy, LEAF + "Go.", session_id="new"))["pool_id"] == 2
    assert (await ask(proxy, LEAF + "Go.", session_id="s", pool_id="leaf"))["pool_id"] == 2
    assert (await ask(proxy, LEAF + "Go.", session_id="s"))["pool_id"] == 2


async def test_a_session_migrates_only_when_the_engine_accepted_the_request(proxy: Proxy) -> None:
    await made(proxy, prompt=ROOT, name="root")
    await made(proxy, "/polykv/pools/root/fork", prompt=LEAF, name="leaf")
    await ask(proxy, LEAF + "Go.", session_id="s", pool_id="root")
    body = {"prompt": LEAF + "x" * 20_000, "session_id": "s", "pool_id": "leaf"}
    answer = await proxy.client.post("/completion", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "exceed_context_size_error"  # the engine's own words
    assert (await proxy.client.get("/polykv/sessions/s")).json()["pool_id"] == 1


async def test_two_turns_of_one_session_at_once_get_two_slots(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on("/completion", "prefill", hold, times=2)
    turns = [asyncio.create_task(ask(proxy, f"Turn {i}", session_id="s")) for i in range(2)]
    await until(lambda: hold.n == 2)
    (session,) = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
    assert session["n_running"] == 2
    hold.release()
    await asyncio.gather(*turns)
    assert len({r.json()["id_slot"] for r in engine.requests("/completion")}) == 2


async def test_a_cache_key_is_never_a_session(proxy: Proxy) -> None:
    for text in ("one", "two"):
        await proxy.client.post("/completion", json={"prompt": text, "n_predict": 1, "prompt_cache_key": "family"})
    assert len((await proxy.client.get("/polykv/sessions")).json()["sessions"]) == 2


async def test_who_finds_no_slot_waits_here_in_order_and_can_be_seen(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on("/completion", "prefill", hold, times=4)
    first = [asyncio.create_task(ask(proxy, f"Agent {i}", session_id=f"s{i}")) for i in range(4)]
    await until(lambda: hold.n == 4)
    later = []
    for i in range(4, 7):
        later.append(asyncio.create_task(ask(proxy, f"Agent {i}", session_id=f"s{i}")))
        await until(lambda n=i: proxy.relay.desk.n_waiting == n - 3)
    states = {s["session_id"]: s["state"] for s in (await proxy.client.get("/polykv/sessions")).json()["sessions"]}
    assert [states[f"s{i}"] for i in range(4, 7)] == ["waiting"] * 3
    assert engine.n_deferred == 0  # nobody stands behind a busy slot in the engine's own queue
    later[1].cancel()
    await asyncio.wait([later[1]])
    hold.release()
    receipts = await asyncio.gather(*first, later[0], later[2])
    assert [r["hold_ms"] > 0 for r in receipts[4:]] == [True, True]
    prompts = [r.json()["prompt"] for r in engine.requests("/completion")]
    assert prompts[4:] == ["Agent 4", "Agent 6"]


async def test_release_lets_running_turns_go_on_and_sessions_match_anew(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=ROOT, name="root")
    await made(proxy, "/polykv/pools/root/fork", prompt=LEAF, name="leaf")
    hold = Hold()
    engine.on("/completion", "chunk:1", hold)
    body = {"prompt": LEAF + "Go.", "n_predict": 3, "session_id": "s", "stream": True}
    running = asyncio.create_task(proxy.client.post("/completion", json=body))
    await hold.reached()
    released = await proxy.client.delete("/polykv/pools/leaf")
    assert released.status_code == 200
    assert (await proxy.client.get("/polykv/pools/leaf")).status_code == 404
    freed_later = released.json()["freed_later"]
    assert (freed_later["sessions"], freed_later["kv_cells"]) == (["s"], len(LEAF) - len(ROOT))
    hold.release()
    assert (await running).content.endswith(b"\n\n")
    assert (await ask(proxy, LEAF + "On.", session_id="s"))["pool_id"] == 1


async def test_only_children_refuse_a_release(proxy: Proxy) -> None:
    await made(proxy, prompt=ROOT, name="root", pin=True)
    await made(proxy, "/polykv/pools/root/fork", prompt=LEAF, name="leaf", pin=True)
    await ask(proxy, LEAF, session_id="s")
    assert (await proxy.client.delete("/polykv/pools/root")).status_code == 409
    assert (await proxy.client.delete("/polykv/pools/leaf")).status_code == 200
    assert (await proxy.client.delete("/polykv/pools/root")).status_code == 200


async def test_a_pool_comes_back_by_itself_after_a_restart_parents_first(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=ROOT, name="root")
    await made(proxy, "/polykv/pools/root/fork", prompt=LEAF, name="leaf")
    await engine.restart()
    await proxy.control.refresh()
    pools = (await proxy.client.get("/polykv/pools")).json()["pools"]
    assert [(p["residency"], p["seq_id"], p["own_kv_bytes"]) for p in pools] == [("cold", None, 0)] * 2
    receipt = await ask(proxy, LEAF + "Go.", pool_id="leaf")
    assert (receipt["pool_id"], receipt["cached_n_tokens"]) == (2, len(LEAF))
    pools = (await proxy.client.get("/polykv/pools")).json()["pools"]
    assert [(p["pool_id"], p["residency"]) for p in pools] == [(1, "resident"), (2, "resident")]
    assert engine.hooks.n_processed == len(LEAF)  # the root's part once


async def test_routes_that_share_nothing_pass_unpooled(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=ROOT)
    answer = await proxy.client.post("/tokenize", json={"content": ROOT, "pool_id": 1})
    assert answer.json() == {"tokens": list(ROOT.encode())}
    assert engine.requests("/tokenize")[-1].json() == {"content": ROOT, "pool_id": 1}


async def test_a_request_evicts_what_nobody_uses_and_the_pool_comes_back(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(n_cells=512) as engine, make_proxy(engine.url) as proxy:
        await made(proxy, tokens=[1] * 300, name="idle")
        receipt = await ask(proxy, "x" * 400, session_id="s")
        assert (receipt["pool_id"], receipt["miss_reason"]) == (None, "no_pool")
        (pool,) = (await proxy.client.get("/polykv/pools")).json()["pools"]
        assert (pool["residency"], pool["seq_id"], pool["own_kv_cells"]) == ("cold", None, 0)
        receipt = await ask(proxy, [1] * 301, pool_id="idle")
        assert (receipt["pool_id"], receipt["cached_n_tokens"], receipt["miss_reason"]) == (1, 300, None)


async def test_a_request_waits_for_the_cells_of_one_that_runs(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(n_cells=512) as engine, make_proxy(engine.url) as proxy:
        await made(proxy, tokens=[1] * 100, pin=True)
        hold = Hold()
        engine.on("/completion", "prefill", hold)
        first = asyncio.create_task(ask(proxy, "x" * 300, session_id="a"))
        await hold.reached()
        second = asyncio.create_task(ask(proxy, "y" * 300, session_id="b"))
        third = asyncio.create_task(ask(proxy, "z" * 300, session_id="c"))
        await until(lambda: proxy.control.sessions.n_running == 3)
        third.cancel()
        await asyncio.wait([third])
        assert not second.done()
        hold.release()
        assert [(await turn)["miss_reason"] for turn in (first, second)] == ["no_pool"] * 2
        assert len(engine.requests("/completion")) == 2


async def test_a_line_for_slots_is_no_line_for_cells(make_proxy: ProxyMaker) -> None:
    """Four requests that each need most of the cache, one slot: each has the cells when its turn comes."""
    async with FakeEngine(n_cells=512, n_slots=1) as engine, make_proxy(engine.url) as proxy:
        await made(proxy, tokens=[1] * 100, pin=True)
        engine.prefill_s = 0.0003
        turns = [asyncio.create_task(ask(proxy, letter * 390, session_id=letter)) for letter in "abcd"]
        assert [(await turn)["ctx_used"] for turn in turns] == [392] * 4
        assert proxy.control.room._live() == []


async def test_snapshots_of_slots_do_not_eat_the_sequences(engine: FakeEngine, proxy: Proxy) -> None:
    for i in range(20):
        await ask(proxy, f"Topic {i} and its beginning.", id_slot=0, session_id="s")
        await ask(proxy, f"Topic {i} and its beginning. More.", shared_pool_slot=0)
    await made(proxy, prompt=ROOT)
    assert len((await proxy.client.get("/polykv/pools")).json()["pools"]) == 2


async def test_after_a_miss_the_next_request_is_pooled_again(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=ROOT, name="base")
    await engine.restart()
    assert (await ask(proxy, ROOT + "1", pool_id="base"))["miss_reason"] is not None
    receipt = await ask(proxy, ROOT + "2", pool_id="base")
    assert (receipt["miss_reason"], receipt["cached_n_tokens"]) == (None, len(ROOT))
    engine.hooks._clear(engine.ready_pools()[0])
    await ask(proxy, "@" + ROOT, id_slot=1, session_id="x")
    await ask(proxy, ROOT + "3", pool_id="base", session_id="new")
    receipt = await ask(proxy, ROOT + "4", pool_id="base", session_id="newer")
    assert (receipt["miss_reason"], receipt["cached_n_tokens"]) == (None, len(ROOT))
