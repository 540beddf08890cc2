"""The warm tier as a whole, for those who show it: what is saved where, what it was good for, what idle cells cost."""

from dataclasses import dataclass

from polykv_proxy.control.holdings import Holdings
from polykv_proxy.control.idle_tax import IdleTax
from polykv_proxy.control.leaving import IdlePools
from polykv_proxy.control.ledger import Ledger
from polykv_proxy.control.saved import SavedStates
from polykv_proxy.control.saved_books import POOL, Place
from polykv_proxy.control.tier_counts import TierSnapshot
from polykv_proxy.control.watch import EngineWatch


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """``n_bytes`` of ``max_bytes``; 0 of 0: the place is not used. None: not known."""

    n_bytes: int | None
    max_bytes: int
    n_pools: int | None
    n_sessions: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """None: not known.

    ``why_off``   why nothing can be saved; empty while the tier is on
    ``hi``        highest used cell + 1: what every decode scans
    ``idle_tax``  share of the present decode steps' time that is due to cells nobody at work holds; None also while
                  nobody decodes
    ``n_left``, ``n_moved``  pools that left because nobody used them, and that were moved down
    """

    why_off: str
    ram: PlaceFacts
    disk: PlaceFacts
    counts: TierSnapshot
    cells_used: int | None
    hi: int | None
    idle_tax: float | None
    n_left: int
    n_moved: int


class Tier:
    """``look`` with every heartbeat; ``facts`` answers from memory."""

    def __init__(self, *, saved: SavedStates, watch: EngineWatch, ledger: Ledger, idle_pools: IdlePools):
        self._saved, self._watch, self._ledger, self._idle_pools = saved, watch, ledger, idle_pools
        self._tax = IdleTax()

    def look(self) -> None:
        """Learn from the stats that were just read."""
        if self._watch.stats is not None:
            self._tax.note(self._watch.stats)

    def facts(self) -> TierFacts:
        stats = self._watch.stats if not self._watch.sleeping and self._watch.state == "ready" else None
        return TierFacts(
            why_off=self._saved.why_off,
            ram=self._place("ram"),
            disk=self._place("disk"),
            counts=self._saved.counts.snapshot(),
            cells_used=stats.cells.used if stats is not None and stats.cells is not None else None,
            hi=stats.cells.hi if stats is not None and stats.cells is not None else None,
            idle_tax=self._idle_tax(),
            n_left=self._idle_pools.n_left,
            n_moved=self._idle_pools.n_moved,
        )

    def _place(self, place: Place) -> PlaceFacts:
        max_bytes = self._saved.budget(place)
        if not (self._saved.memory_known if place == "ram" else self._saved.disk_known):
            return PlaceFacts(None, max_bytes, None, None)
        states = [state for state in self._saved.last_known() if place in state.places]
        n_pools = sum(state.tag.startswith(POOL) for state in states)
        return PlaceFacts(sum(state.n_bytes for state in states), max_bytes, n_pools, len(states) - n_pools)

    def _idle_tax(self) -> float | None:
        stats = self._watch.stats
        if stats is None or self._watch.state != "ready":
            return None
        self._ledger.sync()
        return self._tax.estimate(stats, Holdings(stats, (), self._ledger.book).n_held())
