"""Pools and their saved states: copied aside before they leave the cache, and back into it without a prefill.

A pool without a sequence is *warm* when a usable state of its tokens is saved, told by hash and number, wherever the
saved range starts. What is saved is its own range when somebody serves what is in front of it, else all of it.

A load does not wait for the service slot: it takes milliseconds, a prefill may take minutes. Both take a sequence and
cells, so they may refuse each other; the engine decides, and a load that finds none after room was made is a miss.
Any failure is a miss: then the pool is prefilled as if there were no tier.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from polykv_proxy.control.making import PoolMaker
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved import SavedStates, pool_tag
from polykv_proxy.control.saved_books import Content, Place, state_content
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    KvExhausted,
    PolyKVError,
    RequestError,
    SavedBudget,
    SavedGone,
    SavingRefused,
    SavingUnsupported,
    SeqIdsExhausted,
    SequenceGone,
    UpstreamError,
    UpstreamRestarted,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from polykv_proxy.ids import PoolId, SeqId
from polykv_proxy.tree.pool import Pool, Residency
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, Materialized, SavedState

log = logging.getLogger("polykv.residency")

FILE_HEADER_BYTES = 4096


class PoolLoader(PoolMaker, ABC):
    """Labels the pools that have no sequence, and moves states of pools."""

    def __init__(
        self,
        tree: PoolTree,
        engine: EngineClient,
        watch: EngineWatch,
        room: Room,
        is_ours: Callable[[], bool],
        *,
        saved: SavedStates,
    ):
        super().__init__(tree, engine, watch, room, is_ours)
        self.saved = saved
        saved.on_found, saved.on_gone = self.relabel, self._gone
        self._warm: dict[Content, set[PoolId]] = {}
        self._saves: dict[Content, asyncio.Task[None]] = {}
        self.why_not_saved: dict[Content, PolyKVError] = {}
        """Pools that cannot be saved as they are in the cache now: nobody tries again until they were made anew."""
        self._unwritable: set[Content] = set()
        self.empty_idle_slots: Callable[[int], Awaitable[None]] = _nothing_to_empty
        """A load clears no idle slots for its cells, as a prefill does: whoever knows them does."""
        self.has_strangers = False
        """States may be saved of pools that are not on the tree."""

    @abstractmethod
    async def ensure(self, pool: Pool) -> Any:
        """Wait until the pool's prefix is in the cache."""

    # Cold or warm --------------------------------------------------------------------------------------------------

    def residency_without(self, pool: Pool) -> Residency:
        """What a pool is as long as it has no sequence."""
        content = _content_of(pool)
        if not self.saved.of_content(*content):
            return "cold"
        self._warm.setdefault(content, set()).add(pool.pool_id)
        return "warm"

    def relabel(self) -> None:
        """Other pools, or other states, are there now than before."""
        self.has_strangers = True
        self._warm.clear()
        for pool in self._tree:
            if pool.residency in ("warm", "cold") and pool.residency != (now := self.residency_without(pool)):
                self._tree.set_residency(pool.pool_id, now)

    def _gone(self, state: SavedState) -> None:
        for pool_id in self._warm.pop((int(state.tokens_hash or "0", 16), state.n_tokens), ()):
            pool = self._tree.find(pool_id)
            if pool is not None and pool.residency == "warm":
                self._tree.set_residency(pool_id, self.residency_without(pool))

    def saved_bytes(self, pool: Pool) -> int:
        """Bytes of what is saved of a pool."""
        return sum(state.n_bytes for state in self.saved.of_content(*_content_of(pool)))

    async def forget_saved(self, pool: Pool) -> None:
        """Give up what is saved of a pool, and of every other pool with the same tokens."""
        for state in self.saved.of_content(*_content_of(pool)):
            await self.saved.forget(state.tag)

    def released(self, pools: Sequence[Pool]) -> None:
        """These pools are off the tree."""
        self.ledger.released(pools)
        self.has_strangers = self.has_strangers or any(self.saved.of_content(*_content_of(pool)) for pool in pools)

    async def forget_strangers(self) -> None:
        """Forget states of pools that are not on the tree any more. Only when the tree is that of the engine's model.

        Sessions' states are their owners' business.
        """
        self.has_strangers = False
        contents = {_content_of(pool) for pool in self._tree}
        self.why_not_saved = {known: why for known, why in self.why_not_saved.items() if known in contents}
        self._unwritable &= contents
        self.saved.remember_only(contents)
        await self.saved.forget_unless(lambda state: (content := state_content(state)) is None or content in contents)

    # Out of the cache ----------------------------------------------------------------------------------------------

    def can_save(self, pool: Pool) -> bool:
        """It is in the cache, is not saved yet in a way that serves best, and could be."""
        if pool.seq_id is None or not self.saved.available or _content_of(pool) in self.why_not_saved:
            return False
        return not self._is_in(self.saved.places()[0], pool)

    def _is_in(self, place: Place, pool: Pool) -> bool:
        """A state that serves as long as its parent does is saved there."""
        wanted = self.start_of(pool)
        states = self.saved.of_content(*_content_of(pool))
        return any(state.start in (0, wanted) and place in state.places for state in states)

    def can_return(self, pool: Pool) -> bool:
        """Its state is saved, or can be, from just where its parent's range in the cache ends."""
        wanted = self.start_of(pool)
        saved = any(state.start == wanted for state in self.saved.of_content(*_content_of(pool)))
        return saved or self.can_save(pool)

    def why_not_saved_of(self, pool: Pool) -> PolyKVError | None:
        """Why it could not be saved as it is in the cache now."""
        return self.why_not_saved.get(_content_of(pool))

    def start_of(self, pool: Pool) -> int:
        """Where the range to save begins: behind what its parent has in the cache or saved, else at 0."""
        parent = self._tree.find(pool.parent) if not pool.is_root else None
        if parent is None or not pool.branch_pos:
            return 0
        served = parent.seq_id is not None or self.saved.of_content(*_content_of(parent))
        return pool.branch_pos if served else 0

    async def save(self, pool: Pool) -> bool:
        """Copy a pool's state aside, once however many ask. Gives whether it is saved; what fails is in the log.

        Content is immutable: what was saved before is not saved again.
        """
        content = _content_of(pool)
        task = self._saves.get(content)
        if task is None:
            if not self.can_save(pool):
                return bool(self.saved.of_content(*content))
            only: Place | None = "ram" if self._is_in("disk", pool) else None
            work = self._save(pool, only)
            task = self._saves[content] = asyncio.create_task(work, name=f"polykv-save-{pool.pool_id}")
            task.add_done_callback(lambda _: self._saves.pop(content, None))
        await asyncio.shield(task)
        return bool(self.saved.of_content(*content))

    def is_written(self, pool: Pool) -> bool:
        """It is on disk, or cannot be, or there is no room: a restart of the engine finds all that can be found."""
        content = _content_of(pool)
        if "disk" not in self.saved.places() or pool.seq_id is None:
            return True
        if content in self.why_not_saved or content in self._unwritable or self._is_in("disk", pool):
            return True
        return self.saved.n_bytes("disk") + self._n_bytes_of(pool) > self.saved.budget("disk")

    def _n_bytes_of(self, pool: Pool) -> int:
        """About how much its state will take: a file has its tokens and a header, too."""
        per_token = self._watch.stats.kv_bytes_per_token if self._watch.stats is not None else None
        n_cells = pool.prefix_len - self.start_of(pool)
        return round((per_token or 0.0) * n_cells) + 8 * pool.prefix_len + FILE_HEADER_BYTES

    async def write(self, pool: Pool) -> None:
        """Copy a pool's state to the disk, where it outlives the engine, if there is room. What fails is in the log."""
        if _content_of(pool) not in self._saves and not self.is_written(pool):
            await self._save(pool, only="disk")
            if not self._is_in("disk", pool):
                self._unwritable.add(_content_of(pool))

    async def _save(self, pool: Pool, only: Place | None = None) -> None:
        seq_id, start, content = pool.seq_id, self.start_of(pool), _content_of(pool)
        if seq_id is None:
            return
        tag = pool_tag(pool.tokens_hash, pool.prefix_len, start)
        try:
            state = await self.saved.save(seq=seq_id, start=start, tag=tag, only=only)
        except (SavingUnsupported, SavingRefused, SavedBudget) as e:
            log.info("pool %s is not saved: %s", pool.label, e.message)
            if only is None:
                self.why_not_saved[content] = e
            return
        except PolyKVError as e:
            log.info("pool %s is not saved: %s", pool.label, e.message)
            self.unsure = self.unsure or isinstance(e, SequenceGone)
            return
        if state_content(state) != content:
            log.warning("sequence %d does not hold pool %s", seq_id, pool.label)
            self.unsure = True
            await self.saved.forget(tag)
        for twin in self._tree.twins(pool.pool_id) if pool.pool_id in self._tree else ():
            if twin.residency == "cold":
                self._tree.set_residency(twin.pool_id, self.residency_without(twin))

    # Back into the cache -------------------------------------------------------------------------------------------

    async def load(self, pool: Pool) -> Materialized | None:
        """Bring a pool back from what is saved of it; None = it must be prefilled.

        The caller must adopt the sequence in the same step.
        """
        for _ in range(2):
            epoch = self._watch.epoch
            try:
                await self._know_saved()
                made = await self._load_any(pool)
                if made is None and self.unsure:
                    await self._watch.refresh()
            except PolyKVError as e:
                log.info("pool %s is not loaded: %s", pool.label, e.message)  # the prefill will say what is wrong
                return None
            if made is not None or self._watch.epoch == epoch:
                return made  # else it was a state of the engine's last start: files are still there
        return None

    async def _load_any(self, pool: Pool) -> Materialized | None:
        for state in self.saved.of_content(*_content_of(pool)):
            if not await self._has_parent(pool, state) or self._tree.find(pool.pool_id) is not pool:
                continue
            source = self._tree.holder(pool.pool_id, state.start) if state.start else None
            if state.start and source is None:
                continue
            made = await self._load(pool, state, source)
            if made is not None:
                return made
        return None

    async def _know_saved(self) -> None:
        if self._watch.sleeping:
            # What is saved outlives the sleep, and is only told by an engine that is awake.
            await self._engine.render("/completion", {"prompt": [0]})
        await self._watch.refresh()  # the engine may have been started anew since the last heartbeat
        await self.saved.look()

    async def _has_parent(self, pool: Pool, state: SavedState) -> bool:
        """Have somebody in the cache who holds what is in front of the saved range, if that is worth it."""
        if self._tree.find(pool.pool_id) is not pool:
            return False
        if state.start == 0 or self._tree.holder(pool.pool_id, state.start) is not None:
            return True
        parent = self._tree.find(pool.parent)
        if parent is None or pool.branch_pos < state.start or self._n_sequences < 2:
            return False
        if not self.saved.of_content(*_content_of(parent)) and self._n_to_prefill(parent) > self._n_to_prefill(pool):
            return False
        try:
            await self.ensure(parent)
        except PolyKVError as e:
            log.info("pool %s cannot be loaded behind its parent: %s", pool.label, e.message)
            return False
        return True

    @property
    def _n_sequences(self) -> int:
        return self._watch.stats.max_pools if self._watch.stats is not None else 0

    def missed(self, pool: Pool) -> None:
        """It is prefilled, although it may have been saved once."""
        if self.saved.was_there(_content_of(pool)):
            self.saved.counts.n_misses += 1

    def made_anew(self, pool: Pool) -> None:
        """What could not be saved of it lately can be tried again."""
        self.why_not_saved.pop(_content_of(pool), None)
        self._unwritable.discard(_content_of(pool))

    def _n_to_prefill(self, pool: Pool) -> int:
        return pool.prefix_len - self.source_of(pool)[1]

    async def _load(self, pool: Pool, state: SavedState, source: Pool | None) -> Materialized | None:
        tag = state.tag
        if tag in self._tags:
            return None  # a pool with the same tokens is just being loaded: it will serve this one, too
        self._tags.add(tag)
        try:
            with self._using(source):
                return await self._load_with_room(pool, state, source)
        except BaseException:
            self.unsure = True
            raise
        finally:
            self._room.settled()
            self._tags.discard(tag)
            self._n_changes += 1

    async def _load_with_room(self, pool: Pool, state: SavedState, source: Pool | None) -> Materialized | None:
        """Make room and load, a second time when that made some. None: a miss."""
        n_cells = pool.prefix_len - state.start
        for is_last in (False, True):
            await self._make_way(n_cells, for_request=True)
            seq_id = source.seq_id if source is not None else None
            if source is not None and seq_id is None:
                return None
            try:
                made = await self._order_load(pool, state, seq_id)
            except (KvExhausted, SeqIdsExhausted) as e:
                if not is_last and await self._made_room_to_load(e, n_cells):
                    continue
                log.info("pool %s is prefilled, its saved state finds no room: %s", pool.label, e.message)
                return None
            except (SavingRefused, SavingUnsupported, RequestError, UpstreamError) as e:
                log.info("pool %s is prefilled, its saved state is of no use: %s", pool.label, e.message)
                if isinstance(e, SavingRefused | SavingUnsupported):
                    await self.saved.forget(state.tag)  # made with other adapters, or for another cache
                # Else its parent is gone, or the engine is: what it holds now must be looked at.
                self.unsure = self.unsure or not isinstance(e, SavedGone)
                return None
            self._room.kept(n_cells)
            self.ledger.book.filled(
                SeqId(made.seq), made.gen, made.n_tokens, pool_id=pool.pool_id, source=seq_id, n_shared=state.start
            )
            log.info("pool %s: [%d, %d) is back without a prefill", pool.label, state.start, pool.prefix_len)
            return made
        return None

    async def _made_room_to_load(self, refused: KvExhausted | SeqIdsExhausted, n_cells: int) -> bool:
        made = await self._made_more_room(refused, n_cells, for_request=True)
        if isinstance(refused, SeqIdsExhausted):
            return made
        try:
            await self.empty_idle_slots(n_cells)
        except PolyKVError as e:
            log.info("idle slots keep their cells: %s", e.message)
            return made
        return True

    async def _order_load(self, pool: Pool, state: SavedState, source: SeqId | None) -> Materialized:
        """One load, believed only when the hash of what the engine holds is right."""
        epoch, period = self._watch.epoch, self._period
        try:
            made = await self.saved.load_pool(state.tag, -1 if source is None else source, state.start)
        except (UpstreamUnavailable, UpstreamTimeout) as e:
            made = await self._look_for(state.tag, e, besides=self._owned() | self._giving)
        if epoch != self._watch.epoch or made.epoch not in (None, epoch):
            await self._watch.refresh()
            raise UpstreamRestarted("the engine was restarted meanwhile")
        self.require_period(period)
        if (int(made.tokens_hash, 16), made.n_tokens) != _content_of(pool):
            await self.give_back(SeqId(made.seq))
            await self.saved.forget(state.tag)
            raise UpstreamError("the engine loaded other tokens than were saved")
        return made

    def _owned(self) -> set[SeqId]:
        return {pool.seq_id for pool in self._tree.residents() if pool.seq_id is not None}


async def _nothing_to_empty(n_cells: int) -> None:
    """Until somebody knows the slots."""


def _content_of(pool: Pool) -> Content:
    return pool.tokens_hash, pool.prefix_len
