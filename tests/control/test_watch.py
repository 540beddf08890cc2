"""A new start of the engine is taken in by everybody who keeps books, or again with the next look."""

import logging

import pytest

from polykv_proxy.errors import UpstreamRestarted
from tests.control.conftest import Plane, eventually, planes
from tests.control.test_retention import residencies
from tests.fake_engine import FakeEngine


def fails_at_first(monkeypatch, thing, name: str, n: int) -> list[int]:
    """Its first ``n`` calls raise, in the middle of the work. Gives a list that counts all of them."""
    real, calls = getattr(type(thing), name), [0]

    def call(*given):
        calls[0] += 1
        if calls[0] <= n:
            raise KeyError("a bug")
        return real(*given)

    monkeypatch.setattr(type(thing), name, call)
    return calls


@pytest.mark.parametrize(
    "where", ["residency.drop_all", "sessions.engine_restarted", "restorer.engine_started", "slots.resize"]
)
async def test_a_restart_that_was_half_taken_in_is_taken_in_again(engine, monkeypatch, where):
    async with planes(engine, heartbeat_s=3600) as plane:
        control = plane.control
        await plane.create(tokens=[1, 2, 3], name="a")
        session = control.sessions.name("s", control.clock())
        session.slot_id = 0
        part, name = where.split(".")
        calls = fails_at_first(monkeypatch, getattr(control, part), name, 2)
        engine.n_slots = 7
        await engine.restart()
        for _ in range(2):
            with pytest.raises(UpstreamRestarted, match="KeyError"):
                await control.watch.refresh()
            assert (control.watch.epoch, control.watch.state) == (None, "unknown")
            assert control.residency.held(control.tree.get("a")) is None
        await control.watch.refresh()
        assert (control.watch.epoch, control.watch.state, calls) == (engine.epoch, "ready", [3])
        assert (residencies(plane), session.slot_id, control.slots.n_slots) == ({"a": "cold"}, None, 7)
        await control.watch.refresh()
        assert calls == [3], "once it is done it is done"


async def test_a_failed_restart_is_told_once_and_ends_by_itself(engine, monkeypatch, caplog):
    async with planes(engine, heartbeat_s=0.01) as plane:
        await plane.create(tokens=[1, 2, 3], name="a")
        calls = fails_at_first(monkeypatch, plane.control.residency, "drop_all", 5)
        with caplog.at_level(logging.WARNING, "polykv.engine"):
            await engine.restart()
            await eventually(lambda: plane.control.watch.epoch == engine.epoch)
        assert calls[0] == 6
        assert len([r for r in caplog.records if r.exc_info]) == 1
        assert (await plane.create(tokens=[4, 5]))["residency"] == "resident"


async def test_falling_asleep_is_taken_in_again_too(engine, monkeypatch):
    async with planes(engine, heartbeat_s=0.01) as plane:
        await plane.create(tokens=[1, 2, 3], name="a")
        fails_at_first(monkeypatch, plane.control.residency, "drop_all", 2)
        engine.sleep()
        await eventually(lambda: plane.control.watch.sleeping and plane.control.watch.state == "ready")
        assert residencies(plane) == {"a": "cold"}


async def test_an_engine_without_hooks_is_taken_in_again_too(monkeypatch):
    async with FakeEngine(hooks=False) as engine, planes(engine, heartbeat_s=3600) as plane:
        engine.with_hooks = True
        await engine.restart()
        await plane.control.watch.refresh()
        engine.with_hooks = False
        engine.n_slots = 7
        await engine.restart()
        fails_at_first(monkeypatch, plane.control.slots, "resize", 1)
        with pytest.raises(UpstreamRestarted):
            await plane.control.watch.refresh()
        await plane.control.watch.refresh()
        assert (plane.control.watch.hooks, plane.control.slots.n_slots) == (False, 7)


async def test_bringing_back_that_broke_is_begun_again(engine, monkeypatch):
    async with planes(engine, heartbeat_s=0.02) as plane:
        await plane.create(tokens=[1, 2, 3], name="a", pin=True)
        fails_at_first(monkeypatch, plane.control.restorer, "_wanted", 1)
        await engine.restart()
        await eventually(lambda: plane.control.watch.epoch == engine.epoch)
        await eventually(lambda: residencies(plane) == {"a": "resident"})


async def test_a_bug_while_pools_are_brought_back_is_in_the_log(plane: Plane, caplog):
    await plane.create(tokens=[1, 2, 3], name="a", pin=True)

    async def broken(pool):
        raise KeyError("a bug")

    plane.control.residency.ensure = broken
    with caplog.at_level(logging.ERROR, "polykv.restore"):
        await plane.engine.restart()
        await eventually(lambda: [r for r in caplog.records if "a bug in bringing pools back" in r.message])
