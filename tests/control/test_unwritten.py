"""Pools that could not be written while somebody made a fork of them, and names whose release is owed."""

import asyncio
from pathlib import Path

import pytest

from tests.control.conftest import eventually, planes
from tests.control.test_restore import after_a_kill, full, tree_of
from tests.fake_engine import Hold


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "pools.db")


async def names(plane):
    return [pool["name"] for pool in await tree_of(plane)]


@pytest.mark.parametrize("room_again", [True, False])
async def test_a_fork_in_flight_of_a_pool_that_could_not_be_written(engine, state, tmp_path, monkeypatch, room_again):
    """Both are written, or neither is there: never the fork alone, which would cost every pool at the next start."""
    async with planes(engine, state=state, heartbeat_s=3600) as plane:
        await plane.create(tokens=[5, 6, 7], name="kept")
        journal = plane.control.journal
        added, answering = journal.pool_added, Hold()

        async def slowly(pool):
            if pool.name == "par":
                await answering(None)
            await added(pool)

        monkeypatch.setattr(journal, "pool_added", slowly)
        full(plane, "query_only = 1")
        body = {"tokens": [1, 2, 3], "name": "par"}
        making = asyncio.create_task(plane.call("POST", "/polykv/pools", body))
        await answering.reached()
        forked = Hold()
        engine.on("materialize", "reply", forked)
        fork = {"own_tokens": [4], "name": "kid"}
        forking = asyncio.create_task(plane.call("POST", "/polykv/pools/par/fork", fork))
        await forked.reached()
        answering.release()
        status, answer = await making
        assert (status, answer["error"]["code"]) == (503, "journal_failed")
        assert await names(plane) == ["kept", "par"]
        if room_again:
            full(plane, "query_only = 0")
        forked.release()
        status, answer = await forking
        left = ["kept", "par", "kid"] if room_again else ["kept"]
        assert status == (201 if room_again else 503)
        assert await names(plane) == left
        full(plane, "query_only = 0")
        await plane.create(tokens=[8], name="more" if room_again else "par")  # the name is free again
        left.append("more" if room_again else "par")
        before = await tree_of(plane)
        await eventually(lambda: len(engine.ready_pools()) == len(before))
        async with after_a_kill(plane, state, tmp_path) as second:
            assert await names(second) == left
            assert await tree_of(second) == before
            _, health = await second.call("GET", "/polykv/health")
            assert (health["journal"]["state"], health["journal"]["saved_copy"]) == ("ok", None)


async def test_a_name_whose_release_is_owed_is_used_again(engine, state, tmp_path):
    async with planes(engine, state=state, heartbeat_s=3600) as plane:
        await plane.create(tokens=[5, 6, 7], name="kept")
        await plane.create(tokens=[1, 2, 3], name="a")
        full(plane, "query_only = 1")
        await plane.refused(503, "journal_failed", "DELETE", "/polykv/pools/a")
        full(plane, "query_only = 0")
        await plane.create(tokens=[9, 9], name="a")
        before = await tree_of(plane)
        async with after_a_kill(plane, state, tmp_path) as second:
            assert await tree_of(second) == before


async def test_a_fork_whose_parent_was_released_meanwhile_is_no_fault_of_the_disk(engine, state, monkeypatch):
    async with planes(engine, state=state) as plane:
        await plane.create(prompt="A" * 40, name="a")
        journal = plane.control.journal
        pool_added = journal.pool_added

        async def released_first(pool):
            assert (await plane.call("DELETE", "/polykv/pools/a?recursive=true"))[0] == 200
            await pool_added(pool)

        monkeypatch.setattr(journal, "pool_added", released_first)
        error = await plane.refused(404, "pool_not_found", "POST", "/polykv/pools/a/fork", {"prompt": "A" * 40 + "b"})
        assert "released meanwhile" in error["message"]
        monkeypatch.setattr(journal, "pool_added", pool_added)
        health = (await plane.call("GET", "/polykv/health"))[1]
        assert health["journal"]["state"] == "ok"
        assert len(plane.control.tree) == 0
        assert (await plane.create(prompt="A" * 40, name="a"))["prefix_len"] == 40
