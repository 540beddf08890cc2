"""The rim around the gate: who is woken, who leaves in the wrong moment, and that every place comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from polykv_proxy.control.door import Door
from polykv_proxy.control.gate_facts import GateFacts, gate_id
from polykv_proxy.control.policies import Policies
from polykv_proxy.control.visits import Visit
from polykv_proxy.errors import AdmissionRefused, Draining, LoadUnknown, PoolSaturated, QueueFull, QueueTimeout
from polykv_proxy.gate.facts import EngineFacts, SessionFacts, State
from polykv_proxy.gate.gate import Gate
from polykv_proxy.gate.policy import Policy, Ruling
from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import make_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.turns import Usage
from tests.gate.make import policy

POOL = PoolId(1)


class Known(Policies):
    """One policy for every pool."""

    def __init__(self, given: Policy | None = None):
        self.given = given

    @property
    def is_empty(self) -> bool:
        return self.given is None

    def resolve(self, pool_id: PoolId) -> Ruling:
        return Ruling(self.given, pool_id)


class Readings(GateFacts):
    """What the test says the engine does, beside the sessions of its book."""

    def __init__(self, sessions: SessionBook, clock: Callable[[], float]):
        self._sessions, self._clock = sessions, clock
        self.others: dict[str, SessionFacts] = {}
        self.known: set[str] = set()
        self.cells_free = 100_000
        self.away = False

    def decodes(self, name: str, tps: float | None, n_decoded: int = 100, state: State = "decoding") -> None:
        self.others[name] = SessionFacts(
            SessionId(name), POOL, POOL, state, n_turns=1, n_decoded=n_decoded, ctx_used=500, reply_tps=tps
        )

    def read(self) -> EngineFacts | None:
        if self.away:
            return None
        now_s = self._clock()
        inside = [
            SessionFacts(gate_id(turn.session.session_id, turn.number), POOL, POOL, "waiting")
            for turn in self._sessions.running.values()
            if turn.entered and turn.session.session_id not in self.others
        ]
        live = [
            SessionFacts(s.session_id, POOL, POOL)
            for s in self._sessions
            if s.n_sent
            and not s.turns
            and s.session_id not in self.others
            and self._sessions.is_live(s.session_id, now_s)
        ]
        sessions = [*self.others.values(), *inside, *live]
        return EngineFacts(now_s, sessions, cells_total=100_000, cells_used=0, cells_free=self.cells_free)

    def is_known(self, session_id: SessionId) -> bool:
        return session_id in self.known


def a_pool() -> Pool:
    tree = PoolTree()
    return tree.commit(tree.plan_root(make_tokens([1, 2, 3]), name="root"), now_s=0.0)


class House:
    """A door with a pool behind it. ``now_s`` stands still unless the test moves it."""

    def __init__(self, given: Policy | None):
        self.now_s = 1000.0
        self.sessions = SessionBook()
        self.policies = Known(given)
        self.facts = Readings(self.sessions, lambda: self.now_s)
        self.n_looks = 0
        self.door = Door(
            Gate(), policies=self.policies, facts=self.facts, fresh=self.fresh, clock=lambda: self.now_s, u=lambda: 0.5
        )
        self.pool = a_pool()

    async def fresh(self) -> None:
        self.n_looks += 1

    def visit(self, name: str, **fields: Any) -> Visit:
        session = self.sessions.name(SessionId(name), self.now_s)
        return Visit(self.sessions.begin(session, self.now_s), **fields)

    def ask(self, visit: Visit, **fields: Any) -> "asyncio.Task[bool]":
        return asyncio.create_task(self.door.enter(visit, self.pool, **fields))

    def over(self, visit: Visit, *, sent: bool = True) -> None:
        """Its turn ended."""
        if sent:
            visit.turn.sent(self.now_s, None, POOL)
        self.sessions.end(visit.turn, Usage(), self.now_s)
        self.door.end_turn(visit)

    def read(self, after_s: float = 0.5) -> None:
        self.now_s += after_s
        self.door.observe()

    @property
    def n_granted(self) -> int:
        return len(self.door.gate.entry.granted)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def make_house() -> AsyncIterator[Callable[..., House]]:
    houses: list[House] = []

    def make(given: Policy | None = None) -> House:
        houses.append(House(given))
        return houses[-1]

    yield make
    for house in houses:
        await house.door.stop()


Maker = Callable[..., House]


async def test_no_policy_asks_nothing(make_house: Maker) -> None:
    house = make_house()
    visit = house.visit("a")
    assert await house.ask(visit) is False
    assert (house.n_looks, visit.told(), house.door._inside) == (0, None, {})


async def test_the_first_is_guaranteed_and_the_second_refused(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0))
    first = house.visit("a")
    assert await house.ask(first) is False
    assert first.decision == "guaranteed"
    house.facts.decodes("a", 12.0)
    house.read()
    second = house.visit("b")
    with pytest.raises(PoolSaturated) as refused:
        await house.ask(second)
    error = refused.value
    assert (error.status, error.reason, error.retry_after_s) == (429, "projected mean tps below floor", 5)
    assert error.extra["projected_mean_tps_if_admitted"] == 6.0
    assert "overcommit" in error.message
    assert (second.decision, second.turn.entered) == ("refused", False)
    assert house.door._inside.keys() == {"a"}


async def test_who_is_refused_for_those_at_rest_is_told_what_counts(make_house: Maker) -> None:
    house = make_house(policy(10))
    house.read()
    await house.ask(house.visit("a"))
    house.facts.decodes("a", 12.0)
    house.read(6.0)
    house.facts.decodes("a", 12.0, state="idle")
    house.read()
    with pytest.raises(PoolSaturated) as refused:
        await house.ask(house.visit("b"))
    assert refused.value.reason == "projected mean tps below floor (idle estimate)"
    assert "; 1 session at rest counts as live for 60 s after a turn (POLYKV_SESSION_GAP_S)" in refused.value.message
    assert "DELETE /polykv/sessions/{id} (polykvctl sessions delete)" in refused.value.message


async def test_who_waits_is_let_in_when_somebody_ends(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue"))
    house.facts.decodes("a", 12.0)
    house.read()
    stepped_back: list[str] = []
    visit = house.visit("b", on_hold=lambda: stepped_back.append("b"))
    asking = house.ask(visit)
    await settled()
    assert (stepped_back, visit.turn.held, house.door.n_waiting) == (["b"], True, 1)
    told = visit.told()
    assert told is not None
    assert (told["decision"], told["waits_for"], told["place"]) == ("queued", "admission", 1)
    house.facts.others.clear()
    house.read()
    assert await asyncio.wait_for(asking, 5) is True
    assert (visit.decision, visit.turn.entered, visit.turn.held) == ("guaranteed", True, False)
    told = visit.told()
    assert told is not None
    assert (told["waits_for"], told["place"]) == (None, None)


async def test_the_reason_told_is_that_of_the_last_look(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=5000, on_saturation="queue", queue_timeout_ms=30_000))
    house.read()
    first, second = house.visit("a"), house.visit("b")
    await house.ask(first)
    asking = house.ask(second)
    await settled()

    def told() -> dict[str, Any]:
        answer = second.told()
        assert answer is not None
        return answer

    assert (told()["reason"], told()["projected_mean_tps_model"]) == ("measurement settling", None)
    assert (told()["left_ms"], told()["eta_ms"], told()["ends_first"]) == (30_000, None, False)
    house.facts.decodes("a", 12.0)
    house.read(6.0)
    assert (told()["reason"], told()["projected_mean_tps_model"]) == ("projected mean tps below floor", 6.0)
    assert (told()["decision"], told()["left_ms"]) == ("queued", 24_000)
    house.facts.others.clear()
    house.over(first)
    house.read(2.0)
    assert told()["reason"] == "projected mean tps below floor (idle estimate)"
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (told()["reason"], told()["left_ms"]) == ("projected mean tps below floor (idle estimate)", None)


async def test_a_full_line_and_a_line_in_vain(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue", max_queue=1, queue_timeout_ms=2000))
    house.facts.decodes("a", 12.0)
    house.read()
    waits = house.ask(house.visit("b"))
    await settled()
    with pytest.raises(QueueFull):
        await house.ask(house.visit("c"))
    house.read(1.0)
    assert not waits.done()
    house.read(1.0)
    with pytest.raises(QueueTimeout) as refused:
        await waits
    assert "within 2 s" in refused.value.message
    assert house.door.n_waiting == 0


async def test_the_timer_ends_a_wait_when_nothing_else_happens(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue", queue_timeout_ms=10))
    house.facts.decodes("a", 12.0)
    house.read()
    waits = house.ask(house.visit("b"))
    await settled()
    house.now_s += 0.01
    with pytest.raises(QueueTimeout):
        await asyncio.wait_for(waits, 5)  # nobody reads the engine here


async def test_who_leaves_frees_its_place_at_once(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue", max_queue=1))
    house.facts.decodes("a", 12.0)
    house.read()
    left = house.ask(house.visit("b"))
    await settled()
    left.cancel()
    await asyncio.wait([left])
    assert (house.door.n_waiting, house.door.gate.n_waiting()) == (0, 0)
    stays = house.ask(house.visit("c"))
    await settled()
    assert house.door.n_waiting == 1
    stays.cancel()
    await asyncio.wait([stays])


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_grant_and_a_client_that_leaves_in_one_step(make_house: Maker, cancel_first: bool) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue"))
    house.facts.decodes("a", 12.0)
    house.read()
    visit = house.visit("b")
    asking = house.ask(visit)
    await settled()
    house.facts.others.clear()
    if cancel_first:
        asking.cancel()
        house.read()
    else:
        house.read()
        assert house.n_granted == 1
        asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    house.over(visit, sent=False)
    assert (house.n_granted, house.door._inside, house.door.n_waiting) == (0, {}, 0)


async def test_who_is_let_in_and_never_sent_gives_its_place_back(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0))
    visit = house.visit("a")
    await house.ask(visit)
    assert house.n_granted == 1
    house.over(visit, sent=False)
    assert house.n_granted == 0


async def test_who_is_over_before_a_reading_is_not_counted_for_good(make_house: Maker) -> None:
    """Its session was dropped, or counts as live for no time at all."""
    house = make_house(policy(10, settle_max_ms=0))
    house.sessions.gap_s = 0.0
    visit = house.visit("a")
    await house.ask(visit)
    house.over(visit)
    assert house.n_granted == 1  # the next reading may show it
    house.read()
    assert house.n_granted == 0


async def test_who_is_on_its_way_keeps_its_place(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue"))
    house.facts.decodes("a", 12.0)
    house.read()
    visit = house.visit("b")
    asking = house.ask(visit)
    await settled()
    house.facts.others.clear()
    house.read()
    house.read()  # b was granted, and its task did not run yet
    assert house.n_granted == 1
    await asking
    house.read()
    assert (house.n_granted, house.door.gate.entry.n_live) == (0, 1)  # now it is in the reading


async def test_a_continuation_is_never_asked_to_wait(make_house: Maker) -> None:
    house = make_house(policy(1e6, settle_max_ms=0, guarantee_min_sessions=0))
    house.facts.decodes("a", 12.0)
    house.facts.known.add("b")
    house.facts.cells_free = 0
    house.read()
    visit = house.visit("b")
    assert await house.ask(visit, expected_tokens=500) is False
    assert visit.decision == "continuation"


async def test_a_second_turn_at_the_same_time_is_a_new_session(make_house: Maker) -> None:
    house = make_house(policy(1e6, settle_max_ms=0, guarantee_min_sessions=1))
    first = house.visit("a")
    await house.ask(first)
    house.facts.known.add("a")
    house.facts.decodes("a", 12.0)
    house.read()
    second = house.visit("a")
    assert second.turn.number == 2
    with pytest.raises(PoolSaturated):
        await house.ask(second)
    third = house.visit("a", overcommit=True)
    await house.ask(third)
    assert third.decision == "overcommitted"
    house.over(third)
    assert house.n_granted == 0  # no reading will show it again


async def test_overcommit_passes_the_floor_and_not_the_context(make_house: Maker) -> None:
    house = make_house(policy(1e6, settle_max_ms=0))
    house.facts.decodes("a", 12.0)
    house.facts.cells_free = 400
    house.read()
    assert await house.ask(house.visit("b", overcommit=True), expected_tokens=400) is False
    with pytest.raises(PoolSaturated) as refused:
        await house.ask(house.visit("c", overcommit=True), expected_tokens=401)
    assert refused.value.reason == "context headroom exhausted"
    assert "overcommit" not in refused.value.message


async def test_an_engine_that_is_not_measured_is_no_free_place(make_house: Maker) -> None:
    house = make_house(policy(1, settle_max_ms=0, guarantee_min_sessions=0))
    house.facts.away = True
    with pytest.raises(LoadUnknown) as refused:
        await house.ask(house.visit("a"))
    assert (refused.value.status, refused.value.code, house.n_looks) == (503, "upstream_unavailable", 1)
    house.facts.away = False
    assert await house.ask(house.visit("b")) is False  # it looked again


async def test_a_policy_that_goes_lets_everybody_in(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue"))
    house.facts.decodes("a", 12.0)
    house.read()
    asking = [house.ask(house.visit(name)) for name in "bc"]
    await settled()
    house.policies.given = None
    house.door.policies_changed()
    assert await asyncio.wait_for(asyncio.gather(*asking), 5) == [True, True]


async def test_shutting_down_dismisses_who_waits(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue", max_turn_hold_ms=5000))
    house.facts.decodes("a", 12.0)
    house.read()
    asking = house.ask(house.visit("b"))
    held = house.visit("a")
    turn = asyncio.create_task(house.door.begin_turn(held, POOL, ctx_tokens=10, uncached_tokens=1))
    await settled()
    assert (house.door.n_waiting, house.door.n_held) == (1, 1)
    house.door.dismiss(Draining("the proxy is shutting down"))
    for task in (asking, turn):
        with pytest.raises(Draining):
            await task
    assert (house.door.n_waiting, house.door.n_held, house.door.gate.turns.n_held) == (0, 0, 0)


async def test_a_turn_is_held_until_another_one_ends(make_house: Maker) -> None:
    house = make_house(policy(10, max_turn_hold_ms=5000))
    first, second = house.visit("a"), house.visit("b")
    for visit in (first, second):
        visit.turn.entered = True
    assert await asyncio.wait_for(house.door.begin_turn(first, POOL, ctx_tokens=10, uncached_tokens=1), 5) is False
    house.facts.decodes("a", 12.0)
    house.read()
    turn = asyncio.create_task(house.door.begin_turn(second, POOL, ctx_tokens=10, uncached_tokens=1))
    await settled()
    assert (house.door.n_held, second.turn.held, second.waits_for) == (1, True, "turn")
    house.over(first)
    assert await asyncio.wait_for(turn, 5) is True
    assert (house.door.n_held, second.turn.held, second.waits_for) == (0, False, None)
    house.over(second)
    assert not house.door.gate.turns.running


async def test_a_held_turn_whose_client_leaves_is_gone(make_house: Maker) -> None:
    house = make_house(policy(10, max_turn_hold_ms=5000))
    first, second = house.visit("a"), house.visit("b")
    await asyncio.wait_for(house.door.begin_turn(first, POOL, ctx_tokens=10, uncached_tokens=1), 5)
    house.facts.decodes("a", 12.0)
    house.read()
    turn = asyncio.create_task(house.door.begin_turn(second, POOL, ctx_tokens=10, uncached_tokens=1))
    await settled()
    turn.cancel()
    await asyncio.wait([turn])
    house.over(second, sent=False)
    assert (house.door.n_held, house.door.gate.turns.n_held) == (0, 0)
    house.over(first)
    assert not house.door.gate.turns.running


async def test_what_was_forecast_is_held_against_what_came(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=1000))
    house.facts.decodes("a", 40.0)
    house.read()
    visit = house.visit("b")
    await house.ask(visit)
    house.facts.others["a"] = replace(house.facts.others["a"], n_decoded=115)
    house.read()
    house.read(1.0)
    (record,) = house.door.records
    assert (record.session_id, record.forecasts.model) == ("b", 20.0)
    assert visit.record is record
    told = visit.told()
    assert told is not None
    assert (told["projected_mean_tps_model"], told["settled_mean_tps"]) == (20.0, round(record.mean_tps or 0, 3))


async def test_who_waits_is_told_what_the_new_policy_tells(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue"))
    house.facts.decodes("a", 12.0)
    house.read()
    visit = house.visit("b")
    asking = house.ask(visit)
    await settled()
    house.policies.given = policy(10, settle_max_ms=0, on_saturation="warn")
    house.door.policies_changed()
    assert await asking is True
    assert (visit.decision, visit.sessions_remaining) == ("warned", 0)


async def test_who_waits_for_a_pool_that_is_released_is_sent_away_and_keeps_his_time(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0, on_saturation="queue", queue_timeout_ms=4000))
    house.facts.decodes("a", 12.0)
    house.read()
    visits = [house.visit(name) for name in ("b", "c")]
    asking = [house.ask(visit) for visit in visits]
    await settled()
    house.now_s += 3
    house.door.forget(POOL)
    assert await asyncio.gather(*asking) == [True, True], "they waited"
    assert [(visit.decision, visit.turn.entered) for visit in visits] == [(None, False)] * 2
    assert (house.door.n_waiting, house.door.gate.n_waiting(), house.n_granted, house.door._inside) == (0, 0, 0, {})
    assert POOL not in house.door.gate.entry.scopes

    house.read(0)
    again = house.ask(visits[0])  # at the door of what it gets instead
    await settled()
    assert visits[0].decision == "queued"
    house.read(1.01)
    with pytest.raises(QueueTimeout):
        await again


async def test_a_released_pool_is_forgotten_when_nobody_is_on_his_way_in(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0))
    visit = house.visit("a")
    await house.ask(visit)
    house.door.forget(POOL)
    assert POOL in house.door.gate.entry.scopes
    house.over(visit, sent=False)
    house.read()
    assert POOL not in house.door.gate.entry.scopes


async def test_refusals_of_every_kind_tell_when_to_come_back(make_house: Maker) -> None:
    house = make_house(policy(10, settle_max_ms=0))
    house.facts.decodes("a", 12.0)
    house.read()
    for is_retry in (False, True):
        with pytest.raises(AdmissionRefused) as refused:
            await house.ask(house.visit(f"b{is_retry}", is_retry=is_retry))
        assert 1 <= (refused.value.retry_after_s or 0) <= 60
        assert refused.value.retry_after_ms == 5000
    counts = house.door.counts
    assert (counts.refused.total(), counts.n_retries_refused) == (1, 1)
