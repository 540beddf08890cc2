"""Compaction by re-fork: what was said is put shorter, behind the ancestor that stays, and who was on the old pool goes
on with the new one.

Tokens that are rewritten have no cells in common with what they replace, so nothing in the cache is changed: the new
text is a fork of the ancestor, prefilled once. It begins with what the old pool has of the ancestor (system prompt and
tools, word for word), and is shorter than what it replaces: the pools that go, or the conversations that move.

One write to the journal then makes it the old pool's successor, with its pin, policy and name, and takes the old one
off with everything below it. Before that write nothing has changed, whatever fails or dies; after it all of it has, and
memory follows in a single step.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from polykv_proxy.control.compare import MIN_AUTO_TOKENS
from polykv_proxy.control.orders import Compact, ForkPool
from polykv_proxy.control.policies import Policies
from polykv_proxy.control.pools import PoolWork
from polykv_proxy.control.retention import Retention
from polykv_proxy.errors import (
    JournalFailed,
    PoolInUse,
    PoolNotFound,
    PrefixMismatch,
    RequestError,
    SessionNotFound,
)
from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.store import Journal
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.turns import Session

log = logging.getLogger("polykv.pools")

LOOK_AGAIN_S = 0.05
NOTHING: dict[str, Any] = {"released": [], "freed_now": None, "freed_later": None}


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

        Raises:  RequestError (400) when the ancestor would go with the old pool, or the new one is no shorter,
                 PrefixMismatch (409) when it does not begin with the ancestor, SessionNotFound, PoolNotFound (404),
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
            if self._sessions.get(session_id) is None:
                raise SessionNotFound(f"no session {str(session_id)[:64]!r}")
        done: dict[str, Any] = {}

        async def keep(new: Pool) -> None:
            async with self._turn:  # of two that replace the same pool, the second one finds it gone
                done.update(await self._take_over(old, new, order))

        def check(tokens: Tokens) -> None:
            self._require_still(old)
            self._require_still(ancestor)
            self._require_ancestor(tokens, ancestor, old)
            self._require_shorter(tokens, ancestor, old, order)

        fork = ForkPool(source=order.source, name=order.name)
        made = await self._pools.fork(ancestor.pool_id, fork, keep, check)
        log.info("pool %s took the place of pool %s for %d sessions", made["pool_id"], old.label, len(done["moved"]))
        return made | done

    async def _take_over(self, old: Pool, new: Pool, order: Compact) -> dict[str, Any]:
        """Gives who moved, and what was released. Raises before anything has changed."""
        self._require_still(old)
        gone = self._tree.require_settled(old.pool_id) if order.release_old else [old]
        pinned = [pool for pool in gone if pool.pin]
        self._check_pin(pinned, new)
        name = old.name if order.release_old and order.name is None else new.name
        policy = self._policies.own(old.pool_id)
        released = [pool.pool_id for pool in gone] if order.release_old else []
        await self._journal.pool_replaces(
            new,
            name=name,
            pin=bool(pinned),
            policy=policy.to_json() if policy is not None else None,
            unpinned=() if order.release_old else pinned,
            released=released,
        )
        try:
            self._require_still(old)
        except PoolNotFound:  # somebody released it while this was written down
            await self._journal.pools_released([new.pool_id])
            raise
        for pool in pinned:
            pool.pin = False
        moved: list[dict[str, Any]] = []
        if new.pool_id in self._tree:  # else it was released at once, which is the same as a moment later
            new.pin = bool(pinned)
            if policy is not None:
                self._policies.put_back(new.pool_id, policy.to_json())
            if name != new.name:
                self._tree.rename(old.pool_id, None)
                self._tree.rename(new.pool_id, name)
            moved = [self._move(session, new) for session in self._who_moves(gone, order.sessions)]
        freed = await self._release(old) if order.release_old else NOTHING
        return {"name": new.name, "pinned": new.pin, "moved": moved} | freed

    # Steps ---------------------------------------------------------------------------------------------------------

    def _require_still(self, pool: Pool) -> None:
        """Raises PoolNotFound (404)."""
        if self._tree.find(pool.pool_id) is not pool:
            raise PoolNotFound(f"pool {pool.label} was released meanwhile")

    def _require_ancestor(self, tokens: Tokens, ancestor: Pool, old: Pool) -> None:
        """It begins with what the old pool has of its ancestor, or with all of a pool of another family.

        Not to the last token: of a plain text it may be joined with the next one. Raises PrefixMismatch (409).
        """
        n_must, n_same = ancestor.prefix_len, self._tree.lcp(ancestor.pool_id, tokens)
        if ancestor is old or ancestor in self._tree.ancestors(old.pool_id):
            n_must = self._tree.lcp(ancestor.pool_id, self._tree.tokens(old.pool_id))
        if n_same < n_must - min(MIN_AUTO_TOKENS, n_must // 2):
            raise PrefixMismatch(
                f"the new prompt has only its first {n_same} tokens in common with pool {ancestor.label}, and {n_must} "
                f"of that pool are to stay: begin it with the same system prompt and tools, word for word, or name an "
                "ancestor that it begins with",
                divergence_pos=n_same,
            )

    def _require_shorter(self, tokens: Tokens, ancestor: Pool, old: Pool, order: Compact) -> None:
        """Than the longest pool that goes, or the longest conversation that moves. Raises RequestError (400)."""
        gone = [*self._tree.subtree(old.pool_id)] if order.release_old else [old]
        said = [session.ctx_used for session in self._who_moves(gone, order.sessions)]
        n_pools, n_said = max(pool.prefix_len for pool in gone), max((n or 0 for n in said), default=0)
        if None in said or len(tokens) < max(n_pools, n_said):
            return  # how long a conversation is may not be known yet
        raise RequestError(
            f"the new prompt has {len(tokens)} tokens, no fewer than what it is to replace: pool {old.label} "
            f"{'and what is below it have' if len(gone) > 1 else 'has'} {n_pools}, the longest conversation that moves "
            f"{n_said}. Put it shorter; or, if it is no compaction, fork pool {ancestor.label} and release pool "
            f"{old.label} yourself",
            param=order.source.kind,
        )

    def _check_pin(self, pinned: Sequence[Pool], new: Pool) -> None:
        """Whether the pins of what goes may be one on what takes its place. Raises PinBudget (409)."""
        if not pinned:
            return
        for pool in pinned:
            pool.pin = False
        try:
            self._retention.check_pin(new)
        finally:
            for pool in pinned:
                pool.pin = True

    def _who_moves(self, gone: Sequence[Pool], named: Sequence[SessionId] | None) -> list[Session]:
        """Those that were named and are still there, or all that are on what goes."""
        left = {pool.pool_id for pool in gone}
        if named is None:
            return [s for s in self._sessions if s.running_in in left and not s.closed]
        found = map(self._sessions.get, dict.fromkeys(named))
        return [session for session in found if session is not None]

    def _move(self, session: Session, new: Pool) -> dict[str, Any]:
        """Its next turn attaches to the new pool. What runs goes on with the cells that its slot holds."""
        shown = {
            "session_id": session.session_id,
            "from_pool_id": session.running_in,
            "n_running": len(session.turns),
        }
        session.move(new.pool_id)
        return shown

    async def _release(self, old: Pool) -> dict[str, Any]:
        """Off the disk it is already. A fork below it that began meanwhile fails when it is to be written there."""
        ids = [pool.pool_id for pool in self._tree.subtree(old.pool_id)]
        while True:
            try:
                return await self._pools.release(old.pool_id, recursive=True)
            except PoolInUse:
                await asyncio.sleep(LOOK_AGAIN_S)
            except PoolNotFound:
                return NOTHING
            except JournalFailed as e:
                log.warning("pool %s was released, which is to be written once more: %s", old.label, e.message)
                return {"released": ids[::-1], "freed_now": None, "freed_later": None}
