"""``polykvctl top``: one picture of rates, those who wait, and the tree; drawn again, and as JSON lines."""

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from polykv_proxy.cli import app
from polykv_proxy.cli.top import _waiting
from polykv_proxy.gate.policy import Policy
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, make_proxy, proxy
from tests.relay.raw import until

__all__ = ["make_proxy", "proxy"]

PREFIX = list(range(100, 140))


async def top(url: str, *args: str) -> Result:
    command = ["top", "--interval-ms", "100", *args, "--url", url]
    return await asyncio.to_thread(CliRunner().invoke, app, command, env={"COLUMNS": "80"})


async def until_told(proxy: Proxy, tps: float) -> None:
    """The proxy has read this rate from the engine."""
    for _ in range(100):
        if (await proxy.client.get("/polykv/tps")).json()["mean_active_tps"] == tps:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{tps} tokens per second were never told")


def receipt(session: str, received_ts: float = 1.0, **admission: Any) -> dict[str, Any]:
    known = {"waits_for": "admission", "reason": "ok", "place": None, "eta_ms": None, "left_ms": 24_400}
    known["ends_first"] = False
    return {"session_id": session, "received_ts": received_ts, "admission": known | admission}


def test_who_waits_and_who_is_next() -> None:
    floor = "projected mean tps below floor"
    assert _waiting(
        [
            receipt("b", place=2, eta_ms=3000, reason=floor),
            receipt("a\x1b", place=1, reason=floor),
            receipt("d", place=3, ends_first=True),
            receipt("c", waits_for="turn", reason="continuation"),
        ]
    ) == [
        "c is held before its turn: continuation",
        f"a\\x1b waits to be let in, 1st in line: {floor}",
        f"b waits to be let in, 2nd in line, about 3 s to go: {floor}",
        "d waits to be let in, 3rd in line, but its time in line ends first, in 24 s: others are ahead",
    ]
    many = _waiting([receipt(str(i), place=i) for i in range(1, 12)])
    assert (len(many), many[-1]) == (6, "… and 6 more wait")
    assert _waiting([]) == []


async def test_nobody_is_there(proxy: Proxy) -> None:
    shown = await top(proxy.url, "--count", "1")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith("? tok/s in all · 0 decoding · 0 warming up\n0 pools, depth 0 · 0 sessions · ")


@pytest.mark.parametrize("as_json", [True, False])
async def test_rates_those_who_wait_and_the_tree(engine: FakeEngine, proxy: Proxy, as_json: bool) -> None:
    engine.token_s = 0.01
    await proxy.pool(PREFIX, "desk")
    await proxy.control.set_policy("desk", Policy(1e6, mode="enforced", on_saturation="queue", settle_max_ms=0))
    body = {"prompt": [*PREFIX, 1], "n_predict": 3000, "stream": True, "pool_id": "desk"}
    turns = [asyncio.create_task(proxy.client.post("/completion", json=body | {"session_id": "runs"}))]
    await until(lambda: (rate := proxy.control.door.rate_of("runs")) is not None and rate.tps)  # type: ignore[arg-type]
    next(slot for slot in engine.slots if slot.state == "generating").tps_ewma = 76.5
    await until_told(proxy, 76.5)
    turns.append(asyncio.create_task(proxy.client.post("/completion", json=body | {"session_id": "waits"})))
    await until(lambda: proxy.control.door.n_waiting == 1)
    shown = await top(proxy.url, "--count", "2", *(["--json"] if as_json else []))
    assert (shown.exit_code, shown.stderr) == (0, "")
    if as_json:
        looks = [json.loads(line) for line in shown.stdout.splitlines()]
        assert len(looks) == 2
        for look in looks:
            assert (look["rates"]["n_active"], look["rates"]["mean_active_tps"]) == (1, 76.5)
            assert [r["session_id"] for r in look["waiting"]] == ["waits"]
            assert [pool["name"] for pool in look["tree"]["pools"]] == ["desk"]
    else:
        pictures = shown.stdout.split("\n\n")
        assert len(pictures) == 3
        for picture in pictures[:2]:
            assert "76.5 on average · 1 decoding" in picture.splitlines()[0]
            assert "waits waits to be let in, 1st in line" in picture.splitlines()[1]
            assert "▸ runs" in picture
            assert "1 pool, depth 1" in picture
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)


async def test_how_it_ends() -> None:
    gone = await top("http://127.0.0.1:1")
    assert (gone.exit_code, gone.stdout, gone.stderr.count("\n")) == (3, "", 1)
