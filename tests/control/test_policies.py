"""Policies of pools: whose holds, what is kept over a restart, what goes with a pool."""

import asyncio
import logging
from pathlib import Path

import pytest

from polykv_proxy.config import load_settings
from polykv_proxy.control.policies import default_policy
from polykv_proxy.errors import JournalFailed, PoolNotFound
from polykv_proxy.gate.policy import Policy
from polykv_proxy.ids import PoolId
from tests.control.conftest import Plane, eventually, planes
from tests.control.test_restore import after_a_kill, full
from tests.fake_engine import FakeEngine

FLOOR = Policy(target_tps_per_session=5, mode="enforced", on_saturation="queue", max_queue=7)
LOWER = Policy(target_tps_per_session=2)


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "pools.db")


async def family(plane: Plane) -> None:
    """1 ``a``, below it 2 ``b``, below that 3 ``c``; 4 ``apart``."""
    await plane.create(tokens=[1] * 40, name="a")
    await plane.fork("a", own_tokens=[2] * 20, name="b")
    await plane.fork("b", own_tokens=[3] * 10, name="c")
    await plane.create(tokens=[9] * 30, name="apart")


def whose(plane: Plane) -> dict[str, tuple[str, object, int, object]]:
    shown = {name: plane.control.policies.get(name) for name in ("a", "b", "c", "apart")}
    return {
        name: (one["source"], one["inherited_from"], one["scope"], one["target_tps_per_session"])
        for name, one in shown.items()
    }


async def test_the_nearest_ancestor_rules(plane):
    await family(plane)
    policies, told = plane.control.policies, []
    policies.on_changed = lambda: told.append(policies.resolve(PoolId(3)).policy)
    assert policies.is_empty
    assert whose(plane)["c"] == ("none", None, 1, None)
    assert (await policies.set("a", FLOOR))["changed"] is True
    assert not policies.is_empty
    assert whose(plane) == {
        "a": ("own", None, 1, 5),
        "b": ("inherited", 1, 1, 5),
        "c": ("inherited", 1, 1, 5),
        "apart": ("none", None, 4, None),
    }
    await policies.set("b", LOWER)
    assert (await policies.set("b", LOWER))["changed"] is False
    assert whose(plane)["c"] == ("inherited", 2, 2, 2)
    assert (await policies.drop("b"))["source"] == "inherited"
    assert (await policies.drop("b"))["changed"] is False
    assert (await policies.drop("a"))["source"] == "none"
    assert policies.is_empty
    assert told == [FLOOR, LOWER, FLOOR, None]
    with pytest.raises(PoolNotFound):
        await policies.set("nobody", FLOOR)


async def test_the_default_holds_for_who_has_none(engine):
    async with planes(engine, default_target_tps=3.5, default_mode="enforced") as plane:
        await family(plane)
        assert not plane.control.policies.is_empty
        assert plane.control.policies.resolve(PoolId(3)).policy == Policy(target_tps_per_session=3.5, mode="enforced")
        await plane.control.policies.set("b", LOWER)
        assert whose(plane) == {
            "a": ("default", "default", 1, 3.5),
            "b": ("own", None, 2, 2),
            "c": ("inherited", 2, 2, 2),
            "apart": ("default", "default", 4, 3.5),
        }


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({}, None),
        ({"default_target_tps": 4}, Policy(target_tps_per_session=4, mode="advisory")),
        ({"default_target_tps": 4, "default_mode": "enforced"}, Policy(target_tps_per_session=4, mode="enforced")),
    ],
)
def test_the_default_of_the_settings(settings, policy):
    assert default_policy(load_settings(**settings)) == policy


async def test_policies_survive_a_kill_and_a_release_does_not_leave_one(engine, state, tmp_path):
    async with planes(engine, state=state) as first:
        await family(first)
        for name, policy in (("a", FLOOR), ("b", LOWER), ("apart", LOWER)):
            await first.control.policies.set(name, policy)
        await first.control.policies.drop("b")
        forgotten = []
        first.control.policies.on_forgotten = forgotten.append
        assert (await first.call("DELETE", "/polykv/pools/apart"))[0] == 200
        assert forgotten == [4]
        async with after_a_kill(first, state, tmp_path) as plane:
            assert plane.control.policies.get("a") == first.control.policies.get("a")
            assert plane.control.policies.get("a")["on_saturation"] == "queue"
            assert plane.control.policies.get("c")["inherited_from"] == 1
            await plane.create(tokens=[9] * 30, name="apart")
            assert plane.control.policies.get("apart")["source"] == "none"
            await plane.call("DELETE", "/polykv/pools/a?recursive=true")
            assert plane.control.policies.is_empty


async def test_what_cannot_be_written_does_not_hold(engine, state):
    async with planes(engine, state=state, heartbeat_s=3600) as plane:
        await family(plane)
        await plane.control.policies.set("a", FLOOR)
        full(plane, "query_only = 1")
        with pytest.raises(JournalFailed):
            await plane.control.policies.set("a", LOWER)
        with pytest.raises(JournalFailed):
            await plane.control.policies.drop("a")
        assert plane.control.policies.get("a")["target_tps_per_session"] == 5
        full(plane, "query_only = 0")
        await plane.control.policies.set("a", LOWER)
        assert plane.control.policies.get("a")["target_tps_per_session"] == 2


async def test_two_at_once_end_as_the_journal_has_it(engine, state, tmp_path):
    async with planes(engine, state=state) as first:
        await family(first)
        orders = [Policy(target_tps_per_session=n) for n in range(1, 9)]
        await asyncio.gather(*(first.control.policies.set("a", policy) for policy in orders))
        held = first.control.policies.get("a")
        async with after_a_kill(first, state, tmp_path) as plane:
            assert plane.control.policies.get("a") == held


async def test_a_pool_released_meanwhile_gets_no_policy(plane, monkeypatch):
    await family(plane)
    written = plane.control.journal.policy_changed

    async def late(pool_id, policy):
        assert (await plane.call("DELETE", "/polykv/pools/apart"))[0] == 200
        await written(pool_id, policy)

    monkeypatch.setattr(plane.control.journal, "policy_changed", late)
    with pytest.raises(PoolNotFound, match="released meanwhile"):
        await plane.control.policies.set("apart", FLOOR)
    assert plane.control.policies.is_empty


async def test_policies_wait_while_another_model_runs(engine: FakeEngine, state):
    async with planes(engine, state=state) as plane:
        await family(plane)
        await plane.control.policies.set("a", FLOOR)
        policies, gone = plane.control.policies, []
        policies.on_forgotten = gone.append
        await engine.kill()
        engine.fingerprint = "other-model"
        await engine.start()
        await eventually(lambda: not len(plane.control.tree))
        assert (policies.is_empty, gone) == (True, [1, 2, 3, 4])
        await engine.kill()
        engine.fingerprint = "toy-model"
        await engine.start()
        await eventually(lambda: len(plane.control.tree) == 4)
        assert whose(plane)["c"] == ("inherited", 1, 1, 5)


async def test_a_policy_that_this_version_does_not_know_is_told(plane, caplog):
    await family(plane)
    with caplog.at_level(logging.ERROR):
        plane.control.policies.put_back(PoolId(1), {"target_tps_per_session": 5, "weather": "fine"})
    assert "pool 1 has no policy now" in caplog.text
    assert "'weather' is no field of a policy" in caplog.text
    assert plane.control.policies.is_empty
