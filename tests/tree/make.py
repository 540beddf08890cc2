"""Makers of small trees for the tests of this folder."""

from array import array

from polykv_proxy.ids import PoolId, SeqId
from polykv_proxy.tree.pool import Pool, Residency
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.tree.tree import PoolTree


def toks(*parts: int | range) -> Tokens:
    """``toks(range(3), 9)`` → 0 1 2 9"""
    flat = array("i")
    for part in parts:
        flat.extend([part] if isinstance(part, int) else part)
    return flat


def add_root(tree: PoolTree, tokens: Tokens, *, name: str | None = None) -> Pool:
    return tree.commit(tree.plan_root(tokens, name=name), now_s=0.0)


def add_fork(tree: PoolTree, parent: PoolId, tokens: Tokens, *, branch_pos: int | None = None) -> Pool:
    return tree.commit(tree.plan_fork(parent, tokens, branch_pos=branch_pos), now_s=0.0)


def extend(tree: PoolTree, parent: PoolId, own: Tokens, *, branch_pos: int | None = None) -> Pool:
    return tree.commit(tree.plan_fork_own(parent, own, branch_pos=branch_pos), now_s=0.0)


def settle(tree: PoolTree, pool: Pool, residency: Residency, seq_id: int = 6) -> None:
    tree.set_residency(pool.pool_id, residency, seq_id=SeqId(seq_id) if residency == "resident" else None)
