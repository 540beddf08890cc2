"""Every error has its class, with the right numbers, whoever answered it; and all survive pickling."""

import copy
import json
import pickle
from typing import Any

import httpx
import pytest

from polykv_proxy import client as sdk
from polykv_proxy import errors as server
from polykv_proxy.client import AsyncPolyKVClient, Capacity, PolyKVClient
from polykv_proxy.client.errors import BY_CODE, BY_STATUS, error_of
from polykv_proxy.routes.answers import error_answer
from tests.client.conftest import Asked
from tests.fake_engine import FakeEngine
from tests.relay.conftest import ProxyMaker

A = [65] * 20


async def raised(asked: Asked, method: str, /, *args: Any, **kwargs: Any) -> Any:
    with pytest.raises(sdk.PolyKVError) as caught:
        await asked(method, *args, **kwargs)
    return caught.value


# From the proxy ----------------------------------------------------------------------------------------------------


async def test_what_is_not_there(asked: Asked) -> None:
    error = await raised(asked, "pool", "nobody")
    assert type(error) is sdk.PoolNotFoundError
    assert (error.status_code, error.code) == (404, "pool_not_found")
    assert "nobody" in error.message
    assert len(error.request_id) > 8
    assert type(await raised(asked, "session", "nobody")) is sdk.SessionNotFoundError


async def test_what_is_wrong_with_the_request(asked: Asked) -> None:
    error = await raised(asked, "create_pool", tokens=A, name="7")
    assert type(error) is sdk.InvalidRequestError
    assert (error.status_code, error.param) == (400, "name")
    assert (await raised(asked, "set_admission", "nobody", {"target_tps_per_session": -1})).param is not None


async def test_conflicts_tell_where(asked: Asked) -> None:
    await asked("create_pool", tokens=A, name="root")
    error = await raised(asked, "fork_pool", "root", branch_pos=20, tokens=[*A[:7], *[70] * 20])
    assert type(error) is sdk.PoolConflictError
    assert (error.status_code, error.code, error.matched_len) == (409, "prefix_mismatch", 7)
    taken = await raised(asked, "create_pool", tokens=[1], name="root")
    assert (type(taken), taken.code, taken.matched_len) == (sdk.PoolConflictError, "name_taken", None)
    explicit = await raised(asked, "complete", [*A[:3], 70], pool_id="root", shared_prefix_n_tokens=10)
    assert (type(explicit), explicit.status_code, explicit.matched_len) == (sdk.PoolConflictError, 400, 3)


async def test_a_pool_with_children_is_busy(asked: Asked) -> None:
    await asked("create_pool", tokens=A, name="root")
    await asked("fork_pool", "root", tokens=[*A, 66])
    error = await raised(asked, "release", "root")
    assert (type(error), error.status_code, error.code) == (sdk.PoolBusyError, 409, "pool_has_children")


async def test_a_prompt_that_no_slot_takes(asked: Asked, engine: FakeEngine) -> None:
    n = engine.n_ctx_slot + 5
    for error in (
        await raised(asked, "create_pool", tokens=[65] * n),  # the proxy's own
        await raised(asked, "complete", [65] * n, n_predict=1),  # llama-server's
    ):
        assert type(error) is sdk.PolyKVContextOverflowError
        assert (error.status_code, error.n_prompt_tokens, error.n_ctx) == (400, n, engine.n_ctx_slot)


async def test_nobody_serves(asked: Asked, engine: FakeEngine) -> None:
    await asked("health")
    await engine.kill()
    error = await raised(asked, "complete", A, n_predict=1, session_id="s")
    assert isinstance(error, sdk.PolyKVUnavailableError)
    assert error.status_code in (502, 503)
    assert error.code in ("upstream_unavailable", "upstream_error")


async def test_a_stream_that_breaks_off_is_no_answer(asked: Asked, engine: FakeEngine) -> None:
    engine.on("/v1/chat/completions", "chunk:2", engine.die())
    error = await raised(asked, "stream_chat", [{"role": "user", "content": "Hi"}], session_id="s", max_tokens=8)
    assert isinstance(error, sdk.PolyKVUnavailableError)
    assert error.request_id is not None


async def test_keys(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, api_key="data", admin_key="admin") as proxy:
        async with AsyncPolyKVClient(proxy.url) as none, AsyncPolyKVClient(proxy.url, api_key="data") as data:
            for client, status, method in ((none, 401, none.tokenize("a")), (data, 403, data.pools())):
                with pytest.raises(sdk.AuthenticationError) as caught:
                    await method
                assert caught.value.status_code == status, client
            assert await data.tokenize("a") == [97]
        async with AsyncPolyKVClient(proxy.url, api_key="data", admin_key="admin") as both:
            assert (await both.pools()).pools == []
            assert await both.tokenize("a") == [97]
        async with AsyncPolyKVClient(proxy.url, admin_key="admin") as admin:
            assert await admin.tokenize("a") == [97]


# From what any proxy may answer ------------------------------------------------------------------------------------


def answered(error: server.PolyKVError, **headers: str) -> sdk.PolyKVError:
    """As it comes over the wire."""
    answer = error_answer(error)
    assert isinstance(answer.body, bytes)
    return error_of(answer.status, httpx.Headers(dict(answer.headers) | headers), answer.body, pool_id="p")


EXPECTED: dict[str, type[sdk.PolyKVError]] = {
    "invalid_request": sdk.InvalidRequestError,
    "invalid_json": sdk.InvalidRequestError,
    "invalid_api_key": sdk.AuthenticationError,
    "forbidden": sdk.AuthenticationError,
    "pool_not_found": sdk.PoolNotFoundError,
    "session_not_found": sdk.SessionNotFoundError,
    "not_found": sdk.InvalidRequestError,
    "method_not_allowed": sdk.InvalidRequestError,
    "body_too_large": sdk.InvalidRequestError,
    "head_timeout": sdk.InvalidRequestError,
    "body_timeout": sdk.InvalidRequestError,
    "headers_too_large": sdk.InvalidRequestError,
    "name_taken": sdk.PoolConflictError,
    "pin_budget": sdk.PoolConflictError,
    "session_not_resident": sdk.PoolConflictError,
    "saving_refused": sdk.PoolConflictError,
    "pool_has_children": sdk.PoolBusyError,
    "pool_in_use": sdk.PoolBusyError,
    "seq_ids_exhausted": sdk.SeqBudgetExhaustedError,
    "draining": sdk.PolyKVUnavailableError,
    "upstream_unavailable": sdk.PolyKVUnavailableError,
    "loading": sdk.PolyKVUnavailableError,
    "upstream_timeout": sdk.PolyKVUnavailableError,
    "upstream_restarted": sdk.PolyKVUnavailableError,
    "journal_failed": sdk.PolyKVUnavailableError,
    "engine_unpatched": sdk.PolyKVError,
    "internal_error": sdk.PolyKVError,
}


@pytest.mark.parametrize("code", EXPECTED)
def test_class_of_the_proxys_own_errors(code: str) -> None:
    kinds = [kind for kind in subclasses(server.PolyKVError) if kind.code == code and plain(kind)]
    assert kinds
    for kind in kinds:
        error = answered(kind("said", param="there"), **{"x-request-id": "r-1"})
        assert type(error) is EXPECTED[code], kind
        assert (str(error), error.code, error.status_code) == ("said", code, kind.status)
        assert (error.param, error.request_id) == ("there", "r-1")
        asked_s = kind("said").retry_after_s
        assert error.retry_after == (None if asked_s is None else max(1, asked_s))


def subclasses(kind: type[server.PolyKVError]) -> set[type[server.PolyKVError]]:
    return {kind}.union(*(subclasses(heir) for heir in kind.__subclasses__()))


def plain(kind: type[server.PolyKVError]) -> bool:
    """It takes nothing but a message."""
    return kind.__init__ is server.PolyKVError.__init__


def test_cells_and_positions() -> None:
    short = answered(server.KvExhausted("full", cells_missing=71))
    assert isinstance(short, sdk.KvExhaustedError)
    assert (short.cells_missing, short.status_code) == (71, 507)
    branch = answered(server.BranchNotExact("at 5 instead", branch_pos=5))
    assert type(branch) is sdk.PoolConflictError
    assert branch.body["branch_pos"] == 5


@pytest.mark.parametrize("code", ["pool_saturated", "queue_full", "queue_timeout"])
def test_saturated(code: str) -> None:
    headers = {"retry-after": "7", "retry-after-ms": "6750", "x-polykv-reason": "projected mean tps below floor"}
    error = error_of(429, headers, json.dumps({"error": {"message": "no", "code": code}}).encode(), pool_id=26)
    assert isinstance(error, sdk.PoolSaturatedError)
    assert (error.retry_after, error.reason, error.pool_id) == (6.75, "projected mean tps below floor", 26)
    assert (error.capacity, error.code) == (None, code)


def test_a_gate_that_cannot_see_is_saturated_too() -> None:
    body = json.dumps({"error": {"message": "no", "code": "upstream_unavailable"}}).encode()
    assert isinstance(error_of(503, {"x-polykv-reason": "measurement stale"}, body), sdk.PoolSaturatedError)
    assert type(error_of(503, {}, body)) is sdk.PolyKVUnavailableError


NOT_FOUND = b'{"error": {"code": 404, "message": "no", "type": "not_found_error"}}'
RESTARTED = b'{"error": {"message": "gone", "code": "upstream_restarted"}}'


@pytest.mark.parametrize(
    ("status", "content", "kind", "code"),
    [
        (
            404,
            NOT_FOUND,
            sdk.InvalidRequestError,
            "not_found_error",
        ),
        (500, b'{"error": {"code": 500, "message": "no", "type": "server_error"}}', sdk.PolyKVError, "server_error"),
        (429, b"slow down", sdk.PoolSaturatedError, None),
        (502, b"<html>", sdk.PolyKVUnavailableError, None),
        (418, b"[]", sdk.InvalidRequestError, None),
        (409, b'{"error": "words"}', sdk.PoolConflictError, None),
        (
            None,
            RESTARTED,
            sdk.PolyKVUnavailableError,
            "upstream_restarted",
        ),
    ],
)
def test_errors_of_others(status: int | None, content: bytes, kind: type[sdk.PolyKVError], code: str | None) -> None:
    error = error_of(status, {}, content)
    assert type(error) is kind
    assert (error.status_code, error.code, error.retry_after) == (status, code, None)
    assert error.message


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "Mon, 30 Nov 2026 12:00:00 GMT"])
def test_a_retry_after_that_is_no_time(value: str) -> None:
    assert error_of(429, {"retry-after": value}, b"").retry_after is None


# Pickling ----------------------------------------------------------------------------------------------------------

KINDS = {kind for kind in vars(sdk).values() if isinstance(kind, type) and issubclass(kind, sdk.PolyKVError)}


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__))
def test_errors_survive_pickling(kind: type[sdk.PolyKVError]) -> None:
    body = {"divergence_pos": 3, "cells_missing": 4, "n_prompt_tokens": 5, "n_ctx": 6, "param": "x"}
    known: dict[str, Any] = {"status_code": 400, "code": "c", "request_id": "r", "retry_after": 2.5, "reason": "why"}
    if issubclass(kind, sdk.PoolSaturatedError):
        known |= {"pool_id": "p", "capacity": Capacity(can_admit=False, reason="no")}
    error = kind("said", body=body, **known)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (str(again), again.args) == ("said", ("said",))
        assert vars(again) == vars(error)
    for number in ("matched_len", "cells_missing", "n_prompt_tokens", "n_ctx", "param"):
        assert getattr(again, number, None) == getattr(error, number, None)


def test_a_subclass_with_its_own_arguments_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(Special(7)))
    assert (type(again), again.n, str(again)) == (Special, 7, "seven is 7")


class Special(sdk.PoolSaturatedError):
    def __init__(self, n: int):
        super().__init__(f"seven is {n}", retry_after=1)
        self.n = n


def test_every_class_is_used_and_public() -> None:
    made = {*BY_CODE.values(), *BY_STATUS.values(), sdk.InvalidRequestError, sdk.PolyKVError, sdk.PolyKVTimeoutError}
    assert made == KINDS


def test_nothing_listens() -> None:
    with (
        PolyKVClient("http://127.0.0.1:9", max_retries=0) as client,
        pytest.raises(sdk.PolyKVUnavailableError) as caught,
    ):
        client.pools()
    assert (caught.value.code, caught.value.status_code) == ("unreachable", None)
    assert "http://127.0.0.1:9" in str(caught.value)
