"""Pools as the journal is told of them, and journals that are opened and closed."""

import hashlib
import sqlite3
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

from polykv_proxy.ids import ROOT, PoolId
from polykv_proxy.store import Journal, Opened, PoolRow
from polykv_proxy.tree.prefix import Tokens, hash_tokens

MODEL = "model-a"


@dataclass
class FakePool:
    pool_id: PoolId
    parent: PoolId
    branch_pos: int
    full: Tokens
    name: str | None = None
    pin: bool = False
    ttl_s: float | None = None
    auto: bool = False
    created_s: float = 100.0
    last_access_s: float = 200.0
    tokens_hash: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens_hash = hash_tokens(self.full)

    @property
    def own(self) -> Tokens:
        return self.full[self.branch_pos :]


def root(pool_id: int, *tokens: int, **more: object) -> FakePool:
    return FakePool(PoolId(pool_id), ROOT, 0, array("i", tokens), **more)  # type: ignore[arg-type]


def child(pool_id: int, parent: FakePool, branch_pos: int, *own: int, **more: object) -> FakePool:
    full = parent.full[:branch_pos] + array("i", own)
    return FakePool(PoolId(pool_id), parent.pool_id, branch_pos, full, **more)  # type: ignore[arg-type]


def family() -> list[FakePool]:
    """A root over several pages of the file, a branch, an extension of it, and an unrelated pinned root."""
    trunk = root(1, *range(5000), name="trunk", ttl_s=7.5)
    branch = child(2, trunk, 3000, *range(70000, 72000), name="branch")
    leaf = child(4, branch, 5000, 9, 8, 7, auto=True)
    return [trunk, branch, leaf, root(5, 1, 2, 3, name="apart", pin=True)]


def rows(pools: Sequence[FakePool], offset_s: float = 0.0) -> list[PoolRow]:
    return [PoolRow.of(pool, offset_s) for pool in pools]


@asynccontextmanager
async def opened(path: Path | str, offset_s: float = 0.0) -> AsyncIterator[tuple[Journal, Opened]]:
    journal = Journal(str(path), unix_offset_s=offset_s, lock_wait_s=0.1)
    try:
        yield journal, await journal.open()
    finally:
        await journal.close()


async def written(path: Path, pools: Sequence[FakePool], model: str = MODEL) -> None:
    async with opened(path) as (journal, _):
        await journal.bind(model)
        for pool in pools:
            await journal.pool_added(pool)


async def left(path: Path) -> list[PoolRow]:
    """What is in it, for its last model."""
    async with opened(path) as (_, found):
        return list(found.rows)


def altered(path: Path, *statements: str) -> None:
    """Change the file behind the journal's back."""
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def read(path: Path | str) -> bytes:
    return Path(path).read_bytes()


def put(path: Path | str, content: bytes) -> None:
    Path(path).write_bytes(content)


def beside(path: Path) -> list[str]:
    """Names of the files in its folder."""
    return sorted(file.name for file in path.parent.iterdir())
