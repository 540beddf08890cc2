"""``Control``: the one writer of state, and the only thing that the doors (routes, relay) talk to.

Everything runs on one event loop, and only what is in this package changes the tree, the residency of pools, and what
is known of the engine. Changes that need the engine run in a task of their own: a caller who leaves does not leave
them half done.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from polykv_proxy.control.assembly import Assembly
from polykv_proxy.control.diagnosis import collect_facts
from polykv_proxy.control.orders import AttachPlan, AttachRequest, Compact, CreatePool, ForkPool, Outcome
from polykv_proxy.control.readings import Readings, take_readings
from polykv_proxy.doctor import Facts
from polykv_proxy.errors import Draining, EngineOwned, JournalFailed, JournalInUse, SessionNotFound, UpstreamError
from polykv_proxy.gate.policy import Policy
from polykv_proxy.ids import SessionId, SlotId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.turns import Session
from polykv_proxy.upstream import Stats
from polykv_proxy.upstream.plain import PlainProps

log = logging.getLogger("polykv.control")

Made = TypeVar("Made")


class Control(Assembly):
    """One per proxy. ``start`` it on the loop that will use it."""

    async def start(self) -> None:
        """Start with the tree that is in the journal, also without the engine: it may come later.

        Raises:  JournalInUse, EngineOwned (503) when another proxy that is alive has it
        """
        try:
            await self.restorer.load()
            await self.watch.start()
            self.door.start()
            if self.watch.hooks and self.watch.state == "ready":
                await self.lease.take_at_start()
                await self._beat()
        except (JournalInUse, EngineOwned):
            await self.stop()
            raise
        except (UpstreamError, JournalFailed) as e:
            log.warning("the engine is there but not usable yet: %s", e.message)

    async def stop(self) -> None:
        await self.door.stop()
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
        return take_readings(
            self.tree,
            self.watch,
            self.views,
            self.tier,
            rates=self.rates,
            sessions=self.sessions,
            policies=self.policies,
            door=self.door,
        )

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

    async def compact_pool(self, ref: int | str, order: Compact) -> dict[str, Any]:
        """Put a shorter pool in the place of this one, behind an ancestor that stays. See ``compaction``."""
        self._require_open()
        await self.permission.require_patched()
        await self.permission.require_not_taken()
        return await self._in_own_task(self.compaction.compact(self.tree.get(ref).pool_id, order))

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

    async def set_policy(self, ref: int | str, policy: Policy) -> dict[str, Any]:
        """Give a pool an admission policy of its own. See ``policies``."""
        await self.permission.require_patched()
        return await self._in_own_task(self.policies.set(ref, policy))

    async def drop_policy(self, ref: int | str) -> dict[str, Any]:
        """Take a pool's own admission policy away. See ``policies``."""
        await self.permission.require_patched()
        return await self._in_own_task(self.policies.drop(ref))

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
        self.forget_traces(session_id)
        return {"session_id": session_id, "detached_from": session.pool_id, "n_running": len(session.turns)}

    def forget_traces(self, session_id: SessionId) -> None:
        """Of a session that is not in the books any more, here; also what a turn left that ended after it."""
        self.slots.forget([session_id])
        self.plain.forget([session_id])
        self.divergences.forget(session_id)

    def take_back(self, session: Session) -> None:
        """A turn of it ended unserved: unless it was served before nothing is kept, and it comes again as a new one."""
        if self.sessions.take_back(session):
            self.forget_traces(session.session_id)

    # The data plane ------------------------------------------------------------------------------------------------

    async def decide_attach(self, request: AttachRequest) -> AttachPlan:
        """Decide which pool a request gets, and wait until it is resident. See ``fan_out``, ``attach``."""
        return await self.attach.decide(await self.fan_out.join(request))

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
