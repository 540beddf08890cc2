"""Three states that lie behind each other, into the cache, out of it and back: a trunk, a branch from inside of it, and
a slot that goes on behind the branch.
"""

from dataclasses import dataclass
from typing import Self

from .divergence import Distribution
from .hooks import Engine
from .noise import Noise

SLOT = 2
N_HOLE = 60
N_INSIDE = 30
N_QUESTION = 20


@dataclass(frozen=True)
class Family:
    """Token ids. ``branch`` goes its own way from ``branch_pos``, ``turn`` begins with all of ``branch``."""

    trunk: list[int]
    branch: list[int]
    turn: list[int]
    branch_pos: int

    @classmethod
    def draw(cls, noise: Noise, seed: int, *, trunk_len: int, branch_pos: int, own_len: int) -> Self:
        trunk = noise(seed, trunk_len)
        branch = trunk[:branch_pos] + noise(seed + 1, own_len)
        return cls(trunk, branch, branch + noise(seed + 2, 40), branch_pos)


def make_pools(engine: Engine, family: Family) -> tuple[int, int]:
    """Compute trunk and branch; their sequences."""
    root = engine.materialize(family.trunk)["seq"]
    return root, engine.materialize(family.branch, parent=root, branch_pos=family.branch_pos)["seq"]


def fill(engine: Engine, family: Family) -> tuple[int, int]:
    """Compute all three; sequences of trunk and branch."""
    root, branch = make_pools(engine, family)
    engine.ask(family.turn, 9, slot=SLOT, pool=branch)
    return root, branch


def save_all(engine: Engine, root: int, branch: int) -> None:
    """To disk, each with its own range only."""
    listed = engine.pool(branch)
    engine.save("trunk", seq=root, to="disk")
    engine.save("branch", seq=branch, start=listed["branch_pos"], to="disk")
    engine.save("slot", slot=SLOT, start=listed["n_tokens"], to="disk")


def load_all(engine: Engine) -> tuple[int, int]:
    root = engine.load("trunk")
    branch = engine.load("branch", parent=root["seq"])
    engine.load("slot", parent=branch["seq"], id_slot=SLOT)
    return root["seq"], branch["seq"]


def clear_all(engine: Engine) -> None:
    engine.free_all()
    for slot in range(4):
        engine.clear(slot)
    assert engine.cells_used() == 0


def make_holes(engine: Engine, noise: Noise) -> None:
    """Leave the start of the cache in stretches of free cells between as many used ones."""
    pools = [engine.materialize(noise(50 + i, N_HOLE))["seq"] for i in range(6)]
    for seq in pools[::2]:
        engine.free(seq)


@dataclass(frozen=True)
class Read:
    """What one request reads through a pool: how much of it it shared, and its distributions."""

    pool_n: int
    at: list[Distribution]


def readings(engine: Engine, family: Family, root: int, branch: int, noise: Noise) -> dict[str, Read]:
    """Through the trunk, through the branch, and ending in the middle of the branch's own range. One slot after the
    other, so that what each adds lies in the same cells wherever this is called."""
    prompts = {
        "trunk": (root, family.trunk + noise(7, N_QUESTION)),
        "branch": (branch, family.branch + noise(8, N_QUESTION)),
        "inside": (branch, family.branch[: family.branch_pos + N_INSIDE] + noise(9, N_QUESTION)),
    }
    res = {}
    for slot, (name, (seq, prompt)) in enumerate(prompts.items()):
        done = engine.ask(prompt, slot=slot, pool=seq, forced=noise(10 + slot, 12))
        res[name] = Read(done.pool_n, done.at)
    return res


def places(engine: Engine, *seqs: int) -> list[list[list[int]]]:
    """Where each pool lies (``Engine.runs``)."""
    return [engine.runs(seq) for seq in seqs]
