"""Who shares a prefix keeps it: pools and slots outlive the pool they came from, and cells go with the last of them."""

import pytest

from .conftest import Launcher
from .hooks import Engine, Refused
from .noise import Noise

pytestmark = pytest.mark.engine

BRANCH_POS = 250


@pytest.fixture(params=["dense", "sliding", "hybrid"])
def engine(request: pytest.FixtureRequest, launch: Launcher) -> Engine:
    return launch.pooled(request.param, "--no-cache-idle-slots")


def test_two_shares_survive_their_parent_to_the_last_digit(engine: Engine, noise: Noise) -> None:
    """A branch and an agent's slot share with a root; the root goes, and other text takes whatever cells came free."""
    trunk, own, turn, forced = noise(1, 400), noise(2, 100), noise(3, 30), noise(4, 40)
    root = engine.materialize(trunk)
    branch = engine.materialize(trunk[:BRANCH_POS] + own, parent=root["seq"], branch_pos=BRANCH_POS)
    branch_prompt, slot_prompt = trunk[:BRANCH_POS] + own + turn, trunk + turn

    def answers() -> list[object]:
        engine.erase(0)
        by_branch = engine.ask(branch_prompt, slot=0, pool=branch["seq"], forced=forced)
        assert by_branch.pool_n == len(branch_prompt) - len(turn)
        by_slot = engine.ask(slot_prompt + forced[:1], slot=1, forced=forced[1:])
        return [by_branch.at, by_slot.at, by_slot.cache_n]

    engine.ask(slot_prompt, 0, slot=1, pool=root["seq"])
    engine.warm(noise(5, 300), slot=2)
    before = answers()
    assert answers() == before, "the server must repeat itself for this comparison to mean anything"
    engine.free(root["seq"])
    engine.erase(2)
    engine.warm(noise(6, 300), slot=2)
    assert answers() == before


def test_cells_return_when_the_last_sharer_leaves(engine: Engine, noise: Noise) -> None:
    trunk, own, turn = noise(1, 400), noise(2, 100), noise(3, 30)
    start = engine.cells_used()
    root = engine.materialize(trunk)
    assert engine.cells_used() - start == len(trunk)
    extended = engine.materialize(trunk + own, parent=root["seq"], branch_pos=len(trunk))
    assert engine.cells_used() - start == len(trunk + own)
    engine.ask(trunk + own + turn, 0, slot=0, pool=extended["seq"])
    whole = len(trunk + own + turn)
    assert engine.cells_used() - start == whole

    assert engine.free(root["seq"])["n_cells_freed"] == 0
    assert engine.free(extended["seq"])["n_cells_freed"] == 0
    assert engine.cells_used() - start == whole
    engine.erase(0)
    assert engine.cells_used() == start


def test_four_agents_hold_a_prefix_once(engine: Engine, noise: Noise) -> None:
    trunk = noise(1, 400)
    start = engine.cells_used()
    root = engine.materialize(trunk)
    for slot in range(4):
        done = engine.ask(trunk + noise(10 + slot, 20), 9, slot=slot, pool=root["seq"])
        assert (done.pool_n, done.cache_n, done.prompt_n) == (400, 400, 20)
    # The last token of an answer is sampled, not evaluated: it has no cell yet.
    assert engine.cells_used() - start == 400 + 4 * (20 + 8)


def test_a_sequence_is_new_after_it_was_freed(engine: Engine, noise: Noise) -> None:
    """Same sequence, other content: another generation, and an attach meant for the old one is not made."""
    first = engine.materialize(noise(1, 200))
    engine.free(first["seq"])
    second = engine.materialize(noise(1, 200), seq=first["seq"])
    assert second["seq"] == first["seq"]
    assert second["gen"] > first["gen"]
    prompt = noise(1, 200) + noise(2, 10)
    stale = engine.ask(prompt, 4, slot=0, pool=first["seq"], shared_pool_gen=first["gen"])
    assert (stale.pool_n, stale.cache_n) == (0, 0)
    fresh = engine.ask(prompt, 4, slot=1, pool=first["seq"], shared_pool_gen=second["gen"])
    assert fresh.pool_n == 200
    assert stale.tokens == fresh.tokens


def test_freed_pool_is_gone_for_children_and_requests(engine: Engine, noise: Noise) -> None:
    trunk = noise(1, 200)
    root = engine.materialize(trunk)
    engine.free(root["seq"])
    with pytest.raises(Refused) as refused:
        engine.materialize(trunk + noise(2, 20), parent=root["seq"], branch_pos=200)
    assert refused.value.response.status_code == 410
    done = engine.ask(trunk + noise(3, 10), 4, pool=root["seq"])
    assert (done.pool_n, done.prompt_n) == (0, 210)


def test_cells_of_a_released_pool_make_room_when_only_idle_slots_have_them(launch: Launcher, noise: Noise) -> None:
    """Two conversations go on holding a pool that is gone; a pool that needs these cells takes both."""
    engine = launch.pooled("dense", "--no-cache-idle-slots", "-c", "2048")
    trunk = noise(1, 1800)
    root = engine.materialize(trunk)
    for slot in (0, 1):
        assert engine.ask(trunk + noise(2 + slot, 20), 4, slot=slot, pool=root["seq"]).pool_n == 1800
    engine.free(root["seq"])
    assert engine.cells_used() == 1800 + 2 * (20 + 3)
    other = engine.materialize(noise(5, 1500))
    assert engine.cells_used() == other["n_tokens"] == 1500
    prompt = noise(5, 1500) + noise(6, 10)
    shared = engine.ask(prompt, 8, slot=0, pool=other["seq"])
    assert shared.pool_n == 1500
    engine.free(other["seq"])
    engine.erase(0)
    assert shared.tokens == engine.full(prompt, 8, slot=1).tokens
