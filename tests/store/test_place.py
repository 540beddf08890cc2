"""Where the journal lies: who may read it, links, folders, and where nothing can be kept."""

import logging
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from polykv_proxy.store import place
from tests.store.make import MODEL, beside, family, left, opened, root, rows, written


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "pools.db"
    before = os.umask(0)
    try:
        async with opened(path) as (journal, _):
            await journal.bind(MODEL)
            await journal.pool_added(root(1, 1))
            assert {f.name: mode(f) for f in path.parent.iterdir()} == {
                "pools.db": 0o600,
                "pools.db.lock": 0o600,
                "pools.db-wal": 0o600,
            }
    finally:
        os.umask(before)
    assert mode(path.parent) == 0o700
    assert beside(path) == ["pools.db"]


def test_a_lock_goes_with_its_holder_and_locks_out_who_comes_then(tmp_path: Path) -> None:
    """Who waited for the file that was removed has the lock of nothing, and takes that of the name."""
    path = tmp_path / "pools.db"
    first = place.lock(path, 0.0)
    waiting, got = threading.Event(), []

    def wait() -> None:
        waiting.set()
        got.append(place.lock(path, 10.0))

    other = threading.Thread(target=wait)
    other.start()
    waiting.wait(10)
    time.sleep(0.1)  # it is likely to have the old file open by now; right either way
    place.unlock(first, path)
    other.join(10)
    assert os.path.samestat(os.fstat(got[0]), (tmp_path / "pools.db.lock").stat())
    with pytest.raises(place.Taken, match=f"process {os.getpid()}"):
        place.lock(path, 0.0)
    place.unlock(got[0], path)
    assert beside(path) == []


async def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    await written(tmp_path / "pools.db", family())
    assert mode(tmp_path) == 0o755


async def test_a_journal_that_others_could_read_is_closed_to_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pools.db"
    await written(path, family())
    path.chmod(0o644)
    assert await left(path) == rows(family())
    assert mode(path) == 0o600
    assert "could be read by others" in caplog.text


async def test_tokens_of_released_pools_are_not_left_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pools.db"
    await written(path, family())
    secret = root(9, *range(123456, 123500))
    raw = secret.full.tobytes()
    async with opened(path) as (journal, _):
        await journal.bind(MODEL)
        await journal.pool_added(secret)
    assert raw in path.read_bytes()
    async with opened(path) as (journal, _):
        await journal.pools_released([secret.pool_id])
    assert raw not in path.read_bytes()


async def test_a_link_of_ours_is_followed(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere" / "pools.db"
    link = tmp_path / "pools.db"
    link.symlink_to(real)
    await written(link, family())
    assert link.is_symlink()
    assert not real.is_symlink()
    assert await left(real) == rows(family())


async def test_a_link_of_somebody_else_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    link = tmp_path / "pools.db"
    link.symlink_to(victim)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    own = link.lstat().st_uid
    if own == 0:
        os.chown(link, 54321, -1, follow_symlinks=False)
    async with opened(link) as (journal, _):
        assert journal.status["state"] == "unusable"
        assert "symbolic link of another user" in journal.status["error"]
    assert victim.read_text() == "theirs"


async def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    link = tmp_path / "pools.db"
    link.symlink_to(link)
    async with opened(link) as (journal, _):
        assert journal.status["state"] == "unusable"


@pytest.mark.parametrize("where", ["file/pools.db", "full/pools.db", "/proc/none/pools.db"])
async def test_where_nothing_can_be_kept_pools_live_in_memory_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "pools.db").mkdir(parents=True)
    (tmp_path / "full" / "pools.db" / "something").write_text("mine")
    with caplog.at_level(logging.WARNING, "polykv.journal"):
        async with opened(tmp_path / where) as (journal, found):
            assert found.rows == []
            assert journal.status["state"] == "unusable"
            assert journal.status["error"]
            await journal.bind(MODEL)
            await journal.pool_added(root(1, 1))
            assert await journal.bind("other") == []
            assert await journal.bind(MODEL) == rows([root(1, 1)])
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "not kept over a restart" in caplog.text
    assert (tmp_path / "full" / "pools.db" / "something").read_text() == "mine"


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # such a name may have some 100 characters


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a socket"])
async def test_what_is_no_file_is_never_touched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool
) -> None:
    """As root, renaming it could take a device away from everybody."""
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there"
    {"a folder": os.mkdir, "a pipe": os.mkfifo, "a socket": a_socket}[kind](there)
    path = tmp_path / "link" if linked else there
    if linked:
        path.symlink_to(there)
    before, names = there.lstat(), beside(there)
    async with opened(path) as (journal, found):
        assert (found.rows, found.fingerprint) == ([], None)
        status = journal.status
        assert (status["state"], status["saved_copy"]) == ("unusable", None)
        assert f"{there} is {kind}" in status["error"]
        await journal.bind(MODEL)
        await journal.pool_added(root(1, 1))
    (warning,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert f"{there} is {kind}" in warning.getMessage()
    assert "':memory:' to keep nothing" in warning.getMessage()
    after = there.lstat()
    assert (after.st_ino, after.st_mode, after.st_ctime_ns) == (before.st_ino, before.st_mode, before.st_ctime_ns)
    assert beside(there) == names
    with pytest.raises(place.Unusable, match=kind):
        place.set_aside(there)
    assert beside(there) == names


def test_saved_copies_do_not_replace_each_other(tmp_path: Path) -> None:
    path = tmp_path / "pools.db"
    copies = set()
    for i in range(3):
        path.write_text(str(i))
        (tmp_path / "pools.db-wal").write_text(f"{i} wal")
        copies.add(place.set_aside(path))
    assert sorted(copy.read_text() for copy in copies) == ["0", "1", "2"]
    for copy in copies:
        assert copy.with_name(copy.name + "-wal").read_text() == copy.read_text() + " wal"
    assert not place.is_there(path)
