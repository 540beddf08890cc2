"""One pool as the journal keeps it, and the checksums that tell a damaged row.

Shapes:  own [L - D] tokens of [D, L), kept as little-endian int32
Units:   *_ts Unix seconds
"""

import json
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from polykv_proxy.ids import PoolId

if TYPE_CHECKING:
    Tokens = array[int]
else:  # ``array`` cannot be subscripted at run time before Python 3.12
    Tokens = array

TOKEN_BYTES = 4
_BIG_ENDIAN = sys.byteorder == "big"


class JournaledPool(Protocol):
    """What the journal reads of a pool. ``*_s``: seconds of the clock that the caller uses everywhere."""

    @property
    def pool_id(self) -> PoolId: ...
    @property
    def parent(self) -> PoolId: ...
    @property
    def branch_pos(self) -> int: ...
    @property
    def own(self) -> Tokens: ...
    @property
    def tokens_hash(self) -> int: ...
    @property
    def name(self) -> str | None: ...
    @property
    def pin(self) -> bool: ...
    @property
    def ttl_s(self) -> float | None: ...
    @property
    def auto(self) -> bool: ...
    @property
    def created_s(self) -> float: ...
    @property
    def last_access_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """``tokens_hash``: XXH64 of the whole prefix [0, L). D = ``branch_pos``; a root's ``parent`` is -1.

    ``policy``: its own admission policy, as it was given to the journal; only known of rows that were loaded.
    """

    pool_id: PoolId
    parent: PoolId
    branch_pos: int
    own: Tokens = field(repr=False)
    tokens_hash: int
    name: str | None = None
    pin: bool = False
    ttl_s: float | None = None
    auto: bool = False
    created_ts: float
    last_access_ts: float
    policy: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, pool: JournaledPool, unix_offset_s: float) -> "PoolRow":
        """``unix_offset_s``: Unix time minus the clock of the pool's times."""
        return cls(
            pool_id=pool.pool_id,
            parent=pool.parent,
            branch_pos=pool.branch_pos,
            own=pool.own,
            tokens_hash=pool.tokens_hash,
            name=pool.name,
            pin=pool.pin,
            ttl_s=None if pool.ttl_s is None else float(pool.ttl_s),
            auto=pool.auto,
            created_ts=pool.created_s + unix_offset_s,
            last_access_ts=pool.last_access_s + unix_offset_s,
        )

    @property
    def prefix_len(self) -> int:
        return self.branch_pos + len(self.own)


def pack_tokens(tokens: Tokens) -> bytes:
    """Lay tokens out as little-endian int32, as the engine hashes them."""
    if not _BIG_ENDIAN:
        return tokens.tobytes()
    swapped = array("i", tokens)
    swapped.byteswap()
    return swapped.tobytes()


def unpack_tokens(raw: bytes) -> Tokens:
    tokens = array("i")
    tokens.frombytes(raw)
    if _BIG_ENDIAN:
        tokens.byteswap()
    return tokens


def signed(value: int) -> int:
    """SQLite's integers are signed; hashes are not."""
    return value - (1 << 64) if value >= 1 << 63 else value


def checksum(values: tuple[object, ...]) -> int:
    """Checksum of one row's values, their types included, as SQLite can keep it."""
    return signed(xxhash.xxh64_intdigest(repr(values).encode("utf-8", "surrogatepass")))


def add_up(total: int, checksums: int) -> int:
    """Sum of checksums of many rows (or, negative, minus one): also tells a row that is missing or came back."""
    return signed((total + checksums) % (1 << 64))


def seal_policy(pool_id: PoolId, policy: Mapping[str, Any]) -> tuple[str, int]:
    """A policy as the text of its row, and the checksum that is part of it."""
    said = json.dumps(dict(policy), sort_keys=True, separators=(",", ":"))
    kept = checksum((int(pool_id), said))
    return f"{kept % (1 << 64):016x} {said}", kept


def unseal_policy(pool_id: PoolId, text: object) -> tuple[dict[str, Any], int]:
    """The policy and the checksum of a row. Raises ValueError when it is not as it was written."""
    kept, _, said = text.partition(" ") if isinstance(text, str) else ("", "", "")
    if f"{checksum((int(pool_id), said)) % (1 << 64):016x}" != kept:
        raise ValueError(f"the policy of pool {pool_id} is damaged")
    policy = json.loads(said)
    if not isinstance(policy, dict):
        raise ValueError(f"the policy of pool {pool_id} is no object")
    return policy, signed(int(kept, 16))
