"""Who leaves the cache first, who stays because somebody needs him, and how many cells the pools hold. Pure.

Who stays: pools in use and everything above them (an interior pool is pinned while a session is attached below it),
pinned pools, and whoever holds the cells for one of these.

Who goes first, among the resident pools that do not stay:
    1. those whose cells nobody below holds too: leaves before parents, since a parent's cells live on in its heirs;
    2. then those whose grace is over;
    3. then automatic ones, which nobody ordered;
    4. then the least recently used;
    5. then the deepest, then the youngest.
A pool all of whose cells an heir holds as well gives no cells. It gives its sequence, and at no cost: the heir serves
it. So when sequences run out, these come before everybody else, also while sessions are attached to them.

Costs O(resident pools * depth), however many pools there are: an engine has at most 256 sequences.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from polykv_proxy.ids import PoolId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree


def held_cells(tree: PoolTree, holders: Iterable[Pool], plans: Iterable[tuple[PoolId, int, int]] = ()) -> int:
    """Count the cells that the prefixes of these pools take together: each token once, by its owner.

    ``plans``: pools that are not on the tree yet, as (parent or ROOT, branch_pos, prefix_len).
    """
    reach: dict[PoolId, int] = {}
    for pool in holders:
        _raise(reach, pool.pool_id, pool.prefix_len)
        _climb(tree, pool.parent, pool.branch_pos, reach)
    n_planned = 0
    for parent, branch_pos, prefix_len in plans:
        n_planned += prefix_len - branch_pos
        _climb(tree, parent, branch_pos, reach)
    return n_planned + sum(max(0, end - tree.get(owner).branch_pos) for owner, end in reach.items())


def with_ancestors(tree: PoolTree, pool_ids: Iterable[PoolId]) -> set[PoolId]:
    """Give these pools, as far as they are on the tree, and all pools above them."""
    found: set[PoolId] = set()
    for pool_id in pool_ids:
        pool = tree.find(pool_id)
        while pool is not None and pool.pool_id not in found:
            found.add(pool.pool_id)
            pool = None if pool.is_root else tree.get(pool.parent)
    return found


def with_holders(tree: PoolTree, pool_ids: Collection[PoolId]) -> set[PoolId]:
    """Give these pools and, for those without a sequence of their own, somebody whose sequence holds them."""
    reach: dict[PoolId, int] = {}
    found = set(pool_ids)

    def note(pool: Pool) -> None:
        _raise(reach, pool.pool_id, pool.prefix_len)
        _climb(tree, pool.parent, pool.branch_pos, reach)

    pools = sorted((tree.get(pool_id) for pool_id in pool_ids), key=lambda pool: -pool.depth)
    for pool in pools:
        if pool.seq_id is not None:
            note(pool)
    for pool in pools:  # deepest first: who holds a leaf often holds what is above it
        if reach.get(pool.pool_id, 0) < pool.prefix_len and (holder := tree.holder(pool.pool_id)) is not None:
            found.add(holder.pool_id)
            note(holder)
    return found


def choose_victim(
    tree: PoolTree, residents: Sequence[Pool], staying: Collection[PoolId], expired: Collection[PoolId] = ()
) -> Pool | None:
    """Give the pool to evict first for its cells; None when there is none.

    ``residents``: all that have a sequence. ``staying``: who must not go, besides pinned pools.
    """
    of_heirs = _of_heirs(tree, residents)
    victims = [
        pool
        for pool in residents
        if not pool.pin and pool.pool_id not in staying and of_heirs.get(pool.pool_id, 0) < pool.prefix_len
    ]
    return min(victims, key=lambda pool: _order(pool, of_heirs, expired), default=None)


def choose_spare(tree: PoolTree, residents: Sequence[Pool], moving: Collection[PoolId]) -> Pool | None:
    """Give a pool that can do without its sequence at no cost, because an heir's holds all of it; unpinned ones first.

    ``moving``: whose sequence is named in an order or a request under way.
    """
    of_heirs = _of_heirs(tree, residents)
    spare = [
        pool for pool in residents if pool.pool_id not in moving and of_heirs.get(pool.pool_id, 0) >= pool.prefix_len
    ]
    return min(spare, key=lambda pool: (pool.pin, pool.depth, pool.pool_id), default=None)


def _order(
    pool: Pool, of_heirs: Mapping[PoolId, int], expired: Collection[PoolId]
) -> tuple[bool, bool, bool, float, int, int]:
    return (
        pool.pool_id in of_heirs,
        pool.pool_id not in expired,
        not pool.auto,
        pool.last_use_s,
        -pool.depth,
        -pool.pool_id,
    )


def _of_heirs(tree: PoolTree, residents: Iterable[Pool]) -> dict[PoolId, int]:
    """Up to which position sequences of pools below hold each pool's prefix."""
    reach: dict[PoolId, int] = {}
    for pool in residents:
        _climb(tree, pool.parent, pool.branch_pos, reach)
    return reach


def _climb(tree: PoolTree, parent: PoolId, end: int, reach: dict[PoolId, int]) -> None:
    """Note what the first ``end`` tokens of a pool below ``parent`` hold of the pools above."""
    pool = tree.find(parent)
    while pool is not None and end:
        _raise(reach, pool.pool_id, end)
        end = min(end, pool.branch_pos)
        pool = tree.find(pool.parent)


def _raise(reach: dict[PoolId, int], pool_id: PoolId, end: int) -> None:
    reach[pool_id] = max(reach.get(pool_id, 0), end)
