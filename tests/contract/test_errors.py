"""§4, errors: one shape, stable codes, honest statuses."""

from typing import Any

import pytest

from tests.contract.conftest import ask, error_of, made, refused
from tests.fake_engine import FakeEngine, reply
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, body_of

TEXT = "You are one of many agents who share this text. "

REFUSALS: list[tuple[int, str, str, str, Any]] = [
    (400, "invalid_request", "POST", "/polykv/pools", {}),
    (400, "invalid_request", "POST", "/polykv/pools", {"prompt": "x", "tokens": [1]}),
    (400, "invalid_request", "POST", "/polykv/pools", {"prompt": "x", "nme": "typo"}),
    (400, "invalid_request", "POST", "/polykv/pools", {"prompt": "x", "name": "123"}),
    (400, "invalid_request", "POST", "/polykv/pools", {"tokens": [10**6]}),
    (400, "invalid_request", "POST", "/polykv/pools/1/fork", {"own_tokens": [1], "branch_pos": 500}),
    (400, "invalid_request", "DELETE", "/polykv/pools/1?recursive=perhaps", None),
    (400, "invalid_request", "POST", "/polykv/match", {}),
    (404, "pool_not_found", "GET", "/polykv/pools/77", None),
    (404, "pool_not_found", "DELETE", "/polykv/pools/nobody", None),
    (404, "pool_not_found", "POST", "/polykv/pools/77/fork", {"own_tokens": [1]}),
    (404, "pool_not_found", "POST", "/polykv/match", {"prompt": "x", "pool_id": "nobody"}),
    (404, "session_not_found", "GET", "/polykv/sessions/nobody", None),
    (404, "session_not_found", "DELETE", "/polykv/sessions/nobody", None),
    (404, "not_found", "GET", "/polykv/nothing", None),
    (404, "not_found", "GET", "/polykv/engine/stats", None),
    (405, "method_not_allowed", "PUT", "/polykv/pools/1", None),
    (409, "name_taken", "POST", "/polykv/pools", {"prompt": "x", "name": "root"}),
    (409, "prefix_mismatch", "POST", "/polykv/pools/1/fork", {"prompt": "@ nothing in common"}),
    (409, "prefix_mismatch", "POST", "/polykv/pools/1/fork", {"prompt": TEXT[:10] + "@" * 20, "branch_pos": 20}),
    (409, "pool_has_children", "DELETE", "/polykv/pools/root", None),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
async def test_control_plane(proxy: Proxy, refusal: tuple[int, str, str, str, Any]) -> None:
    status, code, method, path, body = refusal
    await made(proxy, prompt=TEXT, name="root")
    await made(proxy, "/polykv/pools/root/fork", own_tokens=[1])
    answer = await proxy.client.request(method, path, json=body)
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (status, code)
    assert answer.headers.get("x-should-retry") == ("false" if status == 409 else None)
    if code == "prefix_mismatch":
        assert error["divergence_pos"] == (10 if "branch_pos" in body else 0)
    assert len((await proxy.client.get("/polykv/pools")).json()["pools"]) == 2


async def test_cache_full_and_sequences_gone(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(n_cells=500, max_pools=2) as engine, make_proxy(engine.url, pin_max_fraction=1) as proxy:
        await made(proxy, tokens=[1] * 300, name="root", pin=True)
        answer = await proxy.client.post("/polykv/pools", json={"tokens": [2] * 300})
        assert (answer.status_code, error_of(answer)["code"]) == (507, "kv_exhausted")
        assert error_of(answer)["cells_missing"] == 100
        answer = await proxy.client.post("/polykv/pools/root/fork", json={"tokens": [1] * 100 + [2] * 250})
        assert (answer.status_code, error_of(answer)["cells_missing"]) == (507, 50)
        await made(proxy, tokens=[3], pin=True)
        answer = await proxy.client.post("/polykv/pools", json={"tokens": [4]})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "seq_ids_exhausted")
        assert 1 <= int(answer.headers["Retry-After"]) <= 60


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_finds_no_room(make_proxy: ProxyMaker, path: str, stream: bool) -> None:
    """Not even a stream begins: clients retry a 503, and nobody retries a 200."""
    async with FakeEngine(n_cells=1000) as engine, make_proxy(engine.url, pin_max_fraction=1) as proxy:
        await made(proxy, tokens=[1] * 600, pin=True)
        body = body_of(path, "x" * 200, stream=stream)
        answer = await proxy.client.post(path, json=body)
        error = error_of(answer)
        assert (answer.status_code, error["code"]) == (503, "kv_exhausted")
        assert error["cells_missing"] > 0
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert engine.requests(path) == []


async def test_a_prefix_too_long_has_llama_servers_type_and_numbers(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(n_ctx_slot=100) as engine, make_proxy(engine.url) as proxy:
        await made(proxy, tokens=[1])
        own = "/polykv/pools/1/fork"
        orders = (
            ("/polykv/pools", {"tokens": [1] * 200}, 200),
            (own, {"own_tokens": [1] * 99}, 100),  # with the parent's
            (own, {"own_tokens": [1] * 199}, 199),  # refused by its own length, whatever the parent has
        )
        for path, body, n_tokens in orders:
            answer = await proxy.client.post(path, json=body)
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == (
                "exceed_context_size_error",
                n_tokens,
                100,
            )


@pytest.mark.parametrize("given", [{"prompt": TEXT[:9]}, {"tokens": [89]}, {"tokens": [10**6]}, {"own_tokens": [300]}])
async def test_param_is_the_field_that_was_given(proxy: Proxy, given: dict[str, Any]) -> None:
    await made(proxy, prompt=TEXT)
    answer = await proxy.client.post("/polykv/pools/1/fork", json=given)
    assert (answer.status_code, [error_of(answer)["param"]]) == (400, list(given))


async def test_draining_makes_no_pools(proxy: Proxy) -> None:
    await made(proxy, prompt=TEXT)
    proxy.relay.drain()
    assert await refused(proxy, "POST", "/polykv/pools", {"prompt": TEXT}) == (503, "draining")
    assert await refused(proxy, "POST", "/polykv/pools/1/fork", {"own_tokens": [1]}) == (503, "draining")
    assert (await proxy.client.delete("/polykv/pools/1")).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_nobody_upstream_on_the_data_plane(engine: FakeEngine, proxy: Proxy, path: str) -> None:
    await engine.kill()
    answer = await proxy.client.post(path, json=body_of(path))
    assert (answer.status_code, error_of(answer)["code"]) == (503, "upstream_unavailable")
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    messages = path == "/v1/messages"
    assert answer.json().get("type") == ("error" if messages else None)
    assert error_of(answer)["type"] == ("overloaded_error" if messages else "unavailable_error")


async def test_loading_and_draining_say_when_to_come_back(engine: FakeEngine, proxy: Proxy) -> None:
    engine.loading = True
    answer = await proxy.client.post("/polykv/pools", json={"prompt": "x"})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "loading")
    assert answer.headers["Retry-After"].isdigit()
    answer = await proxy.client.post("/completion", json={"prompt": "x"})
    assert (answer.status_code, answer.headers["Retry-After"].isdigit()) == (503, True)
    engine.loading = False
    proxy.relay.drain()
    answer = await proxy.client.post("/completion", json={"prompt": "x"})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "draining")
    assert answer.headers["Retry-After"].isdigit()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/polykv/pools", None),
        ("POST", "/polykv/pools", {"prompt": "x"}),
        ("POST", "/polykv/match", {"prompt": "x"}),
        ("GET", "/polykv/pools/1", None),
        ("POST", "/polykv/pools/1/fork", {"own_tokens": [1]}),
        ("DELETE", "/polykv/pools/1", None),
    ],
)
async def test_an_engine_without_hooks_is_a_501_here_and_relayed_there(
    make_proxy: ProxyMaker, method: str, path: str, body: Any
) -> None:
    async with FakeEngine(hooks=False) as engine, make_proxy(engine.url) as proxy:
        assert await refused(proxy, method, path, body) == (501, "engine_unpatched")
        assert (await proxy.client.get("/polykv/health")).json()["engine"]["hooks"] is False
        receipt = await ask(proxy, TEXT, pool_id=1, session_id="s")
        assert (receipt["pool_id"], receipt["miss_reason"]) == (None, "no_pool")
        seen = engine.requests("/completion")[-1].json()
        assert not [key for key in seen if key.startswith("shared_")]


@pytest.mark.parametrize("path", PATHS)
async def test_the_data_plane_never_answers_409(engine: FakeEngine, proxy: Proxy, path: str) -> None:
    await made(proxy, prompt=TEXT)
    engine.on("render", "request", reply(409, {"error": {"code": 409, "message": "x", "type": "polykv_error"}}))
    for fields in ({"pool_id": 1}, {"pool_id": 1, "shared_prefix_n_tokens": 10**6}, {"shared_pool_slot": 0}):
        answer = await proxy.client.post(path, json=body_of(path, **fields))
        assert answer.status_code in (200, 400)


async def test_overflow_is_the_engines_own_answer(proxy: Proxy) -> None:
    body = {"prompt": "x" * 20_000, "session_id": "s"}
    answer = await proxy.client.post("/completion", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (20_000, 16_384)
    assert "src" not in answer.json()
