"""``polykvctl pools pin|unpin|evict|flush`` and ``polykvctl sessions`` against the real proxy, and what they show."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner, Result

from polykv_proxy.app import make_app
from polykv_proxy.cli import app
from polykv_proxy.cli.output import human_bytes
from polykv_proxy.cli.pool_tree import draw_tree
from polykv_proxy.config import load_settings
from tests.cli.contract_server import ContractServer
from tests.fake_engine import FakeEngine
from tests.tree.make import add_root, extend, toks

runner = CliRunner()


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine) -> AsyncIterator[str]:
    settings = load_settings(upstream_url=engine.url, state=":memory:", pin_max_fraction=0.01)  # 163 cells
    async with TestServer(make_app(settings)) as server:
        yield str(server.make_url("/")).rstrip("/")


async def ctl(proxy: str, *args: str) -> Result:
    return await asyncio.to_thread(runner.invoke, app, [*args, "--url", proxy])


async def turn(proxy: str, prompt: str, session: str) -> None:
    async with httpx.AsyncClient(base_url=proxy) as http:
        body = {"prompt": prompt, "n_predict": 3, "session_id": session}
        assert (await http.post("/completion", json=body)).status_code == 200


async def test_pin_unpin_evict_flush(proxy: str) -> None:
    await ctl(proxy, "pools", "create", "--prompt", "x" * 100, "--name", "base")
    await ctl(proxy, "pools", "create", "--prompt", "y" * 100, "--name", "other")
    pinned = await ctl(proxy, "pools", "pin", "base")
    assert pinned.stdout.splitlines() == ["pool 1 (base): pinned; resident", "pinned       100 of 163 cells"]
    refused = await ctl(proxy, "pools", "pin", "other")
    assert (refused.exit_code, refused.stdout, len(refused.stderr.splitlines())) == (1, "", 1)
    assert "this pin would make it 200, and the budget is 163" in refused.stderr
    assert "pin_budget, HTTP 409" in refused.stderr
    assert "resident pinned, unused" in (await ctl(proxy, "pools", "tree")).stdout
    flushed = await ctl(proxy, "pools", "flush", "base")
    assert flushed.stdout.splitlines()[:2] == ["evicted      none", "kept         pool 1 (base): pinned"]
    unpinned = await ctl(proxy, "pools", "unpin", "base", "--json")
    assert json.loads(unpinned.stdout)["pinned"] is False
    evicted = await ctl(proxy, "pools", "evict", "base")
    assert evicted.stdout.splitlines() == [
        "pool 1 (base): cold",
        "freed        seq_ids 1, kv_cells 100, kv 102 kB",
    ]
    flushed = await ctl(proxy, "pools", "flush", "other")
    assert flushed.stdout.splitlines()[:2] == ["evicted      pool 2 (other)", "kept         none"]
    assert json.loads((await ctl(proxy, "pools", "flush", "other", "--json")).stdout)["evicted"] == []
    warm = await ctl(proxy, "pools", "evict", "base", "--to", "warm")
    assert (warm.exit_code, "?to=cold" in warm.stderr) == (1, True)
    wrong = await ctl(proxy, "pools", "evict", "base", "--to", "hot")
    assert (wrong.exit_code, len(wrong.stderr.splitlines())) == (2, 1)
    unknown = await ctl(proxy, "pools", "pin", "nobody")
    assert (unknown.exit_code, "pool_not_found" in unknown.stderr) == (1, True)


async def test_what_there_was_nothing_to_do_for_is_said() -> None:
    """Cold, warm, held by another, pinned already: each in its own words, and exit status 0."""
    async with FakeEngine(save_ram=1 << 24) as engine:
        settings = load_settings(upstream_url=engine.url, state=":memory:")
        async with TestServer(make_app(settings)) as server:
            proxy = str(server.make_url("/")).rstrip("/")

            async def told(*args: str) -> str:
                result = await ctl(proxy, "pools", *args)
                assert (result.exit_code, result.stderr) == (0, ""), result.stderr
                return result.stdout.splitlines()[0]

            await told("create", "--prompt", "x" * 1000, "--name", "a")
            assert await told("pin", "a") == "pool 1 (a): pinned; resident"
            assert await told("pin", "a") == "pool 1 (a): pinned, as it was before; resident"
            assert await told("unpin", "a") == "pool 1 (a): not pinned; resident"
            assert await told("unpin", "a") == "pool 1 (a): not pinned, as it was before; resident"
            size = human_bytes((await shown(proxy, "evict", "a", "--to", "warm"))["warm_bytes"])
            assert await told("evict", "a", "--to", "warm") == f"pool 1 (a): warm as before, {size} saved"
            assert await told("evict", "a", "--to", "cold") == "pool 1 (a): cold; what was saved of it is forgotten"
            for to in (["--to", "warm"], ["--to", "cold"], []):
                assert await told("evict", "a", *to) == (
                    "pool 1 (a): cold as before: nothing of it was in the cache or saved, "
                    "so there was nothing to save or drop"
                )
            assert await told("flush", "a") == (
                "nothing to evict: neither this pool nor any below it has a sequence in the cache"
            )
            await told("pin", "a")
            made = await told("fork", "a", "--prompt", "x" * 1000 + "y")
            assert made.startswith("pool 2: 1,001 tokens, 1,000 of them from pool 1 (a); resident in ")
            assert await told("evict", "a") == (
                "pool 1 (a): still resident: its own sequence is free, and that of pool 2 holds all of it"
            )
            assert await told("evict", "a") == (
                "pool 1 (a): still resident: it had no sequence of its own, and that of pool 2 holds all of it"
            )


async def shown(proxy: str, *args: str) -> dict[str, Any]:
    result = await ctl(proxy, "pools", *args, "--json")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


async def test_the_same_tokens_again_are_noted_beside_the_answer(proxy: str) -> None:
    made = await ctl(proxy, "pools", "create", "--prompt", "x" * 40, "--name", "a")
    assert (made.exit_code, made.stderr) == (0, "")
    for more in ([], ["--json"]):
        made = await ctl(proxy, "pools", "create", "--prompt", "x" * 40, *more)
        assert (made.exit_code, made.stderr.splitlines()) == (
            0,
            ["note: pool 1 has the very same tokens; release one of them if nobody needs both"],
        )
    assert json.loads(made.stdout)["same_as"] == 1


async def test_sessions_are_listed_shown_and_forgotten(proxy: str) -> None:
    assert (await ctl(proxy, "sessions")).stdout == "No sessions.\n"
    await ctl(proxy, "pools", "create", "--prompt", "You are one of many.", "--name", "base")
    await turn(proxy, "You are one of many. Go on.", "agent 1")
    await turn(proxy, "Something else.", "agent-2")
    lines = [line.split() for line in (await ctl(proxy, "sessions")).stdout.splitlines()]
    assert lines[0] == ["session", "pool", "slot", "prefix", "own", "KV", "tok/s", "state"]
    assert lines[2][0] == "agent-2"
    assert (lines[1][:3], lines[1][4], lines[1][-1]) == (["agent", "1", "1"], "20", "idle")
    listed = json.loads((await ctl(proxy, "sessions", "--json")).stdout)["sessions"]
    assert {session["session_id"] for session in listed} == {"agent 1", "agent-2"}
    result = await ctl(proxy, "sessions", "show", "agent 1")
    assert result.exit_code == 0, (result.stderr, result.exception)
    shown = result.stdout
    assert "pool_id              1" in shown
    assert "suffix_n_tokens      10" in shown
    assert re.search(r"^tps_ewma +(-|[\d,]+\.\d tok/s)$", shown, re.MULTILINE)
    assert re.search(r"^ctx_total +\d{1,3}(,\d{3})*$", shown, re.MULTILINE)
    assert json.loads((await ctl(proxy, "sessions", "show", "agent 1", "--json")).stdout)["n_turns"] == 1
    gone = await ctl(proxy, "sessions", "delete", "agent 1")
    assert gone.stdout == "forgot session agent 1 of pool 1; 0 running\n"
    missing = await ctl(proxy, "sessions", "delete", "agent 1")
    assert (missing.exit_code, "session_not_found" in missing.stderr) == (1, True)
    assert json.loads((await ctl(proxy, "sessions", "delete", "agent-2", "--json")).stdout)["n_running"] == 0


@pytest.mark.parametrize("session", ["team/agent 1", "/home/me/", "50%", "a%2Fb", "a\\b;c?d#e", "ü//x/..y"])
async def test_an_id_may_have_any_character(proxy: str, session: str) -> None:
    await turn(proxy, "Something else.", session)
    shown = await ctl(proxy, "sessions", "show", session, "--json")
    assert (shown.exit_code, json.loads(shown.stdout)["session_id"]) == (0, session)
    assert (
        await ctl(proxy, "sessions", "delete", session)
    ).stdout == f"forgot session {session} of no pool; 0 running\n"
    assert (await ctl(proxy, "sessions", "show", session)).exit_code == 1


@pytest.mark.parametrize("session", ["..", ".", "", "a/../b", "./a"])
async def test_a_session_that_would_be_another_path_is_wrong_usage(proxy: str, session: str) -> None:
    result = await ctl(proxy, "sessions", "show", session)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


async def test_an_option_in_front_of_the_command_is_not_ignored(proxy: str) -> None:
    args = ["sessions", "--url", "http://127.0.0.1:1", "delete", "s", "--url", proxy]
    result = await asyncio.to_thread(runner.invoke, app, args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "options go behind the command" in result.stderr


def test_the_tree_says_how_long_unused_pools_are_kept() -> None:
    with ContractServer() as server:
        used = server.resident(add_root(server.tree, toks(range(9)), name="used"))
        server.resident(extend(server.tree, used.pool_id, toks(1), branch_pos=4))
        server.in_use = {used.pool_id}
        for left_s, said in ((90.5, "grace 91 s"), (299.0, "grace 5 min"), (7300, "grace 3 h"), (9e5, "grace 11 d")):
            server.grace_end_s = time.time() + left_s
            lines = runner.invoke(app, ["pools", "tree", "--url", server.url]).stdout.splitlines()
            assert (lines[1].split()[-1], lines[2].split("resident ")[-1].strip()) == ("resident", said), lines
        server.grace_end_s = 0.0
        view = json.loads(runner.invoke(app, ["pools", "tree", "--json", "--url", server.url]).stdout)
    assert [part.plain for part in draw_tree(view).rows[-1].last] == ["resident", "grace", "over"]
