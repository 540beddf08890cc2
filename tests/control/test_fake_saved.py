"""What the fake engine says of saved states is what tests build on; ``tests/engine`` compares it with the real one.

All through the client, so that it is the client's own words that come back.
"""

import asyncio
import json
from array import array

import aiohttp
import pytest

from polykv_proxy import errors
from polykv_proxy.upstream import EngineClient
from tests.fake_engine import FakeEngine, Hold, drop, reply

MIB = 1 << 20
TEXT = "You are a helpful agent. "


@pytest.fixture
async def engine():
    async with FakeEngine(save_ram=MIB, save_disk=MIB) as engine:
        yield engine


@pytest.fixture
async def client(engine):
    client = EngineClient(engine.url)
    yield client
    await client.close()


def tokens(text: str) -> array:
    return array("i", list(text.encode()))


async def root_and_child(client: EngineClient) -> tuple[int, int]:
    root = await client.materialize(tokens(TEXT), tag="root")
    child = await client.materialize(tokens(TEXT + "more"), tag="child", parent_seq=root.seq, branch_pos=10)
    return root.seq, child.seq


async def test_a_pool_comes_back_with_its_tokens_behind_any_parent_that_has_them(client, engine):
    root, child = await root_and_child(client)
    used, hash_before = engine.cache.used(), (await client.list_pools()).pools[1].tokens_hash
    saved = await client.save(seq=child, start=10, tag="c", to="both")
    assert (saved.start, saved.n_tokens, saved.places, saved.tokens_hash) == (10, 29, ("ram", "disk"), hash_before)
    assert engine.cache.used() == used  # the source stays
    await client.free(child)
    with pytest.raises(errors.SequenceGone):
        await client.load_pool("c", parent_seq=child)
    back = await client.load_pool("c", parent_seq=root, start=10)
    assert (back.tokens_hash, back.branch_pos, back.n_cached, back.n_processed) == (hash_before, 10, 29, 0)
    assert (engine.cache.used(), back.cells.used, engine.saved.n_loaded) == (used, used, 1)


async def test_a_parked_slot_decodes_as_if_it_had_stayed(client, engine):
    root, _ = await root_and_child(client)
    prompt = TEXT + "and now?"

    async def turn(slot: int, **fields: object) -> dict:
        body = json.dumps({"prompt": prompt, "n_predict": 3, "id_slot": slot, **fields}).encode()
        async with await client.open("POST", "/completion", [], body) as response:
            return json.loads(await response.read())

    first = await turn(0, shared_pool_slot=root)
    await client.save(id_slot=0, start=len(TEXT), n_tokens=len(prompt), tag="s")
    loaded = await client.load_slot("s", id_slot=2, parent_seq=root)
    assert (loaded.id_slot, loaded.n_pool_shared, loaded.n_tokens) == (2, len(TEXT), len(prompt))
    again = await turn(2)
    assert again["content"] == first["content"]
    assert again["timings"]["prompt_n"] == 1


async def test_loading_takes_the_lowest_cells_and_hi_tells(client, engine):
    low = await client.materialize(tokens("x" * 100), tag="low")
    high = await client.materialize(tokens("y" * 40), tag="high")
    assert (await client.stats()).cells.hi == 140
    await client.save(seq=high.seq, tag="high")
    await client.free(low.seq)
    cells = (await client.stats()).cells
    assert (cells.used, cells.hi) == (40, 140)  # what stays does not move
    await client.free(high.seq)
    assert (await client.load_pool("high")).cells.hi == 40


async def test_memory_outlives_a_sleep_and_files_a_restart(client, engine):
    root, child = await root_and_child(client)
    await client.save(seq=root, tag="r")
    await client.save(seq=child, start=10, tag="c", to="disk")
    engine.sleep()
    assert (await client.list_pools()).sleeping
    assert (await client.load_pool("r")).n_tokens == 25  # it woke up for that
    assert [(s.tag, s.places) for s in (await client.list_pools()).saved] == [("r", ("ram",)), ("c", ("disk",))]
    await engine.restart()
    assert [s.tag for s in (await client.list_pools()).saved] == ["c"]
    with pytest.raises(errors.SavedGone):
        await client.load_pool("r")


async def test_another_models_file_is_foreign_and_gives_way(client, engine):
    root, _ = await root_and_child(client)
    engine.saved.disk_max = 40_000
    await client.save(seq=root, tag="r", to="disk")
    engine.fingerprint = "another"
    await engine.restart()
    (foreign,) = (await client.list_pools()).saved
    assert (foreign.tag, foreign.usable) == ("r", False)
    with pytest.raises(errors.SavingRefused, match="another model"):
        await client.load_pool("r")
    root, _ = await root_and_child(client)
    await client.save(seq=root, tag="new", to="disk")
    assert [s.tag for s in (await client.list_pools()).saved] == ["new"]


async def test_budgets_name_what_is_needed_and_what_is_free(client, engine):
    root, child = await root_and_child(client)
    engine.saved.ram_max = 30_000
    await client.save(seq=root, tag="r")
    await client.save(seq=root, tag="r")  # takes its own place
    ram = (await client.stats()).saved.ram
    assert (ram.n_bytes, ram.n_bytes_max) == (25 * 1028, 30_000)
    with pytest.raises(errors.SavedBudget) as full:
        await client.save(seq=child, start=10, tag="c")
    assert (full.value.need, full.value.free) == (19 * 1024, 30_000 - 25 * 1028)
    await client.forget_saved("r")
    await client.forget_saved("r")  # gone is gone
    await client.save(seq=child, start=10, tag="c")


async def test_a_disk_that_fails_leaves_the_copy_in_memory(client, engine):
    root, _ = await root_and_child(client)
    engine.saved.disk_fails = "cannot write x.state: No space left on device"
    saved = await client.save(seq=root, tag="r", to="both")
    assert (saved.places, saved.disk_error.code, saved.disk_error.need) == (("ram",), 507, None)
    with pytest.raises(errors.SavedBudget, match="No space left"):
        await client.save(seq=root, tag="other", to="disk")
    assert [s.tag for s in (await client.list_pools()).saved] == ["r"]


async def test_a_damaged_file_is_gone_once_it_was_read(client, engine):
    root, _ = await root_and_child(client)
    await client.save(seq=root, tag="r", to="disk")
    engine.saved.damage("r")
    assert [s.tag for s in (await client.list_pools()).saved] == ["r"]
    with pytest.raises(errors.SavedGone, match="checksum"):
        await client.load_pool("r")
    assert (await client.list_pools()).saved == ()


async def test_a_load_that_fails_changes_nothing(client, engine):
    root, child = await root_and_child(client)
    await client.save(seq=child, start=10, tag="c")
    other = await client.materialize(tokens("@" * 30), tag="other")
    engine.cache.n_cells = engine.cache.used() + 5
    before = (engine.cache.used(), [p.seq for p in engine.ready_pools()])
    with pytest.raises(errors.PrefixMismatch) as differs:
        await client.load_pool("c", parent_seq=other.seq)
    assert differs.value.divergence_pos == 0
    with pytest.raises(errors.SavingRefused):
        await client.load_pool("c", parent_seq=root, start=9)
    with pytest.raises(errors.SavingRefused, match="in use"):
        await client.load_pool("c", parent_seq=root, seq=child)
    with pytest.raises(errors.KvExhausted) as short:
        await client.load_slot("c", id_slot=0, parent_seq=root)
    assert short.value.extra["cells_missing"] == 19 - 5
    assert (engine.cache.used(), [p.seq for p in engine.ready_pools()]) == before


async def test_a_slot_at_work_can_be_saved_and_not_loaded(client, engine):
    hold = Hold()
    engine.on("/completion", "chunk:1", hold)
    body = b'{"prompt":"hello","stream":true,"id_slot":1}'
    response = await client.open("POST", "/completion", [], body)
    await hold.reached()
    assert (await client.save(id_slot=1, tag="s")).n_tokens > 5
    with pytest.raises(errors.SavingRefused, match="busy"):
        await client.load_slot("s", id_slot=1)
    hold.release()
    assert await response.read()


async def test_answers_are_lost_and_refused_on_demand(client, engine):
    root, _ = await root_and_child(client)
    engine.on("save", "reply", drop())
    with pytest.raises(errors.UpstreamUnavailable):
        await client.save(seq=root, tag="r")
    assert [s.tag for s in (await client.list_pools()).saved] == ["r"]
    gone = {"error": {"code": 410, "message": "nothing is saved under 'r'", "type": "polykv_error"}}
    engine.on("load", "request", reply(410, gone))
    with pytest.raises(errors.SavedGone):
        await client.load_pool("r")
    engine.on("forget", "request", drop(), times=2)  # aiohttp repeats a DELETE on a connection that it used before
    with pytest.raises(errors.UpstreamUnavailable):
        await client.forget_saved("r")
    assert (await client.load_pool("r")).tag == "r"


async def test_killed_while_it_writes_leaves_no_file(client, engine):
    root, _ = await root_and_child(client)
    engine.on("save", "write", engine.die())
    with pytest.raises(errors.UpstreamUnavailable):
        await asyncio.wait_for(client.save(seq=root, tag="r", to="both"), 5)
    await engine.start()
    assert (await client.list_pools()).saved == ()


async def test_what_is_in_memory_is_written_later(client, engine):
    root, child = await root_and_child(client)
    await client.save(seq=root, tag="r")
    await client.free(root)
    assert (await ordered(engine, op="save", tag="r", to="disk"))["in"] == ["ram", "disk"]
    for change, is_lost in (("?in=ram", False), ("?in=disk", True)):
        await client.save(seq=child, tag="c")
        hold = Hold()
        engine.on("save", "write", hold)
        writing = asyncio.create_task(ordered(engine, op="save", tag="c", to="disk"))
        await hold.reached()
        async with aiohttp.ClientSession() as session:
            await session.delete(f"{engine.url}/polykv/engine/saved/c{change}")
        hold.release()
        answer = await writing
        assert ("error" in answer, [f.tag for f in engine.saved.files]) == (is_lost, ["r"] if is_lost else ["r", "c"])
    assert "saved again while it was written" in answer["error"]["message"]


async def test_a_start_without_a_budget_removes_the_files(client, engine):
    root, _ = await root_and_child(client)
    await client.save(seq=root, tag="r", to="both")
    engine.saved.disk_max = 0
    await engine.restart()
    assert (engine.saved.files, (await client.list_pools()).saved) == ([], ())


async def ordered(engine: FakeEngine, **order: object) -> dict:
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{engine.url}/polykv/engine/pools", json=order)
        return await response.json()


async def test_an_engine_without_budgets_saves_nothing():
    async with FakeEngine() as engine:
        client = EngineClient(engine.url)
        made = await client.materialize(tokens(TEXT), tag="r")
        with pytest.raises(errors.SavingUnsupported, match="--polykv-save-ram"):
            await client.save(seq=made.seq, tag="r")
        usage = (await client.stats()).saved
        assert (usage.ram.n_bytes_max, usage.disk.n_bytes_max) == (0, 0)
        assert "--polykv-save-disk" in usage.disk.why_off
        await client.close()
