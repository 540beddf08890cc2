"""What may change in the journal, each in one transaction or together with others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polykv_proxy.ids import PoolId
from polykv_proxy.store.rows import PoolRow


@dataclass(frozen=True, slots=True)
class Added:
    row: PoolRow
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Released:
    pool_ids: Sequence[PoolId]


@dataclass(frozen=True, slots=True)
class Changed:
    pool_id: PoolId
    name: str | None
    pin: bool
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """None: the pool has no policy of its own any more."""

    pool_id: PoolId
    policy: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Replaced:
    """A new pool, the pools that it takes the place of, and what of the others changes with that: one step."""

    added: Added
    policy: Mapping[str, Any] | None
    changed: Sequence[Changed]
    released: Sequence[PoolId]


@dataclass(frozen=True, slots=True)
class Used:
    """Last uses, Unix seconds."""

    at_ts: Mapping[PoolId, float]


@dataclass(frozen=True, slots=True)
class Bound:
    """This model is the engine's now."""

    fingerprint: str


Change = Added | Released | Changed | PolicyChanged | Replaced | Used | Bound
