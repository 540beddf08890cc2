"""A disk that fails and works again: what is owed goes out first, and the file is whole at every moment."""

import asyncio
import logging
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from polykv_proxy.errors import JournalFailed
from polykv_proxy.ids import PoolId
from polykv_proxy.store import Journal, PoolRow
from polykv_proxy.store.changes import Added, Change, Released
from tests.store.make import MODEL, child, family, left, opened, put, read, root, rows

KEPT = root(1, 7, 8, name="kept")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "pools.db"


def failing(journal: Journal, fails: Callable[[Sequence[Change]], bool]) -> Callable[[], None]:
    """The disk is full for these changes; gives what makes room again."""
    database = journal._db
    assert database is not None
    write = database.write

    def refuse(changes: Sequence[Change]) -> None:
        changes = list(changes)
        if fails(changes):
            raise sqlite3.OperationalError("database or disk is full")
        write(changes)

    def room() -> None:
        database.write = write  # type: ignore[method-assign]

    database.write = refuse  # type: ignore[method-assign,assignment]
    return room


def everything(_: Sequence[Change]) -> bool:
    return True


def adds(pool_id: int) -> Callable[[Sequence[Change]], bool]:
    return lambda changes: any(isinstance(one, Added) and one.row.pool_id == pool_id for one in changes)


async def killed(path: Path) -> list[PoolRow]:
    """What the next one finds when this one is killed right now."""
    copy = path.parent.parent / "killed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path.parent, copy)
    async with opened(copy / path.name) as (journal, found):
        assert journal.status["saved_copy"] is None
        assert journal._db is not None
        assert (journal._db.left_out, journal._db.renamed) == ([], [])
        return list(found.rows)


async def test_the_release_of_a_parent_takes_the_owed_one_of_its_child_along(path: Path) -> None:
    parent = root(2, 1, 2, 3, name="parent")
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        for pool in (KEPT, parent, child(3, parent, 3, 4)):
            await journal.pool_added(pool)
        room = failing(journal, everything)
        with pytest.raises(JournalFailed, match="full"):
            await journal.pools_released([PoolId(3)])
        room()
        await journal.pools_released([parent.pool_id])
        assert await killed(path) == rows([KEPT])


async def test_a_release_that_fails_lets_nothing_overtake_it(path: Path) -> None:
    """Releases fail, all else would succeed: a name may not be there twice."""
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        for pool in (KEPT, root(2, 1, name="a")):
            await journal.pool_added(pool)
        room = failing(journal, lambda changes: any(isinstance(one, Released) for one in changes))
        with pytest.raises(JournalFailed, match="full"):
            await journal.pools_released([PoolId(2)])
        with pytest.raises(JournalFailed, match="full"):
            await journal.pool_added(root(3, 2, name="a"))
        assert await killed(path) == rows([KEPT, root(2, 1, name="a")])
        room()
        await journal.pool_added(root(4, 3, name="a"))
        assert await killed(path) == rows([KEPT, root(4, 3, name="a")])


async def test_a_fork_is_refused_while_its_parent_is_not_on_the_disk(path: Path) -> None:
    parent = root(2, 1, 2, 3)
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        await journal.pool_added(KEPT)
        with pytest.raises(JournalFailed, match="pool 2, which pool 3 is made from, is not in it"):
            await journal.pool_added(child(3, parent, 3, 4))
    assert await left(path) == rows([KEPT])


async def test_a_parent_that_fails_takes_only_its_child_along(path: Path) -> None:
    """One batch: a large parent finds no room, its small child would."""
    parent = root(2, 1, 2, 3)
    batch = [parent, child(3, parent, 3, 4), root(4, 5)]
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        await journal.pool_added(KEPT)
        failing(journal, adds(2))
        told = await asyncio.gather(*(journal.pool_added(pool) for pool in batch), return_exceptions=True)
        assert [type(one) for one in told] == [JournalFailed, JournalFailed, type(None)]
        assert await killed(path) == rows([KEPT, root(4, 5)])


async def test_a_pool_that_stays_is_written_with_or_before_its_forks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polykv_proxy.store.journal.OWED_EVERY_S", 0.0)
    parent = root(2, 1, 2, 3, name="parent")
    fork = child(3, parent, 3, 4, name="fork")
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        await journal.pool_added(KEPT)
        room = failing(journal, adds(2))
        with pytest.raises(JournalFailed, match="full"):
            await journal.pool_added(parent)
        journal.pool_stays(parent)
        assert journal.owes(parent.pool_id)
        with pytest.raises(JournalFailed, match="pool 2"):
            await journal.pool_added(fork)
        assert await killed(path) == rows([KEPT])
        room()
        parent.pin = True  # written as it is when it is written
        await journal.pool_added(child(4, parent, 3, 5))
        assert not journal.owes(parent.pool_id)
        assert await killed(path) == rows([KEPT, parent, child(4, parent, 3, 5)])


@contextmanager
def file_limit(n_bytes: int) -> Iterator[None]:
    """No file grows beyond this: as a disk that is full, for those that would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_start_on_a_full_disk_has_what_is_there(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed before its log was written into the file, which now cannot grow."""
    async with opened(tmp_path / "live" / "pools.db") as (journal, _):
        await journal.bind(MODEL)
        assert journal._db is not None
        journal._db.checkpoint = lambda: None  # type: ignore[method-assign]
        for pool in family():
            await journal.pool_added(pool)
        shutil.copytree(tmp_path / "live", path.parent)
    with file_limit(len(read(path))):
        async with opened(path) as (journal, found):
            assert (found.rows, found.fingerprint, found.next_id) == (rows(family()), MODEL, 6)
            assert (journal.status["state"], journal.status["saved_copy"]) == ("failing", None)
            assert journal.status["error"]
            (error,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
            assert "cannot be written, what is in it is there" in error.getMessage()
            assert await journal.bind(MODEL) == rows(family())
            with pytest.raises(JournalFailed):
                await journal.pool_added(root(6, 1))
    async with opened(path) as (journal, found):
        assert (found.rows, journal.status["state"]) == (rows(family()), "ok")


async def test_health_notices_by_itself_that_the_disk_works_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polykv_proxy.store.journal.OWED_EVERY_S", 0.0)
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        await journal.pool_added(KEPT)
        room = failing(journal, everything)
        with pytest.raises(JournalFailed):
            await journal.pool_changed(KEPT)
        room()
        assert journal.status["state"] == "failing"
        journal.tick()
        assert journal._writing is not None
        await journal._writing
        assert (journal.status["state"], journal.status["error"]) == ("ok", None)


async def noticed(journal: Journal) -> None:
    """The heartbeat comes by."""
    journal.tick()
    assert journal._writing is not None
    await journal._writing


async def test_a_journal_that_is_deleted_while_it_is_open_is_written_anew(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polykv_proxy.store.journal.USED_EVERY_S", 0.0)
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        for pool in family():
            await journal.pool_added(pool)
        os.unlink(path)
        await noticed(journal)
        assert "was deleted while the proxy runs: written anew" in caplog.text
        assert journal.status["state"] == "ok"
        assert await killed(path) == rows(family())
        os.unlink(path)
        await journal.pool_added(root(6, 1))  # noticed by who writes as well
        assert await killed(path) == rows([*family(), root(6, 1)])
        assert os.stat(path).st_mode & 0o777 == 0o600
    assert await left(path) == rows([*family(), root(6, 1)])


async def test_a_journal_that_is_replaced_while_it_is_open_takes_nothing_more(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer would promise what the next start does not find."""
    monkeypatch.setattr("polykv_proxy.store.journal.USED_EVERY_S", 0.0)
    monkeypatch.setattr("polykv_proxy.store.journal.OWED_EVERY_S", 0.0)
    put(tmp_path / "theirs", b"theirs")
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        await journal.pool_added(KEPT)
        os.replace(tmp_path / "theirs", path)
        await noticed(journal)
        assert journal.status["state"] == "failing"
        assert f"another file lies at {path}" in journal.status["error"]
        with pytest.raises(JournalFailed, match="another file lies at"):
            await journal.pool_added(root(2, 1))
        assert read(path) == b"theirs"
        os.rename(path, tmp_path / "theirs")
        await noticed(journal)
        assert journal.status["state"] == "ok"
    assert await left(path) == rows([KEPT])


async def test_owed_releases_do_not_come_back_with_their_model(path: Path) -> None:
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        for pool in (KEPT, root(2, 1, name="gone")):
            await journal.pool_added(pool)
        room = failing(journal, everything)
        with pytest.raises(JournalFailed):
            await journal.pools_released([PoolId(2)])
        assert await journal.bind(MODEL) == rows([KEPT])  # the disk is still full
        room()
        assert await journal.bind("model-b") == []
        assert await journal.bind(MODEL) == rows([KEPT])
