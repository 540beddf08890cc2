"""In front of a llama-server without hooks: sessions keep slots where that can be seen, and nothing else is touched."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from polykv_proxy.control import plain
from tests.control.conftest import eventually
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, SYSTEM, body_of, receipts_in

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine answers late, and who has seen nothing pins nothing."""
    monkeypatch.setattr(plain, "LOOK_S", 5.0)


@pytest_asyncio.fixture
async def stock() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(hooks=False) as engine:
        yield engine


@pytest_asyncio.fixture
async def proxy(stock: FakeEngine, make_proxy: ProxyMaker) -> AsyncIterator[Proxy]:
    async with make_proxy(stock.url) as proxy:
        yield proxy


def sent(engine: FakeEngine, path: str = CHAT) -> dict[str, Any]:
    body: dict[str, Any] = engine.requests(path)[-1].json()
    return body


class Agent:
    """A conversation under a name; ``n_cached`` of its last turn."""

    def __init__(self, proxy: Proxy, name: str | None, system: str = SYSTEM):
        self.proxy, self.headers = proxy, {"x-session-affinity": name} if name else {}
        self.messages = [{"role": "system", "content": system}]
        self.n_cached = 0

    async def turn(self, text: str = "Go on, with a question that is not short.") -> httpx.Response:
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": 4}
        answer = await self.proxy.client.post(CHAT, json=body, headers=self.headers)
        assert answer.status_code == 200
        said = answer.json()
        self.messages.append(said["choices"][0]["message"])
        self.n_cached = said["timings"]["cache_n"]
        return answer


async def test_agents_keep_their_slots(stock: FakeEngine, proxy: Proxy) -> None:
    agents = [Agent(proxy, f"agent-{n}") for n in range(4)]
    slots = []
    for _ in range(3):
        for agent in agents:
            await agent.turn()
            slots.append(sent(stock)["id_slot"])
    assert slots == [0, 1, 2, 3] * 3
    # The template closes an answer and opens the next question; all before is in the slot.
    assert all(agent.n_cached > len(SYSTEM) + 100 for agent in agents)


@pytest.mark.parametrize("path", PATHS)
async def test_what_can_be_is_pinned_and_its_reply_is_the_engines_own(
    stock: FakeEngine, proxy: Proxy, path: str
) -> None:
    body = body_of(path)
    answer = await proxy.client.post(path, json=body)
    # A stock server's converter of Messages drops the slot.
    assert sent(stock, path) == body | ({} if path == "/v1/messages" else {"id_slot": 0})
    assert receipts_in(answer.json()) == []
    assert "x-session-id" not in answer.headers
    assert "x-pool-id" not in answer.headers


async def test_conversations_without_a_name_are_recognised(stock: FakeEngine, proxy: Proxy) -> None:
    first, second = Agent(proxy, None, "You are a cook."), Agent(proxy, None, "You are a smith.")
    slots = []
    for agent in (first, second, second, first):
        await agent.turn()
        slots.append(sent(stock)["id_slot"])
    assert slots == [0, 1, 1, 0]
    assert len(proxy.control.sessions) == 2


async def test_one_more_than_slots_displaces_the_longest_unused(stock: FakeEngine, proxy: Proxy) -> None:
    for number in range(5):
        await Agent(proxy, f"agent-{number}").turn()
    assert sent(stock)["id_slot"] == 0
    listed = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
    [last] = (await proxy.client.get("/polykv/requests?last=1")).json()["requests"]
    assert (last["slot_id"], last["displaced"]) == (0, ["agent-0"])
    assert {s["session_id"]: s["slot_id"] for s in listed} == {
        "agent-0": None,
        **{f"agent-{number}": number % 4 for number in range(1, 5)},
    }


async def test_a_slot_in_use_elsewhere_is_not_named(stock: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    await agent.turn()
    stock.token_s = 0.05
    async with httpx.AsyncClient(trust_env=False) as direct:
        other = asyncio.create_task(
            direct.post(stock.url + "/completion", json={"prompt": "x", "n_predict": 40, "id_slot": 0}, timeout=20)
        )
        await eventually(lambda: stock.slots[0].state == "generating")
        await agent.turn()
        assert not other.done(), "it did not wait behind the other one"
        assert "id_slot" not in sent(stock)
        await Agent(proxy, "b").turn()
        assert sent(stock)["id_slot"] not in (0, None)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


async def test_more_at_once_than_slots_are_queued_by_the_engine(stock: FakeEngine, proxy: Proxy) -> None:
    stock.token_s = 0.02
    await asyncio.gather(*(Agent(proxy, f"agent-{n}").turn() for n in range(9)))
    pinned = [r.json().get("id_slot") for r in stock.requests(CHAT)]
    assert sorted(p for p in pinned if p is not None) == [0, 1, 2, 3]
    assert stock.n_deferred == 0
    await Agent(proxy, "late").turn()
    assert sent(stock)["id_slot"] is not None, "nobody is on the way any more"


async def test_while_something_else_is_on_its_way_to_a_slot_none_is_named(stock: FakeEngine, proxy: Proxy) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: Any) -> None:
        arrived.set()
        await go_on.wait()

    stock.on("/infill", "request", hold)
    other = asyncio.create_task(proxy.client.post("/infill", json={"input_prefix": "x", "input_suffix": "y"}))
    await arrived.wait()
    await Agent(proxy, "a").turn()
    assert "id_slot" not in sent(stock)
    go_on.set()
    await other
    await Agent(proxy, "b").turn()
    assert "id_slot" in sent(stock)


async def test_a_client_that_leaves_leaves_the_books_in_order(stock: FakeEngine, proxy: Proxy) -> None:
    agent = Agent(proxy, "a")
    await agent.turn()
    stock.token_s = 0.2
    with pytest.raises(httpx.ReadTimeout):
        await proxy.client.post(CHAT, json={"messages": agent.messages}, headers=agent.headers, timeout=0.4)
    await eventually(lambda: not proxy.control.sessions.n_running and stock.slots[0].state == "idle")
    stock.token_s = 0
    await agent.turn()
    assert sent(stock)["id_slot"] == 0


@pytest.mark.parametrize(
    "fields",
    [{"id_slot": 2}, {"n": 2}, {"cache_prompt": False}],
    ids=["its own slot", "two choices", "no cache"],
)
async def test_what_says_where_it_goes_is_left_alone(stock: FakeEngine, proxy: Proxy, fields: dict[str, Any]) -> None:
    body = body_of(CHAT, **fields)
    assert (await proxy.client.post(CHAT, json=body)).status_code == 200
    assert sent(stock) == body
    await Agent(proxy, "a").turn()
    assert "id_slot" in sent(stock), "and nobody is counted as on the way any more"


async def test_a_body_that_is_not_json_is_the_engines_to_refuse(stock: FakeEngine, proxy: Proxy) -> None:
    direct = await proxy.client.post(stock.url + CHAT, content=b'{"messages": [')
    through = await proxy.client.post(CHAT, content=b'{"messages": [')
    assert (through.status_code, through.content) == (direct.status_code, direct.content)


async def test_a_receipt_for_who_carries_a_field(stock: FakeEngine, proxy: Proxy) -> None:
    first = await proxy.chat(session_id="s", pool_id=7)
    again = await proxy.chat(session_id="s")
    receipt = again.json()["polykv"]
    assert first.json()["polykv"]["miss_reason"] == receipt["miss_reason"] == "no_pool"
    assert (receipt["pool_id"], receipt["session_id"], receipt["prefix_n_tokens"]) == (None, "s", 0)
    assert receipt["cached_n_tokens"] == again.json()["timings"]["cache_n"] > 0
    assert receipt["ctx_total"] == stock.n_ctx_slot
    assert receipt["ctx_headroom_tokens"] == stock.n_ctx_slot - receipt["ctx_used"]
    assert again.headers["x-session-id"] == "s"
    assert "x-pool-id" not in again.headers
    assert sent(stock).keys() == {"messages", "max_tokens", "id_slot"}


async def test_explicit_mode_touches_only_who_carries_a_field(stock: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(stock.url, mode="explicit") as proxy:
        answer = await proxy.chat(headers={"x-session-affinity": "a"})
        assert stock.requests(CHAT)[-1].body == answer.request.content
        assert stock.requests("/slots") == []
        await proxy.chat(session_id="s")
        assert sent(stock)["id_slot"] == 1, "that one is empty"


async def test_an_engine_that_empties_slots_is_left_to_choose(stock: FakeEngine, proxy: Proxy) -> None:
    stock.empties_idle = True
    for number in range(2):
        await Agent(proxy, f"agent-{number}").turn()
    for _ in range(2):
        await Agent(proxy, "agent-2").turn()
        assert "id_slot" not in sent(stock)
    found = (await proxy.client.get("/polykv/doctor")).json()["findings"]
    assert [f["do"] for f in found if f["id"] == "sessions_not_pinned"] == ["start it with --no-cache-idle-slots"]


async def test_what_was_emptied_before_anybody_looked_is_not_named(stock: FakeEngine, proxy: Proxy) -> None:
    """Clients that choose slots themselves are nobody's sessions; what is saved of theirs is loaded all the same."""
    stock.empties_idle = True
    body = {"prompt": list(range(100, 140)), "n_predict": 2}
    for slot_id, prompt in enumerate((body["prompt"], [7, 8, 9])):
        (await proxy.client.post("/completion", json=body | {"prompt": prompt, "id_slot": slot_id})).raise_for_status()
    assert [slot.tokens == [] for slot in stock.slots[:2]] == [True, False]
    (await proxy.client.post("/completion", json=body)).raise_for_status()
    assert sent(stock, "/completion") == body
    assert proxy.control.plain.pins_off == "emptied"


@pytest.mark.parametrize("how", ["router", "one slot", "no slots", "asleep"])
async def test_where_slots_cannot_be_seen_everything_is_relayed(make_proxy: ProxyMaker, how: str) -> None:
    async with FakeEngine(hooks=False, n_slots=1 if how == "one slot" else 4) as engine:
        engine.router, engine.slots_shown = how == "router", how != "no slots"
        if how == "asleep":
            engine.sleep()
        async with make_proxy(engine.url) as proxy:
            answer = await proxy.chat()
            assert answer.status_code == 200
            assert engine.requests(CHAT)[-1].body == answer.request.content
            assert (await proxy.chat(session_id="s")).json()["polykv"]["miss_reason"] == "no_pool"
            assert "id_slot" not in sent(engine)
            for _ in range(2):
                await proxy.control.plain.beat()
            assert engine.requests("/slots") == []
            health = await proxy.client.get("/polykv/health")
            assert (health.status_code, health.json()["engine"]["hooks"]) == (200, False)


async def test_one_that_does_not_say_that_it_hides_its_slots_is_asked_once(
    stock: FakeEngine, make_proxy: ProxyMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_proxy(stock.url) as proxy:
        stock.slots_shown = False
        for name in "ab":
            assert (await Agent(proxy, name).turn()).status_code == 200
            assert "id_slot" not in sent(stock)
        assert len(stock.requests("/slots")) == 1


async def test_an_engine_with_a_key(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(hooks=False, api_key="k") as engine, make_proxy(engine.url, upstream_api_key="k") as proxy:
        await Agent(proxy, "a").turn()
        assert sent(engine)["id_slot"] == 0


async def test_nobody_asks_for_slots_while_nothing_runs(stock: FakeEngine, proxy: Proxy) -> None:
    await Agent(proxy, "a").turn()
    n_before = len(stock.requests("/slots"))
    for _ in range(3):
        await proxy.control.plain.beat()
    assert len(stock.requests("/slots")) == n_before


async def test_a_slow_look_is_not_waited_for(stock: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(request: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(plain, "LOOK_S", 0.02)
    stock.on("/slots", "request", late, times=None)
    await Agent(proxy, "a").turn()
    assert "id_slot" not in sent(stock)


async def test_a_running_turn_is_told_by_the_engines_slots(stock: FakeEngine, proxy: Proxy) -> None:
    stock.token_s, stock.n_gen = 0.1, 100
    running = asyncio.create_task(proxy.chat(headers={"x-session-affinity": "a"}, max_tokens=100))
    await eventually(lambda: stock.slots[0].n_decoded > 2)
    session: dict[str, Any] = {}
    for _ in range(200):
        await proxy.control.plain.beat()
        [session] = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
        if session["tps_ewma"]:
            break
        await asyncio.sleep(0.1)
    assert (session["state"], session["slot_id"], session["ctx_total"]) == ("decoding", 0, stock.n_ctx_slot)
    assert 0 < session["tps_ewma"] < 11
    assert session["n_decoded"] > 2
    sample = (await proxy.client.get("/polykv/tps")).json()
    assert [(s["session_id"], s["state"]) for s in sample["sessions"]] == [("a", "decoding")]
    assert session["suffix_n_tokens"] is None, "what is a pool's and what its own only an engine with hooks tells"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_another_start_of_the_engine_forgets_who_was_where(stock: FakeEngine, proxy: Proxy) -> None:
    agents = [Agent(proxy, name) for name in "ab"]
    for agent in agents:
        await agent.turn()
    start = proxy.control.plain.props
    await stock.restart()
    await eventually(lambda: proxy.control.plain.props not in (start, None))
    for agent in reversed(agents):
        await agent.turn()
    assert [r.json()["id_slot"] for r in stock.requests(CHAT)] == [0, 1, 0, 1]


async def test_a_start_that_nobody_noticed_shows_by_the_slots(stock: FakeEngine, proxy: Proxy) -> None:
    stock.marker = "pinned by the environment"
    await eventually(lambda: proxy.control.plain.props is not None and proxy.control.plain.props.start == stock.marker)
    for name in "ab":
        await Agent(proxy, name).turn()
    stock._new_context()
    await Agent(proxy, "b").turn()
    assert sent(stock)["id_slot"] == 0
    assert proxy.control.plain.pins_off is None


async def test_a_patched_engine_takes_its_place_and_leaves_again(stock: FakeEngine, proxy: Proxy) -> None:
    await Agent(proxy, "a").turn()
    assert (await proxy.client.get("/polykv/pools")).status_code == 501
    stock.with_hooks = True
    await stock.restart()
    await eventually(lambda: proxy.control.hooks)
    assert proxy.control.plain.props is None
    await proxy.pool([*range(40)], "p")
    assert (await proxy.chat(pool_id="p")).json()["polykv"]["session_id"]
    stock.with_hooks = False
    await stock.restart()
    await eventually(lambda: proxy.control.watch.hooks is False)
    answer = await proxy.chat(pool_id="p", session_id="b")
    assert answer.json()["polykv"]["miss_reason"] == "no_pool"
    assert sent(stock)["id_slot"] == 0
    assert (await proxy.client.get("/polykv/pools")).status_code == 501


async def test_sessions_end_in_front_of_it_too(stock: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(stock.url, session_idle_s=0.05) as proxy:
        await Agent(proxy, "a").turn()

        async def nobody() -> bool:
            listed = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
            return bool(listed == [])

        for _ in range(100):
            if await nobody():
                break
            await asyncio.sleep(0.05)
        assert await nobody()
        assert proxy.control.plain._book.owners == set()


async def test_metrics_are_the_engines_and_ours(stock: FakeEngine, proxy: Proxy) -> None:
    await Agent(proxy, "a").turn()
    page = (await proxy.client.get("/metrics")).text
    assert "llamacpp:tokens_predicted_total 4" in page
    assert "opencoti_polykv:engine_up 1.0" in page
    assert 'opencoti_polykv:sessions{state="idle"} 1.0' in page
    assert "engine_epoch_info{" not in page
