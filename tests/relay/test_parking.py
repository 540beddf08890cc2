"""More sessions than slots: what a session said is saved when its slot is needed, and nothing is prefilled twice."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from polykv_proxy.control import CreatePool, Source
from polykv_proxy.control.saved_books import session_tag
from polykv_proxy.errors import SessionNotResident
from polykv_proxy.ids import SessionId
from tests.fake_engine import FakeEngine, Hold, drop, reply
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, body_of
from tests.relay.raw import until

COMPLETION, CHAT = "/completion", "/v1/chat/completions"
SYSTEM = "You are one of many agents. " * 8
RAM = 1 << 24
SAVE_BUSY = {"error": {"code": 409, "message": "slot 0 has not started", "type": "polykv_error"}}


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(save_ram=RAM) as engine:
        yield engine


class Agent:
    """A conversation. ``await agent.say("…")`` gives the receipt of the turn."""

    def __init__(self, proxy: Proxy, name: str, *, path: str = COMPLETION, stream: bool = False, **fields: Any):
        self.proxy, self.name, self.path, self.stream, self.fields = proxy, name, path, stream, fields
        self.prompt = SYSTEM
        self.messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
        self.n_total = 0

    async def say(self, text: str) -> dict[str, Any]:
        self.prompt += text
        self.messages.append({"role": "user", "content": text})
        said: dict[str, Any] = {"prompt": self.prompt, "n_predict": 8}
        if self.path == CHAT:
            said = {"messages": self.messages, "max_tokens": 8}
        body = said | {"session_id": self.name, "stream": self.stream} | self.fields
        answer = await self.proxy.client.post(self.path, json=body)
        assert answer.status_code == 200, answer.text
        pieces = [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        pieces = pieces if self.stream else [answer.json()]
        content = "".join(self._content(piece) for piece in pieces)
        self.prompt += content
        self.messages.append({"role": "assistant", "content": content})
        (receipt,) = [piece["polykv"] for piece in pieces if "polykv" in piece]
        return dict(receipt)

    def _content(self, piece: dict[str, Any]) -> str:
        if self.path == COMPLETION:
            return str(piece["content"])
        choices = piece["choices"]
        part = choices[0].get("delta") or choices[0].get("message") or {} if choices else {}
        return str(part.get("content") or "")


def tag(name: str) -> str:
    return session_tag(SessionId(name))


def went_on(receipt: dict[str, Any], text: str) -> bool:
    """Only what is new was prefilled."""
    return receipt["cached_n_tokens"] == receipt["ctx_used"] - 8 - len(text)


def started_over(receipt: dict[str, Any]) -> bool:
    """The slot held at most what all have in common."""
    return receipt["cached_n_tokens"] < len(SYSTEM) + 16


def said(name: str, turn: int) -> str:
    return f" [{name}, turn {turn}] " + f"{name} says a few more words. " * 4


async def fill_slots(proxy: Proxy, n: int = 4) -> None:
    """Others come and take all the slots."""
    for i in range(n):
        await Agent(proxy, f"other-{i}").say(f"other {i} " * 10)


# The main thing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_twelve_sessions_in_turn_on_four_slots(
    engine: FakeEngine, proxy: Proxy, pooled: bool, path: str, stream: bool
) -> None:
    if pooled:
        body = {"prompt": SYSTEM, "messages": [{"role": "system", "content": SYSTEM}], "add_generation_prompt": False}
        await proxy.pool(tokens=engine.template.render(path, body)[0][0])
    agents = [Agent(proxy, f"agent-{i}", path=path, stream=stream) for i in range(12)]
    for agent in agents:
        await agent.say(said(agent.name, 0))
    assert engine.saved.ram.keys() == {tag(f"agent-{i}") for i in range(8)}
    for turn in (1, 2):
        for agent in agents:
            before = engine.template.render(path, {"prompt": agent.prompt, "messages": agent.messages})[0][0]
            n_before = engine.n_prompt_cum
            receipt = await agent.say(said(agent.name, turn))
            # Of a chat the template closes the last answer anew, which is one token more than was decoded.
            n_new = engine.n_prompt_cum - n_before
            assert receipt["cached_n_tokens"] >= len(before) - (0 if path == COMPLETION else 1), (agent.name, turn)
            assert n_new == receipt["ctx_used"] - 8 - receipt["cached_n_tokens"]
            assert receipt["miss_reason"] is None or not pooled
    state = engine.saved.ram[tag("agent-0")]
    n_pool = len(proxy.control.tree.tokens(1)) if pooled else 0
    assert state.start == n_pool, "what the pool holds is not saved"
    assert {slot.n_pool_shared for slot in engine.slots} == {n_pool}


async def test_who_is_parked_is_shown(engine: FakeEngine, proxy: Proxy) -> None:
    """In the list, in the session's own answer, in the tree and in the metrics."""

    async def shown() -> tuple[Any, ...]:
        one = (await proxy.client.get("/polykv/sessions/a")).json()
        listed = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
        assert one == next(session for session in listed if session["session_id"] == "a")
        view = (await proxy.client.get("/polykv/pools")).json()
        in_tree = next(session for session in view["unpooled"]["sessions"] if session["session_id"] == "a")
        assert (in_tree["state"], in_tree["warm_bytes"]) == (one["state"], one["warm_bytes"])
        return one["state"], one["parked"], one["warm_bytes"], view["warm"]["ram"]["sessions"]

    async def counted(state: str) -> bool:
        page = (await proxy.client.get("/metrics")).text
        return f'opencoti_polykv:sessions{{state="{state}"}} 1.0' in page

    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    assert await shown() == ("idle", False, 0, 0)
    await fill_slots(proxy)
    n_bytes = engine.saved.ram[tag("a")].n_bytes
    assert n_bytes > 0
    assert await shown() == ("parked", True, n_bytes, 1)
    assert await counted("parked")
    await agent.say(said("a", 1))
    state, parked, n_kept, _ = await shown()
    assert (state, parked, n_kept) == ("idle", False, n_bytes), "what is saved stays, and its slot has it as well"
    await fill_slots(proxy)
    for name in list(engine.saved.ram):
        await proxy.control.saved.forget(name)
    assert (await shown())[:3] == ("idle", False, 0), "the engine keeps nothing of it"


async def test_a_state_is_loaded_into_whatever_slot_is_free(engine: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    first = proxy.control.sessions.get(SessionId("a")).slot_id
    await fill_slots(proxy)
    hold, busy = Hold(), Agent(proxy, "busy")
    engine.on(COMPLETION, "prefill", hold)
    held = asyncio.create_task(busy.say("x" * 50))
    await hold.reached()
    receipt = await agent.say(said("a", 1))
    assert proxy.control.sessions.get(SessionId("a")).slot_id != first
    assert went_on(receipt, said("a", 1))
    hold.release()
    await held


async def test_books_of_cells_follow(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.pool(tokens=engine.template.tokenizer.encode(SYSTEM))
    agents = [Agent(proxy, f"agent-{i}") for i in range(6)]
    for turn in range(3):
        for agent in agents:
            await agent.say(said(agent.name, turn))
            await proxy.control.refresh()
            ledger = proxy.control.residency.ledger
            ledger.sync()
            assert ledger.accounts().total_cells == engine.cache.used()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_in_every_dialect(engine: FakeEngine, proxy: Proxy, path: str, stream: bool) -> None:
    """What a reply says of itself is enough to know what its slot holds."""
    body = body_of(path, "a question of some length " * 4, stream=stream, session_id="s")
    assert (await proxy.client.post(path, json=body)).status_code == 200
    await fill_slots(proxy)
    assert len(engine.saved.ram[tag("s")].tokens) == len(engine.template.render(path, body)[0][0]) + 4
    n_before = engine.n_prompt_cum
    assert (await proxy.client.post(path, json=body)).status_code == 200
    assert engine.n_prompt_cum == n_before + 1


async def test_in_the_explicit_mode_only_who_carries_a_field(engine: FakeEngine, explicit: Proxy) -> None:
    agent = Agent(explicit, "a")
    await agent.say(said("a", 0))
    for i in range(4):
        assert (await explicit.client.post(COMPLETION, json={"prompt": f"{i} untouched " * 20})).status_code == 200
    await fill_slots(explicit)
    assert engine.saved.ram.keys() <= {tag("a"), *(tag(f"other-{i}") for i in range(4))}
    await agent.say(said("a", 1))
    await fill_slots(explicit)
    assert went_on(await agent.say(said("a", 2)), said("a", 2))


# Who is saved --------------------------------------------------------------------------------------------------------


async def test_one_question_of_a_client_without_a_name_is_not_kept(engine: FakeEngine, proxy: Proxy) -> None:
    for i in range(9):
        await proxy.chat(f"question {i} " * 20)
    assert not engine.saved.ram
    assert not [r for r in engine.received if b'"save"' in r.body]


async def test_a_conversation_of_a_client_without_a_name_is_kept_and_recognised(
    engine: FakeEngine, proxy: Proxy
) -> None:
    await proxy.pool(tokens=[1, 2, 3])  # so that replies carry the receipt
    messages = [{"role": "user", "content": "tell me " * 20}]
    for turn in range(3):
        if turn == 2:
            await fill_slots(proxy)
        n_before = engine.n_prompt_cum
        answer = (await proxy.client.post(CHAT, json={"messages": messages, "max_tokens": 8})).json()
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": "go on " * 10})
    assert engine.n_prompt_cum - n_before < 120
    (session,) = [s for s in proxy.control.sessions if not s.named]
    assert session.n_turns == 3
    assert tag(session.session_id) in engine.saved.ram


async def test_what_is_short_is_prefilled(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.pool(tokens=engine.template.tokenizer.encode(SYSTEM))
    agent = Agent(proxy, "a")
    await agent.say("hm")
    await fill_slots(proxy)
    assert tag("a") not in engine.saved.ram


async def test_a_slot_that_somebody_else_overwrote_is_not_saved(engine: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    slot_id = proxy.control.sessions.get(SessionId("a")).slot_id
    direct = {"prompt": "z" * 700, "id_slot": slot_id, "n_predict": 3}
    assert (await proxy.client.post(engine.url + COMPLETION, json=direct)).status_code == 200
    await fill_slots(proxy)
    assert tag("a") not in engine.saved.ram


async def test_a_client_that_chooses_its_slot_displaces_too(engine: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    slot_id = proxy.control.sessions.get(SessionId("a")).slot_id
    assert (await proxy.client.post(COMPLETION, json={"prompt": "mine", "id_slot": slot_id})).status_code == 200
    receipt = await agent.say(said("a", 1))
    assert went_on(receipt, said("a", 1))


async def test_a_request_that_may_not_reuse_gets_no_state(engine: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a", cache_prompt=False)
    await agent.say(said("a", 0))
    await fill_slots(proxy)
    assert tag("a") in engine.saved.ram
    receipt = await agent.say(said("a", 1))
    assert (receipt["cached_n_tokens"], engine.saved.n_loaded) == (0, 0)


async def test_a_session_in_its_own_slot_is_left_there(engine: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    for turn in range(3):
        await agent.say(said("a", turn))
    assert engine.saved.n_loaded == 0
    assert not [r for r in engine.received if b'"op"' in r.body and (b"save" in r.body or b"load" in r.body)]


async def test_without_memory_for_states_nothing_is_saved(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, warm_ram_bytes=0) as proxy:
        agent = Agent(proxy, "a")
        await agent.say(said("a", 0))
        await fill_slots(proxy)
        assert not engine.saved.ram
        assert started_over(await agent.say(said("a", 1)))


# What goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["request", "reply"])
@pytest.mark.parametrize("accident", [drop(), reply(409, SAVE_BUSY), reply(500, {}), reply(507, {})])
async def test_a_save_that_fails_costs_nobody_an_answer(
    engine: FakeEngine, proxy: Proxy, phase: str, accident: Any
) -> None:
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    engine.on("save", phase, accident, times=None)
    await fill_slots(proxy)
    receipt = await agent.say(said("a", 1))
    assert went_on(receipt, said("a", 1)) or started_over(receipt)
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)


@pytest.mark.parametrize("phase", ["request", "reply"])
@pytest.mark.parametrize("status", [0, 400, 409, 410, 500, 501, 503, 507])
async def test_a_load_that_fails_is_a_prefill(engine: FakeEngine, proxy: Proxy, phase: str, status: int) -> None:
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    await fill_slots(proxy)
    error = {"error": {"code": status, "message": "no", "type": "polykv_error", "need": 9, "free": 1}}
    engine.on("load", phase, reply(status, error) if status else drop(), times=None)
    receipt = await agent.say(said("a", 1))
    assert went_on(receipt, said("a", 1)) or started_over(receipt)
    assert proxy.at_rest() == dict.fromkeys(proxy.at_rest(), 0)
    receipt = await agent.say(said("a", 2))
    assert went_on(receipt, said("a", 2))


async def test_a_state_behind_a_pool_that_is_gone_is_a_prefill(engine: FakeEngine, proxy: Proxy) -> None:
    pool = await proxy.pool(tokens=engine.template.tokenizer.encode(SYSTEM))
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    await fill_slots(proxy)
    await proxy.control.release_pool(pool["pool_id"])
    assert started_over(await agent.say(said("a", 1)))


async def test_an_engine_that_forgot_everything_prefills(engine: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    await fill_slots(proxy)
    await engine.restart()
    await proxy.control.refresh()
    assert started_over(await agent.say(said("a", 1)))
    await fill_slots(proxy)
    receipt = await agent.say(said("a", 2))
    assert went_on(receipt, said("a", 2))


@pytest.mark.parametrize("pooled", [False, True])
async def test_states_on_disk_outlive_a_killed_engine(make_proxy: ProxyMaker, pooled: bool) -> None:
    async with (
        FakeEngine(save_ram=RAM, save_disk=RAM) as engine,
        make_proxy(engine.url, warm_disk_bytes=RAM) as proxy,
    ):
        if pooled:
            await proxy.pool(tokens=engine.template.tokenizer.encode(SYSTEM))
        agents = [Agent(proxy, f"agent-{i}") for i in range(8)]
        for agent in agents:
            await agent.say(said(agent.name, 0))
        await until(lambda: len(engine.saved.files) == 4 + pooled)
        await engine.restart()
        await proxy.control.refresh()
        assert not engine.saved.ram
        for agent in agents[:4]:
            receipt = await agent.say(said(agent.name, 1))
            assert went_on(receipt, said(agent.name, 1))


@pytest.mark.parametrize("parked", [False, True])
async def test_states_outlive_the_proxy(engine: FakeEngine, make_proxy: ProxyMaker, parked: bool) -> None:
    """Also of those who were in their slots when it ended."""
    async with make_proxy(engine.url) as proxy:
        agent = Agent(proxy, "a")
        await agent.say(said("a", 0))
        if parked:
            await fill_slots(proxy)
    async with make_proxy(engine.url) as proxy:
        agent.proxy = proxy
        receipt = await agent.say(said("a", 1))
        assert went_on(receipt, said("a", 1))


# Who leaves, who comes back meanwhile --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["save", "load"])
@pytest.mark.parametrize("phase", ["request", "reply"])
async def test_a_slot_is_kept_until_the_engine_is_done_with_it(
    engine: FakeEngine, proxy: Proxy, op: str, phase: str
) -> None:
    agent, late = Agent(proxy, "a"), Agent(proxy, "late")
    await agent.say(said("a", 0))
    if op == "load":
        await fill_slots(proxy)
    else:
        await fill_slots(proxy, 3)
    hold = Hold()
    engine.on(op, phase, hold)
    task = asyncio.create_task((agent if op == "load" else late).say(said("x", 1)))
    await hold.reached()
    slot_id = next(slot.slot_id for slot in proxy.control.slots._slots if slot.ticket_id is not None)
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: proxy.control.sessions.n_running == 0)
    assert proxy.control.slots.n_held == 1
    assert slot_id not in [resting for resting, _ in proxy.control.slots.resting()]
    hold.release()
    await until(lambda: proxy.control.slots.n_held == 0)
    assert not engine.requests(COMPLETION)[-1].left
    if op == "save":
        receipt = await agent.say(said("a", 1))
        assert went_on(receipt, said("a", 1))


async def test_who_comes_back_while_it_is_saved_waits_for_that(engine: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    await fill_slots(proxy, 3)
    hold = Hold()
    engine.on("save", "request", hold)
    late = asyncio.create_task(Agent(proxy, "late").say(said("late", 0)))
    await hold.reached()
    back = asyncio.create_task(agent.say(said("a", 1)))
    await until(lambda: proxy.control.slots.n_held == 2)
    hold.release()
    receipt = await back
    await late
    assert went_on(receipt, said("a", 1))


async def test_a_deleted_session_leaves_no_state(engine: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    await fill_slots(proxy)
    assert tag("a") in engine.saved.ram
    assert (await proxy.client.delete("/polykv/sessions/a")).status_code == 200
    await until(lambda: tag("a") not in engine.saved.ram)


async def test_a_session_deleted_while_it_is_saved_leaves_no_state(engine: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    await agent.say(said("a", 0))
    await fill_slots(proxy, 3)
    hold = Hold()
    engine.on("save", "reply", hold)
    late = asyncio.create_task(Agent(proxy, "late").say(said("late", 0)))
    await hold.reached()
    assert (await proxy.client.delete("/polykv/sessions/a")).status_code == 200
    hold.release()
    await late
    await until(lambda: tag("a") not in engine.saved.ram)


# Idle sessions -------------------------------------------------------------------------------------------------------


async def test_idle_sessions_leave_the_cache_and_come_back(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, warm_after_s=0.05) as proxy:
        agent, once = Agent(proxy, "a"), "one question " * 20
        await agent.say(said("a", 0))
        await proxy.client.post(COMPLETION, json={"prompt": once, "n_predict": 2})
        await until(lambda: tag("a") in engine.saved.ram)
        await until(lambda: proxy.control.sessions.get(SessionId("a")).slot_id is None)
        assert engine.cache.used() == len(once) + 2, "what nobody comes back to stays until its slot is needed"
        assert proxy.control.slots.slot_of(SessionId("a")) is None
        receipt = await agent.say(said("a", 1))
        assert went_on(receipt, said("a", 1))


async def test_an_idle_session_with_little_of_its_own_leaves_its_pool_to_go(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=RAM) as engine, make_proxy(engine.url, warm_after_s=0.2) as proxy:
        tokens = engine.template.render(COMPLETION, {"prompt": SYSTEM})[0][0]
        await proxy.pool(tokens=tokens)
        agent = Agent(proxy, "brief")
        assert went_on(await agent.say("Hi."), "Hi.")
        await until(lambda: engine.slots[0].tokens == [])
        assert tag("brief") not in engine.saved.ram
        receipt = await agent.say("Bye.")
        assert (receipt["miss_reason"], receipt["cached_n_tokens"]) == (None, len(tokens))


@pytest.mark.parametrize("pooled", [False, True])
async def test_a_pool_is_made_of_a_session_that_is_parked(
    engine: FakeEngine, make_proxy: ProxyMaker, pooled: bool
) -> None:
    async with make_proxy(engine.url, warm_after_s=0.05) as proxy:
        if pooled:
            order = CreatePool(source=Source(tokens=engine.template.tokenizer.encode(SYSTEM)), pin=True)
            await proxy.control.create_pool(order)
        agent = Agent(proxy, "a")
        await agent.say(said("a", 0))
        await until(lambda: proxy.control.sessions.get(SessionId("a")).slot_id is None)
        n_before = engine.n_prompt_cum + engine.hooks.n_processed
        made = await proxy.control.create_pool(CreatePool(source=Source(from_session=SessionId("a"))))
        assert made["prefix_len"] == len(agent.prompt)
        assert engine.n_prompt_cum + engine.hooks.n_processed == n_before
        assert went_on(await agent.say(said("a", 1)), said("a", 1))


async def test_a_slot_that_is_still_down_as_its_own_is_filled_again(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    """The session's side of the books and the slot's may differ for a while. Nobody waits for himself then."""
    async with make_proxy(engine.url, warm_after_s=0.05) as proxy:
        agent = Agent(proxy, "a")
        await agent.say(said("a", 0))
        session = proxy.control.sessions.get(SessionId("a"))
        assert session is not None
        await until(lambda: session.slot_id is None)
        slots = proxy.control.slots
        for slot in slots._slots:
            slots._own(slot, session.session_id)
        async with asyncio.timeout(5):
            made = await proxy.control.create_pool(CreatePool(source=Source(from_session=SessionId("a"))))
        assert made["prefix_len"] == len(agent.prompt)


async def test_who_loses_two_slots_at_once_is_saved_from_the_one_of_its_last_turn(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=RAM, n_slots=2) as engine, make_proxy(engine.url) as proxy:

        async def ask(text: str, **fields: Any) -> None:
            answer = await proxy.client.post(COMPLETION, json={"prompt": text * 40, "n_predict": 4} | fields)
            assert answer.status_code == 200, answer.text

        first, second = Hold(), Hold()
        await ask("before ", session_id="a")
        engine.on(COMPLETION, "prefill", first)
        turns = [asyncio.create_task(ask("first ", session_id="a"))]
        await first.reached()
        engine.on(COMPLETION, "prefill", second)
        turns.append(asyncio.create_task(ask("second ", session_id="a")))
        await second.reached()
        first.release()
        await turns[0]
        second.release()
        await turns[1]
        session = proxy.control.sessions.get(SessionId("a"))
        assert session is not None
        assert [proxy.control.slots.owner_of(slot) for slot in (0, 1)] == ["a", "a"]
        assert session.slot_id == 1
        await ask("another ", n_cmpl=2)
        assert session.saved
        assert session.slot_id is None


async def test_a_parked_session_whose_state_is_gone_is_not_resident(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, warm_after_s=0.05) as proxy:
        await Agent(proxy, "a").say(said("a", 0))
        await until(lambda: proxy.control.sessions.get(SessionId("a")).slot_id is None)
        engine.saved.ram.clear()
        with pytest.raises(SessionNotResident, match="not to be had"):
            await proxy.control.create_pool(CreatePool(source=Source(from_session=SessionId("a"))))


async def test_time_sends_nobody_away_when_it_is_switched_off(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, warm_after_s=0) as proxy:
        agent = Agent(proxy, "a")
        await agent.say(said("a", 0))
        n_beats = len(engine.requests("/polykv/engine/stats"))
        await until(lambda: len(engine.requests("/polykv/engine/stats")) > n_beats + 1)
        assert not engine.saved.ram
        await fill_slots(proxy)
        assert went_on(await agent.say(said("a", 1)), said("a", 1))


@pytest.mark.parametrize("room", [True, False])
async def test_what_is_not_kept_moves_down_and_is_still_there(
    engine: FakeEngine, make_proxy: ProxyMaker, room: bool
) -> None:
    """On top of a hole it would cost every decode as much as if the hole were full. Nobody's state is given for it."""
    async with make_proxy(engine.url, warm_after_s=0.05) as proxy:
        order = CreatePool(source=Source(tokens=[7] * 800), pin=True)
        pool = await proxy.control.create_pool(order)
        once = "a question that is not asked again " * 8
        answer = await proxy.client.post(COMPLETION, json={"prompt": once, "n_predict": 4})
        if not room:
            await Agent(proxy, "a").say(said("a", 0))
            await until(lambda: tag("a") in engine.saved.ram)
            proxy.control.saved._wanted_bytes["ram"] = engine.saved.ram[tag("a")].n_bytes + 10
        assert engine.cache.hi() > 800
        await proxy.control.release_pool(pool["pool_id"])
        if not room:
            looks = lambda: [r for r in engine.received if b'"cells"' in r.body]  # noqa: E731
            n_looks = len(looks())
            await until(lambda: len(looks()) > n_looks)
            assert (engine.cache.hi() > 800, list(engine.saved.ram)) == (True, [tag("a")])
            return
        await until(lambda: engine.cache.hi() == engine.cache.used())
        await until(lambda: not engine.saved.ram)
        again = once + answer.json()["content"] + " and more"
        answer = await proxy.client.post(COMPLETION, json={"prompt": again, "n_predict": 1})
        assert answer.json()["timings"]["cache_n"] == len(once) + 4


async def test_an_idle_session_that_cannot_be_saved_stays_in_its_slot(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    async with make_proxy(engine.url, warm_after_s=0.05) as proxy:
        engine.on("save", "request", reply(409, SAVE_BUSY), times=None)
        agent = Agent(proxy, "a")
        await agent.say(said("a", 0))
        tries = lambda: [r for r in engine.received if b'"save"' in r.body]  # noqa: E731
        await until(lambda: len(tries()) == 1)
        receipt = await agent.say(said("a", 1))
        assert went_on(receipt, said("a", 1))


async def test_who_comes_back_while_it_is_taken_out_of_the_cache(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, warm_after_s=0.05) as proxy:
        hold, agent = Hold(), Agent(proxy, "a")
        engine.on("clear", "request", hold)
        await agent.say(said("a", 0))
        await hold.reached()
        receipt = await agent.say(said("a", 1))
        assert went_on(receipt, said("a", 1))
        hold.release()
        await until(lambda: not [s for s in proxy.control.slots._slots if s.reserved])
        assert (await agent.say(said("a", 2)))["cached_n_tokens"] > receipt["cached_n_tokens"]


# Cells ---------------------------------------------------------------------------------------------------------------


async def test_when_cells_are_low_sessions_leave_at_once(make_proxy: ProxyMaker) -> None:
    async with (
        FakeEngine(save_ram=RAM, n_cells=960) as engine,
        make_proxy(engine.url, auto_pool_min_tokens=0) as proxy,
    ):
        for i in range(3):
            assert engine.cache.used() == i * (len(SYSTEM) + 68)
            await Agent(proxy, f"agent-{i}").say("x" * 60)
        await until(lambda: engine.cache.free() > 960 / 8)
        assert list(engine.saved.ram) == [tag("agent-0")], "the longest unused, and no more than it takes"
        assert proxy.control.sessions.get(SessionId("agent-0")).slot_id is None


async def test_slots_that_rest_make_room_for_a_state_and_are_saved(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=RAM, n_cells=1100) as engine, make_proxy(engine.url) as proxy:
        agents = [Agent(proxy, f"agent-{i}") for i in range(4)]
        for turn in range(3):
            for agent in agents:
                receipt = await agent.say("x" * 60)
                if turn:
                    assert went_on(receipt, "x" * 60), (agent.name, turn)


# All at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
async def test_whatever_happens_everybody_is_answered_and_nothing_is_left(make_proxy: ProxyMaker, seed: int) -> None:
    """Sixteen sessions at once on four slots and a small cache, with accidents, clients that leave, and a restart."""
    rng = random.Random(seed)
    async with (
        FakeEngine(save_ram=RAM, save_disk=RAM, n_cells=3000) as engine,
        make_proxy(engine.url, warm_after_s=0.02, warm_disk_bytes=RAM) as proxy,
    ):
        await proxy.pool(tokens=engine.template.tokenizer.encode(SYSTEM))
        engine.token_s = 0.0005
        for place in ("save", "load", "clear", "stats"):
            for phase in ("request", "reply"):
                engine.on(place, phase, sometimes(rng), times=None)
        agents = [Agent(proxy, f"agent-{i}", stream=i % 2 == 0) for i in range(16)]
        await asyncio.gather(*(lead(agent, rng) for agent in agents))
        restarted = asyncio.create_task(engine.restart())
        await asyncio.gather(*(lead(agent, rng, may_fail=True) for agent in agents))
        await restarted
        engine.faults.armed.clear()
        await proxy.control.refresh()
        await until(lambda: not any(proxy.at_rest().values()))
        await until(lambda: not proxy.control.parking._working)
        assert not [slot for slot in proxy.control.slots._slots if slot.reserved]
        assert not list(proxy.control.parking._locks)
        for agent in agents:
            await agent.say(said(agent.name, 9))
            assert went_on(await agent.say(said(agent.name, 10)), said(agent.name, 10))
        await until(lambda: proxy.control.residency.books_true)
        await until(lambda: not any(slot.tokens for slot in engine.slots))
        await until(lambda: not proxy.control.parking._working)
        await proxy.control.refresh()
        ledger = proxy.control.residency.ledger
        ledger.sync()
        assert ledger.accounts().total_cells == engine.cache.used()


def sometimes(rng: random.Random) -> Any:
    """An accident, once in a while."""

    async def action(request: Any) -> Any:
        kind = rng.randrange(12)
        if kind == 0:
            return await drop()(request)
        if kind == 1:
            return await reply(409, SAVE_BUSY)(request)
        if kind == 2:
            await asyncio.sleep(0.01)
        return None

    return action


async def lead(agent: Agent, rng: random.Random, *, may_fail: bool = False) -> None:
    """Three turns; of some the client leaves in the middle."""
    for turn in range(3):
        turned = asyncio.create_task(agent.say(said(agent.name, turn)))
        if rng.randrange(4) == 0:
            await asyncio.wait([turned], timeout=rng.random() / 50)
            turned.cancel()
        (result,) = await asyncio.gather(turned, return_exceptions=True)
        if isinstance(result, BaseException):
            agent.prompt = SYSTEM + f" {agent.name} begins anew. "
            assert may_fail or isinstance(result, asyncio.CancelledError), result
