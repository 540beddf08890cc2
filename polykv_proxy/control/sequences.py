"""The engine's sequences: ordering one, finding it again, giving it back.

Whoever gets one adopts it or gives it back in the same step. An operation under way is known by its tag.

A sequence is freed by its number, and the number of one that is gone is soon another's. So what was known in an
earlier period of the lease is never freed: a period ends when the lease is lost, and with it all claims.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterable

from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    EngineHung,
    PolyKVError,
    SequenceGone,
    UpstreamError,
    UpstreamRestarted,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from polykv_proxy.ids import SeqId
from polykv_proxy.tree.prefix import Tokens, hash_tokens
from polykv_proxy.upstream import EngineClient, Materialized

log = logging.getLogger("polykv.residency")

LOOK_AGAIN_S = 0.2
STALL_S = 60.0
"""A prefill shows progress in the stats with every batch; the slowest machine needs seconds for one."""


FREED_WITHIN_S = 2.0
"""So long who needs a sequence waits for one that is just being given back, rather than take somebody's."""


class EngineSequences:
    """Knows no pools. ``unsure``: the engine may hold sequences nobody owns, or have lost some of ours."""

    def __init__(self, engine: EngineClient, watch: EngineWatch, is_ours: Callable[[], bool]):
        self._engine, self._watch, self._is_ours = engine, watch, is_ours
        self.stall_s = STALL_S
        self.unsure = True
        self._tags: set[str] = set()
        self._numbers = itertools.count(1)
        self._giving: set[SeqId] = set()
        self._n_freeing = 0
        self._freed = asyncio.Event()
        self._n_changes = 0
        self._period = 0
        self._lost_s = float("-inf")
        """When an order was given up of which nothing was heard and nothing seen: it may wait in the engine's queue."""

    async def prefill(self, tokens: Tokens, source: SeqId | None, branch_pos: int, tag: str) -> Materialized:
        """One order, followed to its end; believed only when the hash of what the engine holds is right."""
        epoch, period = self._watch.epoch, self._period
        try:
            made = await self._order(tokens, source, branch_pos, tag)
        except EngineHung:
            raise
        except (UpstreamUnavailable, UpstreamTimeout) as e:
            made = await self._look_for(tag, e)
        if self._watch.sleeping:
            await self._watch.refresh()  # it is awake now, to a new epoch
        if made.epoch not in (None, self._watch.epoch) or epoch != self._watch.epoch:
            await self._watch.refresh()
            made = await self._look_for(tag, UpstreamRestarted("the engine was restarted meanwhile"))
        self.require_period(period)
        if int(made.tokens_hash, 16) != hash_tokens(tokens) or made.n_tokens != len(tokens):
            await self.give_back(SeqId(made.seq))
            raise UpstreamError("the engine holds other tokens than were ordered")
        return made

    def require_period(self, period: int) -> None:
        """Raises UpstreamRestarted (503) when the lease was lost since: a sequence made before may be gone."""
        if period != self._period:
            self.unsure = True
            raise UpstreamRestarted("another proxy may have managed the engine meanwhile")

    async def _order(self, tokens: Tokens, source: SeqId | None, branch_pos: int, tag: str) -> Materialized:
        """Order, and give up an engine that gets nowhere. Raises EngineHung (504), and what the engine answers."""
        order = asyncio.create_task(
            self._engine.materialize(
                tokens,
                tag=tag,
                parent_seq=-1 if source is None else source,
                branch_pos=0 if source is None else branch_pos,
            )
        )
        progress = _Progress(self._watch, self.stall_s)
        try:
            while not (await asyncio.wait([order], timeout=progress.look_s))[0]:
                progress.check()
            return order.result()
        finally:
            if not order.done():
                order.cancel()
                await asyncio.wait([order])

    async def _look_for(self, tag: str, lost: PolyKVError, besides: Collection[SeqId] = ()) -> Materialized:
        """The answer got lost: the engine may still be at it. Follow its tag until it is ready or gone.

        ``besides``: sequences that may have the same tag, and are somebody's.
        """
        progress = _Progress(self._watch, self.stall_s)
        while True:
            progress.check()
            listed = await self._engine.list_pools()
            if listed.epoch != self._watch.epoch:
                await self._watch.refresh()
                continue
            found = next((p for p in listed.pools if p.tag == tag and p.state != "free" and p.seq not in besides), None)
            if found is None:
                self._lost_s = asyncio.get_running_loop().time()
                raise lost
            if found.state == "ready" and found.tokens_hash:
                return Materialized(
                    seq=found.seq,
                    gen=found.gen,
                    epoch=listed.epoch,
                    n_tokens=found.n_tokens,
                    tokens_hash=found.tokens_hash,
                    parent_seq=found.parent_seq,
                    branch_pos=found.branch_pos,
                )
            await asyncio.sleep(LOOK_AGAIN_S)

    async def give_back(self, seq_id: SeqId) -> int | None:
        """Free a sequence. Gives the cells in use afterwards; None when the engine could not be asked (done later)."""
        self.claim([seq_id])
        return await self._free(seq_id)

    def claim(self, seq_ids: Iterable[SeqId]) -> None:
        """These will be given back by the caller, in this very step or right after: nobody else may free them.

        A sequence is freed by number, so freeing it twice could hit the next pool that lives in it.
        """
        self._giving.update(seq_ids)
        self._n_changes += 1

    async def give_back_claimed(self, seq_ids: Iterable[SeqId]) -> int | None:
        """Free what was claimed. Gives the cells in use after the last one."""
        used = None
        for seq_id in seq_ids:
            used = await self._free(seq_id)
        return used

    async def _free(self, seq_id: SeqId) -> int | None:
        if seq_id not in self._giving:
            return None  # forgotten since it was claimed
        if not self._is_ours():
            self.unsure = True
            self._giving.discard(seq_id)
            return None
        self._n_freeing += 1
        try:
            freed = await self._engine.free(seq_id)
        except SequenceGone:
            return None
        except PolyKVError as e:
            self.unsure = True
            log.warning("sequence %d stays for now: %s", seq_id, e.message)
            return None
        finally:
            self._n_freeing -= 1
            self._freed.set()
            self._giving.discard(seq_id)
            self._n_changes += 1
        return freed.cells.used if freed.cells is not None else None

    async def one_is_freed(self) -> bool:
        """Wait for a sequence that is just being given back. Gives whether one was."""
        if not self._n_freeing:
            return False
        self._freed.clear()
        try:
            async with asyncio.timeout(FREED_WITHIN_S):
                await self._freed.wait()
        except TimeoutError:
            return False
        return True


class _Progress:
    """Whether the engine gets on with a prefill, by the stats of the heartbeat."""

    def __init__(self, watch: EngineWatch, stall_s: float):
        self._watch, self._stall_s = watch, stall_s
        self.look_s = min(1.0, stall_s / 4)
        self._seen: object = None
        self._since_s = asyncio.get_running_loop().time()

    def check(self) -> None:
        """Raises EngineHung when nothing moved for too long."""
        now_s = asyncio.get_running_loop().time()
        seen = (self._watch.epoch, self._watch.stats.service if self._watch.stats is not None else None)
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        elif now_s - self._since_s >= self._stall_s:
            raise EngineHung(f"the engine did not get on with a pool for {self._stall_s:.0f} s")
