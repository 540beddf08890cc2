"""What ``GET /polykv/requests`` says of the requests that were served: times, holds, and where a prompt diverged."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from polykv_proxy.control import CreatePool, Source
from polykv_proxy.control.receipts import MAX_RECORDS, RequestLog, RequestRecord
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.dialect_cases import PATHS, body_of
from tests.relay.raw import until

CHAT = "/v1/chat/completions"
RULES = "Read before you write, and say plainly what you do not know. " * 4


@pytest_asyncio.fixture
async def alone(engine: FakeEngine, make_proxy: ProxyMaker) -> AsyncIterator[Proxy]:
    """Nobody looks whether others begin alike."""
    async with make_proxy(engine.url, auto_pool_min_tokens=0) as proxy:
        yield proxy


async def receipts(proxy: Proxy, last: int = 20, **headers: str) -> list[dict[str, Any]]:
    answer = await proxy.client.get("/polykv/requests", params={"last": last}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"]


async def latest(proxy: Proxy) -> dict[str, Any]:
    return (await receipts(proxy, 1))[0]


async def position_of(proxy: Proxy) -> int:
    """Of the latest divergence, when the engine has rendered both prompts."""
    for _ in range(200):
        divergence = (await latest(proxy))["divergence"]
        if divergence["position"] is not None:
            return divergence["position"]
        await asyncio.sleep(0.01)
    raise AssertionError("no position was told")


def chat(*said: str, system: str = "Rules.", **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}]
    messages += [{"role": roles[i % 2], "content": t} for i, t in enumerate(said)]
    return {"messages": messages, "max_tokens": 2, **more}


async def post(proxy: Proxy, body: dict[str, Any], path: str = CHAT, **headers: str) -> httpx.Response:
    answer = await proxy.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def first_other_token(engine: FakeEngine, path: str, old: dict[str, Any], new: dict[str, Any]) -> int:
    a, b = (engine.template.render(path, body)[0][0] for body in (old, new))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


# What is in it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_dialect_leaves_a_receipt(proxy: Proxy, path: str, stream: bool) -> None:
    before = time.time()
    answer = await proxy.client.post(
        path, json=body_of(path, stream=stream, session_id="s1"), headers={"x-request-id": "r1"}
    )
    assert answer.status_code == 200
    receipt = await latest(proxy)
    assert (receipt["request_id"], receipt["path"], receipt["stream"]) == ("r1", path, stream)
    assert (receipt["session_id"], receipt["status"], receipt["decision"]) == ("s1", 200, "unpooled")
    assert before <= receipt["received_ts"] <= receipt["sent_ts"] <= receipt["ended_ts"] <= time.time()
    if stream:
        assert receipt["sent_ts"] <= receipt["first_token_ts"] <= receipt["ended_ts"]
    else:
        assert receipt["first_token_ts"] is None
    assert receipt["slot_id"] in range(4)
    assert receipt["predicted_n"] == 4
    assert receipt["cached_n_tokens"] + receipt["prompt_n"] > 10
    assert (receipt["displaced"], receipt["held_ms"], receipt["divergence"], receipt["error"]) == ([], {}, None, None)


async def test_the_newest_is_first_and_one_can_be_asked_for(proxy: Proxy) -> None:
    for i in range(4):
        await post(proxy, chat(f"q{i}"), **{"x-request-id": f"r{i}"})
    assert [r["request_id"] for r in await receipts(proxy)] == ["r3", "r2", "r1", "r0"]
    assert [r["request_id"] for r in await receipts(proxy, 2)] == ["r3", "r2"]
    one = await proxy.client.get("/polykv/requests", params={"request_id": "r1"})
    assert [r["request_id"] for r in one.json()["requests"]] == ["r1"]
    for last in ("0", "x", "-1", "1001", "٣", "0000000019999", "000000001" + "9" * 5000):
        refused = await proxy.client.get("/polykv/requests", params={"last": last})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "last")


def test_only_the_last_are_kept() -> None:
    log = RequestLog(0.0)
    for i in range(MAX_RECORDS + 5):
        log.add(RequestRecord(str(i), CHAT, "chat", 0.0))
    assert len(log) == MAX_RECORDS
    told = log.told(MAX_RECORDS, with_text=True)["requests"]
    assert (told[0]["request_id"], told[-1]["request_id"]) == (str(MAX_RECORDS + 4), "5")


async def test_an_attached_one_names_its_pool(engine: FakeEngine, proxy: Proxy) -> None:
    pool = await proxy.pool([*b"shared beginning of many"])
    await proxy.client.post(
        "/completion", json={"prompt": "shared beginning of many. Go.", "n_predict": 2, "pool_id": pool["pool_id"]}
    )
    receipt = await latest(proxy)
    assert (receipt["decision"], receipt["pool_id"], receipt["prefix_n_tokens"]) == ("attached", pool["pool_id"], 24)
    assert (receipt["cached_n_tokens"], receipt["prompt_n"], receipt["miss_reason"]) == (24, 5, None)


async def test_refusals_of_every_kind(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.client.post(CHAT, content=b"{", headers={"x-request-id": "malformed"})
    await proxy.client.post(
        CHAT, json=chat("q", pool_id="nobody"), headers={"x-polykv-strict": "1", "x-request-id": "strict"}
    )
    await proxy.pool([*b"shared"])
    await proxy.client.post(
        "/completion",
        json={"prompt": "shared", "pool_id": 1, "shared_prefix_n_tokens": 9},
        headers={"x-request-id": "explicit"},
    )
    told = [(r["request_id"], r["status"], r["error"], r["decision"]) for r in reversed(await receipts(proxy))]
    assert told == [
        ("malformed", 400, "invalid_json", "refused"),
        ("strict", 404, "pool_not_found", "refused"),
        ("explicit", 400, "prefix_mismatch", "refused"),
    ]


async def test_the_engines_own_refusal_is_a_status(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.client.post(CHAT, json={"messages": "x"}, headers={"x-request-id": "r"})
    receipt = await latest(proxy)
    assert (receipt["status"], receipt["error"], receipt["decision"]) == (400, None, "unpooled")


async def test_a_client_that_leaves(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "chunk:0", hold)
    asked = asyncio.create_task(post(proxy, chat("q", stream=True)))
    await until(lambda: len(proxy.control.requests) == 1 and next(iter(proxy.control.requests)).turn.sent_s is not None)
    running = await latest(proxy)
    assert (running["ended_ts"], running["status"] in (None, 200), running["error"]) == (None, True, None)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: next(iter(proxy.control.requests)).ended_s is not None)
    hold.release()
    receipt = await latest(proxy)
    assert receipt["error"] == "incomplete"
    assert receipt["ended_ts"] is not None


async def test_who_lost_its_slot_and_what_it_waited_for(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, auto_pool_min_tokens=0) as proxy:
        for i in range(4):
            await post(proxy, chat(f"q{i}", session_id=f"s{i}"))
        assert [r["displaced"] for r in await receipts(proxy)] == [[], [], [], []]
        await post(proxy, chat("q4", session_id="s4"))
        receipt = await latest(proxy)
        assert receipt["displaced"] == ["s0"]
        hold = Hold()
        engine.on(CHAT, "prefill", hold, times=4)
        running = [asyncio.create_task(post(proxy, chat("long", session_id=f"s{i}"))) for i in range(1, 5)]
        await until(lambda: proxy.control.slots.n_held == 4)
        waiting = asyncio.create_task(post(proxy, chat("q", session_id="late")))
        await until(lambda: proxy.relay.desk.n_waiting == 1)
        assert (await latest(proxy))["decision"] is None
        await asyncio.sleep(0.02)
        hold.release()
        await asyncio.gather(*running, waiting)
        receipt = next(r for r in await receipts(proxy) if r["session_id"] == "late")
        assert receipt["held_ms"]["slot"] >= 20
        assert receipt["hold_ms"] >= receipt["held_ms"]["slot"]


async def test_anothers_prefill_is_a_reason_to_wait(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on(CHAT, "prefill", hold)
    first = asyncio.create_task(post(proxy, chat("q1", session_id="a", system=RULES * 3)))
    await hold.reached()
    second = asyncio.create_task(post(proxy, chat("q2", session_id="b", system=RULES * 3)))
    await until(lambda: proxy.control.fan_out.n_waiting == 1)
    await asyncio.sleep(0.02)
    hold.release()
    await asyncio.gather(first, second)
    receipt = next(r for r in await receipts(proxy) if r["session_id"] == "b")
    assert receipt["held_ms"]["shared_prefill"] >= 20
    assert receipt["hold_ms"] == sum(receipt["held_ms"].values())
    assert receipt["decision"] == "attached"


async def test_a_cold_pool_is_a_reason_to_wait(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, auto_pool_min_tokens=64) as proxy:
        pool = await proxy.pool([*b"shared beginning of many"])
        await proxy.client.post(f"/polykv/pools/{pool['pool_id']}/evict", params={"to": "cold"})
        hold = Hold()
        engine.on("materialize", "request", hold)
        body = {"prompt": "shared beginning of many. Go.", "n_predict": 2, "pool_id": pool["pool_id"]}
        asked = asyncio.create_task(proxy.client.post("/completion", json=body))
        await hold.reached()
        await asyncio.sleep(0.02)
        hold.release()
        assert (await asked).json()["polykv"]["hold_ms"] >= 20
        assert (await latest(proxy))["held_ms"]["pool"] >= 20


# Where it diverged ---------------------------------------------------------------------------------------------------


async def test_a_session_that_goes_on_diverges_nowhere(alone: Proxy) -> None:
    await post(alone, chat("q1", session_id="s", system=RULES))
    await post(alone, chat("q1", "a1", "q2", session_id="s", system=RULES))
    await post(alone, chat("q1", "a1", "q2", session_id="s", system=RULES))
    assert [(r["divergence"], r["miss_reason"]) for r in await receipts(alone)] == [(None, "no_pool")] * 3


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_the_message_that_changed_in_a_session_is_named(engine: FakeEngine, alone: Proxy, path: str) -> None:
    def said(middle: str) -> dict[str, Any]:
        turns = [("user", "one " * 20), ("assistant", "fine"), ("user", middle), ("assistant", "ok"), ("user", "go")]
        messages = [{"role": role, "content": text} for role, text in turns]
        if path == "/v1/responses":
            return {"instructions": "Rules.", "input": messages, "max_output_tokens": 2, "session_id": "s"}
        front: dict[str, Any] = {"system": "Rules."} if path == "/v1/messages" else {}
        if path == CHAT:
            messages.insert(0, {"role": "system", "content": "Rules."})
        return {**front, "messages": messages, "max_tokens": 2, "session_id": "s"}

    old, new = said("look at\nthe parser\nplease"), said("look at\nthe lexer\nplease")
    await post(alone, old, path)
    await post(alone, new, path)
    receipt = await latest(alone)
    divergence = receipt["divergence"]
    assert receipt["miss_reason"] == "diverged"
    assert (divergence["against"], divergence["role"]) == ("session", "user")
    assert divergence["message"] == (3 if path == CHAT else 2)
    assert divergence["span"] == {"start": 8, "end": 17, "differs_at": 12, "text": "the lexer"}
    assert await position_of(alone) == first_other_token(engine, path, old, new)


async def test_who_expected_nothing_has_left_nothing(engine: FakeEngine, proxy: Proxy) -> None:
    """Beside others' pool the first agent with a new prompt has none; who was on one, or names it, left it."""
    prefix = engine.template.render(CHAT, chat("x", system=RULES))[0][0][: len(RULES)]
    await proxy.pool(prefix, "theirs")
    for system, named in (("x", {}), ("y", {"session_id": "first"}), ("z", {"prompt_cache_key": "f"})):
        said = (await post(proxy, chat("q", system=system * 300, **named))).json().get("polykv")
        receipt = await latest(proxy)
        assert (receipt["prefix_n_tokens"], receipt["divergence"]) == (0, None)
        assert receipt["miss_reason"] == "no_pool"
        assert said is None or said["miss_reason"] == "no_pool"
    await post(proxy, chat("q", system=RULES, session_id="s"))
    assert (await latest(proxy))["pool_id"] == 1
    await post(proxy, chat("q", system="?", session_id="s"))
    receipt = await latest(proxy)
    assert (receipt["pool_id"], receipt["miss_reason"]) == (None, "diverged")
    assert receipt["divergence"] is not None
    await post(proxy, {"prompt": "?", "n_predict": 2, "pool_id": "theirs"}, "/completion")
    receipt = await latest(proxy)
    assert (receipt["miss_reason"], receipt["divergence"]["against"]) == ("diverged", "pool")


async def test_a_moved_reminder_is_named_though_the_pool_was_a_full_hit(engine: FakeEngine, alone: Proxy) -> None:
    prefix = engine.template.render(CHAT, chat("x", system=RULES))[0][0]
    await alone.pool(prefix[: len(RULES)])
    await post(alone, chat("first question<system-reminder>Be kind.", session_id="s", system=RULES))
    moved = chat("first question", "a1", "q2<system-reminder>Be kind.", session_id="s", system=RULES)
    answer = await post(alone, moved)
    assert answer.json()["polykv"]["miss_reason"] is None
    receipt = await latest(alone)
    assert (receipt["miss_reason"], receipt["decision"]) == (None, "attached")
    assert (receipt["divergence"]["message"], receipt["divergence"]["span"]["text"]) == (1, "first question")


async def test_an_answer_that_does_not_come_back_as_it_was_made(
    engine: FakeEngine, alone: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = chat("q1", session_id="s", system=RULES)
    answer = await post(alone, {**first, "max_tokens": 40})
    said = answer.json()["choices"][0]["message"]["content"]
    await post(alone, chat("q1", said, "q2", session_id="s", system=RULES))
    assert (await latest(alone))["divergence"] is None
    await post(alone, {**chat("q1", session_id="t", system=RULES), "max_tokens": 40})
    left_out = chat("q1", said[:5] + "!" * 40, "q2", session_id="t", system=RULES)
    await post(alone, left_out)
    receipt = await latest(alone)
    divergence = receipt["divergence"]
    assert (divergence["against"], divergence["message"], divergence["role"]) == ("answer", 2, "assistant")
    assert divergence["position"] == len(engine.template.render(CHAT, first)[0][0]) + 5
    assert (divergence["span"], receipt["miss_reason"]) == (None, "no_pool")
    # A recurrent model goes back to a checkpoint whatever comes back.
    monkeypatch.setattr(alone.control.divergences, "_reuses_any", lambda: False)
    for said in (("q1",), ("q1", "!" * 60, "q2")):
        await post(alone, {**chat(*said, session_id="u", system=RULES), "max_tokens": 40})
    assert (await latest(alone))["divergence"] is None


async def test_a_pool_that_a_prompt_leaves_names_the_message(engine: FakeEngine, proxy: Proxy) -> None:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "Here is the file.\nx = 1"}]
    order = CreatePool(source=Source(messages=messages), name="base")
    await proxy.control.create_pool(order)
    other = [messages[0], {"role": "user", "content": "Here is the file.\nx = 2"}]
    answer = await post(proxy, {"messages": other, "max_tokens": 2, "pool_id": "base"})
    said = answer.json()["polykv"]
    assert said["miss_reason"] == "diverged"
    divergence = (await latest(proxy))["divergence"]
    assert (divergence["against"], divergence["message"], divergence["role"]) == ("pool", 1, "user")
    assert divergence["position"] == said["prefix_n_tokens"]
    assert divergence["span"]["text"] == "x = 2"
    assert divergence["span"]["differs_at"] == len("Here is the file.\nx = ")


async def test_a_pool_whose_text_is_not_known_names_the_message_of_a_chat(engine: FakeEngine, proxy: Proxy) -> None:
    """Of one that was made of tokens, or is back from the journal, the engine is asked."""
    known = chat("Here is the file.", "Fine.", "Now look at x.", system=RULES)
    tokens = engine.template.render(CHAT, known)[0][0]
    await proxy.pool(tokens)
    await post(proxy, chat("Here is the file.", "Good.", "Now look at x.", system=RULES, pool_id=1))
    for _ in range(200):
        divergence = (await latest(proxy))["divergence"]
        if divergence["message"] is not None:
            break
        await asyncio.sleep(0.01)
    assert (divergence["message"], divergence["role"], divergence["field"]) == (2, "assistant", "messages")
    assert tokens[divergence["position"]] == ord("F")
    assert divergence["span"] is None


async def test_a_pool_of_tokens_tells_the_token_only(proxy: Proxy) -> None:
    await proxy.pool([*b"shared beginning of many"])
    await proxy.client.post("/completion", json={"prompt": "shared beginning of few", "n_predict": 2, "pool_id": 1})
    divergence = (await latest(proxy))["divergence"]
    assert (divergence["position"], divergence["expected_n_tokens"], divergence["field"]) == (20, 24, None)


BILLING = "x-anthropic-billing-header: cc_version=2.1.40.{0}; cc_entrypoint=cli; cch={0};"


def claude(n: int, *said: str) -> dict[str, Any]:
    """A system prompt whose first block changes with every request."""
    system = [{"type": "text", "text": BILLING.format(f"{n:03x}")}, {"type": "text", "text": RULES}]
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return {"system": system, "messages": messages, "max_tokens": 2}


async def test_a_billing_line_that_changes_is_named_in_a_session(engine: FakeEngine, proxy: Proxy) -> None:
    bodies = [claude(1, "q1"), claude(2, "q1", "a1", "q2")]
    for body in bodies:
        await post(proxy, body, "/v1/messages", **{"x-claude-code-session-id": "c"})
    receipt = await latest(proxy)
    divergence = receipt["divergence"]
    assert (receipt["miss_reason"], receipt["pool_id"], len(proxy.control.tree)) == ("diverged", None, 0)
    assert (divergence["against"], divergence["field"], divergence["message"], divergence["part"]) == (
        *("session", "system", 0),
        0,
    )
    assert divergence["role"] == "system"
    assert divergence["span"]["text"] == BILLING.format("002")[:80]
    assert await position_of(proxy) == first_other_token(engine, "/v1/messages", *bodies)


@pytest.mark.parametrize(
    "of",
    [
        lambda n: ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": f"a{n}"}, {}),
        lambda n: ({}, {"prompt_cache_key": "team"}),
        lambda n: ({}, {}),
    ],
    ids=["agents", "prompt_cache_key", "nobody"],
)
async def test_a_line_that_changes_with_every_agent_is_named_without_any_pool(proxy: Proxy, of: Any) -> None:
    for n in range(3):
        headers, fields = of(n)
        await post(proxy, {**claude(n, f"task {n}"), **fields}, "/v1/messages", **headers)
    told = list(reversed(await receipts(proxy)))
    assert [r["miss_reason"] for r in told] == [None, "diverged", "diverged"]
    assert [(r["divergence"]["against"], r["divergence"]["part"]) for r in told[1:]] == [("family", 0)] * 2
    assert told[2]["divergence"]["span"]["text"] == BILLING.format("002")[:80]


async def test_agents_that_share_their_beginning_are_no_divergence(alone: Proxy) -> None:
    for n in range(3):
        await post(alone, chat(f"task {n}", system=RULES, prompt_cache_key="team"))
    assert [r["divergence"] for r in await receipts(alone)] == [None] * 3


async def test_the_words_are_the_admins(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async def spans(proxy: Proxy, key: str | None, admin: str | None) -> list[Any]:
        auth = {"authorization": f"Bearer {key}"} if key else {}
        for text in ("look at the parser", "look at the lexer, the lexer"):
            await post(proxy, chat(text * 4, system="Rules." * 9, session_id="s"), **auth)
        told = await receipts(proxy, 1, **({"authorization": f"Bearer {admin or key}"} if key else {}))
        return [told[0]["divergence"]["span"][name] for name in ("differs_at", "text")]

    async with make_proxy(engine.url) as proxy:
        at, text = await spans(proxy, None, None)
        assert text is not None
    async with make_proxy(engine.url, api_key="data") as proxy:
        assert await spans(proxy, "data", None) == [at, None]
    async with make_proxy(engine.url, api_key="data", admin_key="boss") as proxy:
        assert await spans(proxy, "data", "boss") == [at, text]
        asked = await proxy.client.get("/polykv/requests", headers={"authorization": "Bearer data"})
        assert asked.status_code == 403


async def test_a_request_that_hits_is_compared_with_nothing(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("compared")

    for name in ("first_difference", "volatile_place", "system_text"):
        monkeypatch.setattr(f"polykv_proxy.control.diverged.{name}", fail)
    pool = engine.template.render(CHAT, chat("x", system=RULES))[0][0][: len(RULES)]
    await proxy.pool(pool)
    for said in (("q1",), ("q1", "a1", "q2"), ("q1", "a1", "q2", "a2", "q3")):
        await post(proxy, chat(*said, session_id="s", system=RULES))
    assert [r["miss_reason"] for r in await receipts(proxy)] == [None] * 3
