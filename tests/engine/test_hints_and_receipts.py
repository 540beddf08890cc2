"""Marks, receipts and pinned lines against the real engine: its templates, its tokens, what it says it reused."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import loopback
from .binaries import binary_path
from .stack import ProxyStack
from .tiny_models import tiny_model_path

pytestmark = pytest.mark.engine

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
RULES = "You are a careful engineer. Read before you write, and say plainly what you do not know. " * 20
FILE = "def f(x):\n    return x + 1\n" * 30
MARKS = [{"cache_control": {"type": "ephemeral"}}, {"prompt_cache_breakpoint": {"mode": "explicit"}}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.40.{0}; cc_entrypoint=cli; cch={0};"


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def stack(request: pytest.FixtureRequest, chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    dir_ = tmp_path_factory.mktemp("hints")
    model = tiny_model_path(request.param, chat_model)
    with ProxyStack(binary_path("patched"), model, log_dir=dir_, up_args=("--normalise", "billing")) as stack:
        yield stack


def text(said: str, mark: dict[str, Any] | None = None, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said, **(mark or {})}


def tokens_of(stack: ProxyStack, path: str, body: dict[str, Any]) -> list[int]:
    answer = loopback.post(f"{stack.engine_url}/polykv/engine/render", json={"path": path, "body": body}, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def n_common(one: list[int], other: list[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def receipt_of(stack: ProxyStack, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = stack.http.post(path, json={"max_tokens": 4, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    asked = {"request_id": answer.headers["x-request-id"]}
    (receipt,) = stack.http.get("/polykv/requests", params=asked).json()["requests"]
    return receipt


def wait_for(what: Callable[[], Any], timeout_s: float = 30) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("mark", MARKS, ids=["cache_control", "breakpoint"])
def test_the_engine_neither_refuses_nor_prints_marks(stack: ProxyStack, mark: dict[str, Any]) -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}

    def bodies(m: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        user = {"role": "user", "content": "hi"}
        return [
            (CHAT, {"messages": [{"role": "system", "content": [text("r", m)]}, {**user, "content": [text("a", m)]}]}),
            (CHAT, {"messages": [{**user, **m}], "tools": [{"type": "function", "function": function, **m}]}),
            (CHAT, {"messages": [user], "tools": [{"type": "function", "function": {**function, **m}}]}),
            (MESSAGES, {"system": [text("r", m)], "messages": [{**user, "content": [text("a", m), text("b")]}]}),
            (MESSAGES, {"messages": [user], "tools": [{"name": "f", "input_schema": {"type": "object"}, **m}]}),
            (
                MESSAGES,
                {
                    "messages": [
                        user,
                        {"role": "assistant", "content": [{**use, **m}]},
                        {"role": "user", "content": [{**result, **m}]},
                    ]
                },
            ),
            (RESPONSES, {"instructions": "r", "input": [{**user, "content": [text("a", m, "input_text")]}]}),
        ]

    for (path, marked), (_, plain) in zip(bodies(mark), bodies({}), strict=True):
        assert tokens_of(stack, path, marked) == tokens_of(stack, path, plain)


def test_a_mark_makes_the_pool_that_the_same_messages_would_make(stack: ProxyStack) -> None:
    rules = f"{stack.url} {RULES}"

    def body(question: str) -> dict[str, Any]:
        user = {"role": "user", "content": [text(FILE, MARKS[0]), text(question)]}
        return {"system": [text(rules, MARKS[0])], "messages": [user]}

    first = receipt_of(stack, MESSAGES, body("What does it do?"), **{"x-claude-code-session-id": "one"})
    assert first["pool_id"] is None

    def auto_pools() -> list[dict[str, Any]]:
        pools = stack.http.get("/polykv/pools").json()["pools"]
        found = [pool for pool in pools if pool["auto"]]
        return found if len(found) == 2 else []

    of_rules, of_file = wait_for(auto_pools)
    assert (of_file["parent"], of_file["prefix_len"] > of_rules["prefix_len"]) == (of_rules["pool_id"], True)
    made = stack.http.post("/polykv/pools", json={"messages": [{"role": "system", "content": rules}]}).json()
    assert (made["prefix_len"], made["same_as"]) == (of_rules["prefix_len"], of_rules["pool_id"])
    stack.http.delete(f"/polykv/pools/{made['pool_id']}")

    second = receipt_of(stack, MESSAGES, body("Rename x to y."), **{"x-claude-code-session-id": "two"})
    assert (second["pool_id"], second["decision"]) == (of_file["pool_id"], "attached")
    assert second["cached_n_tokens"] == of_file["prefix_len"]
    n_tokens = len(tokens_of(stack, MESSAGES, body("Rename x to y.")))
    assert second["cached_n_tokens"] + second["prompt_n"] == n_tokens


def test_a_conversation_diverges_where_a_message_was_changed(stack: ProxyStack) -> None:
    def chat(*said: str) -> dict[str, Any]:
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": part} for i, part in enumerate(said)]}

    turns = ["Look at the parser. " * 8, "Fine.", "And at\nthe lexer\ntoo. " * 3]
    going_on = [receipt_of(stack, CHAT, chat(*turns[:n]), **{"x-session-affinity": "talk"}) for n in (1, 3)]
    assert [receipt["divergence"] for receipt in going_on] == [None, None]
    changed = [turns[0].replace("parser", "printer", 1), *turns[1:], "Yes.", "Go."]
    receipt_of(stack, CHAT, chat(*changed), **{"x-session-affinity": "talk", "x-request-id": "changed"})

    def divergence() -> Any:
        (receipt,) = stack.http.get("/polykv/requests", params={"request_id": "changed"}).json()["requests"]
        return receipt["divergence"] if receipt["divergence"]["position"] is not None else None

    found = wait_for(divergence)
    expected = n_common(tokens_of(stack, CHAT, chat(*turns)), tokens_of(stack, CHAT, chat(*changed)))
    assert (found["against"], found["message"], found["position"]) == ("session", 0, expected)
    assert found["span"]["differs_at"] == len("Look at the p")


def test_a_pinned_billing_line_lets_agents_share(stack: ProxyStack) -> None:
    def body(n: int) -> dict[str, Any]:
        system = [text(BILLING.format(f"{n:03x}")), text(RULES)]
        return {"system": system, "messages": [{"role": "user", "content": f"{n}: what is next?"}]}

    told = []
    for n in range(3):
        headers = {"x-claude-code-session-id": f"c{stack.url}", "x-claude-code-agent-id": str(n)}
        told.append(receipt_of(stack, MESSAGES, body(n), **headers))
    assert [receipt["normalised"] for receipt in told] == [[], ["billing"], ["billing"]]
    last = tokens_of(stack, MESSAGES, body(2) | {"system": body(0)["system"]})
    assert told[2]["cached_n_tokens"] + told[2]["prompt_n"] == len(last)
    assert told[2]["prompt_n"] < 40
    assert told[2]["pool_id"] is not None
