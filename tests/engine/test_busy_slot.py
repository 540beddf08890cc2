"""A request that names a busy slot waits for it. llama-server would swap the slot's prompt for one of its host cache
(`--cache-ram`) while another request runs there, which then goes on with other cells."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import Launcher
from .hooks import Engine, Running
from .noise import Noise

pytestmark = pytest.mark.engine


@pytest.fixture
def engine(launch: Launcher) -> Engine:
    return launch.pooled("dense", "--cache-ram", "64", "--no-cache-idle-slots")


def test_who_runs_in_a_slot_keeps_its_cells(engine: Engine, noise: Noise) -> None:
    prompt, others = noise(1, 60), [noise(10 + i, 50) for i in range(3)]
    right = engine.full(prompt, 400, slot=3)
    waiting = [engine.full(other, 8, slot=2) for other in others]
    with ThreadPoolExecutor(len(others)) as threads, Running(engine, prompt, 400, id_slot=0) as running:
        asked = [threads.submit(engine.ask, other, 8, slot=0) for other in others]
        last = running.finished()
        answers = [done.result() for done in asked]
    assert last["content"] == right.body["content"]
    assert [answer.tokens for answer in answers] == [full.tokens for full in waiting]
