"""``polykvctl explain`` against the real proxy, in front of the fake engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner, Result

from polykv_proxy.app import make_app
from polykv_proxy.cli import app
from polykv_proxy.cli.explain import told
from polykv_proxy.config import load_settings
from tests.fake_engine import FakeEngine

RULES = "Read before you write, and say what you do not know. " * 3


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine) -> AsyncIterator[str]:
    application = make_app(load_settings(upstream_url=engine.url, state=":memory:"))
    async with TestServer(application) as server:
        yield str(server.make_url("/")).rstrip("/")


async def chat(proxy: str, request_id: str, *said: str, **fields: Any) -> None:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": RULES}]
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    body = {"messages": messages, "max_tokens": 2, **fields}
    async with httpx.AsyncClient(base_url=proxy, trust_env=False) as client:
        await client.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})


async def explain(proxy: str, *args: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["explain", *args, "--url", proxy])


def test_who_was_refused_after_a_wait() -> None:
    """What it waited for, and how many cells it needed."""
    receipt = {
        **{"request_id": "r", "path": "/v1/chat/completions", "stream": False, "received_ts": 1.0, "sent_ts": None},
        **{"first_token_ts": None, "ended_ts": 31.0, "status": 503, "error": "kv_exhausted", "decision": "refused"},
        **{"message": "the KV cache is full: this request needs 390 cells, 12 are missing", "session_id": "s"},
        **{"parent_session_id": None, "slot_id": None, "displaced": [], "held_ms": {"cells": 30000}},
        **{"predicted_n": None, "divergence": None, "normalised": []},
    }
    lines = told(receipt)
    assert lines[1].endswith(", status 503, error kv_exhausted")
    assert lines[2:] == [
        "session s",
        "refused the KV cache is full: this request needs 390 cells, 12 are missing",
        "held    30,000 ms for free cells",
        "times   ended after 30,000 ms",
    ]


ADMISSION: dict[str, Any] = {
    **{"decision": "admitted", "reason": "ok", "scope": 1, "waits_for": None, "place": None, "eta_ms": None},
    **{"left_ms": None, "ends_first": None},
    **{"sessions_remaining": None, "projected_mean_tps_model": 9.5, "projected_mean_tps_measured": 9.25},
    **{"projected_mean_tps_roofline": None, "settled_mean_tps": 9.3},
}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {},
            "gate    let in; 9.5 tok/s forecast for a saturated engine, 9.2 tok/s forecast by earlier admissions, "
            "9.3 tok/s once it had settled",
        ),
        (
            {"decision": "queued", "reason": "kv headroom exhausted", "waits_for": "admission", "place": 2}
            | {"eta_ms": 1500, "projected_mean_tps_model": None, "projected_mean_tps_measured": None}
            | {"settled_mean_tps": None},
            "gate    waits to be let in: kv headroom exhausted, 2nd in line, about 2 s to go",
        ),
        (
            {"decision": "queued", "reason": "ok", "waits_for": "admission", "place": 2, "left_ms": 29_000}
            | {"ends_first": True, "projected_mean_tps_model": None, "projected_mean_tps_measured": None}
            | {"settled_mean_tps": None},
            "gate    waits to be let in, 2nd in line, but its time in line ends first, in 29 s",
        ),
        (
            {"decision": "continuation", "reason": "continuation", "waits_for": "turn", "place": 1}
            | {"projected_mean_tps_model": None, "projected_mean_tps_measured": None, "settled_mean_tps": None},
            "gate    known, it goes on; its turn is held, 1st in line",
        ),
        (
            {"decision": "admitted", "reason": "projected mean tps below floor", "settled_mean_tps": None}
            | {"projected_mean_tps_measured": None},
            "gate    let in: projected mean tps below floor; 9.5 tok/s forecast for a saturated engine",
        ),
    ],
)
def test_how_it_came_past_the_gate(changed: dict[str, Any], line: str) -> None:
    receipt = {
        **{"request_id": "r", "path": "/completion", "stream": False, "received_ts": 1.0, "sent_ts": None},
        **{"first_token_ts": None, "ended_ts": None, "status": None, "error": None, "decision": None, "message": None},
        **{"session_id": "s", "parent_session_id": None, "slot_id": None, "displaced": [], "held_ms": {}},
        **{"predicted_n": None, "divergence": None, "normalised": [], "admission": ADMISSION | changed},
    }
    assert told(receipt)[-1] == line
    assert not any(line.startswith("gate") for line in told(receipt | {"admission": None}))


async def test_the_gate_is_told_of_requests_that_came_past_one(proxy: str) -> None:
    async with httpx.AsyncClient(base_url=proxy, trust_env=False) as client:
        body = {"prompt": RULES + "Go.", "n_predict": 2}
        await client.post("/polykv/pools", json={"prompt": RULES, "name": "rules"})
        await client.post("/completion", json=body, headers={"x-request-id": "before"})
        policy = {"target_tps_per_session": 1e6, "mode": "enforced", "guarantee_min_sessions": 9}
        assert (await client.post("/polykv/pools/rules/admission", json=policy)).status_code == 200
        fields = {"session_id": "new", "pool_id": "rules"}
        await client.post("/completion", json=body | fields, headers={"x-request-id": "after"})
    assert "gate" not in (await explain(proxy, "before")).stdout
    assert "gate    let in by the guarantee" in (await explain(proxy, "after")).stdout


async def test_the_latest_and_one_by_its_id(proxy: str) -> None:
    await chat(proxy, "first", "look at the parser", session_id="s")
    await chat(proxy, "second", "look at the lexer", "yes", "go", session_id="s")
    for args in ((), ("second",)):
        told = await explain(proxy, *args)
        assert (told.exit_code, told.stderr) == (0, "")
        lines = told.stdout.splitlines()
        assert lines[0] == "request second: /v1/chat/completions, in one piece"
        assert lines[1].startswith("at      20")
        assert lines[1].endswith(", status 200")
        assert lines[2] == "session s, in slot 0"
        assert lines[3].startswith("prefix  no pool: 0 tokens expected, ")
        assert "missed  diverged: the prompt leaves what it was expected to begin with" in lines
        differs = " ".join(told.stdout.split())
        assert "differs from its session's last prompt (" in differs
        assert ", in messages[1] (user) the line at character 0, from its 13th character on: look at" in differs
        assert max(map(len, lines)) <= 80
        assert lines[-1].strip() == "look at the lexer"
    told = await explain(proxy, "first", "--json")
    answer = json.loads(told.stdout)
    assert (answer["request_id"], answer["divergence"]) == ("first", None)


async def test_a_refusal(proxy: str) -> None:
    async with httpx.AsyncClient(base_url=proxy, trust_env=False) as client:
        await client.post("/v1/chat/completions", content=b"{", headers={"x-request-id": "bad"})
    lines = (await explain(proxy)).stdout.splitlines()
    assert lines[1].endswith(", error invalid_json")
    assert lines[2] == "refused before it was read: invalid_json"


async def test_a_refusal_of_what_was_read(proxy: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "pool_id": "nope"}
    async with httpx.AsyncClient(base_url=proxy, trust_env=False) as client:
        refused = await client.post("/v1/chat/completions", json=body, headers={"x-polykv-strict": "1"})
    assert refused.status_code == 404
    told = (await explain(proxy)).stdout
    assert "before it was read" not in told
    assert "refused: there is no such pool, and x-polykv-strict asks for an error then" in " ".join(told.split())


async def test_a_line_that_can_be_pinned(proxy: str) -> None:
    for request_id, day in (("a", "2026-11-29"), ("b", "2026-11-30")):
        messages = [
            {"role": "system", "content": f"Today's date is {day}.\n{RULES}"},
            {"role": "user", "content": "go"},
        ]
        async with httpx.AsyncClient(base_url=proxy, trust_env=False) as client:
            body = {"messages": messages, "max_tokens": 2}
            await client.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})
    told = (await explain(proxy, "b")).stdout
    lines = told.splitlines()
    assert "        the line at character 0, from its 25th character on:" in lines
    assert "        Today's date is 2026-11-30." in lines
    assert "remedy  start the proxy with POLYKV_NORMALISE=date: " in told
    assert max(map(len, lines)) <= 80


async def test_text_of_clients_is_shown_escaped(proxy: str) -> None:
    await chat(proxy, "a", "look at the parser", session_id="s")
    await chat(proxy, "b", "look at the \x1b[31mlexer", "yes", "go", session_id="s")
    told = await explain(proxy)
    assert "\x1b" not in told.stdout
    assert "look at the \\x1b[31mlexer" in told.stdout


async def test_nothing_to_explain(proxy: str) -> None:
    told = await explain(proxy)
    assert (told.exit_code, told.stdout) == (1, "")
    assert told.stderr.startswith("polykvctl: the proxy knows no request yet: send one to its /v1/chat/completions, ")
    assert f"(base URL {proxy}/v1)" in told.stderr
    told = await explain(proxy, "nobody")
    wanted = "the proxy knows no request nobody; it keeps the last 1,000 since it was started (GET /polykv/requests)"
    assert told.stderr == f"polykvctl: {wanted}\n"
