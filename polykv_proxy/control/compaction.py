"""Compaction by re-fork: what was said is put shorter, behind the ancestor that stays, and who was on the old pool goes
on with the new one.

Tokens that are rewritten have no cells in common with what they replace, so nothing in the cache is changed: the new
text is a fork of the ancestor, prefilled once. Then pins, policy and sessions move, and the old pool goes with
everything below it. Each step that fails undoes those before it; only then is the caller told.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from polykv_proxy.control.orders import Compact, ForkPool
from polykv_proxy.control.policies import Policies
from polykv_proxy.control.pools import PoolWork
from polykv_proxy.control.retention import Retention
from polykv_proxy.errors import JournalFailed, PolyKVError, PoolNotFound, RequestError, SessionNotFound
from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.sessions import Session, SessionBook
from polykv_proxy.store import Journal
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree

log = logging.getLogger("polykv.pools")

Undo = Callable[[], Awaitable[object]]


class Compaction:
    def __init__(
        self,
        *,
        tree: PoolTree,
        sessions: SessionBook,
        pools: PoolWork,
        retention: Retention,
        policies: Policies,
        journal: Journal,
    ):
        self._tree, self._sessions, self._pools = tree, sessions, pools
        self._retention, self._policies, self._journal = retention, policies, journal
        self._turn = asyncio.Lock()

    async def compact(self, pool_id: PoolId, order: Compact) -> dict[str, Any]:
        """Make the new pool, move to it, release the old ones.

        Raises:  RequestError (400) when the ancestor would go with the old pool, SessionNotFound, PoolNotFound (404),
                 PoolInUse (409) when a fork below the old pool is being made, and as ``PoolWork.fork``. Then nothing
                 has changed.
        """
        old, ancestor = self._tree.get(pool_id), self._tree.get(order.ancestor)
        below = {pool.pool_id for pool in self._tree.subtree(old.pool_id)}
        if order.release_old and ancestor.pool_id in below:
            raise RequestError(
                f"pool {ancestor.label} would be released with pool {old.label}: name an ancestor that stays, "
                "or send release_old: false",
                param="ancestor",
            )
        for session_id in order.sessions or ():
            self._known(session_id)
        made = await self._pools.fork(ancestor.pool_id, ForkPool(source=order.source, name=order.name))
        new = self._tree.get(made["pool_id"])
        async with self._turn:  # of two that replace the same pool, the second one finds it gone
            moved, released = await self._take_over(old, new, order)
        log.info("pool %s took the place of pool %s for %d sessions", new.label, old.label, len(moved))
        nothing: dict[str, Any] = {"released": [], "freed_now": None, "freed_later": None}
        return made | {"name": new.name, "pinned": new.pin, "moved": moved} | (released or nothing)

    async def _take_over(
        self, old: Pool, new: Pool, order: Compact
    ) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Gives who moved, and what was released. When a step fails the new pool is gone again."""
        undone: list[Undo] = [lambda: self._pools.release(new.pool_id, recursive=True)]
        try:
            self._require_still(old)
            gone = self._tree.subtree(old.pool_id) if order.release_old else [old]
            await self._move_pins(gone, new, undone)
            await self._copy_policy(old, new)
            if order.release_old and order.name is None:
                await self._move_name(old, new, undone)
            self._require_still(old)
            self._require_still(new)
            moved = self._move_sessions(gone, new, order.sessions, undone)
            return moved, await self._release(old) if order.release_old else None
        except PolyKVError:
            for undo in reversed(undone):
                await self._undo(undo)
            raise

    # Steps ---------------------------------------------------------------------------------------------------------

    def _require_still(self, pool: Pool) -> None:
        """Raises PoolNotFound (404)."""
        if self._tree.find(pool.pool_id) is not pool:
            raise PoolNotFound(f"pool {pool.label} was released meanwhile")

    async def _move_pins(self, gone: Sequence[Pool], new: Pool, undone: list[Undo]) -> None:
        """A pin on what goes is a pin on what takes its place. In one write: a crash leaves it here or there.

        Raises:  PinBudget (409), JournalFailed (503)
        """
        pinned = [pool for pool in gone if pool.pin]
        if not pinned:
            return

        async def put_back() -> None:
            new.pin = False
            for pool in pinned:
                pool.pin = True
            await self._journal.pools_changed([new, *pinned])

        for pool in pinned:
            pool.pin = False
        try:
            self._retention.check_pin(new)
            new.pin = True
            await self._journal.pools_changed([new, *pinned])
        except PolyKVError:
            new.pin = False
            for pool in pinned:
                pool.pin = True
            raise
        undone.append(put_back)

    async def _copy_policy(self, old: Pool, new: Pool) -> None:
        """The floor that was set for the old pool holds for the new one. Raises JournalFailed (503)."""
        policy = self._policies.own(old.pool_id)
        if policy is not None:
            await self._policies.set(new.pool_id, policy)

    async def _move_name(self, old: Pool, new: Pool, undone: list[Undo]) -> None:
        """Who names the old pool in requests gets the new one, from this step on: there is always one of that name.

        Raises:  JournalFailed (503)
        """
        name = old.name
        if name is None:
            return

        def rename(before: Pool, after: Pool) -> None:
            for pool, to in ((before, None), (after, name)):
                if pool.pool_id in self._tree:  # else it was released meanwhile, and its name is free
                    self._tree.rename(pool.pool_id, to)

        async def put_back() -> None:
            rename(new, old)
            await self._journal.pools_changed([old, new])

        self._require_still(old)
        self._require_still(new)
        rename(old, new)
        undone.append(put_back)
        await self._journal.pools_changed([old, new])

    def _move_sessions(
        self, gone: Sequence[Pool], new: Pool, named: Sequence[SessionId] | None, undone: list[Undo]
    ) -> list[dict[str, Any]]:
        """Their next turns attach to the new pool. What runs goes on with the cells that its slot holds."""
        left = {pool.pool_id for pool in gone}
        if named is None:
            sessions = [s for s in self._sessions if s.running_in in left and not s.closed]
        else:
            sessions = [self._known(session_id) for session_id in dict.fromkeys(named)]
        before = [(session, session.pool_id) for session in sessions]

        async def put_back() -> None:
            for session, pool_id in before:
                if session.pool_id == new.pool_id:
                    session.pool_id = pool_id

        moved = []
        for session in sessions:
            moved.append(
                {
                    "session_id": session.session_id,
                    "from_pool_id": session.running_in,
                    "n_running": len(session.turns),
                }
            )
            session.move(new.pool_id)
        undone.append(put_back)
        return moved

    async def _release(self, old: Pool) -> dict[str, Any]:
        """Raises PoolInUse (409)."""
        ids = [pool.pool_id for pool in self._tree.subtree(old.pool_id)]
        try:
            return await self._pools.release(old.pool_id, recursive=True)
        except JournalFailed as e:
            # It is off the tree, and the journal owes the write: the sessions are on the new pool for good.
            log.warning("pool %s was released, which is to be written yet: %s", old.label, e.message)
            return {"released": ids[::-1], "freed_now": None, "freed_later": None}

    async def _undo(self, undo: Undo) -> None:
        try:
            await undo()
        except PolyKVError as e:
            log.warning("a compaction that failed was not undone entirely: %s", e.message)

    def _known(self, session_id: SessionId) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session {str(session_id)[:64]!r}")
        return session
