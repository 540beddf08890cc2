"""``POST /polykv/pools/{id}/compact``: everything moves, or nothing has changed."""

import asyncio
from typing import Any

import pytest

from polykv_proxy.errors import JournalFailed
from polykv_proxy.ids import PoolId
from tests.contract.conftest import ask, error_of, made
from tests.control.conftest import eventually
from tests.fake_engine import FakeEngine
from tests.fake_engine.faults import Hold, reply
from tests.relay.conftest import Proxy

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

    async def fail(pools: Any) -> None:
        raise JournalFailed("the disk is full")

    monkeypatch.setattr(proxy.control.journal, "pools_changed", fail)
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
async def test_a_pool_that_is_released_on_the_way_is_a_404(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, ref: int | str
) -> None:
    """The old one, or by name the one that has just taken its place."""
    await grown(proxy, pin=True)
    write, n_writes = proxy.control.journal.pools_changed, 0

    async def released_meanwhile(changed: Any) -> None:
        nonlocal n_writes
        n_writes += 1
        await write(changed)
        if n_writes == (1 if ref == 2 else 2):  # pins are moved first, then the name
            assert (await proxy.client.delete(f"/polykv/pools/{ref}?recursive=true")).status_code == 200

    monkeypatch.setattr(proxy.control.journal, "pools_changed", released_meanwhile)
    assert (await compact(proxy, expect=404))["code"] == "pool_not_found"
    left = {pool["name"]: pool["pinned"] for pool in (await pools(proxy)).values() if pool["name"]}
    assert left == ({"trunk": False} if ref == 2 else {"trunk": False, "work": True})


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
