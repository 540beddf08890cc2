"""``Control``: the one writer of state. Plan, perform, commit or drop.

A change that needs the engine is planned on the tree (nothing changes), performed by the engine (in a task of its own,
so that a caller who leaves does not leave it half done), then committed or dropped. Everything here runs on one event
loop, and the steps between two awaits are the critical sections.

Who is asked what: ``watch`` what the engine is, ``residency`` what it holds, ``attach`` which pool a request gets,
``tree`` what pools there are, ``slots`` and ``sessions`` who talks.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from polykv_proxy.config import Settings
from polykv_proxy.control.attach import Attacher
from polykv_proxy.control.lease import TTL_S, Lease
from polykv_proxy.control.orders import AttachPlan, AttachRequest, CreatePool, ForkPool, Outcome, Source
from polykv_proxy.control.residency import Residency
from polykv_proxy.control.snapshots import Snapshots
from polykv_proxy.control.sources import CHAT, fetch_tokens
from polykv_proxy.control.views import Views, pool_answer
from polykv_proxy.control.watch import HEARTBEAT_S, EngineWatch
from polykv_proxy.errors import (
    BranchNotExact,
    SessionNotFound,
    UpstreamError,
    UpstreamRestarted,
)
from polykv_proxy.ids import PoolId, SeqId, SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import Grant, SlotBook
from polykv_proxy.tree.pool import Pool, PoolPlan
from polykv_proxy.tree.prefix import make_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, EngineOwned, Materialized, SequenceGone, Stats

log = logging.getLogger("polykv.control")

Made = TypeVar("Made")


class Control:
    """One per proxy. ``start`` it on the loop that will use it.

    ``deliver_grants``: whoever lets requests wait for slots sets it; slots that a restart of the engine freed come
    here.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_s: float = HEARTBEAT_S,
        lease_ttl_s: float = TTL_S,
    ):
        key = settings.upstream_api_key
        self.settings = settings
        self.clock = clock
        self.tree = PoolTree()
        self.sessions = SessionBook(gap_s=settings.session_gap_s, idle_s=settings.session_idle_s)
        self.slots = SlotBook(is_live=self.sessions.is_live)
        self.engine = EngineClient(settings.upstream_url, key.get_secret_value() if key is not None else None)
        self.draining = False
        self.deliver_grants: Callable[[list[Grant]], None] | None = None
        self.watch = EngineWatch(
            self.engine,
            on_restart=self._engine_restarted,
            on_lost=self._engine_lost,
            on_plain=self._resize_slots,
            beat=self._beat,
            heartbeat_s=heartbeat_s,
        )
        self.lease = Lease(self.engine, ttl_s=lease_ttl_s)
        self.residency = Residency(self.tree, self.engine, self.watch)
        self.snapshots = Snapshots(self.residency, self.sessions, self.slots)
        self.attach = Attacher(
            tree=self.tree,
            sessions=self.sessions,
            engine=self.engine,
            watch=self.watch,
            residency=self.residency,
            snapshot_slot=self._pool_of_slot,
            may_change=lambda: self.lease.held,
            clock=clock,
        )
        self.views = Views(self.tree, self.sessions, self.watch, clock)
        self._working: set[asyncio.Task[Any]] = set()

    @property
    def hooks(self) -> bool:
        """The engine is patched, as far as is known, and this proxy is the one that manages it."""
        return self.watch.hooks is True and self.lease.held

    @property
    def ctx_total(self) -> int | None:
        """The context of one slot, in tokens."""
        return self.watch.stats.n_ctx_slot if self.watch.stats is not None else None

    async def start(self) -> None:
        """Start, also without the engine: it may come later.

        Raises:  EngineOwned when another proxy that is alive manages it
        """
        await self.watch.start()
        if self.watch.hooks and self.watch.state == "ready":
            try:
                await self.lease.take_at_start()
                await self._beat()
            except EngineOwned:
                await self.stop()
                raise
            except UpstreamError as e:
                log.warning("the engine is there but not usable yet: %s", e.message)

    async def stop(self) -> None:
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        await self.watch.stop()
        await self.residency.stop()
        with contextlib.suppress(UpstreamError):
            await self.lease.give_up()
        await self.engine.close()

    async def refresh(self) -> Stats | None:
        """Fresh stats of the engine; None when it has no hooks. Raises UpstreamError and its heirs."""
        return await self.watch.refresh()

    async def _require_sharing(self) -> None:
        """A patched engine that can share, and that is ours to change.

        Raises:  EngineUnpatched, SharingUnsupported (501), EngineOwned (503), UpstreamError and its heirs
        """
        await self.watch.require_sharing()
        if not self.lease.held:
            await self.lease.renew()

    # Pools ---------------------------------------------------------------------------------------------------------

    async def create_pool(self, order: CreatePool) -> dict[str, Any]:
        """Create a root pool. Goes on when the caller leaves.

        Raises:  RequestError (400), NameTaken, SessionNotResident (409), SeqIdsExhausted (503), KvExhausted (507),
                 SharingUnsupported, EngineUnpatched (501), UpstreamError and its heirs
        """
        return await self._in_own_task(self._create(order))

    async def _create(self, order: CreatePool) -> dict[str, Any]:
        await self._require_sharing()
        if order.source.from_session is not None:
            return await self._create_from_session(order, order.source.from_session)
        tokens = await fetch_tokens(self.engine, order.source)
        plan = self.tree.plan_root(tokens, name=order.name)
        began_s = self.clock()
        with self._dropped_on_failure(plan):
            made = await self.residency.materialize(tokens, None, 0, plan.pool_id)
        return await self._commit(plan, made, order, None, began_s)

    async def fork_pool(self, ref: int | str, order: ForkPool) -> dict[str, Any]:
        """Fork a child of a pool. Goes on when the caller leaves.

        Raises:  PoolNotFound (404), PrefixMismatch, BranchNotExact (409), and as ``create_pool``
        """
        self.tree.get(ref)
        return await self._in_own_task(self._fork(ref, order))

    async def _fork(self, ref: int | str, order: ForkPool) -> dict[str, Any]:
        await self._require_sharing()
        parent = self.tree.get(ref)
        source = order.source
        if source.from_session is not None:
            return await self._fork_from_session(parent, order, source.from_session)
        if source.own_tokens is not None:
            own = make_tokens(source.own_tokens, param="own_tokens")
            plan = self.tree.plan_fork_own(parent.pool_id, own, branch_pos=order.branch_pos, name=order.name)
        else:
            tokens = await fetch_tokens(self.engine, source)
            plan = self.tree.plan_fork(parent.pool_id, tokens, branch_pos=order.branch_pos, name=order.name)
        began_s = self.clock()
        with self._dropped_on_failure(plan):
            made, shared = await self._materialize_fork(parent, plan)
        branch_pos = made.branch_pos if shared else None
        return await self._commit(plan, made, order, branch_pos, began_s, exact=order.exact)

    async def _materialize_fork(self, parent: Pool, plan: PoolPlan) -> tuple[Materialized, bool]:
        """The child's cells, and whether they are shared with the parent's."""
        for _ in range(3):
            await self.residency.ensure(parent)
            source = self.residency.source(parent, plan.branch_pos)
            try:
                made = await self.residency.materialize(plan.tokens, source, plan.branch_pos, plan.pool_id)
            except SequenceGone:
                # The parent's cells went away between the look and the order: learn what is there, and once more.
                await self.watch.refresh()
                await self.residency.reconcile()
                continue
            return made, source is not None
        raise UpstreamRestarted(f"the engine lost pool {parent.label} again and again")

    async def _commit(
        self,
        plan: PoolPlan,
        made: Materialized,
        order: CreatePool | ForkPool,
        branch_pos: int | None,
        began_s: float,
        *,
        exact: bool = False,
    ) -> dict[str, Any]:
        """The engine holds it: put it on the tree in the same step."""
        if branch_pos is not None and branch_pos > plan.branch_pos:
            branch_pos = plan.branch_pos
        if exact and branch_pos is not None and branch_pos != plan.branch_pos:
            self.tree.drop(plan)
            await self.residency.give_back(SeqId(made.seq))
            raise BranchNotExact(
                f"this model keeps checkpoints: the nearest branch to {plan.branch_pos} is at {branch_pos}",
                branch_pos=branch_pos,
            )
        now_s = self.clock()
        pool = self.tree.commit(plan, now_s=now_s, branch_pos=branch_pos, pin=order.pin, ttl_s=order.ttl_s)
        self.attach.version += 1
        await self.residency.adopt(pool, made)
        self._learn_messages(pool, order.source)
        log.info("pool %s: [%d, %d) in sequence %d", pool.label, pool.branch_pos, pool.prefix_len, made.seq)
        return pool_answer(pool) | {"materialize_ms": round((now_s - began_s) * 1e3, 1)}

    def _learn_messages(self, pool: Pool, source: Source) -> None:
        if source.messages is None:
            return
        body: dict[str, Any] = {"messages": source.messages}
        if source.tools is not None:
            body["tools"] = source.tools
        if source.chat_template_kwargs is not None:
            body["chat_template_kwargs"] = source.chat_template_kwargs
        self.attach.learn_pool(pool, CHAT, body)

    @contextlib.contextmanager
    def _dropped_on_failure(self, plan: PoolPlan) -> Any:
        try:
            yield
        except BaseException:
            self.tree.drop(plan)
            raise

    async def release_pool(self, ref: int | str, *, recursive: bool = False) -> dict[str, Any]:
        """Take a pool off the tree at once; its cells return when the last turn that uses them ends.

        Slots hold their own share of the cells, so the sequences are freed now and running turns go on.

        Raises:  PoolNotFound (404), PoolHasChildren, PoolInUse (409)
        """
        pool_id = self.tree.get(ref).pool_id
        return await self._in_own_task(self._release(pool_id, recursive=recursive))

    async def _release(self, pool_id: PoolId, *, recursive: bool) -> dict[str, Any]:
        with contextlib.suppress(UpstreamError):
            await self.watch.refresh()  # what the sessions hold; only the numbers of the answer need it
        facts = self.views.session_facts()
        before = self.views.accounts(facts)
        released = self.tree.release(pool_id, recursive=recursive)
        gone = {pool.pool_id for pool in released}
        users = [fact for fact in facts if fact.pool_id in gone]
        seq_ids = [pool.seq_id for pool in released if pool.seq_id is not None]
        self.residency.claim(seq_ids)
        self.attach.version += 1
        for pool in released:
            self.sessions.released(pool.pool_id)
        await self.residency.give_back_claimed(seq_ids)
        kept = self.views.kept_by_sessions(released, users)
        after = self.views.accounts([fact for fact in facts if fact.pool_id not in gone])
        n_cells = before.total_cells - after.total_cells - kept["kv_cells"] - sum(u.suffix_n_tokens for u in users)
        return {
            "released": [pool.pool_id for pool in released],
            "freed_now": {"seq_ids": len(seq_ids), "kv_cells": n_cells, "kv_bytes": self.views.kv_bytes(n_cells)},
            "freed_later": kept,
        }

    # Sessions ------------------------------------------------------------------------------------------------------

    async def _create_from_session(self, order: CreatePool, session_id: SessionId) -> dict[str, Any]:
        began_s = self.clock()
        made, tokens = await self.snapshots.of_session(session_id)
        plan = await self._plan_or_give_back(made, lambda: self.tree.plan_root(tokens, name=order.name))
        return await self._commit(plan, made, order, None, began_s)

    async def _fork_from_session(self, parent: Pool, order: ForkPool, session_id: SessionId) -> dict[str, Any]:
        began_s = self.clock()
        made, tokens = await self.snapshots.of_session(session_id)
        plan = await self._plan_or_give_back(
            made,
            lambda: self.tree.plan_fork(parent.pool_id, tokens, branch_pos=order.branch_pos, name=order.name),
        )
        return await self._commit(plan, made, order, None, began_s)

    async def _plan_or_give_back(self, made: Materialized, plan: Callable[[], PoolPlan]) -> PoolPlan:
        try:
            return plan()
        except BaseException:
            await self.residency.give_back(SeqId(made.seq))
            raise

    async def _pool_of_slot(self, slot_id: SlotId) -> Pool | None:
        """The pool that is a slot's context right now: an existing one, else a new anonymous one (marked ``auto``)."""
        return await self._in_own_task(self._snapshot_slot(slot_id))

    async def _snapshot_slot(self, slot_id: SlotId) -> Pool | None:
        made, tokens = await self.snapshots.of_slot(slot_id, "slot")
        match = self.tree.match(tokens)
        if match is not None and match.whole and match.prefix_n_tokens == len(tokens):
            await self.residency.give_back(SeqId(made.seq))
            return self.tree.find(match.pool_id)
        plan = await self._plan_or_give_back(made, lambda: self.tree.plan_root(tokens))
        pool = self.tree.commit(plan, now_s=self.clock(), auto=True)
        self.attach.version += 1
        await self.residency.adopt(pool, made)
        return pool

    def drop_session(self, session_id: SessionId) -> dict[str, Any]:
        """Forget a session. What it has running ends by itself.

        Raises:  SessionNotFound (404)
        """
        session = self.sessions.drop(session_id)
        if session is None:
            raise SessionNotFound(f"no session {str(session_id)[:64]!r}")
        self.slots.forget([session_id])
        return {"session_id": session_id, "detached_from": session.pool_id, "n_running": len(session.turns)}

    # The data plane ------------------------------------------------------------------------------------------------

    async def decide_attach(self, request: AttachRequest) -> AttachPlan:
        """Decide which pool a request gets, and wait until it is resident. See ``attach``."""
        return await self.attach.decide(request)

    def settle(self, plan: AttachPlan, outcome: Outcome) -> str | None:
        """Count a request that ended, and give the miss reason of its receipt."""
        return self.attach.settle(plan, outcome)

    async def match(self, path: str, body: dict[str, Any], pool_ref: int | str | None = None) -> dict[str, Any]:
        """Say what a request would get, changing nothing.

        Raises:  PoolNotFound (404), RequestError (400), EngineUnpatched (501), UpstreamError and its heirs
        """
        await self.watch.require_patched()
        return await self.attach.project(path, body, self.tree.get(pool_ref) if pool_ref is not None else None)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """(ready, body). ``draining`` beats everything else."""
        ready, body = self.views.health()
        return (False, body | {"status": "draining"}) if self.draining else (ready, body)

    # The engine changed --------------------------------------------------------------------------------------------

    def _engine_restarted(self, stats: Stats) -> None:
        self._engine_lost()
        self._resize_slots(stats.n_slots)

    def _engine_lost(self) -> None:
        self.residency.drop_all()
        self.sessions.engine_restarted()

    def _resize_slots(self, n_slots: int) -> None:
        if self.deliver_grants is None and self.slots.n_waiting:
            return  # nobody could be told whom a slot was granted; the book stays as it is
        grants = self.slots.resize(n_slots, self.clock())
        if self.deliver_grants is not None and grants:
            self.deliver_grants(grants)

    async def _beat(self) -> None:
        closed = self.sessions.sweep(self.clock())
        self.slots.forget(closed)
        await self.lease.renew()
        await self.residency.settle()

    async def _in_own_task(self, work: Coroutine[Any, Any, Made]) -> Made:
        """Let it finish whatever happens to the caller."""
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_say_how_it_ended)
            raise


def _say_how_it_ended(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("what a caller ordered before it left failed: %s", error)
