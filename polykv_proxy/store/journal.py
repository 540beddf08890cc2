"""``Journal``: what control tells of pools, made durable off the event loop.

Rules it keeps:
    1. Who awaits ``pool_added``, ``pools_released``, ``pool_changed`` or ``policy_changed`` goes on when it is on the
       disk, or is told why it is not. What comes while the disk is busy shares the next transaction.
    2. What one model's pools are is asked with ``bind`` and never mixed with another's.
    3. A release that could not be written is owed: it goes out before anything else, in the same transaction. So is a
       pool that stays although it could not be written; its forks are refused until it is on the disk (``owed``).
    4. Last uses cost no write of their own: they go along now and then, and when it is closed.
    5. A file that cannot be used as it is costs the pools in it, never the start: it is set aside under a name that the
       one warning gives. Where nothing can be kept, pools live in memory, and ``status`` says so.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from polykv_proxy.errors import JournalFailed, JournalInUse
from polykv_proxy.ids import PoolId
from polykv_proxy.store import place
from polykv_proxy.store.changes import Added, Bound, Change, Changed, PolicyChanged, Released, Replaced, Used
from polykv_proxy.store.database import Database, ParentMissing, move_into_place
from polykv_proxy.store.owed import Owed
from polykv_proxy.store.rows import JournaledPool, PoolRow
from polykv_proxy.store.verify import Damaged

log = logging.getLogger("polykv.journal")

MEMORY = ":memory:"
USED_EVERY_S = 10.0
OWED_EVERY_S = 1.0

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_UNREADABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)

Given = TypeVar("Given")


class _Orphan(str):
    """What a pool is made from was released before it was written: no fault of the disk."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What an earlier run left. ``fingerprint``: the model that ``rows`` (parents first) belong to."""

    rows: Sequence[PoolRow]
    fingerprint: str | None
    next_id: int


@dataclass(slots=True, eq=False)
class _Write:
    changes: Sequence[Change]
    done: "asyncio.Future[None]"


class Journal:
    """``path``: a file, or ``:memory:`` to keep nothing. ``unix_offset_s``: Unix time minus the clock of the pools."""

    def __init__(self, path: str, *, unix_offset_s: float, lock_wait_s: float = place.LOCK_WAIT_S):
        self._path, self._offset_s, self._lock_wait_s = path, unix_offset_s, lock_wait_s
        self._file: Path | None = None
        self._lock_fd: int | None = None
        self._lock_path = Path()
        self._db: Database | None = None
        self._fingerprint: str | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="polykv-journal")
        self._turn = asyncio.Lock()
        self._waiting: list[_Write] = []
        self._writing: asyncio.Task[None] | None = None
        self._used: dict[PoolId, float] = {}
        self._owed = Owed()
        self._looked_s = time.monotonic()
        self._n_others = 0
        self._unusable: str | None = None
        self._failure: str | None = None
        self._saved_copy: Path | None = None

    # Life ----------------------------------------------------------------------------------------------------------

    async def open(self) -> Opened:
        """Open it and give what is in it. ``close`` it.

        Raises:  JournalInUse (503) when another process has it
        """
        opened = await self._in_thread(self._open)
        self._owe_what_was_mended()
        return opened

    async def close(self) -> None:
        """Write what is still to be written, and let the next one have it."""
        if self._db is not None:
            self._write_soon()
        while self._writing is not None and not self._writing.done():
            await asyncio.wait([self._writing])
        async with self._turn:
            if not self._closed:
                self._closed = True
                await self._in_thread(self._close)
                self._thread.shutdown()

    async def bind(self, fingerprint: str) -> list[PoolRow]:
        """From here on pools are made by this model. Gives those that it has, parents first.

        Raises:  JournalFailed (503)
        """
        async with self._turn:
            first = self._owed.first()
            rows = await self._in_thread(lambda: self._bind(fingerprint, first))
            self._owe_what_was_mended()
        self._fingerprint = fingerprint
        self._owed.other_model(fingerprint)
        return [row for row in rows if not self._owed.is_released(row.pool_id)]

    # What happens to pools -----------------------------------------------------------------------------------------

    async def pool_added(self, pool: JournaledPool) -> None:
        """Keep a new pool, with its tokens. Raises JournalFailed (503); then the pool is not kept."""
        if self._fingerprint is None:
            raise JournalFailed("it is not known yet which model this pool is of")
        await self._write([Added(PoolRow.of(pool, self._offset_s), self._fingerprint)])

    def pool_stays(self, pool: JournaledPool) -> None:
        """A pool that ``pool_added`` failed for stays all the same: written before anything that comes after it."""
        if self._fingerprint is not None:
            self._owed.pool(pool, self._fingerprint)

    def owes(self, pool_id: PoolId) -> bool:
        """Whether this pool stays although it could not be written yet."""
        return self._owed.is_pool(pool_id)

    async def pools_released(self, pool_ids: Iterable[PoolId]) -> None:
        """Forget pools. Raises JournalFailed (503); then it is tried again until it succeeds."""
        gone = list(pool_ids)
        if gone:
            for pool_id in gone:
                self._used.pop(pool_id, None)
            self._owed.release(gone)
            await self._write([Released(gone)])

    async def pool_changed(self, pool: JournaledPool) -> None:
        """Keep a pool's name, pin and ttl as they are now. Raises JournalFailed (503)."""
        await self._write([Changed(pool.pool_id, pool.name, pool.pin, pool.ttl_s)])

    async def pool_replaces(
        self,
        pool: JournaledPool,
        *,
        name: str | None,
        pin: bool,
        policy: Mapping[str, Any] | None,
        unpinned: Iterable[JournaledPool],
        released: Iterable[PoolId],
    ) -> None:
        """Keep a new pool, as it will be called and pinned, together with what it takes the place of: all of it is on
        the disk, or nothing.

        Raises:  JournalFailed (503); then the pool is not kept, and the others are
        """
        if self._fingerprint is None:
            raise JournalFailed("it is not known yet which model this pool is of")
        added = Added(replace(PoolRow.of(pool, self._offset_s), name=name, pin=pin), self._fingerprint)
        changed = [Changed(other.pool_id, other.name, False, other.ttl_s) for other in unpinned]
        await self._write([Replaced(added, policy, changed, list(released))])

    async def policy_changed(self, pool_id: PoolId, policy: Mapping[str, Any] | None) -> None:
        """Keep a pool's own policy, or that it has none any more. Raises JournalFailed (503); then it is as before."""
        await self._write([PolicyChanged(pool_id, policy)])
        if self._owed.is_pool(pool_id):  # what lies beside a pool that is not on the disk is not there either
            raise JournalFailed(f"pool {pool_id} itself could not be written to the journal {self._path} yet")

    def pool_used(self, pool_id: PoolId) -> None:
        """It was used just now. Costs nothing; written later."""
        self._used[pool_id] = time.time()

    def tick(self) -> None:
        """Called by the heartbeat: write what is due and nobody waits for."""
        now_s = time.monotonic()
        due_s = OWED_EVERY_S if self._owed or self._failure is not None else USED_EVERY_S
        db = self._db
        if db is not None and now_s - self._looked_s >= due_s:
            self._write_soon(also_nothing=db.is_gone or db.is_replaced)

    @property
    def status(self) -> dict[str, Any]:
        """For health. ``state``: ok, off (``:memory:``), unusable (kept in memory instead), failing (last write)."""
        off = self._path == MEMORY
        state = "off" if off else "unusable" if self._unusable else "failing" if self._failure else "ok"
        return {
            "state": state,
            "path": None if off else self._path,
            "error": self._unusable or self._failure,
            "saved_copy": str(self._saved_copy) if self._saved_copy is not None else None,
            "pools_of_other_models": self._n_others,
        }

    # Writing: on the loop ------------------------------------------------------------------------------------------

    async def _write(self, changes: Sequence[Change]) -> None:
        await asyncio.shield(self._enqueue(changes))

    def _write_soon(self, *, also_nothing: bool = False) -> None:
        self._looked_s = time.monotonic()
        used, self._used = self._used, {}
        if (
            used or self._owed or self._failure is not None or also_nothing
        ):  # what is owed goes out with whatever is written
            self._enqueue([Used(used)])

    def _enqueue(self, changes: Sequence[Change]) -> "asyncio.Future[None]":
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        if self._db is None:
            done.set_exception(JournalFailed("the journal is not open"))
            return done
        self._waiting.append(_Write(changes, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_waiting(), name="polykv-journal")
        return done

    async def _write_waiting(self) -> None:
        while self._waiting:
            async with self._turn:
                batch, self._waiting = self._waiting, []
                parts: list[Sequence[Change]] = [self._owed.first()]
                parts += [[pool] for pool in self._owed.pools(self._offset_s)]
                n_owed = len(parts)
                parts += [write.changes for write in batch]
                try:
                    errors = await self._in_thread(partial(self._write_parts, parts))
                except Exception as e:  # a bug: nobody may wait for ever because of it
                    log.exception("a bug in the journal")
                    errors = [f"{type(e).__name__}: {e}"] * len(parts)
                self._settle(parts, errors, n_owed)
                self._answer(batch, errors[n_owed:])
            if not self._waiting and self._file is not None:
                async with self._turn:
                    await self._in_thread(self._checkpoint)

    def _settle(self, parts: Sequence[Sequence[Change]], errors: Sequence[str | None], n_owed: int) -> None:
        """Note what is on the disk and what is owed from here on; the first ``n_owed`` parts were owed before."""
        for part, error in zip(parts, errors, strict=True):
            if error is None:
                self._owed.paid(part)
        for part, error in zip(parts[n_owed:], errors[n_owed:], strict=True):
            for change in part if error is not None else ():
                if isinstance(change, Released):
                    self._owed.release(change.pool_ids)
                elif isinstance(change, Added):  # a write that failed late may be there all the same
                    self._owed.release([change.row.pool_id])
                elif isinstance(change, Replaced):
                    self._owed.release([change.added.row.pool_id])
        failed = next((error for error in errors if error is not None and not isinstance(error, _Orphan)), None)
        if failed is not None and self._failure is None:
            log.error("the journal %s cannot be written: %s", self._path, failed)
        elif failed is None and self._failure is not None:
            log.info("the journal %s can be written again", self._path)
        self._failure = failed

    def _answer(self, batch: Sequence[_Write], errors: Sequence[str | None]) -> None:
        for write, error in zip(batch, errors, strict=True):
            if write.done.done():
                continue
            if error is None:
                write.done.set_result(None)
            else:
                write.done.set_exception(JournalFailed(f"the journal {self._path} cannot be written: {error}"))

    def _owe_what_was_mended(self) -> None:
        """What was left out when the pools were loaded is to leave the file as well."""
        if self._db is not None:
            self._owed.release(self._db.left_out)
            for change in self._db.renamed:
                self._owed.change(change)

    async def _in_thread(self, work: Callable[[], Given]) -> Given:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # In the thread -------------------------------------------------------------------------------------------------

    def _open(self) -> Opened:
        if self._path == MEMORY:
            self._db = Database.in_memory()
            return Opened([], None, 1)
        try:
            self._file = place.prepare(Path(self._path))
            self._lock_path = self._file
            self._lock_fd = place.lock(self._file, self._lock_wait_s)
            self._db, rows = self._open_file(self._file)
        except place.Taken as e:
            raise JournalInUse(
                f"the journal {self._path} is in use by {e}: stop that one, or name another file with --state"
            ) from e
        except (place.Unusable, OSError, sqlite3.Error) as e:
            self._unusable, self._file = str(e), None
            log.warning("pools are not kept over a restart, they live in memory: %s", e)
            self._db = Database.in_memory()
            return Opened([], None, 1)
        self._n_others = self._db.n_others()
        self._failure = self._db.unwritable
        if self._failure is not None:
            log.error("the journal %s cannot be written, what is in it is there: %s", self._path, self._failure)
        return Opened(rows, self._db.fingerprint, self._db.next_id)

    def _open_file(self, path: Path) -> tuple[Database, list[PoolRow]]:
        if place.is_there(path):
            try:
                return self._open_what_is_there(path)
            except Damaged as e:
                self._start_over(path, e)
        else:
            Database.create(path)
        return Database.open(path), []

    def _open_what_is_there(self, path: Path) -> tuple[Database, list[PoolRow]]:
        """Raises Damaged, Taken, Unusable, sqlite3.Error."""
        if not path.is_file():
            raise Damaged("there is no file")
        was_exposed = place.close_to_others(path)
        try:
            db = Database.open(path)
        except sqlite3.Error as e:
            code = getattr(e, "sqlite_errorcode", 0) & 0xFF
            if code in _BUSY:
                raise place.Taken("another program") from e
            if code in _UNREADABLE:
                raise Damaged(str(e)) from e
            raise
        try:
            rows = self._load(db)
        except BaseException:
            db.close()
            raise
        if was_exposed:
            log.warning("the journal %s could be read by others until now", path)
        return db, rows

    def _start_over(self, path: Path, why: Damaged) -> None:
        self._saved_copy = place.set_aside(path)
        log.warning(
            "the journal %s cannot be read (%s): starting without pools, saved as %s", path, why, self._saved_copy
        )
        Database.create(path)

    def _bind(self, fingerprint: str, first: Sequence[Change]) -> list[PoolRow]:
        if self._db is None:
            raise JournalFailed("the journal is not open")
        try:
            self._put_back()
            if fingerprint != self._db.fingerprint:  # a full disk is no reason not to use what is there
                self._db.write([*first, Bound(fingerprint)])
            try:
                rows = self._load(self._db)
            except Damaged as e:
                if self._file is None:
                    raise
                self._db.close()
                self._start_over(self._file, e)
                self._db, rows = Database.open(self._file), []
                self._db.write([Bound(fingerprint)])
            self._n_others = self._db.n_others()
        except (sqlite3.Error, OSError, Damaged, place.Unusable) as e:
            raise JournalFailed(f"the journal {self._path} cannot be used: {e}") from e
        return rows

    def _load(self, db: Database) -> list[PoolRow]:
        """Raises Damaged, sqlite3.Error."""
        rows = db.load()
        if db.left_out or db.renamed:
            log.warning(
                "the journal %s is incomplete: %d pools are left out because what they are made from is not in it, "
                "%d lost their name to a newer pool",
                self._path,
                len(db.left_out),
                len(db.renamed),
            )
        return rows

    def _write_parts(self, parts: Sequence[Sequence[Change]]) -> list[str | None]:
        """One transaction for all; if it fails, one for each, so that nobody fails for another.

        Only the first part must be on the disk before any other.
        """
        together = self._try([change for part in parts for change in part])
        if together is None:
            return [None] * len(parts)
        if sum(1 for part in parts if part) == 1:
            return [together if part else None for part in parts]
        first = self._try(parts[0]) if parts[0] else None
        if first is not None:
            return [first] * len(parts)
        return [None, *(self._try(part) for part in parts[1:])]

    def _try(self, changes: Sequence[Change]) -> str | None:
        if self._db is None:
            return "it is closed"
        try:
            self._put_back()
            self._db.write(changes)
        except ParentMissing as e:
            return _Orphan(e)
        except (sqlite3.Error, Damaged, OSError) as e:
            return str(e)
        return None

    def _put_back(self) -> None:
        """See to it that what is written is what the next start finds: a file that was deleted is written anew.

        Raises:  OSError, sqlite3.Error, Damaged
        """
        if self._db is None or self._file is None:
            return
        if self._db.is_replaced:
            raise OSError(
                f"another file lies at {self._file} since the proxy was started: move it away, and the pools of this "
                "proxy are written anew, or start the proxy again to use that one"
            )
        if self._db.is_gone:
            new = self._file.with_name(f"{self._file.name}.new")
            self._db.copy_to(new)
            for end in place.COMPANIONS:
                self._file.with_name(self._file.name + end).unlink(missing_ok=True)
            move_into_place(new, self._file)
            self._db.close()  # before the new one is opened: it takes its own log away by name
            self._db = Database.open(self._file)
            log.warning("the journal %s was deleted while the proxy runs: written anew", self._file)

    def _checkpoint(self) -> None:
        try:
            if self._db is not None:
                self._db.checkpoint()
        except sqlite3.Error as e:
            log.debug("not checkpointed: %s", e)  # what is in the log beside the file is as durable

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock_fd is not None:
            place.unlock(self._lock_fd, self._lock_path)
            self._lock_fd = None
