"""``polykvctl tps``: once, followed, as JSON lines; at 80 columns nothing is cut but a long name."""

import asyncio
import io
import json
import re
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from polykv_proxy.cli.tps import _picture, draw_on, tps
from tests.cli.contract_server import ContractServer
from tests.relay.conftest import Proxy, make_proxy, proxy
from tests.relay.raw import until

__all__ = ["make_proxy", "proxy"]

app = typer.Typer()
app.command()(tps)
runner = CliRunner()


def session(name: str, **more: Any) -> dict[str, Any]:
    known = {"pool_id": None, "tps_ewma": None, "n_decoded": 0, "ttft_ms": None, "state": "idle"}
    context = {"ctx_used": None, "ctx_total": 8192, "ctx_headroom_tokens": None}
    return {"session_id": name, **known, **context, **more}


SAMPLE = {
    "ts": 1795995876.3,
    "aggregate_tps": 1043.27,
    "mean_active_tps": 521.6,
    "n_active": 2,
    "n_warming": 1,
    "sessions": [
        session("an-agent-that-has-rested-for-long-and-has-a-very-long-name/0001", n_decoded=1234, tps_ewma=9.04),
        session("warm", state="prefilling", ctx_used=1753, ctx_headroom_tokens=6439),
        session(
            "an-agent-that-runs-and-has-a-very-long-name-too/0002",
            pool_id=123456,
            state="decoding",
            tps_ewma=1043.27,
            n_decoded=123456,
            ttft_ms=12345.6,
            ctx_used=112345,
            ctx_headroom_tokens=131072,
        ),
        session("b", pool_id=7, state="decoding", tps_ewma=0.0, n_decoded=3, ttft_ms=3.2, ctx_used=9),
    ],
}


def told(sample: dict[str, Any], *args: str) -> Result:
    with ContractServer() as server:
        server.answer_next = (200, json.dumps(sample).encode(), {})
        return runner.invoke(app, [*args, "--url", server.url], env={"COLUMNS": "80"})


def test_the_sum_then_who_is_at_work_then_who_rests() -> None:
    result = told(SAMPLE)
    assert result.exit_code == 0, result.stderr
    summary, heading, *rows = result.stdout.splitlines()
    assert summary == "1,043.3 tok/s in all · 521.6 on average · 2 decoding · 1 warming up"
    assert heading.split() == ["session", "pool", "tok/s", "decoded", "first", "context", "left", "state"]
    assert [row.split()[-1] for row in rows] == ["decoding", "decoding", "prefilling", "idle"]
    for number in ("123456", "1,043.3", "123,456", "12,346 ms", "112,345", "131,072"):
        assert number in rows[0]
    assert rows[1].split() == ["b", "7", "0.0", "3", "3", "ms", "9", "decoding"]
    assert rows[2].split() == ["warm", "0", "1,753", "6,439", "prefilling"]
    assert rows[3].startswith("an-agent-tha")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_what_is_unknown_is_no_number() -> None:
    unknown = dict.fromkeys(("aggregate_tps", "mean_active_tps", "n_active", "n_warming"))
    result = told({"ts": 1.0, **unknown, "sessions": [session("a", n_decoded=None)]})
    assert result.stdout.splitlines()[0] == "? tok/s in all · ? decoding · ? warming up"
    assert result.stdout.splitlines()[2].split() == ["a", "?", "idle"]


def test_json_is_the_answer_on_one_line() -> None:
    result = told(SAMPLE, "--json")
    assert (json.loads(result.stdout), result.stdout.count("\n")) == (SAMPLE, 1)


@pytest.mark.parametrize("as_json", [True, False])
def test_following_goes_on_until_the_proxy_ends_it(as_json: bool) -> None:
    lines = b"".join(b"data: %s\n\n" % json.dumps(SAMPLE | {"n_active": n}).encode() for n in (1, 2, 3))
    with ContractServer() as server:
        server.answer_next = (200, lines, {"content-type": "text/event-stream"})
        args = ["--follow", "--interval-ms", "100", "--url", server.url, *(["--json"] if as_json else [])]
        result = runner.invoke(app, args, env={"COLUMNS": "80"})
        assert server.asked[0].path == "/polykv/tps?stream=1&interval_ms=100"
    assert result.exit_code == 0
    assert "shutting down" in result.stderr
    if as_json:
        assert [json.loads(line)["n_active"] for line in result.stdout.splitlines()] == [1, 2, 3]
    else:
        assert [line.split(" · ")[2] for line in result.stdout.splitlines() if "in all" in line] == [
            f"{n} decoding" for n in (1, 2, 3)
        ]


def test_on_a_terminal_it_is_drawn_in_one_place() -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=80, height=24, color_system=None)
    draw_on((_picture(SAMPLE | {"n_active": n}) for n in (1, 2, 3)), console)
    up = re.findall(r"\x1b\[(?:\d*A|2K)", drawn.getvalue())
    assert len(up) >= 2 * len(SAMPLE["sessions"])
    assert drawn.getvalue().count("tok/s in all") >= 3


def test_problems_of_a_stream_are_one_line_each() -> None:
    with ContractServer() as server:
        refusal = {"error": {"message": "the proxy is shutting down", "code": "draining"}, "src": "polykv_proxy"}
        server.answer_next = (503, json.dumps(refusal).encode(), {"Retry-After": "5"})
        result = runner.invoke(app, ["--follow", "--url", server.url])
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == ("polykvctl: the proxy is shutting down (draining, HTTP 503); try again in 5 s\n")
        server.answer_next = (200, b"<html>", {"content-type": "text/html"})
        result = runner.invoke(app, ["--follow", "--url", server.url])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    result = runner.invoke(app, ["--follow", "--url", server.url])
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert runner.invoke(app, ["--interval-ms", "99"]).exit_code == 2


async def test_against_the_proxy(proxy: Proxy) -> None:
    (await proxy.client.post("/completion", json={"prompt": "hi", "n_predict": 3, "session_id": "agent"})).json()
    once = await asyncio.to_thread(runner.invoke, app, ["--url", proxy.url])
    assert "agent" in once.stdout
    following = asyncio.create_task(asyncio.to_thread(runner.invoke, app, ["-f", "--json", "--url", proxy.url]))
    await until(lambda: proxy.control.feed._made is not None)
    proxy.relay.drain()
    result = await following
    assert result.exit_code == 0
    assert all(json.loads(line)["sessions"][0]["session_id"] == "agent" for line in result.stdout.splitlines())
