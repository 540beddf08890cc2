"""Chats with pictures when the cache is full of pools that nobody uses: the engine counts them, and pools leave."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from . import loopback
from .binaries import binary_path
from .noise import Noise
from .pictures import CHAT, QUESTION, Json, chat, picture, seeing, text_of
from .stack import ProxyStack
from .test_full_cache import pool
from .tiny_models import tiny_model_path, write_tiny_projector

pytestmark = pytest.mark.engine

N_CTX, N_POOLS, N_POOL = 1024, 4, 240
SYSTEM = "You are a painter of squares. " * 16
SOURCE = {"type": "base64", "media_type": "image/png", "data": picture(1).partition(",")[2]}
MESSAGES = [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]
INPUT = [{"role": "user", "content": [{"type": "input_image", "image_url": picture(1)}]}]


@pytest.fixture(scope="module")
def stack(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyStack]:
    dir_ = tmp_path_factory.mktemp("full")
    projector = dir_ / "mmproj.gguf"
    write_tiny_projector(projector)
    flags = ("-t", "1", "--mmproj", str(projector))
    model, args = tiny_model_path("dense", chat_model), ("--ctx", str(N_CTX))
    with ProxyStack(binary_path("patched"), model, *flags, log_dir=dir_, up_args=args) as stack:
        yield stack


@pytest.fixture
def full(stack: ProxyStack, noise: Noise) -> Iterator[ProxyStack]:
    """A cache of idle pools; they are gone after the test."""
    made = [pool(stack, noise(seed, N_POOL)) for seed in range(N_POOLS)]
    yield stack
    for pool_id in made:
        stack.http.delete(f"/polykv/pools/{pool_id}").raise_for_status()


def n_resident(stack: ProxyStack) -> int:
    pools = stack.http.get("/polykv/pools").raise_for_status().json()["pools"]
    return sum(pool["residency"] == "resident" for pool in pools)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat(SYSTEM, seeing(1)), id="chat"),
        pytest.param("/v1/messages", {"messages": MESSAGES, "system": SYSTEM, "max_tokens": 16}, id="messages"),
        pytest.param(
            "/v1/responses", {"input": INPUT, "instructions": SYSTEM, "max_output_tokens": 16}, id="responses"
        ),
    ],
)
def test_an_idle_pool_leaves_for_a_picture(full: ProxyStack, path: str, body: Json) -> None:
    assert n_resident(full) == N_POOLS
    answer = full.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert n_resident(full) == N_POOLS - 1


def test_its_answer_is_the_engines_own(full: ProxyStack) -> None:
    body = chat(SYSTEM, seeing(2))
    reply = full.http.post(CHAT, json=body).raise_for_status().json()
    own = (
        loopback.post(full.engine_url + CHAT, json=body | {"cache_prompt": False}, timeout=120)
        .raise_for_status()
        .json()
    )
    assert text_of(reply) == text_of(own)
    assert reply["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]
    counted = loopback.post(f"{full.engine_url}{CHAT}/input_tokens", json=body, timeout=120).raise_for_status().json()
    assert counted["input_tokens"] == own["usage"]["prompt_tokens"]


def test_pools_leave_for_a_picture_in_a_plain_prompt(full: ProxyStack) -> None:
    """Nobody counts those: room is made for a guess, which is more than this cache has."""
    marker = loopback.get(f"{full.engine_url}/props", timeout=60).raise_for_status().json()["media_marker"]
    prompt = {"prompt_string": f"{SYSTEM}{marker}{QUESTION}", "multimodal_data": [SOURCE["data"]]}
    answer = full.http.post("/completion", json={"prompt": prompt, "n_predict": 16})
    assert answer.status_code == 200, answer.text
    assert n_resident(full) == 0
