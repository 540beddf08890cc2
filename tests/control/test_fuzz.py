"""Whatever is sent to the control plane, it answers in its own shape, and nothing is left behind."""

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.control.conftest import planes
from tests.fake_engine import FakeEngine

KNOWN = [400, 404, 405, 409, 413, 501, 503, 507]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
FIELDS = "tokens own_tokens prompt messages tools chat_template_kwargs from_session name pin ttl_s branch_pos exact x"
PATHS = (
    "/polykv/pools /polykv/pools/1 /polykv/pools/1/fork /polykv/pools/n/fork /polykv/match /polykv/sessions "
    "/polykv/sessions/x /polykv/health /polykv/pools/%F0%9F%98%80 /polykv/pools/-1"
)
fields = st.sampled_from(FIELDS.split(" "))
tokens = st.lists(st.integers(-1, 301), max_size=6)
bodies = st.dictionaries(fields, json_values | tokens, max_size=4) | st.fixed_dictionaries({"tokens": tokens})
paths = st.sampled_from(PATHS.split(" "))
methods = st.sampled_from(["GET", "POST", "DELETE"])


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(methods, paths, bodies), min_size=5, max_size=25))
def test_no_500_no_leak_and_always_our_shape(requests):
    asyncio.run(_play(requests))


async def _play(requests) -> None:
    async with FakeEngine(max_pools=3) as engine, planes(engine) as plane:
        for method, path, body in requests:
            raw = json.dumps(body).encode("utf-8", "surrogatepass") if method == "POST" else None
            async with plane.session.request(method, plane.url + path, data=raw) as r:
                text = await r.text()
                if r.status < 300:
                    json.loads(text)
                    continue
                assert r.status in KNOWN, (method, path, body, r.status, text)
                if r.status != 405:
                    answer = json.loads(text)
                    assert answer["src"] == "polykv_proxy"
                    assert {"message", "type", "code"} <= set(answer["error"])
        # What the tree says and what the engine holds is the same.
        tree = plane.control.tree
        ready = {p.seq: p.tokens for p in engine.ready_pools()}
        assert ready == {p.seq_id: tree.tokens(p.pool_id).tolist() for p in tree.residents()}
        assert engine.cache.used() == plane.control.residency.ledger.accounts().total_cells


@settings(max_examples=60)
@given(st.binary(max_size=60))
def test_any_bytes_as_a_body_are_a_400(raw):
    async def play() -> None:
        async with FakeEngine() as engine, planes(engine) as plane:
            status, answer = await plane.call("POST", "/polykv/pools", raw)
            assert status == 400, answer

    asyncio.run(play())


def test_many_at_once_leave_the_books_true():
    """Creates, forks, attaches and releases at the same time, engine restarts in between."""

    async def play() -> None:
        async with FakeEngine(max_pools=6) as engine, planes(engine) as plane:
            engine.prefill_s = 0.0001

            async def create(i: int) -> None:
                await plane.call("POST", "/polykv/pools", {"tokens": [i, 1, 2], "name": f"p{i}"})

            async def fork(i: int) -> None:
                await plane.call("POST", f"/polykv/pools/p{i}/fork", {"own_tokens": [i, 9], "name": f"c{i}"})

            async def release(i: int) -> None:
                await plane.call("DELETE", f"/polykv/pools/p{i}?recursive=true")

            for turn in range(6):
                work = [op(i) for i in range(6) for op in (create, fork, release, fork, create)]
                running = [asyncio.ensure_future(w) for w in work]
                if turn % 2:
                    await asyncio.sleep(0.005)
                    await engine.restart()
                await asyncio.gather(*running)
            await plane.control.refresh()
            await plane.control.residency.reconcile()
            tree = plane.control.tree
            ready = {p.seq: p.tokens for p in engine.ready_pools()}
            resident = {p.seq_id: tree.tokens(p.pool_id).tolist() for p in tree if p.seq_id is not None}
            assert ready == resident

    asyncio.run(play())
