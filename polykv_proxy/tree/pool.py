"""One pool, and the plan of a pool that the engine is still making.

A pool never changes its tokens: they are given at birth. What does change (residency, counters, last access) is
bookkeeping about it. Residency is changed only by ``PoolTree.set_residency``, because the index orders pools by it.

Shapes:  own [L - D] tokens of [D, L); own_hashes [L - D], own_hashes[i] covers tokens[:D + i + 1]; tokens_hash covers
         the whole prefix [0, L): what the engine lists for a sequence that holds this pool
Units:   *_s seconds of the clock that the caller uses everywhere
Source:  design §3.1, §3.2
"""

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from polykv_proxy.errors import RequestError
from polykv_proxy.ids import ROOT, PoolId, SeqId
from polykv_proxy.tree.prefix import Hashes, Tokens

Residency = Literal["cold", "materializing", "resident", "warm"]
"""``resident``: cells in the cache. ``warm``: own range saved aside. ``cold``: tokens only."""

RESIDENCIES: tuple[Residency, ...] = get_args(Residency)

NAME_MAX = 128
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{{0,{NAME_MAX - 1}}}", re.ASCII)
_RESERVED = frozenset({"auto"})


@dataclass(slots=True, eq=False)
class Pool:
    """A node of the tree: D = ``branch_pos``, L = ``prefix_len``. Only a resident pool has ``seq_id`` and ``gen``.

    ``own_hashes`` None: it was restored, and hashes are made from its tokens when somebody asks (``PoolTree.hash_at``).
    """

    pool_id: PoolId
    parent: PoolId
    branch_pos: int
    prefix_len: int
    own: Tokens
    own_hashes: Hashes | None
    tokens_hash: int
    depth: int
    name: str | None = None
    pin: bool = False
    ttl_s: float | None = None
    auto: bool = False
    created_s: float = 0.0
    last_access_s: float = 0.0
    used_s: float = 0.0
    sent_away_s: float = float("-inf")
    """Its last use when somebody ordered it out of the cache of this start of the engine: until the next use it is not
    brought back unasked."""
    n_queries: int = 0
    n_hits: int = 0
    n_query_tokens: int = 0
    n_hit_tokens: int = 0
    seq_id: SeqId | None = None
    gen: int | None = None
    _residency: Residency = field(default="cold", repr=False)

    @property
    def residency(self) -> Residency:
        return self._residency

    @property
    def is_root(self) -> bool:
        return self.parent == ROOT

    @property
    def own_n_tokens(self) -> int:
        return self.prefix_len - self.branch_pos

    @property
    def last_use_s(self) -> float:
        """When it was last asked for, or last seen in use (by a session on it, or on a pool below it)."""
        return max(self.last_access_s, self.used_s)

    @property
    def label(self) -> str:
        """How a human calls it: the name, else the id."""
        return self.name if self.name is not None else str(self.pool_id)


@dataclass(frozen=True, slots=True, eq=False)
class PoolPlan:
    """A pool that is checked and has its id, but is not in the tree yet.

    Its name is taken and its parent stays until ``PoolTree.commit`` or ``PoolTree.drop``.

    Shapes:  tokens [L] the full prefix, as the engine wants it
    """

    pool_id: PoolId
    parent: PoolId
    branch_pos: int
    tokens: Tokens
    name: str | None

    @property
    def prefix_len(self) -> int:
        return len(self.tokens)

    @property
    def own_n_tokens(self) -> int:
        return len(self.tokens) - self.branch_pos


@dataclass(frozen=True, slots=True)
class Match:
    """Where a prompt fits best. ``whole``: the prompt starts with the pool's entire prefix (P == L)."""

    pool_id: PoolId
    prefix_n_tokens: int
    whole: bool


def check_name(name: str) -> str:
    """Check a pool's name, which stands in URLs, headers and metric labels and must never look like an id.

    Raises:  RequestError (400)
    """
    if name.isdigit():
        raise RequestError(
            f"name {name!r} is all digits: that is how pool ids look; begin it with a letter", param="name"
        )
    if name in _RESERVED:
        raise RequestError(f"name {name!r} is reserved", param="name")
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"name must be 1 to {NAME_MAX} of A-Z a-z 0-9 _ . : @ + - and start with a letter, a digit or _",
            param="name",
        )
    return name
