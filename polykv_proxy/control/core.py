"""``Control``: the one writer of state, and the only thing that the doors (routes, relay) talk to.

Everything runs on one event loop, and only what is in this package changes the tree, the residency of pools, and what
is known of the engine. Changes that need the engine run in a task of their own: a caller who leaves does not leave
them half done.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from polykv_proxy.config import Settings
from polykv_proxy.control.attach import Attacher
from polykv_proxy.control.automatic import AutomaticPools
from polykv_proxy.control.compare import Comparer
from polykv_proxy.control.diagnosis import boot_lines, collect_facts
from polykv_proxy.control.diverged import Divergences
from polykv_proxy.control.dry_run import DryRun
from polykv_proxy.control.fan_out import FanOut
from polykv_proxy.control.hints import Hints
from polykv_proxy.control.keeping import Keeping
from polykv_proxy.control.lease import TTL_S, Lease
from polykv_proxy.control.leaving import IdlePools
from polykv_proxy.control.orders import AttachPlan, AttachRequest, CreatePool, ForkPool, Outcome
from polykv_proxy.control.parking import Parking
from polykv_proxy.control.permission import Permission
from polykv_proxy.control.plain import PlainEngine
from polykv_proxy.control.prefixes import Prefixes
from polykv_proxy.control.rate_feed import RateFeed
from polykv_proxy.control.rates import Rates
from polykv_proxy.control.readings import Readings, take_readings
from polykv_proxy.control.receipts import RequestLog
from polykv_proxy.control.residency import Residency
from polykv_proxy.control.restore import Restorer
from polykv_proxy.control.retention import Retention
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved import SavedStates
from polykv_proxy.control.snapshots import Snapshots
from polykv_proxy.control.tier import Tier
from polykv_proxy.control.views import Views
from polykv_proxy.control.watch import HEARTBEAT_S, EngineWatch
from polykv_proxy.doctor import Facts
from polykv_proxy.errors import Draining, EngineOwned, JournalFailed, JournalInUse, SessionNotFound, UpstreamError
from polykv_proxy.ids import PoolId, SeqId, SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import Grant, SlotBook
from polykv_proxy.store import Journal
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, Stats
from polykv_proxy.upstream.plain import PlainProps

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
        # Taken once: the time of one thing must not differ between two answers, nor between here and the journal.
        unix_offset_s = time.time() - clock()
        self.journal = Journal(settings.state_path, unix_offset_s=unix_offset_s)
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
            on_plain=self._plain_found,
            beat=self._beat,
            report=lambda: boot_lines(self._facts()),
            heartbeat_s=heartbeat_s,
        )
        self.plain = PlainEngine(self.engine, self.sessions, clock)
        self.room = Room(tree=self.tree, sessions=self.sessions, slots=self.slots, watch=self.watch, clock=clock)
        self.retention = self.room.retention = Retention(
            tree=self.tree,
            watch=self.watch,
            clock=clock,
            grace_ttl_s=settings.grace_ttl_s,
            pin_max_fraction=settings.pin_max_fraction,
        )
        self.saved = SavedStates(
            self.engine,
            self.watch,
            ram_bytes=settings.warm_ram_bytes,
            disk_bytes=settings.warm_disk_bytes,
            is_ours=lambda: self.lease.held,
        )
        self.residency = Residency(
            self.tree, self.engine, self.watch, self.room, lambda: self.lease.held, saved=self.saved
        )
        self.lease = Lease(self.engine, on_lost=self.residency.lease_lost, ttl_s=lease_ttl_s)
        self.parking = Parking(
            engine=self.engine,
            saved=self.saved,
            sessions=self.sessions,
            slots=self.slots,
            watch=self.watch,
            ledger=self.residency.ledger,
            prefixes=Prefixes(self.tree),
            room=self.room,
            sequence_of=self._sequence_of,
            may_change=lambda: self.owns_engine,
            deliver=self._deliver,
            clock=clock,
            after_s=settings.warm_after_s,
        )
        self.residency.empty_idle_slots, self.parking.doubt_cells = self.parking.make_room, self.residency.doubt_cells
        self.comparer = Comparer(
            tree=self.tree,
            sessions=self.sessions,
            engine=self.engine,
            watch=self.watch,
        )
        self.requests = RequestLog(unix_offset_s)
        self.dry_run = DryRun(
            tree=self.tree,
            comparer=self.comparer,
            engine=self.engine,
            watch=self.watch,
            is_resident=lambda pool: self.residency.held(pool) is not None,
        )
        self.divergences = Divergences(
            render=self.comparer.render,
            can_render=lambda: self.watch.hooks is True,
            reuses_any=lambda: self.watch.stats is not None and not self.watch.stats.recurrent,
            message_at=self.dry_run.message_at,
            tree=self.tree,
        )
        self.attach = Attacher(
            tree=self.tree,
            comparer=self.comparer,
            watch=self.watch,
            residency=self.residency,
            room=self.room,
            snapshot_slot=self._pool_of_slot,
            may_change=lambda: self.owns_engine,
            clock=clock,
        )
        self.idle_pools = IdlePools(
            tree=self.tree,
            watch=self.watch,
            residency=self.residency,
            room=self.room,
            retention=self.retention,
            sessions=self.sessions,
            slots=self.slots,
            may_change=lambda: self.owns_engine,
            clock=clock,
            after_s=settings.warm_after_s,
        )
        self.tier = Tier(saved=self.saved, watch=self.watch, ledger=self.residency.ledger, idle_pools=self.idle_pools)
        self.restorer = Restorer(
            tree=self.tree,
            sessions=self.sessions,
            journal=self.journal,
            watch=self.watch,
            residency=self.residency,
            room=self.room,
            tree_changed=self.comparer.forget_deepest,
            grace_end_s=self.retention.grace_end_s,
            leaves_at_s=self.idle_pools.leaves_at_s,
            clock=clock,
            unix_offset_s=unix_offset_s,
        )
        self.rates = Rates(self.sessions, self.watch, clock, window_ms=settings.tps_window_ms)
        self.views = Views(
            self.tree,
            self.sessions,
            self.watch,
            clock,
            unix_offset_s,
            journal=self.journal,
            ledger=self.residency.ledger,
            in_use=self.room.in_use,
            grace_end_s=self.retention.grace_end_s,
            saved=self.saved,
            taken_by=lambda: self.lease.taken_by,
            tier=self.tier,
            plain=self.plain,
            rates=self.rates,
        )
        self.feed = RateFeed(self.watch, self.rates, self.views, clock, unix_offset_s)
        self.permission = Permission(
            engine=self.engine,
            watch=self.watch,
            lease=self.lease,
            restorer=self.restorer,
            residency=self.residency,
        )
        self.pools = AutomaticPools(
            forget_after_s=settings.session_idle_s,
            idle_tax=lambda: self.tier.facts().idle_tax,
            tree=self.tree,
            sessions=self.sessions,
            engine=self.engine,
            watch=self.watch,
            residency=self.residency,
            retention=self.retention,
            snapshots=Snapshots(self.residency, self.sessions, self.slots, self.parking.bring_back),
            views=self.views,
            require_sharing=self.permission.require_sharing,
            journal=self.journal,
            model=lambda: self.restorer.n_models,
            tree_changed=self.comparer.forget_deepest,
            learn_pool=self._learn_pool,
            clock=clock,
        )
        self.fan_out = FanOut(
            tree=self.tree,
            sessions=self.sessions,
            slots=self.slots,
            watch=self.watch,
            comparer=self.comparer,
            pools=self.pools,
            may_change=lambda: self.owns_engine,
            clock=clock,
            min_tokens=settings.auto_pool_min_tokens if settings.mode == "auto" else 0,
        )
        self.hints = Hints(
            tree=self.tree,
            engine=self.engine,
            pools=self.pools,
            fan_out=self.fan_out,
            may_change=lambda: self.owns_engine,
        )
        self.keeping = Keeping(
            tree=self.tree,
            residency=self.residency,
            room=self.room,
            retention=self.retention,
            views=self.views,
            journal=self.journal,
            require_sharing=self.permission.require_sharing,
        )
        self._working: set[asyncio.Task[Any]] = set()
        self._knew_engine = False

    @property
    def hooks(self) -> bool:
        """The engine is patched, as far as is known, and this proxy is the one that manages it."""
        return self.watch.hooks is True and self.owns_engine

    @property
    def owns_engine(self) -> bool:
        """The lease is held, what the engine holds is known, and the tree is that of its model."""
        return self.lease.held and self.residency.compared and self.restorer.is_bound

    @property
    def ctx_total(self) -> int | None:
        """The context of one slot, in tokens."""
        if self.plain.props is not None:
            return self.plain.props.n_ctx
        return self.watch.stats.n_ctx_slot if self.watch.stats is not None else None

    async def start(self) -> None:
        """Start with the tree that is in the journal, also without the engine: it may come later.

        Raises:  JournalInUse, EngineOwned (503) when another proxy that is alive has it
        """
        try:
            await self.restorer.load()
            await self.watch.start()
            if self.watch.hooks and self.watch.state == "ready":
                await self.lease.take_at_start()
                await self._beat()
        except (JournalInUse, EngineOwned):
            await self.stop()
            raise
        except (UpstreamError, JournalFailed) as e:
            log.warning("the engine is there but not usable yet: %s", e.message)

    async def stop(self) -> None:
        await self.feed.stop()
        await self.parking.leave()
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        await self.hints.stop()
        await self.fan_out.stop()
        await self.pools.stop()
        await self.divergences.stop()
        await self.parking.stop()
        await self.saved.stop()
        await self.watch.stop()
        await self.plain.stop()
        await self.idle_pools.stop()
        await self.restorer.stop()
        await self.attach.stop()
        await self.residency.stop()
        with contextlib.suppress(UpstreamError):
            await self.lease.give_up()
        await self.engine.close()
        await self.journal.close()

    async def refresh(self) -> Stats | None:
        """Fresh stats of the engine; None when it has no hooks. Raises UpstreamError and its heirs."""
        return await self.watch.refresh()

    def readings(self) -> Readings:
        """What monitoring reads, from memory."""
        return take_readings(self.tree, self.watch, self.views, self.tier, rates=self.rates, sessions=self.sessions)

    async def facts(self) -> Facts:
        """What the doctor looks at, as fresh as can be had."""
        with contextlib.suppress(UpstreamError):
            await self.watch.refresh()
        return self._facts()

    def _facts(self) -> Facts:
        return collect_facts(
            settings=self.settings,
            watch=self.watch,
            plain=self.plain,
            lease=self.lease,
            tree=self.tree,
            sessions=self.sessions,
            room=self.room,
            saved=self.saved,
            journal=self.journal.status,
            now_s=self.clock(),
        )

    def _require_open(self) -> None:
        """Raises Draining (503): what is begun now would not be there for anybody."""
        if self.draining:
            raise Draining("the proxy is shutting down")

    # Pools ---------------------------------------------------------------------------------------------------------

    async def create_pool(self, order: CreatePool) -> dict[str, Any]:
        """Create a root pool. Goes on when the caller leaves.

        Raises:  RequestError (400), NameTaken, SessionNotResident (409), SeqIdsExhausted (503), KvExhausted (507),
                 SharingUnsupported, EngineUnpatched (501), UpstreamError and its heirs
        """
        self._require_open()
        return await self._in_own_task(self.pools.create(order))

    async def fork_pool(self, ref: int | str, order: ForkPool) -> dict[str, Any]:
        """Fork a child of a pool. Goes on when the caller leaves.

        Raises:  PoolNotFound (404), PrefixMismatch, BranchNotExact (409), and as ``create_pool``
        """
        self._require_open()
        await self.permission.require_patched()
        self.tree.get(ref)
        return await self._in_own_task(self.pools.fork(ref, order))

    async def release_pool(self, ref: int | str, *, recursive: bool = False) -> dict[str, Any]:
        """Take a pool off the tree at once; its cells return when the last turn that uses them ends.

        Slots hold their own share of the cells, so the sequences are freed now and running turns go on.

        Raises:  PoolNotFound (404), PoolHasChildren, PoolInUse (409), EngineUnpatched (501), EngineOwned (503)
        """
        await self.permission.require_patched()
        await self.permission.require_not_taken()
        pool_id = self.tree.get(ref).pool_id
        return await self._in_own_task(self.pools.release(pool_id, recursive=recursive))

    async def pin_pool(self, ref: int | str) -> dict[str, Any]:
        """Keep a pool resident under pressure. See ``keeping``."""
        self._require_open()
        await self.permission.require_patched()
        return await self._in_own_task(self.keeping.pin(self.tree.get(ref).pool_id))

    async def unpin_pool(self, ref: int | str) -> dict[str, Any]:
        """Raises PoolNotFound (404), EngineUnpatched (501)."""
        await self.permission.require_patched()
        return await self._in_own_task(self.keeping.unpin(self.tree.get(ref).pool_id))

    async def evict_pool(self, ref: int | str, to: str | None) -> dict[str, Any]:
        """Drop a pool's KV and keep the pool. See ``keeping``."""
        await self.permission.require_patched()
        return await self._in_own_task(self.keeping.evict(self.tree.get(ref).pool_id, to))

    async def flush_pool(self, ref: int | str) -> dict[str, Any]:
        """Evict what nobody needs of a subtree. See ``keeping``."""
        await self.permission.require_patched()
        return await self._in_own_task(self.keeping.flush(self.tree.get(ref).pool_id))

    async def _sequence_of(self, pool_id: PoolId) -> SeqId:
        """Raises PoolNotFound (404), and as ``Residency.ensure``."""
        return (await self.residency.ensure(self.tree.get(pool_id))).seq_id

    def _learn_pool(self, pool: Pool, path: str, body: dict[str, Any]) -> None:
        """A pool was made of this body."""
        self.comparer.learn_pool(pool, path, body)
        self.divergences.learn_pool(pool, path, body)

    async def _pool_of_slot(self, slot_id: SlotId, prompts: list[Tokens]) -> Pool | None:
        return await self._in_own_task(self.pools.of_slot(slot_id, prompts))

    # Sessions ------------------------------------------------------------------------------------------------------

    def drop_session(self, session_id: SessionId) -> dict[str, Any]:
        """Forget a session. What it has running ends by itself.

        Raises:  SessionNotFound (404)
        """
        session = self.sessions.drop(session_id)
        if session is None:
            raise SessionNotFound(f"no session {str(session_id)[:64]!r}")
        self.slots.forget([session_id])
        self.plain.forget([session_id])
        self.divergences.forget(session_id)
        return {"session_id": session_id, "detached_from": session.pool_id, "n_running": len(session.turns)}

    # The data plane ------------------------------------------------------------------------------------------------

    async def decide_attach(self, request: AttachRequest) -> AttachPlan:
        """Decide which pool a request gets, and wait until it is resident. See ``fan_out``, ``attach``."""
        request, waited_s = await self.fan_out.join(request)
        plan = await self.attach.decide(request)
        return replace(plan, waited_s=plan.waited_s + waited_s, joined_s=waited_s) if waited_s else plan

    def settle(self, plan: AttachPlan, outcome: Outcome) -> str | None:
        """Count a request that ended, and give the miss reason of its receipt."""
        if plan.pool_id is not None and outcome.status == 200:
            self.journal.pool_used(plan.pool_id)
        return self.attach.settle(plan, outcome)

    async def explain(self, plan: AttachPlan, outcome: Outcome) -> None:
        """Wait until ``settle`` can name the right reason: asks the engine if the request got less than planned."""
        await self.attach.explain(plan, outcome)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """(ready, body). ``draining`` beats everything else."""
        ready, body = self.views.health()
        return (False, body | {"status": "draining"}) if self.draining else (ready, body)

    # The engine changed --------------------------------------------------------------------------------------------

    def _engine_restarted(self, stats: Stats) -> None:
        self._engine_lost()
        self.plain.found(None)
        if self._knew_engine:
            self.lease.forgotten()
        else:
            self.residency.found_engine()
            self._knew_engine = True
        self.restorer.engine_started(stats)
        self._resize_slots(stats.n_slots)

    def _plain_found(self, props: PlainProps) -> None:
        self.sessions.engine_restarted()
        self.plain.found(props)
        self._resize_slots(props.n_slots)

    def _engine_lost(self) -> None:
        self.residency.drop_all()
        self.sessions.engine_restarted()

    def _resize_slots(self, n_slots: int) -> None:
        if self.deliver_grants is None and self.slots.n_waiting:
            return  # nobody could be told whom a slot was granted; the book stays as it is
        self._deliver(self.slots.resize(n_slots, self.clock()))

    def _deliver(self, grants: list[Grant]) -> None:
        if self.deliver_grants is not None and grants:
            self.deliver_grants(grants)

    async def _beat(self) -> None:
        self.rates.note()
        closed = self.sessions.sweep(self.clock())
        self.slots.forget(closed)
        if not self.watch.hooks:
            self.plain.forget(closed)
            await self.plain.beat()
            return
        in_use = self.room.in_use()
        self.retention.touch(in_use)
        for pool_id in in_use:
            self.journal.pool_used(pool_id)
        self.residency.ledger.sync()
        self.tier.look()
        self.journal.tick()
        try:
            await self.lease.renew_when_due()
            await self.restorer.require_bound()
        except (EngineOwned, JournalFailed) as e:
            log.debug("%s", e.message)
            return
        await self.residency.settle()
        await self.room.relieve()
        if self.owns_engine:
            self.restorer.bring_back()
            self.parking.tend()
            self.idle_pools.tend()
            self.pools.tend()

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
