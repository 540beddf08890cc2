"""Emptying an idle slot through the hooks, for who manages pools and wants its cells: no folder for slots is needed."""

import pytest

from .conftest import POOLS, SMALL, Launcher
from .hooks import Engine, Refused, Running
from .noise import Noise

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(launch_shared: Launcher) -> Engine:
    return launch_shared("patched", "dense", *SMALL, *POOLS, "--no-cache-idle-slots")


def test_idle_slot_gives_its_own_cells(engine: Engine, noise: Noise) -> None:
    """What it shares with a pool stays with the pool."""
    pool = engine.materialize(noise(1, 50))
    before = engine.cells_used()
    engine.ask(noise(1, 50) + noise(2, 10), 3, slot=1, pool=pool["seq"])
    assert engine.cells_used() == before + 12
    cleared = engine.clear(1)
    assert (cleared["id_slot"], cleared["n_tokens"], cleared["n_cells_freed"]) == (1, 62, 12)
    assert cleared["cells"] == engine.stats()["cells"]
    assert (engine.cells_used(), engine.slot(1)["n_tokens"], engine.slot(1)["n_pool_shared"]) == (before, 0, 0)
    prompt = noise(1, 50) + noise(3, 10)
    assert engine.ask(prompt, slot=1, pool=pool["seq"]).tokens == engine.full(prompt, slot=2).tokens


def test_empty_slot_gives_nothing(engine: Engine) -> None:
    engine.clear(3)
    assert engine.clear(3)["n_cells_freed"] == 0


def test_busy_slot_is_left_alone(engine: Engine, noise: Noise) -> None:
    prompt = noise(4, 20)
    alone = engine.full(prompt, 400, slot=0)
    with Running(engine, prompt, 400, id_slot=0, cache_prompt=False) as agent:
        with pytest.raises(Refused, match="slot 0 is busy") as refused:
            engine.clear(0)
        assert agent.is_running(), "the refusal must have come while it ran"
    assert refused.value.response.status_code == 409
    assert agent.finished()["content"] == alone.body["content"]


@pytest.mark.parametrize("id_slot", [-1, 4, 2**40, "0", None, 1.5])
def test_no_such_slot(engine: Engine, id_slot: object) -> None:
    response = engine.http.post("/polykv/engine/pools", json={"op": "clear", "id_slot": id_slot})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "polykv_error")
    assert "id_slot" in response.json()["error"]["message"]
