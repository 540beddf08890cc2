"""Admission under fire: fifty clients at once against a floor, in front of a real engine with four slots.

How fast the machine is does not matter: the floor is a share of what one session alone got before.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from polykv_proxy.app import CONTROL, RELAY, serving
from polykv_proxy.config import load_settings
from polykv_proxy.control import Control

from .conftest import Launcher

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = "You are one of many agents who share this text, and each of you has a task. " * 8
N_CLIENTS, N_TURNS = 50, 2
TURN_S = 0.4
"""So long a turn decodes when its session is alone: the gate reads the engine a few times meanwhile."""
SHARE = 0.35
"""Of what one session has alone: two of them are above it, with the third they are not."""
PATIENCE_S = 240
Json = dict[str, Any]


class Storm:
    """What the clients were told, all together."""

    def __init__(self, client: httpx.AsyncClient, name: str, n_predict: int):
        self._client, self._name, self._n_predict = client, name, n_predict
        self.refused: list[httpx.Response] = []
        self.served: list[httpx.Response] = []

    async def run(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(self._agent(f"{self._name}-{i}") for i in range(N_CLIENTS)))

    async def _agent(self, session: str) -> None:
        """Turns of one session. Only its first may be refused; it comes back when it was told to."""
        said = ""
        for turn in range(N_TURNS):
            answer = await self._ask(session, said)
            while answer.status_code == 429 and turn == 0:
                self.refused.append(answer)
                await asyncio.sleep(int(answer.headers["retry-after-ms"]) / 1e3)
                answer = await self._ask(session, said)
            assert answer.status_code == 200, f"turn {turn} of {session}: {answer.text}"
            self.served.append(answer)
            said += answer.json()["content"] + "Go on."

    async def _ask(self, session: str, said: str) -> httpx.Response:
        body = {"prompt": ROOT + f"You are {session}. " + said, "n_predict": self._n_predict, "ignore_eos": True}
        return await self._client.post("/completion", json={**body, "session_id": session})


@asynccontextmanager
async def proxy_for(engine_url: str) -> AsyncIterator[tuple[httpx.AsyncClient, Control]]:
    settings = load_settings(upstream_url=engine_url, state=":memory:", port=0, session_gap_s=0.5)
    limits = httpx.Limits(max_connections=None)
    async with serving(settings) as (url, app):
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False, limits=limits) as client:
            yield client, app[CONTROL]
        assert app[RELAY].n_running == 0


async def alone_tps(client: httpx.AsyncClient) -> float:
    body = {"prompt": ROOT + "Alone.", "n_predict": 128, "ignore_eos": True, "session_id": "alone"}
    answer = await client.post("/completion", json=body)
    assert answer.status_code == 200
    return float(answer.json()["timings"]["predicted_per_second"])


async def set_policy(client: httpx.AsyncClient, floor: float, **policy: Any) -> None:
    body = {"target_tps_per_session": floor, "mode": "enforced", "settle_tokens": 8, "settle_max_ms": 1000}
    body |= {"guarantee_min_sessions": 2, **policy}
    answer = await client.post("/polykv/pools/root/admission", json=body)
    assert answer.status_code == 200, answer.text


async def at_rest(client: httpx.AsyncClient, control: Control) -> None:
    """Every place is free again, soon after the last one left."""
    async with asyncio.timeout(20):
        while control.door.gate.entry.n_live or control.slots.n_held:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    door = control.door
    assert (door.n_waiting, door.n_held, door.gate.n_waiting(), door.gate.turns.n_held) == (0, 0, 0, 0)
    assert not door.gate.turns.running
    assert not door.gate.entry.granted
    capacity: Json = (await client.get("/polykv/pools/root/capacity")).json()
    assert (capacity["can_admit"], capacity["n_pool_sessions"]) == (True, 0)


async def test_fifty_clients_against_a_floor(launch: Launcher) -> None:
    engine = launch.pooled("dense")
    async with proxy_for(engine.server.url) as (client, control):
        assert (await client.post("/polykv/pools", json={"prompt": ROOT, "name": "root"})).status_code == 201
        tps = await alone_tps(client)
        floor, n_predict = SHARE * tps, round(min(600, tps * TURN_S))

        await set_policy(client, floor, on_saturation="queue", queue_timeout_ms=PATIENCE_S * 1000)
        queued = Storm(client, "queued", n_predict)
        await queued.run()
        assert (len(queued.served), len(queued.refused)) == (N_CLIENTS * N_TURNS, 0)
        assert sum(answer.json()["polykv"]["hold_ms"] > 0 for answer in queued.served) > N_CLIENTS // 2
        await at_rest(client, control)

        await set_policy(client, 10 * tps, on_saturation="reject")  # only the guaranteed ones, two at a time
        rejected = Storm(client, "rejected", n_predict)
        await rejected.run()
        assert len(rejected.served) == N_CLIENTS * N_TURNS
        assert rejected.refused
        for answer in rejected.refused:
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert answer.headers["x-polykv-reason"] == answer.json()["error"]["reason"]
        await at_rest(client, control)

        await set_policy(client, 10 * tps, on_saturation="warn")
        warned = Storm(client, "warned", n_predict)
        await warned.run()
        assert (len(warned.served), len(warned.refused)) == (N_CLIENTS * N_TURNS, 0)
        assert min(int(answer.headers["x-sessions-remaining"]) for answer in warned.served) == 0
        await at_rest(client, control)

        receipts = (await client.get("/polykv/requests?last=1000")).json()["requests"]
        of_later_turns = [r["admission"]["decision"] for r in receipts if r["admission"] and r["status"] == 200]
        assert Counter(of_later_turns)["continuation"] == 3 * N_CLIENTS * (N_TURNS - 1)
        assert control.door.records
