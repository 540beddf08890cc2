"""The fake engine keeps the promises that the other tests build on."""

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest

from tests.fake_engine import FakeEngine, Hold, drop

PREFIX = "You are a helpful agent. "

TEXT_OF = {
    "/completion": lambda e: e["content"],
    "/v1/completions": lambda e: e["choices"][0]["text"],
    "/v1/chat/completions": lambda e: "".join(c["delta"].get("content") or "" for c in e["choices"]),
    "/v1/messages": lambda e: e.get("delta", {}).get("text", ""),
    "/v1/responses": lambda e: e["delta"] if e["type"] == "response.output_text.delta" else "",
}


async def post(engine: FakeEngine, path: str, body: dict) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as s, s.post(engine.url + path, json=body) as r:
        return r.status, await r.json()


async def materialize(engine: FakeEngine, text: str, **kw: object) -> dict:
    tokens = engine.template.tokenizer.encode(text)
    status, answer = await post(engine, "/polykv/engine/pools", {"op": "materialize", "tokens": tokens, **kw})
    assert status == 200, answer
    return answer


async def test_attach_shares_cells_and_text_is_the_same(engine):
    pool = await materialize(engine, PREFIX)
    body = {"prompt": PREFIX + "one", "n_predict": 4}
    _, plain = await post(engine, "/completion", body | {"id_slot": 0})
    used = engine.cache.used()
    _, pooled = await post(engine, "/completion", body | {"id_slot": 1, "shared_pool_slot": pool["seq"]})
    assert pooled["content"] == plain["content"]
    assert (plain["timings"]["cache_n"], pooled["timings"]["cache_n"]) == (0, len(PREFIX))
    assert pooled["timings"]["pool_n"] == len(PREFIX)
    assert engine.cache.used() - used == 3 + 4  # the suffix and the generated tokens, once


async def test_attach_for_another_generation_or_epoch_is_ignored(engine):
    pool = await materialize(engine, PREFIX)
    for wrong in ({"shared_pool_gen": pool["gen"] + 1}, {"shared_pool_epoch": "other"}):
        body = {"prompt": PREFIX + "x", "cache_prompt": True, "shared_pool_slot": pool["seq"], "id_slot": 2, **wrong}
        engine.slots[2].cut(0)
        _, answer = await post(engine, "/completion", body)
        assert answer["timings"]["cache_n"] == 0


async def test_cells_live_until_the_last_holder_leaves(engine):
    pool = await materialize(engine, PREFIX)
    child = await materialize(engine, PREFIX + "more", parent_seq=pool["seq"], branch_pos=10)
    assert engine.cache.used() == len(PREFIX) + len(PREFIX) + 4 - 10
    async with aiohttp.ClientSession() as s:
        async with s.delete(f"{engine.url}/polykv/engine/pools/{pool['seq']}") as r:
            assert r.status == 200
        assert engine.cache.used() == len(PREFIX) + 4
        async with s.delete(f"{engine.url}/polykv/engine/pools/{child['seq']}") as r:
            assert r.status == 200
    assert engine.cache.used() == 0


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/completion", {"prompt": "hi"}, '"stop":true'),
        ("/v1/completions", {"prompt": "hi"}, "[DONE]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "[DONE]"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}, "message_stop"),
        ("/v1/responses", {"input": "hi"}, "response.completed"),
    ],
)
async def test_every_dialect_streams_the_text_of_its_whole_reply(engine, path, body, last):
    engine.byte_by_byte = True
    _, whole = await post(engine, path, body)
    async with aiohttp.ClientSession() as s, s.post(engine.url + path, json=body | {"stream": True}) as r:
        text = (await r.read()).decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert last in text.strip().splitlines()[-1]
    streamed = "".join(TEXT_OF[path](e) for e in events)
    assert streamed
    assert streamed in json.dumps(whole)


async def test_client_that_leaves_frees_its_slot_and_is_recorded(engine):
    hold = Hold()
    engine.on("/completion", "prefill", hold)
    job = asyncio.ensure_future(post(engine, "/completion", {"prompt": "x"}))
    await hold.reached()
    assert [x.state for x in engine.slots].count("idle") == 3
    job.cancel()
    await engine.received[-1].ended(1)
    assert engine.received[-1].left
    assert all(x.state == "idle" for x in engine.slots)


async def test_materialize_survives_its_client(engine):
    engine.on("materialize", "reply", drop())
    with pytest.raises(aiohttp.ClientError):
        await materialize(engine, PREFIX, tag="t1")
    assert [p.tag for p in engine.ready_pools()] == ["t1"]


async def test_kill_and_restart_on_the_same_port(engine):
    await materialize(engine, PREFIX)
    epoch, port = engine.epoch, engine.port
    engine.on("/completion", "chunk:2", engine.die())
    with pytest.raises(aiohttp.ClientError):
        await post(engine, "/completion", {"prompt": "x", "stream": True})
    with pytest.raises(aiohttp.ClientConnectorError):
        await post(engine, "/completion", {"prompt": "x"})
    await engine.start()
    assert (engine.port, engine.epoch == epoch, engine.ready_pools()) == (port, False, [])


async def test_plain_llama_server_has_no_hooks():
    async with FakeEngine(hooks=False) as engine, aiohttp.ClientSession() as s:
        async with s.get(engine.url + "/polykv/engine/stats") as r:
            assert r.status == 404
        status, answer = await post(engine, "/completion", {"prompt": "hi", "shared_pool_slot": 7})
        assert status == 200
        assert "pool_n" not in answer["timings"]


@pytest.mark.parametrize("n_steps", range(6))
async def test_nobody_stays_connected_to_a_killed_engine(n_steps):
    """Also who was accepted that very moment, however far the event loop got with it."""
    async with FakeEngine() as engine:
        client = socket.create_connection(("127.0.0.1", engine.port))
        client.setblocking(False)
        with client:
            for _ in range(n_steps):
                await asyncio.sleep(0)
            await engine.kill()
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 5) == b""


async def test_a_killing_under_way_is_waited_for():
    hold = Hold()
    async with FakeEngine() as engine, aiohttp.ClientSession() as session:
        engine.on("list", "request", hold)
        engine.on("stats", "request", engine.die())
        asked = [asyncio.create_task(session.get(engine.url + "/polykv/engine/pools"))]
        await hold.reached()
        asked.append(asyncio.create_task(session.get(engine.url + "/polykv/engine/stats")))
        for _ in range(10_000):
            if not engine.running:
                break
            await asyncio.sleep(0)  # by single steps: it has only begun to die
        await engine.kill()
        assert [received.left for received in engine.received] == [True, True]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, aiohttp.ClientError) for answer in answers)
