"""How many cells the pools and the slots hold, alone and together, by one look at the engine and by the books.

Stats say of a slot what it shares with the pool it was attached to, as long as that pool has its sequence. Afterwards
they say that it shares nothing, though another pool's sequence may hold the same cells: only the books know that. Of a
slot that the books do not have as stats show it, what stats say counts.

Stats that are read while a batch is being decoded have its tokens in the slots already, and not in ``cells.used``: so
what they call free may be taken (``n_in_batch``).

A unified cache is meant.
"""

from collections.abc import Iterable

from polykv_proxy.ids import SlotId
from polykv_proxy.tree.accounting import count_cells, count_freed
from polykv_proxy.tree.cells import CellBook, Run, length
from polykv_proxy.tree.pool import Pool
from polykv_proxy.upstream import SlotStats, Stats

NOT_STARTED = ("idle", "started")
"""A slot in one of these states drops what its request does not reuse before it takes a cell."""


def n_in_batch(stats: Stats) -> int:
    """Cells that the batch under way takes, at most: stats count them in the slots, and may call them free, too."""
    n_prompt = sum(slot.n_tokens - slot.n_cached for slot in stats.slots if slot.state in ("prompt", "done_prompt"))
    n_prompt += stats.service.n_tokens if stats.service.state != "idle" else 0
    if n_prompt and stats.flags.n_batch is not None and not stats.flags.has_media:
        n_prompt = min(n_prompt, stats.flags.n_batch)  # media are decoded besides, as many as follow each other
    n_step = 1 + (stats.flags.n_draft or 0)
    return max(0, n_prompt) + n_step * sum(slot.state == "generating" for slot in stats.slots)


class Holdings:
    """``residents``: all pools with a sequence. ``book``: kept up with ``stats``."""

    def __init__(self, stats: Stats, residents: Iterable[Pool], book: CellBook):
        self._stats, self._book = stats, book
        self._residents = list(residents)
        self._resting = [slot for slot in stats.slots if slot.state in NOT_STARTED]
        self.busy = [slot for slot in stats.slots if slot.state not in NOT_STARTED]

    def n_resting_alone(self) -> int:
        """Cells that come free when the engine purges its idle slots."""
        told = sum(slot.n_tokens - slot.n_pool_shared for slot in self._resting)
        of_pools = self._of_pools(self._residents)
        counted = count_freed(self._of_slots(self._resting), of_pools + self._of_slots(self.busy))
        counted += sum(slot.n_tokens - slot.n_pool_shared for slot in self._unknown(self._resting))
        # The books are ahead of an engine that is just giving up a sequence: what stats still call shared is.
        n_alone = min(told, counted)
        if self._stats.cells is not None:
            # What a slot did before this proxy came may be missing in the books, so that they see two cells in one.
            n_alone = min(n_alone, self._stats.cells.used - count_cells(of_pools))
        return max(0, n_alone)

    def n_held(self) -> int:
        """Cells that the pools and the busy slots hold."""
        seqs = {pool.seq_id for pool in self._residents}
        unknown = self._unknown(self.busy)
        besides = sum(s.n_tokens - (s.n_pool_shared if s.pool_seq in seqs else 0) for s in unknown)
        return count_cells(self._of_pools(self._residents) + self._of_slots(self.busy)) + besides

    def n_freed(self, staying: Iterable[Pool]) -> int:
        """Cells that come free when all pools but these go, and the idle slots are purged."""
        return count_freed(self._of_pools(self._residents), self._of_pools(staying) + self._of_slots(self.busy))

    def _of_pools(self, pools: Iterable[Pool]) -> list[Run]:
        held = (self._book.runs(p.seq_id, p.gen) for p in pools if p.seq_id is not None and p.gen is not None)
        return [run for runs in held for run in runs or ()]

    def _of_slots(self, slots: Iterable[SlotStats]) -> list[Run]:
        return [run for slot in slots if self._knows(slot) for run in self._book.slot_runs(SlotId(slot.id))]

    def _unknown(self, slots: Iterable[SlotStats]) -> list[SlotStats]:
        return [slot for slot in slots if not self._knows(slot)]

    def _knows(self, slot: SlotStats) -> bool:
        return length(self._book.slot_runs(SlotId(slot.id))) == slot.n_tokens
