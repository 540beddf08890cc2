"""``polykvctl admission`` and ``polykvctl capacity``: against the real proxy, and what they say of given answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner, Result

from polykv_proxy.app import make_app
from polykv_proxy.cli import app
from polykv_proxy.config import load_settings
from tests.cli.contract_server import ContractServer
from tests.fake_engine import FakeEngine

runner = CliRunner()


@pytest_asyncio.fixture
async def proxy(engine: FakeEngine) -> AsyncIterator[str]:
    async with TestServer(make_app(load_settings(upstream_url=engine.url, state=":memory:"))) as server:
        url = str(server.make_url("/")).rstrip("/")
        await ctl(url, "pools", "create", "--prompt", "x" * 100, "--name", "base")
        await ctl(url, "pools", "fork", "base", "--prompt", "x" * 100 + "y", "--name", "leaf")
        yield url


async def ctl(proxy: str, *args: str) -> Result:
    return await asyncio.to_thread(runner.invoke, app, [*args, "--url", proxy])


async def test_get_set_drop(proxy: str) -> None:
    none = await ctl(proxy, "admission", "get", "base")
    assert none.stdout == "pool 1 (base): no policy, nobody is held or refused\n"
    given = ["--mode", "enforced", "--on-saturation", "queue", "--max-queue", "8", "--queue-timeout-ms", "2500"]
    made = await ctl(proxy, "admission", "set", "base", "--target-tps", "7.5", *given)
    assert made.stdout.splitlines() == [
        "pool 1 (base): enforced, 7.5 tok/s per session; its own policy",
        "when it is too full          queue: it waits in line",
        "sessions that always get in  1",
        "estimator                    settled",
        "an admission settles in      48 tokens",
        "or in at most                5,000 ms",
        "a turn is held at most       never",
        "places in line               8",
        "and the wait in it           2,500 ms",
    ]
    again = await ctl(proxy, "admission", "set", "1", "--target-tps", "7.5", *given)
    assert again.stdout.splitlines()[0].endswith("its own policy, as it was before")
    large = await ctl(proxy, "admission", "set", "leaf", "--target-tps", "1000000")
    assert large.stdout.startswith("pool 2 (leaf): advisory, 1,000,000 tok/s per session; its own policy\n")
    await ctl(proxy, "admission", "drop", "leaf")
    below = await ctl(proxy, "admission", "get", "leaf")
    assert below.stdout.startswith("pool 2 (leaf): enforced, 7.5 tok/s per session; that of pool 1\n")
    replaced = await ctl(proxy, "admission", "set", "base", "--target-tps", "4")
    assert replaced.stdout.splitlines()[:2] == [
        "pool 1 (base): advisory, 4 tok/s per session; its own policy",
        "advisory: `polykvctl capacity` tells, and no request is held or refused",
    ]
    assert "places in line               64" in replaced.stdout
    dropped = await ctl(proxy, "admission", "drop", "base")
    assert dropped.stdout == none.stdout
    assert (await ctl(proxy, "admission", "drop", "base")).stdout == none.stdout[:-1] + ", as it was before\n"


async def test_every_option_reaches_the_policy(proxy: str) -> None:
    given = {
        "target_tps": 3,
        "mode": "enforced",
        "on_saturation": "warn",
        "guarantee_min_sessions": 2,
        "settle_tokens": 10,
        "settle_max_ms": 20,
        "estimator": "roofline",
        "max_turn_hold_ms": 30,
        "max_queue": 40,
        "queue_timeout_ms": 50,
    }
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    made = json.loads((await ctl(proxy, "admission", "set", "base", *options, "--json")).stdout)
    given["target_tps_per_session"] = given.pop("target_tps")
    assert {name: made[name] for name in given} == given
    assert json.loads((await ctl(proxy, "admission", "get", "base", "--json")).stdout) | {"changed": True} == made
    assert json.loads((await ctl(proxy, "admission", "drop", "base", "--json")).stdout)["source"] == "none"


@pytest.mark.parametrize(
    ("status", "arguments", "said"),
    [
        (1, ["get", "nobody"], "pool_not_found"),
        (1, ["set", "nobody", "--target-tps", "5"], "pool_not_found"),
        (1, ["set", "base", "--target-tps", "2000000"], "at most 1,000,000"),
        (2, ["set", "base", "--target-tps", "0"], "--target-tps must be more than 0"),
        (2, ["set", "base", "--target-tps", "nan"], "--target-tps must be more than 0"),
        (2, ["set", "base", "--target-tps", "5", "--mode", "strict"], "'strict' is none of advisory, enforced"),
        (2, ["set", "base", "--target-tps", "5", "--estimator", "x"], "'x' is none of settled, roofline"),
        (2, ["get", "a/b"], "is no pool"),
    ],
)
async def test_how_it_ends(proxy: str, status: int, arguments: list[str], said: str) -> None:
    done = await ctl(proxy, "admission", *arguments)
    assert (done.exit_code, done.stdout) == (status, "")
    assert (done.stderr.count("\n"), said in done.stderr) == (1, True)


CAPACITY: dict[str, Any] = {
    "pool_id": 1,
    "name": "base",
    "can_admit": True,
    "reason": "ok",
    "projected_mean_tps_if_admitted": 9.25,
    "projected_mean_tps_model": 9.5,
    "projected_mean_tps_measured": 9.25,
    "projected_mean_tps_roofline": None,
    "projected_idle_estimate": False,
    "drop_per_admit_ewma": 1.75,
    "mean_active_tps": 11.0,
    "n_active": 3,
    "n_warming": 0,
    "n_pool_sessions": 3,
    "guaranteed": False,
    "known_session": False,
    "settling": False,
    "settle_remaining_ms": None,
    "headroom_sessions": 2,
    "kv_headroom_pct": 40.2,
    "compaction_pressure": 0.125,
    "kv_streams_total": None,
    "kv_streams_free": None,
    "kv_cells_per_stream": None,
    "target_tps_per_session": 5.0,
    "mode": "enforced",
    "estimator": "settled",
    "seq_ids_used": 1,
    "seq_ids_max": 16,
}


def said_of(*arguments: str, **known: Any) -> list[str]:
    with ContractServer() as server:
        server.answer_next = (200, json.dumps(CAPACITY | known).encode(), {})
        done = runner.invoke(app, ["capacity", "base", *arguments, "--url", server.url])
        assert done.exit_code == 0, done.stderr
        wanted = "/polykv/pools/base/capacity"
        assert server.asked[0].path == wanted + ("?expected_tokens=900&session_id=a%2F1+b" if arguments else "")
        return done.stdout.splitlines()


def test_what_capacity_rests_on() -> None:
    assert said_of("--expected-tokens", "900", "--session", "a/1 b") == [
        "pool 1 (base): room for 2 more sessions: ok",
        "rate with one more    9.2 tok/s",
        "floor                 5.0 tok/s",
        "rate now              11.0 tok/s",
        "who decode            3",
        "without a rate yet    0",
        "sessions of the pool  3",
        "one more costs        1.8 tok/s",
        "free cells            40 %",
        "compaction pressure   0.12",
    ]


@pytest.mark.parametrize(
    ("known", "first"),
    [
        ({"headroom_sessions": 1, "reason": "guaranteed minimum"}, "room for 1 more session: guaranteed minimum"),
        (
            {"headroom_sessions": 210, "projected_mean_tps_if_admitted": None},
            "room for 210 more sessions: ok, by free cells alone: no rate is known yet",
        ),
        ({"headroom_sessions": None}, "room for one more session at least: ok"),
        ({"known_session": True, "reason": "continuation"}, "this session is known and goes on"),
        (
            {"can_admit": False, "headroom_sessions": 0, "reason": "projected mean tps below floor"},
            "no room for one more session: projected mean tps below floor",
        ),
        (
            {"can_admit": False, "reason": "measurement settling", "settling": True, "settle_remaining_ms": 3200},
            "no room for one more session: measurement settling, 3,200 ms to go",
        ),
    ],
)
def test_the_verdict_of_capacity(known: dict[str, Any], first: str) -> None:
    assert said_of(**known)[0] == f"pool 1 (base): {first}"


def test_what_is_not_known_is_left_out_and_advice_is_called_so() -> None:
    unknown = dict.fromkeys(("mean_active_tps", "projected_mean_tps_if_admitted", "drop_per_admit_ewma"))
    lines = said_of(mode="advisory", **unknown)
    assert not any(line.startswith(("rate", "one more costs")) for line in lines)
    assert lines[-1] == "advisory: nobody is held or refused by it"
