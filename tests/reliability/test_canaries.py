"""No session ever sees another's text: canary prompts before, between and after pooled traffic.

What the engine decodes here follows from the whole context, token by token. So one token of somebody else's in it, or
one of its own too few, is another text; and every text in here is known beforehand.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.contract.conftest import made
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import events_of
from tests.relay.raw import connected
from tests.reliability.conftest import leave_nothing, post_json

PATH = "/v1/completions"
N_TOKENS = 6
SHARED = "All agents of this house begin with these very words, whoever they are and whatever they do. " * 3
TENANTS = ["anna", "bert", "cleo", "dora", "emil", "fred"]


def secret(tenant: str) -> str:
    return f"The word that nobody but {tenant} may know is {tenant[::-1]}-{sum(map(ord, tenant)) ** 3}."


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """Three slots, few sequences and cells, and some memory to park in: everybody displaces everybody."""
    async with FakeEngine(n_slots=3, max_pools=5, n_cells=6000, save_ram=1 << 22) as engine:
        yield engine


def expected(engine: FakeEngine, prompt: str) -> str:
    tokens = engine.template.tokenizer.encode(prompt)
    for _ in range(N_TOKENS):
        tokens.append(engine._next_token(tokens, 0))
    return bytes(tokens[-N_TOKENS:]).decode()


class Traffic:
    """Agents of several tenants, in pools with their secrets; what goes wrong is an assertion."""

    def __init__(self, engine: FakeEngine, proxy: Proxy, rng: random.Random):
        self.engine, self.proxy, self.rng = engine, proxy, rng
        self.said: dict[str, str] = {}
        self.n_asked = self.n_pooled = 0
        self.alone = False
        self.replies: dict[str, list[bytes]] = {tenant: [] for tenant in TENANTS}

    async def begin(self) -> None:
        await made(self.proxy, prompt=SHARED, name="house")
        for tenant in TENANTS:
            await made(self.proxy, "/polykv/pools/house/fork", prompt=SHARED + secret(tenant), name=tenant)

    async def ask(self, prompt: str, **fields: Any) -> bytes:
        """One reply, whose text must be that of its own prompt alone."""
        body = {"prompt": prompt, "max_tokens": N_TOKENS, **fields}
        answer = await self.proxy.client.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        events = events_of(answer.content) if fields.get("stream") else [answer.json()]
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        assert text == expected(self.engine, prompt), f"not the text of its prompt: {fields}"
        receipts = [event["polykv"] for event in events if "polykv" in event]
        self.n_pooled += bool(receipts and receipts[0]["cached_n_tokens"])
        self.n_asked += 1
        return answer.content + repr(answer.headers).encode()

    async def turn(self) -> None:
        """A session of a tenant goes on, or begins; by name, by what it says, or in its pool."""
        tenant, number = self.rng.choice(TENANTS), self.rng.randrange(3)
        session = f"{tenant}-{number}"
        prompt = self.said.get(session, SHARED + secret(tenant)) + f" Turn {self.rng.randrange(5)}."
        fields: dict[str, Any] = {"stream": self.rng.random() < 0.5}
        if self.rng.random() < 0.7:
            fields["session_id"] = session
        if self.rng.random() < 0.4:
            fields["pool_id"] = self.rng.choice([tenant, tenant, "house", self.rng.choice(TENANTS)])
        self.replies[tenant].append(await self.ask(prompt, **fields))
        self.said[session] = prompt if len(prompt) < 900 else ""
        if not self.said[session]:
            del self.said[session]

    async def leave(self) -> None:
        tenant = self.rng.choice(TENANTS)
        body = {"prompt": SHARED + secret(tenant) + " I am off.", "max_tokens": 400, "session_id": f"{tenant}-0"}
        async with connected(self.proxy.url) as (_, writer):
            writer.write(post_json(PATH, body))
            await asyncio.sleep(self.rng.random() * 0.05)
        self.said.pop(f"{tenant}-0", None)

    async def manage(self) -> None:
        tenant = self.rng.choice(TENANTS)
        match self.rng.randrange(5 if self.alone else 4):
            case 0:
                await self.proxy.client.post(f"/polykv/pools/{tenant}/evict?to={self.rng.choice(['warm', 'cold'])}")
            case 1:
                await self.proxy.client.delete(f"/polykv/pools/{tenant}")
                await self.proxy.client.post(
                    "/polykv/pools/house/fork", json={"prompt": SHARED + secret(tenant), "name": tenant}
                )
            case 2:
                await self.proxy.client.post(
                    "/polykv/pools", json={"from_session": f"{tenant}-1", "name": f"{tenant}-s{self.n_asked}"}
                )
            case 3:
                await self.proxy.client.delete(f"/polykv/sessions/{tenant}-2")
            case 4:
                await self.engine.restart()
                await self.proxy.control.refresh()

    async def step(self) -> None:
        action = self.rng.choices([self.turn, self.leave, self.manage], [20, 2, 1])[0]
        await action()


async def canary(traffic: Traffic, tenant: str) -> str:
    """Asked in nobody's pool, and beginning like nobody: what it gives."""
    prompt = f"Canary of {tenant}. {secret(tenant)}"
    await traffic.ask(prompt)
    await traffic.ask(prompt, cache_prompt=False)
    await traffic.ask(prompt, stream=True, session_id=f"canary-{tenant}")
    async with httpx.AsyncClient(base_url=traffic.engine.url, timeout=20, trust_env=False) as direct:
        answer = await direct.post(PATH, json={"prompt": prompt, "max_tokens": N_TOKENS, "cache_prompt": False})
        text: str = answer.json()["choices"][0]["text"]
        return text


@pytest.mark.parametrize("seed", [1, 2])
async def test_canaries_sing_the_same_before_between_and_after(
    engine: FakeEngine, make_proxy: ProxyMaker, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    caplog.set_level(logging.DEBUG)
    rng = random.Random(seed)
    settings = {"warm_after_s": 0.3, "auto_pool_min_tokens": 64, "warm_ram_bytes": 1 << 22}
    async with make_proxy(engine.url, **settings) as proxy:
        traffic = Traffic(engine, proxy, rng)
        before = {tenant: await canary(traffic, tenant) for tenant in TENANTS}
        await traffic.begin()
        for _ in range(4):
            await asyncio.gather(*(traffic.step() for _ in range(24)))
            traffic.alone = True
            for _ in range(8):
                await traffic.step()
            await traffic.manage()
            traffic.alone = False
            tenant = rng.choice(TENANTS)
            assert await canary(traffic, tenant) == before[tenant]
        after = {tenant: await canary(traffic, tenant) for tenant in TENANTS}
        assert after == before
        assert len(set(before.values())) == len(TENANTS)
        assert traffic.n_pooled > traffic.n_asked / 3, "else nothing was shared"
        pages = b""
        for path in ("pools", "sessions", "requests", "health", "tps", "doctor"):
            pages += (await proxy.client.get(f"/polykv/{path}")).content
        pages += (await proxy.client.get("/metrics")).content
        await leave_nothing(proxy)
    ours = "".join(r.getMessage() for r in caplog.records if r.name.startswith("polykv")).encode()
    for tenant in TENANTS:
        word = secret(tenant).rpartition(" ")[2].encode()
        assert word not in pages + ours, "nor do we tell it"
        for other in TENANTS:
            assert other == tenant or not any(word in reply for reply in traffic.replies[other])


async def test_the_test_would_notice(engine: FakeEngine, proxy: Proxy) -> None:
    """An engine that attaches without comparing gives a text that is not that of the prompt."""
    traffic = Traffic(engine, proxy, random.Random(0))
    await traffic.begin()
    wrong = next(
        pool for pool in engine.pools if pool.state == "ready" and secret("fred")[-9:] in decoded(engine, pool)
    )
    wrong.tokens[:] = engine.template.tokenizer.encode(SHARED + secret("bert"))[: len(wrong.tokens)]
    engine._attach = lambda slot, tokens, body, n_own: slot.share_from(wrong, len(wrong.tokens))  # type: ignore[method-assign]
    engine.n_usable = lambda sequence, n: len(wrong.tokens)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="not the text of its prompt"):
        await traffic.ask(SHARED + secret("fred") + " And now?", pool_id="fred", session_id="s")


def decoded(engine: FakeEngine, pool: Any) -> str:
    return engine.template.tokenizer.decode(pool.tokens)
