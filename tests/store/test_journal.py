"""What is told to the journal is there for the next one, and nothing else is."""

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest

from polykv_proxy.errors import JournalFailed, JournalInUse
from polykv_proxy.ids import PoolId
from polykv_proxy.store import Journal
from polykv_proxy.store.journal import MEMORY
from tests.store.make import MODEL, child, family, left, opened, root, rows, written


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "pools.db"


async def test_pools_come_back_as_they_were_told(path: Path) -> None:
    async with opened(path, offset_s=1000.0) as (journal, found):
        assert (found.rows, found.fingerprint, found.next_id) == ([], None, 1)
        assert await journal.bind(MODEL) == []
        for pool in family():
            await journal.pool_added(pool)
    async with opened(path) as (journal, found):
        assert found.rows == rows(family(), 1000.0)
        assert (found.fingerprint, found.next_id) == (MODEL, 6)
        assert found.rows[1].own == array("i", range(70000, 72000))
        assert journal.status == {
            "state": "ok",
            "path": str(path),
            "error": None,
            "saved_copy": None,
            "pools_of_other_models": 0,
        }


async def test_released_pools_stay_away_and_their_ids_are_not_given_again(path: Path) -> None:
    await written(path, family())
    async with opened(path) as (journal, _):
        await journal.pools_released([PoolId(4), PoolId(5)])
        await journal.pools_released([])
        await journal.pools_released([PoolId(77)])
    async with opened(path) as (journal, found):
        assert [row.pool_id for row in found.rows] == [1, 2]
        assert found.next_id == 6
        await journal.pools_released([PoolId(2), PoolId(1)])
    async with opened(path) as (_, found):
        assert (found.rows, found.next_id, found.fingerprint) == ([], 6, MODEL)


async def test_changes_of_name_pin_and_ttl_are_kept(path: Path) -> None:
    await written(path, family())
    trunk, *_ = family()
    trunk.pin, trunk.ttl_s, trunk.name = True, None, "other"
    async with opened(path) as (journal, _):
        await journal.pool_changed(trunk)
        await journal.pool_changed(root(99, 1))  # released meanwhile: stays away
    found, *others = await left(path)
    assert (found.pin, found.ttl_s, found.name) == (True, None, "other")
    assert others == rows(family())[1:]


async def test_last_uses_are_written_when_it_is_closed_and_now_and_then(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(path, family())
    before = time.time()
    async with opened(path) as (journal, found):
        assert found.rows[0].last_access_ts == 200.0
        journal.pool_used(PoolId(1))
        journal.pool_used(PoolId(3))  # there is no such pool
        journal.tick()
        assert not journal._waiting  # not due yet
    found_again = await left(path)
    assert before <= found_again[0].last_access_ts <= time.time()
    assert found_again[1:] == rows(family())[1:]
    monkeypatch.setattr("polykv_proxy.store.journal.USED_EVERY_S", 0.0)
    async with opened(path) as (journal, _):
        journal.pool_used(PoolId(2))
        journal.tick()
        assert len(journal._waiting) == 1


async def test_pools_of_another_model_wait_until_it_is_back(path: Path) -> None:
    await written(path, family())
    async with opened(path) as (journal, found):
        assert found.fingerprint == MODEL
        assert await journal.bind("model-b") == []
        assert journal.status["pools_of_other_models"] == 4
        await journal.pool_added(root(6, 4, 4, name="trunk"))  # the name is free in this model's tree
    async with opened(path) as (journal, found):
        assert (found.fingerprint, found.next_id) == ("model-b", 7)
        assert found.rows == rows([root(6, 4, 4, name="trunk")])
        assert await journal.bind(MODEL) == rows(family())
        assert journal.status["pools_of_other_models"] == 1
    async with opened(path) as (_, found):
        assert (found.fingerprint, found.next_id) == (MODEL, 7)


async def test_a_pool_belongs_to_the_model_it_was_told_under(path: Path) -> None:
    """Told before the switch, written after it."""
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        added = asyncio.create_task(journal.pool_added(root(1, 1)))
        await asyncio.sleep(0)
        assert await journal.bind("model-b") == []
        await added
    async with opened(path) as (journal, found):
        assert found.rows == []
        assert await journal.bind(MODEL) == rows([root(1, 1)])


async def test_without_a_model_nothing_is_kept(path: Path) -> None:
    async with opened(path) as (journal, _):
        with pytest.raises(JournalFailed):
            await journal.pool_added(root(1, 1))


async def test_memory_keeps_nothing_but_pools_of_other_models_while_it_lives() -> None:
    async with opened(MEMORY) as (journal, found):
        assert (found.rows, journal.status["state"], journal.status["path"]) == ([], "off", None)
        await journal.bind(MODEL)
        for pool in family():
            await journal.pool_added(pool)
        assert await journal.bind("model-b") == []
        assert await journal.bind(MODEL) == rows(family())
    async with opened(MEMORY) as (_, found):
        assert found.rows == []


async def test_many_at_once_share_transactions(path: Path) -> None:
    pools = [root(i, i, i + 1) for i in range(1, 301)]
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        commits = []
        assert journal._db is not None
        note = journal._db._db.set_trace_callback
        journal._thread.submit(note, lambda sql: commits.append(sql) if sql == "COMMIT" else None).result()
        await asyncio.gather(*(journal.pool_added(pool) for pool in pools))
        assert 1 <= len(commits) <= 3
    assert await left(path) == rows(pools)


# Killed ------------------------------------------------------------------------------------------------------------

WRITER = """
import asyncio, sys
from tests.store.make import MODEL, root
from polykv_proxy.store import Journal

async def main():
    journal = Journal(sys.argv[1], unix_offset_s=0.0)
    await journal.open()
    await journal.bind(MODEL)
    for i in range(1, 10**6):
        await journal.pool_added(root(i, i, i))
        if i % 3 == 0:
            await journal.pools_released([i - 1])
        print(i, flush=True)

asyncio.run(main())
"""


def writing(path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("n_before", [1, 2, 3, 40, 200])
async def test_killed_between_any_two_steps_it_has_all_that_was_acknowledged(path: Path, n_before: int) -> None:
    writer = writing(path)
    assert writer.stdout is not None
    with writer.stdout as told:
        for _ in range(n_before):
            told.readline()
        writer.kill()
        last = n_before + sum(line.endswith("\n") for line in told)
    assert writer.wait() == -signal.SIGKILL
    ids = [row.pool_id for row in await left(path)]
    acknowledged = [i for i in range(1, last + 1) if i % 3 != 2 or i + 1 > last]
    # The step that was under way may have happened or not: one more pool, or the last release.
    under_way = {last + 1} | ({last} if (last + 1) % 3 == 0 else set())
    assert set(acknowledged) - under_way <= set(ids) <= set(acknowledged) | under_way


async def test_a_second_one_waits_and_says_who_has_it(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        other = Journal(str(path), unix_offset_s=0.0, lock_wait_s=0.1)
        with pytest.raises(JournalInUse) as e:
            await other.open()
        assert str(path) in e.value.message
        assert f"process {os.getpid()}" in e.value.message
        await other.close()
        await journal.pool_added(root(1, 1))  # the first goes on
    assert await left(path) == rows([root(1, 1)])


async def test_another_program_that_has_the_file_open_is_not_overwritten(path: Path) -> None:
    await written(path, family())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal = Journal(str(path), unix_offset_s=0.0, lock_wait_s=0.1)
    with pytest.raises(JournalInUse, match="another program"):
        await journal.open()
    await journal.close()
    other.close()
    assert await left(path) == rows(family())


# The disk fails ----------------------------------------------------------------------------------------------------


def limited(journal: Journal, pragma: str) -> None:
    """As a full or a read-only disk: SQLite's own refusal."""
    assert journal._db is not None
    journal._thread.submit(journal._db._db.execute, f"PRAGMA {pragma}").result()


FULL = ("max_page_count = 1", "max_page_count = 1000000", "full")
READ_ONLY = ("query_only = 1", "query_only = 0", "readonly")


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is owed goes out with every heartbeat."""
    monkeypatch.setattr("polykv_proxy.store.journal.OWED_EVERY_S", 0.0)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("disk", [FULL, READ_ONLY])
async def test_what_could_not_be_written_is_told_and_releases_are_owed(
    path: Path, caplog: pytest.LogCaptureFixture, disk: tuple[str, str, str]
) -> None:
    fails, works, said = disk
    trunk, branch, _, apart = family()
    await written(path, [trunk, apart])
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        limited(journal, fails)
        caplog.set_level(logging.INFO, "polykv.journal")
        for _ in range(2):
            with pytest.raises(JournalFailed, match=said) as e:
                await journal.pool_added(branch)
            assert str(path) in e.value.message
        if disk is READ_ONLY:  # to forget a pool takes no page more
            with pytest.raises(JournalFailed, match=said):
                await journal.pools_released([apart.pool_id])
            assert journal.status["state"] == "failing"
            assert said in journal.status["error"]
            assert [r.levelname for r in caplog.records] == ["ERROR"]
        limited(journal, works)
        journal.tick()
        again = child(6, trunk, 5000, 1)
        await journal.pool_added(again)
        assert (journal.status["state"], journal.status["error"]) == ("ok", None)
    gone = [apart] if disk is READ_ONLY else []
    assert await left(path) == rows([pool for pool in (trunk, apart, again) if pool not in gone])


async def test_a_full_disk_is_no_reason_not_to_use_what_is_there(path: Path) -> None:
    await written(path, family())
    async with opened(path) as (journal, _):
        limited(journal, "query_only = 1")
        assert await journal.bind(MODEL) == rows(family())
        with pytest.raises(JournalFailed, match="readonly"):
            await journal.bind("model-b")


async def test_one_that_cannot_be_written_fails_alone(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        same = [root(1, 1), root(1, 2), root(2, 3)]
        told = await asyncio.gather(*(journal.pool_added(pool) for pool in same), return_exceptions=True)
        assert [type(one) for one in told] == [type(None), JournalFailed, type(None)]
