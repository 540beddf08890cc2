"""What earlier runs left: the tree from the journal, for the engine's model, and its pools back into the cache.

1. At the start the tree of the model that was the engine's last is loaded. It is shown, cold, also while the
   engine is away.
2. An engine of another model: that step, and no later one, takes the whole tree away. Its pools wait in the
   journal, and the other model's are loaded. Until they are there nothing is attached and nothing is made.
3. Pools that the engine still holds are adopted (``Residency.reconcile``), with every first look at an engine. Those of
   which it has saved states are warm from then on.
4. Then those that are pinned or were used a short while ago are brought back, what is saved before what must be
   prefilled, one at a time and only while nobody waits for the engine, without evicting anybody (pinned ones may, as
   with every order). Its prefill is called off when another pool is asked for (that of a pinned one three times at
   most), and for one that is not pinned when any request comes, which it would slow down. The rest comes back with the
   next attach. So after every start of either side.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from polykv_proxy.control.endings import say_how_it_ended
from polykv_proxy.control.policies import Policies
from polykv_proxy.control.residency import Residency
from polykv_proxy.control.room import Room
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import JournalFailed, PolyKVError
from polykv_proxy.sessions import SessionBook
from polykv_proxy.store import Journal, PoolRow
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import Stats

log = logging.getLogger("polykv.restore")

_ended = say_how_it_ended(log, "pools stay where they are", "a bug in bringing pools back; they come when asked for")

LOOK_AGAIN_S = 0.05
"""While others wait for the engine: pools of earlier runs are brought back behind them."""

MAX_GIVEN_WAY = 3
"""So often the prefill of a pinned pool is called off for others; else orders without end would keep it away."""


class Restorer:
    """``tree_changed``: told. ``leaves_at_s``: when a pool that is saved leaves the cache, if nobody uses it.

    ``unix_offset_s``: Unix time minus the clock of the pools.
    """

    def __init__(
        self,
        *,
        tree: PoolTree,
        sessions: SessionBook,
        journal: Journal,
        policies: Policies,
        watch: EngineWatch,
        residency: Residency,
        room: Room,
        tree_changed: Callable[[], None],
        grace_end_s: Callable[[Pool], float],
        leaves_at_s: Callable[[Pool], float],
        clock: Callable[[], float],
        unix_offset_s: float,
    ):
        self._tree, self._sessions, self._journal, self._watch = tree, sessions, journal, watch
        self._policies = policies
        self._residency, self._room, self._tree_changed = residency, room, tree_changed
        self._grace_end_s, self._leaves_at_s = grace_end_s, leaves_at_s
        self._clock, self._offset_s = clock, unix_offset_s
        self.n_models = 0
        """Counts changes of the model: what was planned or rendered before one is not for the engine after it."""
        self._fingerprint: str | None = None
        self._is_bound = False
        self._binding: asyncio.Task[None] | None = None
        self._bringing: asyncio.Task[None] | None = None
        self._brought_epoch: str | None = None

    async def load(self) -> None:
        """Open the journal and show the tree that was there last.

        Raises:  JournalInUse (503)
        """
        opened = await self._journal.open()
        self._tree.skip_ids(opened.next_id)
        self._fingerprint = opened.fingerprint
        self._put_back(opened.rows)

    async def stop(self) -> None:
        tasks = [task for task in (self._binding, self._bringing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The engine's model --------------------------------------------------------------------------------------------

    @property
    def is_bound(self) -> bool:
        """The tree is that of the engine's model."""
        return self._is_bound

    def engine_started(self, stats: Stats) -> None:
        """A new epoch was seen: if it runs another model, nothing of the tree is for it."""
        for pool in self._tree:
            pool.sent_away_s = float("-inf")
        fingerprint = stats.model.fingerprint
        if fingerprint == self._fingerprint and (self._is_bound or self._binding_runs):
            return
        if fingerprint != self._fingerprint:
            self._set_aside(fingerprint)
        self._bind()

    async def require_bound(self) -> None:
        """Wait until the tree is that of the engine's model; of one that slept since we came nothing is known yet.

        Raises:  JournalFailed (503)
        """
        if self._is_bound or self._fingerprint is None:
            return
        if not self._binding_runs:
            self._bind()
        if self._binding is not None:
            await asyncio.shield(self._binding)

    @property
    def _binding_runs(self) -> bool:
        return self._binding is not None and not self._binding.done()

    def _set_aside(self, fingerprint: str) -> None:
        if len(self._tree):
            log.warning(
                "the engine runs another model (%s, was %s): %d pools are set aside until that one is back",
                fingerprint,
                self._fingerprint,
                len(self._tree),
            )
        for session in self._sessions:
            session.pool_id = None
        gone = [pool.pool_id for pool in self._tree]
        self._tree.clear()
        self._policies.forget(gone)
        self._tree_changed()
        self._fingerprint, self._is_bound = fingerprint, False
        self.n_models += 1

    def _bind(self) -> None:
        last = self._binding if self._binding_runs else None
        self._binding = asyncio.create_task(self._bind_after(last), name="polykv-restore")
        self._binding.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _bind_after(self, last: "asyncio.Task[None] | None") -> None:
        if last is not None:
            await asyncio.wait([last])
        fingerprint = self._fingerprint
        if fingerprint is None:
            return
        shown = len(self._tree) > 0
        try:
            rows = await self._journal.bind(fingerprint)
        except JournalFailed as e:
            log.error("pools can be neither loaded nor made: %s", e.message)
            raise
        if fingerprint != self._fingerprint:
            return  # and another one after it
        if not shown:
            self._put_back(rows)
        self._is_bound = True

    def _put_back(self, rows: Sequence[PoolRow]) -> None:
        for row in rows:
            self._tree.restore(
                row.pool_id,
                parent=row.parent,
                branch_pos=row.branch_pos,
                own=row.own,
                tokens_hash=row.tokens_hash,
                name=row.name,
                pin=row.pin,
                ttl_s=row.ttl_s,
                auto=row.auto,
                created_s=row.created_ts - self._offset_s,
                last_access_s=row.last_access_ts - self._offset_s,
            )
            if row.policy is not None:
                self._policies.put_back(row.pool_id, row.policy)
        if rows:
            log.info("%d pools of an earlier run", len(rows))
            self._residency.relabel()
            self._tree_changed()

    # Back into the cache -------------------------------------------------------------------------------------------

    def bring_back(self) -> None:
        """Called by the heartbeat once the engine is ours and its list was read: once per start of it."""
        if not self._is_bound or self._watch.epoch is None or self._brought_epoch == self._watch.epoch:
            return
        if self._bringing is not None:
            self._bringing.cancel()
        wanted = self._wanted()
        if wanted:
            log.info("bringing %d pools back that are pinned or were used a short while ago", len(wanted))
            self._bringing = asyncio.create_task(self._bring(wanted, self._watch.epoch), name="polykv-bring-back")
            self._bringing.add_done_callback(_ended)
        self._brought_epoch = self._watch.epoch

    def _wanted(self) -> list[Pool]:
        """What is saved before what must be prefilled; of these pinned first, then the last used; parents first.

        What is saved and would soon leave again stays away.
        """
        away = [pool for pool in self._tree if self._residency.held(pool) is None]
        now_s = self._clock()
        wanted = [pool for pool in away if pool.pin or (self._grace_end_s(pool) > now_s and not _is_sent_away(pool))]
        saved = {pool.pool_id for pool in wanted if self._is_saved(pool)}
        leaves = {p.pool_id for p in wanted if p.pool_id in saved and not p.pin and self._leaves_at_s(p) <= now_s}
        wanted = [pool for pool in wanted if pool.pool_id not in leaves]
        return sorted(wanted, key=lambda p: (p.pool_id not in saved, not p.pin, -p.last_use_s, p.depth))

    def _is_saved(self, pool: Pool) -> bool:
        """It and all that must be there before it."""
        above = [pool, *self._tree.ancestors(pool.pool_id)]
        return all(p.residency == "warm" or self._residency.held(p) is not None for p in above)

    async def _bring(self, wanted: Sequence[Pool], epoch: str) -> None:
        is_full = False
        for pool in wanted:
            if is_full and not pool.pin:
                continue
            try:
                n_given_way = 0
                while has_room := await self._rest_until_it_may_come(pool, epoch):
                    if await self._ensure_behind_others(pool, last=pool.pin and n_given_way >= MAX_GIVEN_WAY):
                        break
                    n_given_way += 1
                if has_room is False:
                    is_full = True
                    log.info("those that are not pinned stay cold until they are asked for: the engine has no room")
            except PolyKVError as e:
                log.info("pool %s stays cold until it is asked for: %s", pool.label, e.message)

    async def _rest_until_it_may_come(self, pool: Pool, epoch: str) -> bool | None:
        """Wait until nobody waits for the engine, and say whether there is room for this pool then. None: it need not
        come any more.
        """
        has_room = pool.pin
        while True:
            while not self._residency.at_rest or self._disturbs(pool):  # who comes last looks last
                await asyncio.sleep(LOOK_AGAIN_S)
                has_room = pool.pin  # somebody came meanwhile, and may have taken it
            if self._watch.epoch != epoch or self._tree.find(pool.pool_id) is not pool:
                return None
            if self._residency.held(pool) is not None or (not pool.pin and _is_sent_away(pool)):
                return None
            if has_room:
                return True
            has_room = await self._has_room(pool)
            if not has_room:
                return False

    def _disturbs(self, pool: Pool) -> bool:
        """Requests are under way, which a prefill for nobody would slow down. Not one that was released meanwhile."""
        if pool.pin or not self._sessions.running or self._tree.find(pool.pool_id) is not pool:
            return False
        return not self._is_saved(pool)

    async def _ensure_behind_others(self, pool: Pool, *, last: bool) -> bool:
        """Bring it back, unless somebody comes meanwhile who needs the engine for something else. Gives whether it is.
        The ``last`` time he waits, as for any order.

        Raises:  as ``Residency.ensure``
        """
        bringing = asyncio.create_task(self._residency.ensure(pool), name=f"polykv-bring-back-{pool.pool_id}")
        try:
            while not bringing.done():
                await asyncio.wait([bringing], timeout=LOOK_AGAIN_S)
                if not last and not bringing.done() and (self._residency.n_orders > 1 or self._disturbs(pool)):
                    log.info("pool %s comes back later: somebody else needs the engine", pool.label)
                    return False
        finally:
            if not bringing.done():
                bringing.cancel()
                await asyncio.gather(bringing, return_exceptions=True)
        bringing.result()
        return True

    async def _has_room(self, pool: Pool) -> bool:
        """Whether it can come back without anybody leaving for it. Raises UpstreamError and its heirs."""
        n_cells = self._residency.n_missing(pool)
        return self._residency.n_free() > 0 and (self._room.fits(n_cells) or await self._room.fits_now(n_cells))


def _is_sent_away(pool: Pool) -> bool:
    """Somebody ordered it out of the cache since the engine started, and nobody used it after that."""
    return pool.last_use_s <= pool.sent_away_s
