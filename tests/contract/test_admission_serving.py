"""Admission as clients meet it: refusals, the line, holds, and what stays as it was without a policy."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from polykv_proxy.gate.facts import SessionFacts
from polykv_proxy.gate.outcome import Counts
from polykv_proxy.ids import SessionId
from polykv_proxy.relay import kept_alive
from tests.contract.conftest import error_of, made
from tests.fake_engine import FakeEngine, reply
from tests.relay.conftest import Proxy, ProxyMaker
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
        await until(lambda: (r := rate(name)) is not None and r.tps is not None and r.tps > 0, 15)

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
    await set_policy(proxy, settle_max_ms=0, target_tps_per_session=1e6)
    await busy.begin()
    answer = await proxy.client.post(path, json={**body, "session_id": "new"})
    assert answer.status_code == 429
    error = error_of(answer)
    assert (error["code"], error["type"]) == ("pool_saturated", "rate_limit_error")
    assert "tokens per second and session, the floor is 1,000,000)" in error["message"]
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


async def test_who_is_refused_was_asked_to_come_back_and_may(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0)
    await busy.begin()
    for headers in ({}, {"x-stainless-retry-count": "1"}):
        answer = await proxy.client.post("/completion", json=body_of("new"), headers=headers)
        assert answer.status_code == 429
    counts = proxy.control.door.counts
    assert (counts.refused.total(), counts.n_retries_refused) == (1, 1)
    assert (await proxy.client.get("/polykv/sessions/new")).status_code == 404
    await busy.end()
    await until(lambda: proxy.control.door.gate.measured.rates.n_active == 0)
    assert (await post(proxy, "new", pool_id="root", overcommit=True)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_who_was_never_let_in_is_no_session(proxy: Proxy, busy: Busy, stream: bool) -> None:
    """Refused at once or after the line, or gone while it waited; named or not. Its receipts stay."""
    await set_policy(proxy, settle_max_ms=0)
    await busy.begin()
    names: list[dict[str, Any]] = [{"session_id": "named"}, {"session_id": None}]
    for policy in ({"on_saturation": "reject"}, {"on_saturation": "queue", "queue_timeout_ms": 50}):
        await set_policy(proxy, settle_max_ms=0, **policy)
        for fields in (*names, *names):
            assert (await post(proxy, "new", stream=stream, **fields)).status_code == 429
    await set_policy(proxy, settle_max_ms=0, on_saturation="queue")
    waits = [asyncio.create_task(post(proxy, "new", stream=stream, **fields)) for fields in names]
    await until(lambda: proxy.control.door.n_waiting == 2)
    assert len((await proxy.client.get("/polykv/sessions")).json()["sessions"]) == 3
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    await until(lambda: proxy.control.door.n_waiting == 0 and len(proxy.control.sessions) == 1)
    told = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
    assert [session["session_id"] for session in told] == ["busy"]
    rates = (await proxy.client.get("/polykv/tps")).json()["sessions"]
    assert [session["session_id"] for session in rates] == ["busy"]
    assert (await proxy.client.get("/polykv/pools")).json()["unpooled"]["sessions"] == []
    decisions = [a["decision"] if a is not None else None for a in await admissions(proxy)]
    assert decisions == ["queued"] * 2 + ["refused"] * 8 + ["guaranteed"]
    await set_policy(proxy, settle_max_ms=0, target_tps_per_session=1e-3)
    assert (await post(proxy, "named")).status_code == 200
    assert (await admissions(proxy))[0]["decision"] == "admitted"  # new to the gate, as it was
    await set_policy(proxy, settle_max_ms=0)
    assert (await post(proxy, "named")).status_code == 200
    assert (await admissions(proxy))[0]["decision"] == "continuation"


async def test_a_queued_session_waits_in_sight_and_is_served(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0, on_saturation="queue")
    await busy.begin()
    waits = [asyncio.create_task(post(proxy, f"new{i}")) for i in range(2)]
    await until(lambda: proxy.control.door.n_waiting == 2)
    shown = await admissions(proxy)
    assert sorted(a["place"] for a in shown if a is not None and a["decision"] == "queued") == [1, 2]
    assert {a["waits_for"] for a in shown if a is not None and a["decision"] == "queued"} == {"admission"}
    assert proxy.relay.desk.n_waiting == 0  # nobody holds a slot, or a place in its line, who is not in yet
    await set_policy(proxy, settle_max_ms=0, on_saturation="queue", target_tps_per_session=1e-3)
    for answer in await asyncio.gather(*waits):
        assert answer.status_code == 200
        assert answer.json()["polykv"]["hold_ms"] > 0
    (last, *_) = (await proxy.client.get("/polykv/requests")).json()["requests"]
    assert last["held_ms"]["admission"] == last["hold_ms"]
    assert (last["admission"]["decision"], last["admission"]["place"]) == ("admitted", None)


async def test_a_full_line_refuses(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0, on_saturation="queue", max_queue=1)
    await busy.begin()
    waits = asyncio.create_task(post(proxy, "first"))
    await until(lambda: proxy.control.door.n_waiting == 1)
    answer = await post(proxy, "second")
    assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
    assert answer.headers["x-polykv-reason"] == "projected mean tps below floor"
    waits.cancel()
    await asyncio.wait([waits])
    await until(lambda: proxy.control.door.n_waiting == 0)  # its place is free as soon as it is gone


@pytest.mark.parametrize("how", ["compacted", "released"])
async def test_a_pool_that_goes_lets_nobody_past_the_floor(proxy: Proxy, busy: Busy, how: str) -> None:
    """Who waits at its door goes on waiting, at that of the pool that he gets instead."""
    work = (await made(proxy, "/polykv/pools/root/fork", prompt=ROOT + "You are told: work.", name="work"))["pool_id"]
    for pool in [work] if how == "compacted" else [work, "root"]:
        await set_policy(proxy, pool, settle_max_ms=0, on_saturation="queue", guarantee_min_sessions=0)
    await busy.begin(overcommit=True, pool_id="work")
    named = {"pool_id": "work"} if how == "compacted" else {}
    waits = [
        asyncio.create_task(post(proxy, f"new{i}", prompt=ROOT + "You are told: work." + "!" * i, **named))
        for i in range(1, 4)
    ]
    door = proxy.control.door
    await until(lambda: door.n_waiting == 3)
    if how == "compacted":
        short = {"ancestor": "root", "prompt": ROOT + "You are told: rest."}
        assert (await proxy.client.post("/polykv/pools/work/compact", json=short)).status_code == 201
    else:
        assert (await proxy.client.delete("/polykv/pools/work")).status_code == 200
    scope = proxy.control.tree.get("work" if how == "compacted" else "root").pool_id
    await until(lambda: [a.ruling.scope for a in door.gate.entry.waiting.values()] == [scope] * 3)
    assert (door.n_waiting, not any(wait.done() for wait in waits)) == (3, True)
    assert (await proxy.client.delete(f"/polykv/pools/{scope}/admission")).status_code == 200
    assert [answer.status_code for answer in await asyncio.gather(*waits)] == [200] * 3


async def test_who_waited_in_vain_is_told(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0, on_saturation="queue", queue_timeout_ms=50)
    await busy.begin()
    answer = await post(proxy, "new", stream=True)
    assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_timeout")
    (last, *_) = (await proxy.client.get("/polykv/requests")).json()["requests"]
    assert last["held_ms"]["admission"] >= 50
    assert (last["decision"], last["admission"]["decision"], last["error"]) == ("refused", "refused", "queue_timeout")


async def test_a_continuation_is_never_refused(engine: FakeEngine, proxy: Proxy, busy: Busy) -> None:
    assert (await post(proxy, "old")).status_code == 200  # before there was a policy
    await set_policy(proxy, settle_max_ms=0)
    await busy.begin()
    for _ in range(3):
        assert (await post(proxy, "old")).status_code == 200
    assert (await admissions(proxy))[0]["decision"] == "continuation"
    assert (await post(proxy, "new")).status_code == 429


async def test_two_turns_of_one_session_at_once_count_twice(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0)
    await busy.begin()
    assert (await post(proxy, "busy")).status_code == 429
    assert (await post(proxy, "busy", overcommit=True)).status_code == 200
    assert (await admissions(proxy))[0]["decision"] == "overcommitted"


async def test_every_pool_gets_its_first_session(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy)
    leaf = ROOT + "You are the leaf among them. "
    await made(proxy, "/polykv/pools/root/fork", prompt=leaf, name="leaf")
    await busy.begin()
    answer = await proxy.client.post(
        "/completion", json={"prompt": leaf + "Go.", "n_predict": 2, "session_id": "first", "pool_id": "leaf"}
    )
    assert answer.status_code == 200
    (last, *_) = await admissions(proxy)
    assert (last["decision"], last["reason"], last["scope"]) == ("guaranteed", "guaranteed minimum", 1)


async def test_overcommit_goes_past_the_floor_by_field_and_by_header(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0)
    await busy.begin()
    assert (await post(proxy, "a", overcommit=True)).status_code == 200
    answer = await proxy.client.post("/completion", json=body_of("b"), headers={"x-polykv-overcommit": "1"})
    assert answer.status_code == 200
    assert (await post(proxy, "c", overcommit=False)).status_code == 429


async def test_nothing_goes_past_the_context(engine: FakeEngine, proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0)
    await busy.begin()
    used = engine.cache.used()
    long = ROOT + "x" * (engine.n_cells - used - 1000)
    body = {"prompt": long, "session_id": "long", "n_predict": 4000, "overcommit": True}
    engine.n_cells = engine.cache.n_cells = used + 3000
    await until(lambda: (f := proxy.control.door.gate.measured.facts) is not None and f.cells_total == used + 3000)
    answer = await proxy.client.post("/completion", json=body)
    assert answer.status_code == 429
    assert answer.headers["x-polykv-reason"] == "context headroom exhausted"


async def test_a_policy_that_warns_lets_in_and_says_how_many_more(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0, on_saturation="warn")
    await busy.begin()
    answer = await post(proxy, "new")
    assert (answer.status_code, answer.headers["x-sessions-remaining"]) == (200, "0")
    assert answer.json()["polykv"]["sessions_remaining"] == 0
    assert (await admissions(proxy))[0]["decision"] == "warned"
    again = await post(proxy, "new")
    assert (again.status_code, again.headers["x-sessions-remaining"]) == (200, "0")
    await set_policy(proxy, settle_max_ms=0, on_saturation="warn", target_tps_per_session=1e-3)
    assert int((await post(proxy, "newer")).headers["x-sessions-remaining"]) > 0


async def test_an_advisory_policy_refuses_nobody_and_says_what_it_would_have_done(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0, mode="advisory")
    await busy.begin()
    answer = await post(proxy, "new")
    assert answer.status_code == 200
    assert "x-sessions-remaining" not in answer.headers
    (last, *_) = await admissions(proxy)
    assert (last["decision"], last["reason"]) == ("admitted", "projected mean tps below floor")


async def test_a_new_session_waits_for_the_measurement_of_the_one_before(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, target_tps_per_session=1e-3, settle_tokens=20, settle_max_ms=60_000)
    await busy.begin()
    answer = await post(proxy, "new", n_predict=30)
    assert answer.status_code == 200
    (last, *_) = await admissions(proxy)
    assert last["decision"] == "admitted"


async def test_unpooled_requests_are_not_asked(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0, guarantee_min_sessions=0)
    for body in ({"prompt": "Something else."}, body_of("no", cache_prompt=False)):
        answer = await proxy.client.post("/completion", json={"n_predict": 2, "session_id": "x", **body})
        assert answer.status_code == 200
    assert (await admissions(proxy))[0] is None


async def test_a_turn_is_held_and_never_refused(engine: FakeEngine, proxy: Proxy, busy: Busy) -> None:
    assert (await post(proxy, "old")).status_code == 200
    await set_policy(proxy, max_turn_hold_ms=60_000)
    await busy.begin()
    turn = asyncio.create_task(post(proxy, "old"))
    await until(lambda: proxy.control.door.n_held == 1)
    (shown, *_) = await admissions(proxy)
    assert (shown["decision"], shown["waits_for"], shown["place"]) == ("continuation", "turn", 1)
    await busy.end()
    answer = await turn
    assert answer.status_code == 200
    (last, *_) = (await proxy.client.get("/polykv/requests")).json()["requests"]
    assert last["held_ms"]["turn"] > 0
    assert answer.json()["polykv"]["hold_ms"] == last["hold_ms"] >= last["held_ms"]["turn"]


async def test_a_held_turn_whose_client_leaves_is_gone(engine: FakeEngine, proxy: Proxy, busy: Busy) -> None:
    assert (await post(proxy, "old")).status_code == 200
    await set_policy(proxy, max_turn_hold_ms=60_000)
    await busy.begin()
    n_sent = len(engine.requests("/completion"))
    turn = asyncio.create_task(post(proxy, "old"))
    await until(lambda: proxy.control.door.n_held == 1)
    turn.cancel()
    await asyncio.wait([turn])
    await until(lambda: proxy.control.door.n_held == 0)
    assert len(engine.requests("/completion")) == n_sent


async def test_without_a_policy_nothing_of_it_is_there(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    """The same requests, the same replies and the same questions to the engine, before a policy and after it."""
    seen = []
    for with_one in (False, True, False):
        async with make_proxy(engine.url) as proxy:
            await made(proxy, prompt=ROOT, name="root")
            if with_one:
                await set_policy(proxy)
                await proxy.client.delete("/polykv/pools/root/admission")
            await until(lambda p=proxy: p.control.door._reader is None or p.control.door._reader.done())
            answer = await post(proxy, "s")
            said = answer.json()
            said.pop("timings")
            said["polykv"].pop("session_tps")
            sent = engine.requests("/completion")[-1].json()
            for own in ("shared_pool_epoch", "shared_pool_gen", "shared_pool_slot"):
                sent.pop(own)
            seen.append((sorted(answer.headers.keys()), said, sent, await admissions(proxy)))
            assert proxy.control.door.counts == Counts()
        await engine.restart()
    assert seen[0] == seen[1] == seen[2]
    assert "x-sessions-remaining" not in seen[0][0]


async def test_a_stream_that_is_held_for_long_is_kept_alive(
    engine: FakeEngine, proxy: Proxy, busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_alive, "EVERY_S", 0.02)
    assert (await post(proxy, "old")).status_code == 200
    await set_policy(proxy, max_turn_hold_ms=60_000)
    await busy.begin()
    lines: list[str] = []
    async with proxy.client.stream("POST", "/completion", json=body_of("old", stream=True)) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
        assert (answer.headers["x-session-id"], answer.headers["x-pool-id"]) == ("old", "1")
        async for line in answer.aiter_lines():
            lines.append(line)
            if lines.count(": hold") == 3:
                await busy.end()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert orjson.loads(data[-1])["polykv"]["hold_ms"] > 0
    assert {line for line in lines if not line.startswith("data: ")} == {": hold", ""}
    assert lines.index("data: " + data[0]) > max(i for i, line in enumerate(lines) if line == ": hold")


async def test_what_fails_after_a_hold_is_an_event_of_the_stream(
    engine: FakeEngine, proxy: Proxy, busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_alive, "EVERY_S", 0.02)
    assert (await post(proxy, "old")).status_code == 200
    await set_policy(proxy, max_turn_hold_ms=60_000)
    await busy.begin()
    engine.on("/completion", "request", reply(400, {"error": {"code": 400, "message": "no such sampler"}}))
    text, is_torn = "", False
    try:
        async with proxy.client.stream("POST", "/completion", json=body_of("old", stream=True)) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if ": hold" in text:
                    await busy.end()
    except httpx.RemoteProtocolError:
        is_torn = True
    assert is_torn  # no proper end
    event = orjson.loads(text.partition("event: error\ndata: ")[2])
    assert (event["error"]["code"], event["error"]["engine_status"]) == ("upstream_error", 400)
    assert "no such sampler" in event["error"]["message"]


async def test_a_reading_has_who_is_in_and_not_who_waits(engine: FakeEngine, proxy: Proxy, busy: Busy) -> None:
    assert (await post(proxy, "idle")).status_code == 200
    await set_policy(proxy, settle_max_ms=0, on_saturation="queue")
    await busy.begin()
    busy.turns.append(asyncio.create_task(post(proxy, "busy", n_predict=2000, stream=True, overcommit=True)))
    await until(lambda: len(proxy.control.sessions.get(SessionId("busy")).turns) == 2)
    waits = asyncio.create_task(post(proxy, "waits"))
    await until(lambda: proxy.control.door.n_waiting == 1)

    def told() -> dict[str, SessionFacts]:
        facts = proxy.control.door.gate.measured.facts
        return {s.session_id: s for s in facts.sessions} if facts is not None else {}

    await until(lambda: [s.state for s in told().values()].count("decoding") == 2)
    assert told().keys() == {"idle", "busy", "busy\0002"}
    assert {(s.pool_id, s.scope) for s in told().values()} == {(1, 1)}
    await until(lambda: min(told()[name].n_decoded for name in ("busy", "busy\0002")) > 3)
    before = told()
    await until(lambda: told()["busy"].n_decoded > before["busy"].n_decoded)
    assert before["idle"].n_decoded == 2
    assert before["busy"].own_cells > len("You are busy.")
    waits.cancel()
    await asyncio.wait([waits])


async def test_the_policy_of_the_settings_gates_pools_without_one(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, default_target_tps=FLOOR, default_mode="enforced") as proxy:
        engine.token_s = 0.01
        await made(proxy, prompt=ROOT, name="root")
        busy = Busy(proxy, engine)
        await busy.begin()
        refused = await post(proxy, "new", n_predict=1)
        assert refused.status_code == 429
        assert (await admissions(proxy))[0]["scope"] == 1
        await busy.end()


async def test_a_session_that_is_deleted_gives_its_place_to_the_next(proxy: Proxy, busy: Busy) -> None:
    await set_policy(proxy, settle_max_ms=0, on_saturation="queue")
    assert (await post(proxy, "done", n_predict=200)).status_code == 200
    await until(lambda: proxy.control.door.gate.measured.rates.n_active == 0)
    waits = asyncio.create_task(post(proxy, "next"))
    await until(lambda: proxy.control.door.n_waiting == 1)
    (shown, *_) = await admissions(proxy)
    assert shown["reason"] == "projected mean tps below floor (idle estimate)"
    assert (await proxy.client.delete("/polykv/sessions/done")).status_code == 200
    assert (await waits).status_code == 200
    assert (await admissions(proxy))[0]["decision"] == "guaranteed"
