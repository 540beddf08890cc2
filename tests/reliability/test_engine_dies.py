"""kill -9 of the engine: nobody takes half an answer for a whole one, and everything works again by itself."""

import asyncio
from typing import Any

import httpx
import pytest

from polykv_proxy.upstream import EngineClient
from tests.contract.conftest import error_of, made
from tests.fake_engine import FakeEngine, Hold
from tests.relay.conftest import Proxy
from tests.relay.dialect_cases import PATHS, SYSTEM, body_of, events_of, receipt_at
from tests.relay.raw import connected, unchunked, until
from tests.reliability.conftest import leave_nothing, post_json

ENDS = (b"[DONE]", b"message_stop", b"response.completed", b'"stop":true')
N_PIECES = {"/completion": 5, "/v1/completions": 6, "/v1/chat/completions": 7, "/v1/messages": 9, "/v1/responses": 10}
"""So many pieces a stream of four tokens has, with its end."""


@pytest.fixture
def engine_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all at once."""
    real = FakeEngine.__init__
    monkeypatch.setattr(FakeEngine, "__init__", lambda self: real(self, n_slots=20))


async def read_stream(proxy: Proxy, path: str, fields: dict[str, Any]) -> bytes:
    """All bytes of a streamed reply, as they were on the wire, until the connection is closed."""
    async with connected(proxy.url) as (reader, writer):
        writer.write(post_json(path, body_of(path, stream=True, **fields)))
        return await asyncio.wait_for(reader.read(-1), 20)


@pytest.mark.parametrize("after", ["first", "middle", "last"])
@pytest.mark.usefixtures("engine_slots")
async def test_open_streams_of_every_dialect_end_with_an_error_and_never_like_a_whole_answer(
    engine: FakeEngine, proxy: Proxy, after: str
) -> None:
    """All at once, pooled and not: killed after their first piece, in the middle, and before their last one."""
    pool = await made(proxy, messages=[{"role": "system", "content": SYSTEM}], name="chats")
    holds = []
    for path in PATHS:
        n_pieces = {"first": 1, "middle": 3, "last": N_PIECES[path] - 1}[after]
        holds.append(Hold())
        engine.on(path, f"chunk:{n_pieces}", holds[-1], times=None)
    pooled = {"pool_id": pool["pool_id"], "session_id": "p"}
    asked = [(path, fields) for path in PATHS for fields in ({}, {"session_id": "s"}, pooled)]
    streams = [asyncio.create_task(read_stream(proxy, path, fields)) for path, fields in asked]
    await until(lambda: all(hold.n == 3 for hold in holds), 20)
    await engine.kill()
    for (path, _), got in zip(asked, await asyncio.gather(*streams), strict=True):
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding: chunked" in head.lower()
        assert not got.endswith(b"0\r\n\r\n"), "the body has no end"
        text = unchunked(body)
        assert text.split(b"\n\n")[-2].startswith(b"event: error\ndata: {"), text[-300:]
        events = events_of(text)
        assert len(events) > 1, "it had begun"
        assert events[-1]["error"]["code"] == "upstream_unavailable"
        assert (events[-1].get("type") == "error") == (path in ("/v1/messages", "/v1/responses"))
        if after != "last":
            assert not any(end in text for end in ENDS), text[-300:]
        assert not text.rstrip().endswith((b"[DONE]", b"message_stop"))
    await leave_nothing(proxy)


@pytest.mark.parametrize("path", PATHS)
def test_so_many_pieces_are_all(path: str) -> None:
    """The table is right: ``last`` is one short of a whole answer."""

    async def count() -> int:
        async with FakeEngine() as engine, httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
            n = 0

            async def one_more(request: Any) -> None:
                nonlocal n
                n += 1

            for i in range(20):
                engine.on(path, f"chunk:{i}", one_more)
            await client.post(path, json=body_of(path, stream=True))
            return n

    assert asyncio.run(count()) == N_PIECES[path]


async def test_new_work_is_told_to_come_back_and_is_served_when_the_engine_is(engine: FakeEngine, proxy: Proxy) -> None:
    await made(proxy, prompt=SYSTEM, name="root")
    hold = Hold()
    engine.on("/completion", "prefill", hold)
    running = asyncio.create_task(proxy.client.post("/completion", json=body_of("/completion")))
    await hold.reached()
    await engine.kill()
    answers = [await running]
    for path in PATHS:
        for stream in (False, True):
            answers.append(await proxy.client.post(path, json=body_of(path, stream=stream)))
    for answer in answers:
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert error_of(answer)["code"] == "upstream_unavailable"
    assert (await proxy.client.get("/polykv/health")).status_code == 503
    await leave_nothing(proxy)

    await engine.start()
    for path in PATHS:
        answer = await proxy.client.post(path, json=body_of(path))
        assert answer.status_code == 200, answer.text
    await until(lambda: proxy.control.hooks)
    answer = await proxy.client.post("/completion", json=body_of("/completion", session_id="s", pool_id="root"))
    assert answer.json()["polykv"]["cached_n_tokens"] >= len(SYSTEM)
    assert (await proxy.client.get("/polykv/health")).status_code == 200
    await leave_nothing(proxy)


# A restart between the decision and the turn -----------------------------------------------------------------------

TREE = {"root": "Root of all. ", "branch": "Root of all. A branch. ", "leaf": "Root of all. A branch. And a leaf. "}


async def make_tree(proxy: Proxy) -> None:
    await made(proxy, prompt=TREE["root"], name="root")
    await made(proxy, "/polykv/pools/root/fork", prompt=TREE["branch"], name="branch")
    await made(proxy, "/polykv/pools/branch/fork", prompt=TREE["leaf"], name="leaf")


@pytest.fixture
def restart_before(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> list[str]:
    """Pools whose next turn, decided and about to be sent, meets an engine that was just restarted."""
    wanted: list[str] = []
    real = EngineClient.open

    async def opened(self: EngineClient, method: str, path_qs: str, *args: Any, **kw: Any) -> Any:
        if path_qs == "/completion" and wanted:
            wanted.pop()
            await engine.restart()
        return await real(self, method, path_qs, *args, **kw)

    monkeypatch.setattr(EngineClient, "open", opened)
    return wanted


@pytest.mark.parametrize("name", TREE)
async def test_no_old_sequence_is_attached_and_every_pool_is_there_again(
    engine: FakeEngine, proxy: Proxy, restart_before: list[str], name: str
) -> None:
    """The text depends on the whole context: another one in an old sequence's place would show in it."""
    await make_tree(proxy)
    prompt = TREE[name] + "What now?"
    unpooled = await answer_of(engine.url, {"prompt": prompt, "cache_prompt": False})
    old_epoch = engine.epoch
    restart_before.append(name)
    told = await answer_of(proxy.url, {"prompt": prompt, "pool_id": name, "session_id": "s"})
    sent = engine.requests("/completion")[-1].json()
    assert (sent["shared_pool_epoch"], engine.epoch != old_epoch) == (old_epoch, True), "it came a moment too late"
    assert told["content"] == unpooled["content"]
    assert (told["timings"]["cache_n"], told["polykv"]["miss_reason"]) == (0, "upstream_restarted")
    for pool, text in TREE.items():
        prompt = text + "And now?"
        unpooled = await answer_of(engine.url, {"prompt": prompt, "cache_prompt": False})
        told = await answer_of(proxy.url, {"prompt": prompt, "pool_id": pool, "session_id": pool})
        assert told["content"] == unpooled["content"]
        assert (told["timings"]["pool_n"], told["polykv"]["miss_reason"]) == (len(text), None)
    shown = (await proxy.client.get("/polykv/pools")).json()["pools"]
    assert {p["name"]: (p["pool_id"], p["prefix_len"]) for p in shown} == {
        n: (i, len(text)) for i, (n, text) in enumerate(TREE.items(), 1)
    }


async def answer_of(url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
        answer = await client.post("/completion", json={"n_predict": 8, **body})
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told


@pytest.mark.parametrize("path", PATHS)
async def test_a_restart_between_two_turns_asks_nothing_of_the_client(
    engine: FakeEngine, proxy: Proxy, path: str
) -> None:
    source = {"prompt": SYSTEM} if "completion" in path and "chat" not in path else None
    await made(proxy, **(source or {"messages": [{"role": "system", "content": SYSTEM}]}), name="root")
    for reasons in ([None], [None, "upstream_restarted"], [None]):
        answer = await proxy.client.post(path, json=body_of(path, session_id="s", pool_id="root"))
        receipt = receipt_at(path, answer.content, stream=False)
        assert receipt["miss_reason"] in reasons
        if receipt["miss_reason"] is None:
            assert receipt["prefix_n_tokens"] >= len(SYSTEM)
        if len(reasons) == 1 and engine.n_starts == 1:
            await engine.restart()
