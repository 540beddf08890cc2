"""The ways a request can come to share a prefix, each beside the same thing done with stock's slot cache.

A scenario leaves a pool in the patched engine and says which prompt to send to it. Its twin leaves the same tokens in a
slot of the stock engine, by the same requests an agent would have sent there: so both caches were filled in the same
order and batches, and what stock's own cache does to an answer is the measure for what a pool may do. Where the pool
leaves holes in the cache, so does the twin: sums over cells that lie in another order round in another way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from .hooks import Engine
from .noise import Noise

TRUNK_LEN = 400
BRANCH_POS = 250
OWN_LEN = 120
TURN_LEN = 30
DEEP_POS = TRUNK_LEN + OWN_LEN // 2

POOLED_SLOT = 0
SOURCE_SLOT = 2
WARM_SLOT = 0


@dataclass(frozen=True)
class Texts:
    """The token sequences of one run, without meaning and without a common part."""

    trunk: list[int]
    own: list[int]
    second: list[int]
    turn: list[int]

    LENGTHS: ClassVar = (TRUNK_LEN, OWN_LEN, OWN_LEN, TURN_LEN)

    @classmethod
    def draw(cls, noise: Noise, seed: int) -> "Texts":
        return cls(*(noise(100 * seed + i, n) for i, n in enumerate(cls.LENGTHS)))


@dataclass(frozen=True)
class Shared:
    """A pool to attach to: its sequence, the prompt that shares with it, and how many tokens it may share."""

    seq: int
    prompt: list[int]
    shared_n: int
    limit: int = -1


@dataclass(frozen=True)
class Scenario:
    """``twins``: where a pool may lie in more than one place, one each; the largest divergence is the measure."""

    name: str
    pooled: Callable[[Engine, Texts], Shared]
    twins: tuple[Callable[[Engine, Texts], None], ...]


def _root(engine: Engine, texts: Texts) -> Shared:
    root = engine.materialize(texts.trunk)
    return Shared(root["seq"], texts.trunk + texts.turn, TRUNK_LEN)


def _stock_root(engine: Engine, texts: Texts) -> None:
    engine.warm(texts.trunk, WARM_SLOT)


def _diverging(engine: Engine, texts: Texts) -> Shared:
    """P < L because the prompt leaves the pool's tokens."""
    root = engine.materialize(texts.trunk)
    return Shared(root["seq"], texts.trunk[:BRANCH_POS] + texts.turn, BRANCH_POS)


def _limited(engine: Engine, texts: Texts) -> Shared:
    """P < L because the request says so."""
    root = engine.materialize(texts.trunk)
    return Shared(root["seq"], texts.trunk + texts.turn, BRANCH_POS, limit=BRANCH_POS)


def _stock_limited(engine: Engine, texts: Texts) -> None:
    engine.warm(texts.trunk[:BRANCH_POS], WARM_SLOT)
    engine.warm(texts.trunk[BRANCH_POS:], SOURCE_SLOT)


def _branch(engine: Engine, texts: Texts) -> Shared:
    root = engine.materialize(texts.trunk)
    tokens = texts.trunk[:BRANCH_POS] + texts.own
    branch = engine.materialize(tokens, parent=root["seq"], branch_pos=BRANCH_POS)
    return Shared(branch["seq"], tokens + texts.turn, len(tokens))


def _stock_branch(engine: Engine, texts: Texts) -> None:
    engine.warm(texts.trunk, WARM_SLOT)
    engine.warm(texts.trunk[:BRANCH_POS] + texts.own, WARM_SLOT)


def _stock_parted_branch(engine: Engine, texts: Texts) -> None:
    """The two halves of the prefix apart, as they are when the parent keeps what lies between them."""
    engine.warm(texts.trunk[:BRANCH_POS], WARM_SLOT)
    engine.warm(texts.trunk[BRANCH_POS:], SOURCE_SLOT)
    engine.warm(texts.trunk[:BRANCH_POS] + texts.own, WARM_SLOT)


def _extend(engine: Engine, texts: Texts) -> Shared:
    root = engine.materialize(texts.trunk)
    tokens = texts.trunk + texts.own
    child = engine.materialize(tokens, parent=root["seq"], branch_pos=TRUNK_LEN)
    return Shared(child["seq"], tokens + texts.turn, len(tokens))


def _stock_extend(engine: Engine, texts: Texts) -> None:
    engine.warm(texts.trunk, WARM_SLOT)
    engine.warm(texts.trunk + texts.own, WARM_SLOT)


def _snapshot(engine: Engine, texts: Texts) -> Shared:
    """A pool made of what an agent has in its slot."""
    tokens = texts.trunk + texts.own
    engine.warm(texts.trunk, SOURCE_SLOT)
    engine.warm(tokens, SOURCE_SLOT)
    taken = engine.snapshot(SOURCE_SLOT)
    assert taken["n_tokens"] == len(tokens)
    return Shared(taken["seq"], tokens + texts.turn, len(tokens))


def _attached_snapshot(engine: Engine, texts: Texts) -> Shared:
    """A pool made of an agent that itself shares with a pool."""
    tokens = texts.trunk + texts.own
    root = engine.materialize(texts.trunk)
    engine.ask(tokens, 0, slot=SOURCE_SLOT, pool=root["seq"])
    taken = engine.snapshot(SOURCE_SLOT)
    return Shared(taken["seq"], tokens + texts.turn, len(tokens))


def _parent_freed(engine: Engine, texts: Texts) -> Shared:
    """A branch whose parent is gone, with the parent's own cells written over before the branch is used."""
    root = engine.materialize(texts.trunk)
    tokens = texts.trunk[:BRANCH_POS] + texts.own
    branch = engine.materialize(tokens, parent=root["seq"], branch_pos=BRANCH_POS)
    engine.free(root["seq"])
    engine.warm(texts.second, SOURCE_SLOT)
    return Shared(branch["seq"], tokens + texts.turn, len(tokens))


def _stock_aged_branch(engine: Engine, texts: Texts) -> None:
    """The same cells in the same places: what was between the two halves of the prefix belongs to somebody else now."""
    _stock_parted_branch(engine, texts)
    engine.erase(SOURCE_SLOT)
    engine.warm(texts.second, SOURCE_SLOT)


def _stock_moved_branch(engine: Engine, texts: Texts) -> None:
    """The prefix behind cells that were freed: what comes next is written in front of it."""
    engine.warm(texts.trunk, SOURCE_SLOT)
    engine.warm(texts.trunk[:BRANCH_POS] + texts.own, WARM_SLOT)
    engine.erase(SOURCE_SLOT)
    engine.warm(texts.second, SOURCE_SLOT)


def _deep(engine: Engine, texts: Texts) -> Shared:
    """root → extend → branch inside the extension, both ancestors freed."""
    root = engine.materialize(texts.trunk)
    middle = engine.materialize(texts.trunk + texts.own, parent=root["seq"], branch_pos=TRUNK_LEN)
    tokens = (texts.trunk + texts.own)[:DEEP_POS] + texts.second
    leaf = engine.materialize(tokens, parent=middle["seq"], branch_pos=DEEP_POS)
    engine.free(root["seq"])
    engine.free(middle["seq"])
    return Shared(leaf["seq"], tokens + texts.turn, len(tokens))


def _stock_aged_deep(engine: Engine, texts: Texts) -> None:
    whole = texts.trunk + texts.own
    engine.warm(texts.trunk, WARM_SLOT)
    engine.warm(whole[:DEEP_POS], WARM_SLOT)
    engine.warm(whole[DEEP_POS:], SOURCE_SLOT)
    engine.warm(whole[:DEEP_POS] + texts.second, WARM_SLOT)
    engine.erase(SOURCE_SLOT)


def _stock_moved_deep(engine: Engine, texts: Texts) -> None:
    whole = texts.trunk + texts.own
    engine.warm(whole, SOURCE_SLOT)
    engine.warm(whole[:DEEP_POS] + texts.second, WARM_SLOT)
    engine.erase(SOURCE_SLOT)


SCENARIOS = (
    Scenario("root", _root, (_stock_root,)),
    Scenario("prompt-leaves-pool", _diverging, (_stock_root,)),
    Scenario("limit-below-pool", _limited, (_stock_limited,)),
    Scenario("branch", _branch, (_stock_branch, _stock_parted_branch)),
    Scenario("extend", _extend, (_stock_extend,)),
    Scenario("snapshot", _snapshot, (_stock_extend,)),
    Scenario("snapshot-of-attached", _attached_snapshot, (_stock_extend,)),
    Scenario("parent-freed-first", _parent_freed, (_stock_aged_branch, _stock_moved_branch)),
    Scenario("grandchild-alone", _deep, (_stock_aged_deep, _stock_moved_deep)),
)
