"""Requests that the proxy refuses itself: who is named in the reply, what stays behind, and when a pool must exist."""

import asyncio
from typing import Any

import pytest

from polykv_proxy.turns import Session
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, SYSTEM, body_of
from tests.relay.raw import until
from tests.relay.test_leaving import all_at_rest

CHAT, COMPLETION = "/v1/chat/completions", "/completion"
STRICT = {"x-polykv-strict": "1"}
UNPOOLED: list[dict[str, Any]] = [
    {},
    {"cache_prompt": False},
    {"id_slot": 1},
    {"lora": [{"id": 0, "scale": 1.0}]},
    {"prompt": [{"prompt_string": "x", "multimodal_data": ["eA=="]}]},
    {"prompt": ["a", "b"]},
    {"n": 2},
    {"n_cmpl": 2},
]
PICTURES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 1}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}),
]


def sessions(proxy: Proxy) -> list[Session]:
    return list(proxy.control.sessions)


@pytest.mark.parametrize("fields", UNPOOLED)
@pytest.mark.parametrize("engine_is", [{}, {"share": "no"}, {"hooks": False}])
@pytest.mark.parametrize("mode", ["auto", "explicit"])
async def test_strict_and_no_such_pool_is_a_404_whatever_else_is_true(
    make_proxy: ProxyMaker, fields: dict[str, Any], engine_is: dict[str, Any], mode: str
) -> None:
    async with FakeEngine(**engine_is) as engine, make_proxy(engine.url, mode=mode) as proxy:
        body = {"prompt": "x", "n_predict": 1, "pool_id": "nobody", **fields}
        answer = await proxy.client.post(COMPLETION, json=body, headers=STRICT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "pool_not_found")
        assert answer.json()["error"]["param"] == "pool_id"
        body.pop("pool_id")
        answer = await proxy.client.post(COMPLETION, json=body, headers={**STRICT, "x-pool-id": "17"})
        assert answer.status_code == 404
        assert engine.requests(COMPLETION) == []
        assert sessions(proxy) == []


@pytest.mark.parametrize(("path", "body"), PICTURES)
@pytest.mark.parametrize("mode", ["auto", "explicit"])
async def test_strict_and_no_such_pool_is_a_404_for_a_picture(
    engine: FakeEngine, make_proxy: ProxyMaker, path: str, body: dict[str, Any], mode: str
) -> None:
    async with make_proxy(engine.url, mode=mode) as proxy:
        answer = await proxy.client.post(path, json=body | {"pool_id": "nobody", "n": 2}, headers=STRICT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "pool_not_found")
        assert engine.requests(path) == []
        answer = await proxy.client.post(path, json=body | {"pool_id": "nobody"})
        assert (answer.status_code, answer.json()["polykv"]["miss_reason"]) == (200, "incompatible")


@pytest.mark.parametrize("content", [b"[1]", b'"text"', b"7"])
@pytest.mark.parametrize("mode", ["auto", "explicit"])
async def test_strict_holds_for_a_body_that_is_no_object(
    engine: FakeEngine, make_proxy: ProxyMaker, content: bytes, mode: str
) -> None:
    async with make_proxy(engine.url, mode=mode) as proxy:
        answer = await proxy.client.post(COMPLETION, content=content, headers={**STRICT, "x-pool-id": "nobody"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "pool_not_found")
        assert engine.requests(COMPLETION) == []


@pytest.mark.parametrize("place", ["render", "materialize"])
async def test_strict_and_a_pool_that_is_released_meanwhile(engine: FakeEngine, proxy: Proxy, place: str) -> None:
    """While the prompt is compared with it, or while it is made resident."""
    made = await proxy.pool([104] * 20, name="base")
    (await proxy.client.post("/polykv/pools/base/evict?to=cold")).raise_for_status()
    hold = Hold()
    engine.on(place, "request", hold)
    body = {"prompt": "h" * 30, "n_predict": 1, "pool_id": "base"}
    asked = [asyncio.create_task(proxy.client.post(COMPLETION, json=body, headers=h)) for h in (STRICT, {})]
    await hold.reached()
    (await proxy.client.delete(f"/polykv/pools/{made['pool_id']}")).raise_for_status()
    hold.release()
    strict, other = await asyncio.gather(*asked)
    assert (strict.status_code, strict.json()["error"]["code"]) == (404, "pool_not_found")
    assert (other.status_code, other.json()["polykv"]["miss_reason"]) == (200, "no_pool")


async def test_strict_holds_for_a_body_that_is_not_read(proxy: Proxy, engine: FakeEngine) -> None:
    headers = {**STRICT, "x-pool-id": "nobody", "content-encoding": "gzip"}
    answer = await proxy.client.post(COMPLETION, content=b"zzz", headers=headers)
    assert answer.status_code == 404
    assert engine.requests(COMPLETION) == []


async def test_strict_and_a_pool_that_is_there(proxy: Proxy) -> None:
    await proxy.pool([104] * 20, name="base")
    for fields in ({}, {"cache_prompt": False}, {"id_slot": 1}):
        body = {"prompt": "h" * 30, "n_predict": 1, "pool_id": "base", **fields}
        answer = await proxy.client.post(COMPLETION, json=body, headers=STRICT)
        assert answer.status_code == 200
        assert answer.json()["polykv"]["miss_reason"] == ("incompatible" if fields else None)


async def test_our_refusals_name_the_session_that_was_named(proxy: Proxy) -> None:
    await proxy.pool([104] * 20, name="base")
    cases = [
        ({"pool_id": "base", "shared_prefix_n_tokens": 999}, 400),
        ({"pool_id": "zz"}, 404),
        ({"pool_id": 1.5}, 400),
        ({"overcommit": "yes"}, 400),
    ]
    for fields, status in cases:
        for by_header in (False, True):
            named = {"x-session-id": "a/1"} if by_header else {}
            body = {"prompt": "h" * 30, **fields, **({} if by_header else {"session_id": "a/1"})}
            answer = await proxy.client.post(COMPLETION, json=body, headers=STRICT | named)
            assert answer.status_code == status, answer.text
            assert answer.headers["x-session-id"] == "a/1"
            assert answer.headers["x-cached-prefix-tokens"] == "0"
            assert "x-pool-id" not in answer.headers
            assert answer.headers["x-request-id"]


async def test_a_body_that_is_refused_unread(make_proxy: ProxyMaker, engine: FakeEngine) -> None:
    async with make_proxy(engine.url, max_body_bytes=1024) as proxy:
        for content, status in ((b"x" * 2000, 413), (b'{"prompt":', 400)):
            answer = await proxy.client.post(COMPLETION, content=content, headers={"x-session-id": "s"})
            assert (answer.status_code, answer.headers["x-session-id"]) == (status, "s")
            assert answer.headers["x-cached-prefix-tokens"] == "0"
        proxy.relay.drain()
        answer = await proxy.chat(headers={"x-session-id": "s"})
        assert (answer.status_code, answer.headers["x-session-id"]) == (503, "s")


async def test_refusals_of_requests_without_fields_say_nothing_about_sessions(proxy: Proxy) -> None:
    answer = await proxy.client.post(COMPLETION, content=b"{")
    assert answer.status_code == 400
    assert not {"x-session-id", "x-cached-prefix-tokens"} & set(answer.headers)


async def test_a_dead_engine_is_refused_with_the_headers_of_the_request(engine: FakeEngine, proxy: Proxy) -> None:
    made = await proxy.pool([104] * 20)
    answer = await proxy.client.post(COMPLETION, json={"prompt": "h" * 30, "session_id": "s", "n_predict": 2})
    assert answer.headers["x-cached-prefix-tokens"] == "20"
    engine.on(COMPLETION, "request", engine.die())
    answer = await proxy.client.post(COMPLETION, json={"prompt": "h" * 30, "session_id": "s"})
    assert answer.status_code == 503
    assert answer.headers["x-session-id"] == "s"
    assert answer.headers["x-pool-id"] == str(made["pool_id"])
    assert float(answer.headers["x-session-tps"]) > 0


@pytest.mark.parametrize("path", PATHS)
async def test_a_refused_request_leaves_no_anonymous_session(proxy: Proxy, engine: FakeEngine, path: str) -> None:
    await proxy.pool([104] * 20, name="base")
    asked = [
        (body_of(path, pool_id="zz"), STRICT, 404),
        (body_of(path, pool_id="base", shared_prefix_n_tokens=999), {}, 400),
        (body_of(path, pool_id=[]), {}, 400),
        (body_of(path, "x" * 20_000), {}, 400),  # by the engine: longer than a context
    ]
    for body, headers, status in asked:
        answer = await proxy.client.post(path, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        assert sessions(proxy) == []
    assert {proxy.control.slots.owner_of(slot.id) for slot in engine.slots} == {None}
    await all_at_rest(proxy)


async def test_nor_does_one_that_left_while_it_waited(proxy: Proxy, engine: FakeEngine) -> None:
    hold = Hold()
    engine.on("/v1/chat/completions", "prefill", hold, times=4)
    tasks = [asyncio.create_task(proxy.chat(str(i))) for i in range(5)]
    await until(lambda: hold.n == 4 and proxy.relay.desk.n_waiting == 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not sessions(proxy))
    hold.release()
    await all_at_rest(proxy)


async def test_a_session_that_was_answered_before_survives_a_refusal(proxy: Proxy) -> None:
    first = [{"role": "user", "content": SYSTEM}]
    answer = await proxy.client.post("/v1/chat/completions", json={"messages": first, "max_tokens": 2})
    said = answer.json()["choices"][0]["message"]
    (session,) = sessions(proxy)
    more = [*first, said, {"role": "user", "content": "and"}]
    body = {"messages": more, "pool_id": "zz", "shared_prefix_n_tokens": 5}
    answer = await proxy.client.post("/v1/chat/completions", json=body, headers=STRICT)
    assert answer.status_code == 404
    assert sessions(proxy) == [session]
    answer = await proxy.client.post("/v1/chat/completions", json={"messages": more, "max_tokens": 2})
    assert answer.status_code == 200
    assert sessions(proxy) == [session]
    assert session.n_turns == 2


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/polykv/pools", {"GET", "HEAD", "POST"}),
        ("/polykv/pools/1", {"GET", "HEAD", "DELETE"}),
        ("/polykv/pools/1/fork", {"POST"}),
        ("/polykv/health", {"GET", "HEAD"}),
    ],
)
@pytest.mark.parametrize("method", ["PUT", "OPTIONS"])
async def test_a_405_says_what_is_allowed(proxy: Proxy, path: str, allowed: set[str], method: str) -> None:
    """OPTIONS too: no page of another origin may manage pools, so there is nothing to answer to its preflight."""
    answer = await proxy.client.request(method, path, json={})
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert answer.json()["error"]["code"] == "method_not_allowed"
