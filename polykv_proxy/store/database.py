"""What is in the journal's file: pools by model, verified when it is opened, one transaction per batch of changes.

Rules it keeps:
    1. A file that is there is complete: it is built under another name and renamed.
    2. Every row has a checksum, the header has the sum of all of them: a row that is altered, missing or back is told.
    3. Every pool has the hash of its whole prefix: a token that is altered is told.
    4. Ids are never given twice: ``next_id`` is written with every new pool and never falls.
    5. Pools belong to the fingerprint of the model that made their tokens; only one model's are loaded.
    6. The policy of a pool lies in its row as a checksum and JSON, counts in the header, and goes with its pool.
    7. A pool is written only when its parent is there. What is there without it all the same is left out when it is
       loaded, with everything below it; a name that is there twice is the newer pool's.

Used by one thread. Everything that is wrong with the contents is ``Damaged``; other ``sqlite3.Error`` are the disk's.
"""

import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polykv_proxy.ids import ROOT, PoolId
from polykv_proxy.store.changes import Added, Bound, Change, Changed, PolicyChanged, Released, Replaced, Used
from polykv_proxy.store.place import COMPANIONS
from polykv_proxy.store.rows import (
    PoolRow,
    add_up,
    checksum,
    pack_tokens,
    seal_policy,
    signed,
)
from polykv_proxy.store.verify import Damaged, check_prefix, policy_of, row_of

APPLICATION_ID = 0x504F4B56
VERSION = 1

_SCHEMA = {
    "header": "CREATE TABLE header (id INTEGER PRIMARY KEY, next_id INTEGER, model_id INTEGER, n_rows INTEGER, "
    "sum INTEGER, checksum INTEGER)",
    "models": "CREATE TABLE models (model_id INTEGER PRIMARY KEY, fingerprint TEXT, checksum INTEGER)",
    "pools": "CREATE TABLE pools (pool_id INTEGER PRIMARY KEY, model_id INTEGER, parent INTEGER, branch_pos INTEGER, "
    "prefix_len INTEGER, tokens_hash INTEGER, name TEXT, pin INTEGER, ttl_s REAL, auto INTEGER, created_ts REAL, "
    "last_access_ts REAL, checksum INTEGER)",
    "tokens": "CREATE TABLE tokens (pool_id INTEGER PRIMARY KEY, own BLOB)",
    "policies": "CREATE TABLE policies (pool_id INTEGER PRIMARY KEY, policy TEXT)",
}
_POOL = (
    "pool_id, model_id, parent, branch_pos, prefix_len, tokens_hash, name, pin, ttl_s, auto, created_ts, last_access_ts"
)
_PIN, _NAME, _TTL, _USED = 7, 6, 8, 11  # places in _POOL

_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_MISMATCH)


class ParentMissing(Exception):
    """A pool cannot be written because the pool that it is made from is not in the journal."""


class Database:
    """One open journal."""

    def __init__(self, connection: sqlite3.Connection):
        self._db = connection
        self.next_id = 1
        self._model_id: int | None = None
        self._models: dict[str, int] = {}
        self._n_rows = self._sum = 0
        self._path: Path | None = None
        self._inode: tuple[int, int] | None = None
        self.unwritable: str | None = None
        """Why nothing could be written when it was opened."""
        self.left_out: list[PoolId] = []
        self.renamed: list[Changed] = []
        """What the last ``load`` found incomplete: pools without their parent, pools that lost their name."""

    # Open, close ---------------------------------------------------------------------------------------------------

    @classmethod
    def in_memory(cls) -> "Database":
        db = cls(sqlite3.connect(":memory:", isolation_level=None))
        db._build()
        return db

    @classmethod
    def create(cls, path: Path) -> None:
        """Build an empty journal where there is none."""
        new = path.with_name(f"{path.name}.new")
        for end in ("", *COMPANIONS):
            new.with_name(new.name + end).unlink(missing_ok=True)  # of one who was killed while building it
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        db = cls(_connect(new))
        try:
            db._build()
        finally:
            db.close()
        move_into_place(new, path)

    @classmethod
    def open(cls, path: Path) -> "Database":
        """Open a journal and verify it. One that can be read but not written (a full disk) is open all the same: see
        ``unwritable``.

        Raises:  Damaged; sqlite3.Error when the disk is at fault
        """
        try:
            db = cls(_connect(path))
            db._path, db._inode = path, _inode(path)
            try:
                db._verify()
                try:
                    db._db.execute("PRAGMA journal_mode = WAL").fetchall()
                    db.checkpoint()
                except sqlite3.Error as e:
                    if getattr(e, "sqlite_errorcode", 0) & 0xFF not in _NO_ROOM:
                        raise
                    db.unwritable = str(e)
            except BaseException:
                db.close()
                raise
        except sqlite3.Error as e:
            if _is_damage(e):
                raise Damaged(str(e)) from e
            raise
        return db

    def close(self) -> None:
        self._db.close()

    def checkpoint(self) -> None:
        """Write everything into the file itself, so that it is complete without its companions."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @property
    def is_replaced(self) -> bool:
        """Another file lies where this one was opened: what is written now, the next start would not see."""
        return self._path is not None and _inode(self._path) not in (self._inode, None)

    @property
    def is_gone(self) -> bool:
        """The file was deleted or moved away while it is open."""
        return self._path is not None and _inode(self._path) is None

    def copy_to(self, path: Path) -> None:
        """Write all that is in it into a new file. Raises sqlite3.Error, OSError."""
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        copy = _connect(path)
        try:
            self._db.backup(copy)
        finally:
            copy.close()

    def _build(self) -> None:
        run = self._db.execute
        run(f"PRAGMA application_id = {APPLICATION_ID}")
        run(f"PRAGMA user_version = {VERSION}")
        run("PRAGMA journal_mode = WAL").fetchall()
        run("BEGIN IMMEDIATE")
        for statement in _SCHEMA.values():
            run(statement)
        run("INSERT INTO header (id) VALUES (1)")
        self._write_header()
        run("COMMIT")

    # Verify, load --------------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        application_id, version = self._pragma("application_id"), self._pragma("user_version")
        if application_id != APPLICATION_ID:
            raise Damaged("it is no journal of pools")
        if version != VERSION:
            raise Damaged(f"it has schema version {version}, this proxy knows {VERSION}")
        found = dict(self._rows("SELECT name, sql FROM sqlite_master"))
        if found != _SCHEMA:
            raise Damaged("its tables are not those of a journal")
        if (said := self._pragma("quick_check")) != "ok":
            raise Damaged(str(said))
        header = self._rows("SELECT next_id, model_id, n_rows, sum, checksum FROM header")
        if len(header) != 1 or checksum(tuple(header[0][:4])) != header[0][4]:
            raise Damaged("its header is damaged")
        self.next_id, self._model_id, self._n_rows, self._sum = header[0][:4]
        n_rows = total = 0
        for table, columns in (("models", "model_id, fingerprint"), ("pools", _POOL)):
            for *values, kept in self._db.execute(f"SELECT {columns}, checksum FROM {table}"):
                if checksum(tuple(values)) != kept:
                    raise Damaged(f"a row of its table {table} is damaged")
                n_rows, total = n_rows + 1, add_up(total, kept)
        for pool_id, text in self._db.execute("SELECT pool_id, policy FROM policies"):
            n_rows, total = n_rows + 1, add_up(total, policy_of(pool_id, text)[1])
        if (n_rows, total) != (self._n_rows, self._sum):
            raise Damaged(f"it has {n_rows} rows where it should have {self._n_rows}, or not the same ones")
        self._models = {fingerprint: model_id for model_id, fingerprint in self._rows("SELECT * FROM models", 2)}

    @property
    def fingerprint(self) -> str | None:
        """The model that was the engine's last; None: there never was one."""
        return next((name for name, model_id in self._models.items() if model_id == self._model_id), None)

    def load(self) -> list[PoolRow]:
        """Give the pools of the last model, parents before children. What is incomplete: ``left_out``, ``renamed``.

        Raises:  Damaged
        """
        columns = ", ".join(f"pools.{name}" for name in _POOL.split(", "))
        asked = self._db.execute(
            f"SELECT {columns}, pools.checksum, own, policy FROM pools LEFT JOIN tokens USING (pool_id) "
            "LEFT JOIN policies USING (pool_id) WHERE model_id = ? ORDER BY pool_id",
            (self._model_id,),
        )
        loaded: dict[PoolId, PoolRow] = {}
        raw: dict[PoolId, bytes] = {}
        names: dict[str, PoolId] = {}
        self.left_out, self.renamed = [], []
        try:
            for *values, kept, own, policy in asked:
                if checksum(tuple(values)) != kept or not isinstance(own, bytes):
                    raise Damaged(f"pool {values[0]} is damaged")
                row = row_of(values, own)
                if policy is not None:
                    row = replace(row, policy=policy_of(row.pool_id, policy)[0])
                if row.pool_id >= self.next_id:
                    raise Damaged(f"pool {row.pool_id} does not belong here")
                if row.parent != ROOT and row.parent not in loaded:
                    self.left_out.append(row.pool_id)
                    continue
                raw[row.pool_id] = own
                check_prefix(row, own, loaded, raw)
                loaded[row.pool_id] = row
                if row.name is not None and row.name in names:
                    older = loaded[names[row.name]]
                    loaded[older.pool_id] = replace(older, name=None)
                    self.renamed.append(Changed(older.pool_id, None, older.pin, older.ttl_s))
                if row.name is not None:
                    names[row.name] = row.pool_id
        except sqlite3.Error as e:
            if _is_damage(e):
                raise Damaged(str(e)) from e
            raise
        return list(loaded.values())

    def n_others(self) -> int:
        """Pools of other models."""
        ((n,),) = self._rows("SELECT count(*) FROM pools WHERE model_id IS NOT ?", 1, (self._model_id,))
        return int(n)

    # Change --------------------------------------------------------------------------------------------------------

    def write(self, changes: Iterable[Change]) -> None:
        """Write all of these, or none.

        Raises:  sqlite3.Error, ParentMissing
        """
        before = (self.next_id, self._model_id, dict(self._models), self._n_rows, self._sum)
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for change in changes:
                self._apply(change)
            self._write_header()
            self._db.execute("COMMIT")
        except BaseException:
            self.next_id, self._model_id, self._models, self._n_rows, self._sum = before
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _apply(self, change: Change) -> None:
        match change:
            case Added(row, fingerprint):
                self._add(row, self._model(fingerprint))
            case Released(pool_ids):
                for pool_id in pool_ids:
                    self._remove(pool_id)
            case Changed(pool_id, name, pin, ttl_s):
                self._alter(pool_id, {_NAME: name, _PIN: int(pin), _TTL: None if ttl_s is None else float(ttl_s)})
            case PolicyChanged(pool_id, policy):
                self._remove_policy(pool_id)
                if policy is not None:
                    self._add_policy(pool_id, policy)
            case Replaced(added, policy, changed, released):
                parts: list[Change] = [*changed, Released(released), added]
                for part in [*parts, PolicyChanged(added.row.pool_id, policy)]:
                    self._apply(part)
            case Used(at_ts):
                for pool_id, ts in at_ts.items():
                    self._alter(pool_id, {_USED: float(ts)})
            case Bound(fingerprint):
                self._model_id = self._model(fingerprint)

    def _add(self, row: PoolRow, model_id: int) -> None:
        of_model = "SELECT 1 FROM pools WHERE pool_id = ? AND model_id = ?"
        if row.parent != ROOT and not self._rows(of_model, 1, (int(row.parent), model_id)):
            raise ParentMissing(f"pool {row.parent}, which pool {row.pool_id} is made from, is not in it")
        values = (
            int(row.pool_id),
            model_id,
            int(row.parent),
            row.branch_pos,
            row.prefix_len,
            signed(row.tokens_hash),
            row.name,
            int(row.pin),
            row.ttl_s,
            int(row.auto),
            row.created_ts,
            row.last_access_ts,
        )
        kept = checksum(values)
        self._db.execute(f"INSERT INTO pools ({_POOL}, checksum) VALUES ({'?, ' * 12}?)", (*values, kept))
        self._db.execute("INSERT INTO tokens VALUES (?, ?)", (row.pool_id, pack_tokens(row.own)))
        self._count(1, kept)
        self.next_id = max(self.next_id, row.pool_id + 1)

    def _remove(self, pool_id: PoolId) -> None:
        for (kept,) in self._rows("SELECT checksum FROM pools WHERE pool_id = ?", 1, (pool_id,)):
            for table in ("pools", "tokens"):
                self._db.execute(f"DELETE FROM {table} WHERE pool_id = ?", (pool_id,))
            self._count(-1, -kept)
        self._remove_policy(pool_id)

    def _add_policy(self, pool_id: PoolId, policy: Mapping[str, Any]) -> None:
        """Of a pool that was released meanwhile there is nothing to keep."""
        if self._rows("SELECT 1 FROM pools WHERE pool_id = ?", 1, (pool_id,)):
            text, kept = seal_policy(pool_id, policy)
            self._db.execute("INSERT INTO policies VALUES (?, ?)", (pool_id, text))
            self._count(1, kept)

    def _remove_policy(self, pool_id: PoolId) -> None:
        for (text,) in self._rows("SELECT policy FROM policies WHERE pool_id = ?", 1, (pool_id,)):
            self._db.execute("DELETE FROM policies WHERE pool_id = ?", (pool_id,))
            self._count(-1, -policy_of(pool_id, text)[1])

    def _alter(self, pool_id: PoolId, new: Mapping[int, object]) -> None:
        """Change some columns of a pool; one that was released meanwhile stays so."""
        for *values, kept in self._rows(f"SELECT {_POOL}, checksum FROM pools WHERE pool_id = ?", 13, (pool_id,)):
            for place, value in new.items():
                values[place] = value
            changed = checksum(tuple(values))
            self._db.execute(
                "UPDATE pools SET name = ?, pin = ?, ttl_s = ?, last_access_ts = ?, checksum = ? WHERE pool_id = ?",
                (values[_NAME], values[_PIN], values[_TTL], values[_USED], changed, pool_id),
            )
            self._count(0, changed - kept)

    def _model(self, fingerprint: str) -> int:
        if fingerprint not in self._models:
            model_id = max(self._models.values(), default=0) + 1
            kept = checksum((model_id, fingerprint))
            self._db.execute("INSERT INTO models VALUES (?, ?, ?)", (model_id, fingerprint, kept))
            self._count(1, kept)
            self._models[fingerprint] = model_id
        return self._models[fingerprint]

    def _count(self, n_rows: int, checksums: int) -> None:
        self._n_rows, self._sum = self._n_rows + n_rows, add_up(self._sum, checksums)

    def _write_header(self) -> None:
        values = (self.next_id, self._model_id, self._n_rows, self._sum)
        self._db.execute(
            "UPDATE header SET next_id = ?, model_id = ?, n_rows = ?, sum = ?, checksum = ?",
            (*values, checksum(values)),
        )

    def _pragma(self, name: str) -> object:
        rows = self._rows(f"PRAGMA {name}", 1)
        return rows[0][0] if rows else None

    def _rows(self, statement: str, n_columns: int | None = None, values: Sequence[object] = ()) -> list[Any]:
        rows = self._db.execute(statement, values).fetchall()
        return [row[:n_columns] for row in rows]


def move_into_place(new: Path, path: Path) -> None:
    """Rename, so that it is on the disk."""
    new.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that is alone with the file: readers would need a second file beside it, and see prompts."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=1)
    try:
        for pragma in ("locking_mode = EXCLUSIVE", "synchronous = FULL", "trusted_schema = OFF", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _inode(path: Path) -> tuple[int, int] | None:
    """None: nothing is there, or nobody can tell; who writes it anew is told why that fails."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_damage(error: sqlite3.Error) -> bool:
    """What the contents are to blame for; a text that is no UTF-8 has no code of its own."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF in _DAMAGE or code & 0xFF == sqlite3.SQLITE_ERROR
