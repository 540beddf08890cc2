"""Replies that say nothing about time: their `session_tps` is what the engine measured for the task."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .binaries import binary_path
from .stack import ProxyStack
from .test_dialects import BODIES

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def auto(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyStack]:
    with ProxyStack(binary_path("patched"), chat_model, "-t", "1", log_dir=tmp_path_factory.mktemp("rate")) as stack:
        yield stack


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_reply_in_one_piece_has_a_rate(auto: ProxyStack, path: str) -> None:
    """Near what chat, which has timings, says of the same work. Ten times in a row: the reply races with the stats."""
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    chat = BODIES["/v1/chat/completions"] | {"max_tokens": 24, "temperature": 0, "session_id": "chat"}
    auto.http.post("/v1/chat/completions", json=chat).raise_for_status()
    known = auto.http.post("/v1/chat/completions", json=chat).raise_for_status().json()["polykv"]["session_tps"]
    for i in range(10):
        body = BODIES[path] | {limit: 24, "temperature": 0, "session_id": f"{path}-{i}"}
        reply = auto.http.post(path, json=body).raise_for_status()
        told = reply.json()["polykv"]["session_tps"]
        assert told is not None
        assert reply.headers["x-session-tps"] == f"{told:.2f}"
        assert known / 4 < told < known * 4
