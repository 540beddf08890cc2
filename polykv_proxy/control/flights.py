"""One prefill for all who begin alike: who leads, who waits, and when there is a pool.

A leader's slot is looked at until it holds what all who wait by then share; then that is made a pool. When the leader
is gone before, the first who waits is the next one, and is given that slot with what was prefilled in it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from polykv_proxy.control.alike import Prompt
from polykv_proxy.control.automatic import AutomaticPools
from polykv_proxy.control.slot_states import slot_in
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import PolyKVError, PrefixMismatch, SessionNotResident
from polykv_proxy.ids import SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import SlotBook
from polykv_proxy.tree.prefix import Tokens, lcp_tokens
from polykv_proxy.turns import Session
from polykv_proxy.upstream import SlotStats

log = logging.getLogger("polykv.fan_out")

LOOK_S = 0.04
"""While somebody waits the engine is asked so often how far the leader's prefill is."""

MAX_JOIN_S = 600.0
"""An engine that hangs with a leader's prompt takes only so much of the others' time."""

GRANT_S, STEP_S = 1.0, 0.1
"""So long a leader without a slot is waited for, and an engine that does not share cells that are there."""

ASKED_S = 5.0
"""So long for the engine to say what a leader left that is done, and to be done with one that left: it answers between
two batches of somebody else, looks for its clients once a second, and who does not wait would stand behind those
batches, too, with more to prefill."""

MAX_MISSES = 25
"""So often a slot may turn out to hold something else, before the pool is made without it."""


@dataclass(slots=True)
class _Waiter:
    prompt: Prompt
    n_common: int
    told: "asyncio.Future[bool]"


@dataclass(slots=True, eq=False)
class Flight:
    """``wished``: where pools are wanted besides those for who waits. ``slot_id``: where the leader was seen last.

    ``refused``: the slot has so many tokens, but the engine did not share them. ``prefills``: the pool is being made.
    ``was_fetched``: what was saved of a leader that is done was asked for. ``asks``: the engine is to answer, or to let
    go of a leader that left.
    """

    leader: Prompt
    tokens: Tokens
    wished: list[int] = field(default_factory=list)
    waiting: dict[int, _Waiter] = field(default_factory=dict)
    slot_id: SlotId | None = None
    n_misses: int = 0
    refused: bool = False
    prefills: bool = False
    was_fetched: bool = False
    asks: bool = False
    task: "asyncio.Task[None] | None" = None
    made: bool = False

    @property
    def n_wanted(self) -> int:
        """Where the pool ends: all who are known by now share so much."""
        return min([*self.wished, *(waiter.n_common for waiter in self.waiting.values())], default=0)


class Flights:
    """``min_tokens``: of a beginning that is worth it. ``fetch``: load what a parked session said into a free slot."""

    def __init__(
        self,
        *,
        sessions: SessionBook,
        slots: SlotBook,
        watch: EngineWatch,
        pools: AutomaticPools,
        fetch: Callable[[Session], Awaitable[None]],
        min_tokens: int,
    ):
        self._sessions, self._slots, self._watch, self._pools = sessions, slots, watch, pools
        self._fetch = fetch
        self.min_tokens = min_tokens
        self._flights: dict[int, Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def n_waiting(self) -> int:
        """Requests that wait for what another one prefills."""
        return sum(len(flight.waiting) for flight in self._flights.values())

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, leader: Prompt, n_tokens: int) -> Flight:
        flight = self._flights[leader.number] = Flight(leader, known(leader), [n_tokens])
        flight.task = asyncio.create_task(self._fly(flight), name="polykv-fan-out")
        self._tasks.add(flight.task)
        flight.task.add_done_callback(self._tasks.discard)
        return flight

    async def _wait(self, flight: Flight, prompt: Prompt, n_common: int) -> bool:
        """Wait for a flight, as long as its leader has a slot or its pool is made, and not for ever. False: there is
        nothing to wait for, at least for now.

        A leader that is in line itself is not waited for: who does would stand in line twice.
        """
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        flight.waiting[prompt.number] = _Waiter(prompt, n_common, told)
        n_vain, n_steps = 0, 0
        try:
            while not told.done() and n_steps * STEP_S < MAX_JOIN_S:
                n_steps += 1
                await asyncio.wait([told], timeout=STEP_S)
                busy = flight.prefills or self._has_slot(flight.leader)
                n_vain = 0 if busy else n_vain + 1
                if n_vain * STEP_S >= (ASKED_S if flight.asks else GRANT_S):
                    break
            return told.done() and told.result()
        finally:
            flight.waiting.pop(prompt.number, None)

    def _has_slot(self, prompt: Prompt) -> bool:
        """It is with the engine, or on its way there; one that the gate holds may be for long."""
        if not prompt.runs or prompt.turn.held:
            return False
        return prompt.turn.slot_id is not None or self._slots.serves(prompt.session.session_id)

    def _slot_of(self, prompt: Prompt) -> SlotId | None:
        """The slot that its turn runs in, or where what it said is still: in its session's, or in nobody's since the
        session is over. Whether it really is, the engine's hash says when it is shared.
        """
        if prompt.runs:
            return prompt.turn.slot_id
        over = self._is_over(prompt)
        slot_id = prompt.turn.slot_id if over else prompt.session.slot_id
        owner = None if over else prompt.session.session_id
        return slot_id if slot_id is not None and self._slots.owner_of(slot_id) == owner else None

    def _is_over(self, prompt: Prompt) -> bool:
        """The books of its session are closed."""
        return prompt.session.closed or self._sessions.get(prompt.session.session_id) is not prompt.session

    def _is_parked(self, prompt: Prompt) -> bool:
        return not prompt.runs and not self._is_over(prompt) and prompt.session.saved

    def _waits_for(self, one: Prompt, other: Prompt) -> bool:
        """Also by way of others. Who was first in line is not when it takes over from a leader that is gone."""
        for _ in range(len(self._flights)):
            flight = next((flight for flight in self._flights.values() if one.number in flight.waiting), None)
            if flight is None:
                return False
            one = flight.leader
            if one is other:
                return True
        return False

    # One flight ----------------------------------------------------------------------------------------------------

    async def _fly(self, flight: Flight) -> None:
        try:
            flight.made = await self._make(flight)
        except PolyKVError as e:
            log.info("those who begin alike go on without a pool: %s", e.message)
        finally:
            self._flights.pop(flight.leader.number, None)
            for waiter in flight.waiting.values():
                _tell(waiter, flight.made)

    async def _make(self, flight: Flight) -> bool:
        """Follow the leader until there is a pool. Gives whether there is. Raises UpstreamError and its heirs."""
        while flight.n_misses < MAX_MISSES:
            flight.asks = True
            slot = await self._look(flight)
            flight.asks = not flight.leader.runs and slot is not None and not slot.idle
            if slot is not None and self._holds_enough(flight, slot):
                if await self._share(flight, SlotId(slot.id)):
                    return True
            elif slot is not None and flight.leader.runs and slot.state == "generating":
                self._miss(flight, f"slot {slot.id} generates behind another prompt")
            elif not flight.leader.runs and (slot is None or slot.idle) and not self._hand_over(flight, slot):
                return False
            await asyncio.sleep(LOOK_S)
        if not flight.refused or not flight.waiting:
            return False
        # A sliding window's cells are others' soon after. Who waits would else prefill as much, each for himself.
        flight.prefills = True
        await self._pools.prefilled(flight.tokens[: flight.n_wanted])
        return True

    async def _look(self, flight: Flight) -> SlotStats | None:
        """The leader's slot as it is now; None while it has none."""
        leader = flight.leader
        if leader.runs or (flight.slot_id is None and not leader.is_lost):
            flight.slot_id = self._slot_of(leader)
        if flight.slot_id is not None and self._slots.owner_of(flight.slot_id) not in (leader.session.session_id, None):
            flight.slot_id = None
        if flight.slot_id is None and self._is_parked(leader) and not flight.was_fetched:
            flight.was_fetched = True
            await self._bring_back(leader)
            flight.slot_id = self._slot_of(leader)
            leader.is_lost = flight.slot_id is None
        if flight.slot_id is None:
            return None
        return slot_in(await self._watch.refresh(), flight.slot_id)

    async def _bring_back(self, leader: Prompt) -> None:
        """To load it is cheaper than to prefill it again; where that cannot be, whoever waits does the latter."""
        try:
            await self._fetch(leader.session)
        except PolyKVError as e:
            log.info("what session %s said is not to be had: %s", leader.session.session_id, e.message)

    def _holds_enough(self, flight: Flight, slot: SlotStats) -> bool:
        if slot.n_tokens < flight.n_wanted:
            return False
        if flight.leader.runs:
            return slot.n_prompt == len(flight.tokens) and slot.state != "started"
        return slot.idle

    async def _share(self, flight: Flight, slot_id: SlotId) -> bool:
        flight.prefills = True
        try:
            await self._pools.of_beginning(slot_id, flight.tokens[: flight.n_wanted])
        except (SessionNotResident, PrefixMismatch) as e:
            flight.prefills = False
            self._miss(flight, f"slot {slot_id} cannot be shared yet: {e.message}")
            flight.refused = isinstance(e, SessionNotResident)
            if not flight.leader.runs:
                flight.slot_id, flight.leader.is_lost = None, True  # another one's by now
            return False
        return True

    def _miss(self, flight: Flight, why: str) -> None:
        log.debug("%s", why)
        flight.n_misses += 1

    def _hand_over(self, flight: Flight, slot: SlotStats | None) -> bool:
        """The leader is gone too early: the first who waits leads on, in the same slot if it can be had."""
        if not flight.waiting:
            return False
        before, heir = flight.leader, flight.waiting.pop(min(flight.waiting))
        log.info("session %s leads on for %s", heir.prompt.session.session_id, before.session.session_id)
        session_id = heir.prompt.session.session_id
        if slot is not None and slot.n_tokens > 0 and self._slots.slot_of(session_id) is None:
            self._pass_on(SlotId(slot.id), before.session.session_id, session_id)
        _tell(heir, True)  # it finds itself in the lead, or somebody else to follow
        if heir.prompt.number in self._flights:  # there are some behind it already: the others join them
            for waiter in flight.waiting.values():
                _tell(waiter, True)
            return False
        self._flights.pop(before.number, None)
        self._flights[heir.prompt.number] = flight
        flight.leader, flight.tokens = heir.prompt, known(heir.prompt)
        flight.slot_id, flight.wished = None, [heir.n_common]
        flight.was_fetched = False
        for waiter in list(flight.waiting.values()):
            waiter.n_common = lcp_tokens(flight.tokens, known(waiter.prompt))
            if waiter.n_common < self.min_tokens:
                _tell(waiter, True)  # to look again
        return True

    def _pass_on(self, slot_id: SlotId, before: SessionId, to: SessionId) -> None:
        if self._slots.pass_on(slot_id, before, to):
            self._sessions.displaced(before)


def _tell(waiter: _Waiter, again: bool) -> None:
    if not waiter.told.done():
        waiter.told.set_result(again)


def known(prompt: Prompt) -> Tokens:
    assert prompt.tokens is not None
    return prompt.tokens
