"""A journal that is torn, altered or foreign: an empty start, one warning that names the copy, never a wrong pool."""

import asyncio
import logging
import shutil
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polykv_proxy.ids import PoolId
from polykv_proxy.store import PoolRow
from polykv_proxy.store.changes import Released
from polykv_proxy.store.database import Database
from polykv_proxy.store.rows import seal_policy
from tests.store.make import MODEL, altered, beside, child, digest, family, left, opened, put, read, root, rows, written

PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pools.db"


async def starts_empty(path: Path, caplog: pytest.LogCaptureFixture, why: str = "") -> None:
    """It starts, with one warning that names the copy, and works from there on."""
    caplog.clear()
    before = digest(path)
    async with opened(path) as (journal, found):
        assert found.rows == []
        copy = Path(journal.status["saved_copy"])
        (warning,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert str(copy) in warning.getMessage()
        assert why in warning.getMessage()
        assert copy.name.startswith("pools.db.corrupt-")
        assert journal.status["state"] == "ok"
        await journal.bind(MODEL)
        await journal.pool_added(root(1, 7, 8))
    if before is not None:
        assert digest(copy) == before
    assert await left(path) == rows([root(1, 7, 8)])


async def test_truncated_at_every_page(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await written(path, family())
    whole = read(path)
    assert len(whole) > 10 * PAGE
    for n in range(0, len(whole), PAGE):
        for torn in (whole[:n], whole[:n] + bytes(len(whole) - n)):
            put(path, torn)
            await starts_empty(path, caplog)


async def test_torn_within_a_page(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await written(path, family())
    whole = read(path)
    for n in (1, 15, 99, PAGE - 1, PAGE + 1, len(whole) - 1):
        put(path, whole[:n])
        await starts_empty(path, caplog)


@pytest.fixture(scope="module")
def sound() -> bytes:
    """A sound journal of the family, whose second pool has a policy."""

    async def write(path: Path) -> None:
        await written(path, family())
        async with opened(path) as (journal, _):
            await journal.policy_changed(family()[1].pool_id, POLICY)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pools.db"
        asyncio.run(write(path))
        return read(path)


POLICY = {"target_tps_per_session": 12.5, "mode": "enforced"}


def sound_rows() -> list[PoolRow]:
    first, second, *others = rows(family())
    return [first, replace(second, policy=POLICY), *others]


@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=8))
@example(flips=[(0.0, 255)])
def test_flipped_bytes_never_make_a_wrong_pool(sound: bytes, flips: list[tuple[float, int]]) -> None:
    """All pools as they were (the flip hit nothing), or none and a copy. Never some of them, never others."""
    damaged = bytearray(sound)
    for place, bits in flips:
        damaged[int(place * len(damaged))] ^= bits

    async def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pools.db"
            put(path, damaged)
            async with opened(path) as (journal, found):
                if journal.status["saved_copy"] is None:
                    assert (list(found.rows), found.fingerprint, found.next_id) == (sound_rows(), MODEL, 6)
                else:
                    assert found.rows == []
                    assert read(journal.status["saved_copy"]) == damaged
                await journal.bind(MODEL)
                await journal.pool_added(root(6, 1))

    asyncio.run(check())


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_policy_is_noticed(sound: bytes, where: float, bit: int) -> None:
    text, _ = seal_policy(family()[1].pool_id, POLICY)
    at = sound.index(text.encode()) + int(where * len(text))
    damaged = bytearray(sound)
    damaged[at] ^= 1 << bit

    async def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pools.db"
            put(path, damaged)
            async with opened(path) as (journal, found):
                assert found.rows == []
                assert journal.status["saved_copy"] is not None

    asyncio.run(check())


@given(where=st.integers(0, 4999 * 4 + 3), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_token_is_noticed(sound: bytes, where: int, bit: int) -> None:
    raw = family()[0].full.tobytes()
    # The tokens lie over several pages: find the run of the file that this byte is in.
    run = raw[where // 64 * 64 : where // 64 * 64 + 64]
    at = sound.find(run)
    if at < 0:
        return  # a page ends within it
    damaged = bytearray(sound)
    damaged[at + where % 64] ^= 1 << bit

    async def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pools.db"
            put(path, damaged)
            async with opened(path) as (journal, found):
                assert found.rows == []
                assert journal.status["saved_copy"] is not None

    asyncio.run(check())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE pools SET name = 'other' WHERE pool_id = 1",
        "UPDATE pools SET pin = 1 WHERE pool_id = 1",
        "UPDATE pools SET branch_pos = 2999 WHERE pool_id = 2",
        "UPDATE pools SET parent = 5 WHERE pool_id = 2",
        "UPDATE pools SET tokens_hash = 1 WHERE pool_id = 1",
        "UPDATE pools SET last_access_ts = 300.0 WHERE pool_id = 1",
        "UPDATE pools SET pool_id = 3 WHERE pool_id = 4",
        "DELETE FROM pools WHERE pool_id = 4",
        "DELETE FROM pools",
        "DELETE FROM tokens WHERE pool_id = 4",
        "UPDATE tokens SET own = zeroblob(12) WHERE pool_id = 4",
        "UPDATE tokens SET own = x'0900000008000000070000' WHERE pool_id = 4",
        "UPDATE tokens SET own = 'text' WHERE pool_id = 4",
        "UPDATE tokens SET own = (SELECT own FROM tokens WHERE pool_id = 5) WHERE pool_id = 4",
        "INSERT INTO pools SELECT 3, model_id, parent, branch_pos, prefix_len, tokens_hash, NULL, pin, ttl_s, auto, "
        "created_ts, last_access_ts, checksum FROM pools WHERE pool_id = 5",
        "UPDATE models SET fingerprint = 'model-b'",
        "UPDATE models SET model_id = 2",
        "DELETE FROM models",
        "UPDATE header SET next_id = 1",
        "UPDATE header SET model_id = 2",
        "DELETE FROM header",
        "INSERT INTO header SELECT 2, next_id, model_id, n_rows, sum, checksum FROM header",
        "DROP TABLE policies",
        "CREATE TRIGGER t AFTER DELETE ON pools BEGIN DELETE FROM tokens; END",
        "CREATE TABLE more (a)",
        "PRAGMA application_id = 7",
        "PRAGMA user_version = 0",
    ],
)
async def test_rows_altered_by_hand_are_noticed(path: Path, caplog: pytest.LogCaptureFixture, statement: str) -> None:
    await written(path, family())
    altered(path, statement)
    await starts_empty(path, caplog)


async def test_a_released_pool_does_not_come_back_with_an_old_page(
    path: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    await written(path, family())
    old = read(path)
    async with opened(path) as (journal, _):
        await journal.pools_released([family()[3].pool_id])
    new = read(path)
    changed = [n for n in range(0, len(old), PAGE) if old[n : n + PAGE] != new[n : n + PAGE]]
    assert len(changed) > 2
    for n in changed:
        put(path, new[:n] + old[n : n + PAGE] + new[n + PAGE :])
        async with opened(path) as (_, found):
            assert found.rows in ([], rows(family())[:3])


async def test_a_newer_schema_is_kept_for_who_can_read_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await written(path, family())
    altered(path, "PRAGMA user_version = 2")
    await starts_empty(path, caplog, why="schema version 2")


async def test_a_foreign_database(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    altered(path, "CREATE TABLE bookmarks (url TEXT)", "INSERT INTO bookmarks VALUES ('x')")
    await starts_empty(path, caplog, why="no journal of pools")


@pytest.mark.parametrize("content", [b"", b"\0", b"hello, not a database at all\n" * 1000, bytes(100_000)])
async def test_no_database_at_all(path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    put(path, content)
    await starts_empty(path, caplog)


async def test_an_unreadable_file(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SQLite says when it may not open it; who runs the tests may be allowed everything."""
    await written(path, family())
    connect, n = sqlite3.connect, 0

    def refused_once(*args: object, **more: object) -> sqlite3.Connection:
        nonlocal n
        n += 1
        return connect("file:/proc/none?mode=rw", uri=True) if n == 1 else connect(*args, **more)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr("sqlite3.connect", refused_once)
    await starts_empty(path, caplog, why="unable to open")


async def test_the_log_of_a_journal_that_is_gone_is_not_swallowed_by_a_new_one(
    path: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """SQLite would play a stale -wal back into whatever database lies beside it."""
    live = tmp_path / "live" / "pools.db"
    async with opened(live) as (journal, _):
        await journal.bind(MODEL)
        assert journal._db is not None
        journal._db.checkpoint = lambda: None  # type: ignore[method-assign]
        for pool in family():
            await journal.pool_added(pool)
        shutil.copy(f"{live}-wal", f"{path}-wal")
    await starts_empty(path, caplog)
    assert [name[-4:] for name in beside(path) if ".corrupt-" in name] == ["-wal"]


async def test_torn_log_beside_the_file_leaves_an_earlier_state_or_nothing(path: Path, tmp_path: Path) -> None:
    """Every state that it can be left in is one that was acknowledged at some moment."""
    live = tmp_path / "live" / "pools.db"
    states = [rows(family()[:n]) for n in range(5)]
    async with opened(live) as (journal, _):
        await journal.bind(MODEL)
        assert journal._db is not None
        journal._db.checkpoint = lambda: None  # type: ignore[method-assign]
        for pool in family():
            await journal.pool_added(pool)
        main, wal = read(live), read(f"{live}-wal")
    for n in range(0, len(wal), 1031):
        put(path, main)
        put(f"{path}-wal", wal[:n])
        async with opened(path) as (journal, found):
            assert journal.status["saved_copy"] is None
            assert list(found.rows) in states


async def test_damage_in_another_models_pools_is_noticed_when_they_are_wanted(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await written(path, family())
    async with opened(path) as (journal, _):
        await journal.bind("model-b")
        await journal.pool_added(root(6, 1))
    altered(path, "UPDATE tokens SET own = zeroblob(12) WHERE pool_id = 4")
    async with opened(path) as (journal, found):
        assert found.rows == rows([root(6, 1)])
        assert await journal.bind(MODEL) == []
        assert "pool 4" in caplog.text
        assert journal.status["saved_copy"] is not None
        await journal.pool_added(root(7, 1, 2))
    assert await left(path) == rows([root(7, 1, 2)])


# Incomplete, not damaged -------------------------------------------------------------------------------------------


def leave_alone(path: Path, *gone: int) -> None:
    """Take rows out of a journal as its own code does, without what is below them."""
    db = Database.open(path)
    db.write([Released([PoolId(pool_id) for pool_id in gone])])
    db.close()


async def test_a_pool_without_its_parent_goes_with_what_is_below_it_and_all_else_stays(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trunk, branch, leaf, apart = family()
    await written(path, [trunk, branch, leaf, apart, child(6, trunk, 4000, 1)])
    leave_alone(path, 1)
    async with opened(path) as (journal, found):
        assert found.rows == rows([apart])
        assert found.next_id == 7
        assert (journal.status["state"], journal.status["saved_copy"]) == ("ok", None)
        (warning,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert "3 pools are left out" in warning.getMessage()
    caplog.clear()
    assert await left(path) == rows([apart])  # they are gone from the file as well: nothing to warn of again
    assert not caplog.records


async def test_of_two_pools_with_one_name_the_newer_has_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await written(path, [root(1, 1, name="a", pin=True), root(2, 2, name="b"), root(3, 3, name="a")])
    mended = rows([root(1, 1, pin=True), root(2, 2, name="b"), root(3, 3, name="a")])
    async with opened(path) as (journal, found):
        assert found.rows == mended
        assert journal.status["saved_copy"] is None
        (warning,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert "1 lost their name to a newer pool" in warning.getMessage()
        await journal.bind(MODEL)
        await journal.pools_released([PoolId(3)])
    caplog.clear()
    assert await left(path) == mended[:2]  # the name does not go back to the older one
    assert not caplog.records
