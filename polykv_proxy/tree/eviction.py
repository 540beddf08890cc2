"""Who leaves the cache first when cells are needed, and how many cells the pools hold. Pure.

The order, among resident pools that are neither pinned nor in use:
    1. those whose cells nobody below holds too: leaves before parents, since a parent's cells live on in its heirs;
    2. then automatic ones, which nobody ordered;
    3. then the least recently used;
    4. then the deepest, then the youngest.
A pool all of whose cells an heir holds as well is no victim: evicting it would free nothing.

Costs O(resident pools * depth), however many pools there are: an engine has at most 256 sequences.
"""

from collections.abc import Collection, Iterable, Sequence

from polykv_proxy.ids import PoolId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.tree import PoolTree


def held_cells(tree: PoolTree, holders: Iterable[Pool]) -> int:
    """Count the cells that the sequences of these pools hold together: each token once, by its owner."""
    return sum(max(0, end - tree.get(owner).branch_pos) for owner, end in _reach(tree, holders).items())


def choose_victim(tree: PoolTree, residents: Sequence[Pool], in_use: Collection[PoolId]) -> Pool | None:
    """Give the pool to evict first; None when there is none. ``residents``: all that have a sequence."""
    of_heirs: dict[PoolId, int] = {}
    for pool in residents:
        _climb(tree, pool, of_heirs)
    victims = [
        pool
        for pool in residents
        if not pool.pin and pool.pool_id not in in_use and of_heirs.get(pool.pool_id, 0) < pool.prefix_len
    ]
    return min(victims, key=lambda pool: _order(pool, of_heirs), default=None)


def _order(pool: Pool, of_heirs: dict[PoolId, int]) -> tuple[bool, bool, float, int, int]:
    return (pool.pool_id in of_heirs, not pool.auto, pool.last_access_s, -pool.depth, -pool.pool_id)


def _reach(tree: PoolTree, holders: Iterable[Pool]) -> dict[PoolId, int]:
    """Up to which position somebody holds each pool's prefix."""
    reach: dict[PoolId, int] = {}
    for pool in holders:
        reach[pool.pool_id] = max(reach.get(pool.pool_id, 0), pool.prefix_len)
        _climb(tree, pool, reach)
    return reach


def _climb(tree: PoolTree, pool: Pool, reach: dict[PoolId, int]) -> None:
    """Note what this pool's sequence holds of the pools above it."""
    end = pool.branch_pos
    for above in tree.ancestors(pool.pool_id):
        reach[above.pool_id] = max(reach.get(above.pool_id, 0), end)
        end = min(end, above.branch_pos)
