"""Ownership of cells, against a model that gives every cell a number."""

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polykv_proxy.ids import PoolId, SeqId, SlotId
from polykv_proxy.tree.accounting import (
    Gone,
    account,
    count_cells,
    count_freed,
    kv_bytes,
    parts_of,
    still_needed,
    subtree_cells,
)
from polykv_proxy.tree.cells import CellBook, Run, SlotFacts, length, lying
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree
from tests.tree.make import add_root, extend, toks


def make_resident(tree: PoolTree, book: CellBook, pool: Pool, source: Pool | None = None, n_shared: int = 0) -> None:
    """As if the engine had prefilled it behind somebody's first tokens."""
    seq_id = SeqId(int(pool.pool_id))
    tree.set_residency(pool.pool_id, "resident", seq_id=seq_id, gen=1)
    from_seq = source.seq_id if source is not None else None
    book.filled(seq_id, 1, pool.prefix_len, pool_id=pool.pool_id, source=from_seq, n_shared=n_shared)


def evict(tree: PoolTree, book: CellBook, pool: Pool) -> None:
    assert pool.seq_id is not None
    book.freed(pool.seq_id)
    tree.set_residency(pool.pool_id, "cold")


def slot(slot_id: int, n_tokens: int, *, task: int, reused: int = 0, pool: Pool | None = None, n: int = 0) -> SlotFacts:
    seq_id = pool.seq_id if pool is not None else None
    return SlotFacts(SlotId(slot_id), n_tokens, [(task, reused)], seq_id, n)


def family() -> tuple[PoolTree, CellBook, list[Pool]]:
    """A root of 100, a child of 40 more, and one of 30 that branches off at 60; all resident."""
    tree, book = PoolTree(), CellBook()
    root = add_root(tree, toks(range(100)))
    task = extend(tree, root.pool_id, toks(range(40)))
    branch = extend(tree, root.pool_id, toks(range(30)), branch_pos=60)
    make_resident(tree, book, root)
    make_resident(tree, book, task, root, 100)
    make_resident(tree, book, branch, root, 60)
    return tree, book, [root, task, branch]


def test_a_pool_family_counts_every_cell_once() -> None:
    tree, book, (root, task, branch) = family()
    book.observe(slot(0, 150, task=1, reused=140, pool=task, n=140))
    book.observe(slot(1, 152, task=2, reused=140, pool=task, n=140))
    book.observe(slot(2, 95, task=3, reused=90, pool=branch, n=90))
    accounts = account(tree, {}, book)
    assert accounts.own_cells == {root.pool_id: 100, task.pool_id: 40, branch.pool_id: 30}
    assert accounts.slot_cells == {0: 10, 1: 12, 2: 5}
    assert accounts.total_cells == 197
    of_sessions = {task.pool_id: 22, branch.pool_id: 5}
    subtree = subtree_cells(tree, accounts.own_cells, of_sessions)
    assert subtree == {root.pool_id: 197, task.pool_id: 62, branch.pool_id: 35}


def test_without_a_unified_cache_every_share_is_a_copy() -> None:
    tree, book, (root, task, branch) = family()
    accounts = account(tree, {}, book, unified=False)
    assert accounts.total_cells == 100 + 140 + 90
    assert accounts.own_cells == {root.pool_id: 100 + 100 + 60, task.pool_id: 40, branch.pool_id: 30}


def test_a_cold_pool_owns_what_a_resident_descendant_holds() -> None:
    tree, book, (root, task, branch) = family()
    evict(tree, book, task)
    evict(tree, book, root)
    assert account(tree, {}, book).own_cells == {root.pool_id: 60, branch.pool_id: 30}


def test_a_pool_prefilled_alone_leaves_its_parent_its_own_part() -> None:
    tree, book = PoolTree(), CellBook()
    root = add_root(tree, toks(range(100)))
    branch = extend(tree, root.pool_id, toks(range(30)), branch_pos=60)
    make_resident(tree, book, branch)
    assert account(tree, {}, book).own_cells == {root.pool_id: 60, branch.pool_id: 30}
    make_resident(tree, book, root)  # without looking for who holds a part of it: now there are two copies
    assert account(tree, {}, book).total_cells == 90 + 100


def test_a_slot_keeps_the_cells_of_an_evicted_pool() -> None:
    tree, book, (root, task, branch) = family()
    book.observe(slot(0, 87, task=1, reused=80, pool=root, n=80))
    for pool in (task, branch, root):
        evict(tree, book, pool)
    book.observe(slot(0, 87, task=1, reused=80))  # the engine does not know any more that it was a pool's
    accounts = account(tree, {}, book)
    assert (accounts.own_cells, accounts.slot_cells) == ({root.pool_id: 80}, {0: 7})


def test_two_slots_share_what_they_hold_of_a_released_pool() -> None:
    tree, book, (root, task, _) = family()
    for slot_id in (0, 1):
        book.observe(slot(slot_id, 145, task=slot_id, reused=140, pool=task, n=140))
    released = tree.release(task.pool_id)
    book.freed(SeqId(int(task.pool_id)))
    gone = {p.pool_id: Gone(p.pool_id, p.name, p.parent, p.branch_pos, p.prefix_len) for p in released}
    accounts = account(tree, gone, book)
    assert accounts.own_cells[root.pool_id] == 100
    assert (accounts.released_cells, accounts.slot_cells) == ({task.pool_id: 40}, {0: 5, 1: 5})


def test_a_slot_that_begins_anew_holds_other_cells() -> None:
    book, tree = CellBook(), PoolTree()
    book.observe(slot(0, 50, task=1))
    book.snapshot(SeqId(9), 1, 50, SlotId(0))
    plan = tree.plan_root(toks(range(50)))
    pool = tree.commit(plan, now_s=0.0)
    tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(9), gen=1)
    book.claim(SeqId(9), pool.pool_id, tree=tree)
    assert account(tree, {}, book).total_cells == 50
    book.observe(slot(0, 60, task=1))  # it decodes on
    assert account(tree, {}, book).slot_cells[SlotId(0)] == 10
    book.observe(slot(0, 60, task=2, reused=20))  # another prompt, the first 20 tokens are the same
    accounts = account(tree, {}, book)
    assert (accounts.own_cells, accounts.slot_cells) == ({pool.pool_id: 50}, {0: 40})
    book.observe(SlotFacts(SlotId(0), 0, [(2, 20)], None, 0))  # purged
    assert account(tree, {}, book).total_cells == 50


def test_what_is_released_belongs_to_who_shares_it_and_stays() -> None:
    """A root made from a session's slot shares cells with the session's pool without being its child."""
    tree, book = PoolTree(), CellBook()
    old = add_root(tree, toks(range(100)))
    make_resident(tree, book, old)
    book.observe(slot(0, 120, task=1, reused=100, pool=old, n=100))
    book.snapshot(SeqId(9), 1, 120, SlotId(0))
    new = add_root(tree, toks(range(120)))
    tree.set_residency(new.pool_id, "resident", seq_id=SeqId(9), gen=1)
    book.claim(SeqId(9), new.pool_id, tree=tree)
    assert account(tree, {}, book).own_cells == {old.pool_id: 100, new.pool_id: 20}
    tree.release(old.pool_id)
    book.freed(SeqId(int(old.pool_id)))
    book.claim(SeqId(9), new.pool_id, tree=tree)
    assert account(tree, {}, book).own_cells == {new.pool_id: 120}


def test_what_nobody_remembers_keeps_no_cell_from_its_owner() -> None:
    """A pool of a slot whose cells an earlier pool owned owns them, once that one is released and forgotten."""
    tree, book = PoolTree(), CellBook()
    book.observe(slot(0, 50, task=1))
    for seq_id, n_tokens in ((8, 40), (9, 30)):
        book.snapshot(SeqId(seq_id), 1, n_tokens, SlotId(0))
        pool = add_root(tree, toks(range(n_tokens)))
        tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(seq_id), gen=1)
        book.claim(SeqId(seq_id), pool.pool_id, tree=tree)
        if seq_id == 8:
            tree.release(pool.pool_id)
            book.freed(SeqId(8))
    accounts = account(tree, {}, book)
    assert (accounts.own_cells, accounts.slot_cells) == ({pool.pool_id: 30}, {0: 20})


def test_stats_that_were_asked_for_before_an_order_do_not_undo_it() -> None:
    tree, now = PoolTree(), itertools.count()
    book = CellBook(lambda: next(now))
    pools = [add_root(tree, toks(range(n))) for n in (30, 40)]
    make_resident(tree, book, pools[0])
    book.observe(slot(0, 50, task=1, reused=30, pool=pools[0], n=30), asked_s=next(now))
    asked_s = next(now)
    book.snapshot(SeqId(9), 1, 52, SlotId(0))  # it decoded two more meanwhile
    book.observe(slot(0, 50, task=1, reused=30, pool=pools[0], n=30), asked_s)
    book.observe(slot(0, 53, task=1, reused=30, pool=pools[0], n=30), asked_s=next(now))
    assert count_cells([*book.slot_runs(SlotId(0)), *(book.runs(SeqId(9), 1) or ())]) == 53
    # The engine gives a sequence to another pool: what stats said of its number was about the one before.
    before, asked_s = book.slot_runs(SlotId(0)), next(now)
    evict(tree, book, pools[0])
    book.filled(SeqId(int(pools[0].pool_id)), 2, 40, pool_id=pools[1].pool_id, source=None, n_shared=0)
    book.observe(
        slot(0, 53, task=1, reused=30, pool=pools[0], n=30)._replace(pool_seq=SeqId(int(pools[0].pool_id))), asked_s
    )
    assert book.slot_runs(SlotId(0)) == before


def test_two_slots_that_hold_the_ends_of_one_filling_count_both() -> None:
    """As after a look at where everything lies: who filled it is gone, and was no pool."""
    tree, book = PoolTree(), CellBook()
    book.found_slot(SlotId(0), (Run(1, 0, 20), Run(2, 20, 40)), 1)
    book.found_slot(SlotId(1), (Run(3, 0, 10), Run(2, 10, 20)), 1)
    assert account(tree, {}, book).slot_cells == {0: 40, 1: 20}


def test_a_restored_family_shares_by_its_tree() -> None:
    tree, book, pools = family()
    before = account(tree, {}, book).own_cells
    book.clear()
    for pool in pools:
        assert pool.seq_id is not None
        book.adopt(pool.seq_id, 1, parts_of(tree, pool))
    assert account(tree, {}, book).own_cells == before


def lies(cells: list[int]) -> list[tuple[int, int, int]]:
    """Where they lie as the engine tells it: (start, end, first cell) of stretches of neighbours."""
    runs: list[tuple[int, int, int]] = []
    for position, cell in enumerate(cells):
        start, end, first = runs[-1] if runs else (0, 0, cell)
        if runs and first + end - start == cell:
            runs[-1] = (start, position + 1, first)
        else:
            runs.append((position, position + 1, cell))
    return runs


def test_of_what_lies_as_far_from_its_position_as_somebody_elses_every_cell_counts_for_its_own() -> None:
    """Streams that decode together take every other cell: so a cell of one is as far from its position as another
    cell, at another position, of the other one. The same between what is left of holes in the cache."""
    tree, book = PoolTree(), CellBook()
    root = add_root(tree, toks(range(100)))
    tree.set_residency(root.pool_id, "resident", seq_id=SeqId(9), gen=1)
    pooled = [*range(300, 360), *range(560, 600)]
    held = {
        0: [*range(50), *range(200, 240, 2)],
        1: [*range(50, 100), *range(201, 241, 2)],
        2: [*range(100, 120), *range(520, 550)],
    }
    of_pool, *of_slots = lying([lies(cells) for cells in (pooled, *held.values())])
    book.found(SeqId(9), 1, of_pool, parts_of(tree, root))
    for slot_id, runs in enumerate(of_slots):
        book.found_slot(SlotId(slot_id), runs, 7)
    accounts = account(tree, {}, book)
    assert accounts.slot_cells == {slot_id: len(cells) for slot_id, cells in held.items()}
    assert accounts.own_cells == {root.pool_id: 100}


def look(tree: PoolTree, book: CellBook, told: dict[PoolId, list[int]]) -> None:
    """The engine tells the cells of these pools, by position."""
    book.look()
    for pool_id, runs in zip(told, lying([lies(cells) for cells in told.values()]), strict=True):
        seq_id = SeqId(int(pool_id))
        tree.set_residency(pool_id, "resident", seq_id=seq_id, gen=1)
        book.found(seq_id, 1, runs, parts_of(tree, tree.get(pool_id)))


def test_a_look_says_nothing_of_who_lay_there_before() -> None:
    tree, book = PoolTree(), CellBook()
    first, second = add_root(tree, toks(range(40))), add_root(tree, toks(range(50)))
    look(tree, book, {first.pool_id: list(range(40))})
    assert account(tree, {}, book).own_cells == {first.pool_id: 40}
    evict(tree, book, first)
    look(tree, book, {second.pool_id: list(range(50))})
    assert account(tree, {}, book).own_cells == {second.pool_id: 50}


def test_a_pool_owns_no_cell_behind_those_that_it_shares() -> None:
    tree, book = PoolTree(), CellBook()
    short, long = add_root(tree, toks(range(40))), add_root(tree, toks(range(50)))
    look(tree, book, {short.pool_id: [*range(20), *range(100, 120)], long.pool_id: list(range(50))})
    assert account(tree, {}, book).own_cells == {short.pool_id: 40, long.pool_id: 30}


def runs_of(book: CellBook, *pools: Pool) -> list[Run]:
    held = [book.runs(pool.seq_id, pool.gen) for pool in pools if pool.seq_id is not None and pool.gen is not None]
    return [run for runs in held for run in runs or ()]


def test_a_slot_gives_only_what_nobody_else_holds() -> None:
    tree, book, (root, task, branch) = family()
    book.observe(slot(0, 105, task=1, reused=100, pool=root, n=100))
    book.observe(slot(1, 103, task=2, reused=100, pool=root, n=100))
    held = [book.slot_runs(SlotId(i)) for i in (0, 1)]
    assert count_freed(held[0], runs_of(book, root, task, branch)) == 5
    evict(tree, book, root)
    assert count_freed(held[0], runs_of(book, task, branch)) == 5  # a child's sequence holds all of the root
    evict(tree, book, task)
    assert count_freed(held[0], runs_of(book, branch)) == 45  # the other one holds the first 60
    evict(tree, book, branch)
    assert count_freed(held[0], held[1]) == 5
    assert count_freed([*held[0], *held[1]], []) == count_cells([*held[0], *held[1]]) == 108


def test_unknown_bytes_stay_unknown() -> None:
    assert kv_bytes(10, None) is None
    assert kv_bytes(10, 46080.0) == 460800


picks = st.integers(0, 10**6)


class BookAgainstCache(RuleBasedStateMachine):
    """The book against a cache that numbers every cell."""

    @initialize()
    def start(self) -> None:
        self.tree, self.fresh = PoolTree(), itertools.count()
        self.book = CellBook(self.now)
        self.asked: tuple[int, list[SlotFacts]] | None = None
        self.seqs: dict[int, list[int]] = {}
        self.slots: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.gone: dict[PoolId, Gone] = {}
        self.n_tasks = 0

    def now(self) -> int:
        return next(self.fresh)

    def pool(self, pick: int, of: Any = None) -> Pool:
        pools = list(of if of is not None else self.tree)
        return pools[pick % len(pools)]

    def cells(self, n: int) -> list[int]:
        return [next(self.fresh) for _ in range(n)]

    @rule(n=st.integers(1, 9))
    def create(self, n: int) -> None:
        self.bring(add_root(self.tree, toks(*[next(self.fresh) % 7 for _ in range(n)])), None, 0)

    @precondition(lambda self: len(self.tree))
    @rule(pick=picks, at=st.integers(1, 20), n=st.integers(1, 9))
    def fork(self, pick: int, at: int, n: int) -> None:
        parent = self.pool(pick)
        at = min(at, parent.prefix_len)
        child = extend(self.tree, parent.pool_id, toks(*range(n)), branch_pos=at)
        self.bring(child, self.tree.holder(parent.pool_id, at), at)

    def bring(self, pool: Pool, source: Pool | None, n_shared: int) -> None:
        seq_id = next(i for i in itertools.count(10) if i not in self.seqs)
        n_shared = n_shared if source is not None else 0
        head = self.seqs[int(source.seq_id or 0)][:n_shared] if source is not None else []
        from_seq = source.seq_id if source is not None else None
        self.seqs[seq_id] = head + self.cells(pool.prefix_len - n_shared)
        self.tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(seq_id), gen=1)
        self.book.filled(SeqId(seq_id), 1, pool.prefix_len, pool_id=pool.pool_id, source=from_seq, n_shared=n_shared)

    @precondition(lambda self: self.tree.residents())
    @rule(pick=picks)
    def evict(self, pick: int) -> None:
        pool = self.pool(pick, self.tree.residents())
        del self.seqs[int(pool.seq_id or 0)]
        evict(self.tree, self.book, pool)

    @precondition(lambda self: any(pool.seq_id is None for pool in self.tree))
    @rule(pick=picks, alone=st.booleans())
    def bring_back(self, pick: int, alone: bool) -> None:
        pool = self.pool(pick, [pool for pool in self.tree if pool.seq_id is None])
        source = None
        if not alone and not pool.is_root:
            source = self.tree.holder(pool.parent, pool.branch_pos)
        self.bring(pool, source, pool.branch_pos)

    @precondition(lambda self: len(self.tree))
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        released = self.tree.release(self.pool(pick).pool_id, recursive=True)
        for pool in released:
            self.gone[pool.pool_id] = Gone(pool.pool_id, pool.name, pool.parent, pool.branch_pos, pool.prefix_len)
            if pool.seq_id is not None:
                del self.seqs[int(pool.seq_id)]
                self.book.freed(pool.seq_id)
        for pool in self.tree.residents():
            assert pool.seq_id is not None
            self.book.claim(pool.seq_id, pool.pool_id, tree=self.tree)

    @rule(slot_id=st.integers(0, 2), reuse=st.integers(0, 30), more=st.integers(1, 9), pick=picks, attach=st.booleans())
    def task(self, slot_id: int, reuse: int, more: int, pick: int, attach: bool) -> None:
        self.n_tasks += 1
        self.asked = None
        held, pool, n_pool = self.slots[slot_id], None, 0
        held = held[: min(reuse, len(held))]
        if attach and self.tree.residents():
            pool = self.pool(pick, self.tree.residents())
            n_pool = min(max(1, reuse), pool.prefix_len)
            held = self.seqs[int(pool.seq_id or 0)][:n_pool] + held[n_pool:]
        n_reused = len(held)
        self.slots[slot_id] = held + self.cells(more)
        self.book.observe(slot(slot_id, n_reused + more, task=self.n_tasks, reused=n_reused, pool=pool, n=n_pool))

    @rule(n=st.integers(1, 9))
    def decode_in_turns(self, n: int) -> None:
        self.asked = None
        before = {slot_id: len(cells) for slot_id, cells in self.slots.items()}
        for _ in range(n):
            for cells in self.slots.values():
                cells.extend(self.cells(1))
        for slot_id, n_reused in before.items():
            self.n_tasks += 1
            self.book.observe(slot(slot_id, n_reused + n, task=self.n_tasks, reused=n_reused))

    @rule()
    def begin_the_books_anew(self) -> None:
        """Another proxy comes, and the engine tells it where everything lies."""
        self.book, self.gone = CellBook(self.now), {}
        self.tell_where_everything_lies()

    @rule()
    def tell_where_everything_lies(self) -> None:
        """The books go on."""
        residents = self.tree.residents()
        told = [*(self.seqs[int(pool.seq_id or 0)] for pool in residents), *self.slots.values()]
        self.book.look()
        runs = lying([lies(cells) for cells in told])
        for pool, held in zip(residents, runs, strict=False):
            self.book.found(SeqId(int(pool.seq_id or 0)), 1, held, parts_of(self.tree, pool))
        for slot_id, held in zip(self.slots, runs[len(residents) :], strict=True):
            self.book.found_slot(SlotId(slot_id), held, self.n_tasks)

    @rule()
    def ask(self) -> None:
        """Stats as of now. They arrive after what is ordered from here on, if no newer ones do."""
        facts = []
        for slot_id, cells in self.slots.items():
            starts = [(self.seqs[int(p.seq_id or 0)][0], p) for p in self.tree.residents()]
            pool = next((p for first, p in starts if cells[:1] == [first]), None)
            same = zip(cells, self.seqs[int(pool.seq_id or 0)] if pool is not None else (), strict=False)
            n_pool = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], same))
            facts.append(SlotFacts(SlotId(slot_id), len(cells), [], pool.seq_id if pool is not None else None, n_pool))
        self.asked = self.now(), facts

    @precondition(lambda self: self.asked is not None)
    @rule()
    def hear_late(self) -> None:
        assert self.asked is not None
        (asked_s, told), self.asked = self.asked, None
        for facts in told:
            self.book.observe(facts, asked_s)

    @precondition(lambda self: self.gone)
    @rule()
    def forget_released(self) -> None:
        for pool_id in self.gone.keys() - still_needed(self.gone, self.book, account(self.tree, self.gone, self.book)):
            del self.gone[pool_id]

    @rule(slot_id=st.integers(0, 2))
    def purge(self, slot_id: int) -> None:
        self.slots[slot_id], self.asked = [], None
        self.book.observe(SlotFacts(SlotId(slot_id), 0, [], None, 0))

    @rule(slot_id=st.integers(0, 2), n=st.integers(0, 20), pick=picks, behind=st.booleans())
    def load(self, slot_id: int, n: int, pick: int, behind: bool) -> None:
        """A saved state comes into a slot, or the slot is emptied."""
        source, n_shared = None, 0
        if behind and self.tree.residents():
            pool = self.pool(pick, self.tree.residents())
            source, n_shared = pool.seq_id, min(n, pool.prefix_len)
        head = self.seqs[int(source)][:n_shared] if source is not None else []
        self.slots[slot_id] = head + self.cells(n - n_shared)
        self.book.refilled(SlotId(slot_id), n, source=source, n_shared=n_shared)

    @precondition(lambda self: any(self.slots.values()))
    @rule(pick=picks, n_decoded=st.integers(0, 3), less=st.integers(0, 9), below=st.booleans())
    def snapshot(self, pick: int, n_decoded: int, less: int, below: bool) -> None:
        """Of what a slot holds by now, or of the beginning of it."""
        slot_id = self.pool_slot(pick)
        seq_id = next(i for i in itertools.count(10) if i not in self.seqs)
        if less == 0:
            self.slots[slot_id].extend(self.cells(n_decoded))
        n_tokens = max(1, len(self.slots[slot_id]) - less)
        self.seqs[seq_id] = self.slots[slot_id][:n_tokens]
        tokens = [next(self.fresh) % 7 for _ in range(n_tokens)]
        if below and len(self.tree) and n_tokens > 1:
            parent = self.pool(pick)
            at = min(parent.prefix_len, n_tokens - 1)
            pool = extend(self.tree, parent.pool_id, toks(*tokens[at:]), branch_pos=at)
        else:
            pool = add_root(self.tree, toks(*tokens))
        self.book.snapshot(SeqId(seq_id), 1, n_tokens, SlotId(slot_id))
        self.tree.set_residency(pool.pool_id, "resident", seq_id=SeqId(seq_id), gen=1)
        self.book.claim(SeqId(seq_id), pool.pool_id, tree=self.tree)

    def pool_slot(self, pick: int) -> int:
        full = [slot_id for slot_id, cells in self.slots.items() if cells]
        return full[pick % len(full)]

    @invariant()
    def every_cell_once(self) -> None:
        used = set().union(*self.seqs.values(), *self.slots.values())
        accounts = account(self.tree, self.gone, self.book)
        assert accounts.total_cells == len(used)
        assert all(pool_id in self.tree for pool_id in accounts.own_cells)
        self.book.forget()
        runs = {slot_id: self.book.slot_runs(SlotId(slot_id)) for slot_id in self.slots}
        of_pools = runs_of(self.book, *self.tree.residents())
        staying = set().union(*self.seqs.values(), self.slots[2])
        going = set(self.slots[0]) | set(self.slots[1])
        assert count_freed([*runs[0], *runs[1]], [*of_pools, *runs[2]]) == len(going - staying)
        assert count_cells([*of_pools, *runs[2]]) == len(staying)
        for slot_id, cells in self.slots.items():
            assert length(self.book.slot_runs(SlotId(slot_id))) == len(cells)


TestBookAgainstCache = BookAgainstCache.TestCase
TestBookAgainstCache.settings = settings(stateful_step_count=30)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 20))
def test_parts_cover_a_prefix_without_a_gap(steps: list[int], n_own: int) -> None:
    tree = PoolTree()
    pool = add_root(tree, toks(range(n_own)))
    for at in steps:
        pool = extend(tree, pool.pool_id, toks(1, 2, 3), branch_pos=min(at, pool.prefix_len))
    parts = parts_of(tree, pool)
    assert parts[0][1] == 0
    assert parts[-1][2] == pool.prefix_len
    assert all(a[2] == b[1] for a, b in itertools.pairwise(parts))
