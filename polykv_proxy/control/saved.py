"""What the engine has saved outside its cache: the only one who saves, loads and forgets.

Rules it keeps:
    1. Room is made by forgetting what was used least lately, never what is just being saved or loaded, and nothing in
       vain. As long as there is room in one place, nothing is forgotten for another.
    2. Any failure is a miss. Whoever asks goes on without the state; what is of no use any more is forgotten.
    3. Of a new start of the engine nothing is known until it was listed: files are still there, after a sleep also what
       was in memory.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Literal

from polykv_proxy.control.saved_books import POOL, Place, SavedBooks, pool_tag, session_tag
from polykv_proxy.control.tier_counts import TierCounts
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    PolyKVError,
    SavedBudget,
    SavedGone,
    SavingUnsupported,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from polykv_proxy.ids import SeqId, SlotId
from polykv_proxy.upstream import EngineClient, LoadedSlot, Materialized, Saved, SavedState

__all__ = ["SavedStates", "pool_tag", "session_tag"]

log = logging.getLogger("polykv.saved")

To = Literal["ram", "disk", "both"]


class SavedStates(SavedBooks):
    """``ram_bytes``, ``disk_bytes``: budgets, within those that the engine has.

    ``is_ours``: this proxy may change what the engine has.
    """

    def __init__(
        self, engine: EngineClient, watch: EngineWatch, *, ram_bytes: int, disk_bytes: int, is_ours: Callable[[], bool]
    ):
        super().__init__()
        self._engine, self._watch, self._is_ours = engine, watch, is_ours
        self._wanted_bytes: dict[Place, int] = {"ram": ram_bytes, "disk": disk_bytes}
        self._looking = asyncio.Lock()
        self.counts = TierCounts()

    # Whether there is a tier ---------------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """The engine can save states now, somewhere."""
        return not self.why_off

    @property
    def why_off(self) -> str:
        """Why nothing can be saved; empty when it can."""
        stats = self._watch.stats
        if self._watch.state != "ready" or stats is None:
            return "the engine is away, or has no PolyKV hooks"
        if not stats.kv_unified:
            return "the cache is split: start the engine with --kv-unified"
        if stats.share != "ok":
            return f"nothing is shared here: {stats.share}"
        if self.places():
            return ""
        if not any(self._wanted_bytes.values()):
            return "POLYKV_WARM_RAM_BYTES and POLYKV_WARM_DISK_BYTES are 0"
        if stats.saved.disk.why_off and self._wanted_bytes["disk"]:
            return f"the engine has no disk for saved states: {stats.saved.disk.why_off}"
        return "the engine has no room for saved states: start it with --polykv-save-ram, or build it anew"

    def budget(self, place: Place) -> int:
        """How many bytes may be used there; 0 = the place is not used."""
        stats = self._watch.stats
        if stats is None:
            return 0
        return min(self._wanted_bytes[place], (stats.saved.ram if place == "ram" else stats.saved.disk).n_bytes_max)

    def places(self) -> list[Place]:
        """Where there is a budget."""
        both: tuple[Place, ...] = ("ram", "disk")
        return [place for place in both if self.budget(place) > 0]

    async def look(self) -> None:
        """Read the engine's list, unless that was done since it was started. Raises UpstreamError and its heirs."""
        async with self._looking:
            if self.known:
                return
            since = self.mark()
            listed = await self._engine.list_pools()
            if not listed.sleeping and listed.epoch in ("", self._watch.epoch):
                self.found(listed.saved, since)

    # Changing ------------------------------------------------------------------------------------------------------

    async def save(
        self,
        *,
        seq: SeqId | int = -1,
        id_slot: SlotId | int = -1,
        start: int = 0,
        n_tokens: int = -1,
        tag: str,
        only: Place | None = None,
    ) -> SavedState:
        """Copy ``[start, n_tokens)`` of a sequence or a slot out of the cache, wherever there is or can be room.

        ``only``: nowhere else, and nothing is forgotten for it: a copy besides another, or ahead of its time.

        Raises:  SavedBudget, SavingUnsupported, SavingRefused, SequenceGone, UpstreamError and its heirs
        """
        if not self.available:
            raise SavingUnsupported(f"nothing can be saved: {self.why_off}")
        began_s = time.monotonic()
        with self.working_on(tag), self._counting_failures():
            try:
                saved = await self._save_somewhere(seq, id_slot, start, n_tokens, tag=tag, only=only)
            except (UpstreamUnavailable, UpstreamTimeout, asyncio.CancelledError):
                self.known = False  # it may be there all the same
                raise
            saved = await self._also_on_disk(saved, seq, id_slot)
            state = self._with_other_places(_bare(saved))
            self.enter(state)
            await self._keep_within_budgets(state)
        self.counts.saved(time.monotonic() - began_s)
        return state

    async def load_pool(self, tag: str, parent_seq: SeqId | int = -1, start: int = -1) -> Materialized:
        """Bring a state into a free pool sequence, behind ``[0, start)`` of the parent's.

        Raises:  as ``EngineClient.load_pool``
        """
        with self._loading(tag):
            return await self._engine.load_pool(tag, parent_seq=parent_seq, start=start)

    async def load_slot(
        self, tag: str, id_slot: SlotId | int, parent_seq: SeqId | int = -1, start: int = -1
    ) -> LoadedSlot:
        """Bring a state into an idle slot, in place of what that holds.

        Raises:  as ``EngineClient.load_slot``
        """
        with self._loading(tag):
            return await self._engine.load_slot(tag, id_slot=id_slot, parent_seq=parent_seq, start=start)

    async def forget(self, tag: str) -> None:
        """Give a state up. When the engine cannot be asked it is found again with its next list."""
        self.leave_out(tag)
        self.counts.n_forgotten += 1
        if not self._is_ours():
            return
        try:
            await self._engine.forget_saved(tag)
        except PolyKVError as e:
            log.info("the saved state %s stays for now: %s", tag, e.message)

    async def forget_unless(self, wanted: Callable[[SavedState], bool]) -> None:
        """Forget what nobody knows any more. ``wanted`` is asked in one step."""
        for state in [state for state in self if not wanted(state)]:
            if self.find(state.tag) is state and self.is_idle(state.tag):
                await self.forget(state.tag)

    # Inside --------------------------------------------------------------------------------------------------------

    def _with_other_places(self, state: SavedState) -> SavedState:
        """Saving it in one place leaves the same state in the other where it is."""
        before = self.find(state.tag)
        if before is None or _content(before) != _content(state):
            return state
        there = {*before.places, *state.places}
        return state.model_copy(update={"places": tuple(place for place in ("ram", "disk") if place in there)})

    async def _save_somewhere(
        self, seq: int, id_slot: int, start: int, n_tokens: int, *, tag: str, only: Place | None
    ) -> Saved:
        """Every turn forgets something, or goes for less than before."""
        places = self.places() if only is None else [only]
        to: To = "both" if len(places) == 2 else places[0]
        while True:
            if only is None and to != "both":
                await self._forget_elsewhere(tag, to)
            try:
                return await self._engine.save(seq=seq, id_slot=id_slot, start=start, n_tokens=n_tokens, tag=tag, to=to)
            except SavingUnsupported:
                if to != "both":
                    raise
                to = "ram"  # what was computed with adapters is kept in memory only
            except SavedBudget as e:
                if e.need is None or e.free is None:
                    if to != "disk" or len(places) < 2:
                        raise
                    to = "ram"  # the disk itself fails
                elif to == "both" and self.budget("disk") - self.n_bytes("disk") >= e.need:
                    to = "disk"
                elif only or not await self._make_room("disk" if to == "disk" else "ram", e.need - e.free):
                    if to != "both":
                        raise
                    to = "disk"

    async def _forget_elsewhere(self, tag: str, place: Place) -> None:
        """What a session said up to an earlier turn, in the other place, would be found there and be loaded first."""
        before = self.find(tag)
        if before is not None and not tag.startswith(POOL) and any(other != place for other in before.places):
            await self.forget(tag)

    async def _also_on_disk(self, saved: Saved, seq: int, id_slot: int) -> Saved:
        """When it was to be on disk as well and is in memory only, try again with room made there."""
        error = saved.disk_error
        if error is None:
            return saved
        try:
            if error.need is None or error.free is None or not await self._make_room("disk", error.need - error.free):
                raise SavedBudget(error.message)
            again = await self._engine.save(
                seq=seq, id_slot=id_slot, start=saved.start, n_tokens=saved.n_tokens, tag=saved.tag, to="disk"
            )
        except PolyKVError as e:
            self.counts.n_failures[e.code] += 1
            log.warning("%s is saved in memory, but not on disk: %s", saved.tag, e.message)
            return saved
        return saved.model_copy(update={"places": ("ram", *again.places)})

    async def _make_room(self, place: Place, n_bytes: int) -> bool:
        victims = self.victims(place, n_bytes)
        for state in victims:
            if self.find(state.tag) is state and self.is_idle(state.tag):
                log.info("forgetting %s: %d bytes of %s", state.tag, state.n_bytes, place)
                await self.forget(state.tag)
        return bool(victims)

    async def _keep_within_budgets(self, saved: SavedState) -> None:
        """The engine knows only its own budgets. Raises SavedBudget when this state alone is larger than ours."""
        for place in saved.places:
            over = self.n_bytes(place) - self.budget(place)
            if over > 0 and not await self._make_room(place, over):
                await self.forget(saved.tag)
                raise SavedBudget("the budget is smaller than the state", need=saved.n_bytes, free=self.budget(place))

    @contextlib.contextmanager
    def _loading(self, tag: str) -> Iterator[None]:
        state = self.find(tag)
        began_s = time.monotonic()
        with self.working_on(tag), self._counting_failures():
            try:
                yield
            except SavedGone:
                self.leave_out(tag)
                raise
        if state is not None:
            self.counts.loaded("ram" if "ram" in state.places else "disk", time.monotonic() - began_s)
            if self.find(tag) is state:
                self.enter(state)

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except PolyKVError as e:
            self.counts.n_failures[e.code] += 1
            raise


def _content(state: SavedState) -> tuple[str, int, int]:
    return state.tokens_hash, state.n_tokens, state.start


def _bare(saved: Saved) -> SavedState:
    """What is known of a state, without what is only said of the saving."""
    return SavedState.model_validate(saved.model_dump(by_alias=True, include=set(SavedState.model_fields)))
