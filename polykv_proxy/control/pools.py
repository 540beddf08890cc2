"""Making pools and letting them go: plan on the tree, perform in the engine, commit or drop.

Each of these runs in a task of its own (``core``), so that a caller who leaves does not leave it half done. The steps
between two awaits are the critical sections: an engine's answer is committed in the step in which it comes.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from polykv_proxy.control.orders import CreatePool, ForkPool, Source
from polykv_proxy.control.policies import Policies
from polykv_proxy.control.residency import Residency
from polykv_proxy.control.retention import Retention
from polykv_proxy.control.snapshots import Snapshots
from polykv_proxy.control.sources import CHAT, COMPLETION, fetch_tokens
from polykv_proxy.control.views import Views, pool_answer
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    BranchNotExact,
    JournalFailed,
    PolyKVError,
    PoolHasChildren,
    PoolInUse,
    PoolNotFound,
    RequestError,
    UpstreamError,
    UpstreamRestarted,
)
from polykv_proxy.ids import PoolId, SeqId, SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.store import Journal
from polykv_proxy.tree.pool import Pool, PoolPlan
from polykv_proxy.tree.prefix import Tokens, make_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, Materialized

log = logging.getLogger("polykv.pools")

Keep = Callable[[Pool], Awaitable[None]]
Check = Callable[[Tokens], None]


class PoolWork:
    """``require_sharing``: raises unless the engine can hold pools and is ours. ``tree_changed``, ``learn_pool``:
    told. ``model``: changes when the engine runs another model, and with it every pool and token.
    """

    def __init__(
        self,
        *,
        tree: PoolTree,
        sessions: SessionBook,
        engine: EngineClient,
        watch: EngineWatch,
        residency: Residency,
        retention: Retention,
        snapshots: Snapshots,
        views: Views,
        require_sharing: Callable[[], Awaitable[None]],
        journal: Journal,
        policies: Policies,
        model: Callable[[], int],
        tree_changed: Callable[[], None],
        learn_pool: Callable[[Pool, str, dict[str, Any]], None],
        clock: Callable[[], float],
    ):
        self._tree, self._sessions, self._engine, self._watch = tree, sessions, engine, watch
        self._residency, self._retention, self._snapshots = residency, retention, snapshots
        self._views, self._clock = views, clock
        self._require_sharing, self._tree_changed, self._learn_pool = require_sharing, tree_changed, learn_pool
        self._journal, self._policies, self._model = journal, policies, model

    async def create(self, order: CreatePool) -> dict[str, Any]:
        await self._require_sharing()
        model = self._model()
        if order.source.from_session is not None:
            return await self._create_from_session(order, order.source.from_session, model)
        with _naming(order.source):
            tokens = self._in_vocabulary(await fetch_tokens(self._engine, order.source), order.source)
            plan = self._tree.plan_root(tokens, name=order.name)
        began_s = self._clock()
        with self._dropped_on_failure(plan), self._retention.pinning(plan, order.pin):
            made, _ = await self._residency.materialize(tokens, None, 0, plan.pool_id)
        return await self._commit(plan, made, order, None, began_s, model=model)

    async def fork(
        self, ref: int | str, order: ForkPool, keep: Keep | None = None, check: Check | None = None
    ) -> dict[str, Any]:
        """``keep``: writes the pool down in another way than alone; what it raises takes the pool off again.
        ``check``: raises unless this full prefix, which the caller sent or described, will do.
        """
        await self._require_sharing()
        model, parent = self._model(), self._tree.get(ref)
        source = order.source
        if source.from_session is not None:
            return await self._fork_from_session(parent, order, source.from_session, model)
        with _naming(source):
            if source.own_tokens is not None:
                own = self._in_vocabulary(make_tokens(source.own_tokens, param="own_tokens"), source)
                plan = self._tree.plan_fork_own(parent.pool_id, own, branch_pos=order.branch_pos, name=order.name)
            else:
                tokens = self._in_vocabulary(await fetch_tokens(self._engine, source), source)
                if check is not None:
                    check(tokens)
                plan = self._tree.plan_fork(parent.pool_id, tokens, branch_pos=order.branch_pos, name=order.name)
        began_s = self._clock()
        with (
            self._dropped_on_failure(plan),
            self._retention.pinning(plan, order.pin),
            self._residency.using(parent),
        ):
            if self._residency.held(parent) is not None or self._residency.n_free() > 1:
                await self._residency.ensure(parent)
            # Else the child takes the last sequence and holds the parent's range as well.
            made, shared = await self._residency.materialize(plan.tokens, parent, plan.branch_pos, plan.pool_id)
        branch_pos = made.branch_pos if shared else None
        return await self._commit(plan, made, order, branch_pos, began_s, model=model, exact=order.exact, keep=keep)

    async def _commit(
        self,
        plan: PoolPlan,
        made: Materialized,
        order: CreatePool | ForkPool,
        branch_pos: int | None,
        began_s: float,
        *,
        model: int,
        exact: bool = False,
        keep: Keep | None = None,
    ) -> dict[str, Any]:
        """The engine holds it: put it on the tree in the same step, and answer when it is in the journal."""
        if model != self._model():
            self._tree.drop(plan)
            await self._residency.give_back(SeqId(made.seq))
            raise UpstreamRestarted("the engine was restarted with another model meanwhile")
        if branch_pos is not None and branch_pos > plan.branch_pos:
            branch_pos = plan.branch_pos
        if exact and branch_pos is not None and branch_pos != plan.branch_pos:
            self._tree.drop(plan)
            await self._residency.give_back(SeqId(made.seq))
            raise BranchNotExact(
                f"this model keeps checkpoints: the nearest branch to {plan.branch_pos} is at {branch_pos}",
                branch_pos=branch_pos,
            )
        now_s = self._clock()
        pool = self._tree.commit(plan, now_s=now_s, branch_pos=branch_pos, pin=order.pin, ttl_s=order.ttl_s)
        same_as = min((twin.pool_id for twin in self._tree.twins(pool.pool_id) if twin is not pool), default=None)
        self._tree_changed()
        await self._residency.adopt(pool, made)
        self._learn_messages(pool, order.source)
        await self._keep(pool, keep)
        log.info("pool %s: [%d, %d) in sequence %d", pool.label, pool.branch_pos, pool.prefix_len, made.seq)
        return pool_answer(pool) | {"materialize_ms": round((now_s - began_s) * 1e3, 1), "same_as": same_as}

    async def _keep(self, pool: Pool, keep: Keep | None = None) -> None:
        """Write a pool down before anybody is told its id. Raises JournalFailed (503); then it is gone again. And
        PoolNotFound (404): it was released meanwhile, together with what it is made from.

        One that somebody makes a fork of already stays until that fork is written, and it with it, or is gone as well.
        """
        try:
            await (keep or self._journal.pool_added)(pool)
        except PolyKVError as e:
            if isinstance(e, JournalFailed) and pool.pool_id not in self._tree:
                parent = pool.parent
                raise PoolNotFound(f"pool {parent}, which this one is made from, was released meanwhile") from e
            try:
                await self._take_off(pool.pool_id)
            except (PoolHasChildren, PoolInUse):
                self._journal.pool_stays(pool)
                log.error("pool %s stays, although it could not be written yet: a fork of it is made", pool.label)
            else:
                await self._take_off_unwritten(pool.parent)
            raise

    async def _take_off_unwritten(self, pool_id: PoolId) -> None:
        """Ancestors that only stayed for a fork which is gone: nobody was told their ids either."""
        while self._journal.owes(pool_id):
            pool = self._tree.find(pool_id)
            with contextlib.suppress(PoolHasChildren, PoolInUse):
                await self._take_off(pool_id)
            if pool_id in self._tree:
                return
            with contextlib.suppress(JournalFailed):  # the journal said so, and tries again
                await self._journal.pools_released([pool_id])
            if pool is None:
                return
            pool_id = pool.parent

    async def _take_off(self, pool_id: PoolId) -> None:
        """Take a pool off the tree and give its sequence back. Raises PoolHasChildren, PoolInUse."""
        self._residency.ledger.sync()
        released = self._tree.release(pool_id) if pool_id in self._tree else []
        self._policies.forget(pool.pool_id for pool in released)
        self._residency.released(released)
        seq_ids = [pool.seq_id for pool in released if pool.seq_id is not None]
        self._residency.claim(seq_ids)
        self._tree_changed()
        self._sessions.released(pool_id)
        await self._residency.give_back_claimed(seq_ids)

    def _in_vocabulary(self, tokens: Tokens, source: Source) -> Tokens:
        """Check ids that a caller made up. Raises RequestError (400) naming the first bad position."""
        n_vocab = self._watch.stats.model.n_vocab if self._watch.stats is not None else None
        if n_vocab is not None and source.kind in ("tokens", "own_tokens") and max(tokens, default=0) >= n_vocab:
            at = next(i for i, token in enumerate(tokens) if token >= n_vocab)
            raise RequestError(
                f"{source.kind}[{at}] is no token id of this model: {tokens[at]} is not below {n_vocab}",
                param=source.kind,
            )
        return tokens

    def _learn_messages(self, pool: Pool, source: Source) -> None:
        if source.prompt is not None:
            self._learn_pool(pool, COMPLETION, {"prompt": source.prompt})
        if source.messages is None:
            return
        body: dict[str, Any] = {"messages": source.messages}
        if source.tools is not None:
            body["tools"] = source.tools
        if source.chat_template_kwargs is not None:
            body["chat_template_kwargs"] = source.chat_template_kwargs
        self._learn_pool(pool, CHAT, body)

    @contextlib.contextmanager
    def _dropped_on_failure(self, plan: PoolPlan) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._tree.drop(plan)
            raise

    async def release(self, pool_id: PoolId, *, recursive: bool) -> dict[str, Any]:
        with contextlib.suppress(UpstreamError):
            await self._watch.refresh()  # what the sessions hold; only the numbers of the answer need it
        ledger = self._residency.ledger
        ledger.sync()
        before = ledger.accounts()
        released = self._tree.release(pool_id, recursive=recursive)
        gone = {pool.pool_id for pool in released}
        self._policies.forget(gone)
        self._residency.released(released)
        after = ledger.accounts()
        seq_ids = [pool.seq_id for pool in released if pool.seq_id is not None]
        self._residency.claim(seq_ids)
        self._tree_changed()
        users = ledger.holders_of(gone)
        kept = self._kept(sum(after.released_cells.get(gone_id, 0) for gone_id in gone), users)
        for pool in released:
            self._sessions.released(pool.pool_id)
        used_before = self._watch.stats.cells.used if self._watch.stats and self._watch.stats.cells else None
        used_after = await self._residency.give_back_claimed(seq_ids)
        n_cells = before.total_cells - after.total_cells
        if used_before is not None and used_after is not None:
            n_cells = min(n_cells, max(0, used_before - used_after))  # others may have taken some meanwhile
        freed = {"seq_ids": len(seq_ids), "kv_cells": n_cells, "kv_bytes": self._views.kv_bytes(n_cells)}
        if seq_ids and used_after is None:
            freed = dict.fromkeys(freed)  # the engine could not be asked; they are freed when it is back
        await self._journal.pools_released(gone)
        return {
            "released": [pool.pool_id for pool in released],
            "freed_now": freed,
            "freed_later": kept,
        }

    def _kept(self, n_cells: int, slots: set[SlotId]) -> dict[str, Any]:
        """Cells of released pools that stay while these slots hold them."""
        sessions = sorted(s.session_id for s in self._sessions if s.slot_id in slots and not s.closed)
        return {"kv_cells": n_cells, "kv_bytes": self._views.kv_bytes(n_cells), "sessions": sessions}

    # From what a slot holds ----------------------------------------------------------------------------------------

    async def _create_from_session(self, order: CreatePool, session_id: SessionId, model: int) -> dict[str, Any]:
        began_s = self._clock()
        made, tokens = await self._snapshots.of_session(session_id)
        plan = await self._plan_or_give_back(made, lambda: self._tree.plan_root(tokens, name=order.name), order.pin)
        return await self._commit(plan, made, order, None, began_s, model=model)

    async def _fork_from_session(
        self, parent: Pool, order: ForkPool, session_id: SessionId, model: int
    ) -> dict[str, Any]:
        began_s = self._clock()
        made, tokens = await self._snapshots.of_session(session_id)
        plan = await self._plan_or_give_back(
            made,
            lambda: self._tree.plan_fork(parent.pool_id, tokens, branch_pos=order.branch_pos, name=order.name),
            order.pin,
        )
        return await self._commit(plan, made, order, None, began_s, model=model)

    async def _plan_or_give_back(
        self, made: Materialized, make_plan: Callable[[], PoolPlan], pin: bool = False
    ) -> PoolPlan:
        try:
            plan = make_plan()
            with self._dropped_on_failure(plan), self._retention.pinning(plan, pin):
                return plan
        except BaseException:
            await self._residency.give_back(SeqId(made.seq))
            raise


@contextlib.contextmanager
def _naming(source: Source) -> Iterator[None]:
    """What is wrong with the tokens is wrong with the field that they were made of."""
    try:
        yield
    except RequestError as e:
        if e.param in (None, "tokens"):
            e.param = source.kind
        raise
