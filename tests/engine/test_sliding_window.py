"""A sliding window overwrites cells that are out of their own sequence's window, also with ``--swa-full``.

Whoever then goes back to before that point (a shorter prefix of a slot, of a pool, or of what a slot shares with one)
misses some of the cells that its window needs. With pools on this is seen and the prompt prefilled; llama-server by
itself looks at the smallest position only, and answers wrong when a few of them are left.
"""

import pytest

from .conftest import Launcher
from .hooks import Engine
from .noise import Noise
from .tiny_models import SLIDING_WINDOW

pytestmark = pytest.mark.engine

N_CELLS = 1024
TRUNK_LEN = 400
BACK_TO = 100
N_LOST = 80
"""So many of the trunk's first cells are overwritten: some, and not all, of those that a prompt behind BACK_TO sees."""


@pytest.fixture
def engine(launch: Launcher) -> Engine:
    flags = ("-c", str(N_CELLS), "--parallel", "4", "--kv-unified", "--swa-full", "--no-cache-idle-slots")
    return launch("patched", "sliding", *flags, "--polykv-max-pools", "8")


N_BEFORE = 300


def make_gap(engine: Engine, noise: Noise) -> None:
    """Take the first cells of the cache, for what follows to lie behind them."""
    engine.warm(noise(10, N_BEFORE), slot=1)


def overwrite(engine: Engine, noise: Noise) -> None:
    """Give the first cells free again and fill them: the next cells to take are the trunk's first."""
    assert BACK_TO - SLIDING_WINDOW < N_LOST < BACK_TO
    engine.erase(1)
    engine.warm(noise(11, N_BEFORE + N_LOST), slot=2)
    cells = engine.stats()["cells"]
    assert cells["used"] - cells["swa_used"] == N_LOST, "the trunk's first cells were not taken"


def test_slot_goes_back_to_before_what_it_lost(engine: Engine, launch: Launcher, noise: Noise) -> None:
    trunk = noise(1, TRUNK_LEN)
    make_gap(engine, noise)
    engine.warm(trunk, slot=0)
    overwrite(engine, noise)
    prompt = trunk[:BACK_TO] + noise(2, 20)
    done = engine.ask(prompt, 16, slot=0)
    assert (done.cache_n, done.prompt_n) == (0, len(prompt))
    assert done.tokens == launch.stock("sliding").full(prompt, 16).tokens


def test_slot_that_shares_goes_back_to_before_what_the_pool_lost(
    engine: Engine, launch: Launcher, noise: Noise
) -> None:
    """The end of the pool is complete and shared; before its end it cannot be."""
    stock = launch.stock("sliding")
    trunk = noise(1, TRUNK_LEN)
    make_gap(engine, noise)
    root = engine.materialize(trunk)
    overwrite(engine, noise)
    for n_prefix in (TRUNK_LEN, BACK_TO):
        prompt = trunk[:n_prefix] + noise(2, 20)
        done = engine.ask(prompt, 16, slot=0, pool=root["seq"])
        assert done.pool_n == done.cache_n == (TRUNK_LEN if n_prefix == TRUNK_LEN else 0)
        assert done.tokens == stock.full(prompt, 16).tokens


def test_chunks_that_may_be_lost_are_not_moved(launch: Launcher, noise: Noise) -> None:
    """--cache-reuse would move what lies behind the common prefix, whether or not all of it is there."""
    engine = launch.pooled("sliding", "--cache-reuse", "16", "--no-cache-idle-slots")
    trunk, turn = noise(1, TRUNK_LEN), noise(2, 60)
    engine.warm(trunk + turn, slot=0)
    shorter = trunk[:150] + trunk[200:] + turn
    done = engine.ask(shorter, 24, slot=0)
    assert done.cache_n == 150
    assert done.tokens == engine.full(shorter, 24, slot=2).tokens
