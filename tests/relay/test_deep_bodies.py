"""Bodies with more levels than can be written again: the engine's business, and nobody's bug."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from polykv_proxy.json_levels import MAX_LEVELS, is_too_deep
from polykv_proxy.relay.dialects import parse_json
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy
from tests.relay.dialect_cases import PATHS, body_of


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as engine:
        yield engine


def deep(n: int) -> bytes:
    return b"[" * n + b"]" * n


def body(path: str, where: str, n: int, **fields: Any) -> bytes:
    return json.dumps(body_of(path, **{where: "DEEP"}, **fields)).encode().replace(b'"DEEP"', deep(n))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n_levels", [MAX_LEVELS - 1, MAX_LEVELS, 900, 2000])
@pytest.mark.parametrize("where", ["tools", "metadata", "chat_template_kwargs"])
async def test_they_are_relayed_as_they_are(
    engine: FakeEngine, proxy: Proxy, path: str, n_levels: int, where: str
) -> None:
    if n_levels != MAX_LEVELS:
        await proxy.pool(tokens=[1, 2, 3])
    raw, said = body(path, where, n_levels), {"content-type": "application/json"}
    for _ in range(2):
        through = await proxy.client.post(path, content=raw, headers=said)
        direct = await proxy.client.post(engine.url + path, content=raw, headers=said)
        assert through.status_code == direct.status_code
    if n_levels >= MAX_LEVELS:
        assert [received.body for received in engine.requests(path)] == [raw] * 4


@pytest.mark.parametrize("n_levels", [300, 2000])
async def test_fields_of_ours_cannot_be_taken_out_of_them(engine: FakeEngine, proxy: Proxy, n_levels: int) -> None:
    path = "/v1/chat/completions"
    answer = await proxy.client.post(path, content=body(path, "metadata", n_levels, session_id="s"))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "the body has more than 250 levels: fields of the proxy cannot be taken out"
    )
    assert not engine.requests(path)


@pytest.mark.parametrize("n_levels", [300, 2000])
@pytest.mark.parametrize("path", ["/polykv/pools", "/polykv/match"])
async def test_the_control_plane_refuses_them(proxy: Proxy, path: str, n_levels: int) -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": "DEEP"}).encode()
    answer = await proxy.client.post(path, content=raw.replace(b'"DEEP"', deep(n_levels)))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body has more than 250 levels"


@pytest.mark.parametrize(("n_levels", "too_deep"), [(1, False), (249, False), (250, True), (1000, True)])
def test_where_it_ends(n_levels: int, too_deep: bool) -> None:
    raw = b'{"a":' + deep(n_levels) + b"}"
    assert is_too_deep(raw, parse_json(raw)) is too_deep


def test_many_brackets_are_not_many_levels() -> None:
    raw = b"[" + b"[]," * 5000 + b"[]]"
    assert not is_too_deep(raw, parse_json(raw))
