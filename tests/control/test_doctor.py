"""``GET /polykv/doctor``: what the proxy knows, turned into findings. The checks themselves: tests/doctor."""

import time
from typing import Any

import pytest

from tests.control.conftest import Plane, eventually, planes
from tests.fake_engine import FakeEngine, delay


async def findings(plane: Plane) -> dict[str, str]:
    """Id → severity."""
    status, body = await plane.call("GET", "/polykv/doctor")
    assert status == 200
    assert all(set(finding) == {"id", "severity", "what", "why", "do"} for finding in body["findings"])
    return {finding["id"]: finding["severity"] for finding in body["findings"]}


ALWAYS = {"journal_in_memory": "warning"}
"""The planes of these tests keep nothing."""

MIB = 1 << 20


async def test_a_good_engine():
    async with FakeEngine(save_ram=MIB) as engine, planes(engine) as plane:
        assert await findings(plane) == ALWAYS
        _, body = await plane.call("GET", "/polykv/doctor")
        assert body["status"] == "warnings"
        assert body["facts"]["n_slots"] == 4


@pytest.mark.parametrize(
    ("engine_args", "id_"),
    [({"hooks": False}, "engine_without_pools"), ({"share": "no such thing as a KV cache"}, "model_cannot_share")],
)
async def test_an_engine_that_holds_no_pools(engine_args: dict[str, Any], id_: str):
    async with FakeEngine(**engine_args) as engine, planes(engine) as plane:
        assert await findings(plane) == {id_: "error"} | ALWAYS
        _, body = await plane.call("GET", "/polykv/doctor")
        assert body["status"] == "errors"


async def test_an_engine_that_went_away_is_a_200_that_says_so():
    async with FakeEngine() as engine, planes(engine) as plane:
        await engine.kill()
        assert await findings(plane) == {"engine_unreachable": "error"} | ALWAYS


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, {"engine_key_missing": "error"}),
        ({"upstream_api_key": "x", "api_key": "mine", "admin_key": "a"}, {"engine_key_refused": "error"}),
        ({"upstream_api_key": "k"}, {"engine_key_for_all": "warning"}),
        ({"upstream_api_key": "k", "api_key": "mine", "admin_key": "a"}, {}),
    ],
)
async def test_an_engine_with_a_key(settings: dict[str, Any], found: dict[str, str]):
    async with FakeEngine(save_ram=MIB, api_key="k") as engine, planes(engine, **settings) as plane:
        headers = {"authorization": "Bearer a"}
        _, body = await plane.call("GET", "/polykv/doctor", headers=headers)
        assert {each["id"]: each["severity"] for each in body["findings"]} == found | ALWAYS
        if found:
            [told] = [each for each in body["findings"] if each["id"] in found]
            assert "POLYKV_UPSTREAM_API_KEY" in told["what"]
            assert "POLYKV_API_KEY" in told["do"]


async def test_an_engine_that_is_there_and_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polykv_proxy.upstream.client.READ_S", 0.05)
    async with FakeEngine(save_ram=MIB) as engine, planes(engine) as plane:
        engine.on("stats", "request", delay(3), times=None)
        await eventually(lambda: plane.control.watch.state == "away")
        assert await findings(plane) == {"engine_hangs": "error"} | ALWAYS
        _, body = await plane.call("GET", "/polykv/doctor")
        [told] = [each for each in body["findings"] if each["id"] == "engine_hangs"]
        assert "start llama-server" not in told["do"]
        assert "restart it" in told["do"]
        engine.faults.armed.clear()
        await eventually(lambda: plane.control.health()[0])
        assert await findings(plane) == ALWAYS


async def test_a_default_mode_without_a_floor_gates_nobody():
    async with FakeEngine(save_ram=MIB) as engine:
        async with planes(engine, default_mode="enforced") as plane:
            assert await findings(plane) == {"default_mode_alone": "warning"} | ALWAYS
            assert plane.control.policies.is_empty
        async with planes(engine, default_mode="enforced", default_target_tps=2) as plane:
            assert await findings(plane) == ALWAYS


async def test_another_proxy_manages_the_pools():
    async with FakeEngine() as engine, planes(engine) as plane:
        engine.hooks._owner = ("somebody else", time.monotonic() + 60)
        await eventually(lambda: plane.control.lease.taken_by == "somebody else", timeout_s=10)
        assert (await findings(plane))["not_owner"] == "error"


async def test_pools_that_nobody_uses_are_told_by_what_they_hold():
    async with FakeEngine() as engine, planes(engine) as plane:
        made = await plane.create(tokens=[1 + n % 50 for n in range(3000)], name="big")
        assert (await findings(plane))["idle_pools_tax"] == "warning"
        await plane.call("DELETE", f"/polykv/pools/{made['pool_id']}")
        assert "idle_pools_tax" not in await findings(plane)


async def told(plane: Plane, id_: str) -> str:
    _, body = await plane.call("GET", "/polykv/doctor")
    return next(finding["what"] for finding in body["findings"] if finding["id"] == id_)


async def test_an_engine_that_saves_nothing():
    async with FakeEngine() as engine, planes(engine) as plane:
        assert (await findings(plane))["warm_unavailable"] == "info"
        assert "--polykv-save-ram" in await told(plane, "warm_unavailable")


async def test_a_warm_tier_that_was_asked_for_and_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYKV_WARM_RAM_BYTES", "0")
    async with FakeEngine(save_ram=MIB) as engine, planes(engine) as plane:
        assert (await findings(plane))["warm_unavailable"] == "warning"
        assert "POLYKV_WARM_RAM_BYTES" in await told(plane, "warm_unavailable")


async def test_a_disk_that_was_asked_for_and_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYKV_WARM_DISK_BYTES", str(MIB))
    async with FakeEngine(save_ram=MIB) as engine, planes(engine) as plane:
        assert (await findings(plane))["warm_disk_unavailable"] == "warning"
    async with FakeEngine(save_ram=MIB, save_disk=MIB) as engine, planes(engine) as plane:
        assert await findings(plane) == ALWAYS


async def test_a_tier_under_pressure_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYKV_WARM_AFTER_S", "0")
    async with FakeEngine(save_ram=MIB) as engine, planes(engine) as plane:
        assert await findings(plane) == {"warm_under_pressure_only": "info"} | ALWAYS


async def test_keys_and_addresses():
    async with FakeEngine() as engine, planes(engine, host="0.0.0.0", api_key="k") as plane:
        assert (await findings(plane))["no_admin_key"] == "warning"
    async with FakeEngine() as engine, planes(engine, host="0.0.0.0", admin_key="k") as plane:
        assert "no_admin_key" not in await findings(plane)


async def test_files_of_saved_states_that_nobody_uses(tmp_path):
    """Only what the engine made is counted, and only where there is no budget for it, here or there."""
    folder = tmp_path / "pools.db.states"
    async with FakeEngine() as engine:
        settings = {"state": str(tmp_path / "pools.db")}
        async with planes(engine, **settings) as plane:
            assert "saved_states_left" not in await findings(plane), "no folder"
            folder.mkdir()
            for name in ("notes.txt", "polykv.lock", "0123456789abcdef-7.txt", "0123456789ABCDEF-7.state"):
                (folder / name).write_bytes(b"x" * 999)
            (folder / "0123456789abcdef-9.state").symlink_to(folder / "notes.txt")
            assert "saved_states_left" not in await findings(plane), "none of the engine's"
            (folder / "0123456789abcdef-7.state").write_bytes(b"x" * 1_500_000)
            (folder / "0123456789abcdef-8.state.tmp").write_bytes(b"x" * 1_000_000)
            assert (await findings(plane))["saved_states_left"] == "warning"
            assert f"2 files of saved states (2.5 MB) lie in {folder}" in await told(plane, "saved_states_left")
        async with planes(engine, warm_disk_bytes=1 << 20, **settings) as plane:
            assert "saved_states_left" not in await findings(plane), "they are used, or will be"
    async with FakeEngine(save_disk=1 << 20) as engine, planes(engine, **settings) as plane:
        assert "saved_states_left" not in await findings(plane), "an engine that was given its own budget may use them"
