"""Where states can be saved, and room for one more: what is forgotten for it, and what only leaves one of two places.

An engine that can forget in one place (``knows_places``) keeps in the other what leaves one; an older one forgets a tag
altogether.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from polykv_proxy.control.disk_trouble import DiskTrouble
from polykv_proxy.control.saved_books import Place, SavedBooks
from polykv_proxy.control.tier_counts import TierCounts
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import PolyKVError, SavedBudget, SavedGone, SavingUnsupported
from polykv_proxy.upstream import EngineClient, SavedState, Stats

log = logging.getLogger("polykv.saved")

NO_TAG = "nothing"
"""Nothing is ever saved under it: whether an engine knows an order is asked without giving it one."""


class SavedRoom(SavedBooks, ABC):
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
        self._knows_places: tuple[str | None, bool] = (None, False)
        self._judged: Stats | None = None
        self._can_save = False
        self.disk = DiskTrouble()
        self.counts = TierCounts()

    # Whether there is a tier ---------------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """The engine can save states now, somewhere. Every request asks, so it is found out once per stats."""
        stats = self._watch.stats
        if self._watch.state != "ready" or stats is None:
            return False
        if stats is not self._judged:
            self._judged, self._can_save = stats, not self.why_off
        return self._can_save

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

    @property
    def memory_known(self) -> bool:
        """What is in the engine's memory is known: it is there, and has told since it was started, or saves nothing."""
        return self._watch.state == "ready" and (self.listed or not self.available)

    @property
    def disk_known(self) -> bool:
        """What is on disk is known, which outlives the engine."""
        return self.ever_listed or (self._watch.state == "ready" and not self.available)

    def known_bytes(self, states: Iterable[SavedState]) -> int | None:
        """Bytes of states, each once: of those on disk alone while nobody knows what is in memory. None: not known."""
        known = self.memory_known
        n_bytes = sum(state.n_bytes for state in states if known or "disk" in state.places)
        return n_bytes if n_bytes or known else None

    @property
    def disk_fails(self) -> str:
        """Why the last file could not be written though there is a budget for it; empty when it could."""
        return self.disk.why if self.budget("disk") > 0 else ""

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

    def writable(self) -> list[Place]:
        """As ``places``, without a disk that fails, until it is time to try again."""
        return [place for place in self.places() if place == "ram" or self.disk.may_try]

    async def look(self) -> None:
        """Read the engine's list, unless that was done since it was started. Raises UpstreamError and its heirs."""
        async with self._looking:
            if self.known:
                return
            since = self.mark()
            listed = await self._engine.list_pools()
            if not listed.sleeping and listed.epoch in ("", self._watch.epoch):
                self.found(listed.saved, since)

    async def knows_places(self) -> bool:
        """The engine writes what it has in memory when told so, and forgets in one place. Asked once per start."""
        epoch = self._watch.epoch
        if self._knows_places[0] != epoch or epoch is None:
            try:
                await self._engine.write_saved(NO_TAG)
            except SavedGone:
                self._knows_places = (epoch, True)
            except SavingUnsupported:
                self._knows_places = (epoch, False)
            except PolyKVError as e:
                log.debug("the engine does not say whether it knows places: %s", e.message)
                return False
        return self._knows_places[1]

    # Forgetting ----------------------------------------------------------------------------------------------------

    async def forget(self, tag: str) -> None:
        """Give a state up. When the engine cannot be asked it is found again with its next list."""
        if self.find(tag) is None and self.known:
            return
        self.leave_out(tag)
        self.counts.n_forgotten += 1
        await self._forget(tag, None)

    async def drop(self, tag: str, place: Place) -> None:
        """Give up what is in one place; with an engine that cannot do that, all of it."""
        state = self.find(tag)
        if state is None or place not in state.places:
            return
        if len(state.places) < 2 or not await self.knows_places():
            await self.forget(tag)
            return
        self.leave_out(tag, place)
        await self._forget(tag, place)

    async def _forget(self, tag: str, place: Place | None) -> None:
        if not self._is_ours():
            return
        try:
            await self._engine.forget_saved(tag, place)
        except PolyKVError as e:
            self.known = False
            log.info("the saved state %s stays for now: %s", tag, e.message)

    async def forget_unless(self, wanted: Callable[[SavedState], bool]) -> None:
        """Forget what nobody knows any more. ``wanted`` is asked in one step."""
        for state in [state for state in self if not wanted(state)]:
            if self.find(state.tag) is state and self.is_idle(state.tag):
                await self.forget(state.tag)

    # Room ----------------------------------------------------------------------------------------------------------

    def has_room(self, place: Place, n_bytes: int, but_tag: str | None = None) -> bool:
        """Whether so much more fits into our budget as it is. ``but_tag``: what is there under it is to be replaced."""
        return n_bytes <= self._n_free(place, but_tag)

    def _n_free(self, place: Place, but_tag: str | None) -> int:
        replaced = self.find(but_tag) if but_tag is not None else None
        n_replaced = replaced.n_bytes if replaced is not None and place in replaced.places else 0
        return max(0, self.budget(place) - self.n_bytes(place) + n_replaced)

    def _check(self, place: Place, n_bytes: int, tag: str) -> None:
        """Raises SavedBudget when so much does not fit into our budget, whatever the engine has."""
        if not self.has_room(place, n_bytes, tag):
            short = n_bytes > self.budget(place)
            what = f"the budget is smaller than the state ({n_bytes} bytes)" if short else "the budget is used up"
            raise SavedBudget(f"{_PLACES[place]} for saved states: {what}", need=n_bytes, free=self._n_free(place, tag))

    async def _make_room(self, place: Place, n_bytes: int, *, older_than: str | None = None) -> bool:
        victims = self.victims(place, n_bytes, older_than=older_than)
        for state in victims:
            if self.find(state.tag) is state and self.is_idle(state.tag):
                if place == "ram" and await self._has_room_on_disk(state):
                    await self.write(state.tag)  # its file was only due, and this is its last copy
                log.info("%s leaves %s, for want of %d bytes", state.tag, _PLACES[place], n_bytes)
                await self.drop(state.tag, place)
        return bool(victims)

    async def _has_room_on_disk(self, state: SavedState) -> bool:
        """It is in memory only, and need not be."""
        if "disk" in state.places or "disk" not in self.writable() or not self.has_room("disk", state.n_bytes):
            return False
        return await self.knows_places()

    @abstractmethod
    async def write(self, tag: str) -> bool:
        """Have what is in memory written to the disk too. Gives whether it is there; what fails is in the log."""

    async def _spare_copies(self, n_bytes: int) -> bool:
        """Make room in memory as long as that loses nothing: of what is on disk too."""
        victims = self.victims("ram", n_bytes)
        if not victims or any("disk" not in state.places for state in victims) or not await self.knows_places():
            return False
        return await self._make_room("ram", n_bytes)

    async def _keep_within_budgets(self, saved: SavedState) -> None:
        """The engine knows only its own budgets. Raises SavedBudget when this state alone is larger than ours."""
        for place in saved.places:
            over = self.n_bytes(place) - self.budget(place)
            if over > 0 and not await self._make_room(place, over):
                await self.drop(saved.tag, place)
                if self.find(saved.tag) is None:
                    raise SavedBudget(
                        "the budget is smaller than the state", need=saved.n_bytes, free=self.budget(place)
                    )


_PLACES: dict[Place, str] = {"ram": "memory", "disk": "the disk"}
