"""``POST /polykv/pools/{id}/compact``: everything moves, or nothing has changed."""

import asyncio
import json
import os
import random
import shutil
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from polykv_proxy.errors import JournalFailed
from polykv_proxy.ids import PoolId
from polykv_proxy.store.database import Change, Database
from tests.contract.conftest import ask, error_of, made
from tests.control.conftest import eventually
from tests.fake_engine import FakeEngine
from tests.fake_engine.faults import Hold, reply
from tests.relay.conftest import Proxy, ProxyMaker

TRUNK = list(range(1, 61))
OLD = TRUNK + list(range(100, 180))
BELOW = OLD + list(range(200, 230))
NEW = TRUNK + list(range(250, 270))


async def grown(proxy: Proxy, **fields: Any) -> None:
    """A trunk (1), a working pool behind it (2), one below that (3)."""
    await made(proxy, tokens=TRUNK, name="trunk")
    await made(proxy, "/polykv/pools/1/fork", tokens=OLD, name="work", **fields)
    await made(proxy, "/polykv/pools/2/fork", tokens=BELOW)


async def compact(proxy: Proxy, ref: int | str = "work", *, expect: int = 201, **body: Any) -> Any:
    answer = await proxy.client.post(f"/polykv/pools/{ref}/compact", json={"ancestor": "trunk", "tokens": NEW} | body)
    assert answer.status_code == expect, answer.text
    if expect == 201:
        assert answer.headers["location"] == f"/polykv/pools/{answer.json()['pool_id']}"
        return answer.json()
    return error_of(answer)


async def pools(proxy: Proxy) -> dict[int, dict[str, Any]]:
    return {pool["pool_id"]: pool for pool in (await proxy.client.get("/polykv/pools")).json()["pools"]}


async def used(proxy: Proxy) -> int:
    return (await proxy.client.get("/polykv/pools")).json()["kv_cells_used"]


def state(found: dict[int, dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    """What a failed compaction must leave alone."""
    fields = ("name", "parent", "prefix_len", "pinned", "residency")
    return {
        pool_id: (*(pool[field] for field in fields), sorted(s["session_id"] for s in pool["sessions"]))
        for pool_id, pool in found.items()
    }


async def test_sessions_pin_policy_and_name_move_and_the_old_pools_go(proxy: Proxy) -> None:
    await grown(proxy, pin=True)
    policy = {"target_tps_per_session": 5, "mode": "advisory"}
    assert (await proxy.client.post("/polykv/pools/work/admission", json=policy)).status_code == 200
    await ask(proxy, [*OLD, 90], session_id="a", pool_id="work")
    await ask(proxy, [*BELOW, 91], session_id="b", pool_id=3)
    await ask(proxy, [*TRUNK, 92], session_id="elsewhere", pool_id="trunk")
    before = await used(proxy)

    answer = await compact(proxy)
    assert (answer["pool_id"], answer["name"], answer["parent"]) == (4, "work", 1)
    assert (answer["prefix_len"], answer["branch_pos"], answer["pinned"]) == (80, 60, True)
    assert answer["released"] == [3, 2]
    moved = {session["session_id"]: (session["from_pool_id"], session["n_running"]) for session in answer["moved"]}
    assert moved == {"a": (2, 0), "b": (3, 0)}
    found = await pools(proxy)
    assert state(found) == {
        1: ("trunk", -1, 60, False, "resident", ["elsewhere"]),
        4: ("work", 1, 80, True, "resident", ["a", "b"]),
    }
    shown = (await proxy.client.get("/polykv/pools/work/admission")).json()
    assert (shown["source"], shown["target_tps_per_session"]) == ("own", 5)

    # Their next turns begin with the new pool, whoever names it and whoever does not.
    by_name = await ask(proxy, [*NEW, 93], session_id="a", pool_id="work")
    by_session = await ask(proxy, [*NEW, 94], session_id="b")
    for receipt in (by_name, by_session):
        assert (receipt["pool_id"], receipt["prefix_n_tokens"], receipt["miss_reason"]) == (4, 80, None)
        assert receipt["cached_n_tokens"] == 80
    assert await used(proxy) < before


async def test_what_is_kept_stays_and_only_the_named_move(proxy: Proxy) -> None:
    await grown(proxy)
    for session_id in ("a", "b"):
        await ask(proxy, [*OLD, 90], session_id=session_id, pool_id="work")
    answer = await compact(proxy, sessions=["b", "b"], release_old=False, name="short")
    assert [session["session_id"] for session in answer["moved"]] == ["b"]
    assert (answer["released"], answer["freed_now"], answer["freed_later"]) == ([], None, None)
    found = await pools(proxy)
    names = {pool_id: pool["name"] for pool_id, pool in found.items()}
    assert names == {1: "trunk", 2: "work", 3: None, 4: "short"}
    assert [s["session_id"] for s in found[2]["sessions"]] == ["a"]
    assert [s["session_id"] for s in found[4]["sessions"]] == ["b"]


async def test_a_turn_that_runs_goes_on_and_its_session_stays_moved(engine: FakeEngine, proxy: Proxy) -> None:
    await grown(proxy)
    held = Hold()
    engine.on("/completion", "prefill", held)
    body = {"prompt": [*OLD, 90], "n_predict": 2, "session_id": "a", "pool_id": "work"}
    running = asyncio.create_task(proxy.client.post("/completion", json=body))
    await held.reached()
    answer = await compact(proxy)
    assert answer["moved"] == [{"session_id": "a", "from_pool_id": 2, "n_running": 1}]
    held.release()
    assert (await running).status_code == 200
    assert (await proxy.client.get("/polykv/sessions/a")).json()["pool_id"] == 4
    assert (await ask(proxy, [*NEW, 91], session_id="a"))["cached_n_tokens"] == 80


@pytest.mark.parametrize(
    ("ref", "body", "status", "code"),
    [
        ("work", {"ancestor": "work"}, 400, "invalid_request"),
        ("work", {"ancestor": 3}, 400, "invalid_request"),
        ("work", {"ancestor": "nobody"}, 404, "pool_not_found"),
        ("nobody", {}, 404, "pool_not_found"),
        ("work", {"sessions": ["nobody"]}, 404, "session_not_found"),
        ("work", {"tokens": [7, *NEW]}, 409, "prefix_mismatch"),
        ("work", {"tokens": [*TRUNK[:20], *NEW[60:]]}, 409, "prefix_mismatch"),
        ("work", {"tokens": [*TRUNK, *[9] * 110]}, 400, "invalid_request"),
        ("work", {"tokens": [*TRUNK, *[9] * 110], "release_old": False}, 400, "invalid_request"),
        ("work", {"name": "trunk"}, 409, "name_taken"),
        ("work", {"prompt": "two sources"}, 400, "invalid_request"),
        ("work", {"keep": True}, 400, "invalid_request"),
    ],
)
async def test_what_cannot_be_done_changes_nothing(
    proxy: Proxy, ref: str, body: dict[str, Any], status: int, code: str
) -> None:
    await grown(proxy)
    await ask(proxy, [*OLD, 90], session_id="a", pool_id="work")
    before = state(await pools(proxy))
    error = await compact(proxy, ref, expect=status, **body)
    assert error["code"] == code
    assert state(await pools(proxy)) == before


async def test_who_is_refused_is_told_how_far_it_went_right(engine: FakeEngine, proxy: Proxy) -> None:
    """Before anything is prefilled for it."""
    await grown(proxy)
    n_made = engine.hooks.n_materialized
    unlike = await compact(proxy, expect=409, tokens=[*TRUNK[:43], *NEW[60:]])
    assert unlike["divergence_pos"] == 43
    assert "first 43 tokens in common with pool trunk, and 60 of that pool are to stay" in unlike["message"]
    longer = await compact(proxy, expect=400, tokens=[*TRUNK, *[9] * 110])
    assert longer["param"] == "tokens"
    assert (
        "has 170 tokens, no fewer than what it is to replace: pool work and what is below it have 170"
        in (longer["message"])
    )
    assert engine.hooks.n_materialized == n_made


async def test_the_last_tokens_of_the_ancestor_may_be_joined_with_what_follows(proxy: Proxy) -> None:
    await grown(proxy)
    assert (await compact(proxy, tokens=[*TRUNK[:44], *NEW[60:]]))["branch_pos"] == 44


async def test_only_what_the_old_pool_has_of_its_ancestor_must_stay(proxy: Proxy) -> None:
    await grown(proxy)
    await made(proxy, "/polykv/pools/work/fork", tokens=[*OLD[:100], *[8] * 60], name="branch")
    answer = await compact(proxy, "branch", ancestor="work", tokens=[*OLD[:100], 7])
    assert (answer["branch_pos"], answer["released"]) == (100, [4])


async def test_it_may_go_on_from_another_family(proxy: Proxy) -> None:
    """New tools, say. Then it must begin with all of that pool."""
    await grown(proxy)
    other = list(range(30, 80))
    await made(proxy, tokens=other, name="other")
    assert (await compact(proxy, expect=409, ancestor="other"))["divergence_pos"] == 0
    assert (await compact(proxy, ancestor="other", tokens=[*other, 5]))["parent"] == 4


async def test_what_is_shorter_than_a_conversation_may_be_longer_than_its_pool(proxy: Proxy) -> None:
    """What is put shorter is what was said beyond the pool."""
    await grown(proxy)
    await ask(proxy, [*OLD, *[7] * 100], session_id="a", pool_id="work")
    long = [*TRUNK, *[9] * 150]
    assert 170 < len(long) < (await proxy.client.get("/polykv/sessions/a")).json()["ctx_used"]
    assert (await compact(proxy, tokens=long))["prefix_len"] == 210
    assert (await compact(proxy, expect=400, tokens=[*long, *[9] * 100]))["code"] == "invalid_request"


async def test_a_conversation_of_unknown_length_may_be_longer(engine: FakeEngine, proxy: Proxy) -> None:
    await grown(proxy)
    held = Hold()
    engine.on("/completion", "prefill", held)
    body = {"prompt": [*OLD, *[7] * 100], "n_predict": 2, "session_id": "a", "pool_id": "work"}
    running = asyncio.create_task(proxy.client.post("/completion", json=body))
    await held.reached()
    assert (await compact(proxy, tokens=[*TRUNK, *[9] * 150]))["prefix_len"] == 210
    held.release()
    assert (await running).status_code == 200


async def test_an_engine_that_fails_leaves_everything_as_it_was(engine: FakeEngine, proxy: Proxy) -> None:
    await grown(proxy, pin=True)
    await ask(proxy, [*OLD, 90], session_id="a", pool_id="work")
    before = state(await pools(proxy))
    engine.on("materialize", "request", reply(500, {"error": {"message": "no", "type": "server_error"}}))
    await compact(proxy, expect=502)
    assert state(await pools(proxy)) == before


async def test_a_fork_that_is_being_made_below_the_old_pool_refuses_it(engine: FakeEngine, proxy: Proxy) -> None:
    await grown(proxy, pin=True)
    await ask(proxy, [*OLD, 90], session_id="a", pool_id="work")
    before = state(await pools(proxy))
    compacting_held, fork_held = Hold(), Hold()
    engine.on("materialize", "request", compacting_held)
    compacting = asyncio.create_task(compact(proxy, expect=409))
    await compacting_held.reached()
    engine.on("materialize", "request", fork_held)
    fork = asyncio.create_task(made(proxy, "/polykv/pools/3/fork", tokens=[*BELOW, 5, 6]))
    await eventually(lambda: PoolId(3) in proxy.control.tree._n_plans_of)
    compacting_held.release()
    error = await compacting
    fork_held.release()
    assert error["code"] == "pool_in_use"
    made_below = (await fork)["pool_id"]
    after = state(await pools(proxy))
    del after[made_below]
    assert after == before, "the pin, the session and the name are where they were"


async def test_a_journal_that_fails_leaves_everything_as_it_was(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    await grown(proxy, pin=True)
    await ask(proxy, [*OLD, 90], session_id="a", pool_id="work")
    before = state(await pools(proxy))

    async def fail(pool: Any, **_: Any) -> None:
        raise JournalFailed("the disk is full")

    monkeypatch.setattr(proxy.control.journal, "pool_replaces", fail)
    assert (await compact(proxy, expect=503))["code"] == "journal_failed"
    assert state(await pools(proxy)) == before


async def test_the_pin_of_the_longer_pool_makes_room_for_that_of_the_shorter(
    engine: FakeEngine, make_proxy: Any
) -> None:
    """Budget for one of the two: the old pool's pin is given up for the new one's, not beside it."""
    async with make_proxy(engine.url, pin_max_fraction=150 / engine.cache.n_cells) as proxy:
        await made(proxy, tokens=TRUNK, name="trunk")
        await made(proxy, "/polykv/pools/1/fork", tokens=OLD, name="work", pin=True)
        assert (await compact(proxy))["pinned"] is True
        assert state(await pools(proxy))[3][3] is True


async def test_who_comes_last_finds_the_old_pool_gone(proxy: Proxy) -> None:
    await grown(proxy)
    answers = await asyncio.gather(
        *(
            proxy.client.post("/polykv/pools/2/compact", json={"ancestor": 1, "tokens": [*NEW, i]})
            for i in range(280, 283)
        )
    )
    assert sorted(answer.status_code for answer in answers) == [201, 404, 404]
    assert len(await pools(proxy)) == 2


async def test_of_two_at_once_the_one_that_is_served_has_the_pin(proxy: Proxy) -> None:
    await grown(proxy, pin=True)
    answers = await asyncio.gather(
        *(
            proxy.client.post("/polykv/pools/work/compact", json={"ancestor": "trunk", "tokens": [*NEW, i]})
            for i in range(280, 284)
        )
    )
    assert sorted(answer.status_code for answer in answers) == [201, 404, 404, 404]
    assert [(p["name"], p["pinned"]) for p in (await pools(proxy)).values()] == [("trunk", False), ("work", True)]


@pytest.mark.parametrize("ref", [2, "work"])
async def test_an_old_pool_that_is_released_on_the_way_is_a_404(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, ref: int | str
) -> None:
    await grown(proxy, pin=True)
    write = proxy.control.journal.pool_replaces

    async def released_meanwhile(pool: Any, **how: Any) -> None:
        await write(pool, **how)
        assert (await proxy.client.delete(f"/polykv/pools/{ref}?recursive=true")).status_code == 200

    monkeypatch.setattr(proxy.control.journal, "pool_replaces", released_meanwhile)
    assert (await compact(proxy, expect=404))["code"] == "pool_not_found"
    assert state(await pools(proxy)) == {1: ("trunk", -1, 60, False, "resident", [])}


async def test_a_new_pool_that_is_released_on_the_way_leaves_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grown(proxy, pin=True)
    await ask(proxy, [*OLD, 90], session_id="a", pool_id="work")
    write = proxy.control.journal.pool_replaces

    async def released_meanwhile(pool: Any, **how: Any) -> None:
        await write(pool, **how)
        assert (await proxy.client.delete(f"/polykv/pools/{pool.pool_id}")).status_code == 200

    monkeypatch.setattr(proxy.control.journal, "pool_replaces", released_meanwhile)
    answer = await compact(proxy)
    assert (answer["moved"], answer["released"]) == ([], [3, 2])
    assert state(await pools(proxy)) == {1: ("trunk", -1, 60, False, "resident", [])}
    told = await ask(proxy, [*NEW, 90], session_id="a")
    assert (told["pool_id"], told["cached_n_tokens"]) == (1, 60)


async def test_there_is_always_a_pool_of_that_name(engine: FakeEngine, proxy: Proxy) -> None:
    await grown(proxy)
    releasing = Hold()
    engine.on("free", "request", releasing)
    compacting = asyncio.create_task(compact(proxy))
    await releasing.reached()
    assert proxy.control.tree.find("work") is not None
    told = await ask(proxy, [*NEW, 90], session_id="a", pool_id="work")
    releasing.release()
    new = (await compacting)["pool_id"]
    assert (told["pool_id"], told["miss_reason"]) == (new, None)


async def test_a_fork_that_began_too_late_fails_and_holds_nothing_up(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the write and the release of the old pool: that is decided, so the fork has no parent any more."""
    await grown(proxy, pin=True)
    write, held, forks = proxy.control.journal.pool_replaces, Hold(), []

    async def fork_meanwhile(pool: Any, **how: Any) -> None:
        engine.on("materialize", "request", held)
        body = {"tokens": [*BELOW, 5, 6]}
        forks.append(asyncio.create_task(proxy.client.post("/polykv/pools/3/fork", json=body)))
        await held.reached()
        await write(pool, **how)

    monkeypatch.setattr(proxy.control.journal, "pool_replaces", fork_meanwhile)
    compacting = asyncio.create_task(compact(proxy))
    await eventually(lambda: (work := proxy.control.tree.find("work")) is not None and work.pool_id == 4)
    held.release()
    assert (await compacting)["released"] == [3, 2]
    refused = await forks[0]
    assert (refused.status_code, error_of(refused)["code"]) == (503, "journal_failed")
    assert state(await pools(proxy)).keys() == {1, 4}


# Death ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def process(engine: FakeEngine, journal: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Callable[[], None]]]:
    """A proxy of its own, and how to kill it without a chance to tidy up."""
    args = ("-m", "polykv_proxy.cli", "serve", "--upstream", engine.url, "--port", "0", "--json")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLYKV_")}
    child = await asyncio.create_subprocess_exec(
        sys.executable, *args, "--state", str(journal), stdout=PIPE, stderr=DEVNULL, env=kept
    )
    try:
        assert child.stdout is not None
        url = json.loads(await asyncio.wait_for(child.stdout.readline(), 60))["proxy"]
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            yield client, child.kill
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def kept_by(client: httpx.AsyncClient) -> dict[int, tuple[Any, ...]]:
    """What a restart must bring back."""
    found = {}
    for pool in (await client.get("/polykv/pools")).json()["pools"]:
        policy = (await client.get(f"/polykv/pools/{pool['pool_id']}/admission")).json()
        own = policy["target_tps_per_session"] if policy["source"] == "own" else None
        found[pool["pool_id"]] = (pool["name"], pool["parent"], pool["prefix_len"], pool["pinned"], own)
    return found


BEFORE = {
    1: ("trunk", -1, 60, False, None),
    2: ("work", 1, 140, True, 5),
    3: (None, 2, 170, False, None),
}
AFTER = {1: ("trunk", -1, 60, False, None), 4: ("work", 1, 80, True, 5)}


async def prepared(client: httpx.AsyncClient) -> None:
    async def order(path: str, **body: Any) -> None:
        (await client.post(path, json=body)).raise_for_status()

    await order("/polykv/pools", tokens=TRUNK, name="trunk")
    await order("/polykv/pools/1/fork", tokens=OLD, name="work", pin=True)
    await order("/polykv/pools/2/fork", tokens=BELOW)
    await order("/polykv/pools/2/admission", target_tps_per_session=5, mode="advisory")
    assert await kept_by(client) == BEFORE


async def test_every_write_leaves_everything_moved_or_nothing(
    engine: FakeEngine, make_proxy: ProxyMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash after any of them would find."""
    journal, copies, write = tmp_path / "journal.db", list[Path](), Database.write

    def copying(db: Database, changes: Iterable[Change]) -> None:
        write(db, changes)
        copies.append(tmp_path / str(len(copies)))
        copies[-1].mkdir()
        for file in tmp_path.glob("journal.db*"):
            shutil.copy(file, copies[-1])

    async with make_proxy(engine.url, state=str(journal)) as proxy:
        await prepared(proxy.client)
        monkeypatch.setattr(Database, "write", copying)
        await compact(proxy)
        monkeypatch.setattr(Database, "write", write)
    assert copies
    for copy in copies:
        async with FakeEngine() as other, make_proxy(other.url, state=str(copy / "journal.db")) as proxy:
            assert await kept_by(proxy.client) == AFTER


@pytest.mark.slow
async def test_killed_at_any_instant_everything_has_moved_or_nothing(engine: FakeEngine, tmp_path: Path) -> None:
    n_times, took_s, rng, outcomes = 10, 0.1, random.Random(7), list[bool]()
    for i in range(n_times):
        journal = tmp_path / f"{i}.db"
        async with process(engine, journal) as (client, kill):
            await prepared(client)
            began_s = time.perf_counter()
            body = {"ancestor": "trunk", "tokens": NEW}
            compacting = asyncio.create_task(client.post("/polykv/pools/work/compact", json=body))
            if i == 0:  # how long it takes, and that it is what the others are compared with
                await compacting
                took_s = time.perf_counter() - began_s
            else:
                await asyncio.sleep(rng.uniform(0, took_s) if i > 1 else 0)
            kill()
            await asyncio.wait([compacting])
            answered = compacting.exception() is None and compacting.result().status_code == 201
        async with process(engine, journal) as (client, _):
            found = await kept_by(client)
        assert found in (BEFORE, AFTER), (i, found)
        assert not answered or found == AFTER, "who was told so has it"
        outcomes.append(found == AFTER)
    assert outcomes[0]
    assert False in outcomes
