"""Rendering is bounded: few at once, nothing that cannot fit, and who leaves is not waited for."""

import asyncio

import aiohttp

from polykv_proxy.control import AttachRequest
from tests.control.conftest import eventually, planes
from tests.fake_engine import FakeEngine
from tests.fake_engine.faults import Hold

N_CTX = 512
TOO_LARGE = "x" * (256 * N_CTX + (64 << 10))


async def test_two_renders_are_with_the_engine_and_the_others_wait(plane):
    hold = Hold()
    plane.engine.faults.on("render", "request", hold, times=None)
    asked = [asyncio.create_task(plane.call("POST", "/polykv/match", {"prompt": f"{i}"})) for i in range(5)]
    await hold.reached()
    await asyncio.sleep(0.2)
    assert hold.n == 2
    hold.release()
    assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 5
    assert hold.n == 5


async def test_who_leaves_closes_its_render_and_gives_its_turn(plane):
    hold = Hold()
    plane.engine.faults.on("render", "request", hold, times=2)
    timeout = aiohttp.ClientTimeout(total=0.3)
    asked = [plane.call("POST", "/polykv/match", {"prompt": "a"}, timeout=timeout) for _ in range(2)]
    assert all(isinstance(e, TimeoutError) for e in await asyncio.gather(*asked, return_exceptions=True))
    assert hold.n == 2
    status, _ = await asyncio.wait_for(plane.call("POST", "/polykv/match", {"prompt": "b"}), 5)
    assert status == 200


async def test_what_cannot_fit_is_not_rendered():
    async with FakeEngine(n_ctx_slot=N_CTX) as engine, planes(engine) as plane:
        await plane.create(prompt="A" * 40, name="a")
        hold = Hold()
        engine.faults.on("render", "request", hold, times=None)
        messages = [{"role": "user", "content": TOO_LARGE}]
        for method, path, body in (
            ("POST", "/polykv/pools", {"prompt": TOO_LARGE}),
            ("POST", "/polykv/pools", {"messages": messages}),
            ("POST", "/polykv/pools/a/fork", {"prompt": TOO_LARGE}),
            ("POST", "/polykv/match", {"messages": messages}),
        ):
            error = await plane.refused(400, "context_length_exceeded", method, path, body)
            assert error["n_bytes"] > len(TOO_LARGE)
            assert error["n_ctx"] == N_CTX
        plan = await plane.control.decide_attach(
            AttachRequest(path="/v1/chat/completions", body={"messages": messages}, pool_ref="a")
        )
        assert (plan.pool_id, plan.miss_reason) == (None, "diverged")
        assert hold.n == 0


async def test_a_list_longer_than_the_context_is_refused_by_its_length():
    async with FakeEngine(n_ctx_slot=N_CTX) as engine, planes(engine) as plane:
        await eventually(lambda: plane.control.ctx_total == N_CTX)
        await plane.create(tokens=[1, 2], name="a")
        long = ["no id"] * (N_CTX + 1)  # what is in it does not matter any more
        for path, field in (
            ("/polykv/pools", "tokens"),
            ("/polykv/pools/a/fork", "own_tokens"),
            ("/polykv/match", "tokens"),
            ("/polykv/match", "prompt"),
        ):
            error = await plane.refused(400, "context_length_exceeded", "POST", path, {field: long})
            assert (error["n_prompt_tokens"], error["n_ctx"], error["param"]) == (N_CTX + 1, N_CTX, field)
