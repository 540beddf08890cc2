"""A state loaded behind a parent that has some of the saved range as well: that part is shared, not held twice."""

from pathlib import Path

import pytest

from .conftest import Launcher
from .hooks import Engine
from .noise import Noise
from .state_files import StateFile, disk, state_files
from .test_saved_errors import refused, state_of

pytestmark = pytest.mark.engine

ROOT_LEN, BRANCH_POS, BRANCH_LEN = 200, 120, 220
QUIET = ("--no-cache-idle-slots",)


@pytest.fixture
def engine(launch: Launcher, tmp_path: Path) -> Engine:
    return launch.pooled("dense", *disk(tmp_path / "states"), *QUIET)


def furnish(engine: Engine, noise: Noise, start: int = 0, own_to: str = "ram") -> tuple[int, list[int]]:
    """A root, and beside it a saved branch from ``start``, which left the cache; the root's sequence, the branch."""
    root = noise(1, ROOT_LEN)
    branch = root[:BRANCH_POS] + noise(2, BRANCH_LEN - BRANCH_POS)
    seq = engine.materialize(root)["seq"]
    child = engine.materialize(branch, parent=seq, branch_pos=BRANCH_POS)["seq"]
    engine.save("own", seq=child, start=BRANCH_POS, to=own_to)
    engine.save("whole", seq=child, start=start)
    engine.free(child)
    assert engine.cells_used() == ROOT_LEN
    return seq, branch


@pytest.mark.parametrize("start", [0, 50])
def test_what_the_parent_has_is_shared(engine: Engine, tmp_path: Path, noise: Noise, start: int) -> None:
    root, branch = furnish(engine, noise, start, "disk")
    child = engine.load("whole", parent=root, branch_pos=BRANCH_POS)
    assert (child["branch_pos"], child["parent_seq"], child["n_cached"]) == (BRANCH_POS, root, BRANCH_LEN)
    assert child["cells"]["used"] == engine.cells_used() == ROOT_LEN + BRANCH_LEN - BRANCH_POS
    assert where(engine, child["seq"])[:BRANCH_POS] == where(engine, root)[:BRANCH_POS]
    engine.save("again", seq=child["seq"], start=BRANCH_POS, to="disk")
    own, again = (StateFile.read(state_files(tmp_path / "states")[tag]) for tag in ("own", "again"))
    assert (again.header | {"tag": "own"}, again.parts) == (own.header, own.parts)
    prompt = branch + noise(3, 20)
    done = engine.ask(prompt, 12, slot=0, pool=child["seq"])
    assert (done.pool_n, done.tokens) == (BRANCH_LEN, engine.full(prompt, 12, slot=1).tokens)
    engine.free(root)
    assert engine.ask(prompt, 12, slot=2, pool=child["seq"]).tokens == done.tokens


def where(engine: Engine, seq: int) -> list[int]:
    """The cell of each position."""
    return [cell + i for p0, p1, cell in engine.runs(seq) for i in range(p1 - p0)]


def test_a_slot(engine: Engine, noise: Noise) -> None:
    root, branch = furnish(engine, noise)
    engine.warm(noise(4, 30), slot=1)
    loaded = engine.load("whole", parent=root, branch_pos=BRANCH_POS, id_slot=1)
    assert (loaded["branch_pos"], loaded["n_pool_shared"], loaded["parent_seq"]) == (BRANCH_POS, BRANCH_POS, root)
    assert engine.cells_used() == ROOT_LEN + BRANCH_LEN - BRANCH_POS
    assert engine.slot(1)["n_pool_shared"] == BRANCH_POS
    turn = branch + noise(3, 20)
    done = engine.ask(turn, 12, slot=1)
    assert (done.cache_n, done.tokens) == (BRANCH_LEN, engine.full(turn, 12, slot=2).tokens)


def test_the_whole_state_needs_room_for_a_moment(launch: Launcher, noise: Noise) -> None:
    engine = launch(
        "patched", "dense", "-c", "512", "--parallel", "2", "--kv-unified", "--polykv-max-pools", "4", *QUIET
    )
    root, _ = furnish(engine, noise)
    engine.warm(noise(4, 512 - ROOT_LEN - BRANCH_LEN + 20), slot=0)
    load = {"op": "load", "tag": "whole", "parent_seq": root, "branch_pos": BRANCH_POS}
    before = state_of(engine)
    error = refused(engine, load, 507, "not enough KV cells")
    assert (error["need"], error["free"]) == (BRANCH_LEN, engine.stats()["cells"]["free"])
    assert error["free"] > BRANCH_LEN - BRANCH_POS
    assert state_of(engine) == before


@pytest.mark.parametrize("model", ["sliding", "hybrid", "recurrent"])
def test_not_where_a_part_cannot_be_exchanged(launch: Launcher, noise: Noise, model: str) -> None:
    engine = launch.pooled(model, *QUIET)
    root = engine.materialize(noise(1, ROOT_LEN))["seq"]
    engine.save("root", seq=root)
    before = state_of(engine)
    load = {"op": "load", "tag": "root", "parent_seq": root, "branch_pos": 100}
    refused(engine, load, 409, "the saved range starts at 0, not at 100")
    assert state_of(engine) == before
