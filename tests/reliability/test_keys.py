"""Who may do what, on the proxy as it is served; no key gets anywhere, and no spelling of a path opens another door."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import OK, RawEngine, exchange, get, post
from tests.relay.test_doors import test_shut as shut_doors

DATA, ADMIN, WRONG, UPSTREAM = "data-key-7f3a91", "admin-key-c04d2e", "wrong-key-99b8f1", "engine-key-5512aa"
KEYS = {
    "open": {},
    "data key": {"api_key": DATA},
    "admin key": {"admin_key": ADMIN},
    "both": {"api_key": DATA, "admin_key": ADMIN},
}
SHOWN = {"nothing": "", "the data key": DATA, "the admin key": ADMIN, "a wrong key": WRONG}
WAYS = ["Authorization: Bearer {}\r\n", "X-Api-Key: {}\r\n"]
SERVED = 200
"""Stands for: it gets in. What comes then is up to the engine."""

# settings → key shown → (data plane, control plane)
MATRIX: dict[str, dict[str, tuple[int, int]]] = {
    "open": dict.fromkeys(SHOWN, (SERVED, SERVED)),
    "data key": {
        "nothing": (401, 401),
        "the data key": (SERVED, SERVED),
        "the admin key": (401, 401),
        "a wrong key": (401, 401),
    },
    "admin key": {
        "nothing": (SERVED, 401),
        "the data key": (SERVED, 401),
        "the admin key": (SERVED, SERVED),
        "a wrong key": (SERVED, 401),
    },
    "both": {
        "nothing": (401, 401),
        "the data key": (SERVED, 403),
        "the admin key": (SERVED, SERVED),
        "a wrong key": (401, 401),
    },
}
BODY = b'{"prompt":"x"}'
DATA_PLANE = [
    ("POST", "/completion"),
    ("POST", "/tokenize"),
    ("GET", "/v1/models"),
    ("GET", "/props"),
    ("GET", "/metrics"),
]
CONTROL_PLANE = [
    ("GET", "/polykv/pools"),
    ("POST", "/polykv/pools"),
    ("DELETE", "/polykv/pools/1"),
    ("POST", "/polykv/pools/1/pin"),
    ("GET", "/polykv/health"),
    ("GET", "/polykv/tps"),
    ("GET", "/polykv/requests"),
    ("GET", "/polykv/openapi.json"),
    ("GET", "/slots"),
]


def request(method: str, target: str, headers: str) -> bytes:
    return post(target, BODY, headers) if method == "POST" else get(target, headers, method)


@asynccontextmanager
async def served(make_proxy: ProxyMaker, settings: str) -> AsyncIterator[tuple[RawEngine, Proxy]]:
    """In front of an engine that shows every byte it gets, and has a key of its own."""
    script = [OK + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"]
    own = KEYS[settings] | {"upstream_api_key": UPSTREAM}
    async with RawEngine(script) as engine, make_proxy(engine.url, **own) as proxy:
        yield engine, proxy


@pytest.mark.parametrize("way", WAYS, ids=["bearer", "x-api-key"])
@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("settings", KEYS)
async def test_the_matrix_and_no_key_gets_anywhere(
    make_proxy: ProxyMaker, caplog: pytest.LogCaptureFixture, settings: str, shown: str, way: str
) -> None:
    caplog.set_level(logging.DEBUG)
    headers = way.format(SHOWN[shown]) if SHOWN[shown] else ""
    replies = b""
    async with served(make_proxy, settings) as (engine, proxy):
        for routes, expected in zip((DATA_PLANE, CONTROL_PLANE), MATRIX[settings][shown], strict=True):
            for method, target in routes:
                head, body = await exchange(proxy.url, request(method, target, headers))
                replies += head + body
                status = int(head.split(b" ")[1])
                got_in = status not in (401, 403)
                assert got_in == (expected == SERVED), (method, target, status)
                if not got_in:
                    assert (status, orjson.loads(body)["src"]) == (expected, "polykv_proxy"), (method, target)
        if MATRIX[settings][shown][0] == SERVED:
            assert len(engine.heads) >= 3
        else:
            assert engine.heads == []
        for head in engine.heads:
            assert f"\r\nAuthorization: Bearer {UPSTREAM}\r\n".encode() in head, "the engine's own key"
        upstream = b"".join([*engine.heads, *engine.bodies])
    said = caplog.text.encode()
    for key in (DATA, ADMIN, WRONG):
        assert key.encode() not in upstream
        assert key.encode() not in said
        assert key.encode() not in replies
    assert UPSTREAM.encode() not in said + replies


SPELLED = next(mark.args[1] for mark in shut_doors.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
WORSE = ["/polykv/../polykv/engine/stats", "/v1/%2e%2e/polykv/pools", "/v1/models/..%2f..%2fpolykv/engine/pools"]


@pytest.mark.parametrize("settings", ["open", "both"])
async def test_no_spelling_reaches_control_routes_or_the_engines_hooks(make_proxy: ProxyMaker, settings: str) -> None:
    """Whoever asks, with whatever method: the engine hears nothing of it, and the proxy does nothing."""
    headers = f"Authorization: Bearer {ADMIN if settings == 'both' else WRONG}\r\n"
    async with served(make_proxy, settings) as (engine, proxy):
        for target in [*SPELLED, *WORSE]:
            for method in ("GET", "POST", "DELETE", "PUT"):
                head, body = await exchange(proxy.url, request(method, target, headers))
                assert head.split(b" ")[1] == b"404", (method, target, head)
                assert orjson.loads(body)["src"] == "polykv_proxy"
        assert engine.heads == []


FOREIGN = [
    "Host: evil.example\r\n",
    "Host: 127.0.0.1.evil.example:8090\r\n",
    "Origin: https://evil.example\r\n",
    "Origin: null\r\n",
]


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_without_a_key_foreign_pages_manage_nothing(make_proxy: ProxyMaker, foreign: str) -> None:
    async with served(make_proxy, "open") as (engine, proxy):
        for method, target in CONTROL_PLANE:
            sent = request(method, target, foreign)
            if foreign.startswith("Host"):
                sent = sent.replace(b"Host: localhost\r\n", b"", 1)
            head, body = await exchange(proxy.url, sent)
            assert (head.split(b" ")[1], orjson.loads(body)["error"]["code"]) == (b"403", "forbidden"), (method, target)
        assert engine.heads == []
        head, _ = await exchange(proxy.url, request("GET", "/v1/models", "Origin: https://evil.example\r\n"))
        assert head.startswith(b"HTTP/1.1 200 "), "the data plane is the engine's, and its rules"


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_with_a_key_it_is_the_key_that_counts(make_proxy: ProxyMaker, foreign: str) -> None:
    async with served(make_proxy, "both") as (_, proxy):
        sent = request("GET", "/polykv/sessions", foreign + f"Authorization: Bearer {ADMIN}\r\n")
        if foreign.startswith("Host"):
            sent = sent.replace(b"Host: localhost\r\n", b"", 1)
        head, _ = await exchange(proxy.url, sent)
        assert head.split(b" ")[1] not in (b"401", b"403")


async def test_a_key_in_a_broken_request_is_not_in_the_log_either(
    make_proxy: ProxyMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    broken: list[Any] = [
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer %s\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Api-Key: a\r\n %s\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\n\r\n",
        b"GET /v1/models?key=%s HTTP/1.1\r\nHost: x\r\n\r\n",
        b'POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{"%s',
    ]
    async with served(make_proxy, "both") as (_, proxy):
        for template in broken:
            _, body = await exchange(proxy.url, template % DATA.encode())
            assert DATA.encode() not in body
    assert DATA not in caplog.text
