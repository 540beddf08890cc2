"""What the engine has saved outside its cache: the only one who saves, loads and forgets.

Rules it keeps:
    1. Room is made by giving up what was used least lately, in that place only, never what is just being saved or
       loaded, and nothing in vain. As long as there is room in one place, nothing is forgotten for another.
    2. Any failure is a miss. Whoever asks goes on without the state; what is of no use any more is forgotten.
    3. Of a new start of the engine nothing is known until it was listed: files are still there, after a sleep also what
       was in memory.
    4. Nobody waits for a file that does not have to. A disk that fails costs the copies there, and nothing in memory.
"""

import contextlib
import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from polykv_proxy.control.file_writer import FileWriter
from polykv_proxy.control.saved_books import Place, pool_tag, session_tag
from polykv_proxy.control.saved_room import SavedRoom
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import (
    PolyKVError,
    SavedBudget,
    SavedGone,
    SavingUnsupported,
    UpstreamLoading,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from polykv_proxy.ids import SeqId, SlotId
from polykv_proxy.upstream import EngineClient, LoadedSlot, Materialized, Saved, SavedState

__all__ = ["SavedStates", "pool_tag", "session_tag"]

log = logging.getLogger("polykv.saved")

To = Literal["ram", "disk", "both"]


class SavedStates(SavedRoom):
    """``stop`` it. ``tend`` with every heartbeat."""

    def __init__(
        self, engine: EngineClient, watch: EngineWatch, *, ram_bytes: int, disk_bytes: int, is_ours: Callable[[], bool]
    ):
        super().__init__(engine, watch, ram_bytes=ram_bytes, disk_bytes=disk_bytes, is_ours=is_ours)
        self._files = FileWriter(self._write_later, lambda: "disk" in self.writable())
        self._memory_only: set[str] = set()

    # Saving --------------------------------------------------------------------------------------------------------

    async def save(
        self,
        *,
        seq: SeqId | int = -1,
        id_slot: SlotId | int = -1,
        start: int = 0,
        n_tokens: int = -1,
        tag: str,
        n_cells: int = 0,
        only: Place | None = None,
        soon: bool = False,
    ) -> SavedState:
        """Copy ``[start, n_tokens)`` of a sequence or a slot out of the cache, wherever there is or can be room.

        ``n_cells``: how many these are at least; what cannot fit is not asked for. ``only``: nowhere else, and nothing
        is forgotten for it: a copy besides another, or ahead of its time. ``soon``: somebody waits; what goes to memory
        gets its file later.

        Raises:  SavedBudget, SavingUnsupported, SavingRefused, SequenceGone, UpstreamError and its heirs
        """
        if not self.available:
            raise SavingUnsupported(f"nothing can be saved: {self.why_off}")
        began_s = time.monotonic()
        with self.working_on(tag), self._counting_failures(loading=False):
            try:
                saved = await self._save_somewhere(
                    seq, id_slot, start, n_tokens, tag=tag, n_bytes=self._n_bytes_of(n_cells), only=only, soon=soon
                )
            except (UpstreamUnavailable, UpstreamTimeout, CancelledError):
                self.known = False  # it may be there all the same
                raise
            self._memory_only.discard(tag)
            state = self._with_other_places(_bare(saved))
            self.enter(state)
            if saved.disk_error is not None:
                await self._also_on_disk(saved, seq, id_slot)
            elif "disk" in saved.places:
                self.disk.worked(saved.n_bytes)
            await self._keep_within_budgets(self.find(tag) or state)
        self.counts.saved(time.monotonic() - began_s)
        if only is None:
            self._write_in_time(tag)
        return self.find(tag) or state

    def _n_bytes_of(self, n_cells: int) -> int:
        stats = self._watch.stats
        return round(n_cells * (stats.kv_bytes_per_token or 0)) if stats is not None else 0

    async def _save_somewhere(
        self,
        seq: int,
        id_slot: int,
        start: int,
        n_tokens: int,
        *,
        tag: str,
        n_bytes: int,
        only: Place | None,
        soon: bool,
    ) -> Saved:
        """Every turn forgets something, or goes for less than before."""
        places = self.writable() if only is None else [only]
        if not places:
            raise SavedBudget(f"the disk fails: {self.disk.why}")
        to: To = "both" if len(places) == 2 else places[0]
        if to == "both" and soon and await self.knows_places():
            to = "ram"
        while True:
            try:
                self._check("disk" if to == "disk" else "ram", n_bytes, tag)
                return await self._engine.save(seq=seq, id_slot=id_slot, start=start, n_tokens=n_tokens, tag=tag, to=to)
            except SavingUnsupported:
                if to != "both":
                    raise
                to = "ram"  # what was computed with adapters is kept in memory only
            except SavedBudget as e:
                if e.need is None or e.free is None:
                    self.disk.failed(e.message, n_bytes)
                    if to == "ram" or "ram" not in places:
                        raise
                    to = "ram"
                elif only is not None:
                    raise
                elif to == "disk":
                    if not await self._make_room("disk", e.need - e.free):
                        raise
                elif not await self._spare_copies(e.need - e.free):
                    spill = "disk" in places and self.disk.may_try
                    if (spill and self.has_room("disk", e.need, tag)) or not await self._make_room(
                        "ram", e.need - e.free
                    ):
                        if not spill:
                            raise
                        to = "disk"

    def _with_other_places(self, state: SavedState) -> SavedState:
        """Saving it in one place leaves the same state in the other where it is."""
        before = self.find(state.tag)
        if before is None or _content(before) != _content(state):
            return state
        there = {*before.places, *state.places}
        return state.model_copy(update={"places": tuple(place for place in ("ram", "disk") if place in there)})

    async def _also_on_disk(self, saved: Saved, seq: int, id_slot: int) -> None:
        """It was to be on disk as well and is in memory only: try again with room made there, or later."""
        error = saved.disk_error
        if error is None:
            return
        if error.need is None or error.free is None:
            self._disk_failed(SavedBudget(error.message), saved.n_bytes)
        elif not await self._make_room("disk", error.need - error.free, older_than=saved.tag):
            log.info("%s is saved in memory, but not on disk: %s", saved.tag, error.message)
            self._memory_only.add(saved.tag)
        elif await self.knows_places():
            await self._write_later(saved.tag)
        else:
            try:
                await self._engine.save(
                    seq=seq, id_slot=id_slot, start=saved.start, n_tokens=saved.n_tokens, tag=saved.tag, to="disk"
                )
            except PolyKVError as e:
                self.counts.failed(e, loading=False)
                log.info("%s is saved in memory, but not on disk: %s", saved.tag, e.message)
            else:
                self._is_written(saved)

    # Files, later --------------------------------------------------------------------------------------------------

    async def tend(self) -> None:
        """Called with the heartbeat, which does not wait: ask what the engine can before somebody waits for the answer,
        and write what may have waited for a disk that failed.
        """
        if len(self.places()) == 2 and self.known and self._is_ours():
            await self.knows_places()
        for place in self.places() if self.known and self._is_ours() else ():
            await self._make_room(place, self.n_bytes(place) - self.budget(place))  # more than was known may be there
        self._files.go_on()

    async def finish_writing(self) -> None:
        """Wait until all is on disk that can be. The caller sets a limit."""
        await self._files.finish()

    async def stop(self) -> None:
        await self._files.stop()

    async def write(self, tag: str) -> bool:
        await self._write_later(tag)
        state = self.find(tag)
        return state is not None and "disk" in state.places

    def _write_in_time(self, tag: str) -> None:
        state = self.find(tag)
        if state is not None and state.places == ("ram",) and tag not in self._memory_only and "disk" in self.places():
            self._files.add(tag)

    async def _write_later(self, tag: str) -> bool:
        """Gives False when it is to be tried again later."""
        state = self.find(tag)
        if state is None or state.places != ("ram",) or not self._is_ours() or not await self.knows_places():
            return True
        with self.working_on(tag):
            while True:
                try:
                    self._check("disk", state.n_bytes, tag)
                    written = await self._engine.write_saved(tag)
                except SavedBudget as e:
                    if e.need is None or e.free is None:
                        self._disk_failed(e, state.n_bytes)
                        return False
                    if not await self._make_room("disk", e.need - e.free, older_than=tag):
                        log.info("%s stays in memory only: %s", tag, e.message)
                        self._memory_only.add(tag)
                        return True
                except SavedGone:
                    # Forgotten or saved anew meanwhile, and then it is in the line again. Else the books were wrong.
                    self.known = self.known and self.find(tag) is not state
                    return True
                except (UpstreamUnavailable, UpstreamLoading, UpstreamTimeout) as e:
                    log.info("%s is written later: %s", tag, e.message)
                    self.known = False
                    return False
                except PolyKVError as e:
                    self.counts.failed(e, loading=False)
                    log.info("%s stays in memory only: %s", tag, e.message)
                    self._memory_only.add(tag)
                    return True
                else:
                    self._is_written(written)
                    return True

    def _is_written(self, saved: SavedState) -> None:
        self.disk.worked(saved.n_bytes)
        state = self.find(saved.tag)
        if state is not None and _content(state) == _content(saved):
            self.amend(state.model_copy(update={"places": tuple(dict.fromkeys([*state.places, "disk"]))}))

    def _disk_failed(self, error: SavedBudget, n_bytes: int) -> None:
        self.counts.failed(error, loading=False)
        self.disk.failed(error.message, n_bytes)

    # The engine's list ---------------------------------------------------------------------------------------------

    def found(self, listed: Iterable[SavedState], since: int) -> None:
        """As in the books. What an earlier run left in memory only is written, too."""
        super().found(listed, since)
        if len(self.places()) == 2:
            for state in self:
                self._write_in_time(state.tag)

    def leave_out(self, tag: str, place: Place | None = None) -> None:
        super().leave_out(tag, place)
        if self.find(tag) is None:
            self._files.discard(tag)
            self._memory_only.discard(tag)

    def engine_lost(self, *, keeps_memory: bool) -> None:
        """Another start of the engine, or it fell asleep."""
        self._files.clear()
        self._memory_only.clear()
        self.disk.end_pause()
        self.lost([place for place in self.places() if place == "disk" or keeps_memory])

    # Loading -------------------------------------------------------------------------------------------------------

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

    @contextlib.contextmanager
    def _loading(self, tag: str) -> Iterator[None]:
        state = self.find(tag)
        began_s = time.monotonic()
        with self.working_on(tag), self._counting_failures(loading=True):
            try:
                yield
            except SavedGone:
                self.leave_out(tag)
                raise
        if state is not None:
            self.counts.loaded("ram" if "ram" in state.places else "disk", time.monotonic() - began_s)
            now = self.find(tag)
            if now is not None and _content(now) == _content(state):
                self.enter(now)

    @contextlib.contextmanager
    def _counting_failures(self, *, loading: bool) -> Iterator[None]:
        try:
            yield
        except PolyKVError as e:
            self.counts.failed(e, loading=loading)
            raise


def _content(state: SavedState) -> tuple[str, int, int]:
    return state.tokens_hash, state.n_tokens, state.start


def _bare(saved: Saved) -> SavedState:
    """What is known of a state, without what is only said of the saving."""
    return SavedState.model_validate(saved.model_dump(by_alias=True, include=set(SavedState.model_fields)))
