"""The books of cells: what every sequence and slot holds, kept up with what was ordered and what stats say.

A slot goes on holding a pool's cells when the pool is evicted or released, and the engine then does not say any more
that they are shared. So what stats last said is noted before a sequence is freed (``sync``), and a released pool is
kept here, without its tokens, for as long as somebody holds a cell of it.
"""

import time
from collections.abc import Collection, Sequence

from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.ids import PoolId, SeqId, SlotId
from polykv_proxy.tree.accounting import (
    Accounts,
    Gone,
    account,
    count_cells,
    count_freed,
    own_runs,
    owners_of,
    parts_of,
    still_needed,
)
from polykv_proxy.tree.cells import CellBook, SlotFacts, behind, length, lying
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import CellMap, SlotStats, Stats


class Ledger:
    """``book`` is told of sequences by who orders them."""

    def __init__(self, tree: PoolTree, watch: EngineWatch):
        self._tree, self._watch = tree, watch
        self.book = CellBook(time.monotonic)
        self._gone: dict[PoolId, Gone] = {}
        self._seen: Stats | None = None

    def clear(self) -> None:
        """The engine's cache is another one now."""
        self.book.clear()
        self._gone.clear()
        self._seen = None

    def sync(self) -> None:
        """Note what the last stats say, once."""
        for pool in self._tree.residents():
            if pool.seq_id is not None and pool.gen is not None and self.book.runs(pool.seq_id, pool.gen) is None:
                self.book.adopt(pool.seq_id, pool.gen, parts_of(self._tree, pool))
        stats = self._watch.stats
        if stats is None or stats is self._seen or stats.epoch != self._watch.epoch:
            return
        self._seen = stats
        for slot in stats.slots:
            facts = _facts(slot, stats)
            if facts is not None:
                self.book.observe(facts, self._watch.asked_s)
        self.book.forget()
        for pool_id in self._gone.keys() - still_needed(self._gone, self.book, self.accounts()) if self._gone else ():
            del self._gone[pool_id]

    def found(self, cells: CellMap) -> None:
        """The engine told where everything lies: what an earlier run of the proxy ordered is not in the books.

        Sharing by the tree would only be a guess: a pool that was made while its parent was away has cells of its own.
        """
        stats = self._watch.stats
        if stats is None or not stats.kv_unified or cells.epoch not in ("", self._watch.epoch):
            return
        self.book.look()
        runs = lying([told.runs for told in (*cells.pools, *cells.slots)])
        of_pools, of_slots = runs[: len(cells.pools)], runs[len(cells.pools) :]
        lies = {(told.seq, told.gen): held for told, held in zip(cells.pools, of_pools, strict=True)}
        for pool in self._tree.residents():
            if pool.seq_id is not None and pool.gen is not None and (pool.seq_id, pool.gen) in lies:
                self.book.found(pool.seq_id, pool.gen, lies[pool.seq_id, pool.gen], parts_of(self._tree, pool))
        for told, held in zip(cells.slots, of_slots, strict=True):
            done = [task.id_task for task in stats.finished if task.id_slot == told.id]
            self.book.found_slot(SlotId(told.id), held, max([told.id_task, *done]))

    def released(self, pools: Sequence[Pool]) -> None:
        """These pools are off the tree; what slots hold of them is theirs for so long."""
        for pool in pools:
            self._gone[pool.pool_id] = Gone(pool.pool_id, pool.name, pool.parent, pool.branch_pos, pool.prefix_len)
        for pool in self._tree.residents():  # who shares cells with them, without being their child, owns these now
            if pool.seq_id is not None:
                self.book.claim(pool.seq_id, pool.pool_id, tree=self._tree)

    def accounts(self) -> Accounts:
        unified = self._watch.stats.kv_unified if self._watch.stats is not None else True
        return account(self._tree, self._gone, self.book, unified=unified)

    def gone(self) -> dict[PoolId, Gone]:
        """Released pools of which cells may still be held."""
        return self._gone

    def holds(self, slot_id: SlotId) -> tuple[int, int]:
        """(tokens that are pools', tokens of its own) of what a slot holds."""
        runs = self.book.slot_runs(slot_id)
        n_own = sum(run.end - run.start for run in own_runs(self._tree, self._gone, self.book, runs))
        return length(runs) - n_own, n_own

    def holders_of(self, pool_ids: Collection[PoolId]) -> set[SlotId]:
        """Slots that hold cells of these pools."""
        owners = {s: owners_of(self._tree, self._gone, self.book, self.book.slot_runs(s)) for s in self.book.slot_ids}
        return {slot_id for slot_id, owned in owners.items() if not owned.isdisjoint(pool_ids)}

    def is_shared(self, pool: Pool, start: int, slots: Collection[SlotId]) -> bool:
        """Whether another pool's sequence, or one of these slots, holds cells of ``[start, L)`` of a pool's sequence.

        True when it is not known what the sequence holds.
        """
        self.sync()
        runs = self.book.runs(pool.seq_id, pool.gen) if pool.seq_id is not None and pool.gen is not None else None
        if runs is None:
            return True
        own = behind(runs, start)
        others = [run for slot_id in slots for run in self.book.slot_runs(slot_id)]
        for other in self._tree.residents():
            if other is not pool and other.seq_id is not None and other.gen is not None:
                others += self.book.runs(other.seq_id, other.gen) or ()
        return count_freed(own, others) < count_cells(own)


def _facts(slot: SlotStats, stats: Stats) -> SlotFacts | None:
    """None while what it will hold is not settled: its request was taken, and nothing of it is in the cache yet."""
    if slot.state in ("started", "wait_other"):
        return None
    tasks = {task.id_task: task.n_cached for task in stats.finished if task.id_slot == slot.id}
    if not slot.idle and slot.id_task >= 0:
        tasks[slot.id_task] = slot.n_cached
    return SlotFacts(
        SlotId(slot.id),
        slot.n_tokens,
        sorted(tasks.items()),
        SeqId(slot.pool_seq) if slot.pool_seq >= 0 and slot.n_pool_shared > 0 else None,
        slot.n_pool_shared,
    )
