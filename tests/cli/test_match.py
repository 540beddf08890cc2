"""``polykvctl match`` against the real proxy, in front of the fake engine."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner, Result

from polykv_proxy.app import CONTROL, make_app
from polykv_proxy.cli import app
from polykv_proxy.config import load_settings
from polykv_proxy.control import CreatePool, Source
from tests.fake_engine import FakeEngine

SYSTEM = {"role": "system", "content": "You are an agent with very many tools and rules."}
ASK = {"role": "user", "content": "What is it?"}


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine) -> AsyncIterator[str]:
    application = make_app(load_settings(upstream_url=engine.url, state=":memory:"))
    async with TestServer(application) as server:
        await application[CONTROL].create_pool(CreatePool(source=Source(messages=[SYSTEM, ASK]), name="base"))
        yield str(server.make_url("/")).rstrip("/")


async def match(proxy: str, *args: str, stdin: str | None = None) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["match", *args, "--url", proxy], input=stdin)


async def test_messages_from_a_file_and_from_stdin(proxy: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": [SYSTEM, ASK, ASK], "temperature": 1}))
    told = await match(proxy, "--messages", str(file))
    assert (told.exit_code, told.stderr) == (0, "")
    assert told.stdout.startswith("pool 1 (base): ")
    assert told.stdout.splitlines()[1:] == [
        "to prefill: what follows the pool; the template's cue to answer is part of it"
    ]
    edited = json.dumps([SYSTEM, ASK | {"content": "Why?"}])
    told = await match(proxy, "--messages", "-", "--pool", "base", stdin=edited)
    assert told.stdout.splitlines()[1].startswith("diverged: the prompt leaves pool 1 (")
    assert told.stdout.splitlines()[1].endswith(", in message 1")
    answer = json.loads((await match(proxy, "--messages", "-", "--pool", "1", "--json", stdin=edited)).stdout)
    assert answer.keys() == {"pool_id", "name", "prefix_n_tokens", "uncached_n_tokens", "miss_reason", "divergence"}
    assert (answer["pool_id"], answer["name"], answer["divergence"]["message"]) == (1, "base", 1)


async def test_tokens_and_prompts(proxy: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Hello")
    for source in (
        ["--tokens", "-"],
        ["--prompt", "Hello"],
        ["--prompt-file", str(tmp_path / "prompt.txt")],
    ):
        told = await match(proxy, *source, stdin=" ".join(str(byte) for byte in b"Hello"))
        assert told.stdout.splitlines() == [
            "no pool: 0 of 5 tokens shared, 5 to prefill",
            "no_pool: no pool begins with the first token",
        ]


async def test_what_is_too_short_to_be_shared_is_said_to_be(proxy: str) -> None:
    other = json.dumps([{"role": "user", "content": "Good morning."}])
    first, why = (await match(proxy, "--messages", "-", stdin=other)).stdout.splitlines()
    assert first.startswith("no pool: 0 of ")
    assert re.fullmatch(r"no_pool: only the first \d+ tokens are those of pool 1 \(\d+ tokens\): too few to share", why)
    _, why = (await match(proxy, "--tokens", "-", "--pool", "base", stdin="1")).stdout.splitlines()
    assert re.fullmatch(r"diverged: the prompt and pool 1 \(\d+ tokens\) do not even begin with the same token", why)


async def test_how_it_ends(proxy: str) -> None:
    wrong = await match(proxy, "--prompt", "a", "--tokens", "-", stdin="1")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "give exactly one of --prompt, --prompt-file, --messages, --tokens, not" in wrong.stderr
    unknown = await match(proxy, "--prompt", "a", "--pool", "nobody")
    assert unknown.exit_code == 1
    assert "pool_not_found" in unknown.stderr
    away = await match("http://127.0.0.1:1", "--prompt", "a")
    assert away.exit_code == 3
