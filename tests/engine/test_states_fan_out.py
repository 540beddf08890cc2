"""Agents that begin alike on hybrid and recurrent models, whose memory is a state that cannot be cut.

What they share is a pool that ends where they part, to the token, and is prefilled from the last state on that the
engine kept before: about a batch and 4 tokens before the end of every prompt. All answers are those of a stock build
to each prompt alone.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from .noise import Noise
from .test_cold_fan_out import BATCH, GREEDY, N_ANSWER, N_PREFIX, Crowd, Stand, client, said, stand_of, until

pytestmark = pytest.mark.engine

PATH = "/completion"
N_LONG = 2400


@pytest.fixture(scope="module", params=["hybrid", pytest.param("recurrent", marks=pytest.mark.slow)])
def running(
    request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory, noise: Noise
) -> Iterator[Stand]:
    yield from stand_of(request.param, chat_model, tmp_path_factory.mktemp("states"), noise)


@pytest.fixture
def stand(running: Stand) -> Iterator[Stand]:
    yield running
    running.forget_pools()
    listed = running.engine("pools")["pools"]
    assert not [pool["tag"] for pool in listed if pool["state"] != "free"], "nothing borrowed is left"


def prompts(stand: Stand, *parts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Bodies of words: each part is told by the numbers of its pieces, (number, tokens, number, tokens, …)."""
    seed = stand.seed()
    bodies = []
    for part in parts:
        pieces = zip(part[::2], part[1::2], strict=True)
        prompt = [token for number, n_tokens in pieces for token in stand.noise(seed + number, n_tokens)]
        bodies.append({"prompt": prompt, "n_predict": N_ANSWER, **GREEDY})
    return bodies


def in_turn(stand: Stand, bodies: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Tokens prefilled for each, with what was prefilled for pools; and cached."""
    done = []
    for body, alone in zip(bodies, stand.answers_alone(PATH, bodies), strict=True):
        before = stand.n_processed()
        answer = stand.proxy.http.post(PATH, json=body).raise_for_status()
        assert said(PATH, answer) == alone
        done.append((stand.n_processed() - before, answer.json()["timings"]["cache_n"]))
    return done


def test_in_turn(stand: Stand) -> None:
    """The second one goes on from what the first one left; the others find the pool."""
    n_own = 12
    bodies = prompts(stand, *((0, N_PREFIX, 1 + i, n_own) for i in range(4)))
    (first, _), (second, cached), *others = in_turn(stand, bodies)
    assert (first, cached) == (N_PREFIX + n_own, N_PREFIX)
    assert 0 < second - n_own < BATCH
    assert others == [(n_own, N_PREFIX)] * 2
    assert [pool["prefix_len"] for pool in stand.auto_pools()] == [N_PREFIX]


def test_who_parts_earlier_gets_a_pool_that_ends_there(stand: Stand) -> None:
    """Two begin a few tokens further alike than all the others."""
    n_more, n_own = 5, 12
    alike = ((0, N_PREFIX, 1, n_more, 2 + i, n_own) for i in range(2))
    bodies = prompts(stand, *alike, *((0, N_PREFIX, 10 + i, n_own) for i in range(3)))
    *_, (third, _), fourth, fifth = in_turn(stand, bodies)
    assert third < BATCH + n_own
    assert fourth == fifth == (n_own, N_PREFIX)
    assert [pool["prefix_len"] for pool in stand.auto_pools()] == [N_PREFIX + n_more, N_PREFIX]


async def one_first(stand: Stand, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """All at once, but for the first one, which is known to be there before the others come."""

    def n_running() -> int:
        sessions = stand.proxy.http.get("/polykv/sessions").raise_for_status().json()["sessions"]
        return sum(session["state"] in ("waiting", "prefilling") for session in sessions)

    async with client(stand) as http:
        first = asyncio.create_task(http.post(PATH, json=bodies[0]))
        await until(lambda: n_running() == 1)
        return await asyncio.gather(first, *(http.post(PATH, json=body) for body in bodies[1:]))


def test_at_once_behind_a_long_prompt(stand: Stand) -> None:
    """The first one says so much of its own that no state was kept where the others part: once more, for all."""
    n_own = 12
    bodies = prompts(stand, (0, N_PREFIX, 1, 300), *((0, N_PREFIX, 2 + i, n_own) for i in range(3)))
    before = stand.n_processed()
    answers = asyncio.run(one_first(stand, bodies))
    assert stand.n_processed() - before == N_PREFIX + 300 + N_PREFIX + 3 * n_own
    assert [said(PATH, answer) for answer in answers] == stand.answers_alone(PATH, bodies)


def test_a_pool_above_is_gone_on_from(stand: Stand) -> None:
    n_task, n_own = 200, 12
    of_all = [(0, N_PREFIX, 1 + i, n_own) for i in range(2)]
    bodies = prompts(stand, *of_all, *((0, N_PREFIX, 5, n_task, 10 + i, n_own) for i in range(3)))
    *_, third, (fourth, cached), fifth = in_turn(stand, bodies)
    assert third == (n_task + n_own, N_PREFIX)
    assert (fourth, cached) == (n_task + n_own, N_PREFIX + n_task), "from the end of the pool above"
    assert fifth == (n_own, N_PREFIX + n_task)


@pytest.mark.slow
def test_a_first_one_that_leaves_hands_over_what_is_prefilled(stand: Stand) -> None:
    bodies = prompts(stand, *((0, N_LONG, 1 + i, 12) for i in range(4)))
    before = stand.n_processed()

    def leave(crowd: Crowd) -> None:
        crowd.first.cancel()

    answers = asyncio.run(Crowd(stand, bodies).play(leave))
    assert [said(PATH, answer) for answer in answers] == stand.answers_alone(PATH, bodies[1:])
    _, n_due = stand.due(PATH, bodies[1:])
    assert stand.n_processed() - before <= n_due + 2 * BATCH
