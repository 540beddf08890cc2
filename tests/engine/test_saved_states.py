"""State of pools and slots out of the cache and back: what comes back is what was there, to the last byte and digit.

What a server reads with it depends on where it lies, as ever: sums over cells in another order are rounded in another
way. So there are two gates. The bytes: what was loaded is saved again and must give the same file. And the readings:
one server computes a prefix, another loads it into the same cells, and every log-probability is the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import Launcher
from .families import (
    Family,
    clear_all,
    fill,
    load_all,
    make_holes,
    make_pools,
    places,
    readings,
    save_all,
)
from .hooks import Engine, Refused
from .noise import Noise
from .state_files import StateFile, contents, state_files

pytestmark = pytest.mark.engine

TRUNK_LEN = 300
BRANCH_POS = 200
OWN_LEN = 120
N_ANSWER = 12
QUIET = ("--no-cache-idle-slots",)


@dataclass(frozen=True)
class Layout:
    model: str
    flags: tuple[str, ...] = ()
    can_branch: bool = True
    has_cells: bool = True
    n_ckpt: int = 0


LAYOUTS = {
    "dense": Layout("dense"),
    "dense-q8_0": Layout("dense", ("-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on")),
    "dense-transposed": Layout("dense", ("-fa", "off")),
    "sliding": Layout("sliding"),
    "hybrid": Layout("hybrid", can_branch=False, n_ckpt=1),
    "recurrent": Layout("recurrent", can_branch=False, has_cells=False, n_ckpt=1),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "states"


@pytest.fixture
def engine(layout: Layout, launch: Launcher, folder: Path) -> Iterator[Engine]:
    engine = start(launch, layout, folder)
    yield engine
    clear_all(engine)


def start(launch: Launcher, layout: Layout, folder: Path) -> Engine:
    disk = ("--polykv-save-path", str(folder), "--polykv-save-disk", "100")
    return launch.pooled(layout.model, *layout.flags, *disk, *QUIET)


# Bytes -------------------------------------------------------------------------------------------------------------


def draw(noise: Noise) -> Family:
    return Family.draw(noise, 1, trunk_len=TRUNK_LEN, branch_pos=BRANCH_POS, own_len=OWN_LEN)


def test_same_bytes_after_a_round_trip(engine: Engine, layout: Layout, folder: Path, noise: Noise) -> None:
    """Save, free, load into holes, save again: trunk, branch and slot give the files they gave before."""
    save_all(engine, *fill(engine, draw(noise)))
    before = contents(folder)
    listed = {state["tag"]: state for state in engine.saved()}
    assert {tag: state["in"] for tag, state in listed.items()} == dict.fromkeys(("trunk", "branch", "slot"), "disk")
    assert {tag: len(content) for tag, content in before.items()} == {
        tag: state["bytes"] for tag, state in listed.items()
    }
    assert listed["branch"]["from"] == (BRANCH_POS if layout.can_branch else 0)
    assert [listed[tag]["n_ckpt"] for tag in ("trunk", "branch")] == [layout.n_ckpt] * 2
    parts_before = StateFile.read(state_files(folder)["trunk"]).parts
    clear_all(engine)

    if layout.has_cells:
        make_holes(engine, noise)
    root, branch = load_all(engine)
    if layout.has_cells:
        assert len(engine.runs(root)) > 3, "it was to lie in holes"
    save_all(engine, root, branch)
    assert contents(folder) == before

    # What would the file be of one other token?
    trunk = noise(1, TRUNK_LEN)
    clear_all(engine)
    other = engine.materialize([*trunk[:10], trunk[11], *trunk[11:]])
    engine.save("trunk", seq=other["seq"], to="disk")
    same_size = StateFile.read(state_files(folder)["trunk"])
    assert same_size.parts != parts_before
    assert len(same_size.parts) == len(parts_before)


def test_own_range_only(launch: Launcher, noise: Noise, folder: Path) -> None:
    """A branch and a slot cost what they have of their own, in memory, on disk and in cells."""
    engine = start(launch, LAYOUTS["dense"], folder)
    root, branch = fill(engine, draw(noise))
    save_all(engine, root, branch)
    per_token = engine.stats()["kv_bytes_per_token"]
    sizes = {state["tag"]: state["bytes"] for state in engine.saved()}
    for tag, n_own, n_all in (("trunk", 300, 300), ("branch", 120, 320), ("slot", 48, 368)):
        assert n_own * per_token < sizes[tag] < n_own * (per_token + 20) + 4 * n_all + 1000
    clear_all(engine)
    assert engine.load("trunk")["cells"]["used"] == 300
    assert engine.load("branch", parent=engine.pools()[0]["seq"])["cells"]["used"] == 420
    assert engine.load("slot", parent=engine.pools()[1]["seq"], id_slot=0)["cells"]["used"] == 468


# Readings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dense", "sliding", "hybrid", "recurrent"], indirect=True)
def test_same_readings_in_the_same_cells(layout: Layout, launch: Launcher, folder: Path, noise: Noise) -> None:
    """A server computes, is killed, and the next one loads from its files: every log-probability is the same."""
    family = draw(noise)
    first = start(launch, layout, folder)
    root, branch = make_pools(first, family)
    lies = places(first, root, branch)
    first.save("trunk", seq=root, to="disk")
    first.save("branch", seq=branch, start=first.pool(branch)["branch_pos"], to="disk")
    computed = readings(first, family, root, branch, noise)
    first.server.kill()

    second = start(launch, layout, folder)
    root = second.load("trunk")["seq"]
    branch = second.load("branch", parent=root)["seq"]
    assert places(second, root, branch) == lies, "not the same cells: the readings cannot be compared"
    loaded = readings(second, family, root, branch, noise)
    if layout.can_branch:
        assert {name: read.pool_n for name, read in computed.items()} == {"trunk": 300, "branch": 320, "inside": 230}
    assert loaded == computed
    assert second.stats()["n_prompt_cum"] < first_prompt_n(family), "it was to load, not to compute"

    # A reading that is not the same is seen: another token far back in the prefix.
    other = [family.branch[1], *family.branch[1:]]
    clear_all(second)
    root = second.materialize(family.trunk)["seq"]
    branch = second.materialize(other)["seq"]
    changed = second.ask(other + noise(8, 20), slot=1, pool=branch, forced=noise(11, 12))
    assert changed.at != computed["branch"].at


def first_prompt_n(family: Family) -> int:
    return len(family.trunk)


def assert_right(engine: Engine, prompt: list[int], pool: int, shared_n: int) -> None:
    """Who shares this much with the pool answers as after a full prefill."""
    done = engine.ask(prompt, N_ANSWER, slot=0, pool=pool)
    assert (done.pool_n, done.tokens) == (shared_n, engine.full(prompt, N_ANSWER, slot=1).tokens)


# Cells -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dense(launch: Launcher) -> Iterator[Engine]:
    engine = launch.pooled("dense", *QUIET)
    yield engine
    clear_all(engine)


def test_lowest_holes_are_filled(dense: Engine, noise: Noise) -> None:
    """Down from the top: save, free and load again moves what lies high into the holes below."""
    pools = [dense.materialize(noise(i, 100))["seq"] for i in range(5)]
    for low in pools[1:3]:
        dense.free(low)
    assert dense.stats()["cells"]["hi"] == 500
    dense.save("top", seq=pools[4])
    dense.free(pools[4])
    loaded = dense.load("top")
    assert dense.runs(loaded["seq"]) == [[0, 100, 100]]
    assert loaded["cells"] == dense.stats()["cells"]
    assert (loaded["cells"]["hi"], loaded["cells"]["used"]) == (400, 300)
    assert_right(dense, noise(4, 100) + noise(9, 20), loaded["seq"], 100)


def test_slot_that_lies_high_comes_down(dense: Engine, noise: Noise) -> None:
    pool = dense.materialize(noise(1, 1000))["seq"]
    talk = noise(2, 50)
    dense.ask(talk, 9, slot=1)
    dense.free(pool)
    assert dense.stats()["cells"]["hi"] == 1058
    dense.save("talk", slot=1)
    assert dense.load("talk", id_slot=1)["cells"]["hi"] <= 58 + 58, "what the slot held is freed after it was read"
    dense.clear(1)
    assert dense.load("talk", id_slot=1)["cells"]["hi"] == 58


def test_windows_of_others_are_left_alone(launch: Launcher, noise: Noise) -> None:
    """A search for cells in a sliding window takes those that others no longer look at; a load does not, while there
    are empty ones: a pool whose old cells were taken could not be shared below its end any more."""
    engine = launch.pooled("sliding", *QUIET)
    gap = engine.materialize(noise(1, 100))["seq"]
    engine.save("pool", seq=gap)
    trunk = noise(2, TRUNK_LEN)
    resident = engine.materialize(trunk)["seq"]
    engine.free(gap)
    engine.load("pool")
    engine.load("pool")
    cells = engine.stats()["cells"]
    assert (cells["used"], cells["swa_used"]) == (500, 500)
    inside = trunk[:100] + noise(3, 20)
    assert_right(engine, inside, resident, 100)


# Families ----------------------------------------------------------------------------------------------------------


def test_loaded_twice(dense: Engine, noise: Noise) -> None:
    trunk = noise(1, TRUNK_LEN)
    dense.save("trunk", seq=dense.materialize(trunk)["seq"])
    dense.free_all()
    first, second = dense.load("trunk"), dense.load("trunk")
    assert first["seq"] != second["seq"]
    assert first["gen"] != second["gen"]
    assert dense.cells_used() == 2 * TRUNK_LEN
    dense.free(first["seq"])
    prompt = trunk + noise(2, 20)
    assert_right(dense, prompt, second["seq"], TRUNK_LEN)


def test_child_comes_back_behind_its_parent_and_outlives_it(dense: Engine, noise: Noise) -> None:
    """Also behind another pool that has the same tokens: what counts is what is in it."""
    family = draw(noise)
    root, branch = fill(dense, family)
    made = dense.pool(branch)
    dense.save("branch", seq=branch, start=BRANCH_POS)
    clear_all(dense)
    with pytest.raises(Refused, match="no parent pool") as missing:
        dense.load("branch", parent=root)
    assert missing.value.response.status_code == 410

    longer = dense.materialize(family.trunk[:BRANCH_POS] + noise(5, 150))["seq"]
    loaded = dense.load("branch", parent=longer, branch_pos=BRANCH_POS, seq=branch)
    assert loaded["cells"]["used"] == BRANCH_POS + 150 + OWN_LEN
    listed = dense.pool(branch)
    assert all(loaded[key] == listed[key] for key in listed.keys() - {"lora_current", "t_ms"})
    same = ("seq", "state", "n_tokens", "tokens_hash", "branch_pos", "n_ckpt", "lora_current")
    assert [listed[key] for key in same] == [made[key] for key in same]
    assert (listed["tag"], listed["parent_seq"]) == ("branch", longer)
    assert listed["gen"] > made["gen"]
    assert (loaded["n_cached"], loaded["n_processed"]) == (BRANCH_POS + OWN_LEN, 0)
    dense.free(longer)
    assert dense.cells_used() == BRANCH_POS + OWN_LEN
    prompt = family.branch + noise(6, 20)
    assert_right(dense, prompt, branch, BRANCH_POS + OWN_LEN)


def test_first_part_of_a_pool(dense: Engine, noise: Noise) -> None:
    trunk = noise(1, TRUNK_LEN)
    pool = dense.materialize(trunk)["seq"]
    saved = dense.save("part", seq=pool, start=50, n_tokens=200)
    assert (saved["from"], saved["n_tokens"]) == (50, 200)
    loaded = dense.load("part", parent=pool)
    assert dense.cells_used() == TRUNK_LEN + 150
    prompt = trunk[:200] + noise(2, 20)
    assert_right(dense, prompt, loaded["seq"], 200)
