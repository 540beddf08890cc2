"""What is saved of pools: whether one is warm, and copying its state aside before it leaves the cache.

A pool without a sequence is *warm* when a usable state of its tokens is saved, told by hash and number, wherever the
saved range starts. What is saved is its own range when somebody serves what is in front of it, else all of it.
"""

import asyncio
import logging
from abc import ABC
from collections.abc import Callable, Sequence

from polykv_proxy.control.making import PoolMaker
from polykv_proxy.control.room import Room
from polykv_proxy.control.saved import SavedStates, pool_tag
from polykv_proxy.control.saved_books import POOL, Content, Place, state_content
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import PolyKVError, SavedBudget, SequenceGone, UpstreamTimeout, UpstreamUnavailable
from polykv_proxy.ids import PoolId
from polykv_proxy.tree.pool import Pool, Residency
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import EngineClient, SavedState

log = logging.getLogger("polykv.residency")

FILE_HEADER_BYTES = 4096


class PoolWarmth(PoolMaker, ABC):
    """Labels the pools that have no sequence, and saves those that have one."""

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
        saved.on_changed, saved.on_gone = self.relabel, self._gone
        self._warm: dict[Content, set[PoolId]] = {}
        self._saves: dict[Content, asyncio.Task[None]] = {}
        self.why_not_saved: dict[Content, PolyKVError] = {}
        """Pools that cannot be saved as they are in the cache now: nobody tries again until they were made anew."""
        self._only_here: set[tuple[Place, Content]] = set()
        """Where a further copy was refused. Nobody tries again until they were made anew, either."""
        self.has_strangers = False
        """States may be saved of pools that are not on the tree."""

    # Cold or warm --------------------------------------------------------------------------------------------------

    def residency_without(self, pool: Pool) -> Residency:
        """What a pool is as long as it has no sequence."""
        content = content_of(pool)
        if not self.saved.of_content(*content) and not self.saved.is_expected(content):
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
        content = state_content(state)
        for pool_id in self._warm.pop(content, ()) if content is not None else ():
            pool = self._tree.find(pool_id)
            if pool is not None and pool.residency == "warm":
                self._tree.set_residency(pool_id, self.residency_without(pool))

    async def forget_saved(self, pool: Pool) -> None:
        """Give up what is saved of a pool, and of every other pool with the same tokens."""
        for state in self.saved.of_content(*content_of(pool)):
            await self.saved.forget(state.tag)

    def released(self, pools: Sequence[Pool]) -> None:
        """These pools are off the tree."""
        self.ledger.released(pools)
        self.has_strangers = self.has_strangers or any(self.saved.of_content(*content_of(pool)) for pool in pools)

    async def forget_strangers(self) -> None:
        """Forget states of pools that are not on the tree any more. Only when the tree is that of the engine's model.

        Sessions' states are their owners' business.
        """
        self.has_strangers = False
        contents = {content_of(pool) for pool in self._tree}
        self.why_not_saved = {known: why for known, why in self.why_not_saved.items() if known in contents}
        self._only_here = {known for known in self._only_here if known[1] in contents}
        self.saved.remember_only(contents)
        await self.saved.forget_unless(lambda state: not state.tag.startswith(POOL) or state_content(state) in contents)

    # Out of the cache ----------------------------------------------------------------------------------------------

    def can_save(self, pool: Pool) -> bool:
        """It is in the cache, is not saved yet in a way that serves best, and could be."""
        content = content_of(pool)
        if pool.seq_id is None or not self.saved.available or content in self.why_not_saved:
            return False
        places = self.saved.writable()
        if not places or self._is_in(places[0], pool):
            return False
        # What is on disk gets a copy in memory if there is room, and nothing is given up for that.
        return places[0] == "disk" or not self._is_in("disk", pool) or self._may_copy("ram", pool)

    def _may_copy(self, place: Place, pool: Pool) -> bool:
        return (place, content_of(pool)) not in self._only_here and self.saved.has_room(place, self._n_bytes_of(pool))

    def _is_in(self, place: Place, pool: Pool) -> bool:
        """A state that serves as long as its parent does is saved there."""
        return self._state_in(place, pool) is not None

    def _state_in(self, place: Place, pool: Pool) -> SavedState | None:
        wanted = self.start_of(pool)
        states = self.saved.of_content(*content_of(pool))
        return next((state for state in states if state.start in (0, wanted) and place in state.places), None)

    def can_return(self, pool: Pool) -> bool:
        """Its state is saved, or can be, from just where its parent's range in the cache ends."""
        wanted = self.start_of(pool)
        saved = any(state.start == wanted for state in self.saved.of_content(*content_of(pool)))
        return saved or self.can_save(pool)

    def why_not_saved_of(self, pool: Pool) -> PolyKVError | None:
        """Why it could not be saved as it is in the cache now."""
        why = self.why_not_saved.get(content_of(pool))
        if why is None and self.saved.disk_fails and self.saved.places() == ["disk"]:
            return SavedBudget(f"the disk fails: {self.saved.disk_fails}")
        return why

    def start_of(self, pool: Pool) -> int:
        """Where the range to save begins: behind what its parent has in the cache or saved, else at 0."""
        parent = self._tree.find(pool.parent) if not pool.is_root else None
        if parent is None or not pool.branch_pos:
            return 0
        served = parent.seq_id is not None or self.saved.of_content(*content_of(parent))
        return pool.branch_pos if served else 0

    async def save(self, pool: Pool, *, durable: bool = False) -> bool:
        """Copy a pool's state aside, once however many ask. Gives whether it is saved; what fails is in the log.

        Content is immutable: what was saved before is not saved again. ``durable``: nobody waits for its cells, so it
        can wait for its file; else that is written later.
        """
        content = content_of(pool)
        task = self._saves.get(content)
        if task is None:
            if not self.can_save(pool):
                return bool(self.saved.of_content(*content))
            only: Place | None = "ram" if self._is_in("disk", pool) else None
            work = self._save(pool, only, soon=not durable)
            task = self._saves[content] = asyncio.create_task(work, name=f"polykv-save-{pool.pool_id}")
            task.add_done_callback(lambda _: self._saves.pop(content, None))
        await asyncio.shield(task)
        return bool(self.saved.of_content(*content))

    def is_written(self, pool: Pool) -> bool:
        """It is on disk, or cannot be now, or there is no room: a restart of the engine finds all that it can."""
        if "disk" not in self.saved.writable() or pool.seq_id is None or content_of(pool) in self.why_not_saved:
            return True
        return self._is_in("disk", pool) or not self._may_copy("disk", pool)

    def _n_bytes_of(self, pool: Pool) -> int:
        """About how much its state will take: a file has its tokens and a header, too."""
        per_token = self._watch.stats.kv_bytes_per_token if self._watch.stats is not None else None
        n_cells = pool.prefix_len - self.start_of(pool)
        return round((per_token or 0.0) * n_cells) + 8 * pool.prefix_len + FILE_HEADER_BYTES

    async def write(self, pool: Pool) -> None:
        """Copy a pool's state to the disk, where it outlives the engine, if there is room. What fails is in the log."""
        if content_of(pool) in self._saves or self.is_written(pool):
            return
        in_memory = self._state_in("ram", pool)
        if in_memory is not None and await self.saved.knows_places():
            await self.saved.write(in_memory.tag)
        else:
            await self._save(pool, only="disk")
        if not self._is_in("disk", pool) and "disk" in self.saved.writable():
            self._only_here.add(("disk", content_of(pool)))

    async def _save(self, pool: Pool, only: Place | None = None, *, soon: bool = False) -> None:
        seq_id, start, content = pool.seq_id, self.start_of(pool), content_of(pool)
        if seq_id is None:
            return
        tag, n_cells = pool_tag(pool.tokens_hash, pool.prefix_len, start), pool.prefix_len - start
        try:
            state = await self.saved.save(seq=seq_id, start=start, tag=tag, n_cells=n_cells, only=only, soon=soon)
        except PolyKVError as e:
            log.info("pool %s is not saved: %s", pool.label, e.message)
            self.unsure = self.unsure or isinstance(e, SequenceGone)
            is_disk = isinstance(e, SavedBudget) and e.need is None
            if is_disk or isinstance(e, UpstreamUnavailable | UpstreamTimeout):
                return  # whether it can be saved is not known
            if only is not None:
                self._only_here.add((only, content))
            else:
                self.why_not_saved[content] = e
            return
        if state_content(state) != content:
            log.warning("sequence %d does not hold pool %s", seq_id, pool.label)
            self.unsure = True
            await self.saved.forget(tag)
        for twin in self._tree.twins(pool.pool_id) if pool.pool_id in self._tree else ():
            if twin.residency == "cold":
                self._tree.set_residency(twin.pool_id, self.residency_without(twin))

    # Counting ------------------------------------------------------------------------------------------------------

    def missed(self, pool: Pool) -> None:
        """It is prefilled, although it may have been saved once."""
        if self.saved.was_there(content_of(pool)):
            self.saved.counts.n_misses += 1

    def made_anew(self, pool: Pool) -> None:
        """What could not be saved of it lately can be tried again."""
        self.why_not_saved.pop(content_of(pool), None)
        self._only_here -= {("ram", content_of(pool)), ("disk", content_of(pool))}


def content_of(pool: Pool) -> Content:
    """What tells its states from those of other pools."""
    return pool.tokens_hash, pool.prefix_len
