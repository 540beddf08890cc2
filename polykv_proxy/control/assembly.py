"""How the parts of control are put together: who is told of what, and who may ask whom.

No decision in here. ``core`` says what happens when the engine changes, with every heartbeat, and at the doors.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from polykv_proxy.config import Settings
from polykv_proxy.control.attach import Attacher
from polykv_proxy.control.automatic import AutomaticPools
from polykv_proxy.control.compaction import Compaction
from polykv_proxy.control.compare import Comparer
from polykv_proxy.control.diagnosis import boot_lines
from polykv_proxy.control.diverged import Divergences
from polykv_proxy.control.door import Door
from polykv_proxy.control.dry_run import DryRun
from polykv_proxy.control.fan_out import FanOut
from polykv_proxy.control.gate_facts import GateFacts
from polykv_proxy.control.hints import Hints
from polykv_proxy.control.keeping import Keeping
from polykv_proxy.control.lease import TTL_S, Lease
from polykv_proxy.control.leaving import IdlePools
from polykv_proxy.control.parking import Parking
from polykv_proxy.control.permission import Permission
from polykv_proxy.control.plain import PlainEngine
from polykv_proxy.control.policies import Policies
from polykv_proxy.control.prefixes import Prefixes
from polykv_proxy.control.rate_feed import RateFeed
from polykv_proxy.control.rates import Rates
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
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.rate import RateBook
from polykv_proxy.ids import PoolId, SeqId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import Grant, SlotBook
from polykv_proxy.store import Journal
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, Stats
from polykv_proxy.upstream.plain import PlainProps


class Assembly(ABC):
    """All parts, wired.

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
        self.policies = Policies(tree=self.tree, journal=self.journal, settings=settings)
        self.sessions = SessionBook(gap_s=settings.session_gap_s, idle_s=settings.session_idle_s)
        self.slots = SlotBook(is_live=self.sessions.is_live, live_s=settings.session_gap_s)
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
            seek_permission=self._seek_permission,
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
            policies=self.policies,
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
        self.door = self._make_door()
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
            policies=self.policies,
            model=lambda: self.restorer.n_models,
            tree_changed=self.comparer.forget_deepest,
            learn_pool=self._learn_pool,
            clock=clock,
        )
        self.fan_out = FanOut(
            sessions=self.sessions,
            slots=self.slots,
            watch=self.watch,
            comparer=self.comparer,
            pools=self.pools,
            fetch=self.parking.bring_back,
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
        self.compaction = Compaction(
            tree=self.tree,
            sessions=self.sessions,
            pools=self.pools,
            retention=self.retention,
            policies=self.policies,
            journal=self.journal,
        )
        self._working: set[asyncio.Task[Any]] = set()
        self._knew_engine = False

    def _make_door(self) -> Door:
        facts = GateFacts(
            tree=self.tree,
            sessions=self.sessions,
            slots=self.slots,
            watch=self.watch,
            room=self.room,
            ledger=self.residency.ledger,
            rates=self.rates,
            policies=self.policies,
            clock=self.clock,
        )
        rates = RateBook(window_tokens=self.settings.tps_window_tokens, window_s=self.settings.tps_window_ms / 1e3)
        door = Door(Gate(rates=rates), policies=self.policies, facts=facts, fresh=self.feed.fresh, clock=self.clock)
        self.policies.on_changed, self.policies.on_forgotten = door.policies_changed, door.forget
        self.views.measured_rate = door.rate_of
        return door

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

    @property
    def n_ctx_train(self) -> int | None:
        """The context that its model was trained with, in tokens: no slot has more."""
        return self.watch.stats.model.n_ctx_train if self.watch.stats is not None else None

    # What the parts ask of the whole -------------------------------------------------------------------------------

    @abstractmethod
    def _engine_restarted(self, stats: Stats) -> None: ...

    @abstractmethod
    def _engine_lost(self) -> None: ...

    @abstractmethod
    def _plain_found(self, props: PlainProps) -> None: ...

    @abstractmethod
    async def _beat(self) -> None: ...

    @abstractmethod
    def _facts(self) -> Facts: ...

    @abstractmethod
    async def _pool_of_slot(self, slot_id: SlotId, prompts: list[Tokens]) -> Pool | None: ...

    def _deliver(self, grants: list[Grant]) -> None:
        if self.deliver_grants is not None and grants:
            self.deliver_grants(grants)

    async def _seek_permission(self) -> None:
        """Raises as ``Permission.seek``."""
        await self.permission.seek()

    async def _sequence_of(self, pool_id: PoolId) -> SeqId:
        """Raises PoolNotFound (404), and as ``Residency.ensure``."""
        return (await self.residency.ensure(self.tree.get(pool_id))).seq_id

    def _learn_pool(self, pool: Pool, path: str, body: dict[str, Any]) -> None:
        """A pool was made of this body."""
        self.comparer.learn_pool(pool, path, body)
        self.divergences.learn_pool(pool, path, body)
