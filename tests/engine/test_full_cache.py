"""A full cache through the proxy: unused pools leave, big requests wait for each other, nothing is refused in vain."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import loopback
from .binaries import binary_path
from .noise import Noise
from .stack import ProxyStack

pytestmark = pytest.mark.engine

N_CTX = 1024
PATH = "/completion"


@pytest.fixture
def stack(dense_path: Path, tmp_path: Path) -> Iterator[ProxyStack]:
    args = ("--ctx", str(N_CTX))
    with ProxyStack(binary_path("patched"), dense_path, "-t", "1", log_dir=tmp_path, up_args=args) as stack:
        yield stack


def ask(stack: ProxyStack, tokens: list[int], n_predict: int, **fields: Any) -> httpx.Response:
    body = {"prompt": tokens, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, **fields}
    return stack.http.post(PATH, json=body)


def ask_all(stack: ProxyStack, prompts: list[list[int]], n_predict: int, **fields: Any) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda tokens: ask(stack, tokens, n_predict, **fields), prompts))


def pool(stack: ProxyStack, tokens: list[int], **fields: Any) -> int:
    made = stack.http.post("/polykv/pools", json={"tokens": tokens, **fields}).raise_for_status().json()
    return int(made["pool_id"])


def residency(stack: ProxyStack, pool_id: int) -> str:
    shown = stack.http.get("/polykv/pools").raise_for_status().json()["pools"]
    return next(str(pool["residency"]) for pool in shown if pool["pool_id"] == pool_id)


def test_room_is_made_for_requests_without_a_pool(stack: ProxyStack, noise: Noise) -> None:
    # Nobody has made a pool: big ones wait for each other.
    answers = ask_all(stack, [noise(seed, 480) for seed in range(6)], 24)
    assert [answer.status_code for answer in answers] == [200] * 6
    assert [(a.json()["tokens_predicted"], a.json()["truncated"]) for a in answers] == [(24, False)] * 6

    # Nobody uses the pools: they leave for a request that cannot share.
    old, new = pool(stack, noise(10, 300)), pool(stack, noise(11, 300))
    answer = ask(stack, noise(12, 600), 24, cache_prompt=False)
    assert (answer.status_code, answer.json()["tokens_predicted"]) == (200, 24), answer.text
    assert (residency(stack, old), residency(stack, new)) == ("warm", "resident")

    # What is longer than the context is the engine's to refuse, and nothing is evicted for it.
    own = loopback.post(stack.engine_url + PATH, json={"prompt": noise(13, N_CTX + 1)}, timeout=60)
    answer = ask(stack, noise(13, N_CTX + 1), 1)
    assert (answer.status_code, answer.content) == (400, own.content)
    assert answer.json()["error"]["type"] == "exceed_context_size_error"
    assert residency(stack, new) == "resident"

    # Nothing can come free.
    pinned = pool(stack, noise(14, 450), pin=True)
    answer = ask(stack, noise(15, 700), 24)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "kv_exhausted"
    assert answer.json()["error"]["cells_missing"] == 700 + 1 - (N_CTX - 450)
    assert residency(stack, pinned) == "resident"


def test_no_answer_is_cut_while_prompts_are_prefilled(stack: ProxyStack, noise: Noise) -> None:
    """Six clients at once, each with a prompt of its own that takes more than a third of the cells."""
    chats = [[{"role": "user", "content": noise.text(20 + seed, 332 + 7 * seed)}] for seed in range(6)]
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def say(messages: list[dict[str, str]]) -> httpx.Response:
        return stack.http.post("/v1/chat/completions", json={"messages": messages, **body})

    with ThreadPoolExecutor(len(chats)) as threads:
        answers = list(threads.map(say, chats))
    assert [answer.status_code for answer in answers] == [200] * 6
    usages = [answer.json()["usage"] for answer in answers]
    assert all(N_CTX // 3 < usage["prompt_tokens"] < N_CTX // 2 for usage in usages), usages
    assert [usage["completion_tokens"] for usage in usages] == [8] * 6


def last_of_stream(stack: ProxyStack, tokens: list[int], n_predict: int) -> dict[str, Any]:
    events = [line.removeprefix("data: ") for line in ask(stack, tokens, n_predict, stream=True).text.splitlines()]
    last: dict[str, Any] = json.loads([event for event in events if event.startswith("{")][-1])
    return last


def test_of_streams_that_outgrow_the_cache_one_is_truncated(stack: ProxyStack, noise: Noise) -> None:
    """All four are let in: how long an answer gets is not known beforehand."""
    with ThreadPoolExecutor(4) as threads:
        ended = list(threads.map(lambda seed: last_of_stream(stack, noise(seed, 150), 160), range(4)))
    assert [event["stop_type"] for event in ended] == ["limit"] * 4
    assert sorted(event["truncated"] for event in ended) == [False, False, False, True]
    for event in ended:
        assert (0 < event["tokens_predicted"] < 160) if event["truncated"] else event["tokens_predicted"] == 160
    receipts = stack.http.get("/polykv/requests").json()["requests"]
    assert sorted(receipt["error"] or "" for receipt in receipts) == ["", "", "", "truncated"]
    assert "opencoti_polykv:truncated_total 1.0" in stack.http.get("/metrics").text
