"""Admission as clients meet it: refusals, the line, holds, and what stays as it was without a policy."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.contract.conftest import error_of, made
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy
from tests.relay.raw import until

ROOT = "You are one of many agents who share this text. "
FLOOR = 1e6
"""Tokens per second that nothing decodes at: whoever comes beyond the guarantee is one too many."""


async def set_policy(proxy: Proxy, pool: int | str = "root", **policy: Any) -> None:
    body = {"target_tps_per_session": FLOOR, "mode": "enforced", **policy}
    answer = await proxy.client.post(f"/polykv/pools/{pool}/admission", json=body)
    assert answer.status_code == 200, answer.text


def body_of(session: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": ROOT + f"You are {session}.", "n_predict": 2, "session_id": session, **fields}


async def post(proxy: Proxy, session: str, **fields: Any) -> httpx.Response:
    return await proxy.client.post("/completion", json=body_of(session, **fields))


async def admissions(proxy: Proxy) -> list[dict[str, Any] | None]:
    """Of the last requests, the newest first."""
    return [r["admission"] for r in (await proxy.client.get("/polykv/requests")).json()["requests"]]


class Busy:
    """A session that decodes in the pool for as long as the test wants."""

    def __init__(self, proxy: Proxy, engine: FakeEngine):
        self._proxy, self._engine = proxy, engine
        self.turns: list[asyncio.Task[httpx.Response]] = []

    async def begin(self, name: str = "busy", **fields: Any) -> None:
        """It is admitted and decodes at a rate that is known."""
        self.turns.append(
            asyncio.create_task(post(self._proxy, name, **({"n_predict": 2000, "stream": True} | fields)))
        )
        rate = self._proxy.control.door.rate_of
        await until(lambda: (r := rate(name)) is not None and r.tps is not None and r.tps > 0)

    async def end(self) -> None:
        for turn in self.turns:
            turn.cancel()
        await asyncio.gather(*self.turns, return_exceptions=True)


@pytest_asyncio.fixture
async def busy(engine: FakeEngine, proxy: Proxy) -> AsyncIterator[Busy]:
    engine.token_s = 0.01
    await made(proxy, prompt=ROOT, name="root")
    busy = Busy(proxy, engine)
    yield busy
    await busy.end()
    await until(lambda: not any(proxy.at_rest().values()))
    door = proxy.control.door
    assert (door.n_waiting, door.n_held, door._inside) == (0, 0, {})
    assert not door.gate.turns.running


DIALECTS: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": ROOT + "Go."}),
    ("/v1/completions", {"prompt": ROOT + "Go."}),
]
CHATS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": ROOT}, {"role": "user", "content": "Go."}]}),
    ("/v1/messages", {"system": ROOT, "messages": [{"role": "user", "content": "Go."}], "max_tokens": 2}),
    ("/v1/responses", {"instructions": ROOT, "input": "Go."}),
]


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_a_saturated_pool_refuses_a_new_session(
    proxy: Proxy, busy: Busy, path: str, body: dict[str, Any]
) -> None:
    await set_policy(proxy, settle_max_ms=0)
    await busy.begin()
    answer = await proxy.client.post(path, json={**body, "session_id": "new"})
    assert answer.status_code == 429
    error = error_of(answer)
    assert (error["code"], error["type"]) == ("pool_saturated", "rate_limit_error")
    assert answer.headers["x-polykv-reason"] == error["reason"] == "projected mean tps below floor"
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    assert abs(int(answer.headers["retry-after-ms"]) / 1000 - int(answer.headers["Retry-After"])) <= 1
    assert answer.headers["x-session-id"] == "new"
    (refused, *_) = await admissions(proxy)
    assert (refused["decision"], refused["reason"]) == ("refused", "projected mean tps below floor")


@pytest.mark.parametrize(("path", "body"), CHATS)
async def test_the_refusal_is_in_the_dialect_of_the_client(
    engine: FakeEngine, proxy: Proxy, busy: Busy, path: str, body: dict[str, Any]
) -> None:
    await made(proxy, messages=[{"role": "system", "content": ROOT}], name="chat")
    await set_policy(proxy, "chat", settle_max_ms=0, guarantee_min_sessions=0)
    await busy.begin(pool_id="root")
    answer = await proxy.client.post(path, json={**body, "session_id": "new", "stream": True})
    assert answer.status_code == 429
    assert error_of(answer)["code"] == "pool_saturated"
    assert (answer.json().get("type") == "error") == (path == "/v1/messages")
    assert answer.headers["x-polykv-reason"] == "projected mean tps below floor"
