"""What happened to pools and is not on the disk: it goes out before anything else, so that the file stays whole.

A release that waits must not be overtaken: a parent's release would leave the row of its child alone, and a name that
is used again would be there twice. A pool that stays although it could not be written must be there before its forks.
"""

from collections.abc import Iterable, Sequence

from polykv_proxy.ids import PoolId
from polykv_proxy.store.changes import Added, Change, Changed, Released
from polykv_proxy.store.rows import JournaledPool, PoolRow


class Owed:
    def __init__(self) -> None:
        self._released: set[PoolId] = set()
        self._pools: dict[PoolId, tuple[JournaledPool, str]] = {}
        self._changes: dict[PoolId, Changed] = {}

    def __bool__(self) -> bool:
        return bool(self._released or self._pools or self._changes)

    def is_released(self, pool_id: PoolId) -> bool:
        return pool_id in self._released

    def is_pool(self, pool_id: PoolId) -> bool:
        return pool_id in self._pools

    def release(self, pool_ids: Iterable[PoolId]) -> None:
        for pool_id in pool_ids:
            self._pools.pop(pool_id, None)
            self._changes.pop(pool_id, None)
            self._released.add(pool_id)

    def pool(self, pool: JournaledPool, fingerprint: str) -> None:
        self._released.discard(pool.pool_id)
        self._pools[pool.pool_id] = (pool, fingerprint)

    def change(self, change: Changed) -> None:
        self._changes[change.pool_id] = change

    def other_model(self, fingerprint: str) -> None:
        """The tree of any other model was put away: pools that only it had are gone with it."""
        self.release([pool_id for pool_id, (_, of) in self._pools.items() if of != fingerprint])

    def first(self) -> list[Change]:
        """What goes before everything else, in one transaction with it."""
        changes: list[Change] = list(self._changes.values())
        return [Released(sorted(self._released)), *changes] if self._released else changes

    def pools(self, unix_offset_s: float) -> list[Added]:
        """Pools as they are now, parents before children (an id is never lower than its parent's)."""
        return [Added(PoolRow.of(pool, unix_offset_s), of) for _, (pool, of) in sorted(self._pools.items())]

    def paid(self, changes: Sequence[Change]) -> None:
        """These are on the disk."""
        for change in changes:
            match change:
                case Released(pool_ids):
                    self._released.difference_update(pool_ids)
                case Changed(pool_id) if self._changes.get(pool_id) is change:
                    del self._changes[pool_id]
                case Added(row):
                    self._pools.pop(row.pool_id, None)
