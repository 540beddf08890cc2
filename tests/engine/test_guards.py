"""Cells that more than one sequence holds never move: neither a context shift nor a reuse of chunks may shift them.

Both would change what every other sharer reads, without any error. A slot that shares stops at the end of its context
as `truncated`, with the finish reason "length"; a slot that shares nothing shifts as it always did.
"""

import pytest

from .conftest import Launcher
from .divergence import Distribution, mean_divergence
from .hooks import Engine, Running
from .noise import Noise

pytestmark = pytest.mark.engine

SLOT_CTX = 640
TRUNK_LEN = 400


@pytest.fixture
def shifting(launch: Launcher) -> Engine:
    return launch.pooled("dense", "--context-shift", "--kv-unified-per-slot", str(SLOT_CTX), "--no-cache-idle-slots")


@pytest.fixture
def reusing(launch: Launcher) -> Engine:
    return launch.pooled("dense", "--cache-reuse", "16", "--no-cache-idle-slots")


def others(engine: Engine, noise: Noise, seq: int) -> list[Distribution]:
    """What another agent reads through the pool."""
    engine.erase(3)
    answer = engine.ask(noise(1, TRUNK_LEN) + noise(3, 20), slot=3, pool=seq, forced=noise(4, 16))
    assert answer.pool_n == TRUNK_LEN
    return answer.at


def test_a_slot_without_shares_still_shifts(shifting: Engine, noise: Noise) -> None:
    """The guard touches nobody else."""
    done = shifting.ask(noise(1, TRUNK_LEN), 400, slot=0)
    assert len(done.tokens) == 400
    assert done.body["truncated"] is True


def test_attached_slot_ends_at_its_context_and_others_read_the_same(shifting: Engine, noise: Noise) -> None:
    trunk = noise(1, TRUNK_LEN)
    root = shifting.materialize(trunk)
    before = others(shifting, noise, root["seq"])
    done = shifting.ask(trunk + noise(2, 30), 400, slot=0, pool=root["seq"])
    assert done.pool_n == TRUNK_LEN
    assert ended_at_context(done.body)
    assert others(shifting, noise, root["seq"]) == before


def test_chat_client_sees_finish_reason_length(shifting: Engine, noise: Noise) -> None:
    body = {"messages": [{"role": "user", "content": noise.text(1, 150)}], "max_tokens": 2000, "ignore_eos": True}
    tokens = shifting.render("/v1/chat/completions", body)
    root = shifting.materialize(tokens[:100])
    done = shifting.post("/v1/chat/completions", body | {"shared_pool_slot": root["seq"], "temperature": 0})
    assert done["timings"]["pool_n"] == 100
    assert done["choices"][0]["finish_reason"] == "length"
    assert done["usage"]["total_tokens"] <= SLOT_CTX


def test_snapshotted_slot_ends_at_its_context_and_the_pool_stays(shifting: Engine, noise: Noise) -> None:
    """The source of a snapshot shares its cells from then on, also when it is in the middle of an answer."""
    with Running(shifting, noise(1, TRUNK_LEN), 1000, id_slot=0) as agent:
        taken = shifting.snapshot(0, TRUNK_LEN)
        before = others(shifting, noise, taken["seq"])
        done = agent.finished()
    assert ended_at_context(done)
    # Not to the last digit: before, the other agent shared its batches with this one. Moved cells are far beyond that.
    assert mean_divergence(before, others(shifting, noise, taken["seq"])) < 1e-4


def test_slot_shares_no_longer_once_it_left_the_prefix(shifting: Engine, noise: Noise) -> None:
    """A slot that shared with a pool and now runs something else shifts again."""
    root = shifting.materialize(noise(1, TRUNK_LEN))
    shifting.ask(noise(1, TRUNK_LEN) + noise(2, 30), 4, slot=0, pool=root["seq"])
    done = shifting.ask(noise(7, TRUNK_LEN), 400, slot=0)
    assert len(done.tokens) == 400


@pytest.mark.parametrize("source", ["attached", "snapshotted"])
def test_chunk_reuse_never_moves_shared_cells(reusing: Engine, noise: Noise, source: str) -> None:
    """A prompt that drops a piece from inside the shared prefix would make stock move the cells behind the piece."""
    trunk, turn = noise(1, TRUNK_LEN), noise(2, 60)
    if source == "attached":
        seq = reusing.materialize(trunk)["seq"]
        assert reusing.ask(trunk + turn, 4, slot=0, pool=seq).pool_n == TRUNK_LEN
    else:
        reusing.ask(trunk + turn, 4, slot=0)
        seq = reusing.snapshot(0, TRUNK_LEN)["seq"]
    before = others(reusing, noise, seq)
    shorter = trunk[:150] + trunk[200:] + turn
    done = reusing.ask(shorter, 24, slot=0)
    assert done.cache_n == 150, "the part before the gap, and nothing that would have to move"
    assert others(reusing, noise, seq) == before
    assert done.tokens == reusing.full(shorter, 24, slot=2).tokens


def test_chunk_reuse_works_where_nothing_is_shared(reusing: Engine, noise: Noise) -> None:
    """What the guard refuses does happen without it, or the test above would show nothing."""
    trunk, turn = noise(1, TRUNK_LEN), noise(2, 60)
    reusing.ask(trunk + turn, 4, slot=0)
    done = reusing.ask(trunk[:150] + trunk[200:] + turn, 24, slot=0)
    assert done.cache_n > 150


def ended_at_context(body: dict[str, object]) -> bool:
    """Stopped by the limit, flagged, with an answer that fills the context and no more."""
    assert (body["stop_type"], body["truncated"]) == ("limit", True), body
    evaluated, predicted = body["tokens_evaluated"], body["tokens_predicted"]
    assert isinstance(evaluated, int)
    assert isinstance(predicted, int)
    return SLOT_CTX - 2 <= evaluated + predicted <= SLOT_CTX
