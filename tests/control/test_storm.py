"""Everything at once, with people leaving, engines dying and answers getting lost: the books are true afterwards."""

import asyncio
import random

import pytest

from polykv_proxy.control import AttachRequest
from polykv_proxy.errors import KvExhaustedForRequest
from tests.control.conftest import Plane, planes
from tests.fake_engine import FakeEngine, delay, drop, reply

OPS = ("create", "fork", "release", "attach", "attach", "attach", "view", "snapshot")


async def one(plane: Plane, rng: random.Random) -> None:
    """One thing that somebody does; any answer is fine, an unforeseen exception is not."""
    i = rng.randrange(4)
    op = rng.choice(OPS)
    if op == "create":
        await plane.call("POST", "/polykv/pools", {"prompt": f"pool {i} " * 5, "name": f"p{i}"})
    elif op == "fork":
        await plane.call("POST", f"/polykv/pools/p{i}/fork", {"own_tokens": [i, 9], "name": f"c{i}"})
    elif op == "release":
        await plane.call("DELETE", f"/polykv/pools/p{i}?recursive=true")
    elif op == "view":
        await plane.call("GET", "/polykv/pools")
    elif op == "snapshot":
        await plane.call("POST", "/polykv/pools", {"from_session": "s"})
    else:
        body = {"prompt": f"pool {i} " * 5 + "and more", "n_predict": 2}
        ref = rng.choice([None, f"p{i}", f"c{i}"])
        try:
            plan = await plane.control.decide_attach(AttachRequest(path="/completion", body=body, pool_ref=ref))
        except KvExhaustedForRequest:
            return
        assert (plan.pool_id is None) == (plan.seq_id is None)


async def storm(seed: int, n_cells: int) -> None:
    rng = random.Random(seed)
    async with FakeEngine(max_pools=5, n_cells=n_cells) as engine, planes(engine) as plane:
        engine.prefill_s = 0.0002
        for _ in range(6):
            running = [asyncio.ensure_future(one(plane, rng)) for _ in range(15)]
            for place in ("materialize", "snapshot", "free", "list", "stats", "render"):
                if rng.random() < 0.3:
                    action = rng.choice([drop(), delay(0.01), reply(500), reply(503), engine.die()])
                    engine.on(place, rng.choice(["request", "reply"]), action)
            await asyncio.sleep(rng.random() * 0.01)
            for task in running:
                if rng.random() < 0.3:
                    task.cancel()
            if rng.random() < 0.3:
                await engine.kill()
            results = await asyncio.gather(*running, return_exceptions=True)
            strange = [r for r in results if isinstance(r, Exception) and type(r).__name__ != "ClientOSError"]
            assert not strange, strange
            if not engine.running:
                await engine.start()
        engine.faults.armed.clear()
        if not engine.running:
            await engine.start()
        await settled(plane, engine)


async def settled(plane: Plane, engine: FakeEngine) -> None:
    """Within some heartbeats the tree and the engine agree, and nothing is under way."""
    tree, residency = plane.control.tree, plane.control.residency
    for _ in range(200):
        await asyncio.sleep(0.02)
        ready = {p.seq: p.tokens for p in engine.ready_pools()}
        resident = {p.seq_id: tree.tokens(p.pool_id).tolist() for p in tree if p.seq_id is not None}
        quiet = not residency._flights and not residency._tags and not residency._giving
        if ready == resident and quiet and plane.control.watch.epoch == engine.epoch and not plane.control._working:
            break
    assert ready == resident, (residency.unsure, plane.control.watch.state, [p.as_json() for p in engine.pools])
    assert quiet
    assert not plane.control._working
    assert not tree._plans
    assert not residency._needed
    assert not [p for _, p in plane.control.room._live() if p.n_cells]
    assert {p.residency for p in tree} <= {"cold", "resident"}
    assert (await plane.call("POST", "/polykv/match", {"tokens": [1]}))[0] == 200


@pytest.mark.parametrize("n_cells", [16384, 110])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
async def test_storm(seed, n_cells):
    """The small cache holds two of the pools: everybody evicts everybody."""
    await storm(seed, n_cells)
