"""The tree against a naive model: a dict of full token tuples, searched from end to end."""

from array import array
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polykv_proxy.errors import NameTaken, PoolHasChildren, PoolInUse, PrefixMismatch, RequestError
from polykv_proxy.ids import ROOT, PoolId, SeqId
from polykv_proxy.tree import index, run
from polykv_proxy.tree.pool import PoolPlan, Residency
from polykv_proxy.tree.prefix import hash_tokens
from polykv_proxy.tree.tree import PoolTree

RANKS: list[Residency] = ["resident", "materializing", "warm", "cold"]

# Few different tokens and runs: prefixes collide all the time, labels get long enough to be cut.
runs = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=5).map(
    lambda parts: [token for token, n in parts for _ in range(n)]
)
names = st.none() | st.sampled_from(["alpha", "beta", "gamma"])
picks = st.integers(0, 10**6)
mostly = st.sampled_from([True, True, True, False])
positions = st.none() | st.integers(0, 40)


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class NaivePool:
    def __init__(self, parent: int, branch_pos: int, tokens: tuple[int, ...], name: str | None, depth: int):
        self.parent, self.branch_pos, self.tokens, self.name, self.depth = parent, branch_pos, tokens, name, depth
        self.residency: Residency = "cold"


class TreeAgainstModel(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.tree = PoolTree()
        self.model: dict[int, NaivePool] = {}
        self.plans: list[PoolPlan] = []
        self.seen_ids: set[int] = set()

    def pick(self, pick: int) -> PoolId:
        return PoolId(sorted(self.model)[pick % len(self.model)])

    def names_taken(self) -> set[str]:
        taken = {pool.name for pool in self.model.values()} | {plan.name for plan in self.plans}
        return {name for name in taken if name is not None}

    def keep(self, plan: PoolPlan, commit: bool, lower_to: int | None = None) -> None:
        assert plan.pool_id not in self.seen_ids
        self.seen_ids.add(plan.pool_id)
        self.plans.append(plan)
        if commit:
            self.commit_plan(len(self.plans) - 1, lower_to)

    def commit_plan(self, at: int, lower_to: int | None) -> None:
        plan = self.plans.pop(at)
        real = plan.branch_pos if lower_to is None else min(plan.branch_pos, lower_to)
        self.tree.commit(plan, now_s=1.0, branch_pos=real)
        depth = 0 if plan.parent == ROOT else self.model[plan.parent].depth + 1
        self.model[plan.pool_id] = NaivePool(plan.parent, real, tuple(plan.tokens), plan.name, depth)

    @rule(tokens=runs, name=names, commit=mostly)
    def create(self, tokens: list[int], name: str | None, commit: bool) -> None:
        if name in self.names_taken():
            with pytest.raises(NameTaken):
                self.tree.plan_root(array("i", tokens), name=name)
            return
        self.keep(self.tree.plan_root(array("i", tokens), name=name), commit)

    @precondition(lambda self: self.model)
    @rule(pick=picks, keep=st.integers(0, 40), tail=runs, branch_pos=positions, commit=mostly)
    def fork_full(self, pick: int, keep: int, tail: list[int], branch_pos: int | None, commit: bool) -> None:
        parent = self.pick(pick)
        tokens = self.model[parent].tokens[:keep] + tuple(tail)
        divergence = common(tokens, self.model[parent].tokens)
        packed = array("i", tokens)
        if divergence == 0:
            with pytest.raises(PrefixMismatch):
                self.tree.plan_fork(parent, packed, branch_pos=branch_pos)
            return
        d = divergence if branch_pos is None else branch_pos
        if not 0 < d <= len(self.model[parent].tokens) or d >= len(tokens):
            with pytest.raises(RequestError):
                self.tree.plan_fork(parent, packed, branch_pos=branch_pos)
        elif d > divergence:
            with pytest.raises(PrefixMismatch) as caught:
                self.tree.plan_fork(parent, packed, branch_pos=branch_pos)
            assert caught.value.divergence_pos == divergence
        else:
            plan = self.tree.plan_fork(parent, packed, branch_pos=branch_pos)
            assert (plan.branch_pos, tuple(plan.tokens)) == (d, tokens)
            self.keep(plan, commit)

    @precondition(lambda self: self.model)
    @rule(pick=picks, own=runs, branch_pos=positions, lower_to=st.none() | st.integers(0, 9))
    def fork_own(self, pick: int, own: list[int], branch_pos: int | None, lower_to: int | None) -> None:
        parent = self.pick(pick)
        known = self.model[parent].tokens
        d = len(known) if branch_pos is None else branch_pos
        if not 0 < d <= len(known):
            with pytest.raises(RequestError):
                self.tree.plan_fork_own(parent, array("i", own), branch_pos=branch_pos)
            return
        plan = self.tree.plan_fork_own(parent, array("i", own), branch_pos=branch_pos)
        assert tuple(plan.tokens) == known[:d] + tuple(own)
        self.keep(plan, True, lower_to)

    @precondition(lambda self: self.plans)
    @rule(pick=picks, commit=st.booleans(), lower_to=st.none() | st.integers(0, 9))
    def settle(self, pick: int, commit: bool, lower_to: int | None) -> None:
        at = pick % len(self.plans)
        if commit:
            self.commit_plan(at, lower_to)
        else:
            self.tree.drop(self.plans.pop(at))

    @precondition(lambda self: self.model)
    @rule(pick=picks, residency=st.sampled_from(RANKS))
    def set_residency(self, pick: int, residency: Residency) -> None:
        pool_id = self.pick(pick)
        self.tree.set_residency(pool_id, residency, seq_id=SeqId(7) if residency == "resident" else None)
        self.model[pool_id].residency = residency

    def below(self, pool_id: int) -> set[int]:
        found = {pool_id}
        while True:
            more = {i for i, pool in self.model.items() if pool.parent in found} - found
            if not more:
                return found
            found |= more

    @precondition(lambda self: self.model)
    @rule(pick=picks, recursive=st.booleans())
    def release(self, pick: int, recursive: bool) -> None:
        pool_id = self.pick(pick)
        below = self.below(pool_id)
        planned = {plan.parent for plan in self.plans}
        if not recursive and (len(below) > 1 or pool_id in planned):
            with pytest.raises(PoolHasChildren):
                self.tree.release(pool_id)
        elif below & planned:
            with pytest.raises(PoolInUse):
                self.tree.release(pool_id, recursive=True)
        else:
            released = [pool.pool_id for pool in self.tree.release(pool_id, recursive=recursive)]
            assert set(released) == below
            assert all(self.model[p].parent not in released[: released.index(p)] for p in released)
            for gone in released:
                del self.model[gone]

    @rule(prompt=runs, pick=picks, keep=st.integers(0, 60))
    def match(self, prompt: list[int], pick: int, keep: int) -> None:
        if self.model:
            prompt = [*self.model[self.pick(pick)].tokens[:keep], *prompt]
        self.check_match(tuple(prompt))

    @rule()
    def match_around_every_edge(self) -> None:
        """Leave every pool just before, at and after the positions where it begins, ends and its runs change."""
        for pool in list(self.model.values())[-8:]:
            changes = [i for i in range(1, len(pool.tokens)) if pool.tokens[i - 1] != pool.tokens[i]]
            for n in {1, pool.branch_pos, pool.branch_pos + 1, len(pool.tokens) - 1, len(pool.tokens), *changes[:4]}:
                self.check_match((*pool.tokens[:n], 9))

    def check_match(self, prompt: tuple[int, ...]) -> None:
        shared = {pool_id: common(prompt, pool.tokens) for pool_id, pool in self.model.items()}
        longest = max(shared.values(), default=0)
        whole = [len(pool.tokens) for pool_id, pool in self.model.items() if shared[pool_id] == len(pool.tokens)]
        contained = self.tree.match_whole(array("i", prompt))
        assert (contained.prefix_n_tokens if contained is not None else 0) == max(whole, default=0)
        if contained is not None:
            assert contained.whole
            assert self.model[contained.pool_id].tokens == prompt[: contained.prefix_n_tokens]
        match = self.tree.match(array("i", prompt))
        if longest == 0:
            assert match is None
            return
        order = [
            (len(pool.tokens) != longest, RANKS.index(pool.residency), pool.depth, pool_id)
            for pool_id, pool in self.model.items()
            if shared[pool_id] == longest
        ]
        beyond, _, _, best = min(order)
        assert match is not None
        assert (match.prefix_n_tokens, match.pool_id, match.whole) == (longest, best, not beyond)

    @precondition(lambda self: self.model)
    @rule(pick=picks, n=st.integers(1, 60))
    def holder(self, pick: int, n: int) -> None:
        pool_id = self.pick(pick)
        tokens = self.model[pool_id].tokens
        n = min(n, len(tokens))
        able = {i for i, p in self.model.items() if p.residency == "resident" and p.tokens[:n] == tokens[:n]}
        holder = self.tree.holder(pool_id, n)
        assert (holder is None) == (not able)
        if holder is not None:
            assert holder.pool_id in able

    @invariant()
    def holders_of_all(self) -> None:
        held = {i: holder.pool_id for i in self.model if (holder := self.tree.holder(PoolId(i))) is not None}
        assert {pool_id: pool.pool_id for pool_id, pool in self.tree.holders().items()} == held

    @invariant()
    def same_tree(self) -> None:
        assert {pool.pool_id for pool in self.tree} == set(self.model)
        assert {p.pool_id for p in self.tree.residents()} == {p.pool_id for p in self.tree if p.seq_id is not None}
        assert self.tree.depth() == 1 + max((pool.depth for pool in self.model.values()), default=-1)
        for pool_id, naive in self.model.items():
            pool = self.tree.get(pool_id)
            full = array("i", naive.tokens)
            assert self.tree.tokens(pool.pool_id) == full
            assert (pool.parent, pool.branch_pos, pool.prefix_len) == (naive.parent, naive.branch_pos, len(full))
            assert self.tree.hash_at(pool.pool_id, len(full)) == pool.tokens_hash == hash_tokens(full)
            assert self.tree.hash_at(pool.pool_id, 1) == hash_tokens(full[:1])
            if naive.name is not None:
                assert self.tree.get(naive.name) is pool
            continued = any(
                len(other.tokens) > len(full) and other.tokens[: len(full)] == naive.tokens
                for other in self.model.values()
            )
            assert self.tree.is_continued(pool.pool_id) == continued
            twins = {i for i, other in self.model.items() if other.tokens == naive.tokens}
            assert {twin.pool_id for twin in self.tree.twins(pool.pool_id)} == twins
            children = {child.pool_id for child in self.tree.children(pool.pool_id)}
            assert children == {i for i, other in self.model.items() if other.parent == pool_id}


TestTreeAgainstModel = TreeAgainstModel.TestCase
TestTreeAgainstModel.settings = settings(stateful_step_count=40)


class TestTreeOfShortRuns(TreeAgainstModel.TestCase):
    """The same, with an index whose blocks and runs are rearranged after a few pools."""

    settings = settings(stateful_step_count=40)

    def setUp(self) -> None:
        self.enterContext(patch.object(run, "BLOCK", 2))
        self.enterContext(patch.object(index, "MAX_CHANGES", 1))
