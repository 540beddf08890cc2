"""``polykvctl pools`` against the real proxy, in front of the fake engine: the two sides of the contract meet."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest_asyncio
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner, Result

from polykv_proxy.app import make_app
from polykv_proxy.cli.pools import app
from polykv_proxy.config import load_settings
from tests.fake_engine import FakeEngine

runner = CliRunner()


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine) -> AsyncIterator[str]:
    settings = load_settings(upstream_url=engine.url, state=":memory:")
    async with TestServer(make_app(settings)) as server:
        yield str(server.make_url("/")).rstrip("/")


async def pools(proxy: str, *args: str, stdin: str | None = None) -> Result:
    return await asyncio.to_thread(runner.invoke, app, [*args, "--url", proxy], input=stdin)


async def test_pools_from_birth_to_release(proxy: str) -> None:
    made = await pools(proxy, "create", "--prompt", "You are a careful engineer.", "--name", "base", "--pin")
    assert made.exit_code == 0, made.stderr
    assert made.stdout.startswith("pool 1 (base): ")
    forked = await pools(proxy, "fork", "base", "--own-tokens", "-", "--name", "child", "--json", stdin="[70, 71, 72]")
    child = json.loads(forked.stdout)
    assert (child["parent"], child["own_n_tokens"], child["residency"]) == (1, 3, "resident")
    branched = await pools(proxy, "fork", "base", "--prompt", "You are a careful writer.", "--json")
    assert 0 < json.loads(branched.stdout)["branch_pos"] < child["branch_pos"]

    async with httpx.AsyncClient(base_url=proxy) as http:
        turn = {"prompt": "You are a careful engineer. Go.", "n_predict": 3, "pool_id": "base", "session_id": "agent-7"}
        assert (await http.post("/completion", json=turn)).status_code == 200
    drawn = (await pools(proxy, "tree")).stdout
    for expected in ("base", "├─ child", "└─ #", "▸ agent-7", "resident pinned", "3 pools, depth 2", "1 session"):
        assert expected in drawn
    shown = (await pools(proxy, "show", "base")).stdout
    assert "pinned            yes" in shown
    assert len((await pools(proxy, "ls")).stdout.splitlines()) == 1 + 3

    refused = await pools(proxy, "release", "base")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "pool_has_children" in refused.stderr
    released = await pools(proxy, "release", "base", "--recursive")
    assert released.exit_code == 0
    assert released.stdout.splitlines()[0] == "released pools 3, 2, 1"
    assert "{" not in released.stdout
    assert "No pools" in (await pools(proxy, "tree")).stdout


async def test_messages_of_a_chat_request_become_a_pool(proxy: str) -> None:
    request = {"model": "m", "messages": [{"role": "system", "content": "You review code."}], "stream": True}
    made = await pools(proxy, "create", "--messages", "-", "--json", stdin=json.dumps(request))
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["prefix_len"] > 10


async def test_what_the_proxy_refuses_is_one_line(proxy: str) -> None:
    for args, code in (
        (["show", "nobody"], "pool_not_found"),
        (["create", "--prompt", "x", "--name", "a b"], "invalid_request"),
        (["create", "--from-session", "nobody"], "session_not_found"),
        (["create", "--tokens", "-"], "invalid_request"),
    ):
        result = await pools(proxy, *args, stdin="[]")
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
        assert code in result.stderr
