"""Which pool a request attaches to, and how far: decided before it goes out, settled when its reply is there.

    1. Engine without hooks or managed by another proxy, or a model that cannot share: unpooled, and not counted.
    2. Which pool: the one it names (an unknown one: unpooled), else the session's while the prompt still starts with
       all of it, else the deepest match that is worth it (``compare``).
    3. How far: the prompt's tokens against the pool's.
    4. Past the gate (``door``), if the pool has a policy: a new session may wait there, or be refused.
    5. Cells for it (``admission``): evicted, waited for, or unpooled if only that fits. Also for who gets no pool.
    6. Make the pool resident (one flight per pool). If that cannot be now: unpooled, never an error.

A pool that cannot be had costs time, not an answer. What fails a data request in here: an explicit prefix that does not
match (400), a pool that does not exist when strictness was asked for (404), a gate that lets no new session in (429,
503), and a cache that stays full (503).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from polykv_proxy.control.admission import Admission
from polykv_proxy.control.compare import MIN_GAIN_TOKENS, Comparer, Comparison, Unpooled
from polykv_proxy.control.orders import AttachPlan, AttachRequest, Outcome, Waits
from polykv_proxy.control.residency import Held, Residency
from polykv_proxy.control.room import Room
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import ExplicitPrefixTooLong, PolyKVError, PoolNotFound
from polykv_proxy.ids import SeqId, SlotId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.tree.tree import PoolTree

log = logging.getLogger("polykv.attach")

AT_ONCE_S = 0.0005
"""A pool that is resident after so long was so before."""

EXPLAIN_S = 1.0
"""A reply that is there waits no longer than this for the reason of its miss, and a request for the engine to say
whether it is ours."""


class Attacher:
    def __init__(
        self,
        *,
        tree: PoolTree,
        comparer: Comparer,
        watch: EngineWatch,
        residency: Residency,
        room: Room,
        snapshot_slot: Callable[[SlotId, list[Tokens]], Awaitable[Pool | None]],
        may_change: Callable[[], bool],
        seek_permission: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
    ):
        self._tree, self._comparer, self._watch, self._clock = tree, comparer, watch, clock
        self._residency, self._room, self._snapshot_slot = residency, room, snapshot_slot
        self.admission = Admission(comparer=comparer, watch=watch, residency=residency, room=room)
        self._may_change, self._seek_permission = may_change, seek_permission
        self._looking: asyncio.Task[None] | None = None
        self._seeking: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        tasks = [task for task in (self._looking, self._seeking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Before --------------------------------------------------------------------------------------------------------

    async def decide(self, request: AttachRequest) -> AttachPlan:
        """Decide, and wait until there is room and the pool is resident.

        Raises:  ExplicitPrefixTooLong (400), PoolNotFound (404, only strict), AdmissionRefused (429, 503),
                 KvExhaustedForRequest (503)
        """
        try:
            return await self._decide(request)
        except BaseException:
            self._room.settled()
            raise
        finally:
            request.waits.cells_s += self._room.take_waited_s()

    async def _decide(self, request: AttachRequest) -> AttachPlan:
        if request.shareable and len(self._tree) and not self._may_change() and self._watch.hooks is not False:
            await self._become_able()
        named = self._named(request)
        counts = not (request.takes_a_slot and self._room.comes_back())
        # 1.
        unknown = self._cannot_attach()
        if not request.shareable:
            if unknown is None:
                await self._place(request, Comparison(), None, counts=counts)
            return AttachPlan(miss_reason="incompatible")
        if unknown is not None:
            return AttachPlan(miss_reason=unknown)
        if self._looking is not None and not self._looking.done():
            await asyncio.wait([self._looking], timeout=EXPLAIN_S)  # what is known is being corrected
        # 2. and 3.
        request, found, unpooled = await self._find(request, named)
        # 4.
        while unpooled is None and await self._waited_at_door(request, found):
            # Another pool may be the best one by now, and others may stand in line for slots.
            request, found, unpooled = await self._find(request, self._named(request))
            counts = not (request.takes_a_slot and self._room.comes_back())
        # 5.
        pool = found.pool if unpooled is None else None
        asked = found.pool.pool_id if found.pool is not None else None
        if pool is not await self._place(request, found, pool, counts=counts):
            pool = None
        if pool is None:
            plan = unpooled or AttachPlan(miss_reason="not_resident", asked=asked)
            return replace(plan, tokens=found.tokens) if found.tokens is not None else plan
        # 6.
        try:
            held = await self._ensure(pool, request.waits)
        except PolyKVError as e:
            log.warning("pool %s cannot be resident now: %s", pool.label, e.message)
            self._named(request)
            self._room.settled()  # it is counted anew, as one that needs all of its cells
            if isinstance(e, PoolNotFound) and request.pool_ref is None and request.legacy_slot is None:
                return await self._decide(request)  # released meanwhile: what is left may begin so, too
            await self._place(request, found, None, counts=counts)
            reason = "no_pool" if isinstance(e, PoolNotFound) else "not_resident"
            return AttachPlan(miss_reason=reason, asked=asked)
        n_prefix = found.prefix_n_tokens if request.explicit_p is None else request.explicit_p
        wanted = pool.prefix_len if found.n_tokens is None else min(pool.prefix_len, found.n_tokens)
        # An automatic pool ends where two prompts happened to part, a few words into what comes next: nobody asked.
        n_spare = MIN_GAIN_TOKENS if pool.auto and request.pool_ref is None else 1
        diverged = found.exact and request.explicit_p is None and wanted - n_prefix >= n_spare
        return AttachPlan(
            pool_id=pool.pool_id,
            prefix_n_tokens=n_prefix,
            exact=found.exact,
            miss_reason="diverged" if diverged else None,
            seq_id=held.seq_id,
            gen=held.gen,
            epoch=held.epoch,
            asked=pool.pool_id,
            seen=found.seen,
            tokens=found.tokens,
        )

    async def _find(
        self, request: AttachRequest, named: Pool | None
    ) -> tuple[AttachRequest, Comparison, AttachPlan | None]:
        """The pool and how far, or the plan of who gets none; and the request, with what was learnt of it."""
        try:
            return request, await self._choose(request, named), None
        except Unpooled as e:
            if e.plan.miss_reason == "incompatible" and e.found is None:
                request = replace(request, has_media=True)  # there is more than text in it, and the engine said so
            if e.plan.miss_reason == "no_pool":
                self._named(request)  # it may have been released meanwhile
            return request, e.found or Comparison(), self._told(request, named, e.plan)

    def _told(self, request: AttachRequest, named: Pool | None, plan: AttachPlan) -> AttachPlan:
        """Only who expected a pool, the one it names or its session's, can have left it."""
        if plan.miss_reason != "diverged" or plan.asked is not None or request.legacy_slot is not None:
            return plan
        expected = named or self._comparer.of_session(request)
        return replace(plan, miss_reason="no_pool") if expected is None else replace(plan, asked=expected.pool_id)

    async def _waited_at_door(self, request: AttachRequest, found: Comparison) -> bool:
        if request.door is None or found.pool is None:
            return False
        return await request.door(found.pool, found.prefix_n_tokens * found.n_prompts, found.n_total)

    async def _become_able(self) -> None:
        """An engine that came back, or a lease that ran out, need not wait for the heartbeat. Once for all who ask."""
        if self._seeking is None or self._seeking.done():
            self._seeking = asyncio.create_task(self._seek(), name="polykv-seek")
        await asyncio.wait([self._seeking], timeout=EXPLAIN_S)

    async def _seek(self) -> None:
        try:
            await self._seek_permission()
        except PolyKVError as e:
            log.info("pools cannot be attached to now: %s", e.message)

    def _cannot_attach(self) -> str | None:
        """Why nothing is known that could be decided by; None when there is no such reason."""
        if self._watch.hooks is not True or self._watch.stats is None:
            return "no_pool"
        if not self._may_change():
            return "not_resident" if len(self._tree) else "no_pool"
        return "swa_or_recurrent" if self._watch.stats.share != "ok" else None

    async def _ensure(self, pool: Pool, waits: Waits) -> Held:
        began_s = self._clock()
        try:
            return await self._residency.ensure(pool)
        finally:
            took_s = self._clock() - began_s
            waits.made_s += took_s if took_s >= AT_ONCE_S else 0.0

    async def _place(
        self, request: AttachRequest, found: Comparison, pool: Pool | None, *, counts: bool
    ) -> Pool | None:
        """Cells for it, unless it has to stand in line for a slot first. Gives the pool that it may have."""
        if counts:
            return await self.admission.admit(request, found, pool)
        self._room.announce(found.pool.pool_id if found.pool is not None else None, request.session)
        return pool

    def _named(self, request: AttachRequest) -> Pool | None:
        """The pool that a request names, if there is one of that name."""
        if request.pool_ref is None:
            return None
        pool = self._tree.find(request.pool_ref)
        if pool is None and request.strict:
            raise PoolNotFound(f"no pool {str(request.pool_ref)[:64]!r}", param="pool_id")
        return pool

    async def _choose(self, request: AttachRequest, named: Pool | None) -> Comparison:
        """The pool and how far. Raises Unpooled, ExplicitPrefixTooLong."""
        prompts = list(request.prompts) if request.prompts is not None else None
        if request.pool_ref is not None and named is None:
            raise Unpooled("no_pool")
        if request.pool_ref is None and request.legacy_slot is not None:
            prompts = await self._comparer.render(request)
            named = await self._legacy(request.legacy_slot, prompts)
        found = await self._comparer.compare(request, named, prompts)
        if request.explicit_p is not None and request.explicit_p > found.prefix_n_tokens:
            raise ExplicitPrefixTooLong(
                f"shared_prefix_n_tokens is {request.explicit_p}, but only {found.prefix_n_tokens} tokens match",
                divergence_pos=found.prefix_n_tokens,
                param="shared_prefix_n_tokens",
            )
        if found.pool is None or found.prefix_n_tokens == 0 or request.explicit_p == 0:
            asked = found.pool.pool_id if found.pool is not None else None
            raise Unpooled("diverged", asked, found)
        return found

    async def _legacy(self, number: int, prompts: list[Tokens]) -> Pool:
        """The original design's word: a pool's sequence, or below the slot count that slot's context, as it is now."""
        n_slots = self._watch.stats.n_slots if self._watch.stats is not None else 0
        if number >= n_slots:
            pool = next((pool for pool in self._tree.residents() if pool.seq_id == SeqId(number)), None)
            if pool is None:
                raise Unpooled("no_pool")
            return pool
        try:
            pool = await self._snapshot_slot(SlotId(number), prompts)
        except PolyKVError as e:
            log.info("slot %d cannot be shared: %s", number, e.message)
            raise Unpooled("not_resident") from e
        if pool is None:
            raise Unpooled("diverged")
        return pool

    # After ---------------------------------------------------------------------------------------------------------

    def settle(self, plan: AttachPlan, outcome: Outcome) -> str | None:
        """Count the request, and say why it got less than was planned: the miss reason of its receipt."""
        self._room.settled()
        if plan.pool_id is None or outcome.status != 200:
            return plan.miss_reason
        pool = self._tree.find(plan.pool_id)
        if pool is not None:
            pool.n_queries += 1
            pool.n_query_tokens += (outcome.cache_n or 0) + (outcome.prompt_n or 0)
            pool.n_hit_tokens += min(_got(outcome), plan.prefix_n_tokens)
            pool.last_access_s = self._clock()
        if not _is_told(outcome):
            return plan.miss_reason
        if not _got_less(plan, outcome):
            if pool is not None and plan.miss_reason is None:
                pool.n_hits += 1  # one that left the pool on the way got what was planned, and is none
            return plan.miss_reason
        self._residency.unsure = True
        self._look()  # for those who come next, if nobody waited for it
        return self._why_less(plan, pool, _got(outcome))

    async def explain(self, plan: AttachPlan, outcome: Outcome) -> None:
        """Before ``settle``: if the request got less than planned, see first whether the engine still is what it was.

        Costs nothing on a hit.
        """
        if plan.pool_id is None or outcome.status != 200 or not _is_told(outcome) or not _got_less(plan, outcome):
            return
        self._residency.unsure = True
        await asyncio.wait([self._look()], timeout=EXPLAIN_S)

    def _look(self) -> "asyncio.Task[None]":
        """Compare with the engine, once for all who wonder at the same time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._compare_with_engine(), name="polykv-look")
        return self._looking

    async def _compare_with_engine(self) -> None:
        try:
            await self._watch.refresh()
            await self._residency.settle()
        except PolyKVError as e:
            log.info("the engine does not say what it holds: %s", e.message)  # the heartbeat asks again

    def _why_less(self, plan: AttachPlan, pool: Pool | None, got: int) -> str:
        if plan.epoch != self._watch.epoch:
            return "upstream_restarted"
        if self._residency.is_outdated(plan.seq_id, plan.gen):
            return "incompatible"
        held = self._residency.held(pool) if pool is not None else None
        if held is None or (held.seq_id, held.gen) != (plan.seq_id, plan.gen):
            return "evicted"
        stats = self._watch.stats
        if stats is not None and (stats.recurrent or (stats.swa is not None and stats.swa.n_swa > 0)):
            return "swa_or_recurrent"
        if plan.seen is not None:
            self._comparer.seen.doubt(plan.seen)
            if got > 0:
                return "diverged"
        return "not_resident"


def _is_told(outcome: Outcome) -> bool:
    return outcome.cache_n is not None or outcome.pool_n is not None


def _got(outcome: Outcome) -> int:
    return max(outcome.cache_n or 0, outcome.pool_n or 0)


def _got_less(plan: AttachPlan, outcome: Outcome) -> bool:
    expected = plan.prefix_n_tokens
    if outcome.cache_n is not None and outcome.prompt_n is not None:
        # The engine always decodes at least the last token of a prompt.
        expected = min(expected, outcome.cache_n + outcome.prompt_n - 1)
    return _got(outcome) < expected
