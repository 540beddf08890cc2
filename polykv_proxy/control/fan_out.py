"""Single flight: requests that begin alike prefill what they share once, and share the cells of who came first.

A request whose prompt shares a long beginning with another session's does one of three things, for what is beyond the
deepest pool there is:

    wait     while the other one is at work: until its slot holds the beginning, also while it still prefills the rest,
             decodes, or streams. Then the beginning is a pool (``automatic``), made of that slot's cells
    take     when the other one's slot holds it already: the same, at once
    lead     when nobody holds it any more: it prefills it itself, and the pool is made of its own slot

The pool is cut at the exact token where those who are known by then part. Who waits goes on as soon as there is a pool,
or none is to be had: nobody ever waits for more than somebody else's prefill of his own tokens.

When a leader is gone before its slot held all of it, the first who waits is the next one, and is given that slot with
what was prefilled in it. A model with one state instead of cells cannot share a slot's beginning: there
the beginning is prefilled once more, as a pool, and all but the first attach to it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polykv_proxy.control.alike import Prompt, PromptBook, alike_bytes
from polykv_proxy.control.automatic import AutomaticPools
from polykv_proxy.control.compare import Comparer, Unpooled
from polykv_proxy.control.orders import AttachRequest
from polykv_proxy.control.slot_states import slot_in
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import PolyKVError, PrefixMismatch, SessionNotResident
from polykv_proxy.ids import SessionId, SlotId
from polykv_proxy.sessions import SessionBook, Turn
from polykv_proxy.slots import SlotBook
from polykv_proxy.tree.prefix import Tokens, lcp_tokens
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.upstream import SlotStats

log = logging.getLogger("polykv.fan_out")

MIN_GAIN_TOKENS = 64
"""Fewer tokens beyond the deepest pool are not worth a pool of their own, nor a wait."""

LOOK_S = 0.04
"""While somebody waits the engine is asked so often how far the leader's prefill is."""

TAKE_S = 1.0
"""Cells that are there are shared at once; an engine that takes longer for it is waited for no longer."""

MAX_ROUNDS = 16
"""So often at most a request looks for somebody to wait for: leaders leave, and pools may go as soon as they came."""

DOUBT = 2
"""A body may have so many times more tokens for its bytes than any before. Most requests are too small for a pool then,
and are not even looked at."""

MAX_MISSES = 25
"""So often a slot may turn out to hold something else, before those who wait go on without."""


@dataclass(slots=True)
class _Waiter:
    prompt: Prompt
    n_common: int
    told: "asyncio.Future[bool]"


@dataclass(slots=True, eq=False)
class _Flight:
    """``wished``: where pools are wanted besides those for who waits. ``slot_id``: where the leader was seen last."""

    leader: Prompt
    tokens: Tokens
    wished: list[int] = field(default_factory=list)
    waiting: dict[int, _Waiter] = field(default_factory=dict)
    slot_id: SlotId | None = None
    n_misses: int = 0
    task: "asyncio.Task[None] | None" = None
    made: bool = False

    @property
    def n_wanted(self) -> int:
        """Where the pool ends: all who are known by now share so much."""
        return min([*self.wished, *(waiter.n_common for waiter in self.waiting.values())], default=0)


class FanOut:
    """``may_change``: the engine is ours. ``min_tokens``: of a beginning that is worth it; 0 = never."""

    def __init__(
        self,
        *,
        tree: PoolTree,
        sessions: SessionBook,
        slots: SlotBook,
        watch: EngineWatch,
        comparer: Comparer,
        pools: AutomaticPools,
        may_change: Callable[[], bool],
        clock: Callable[[], float],
        min_tokens: int,
    ):
        self._tree, self._sessions, self._slots, self._watch = tree, sessions, slots, watch
        self._comparer, self._pools, self._may_change, self._clock = comparer, pools, may_change, clock
        self.min_tokens = min_tokens
        self.tokens_per_byte: float | None = None
        """The most that a body had until now; None before the first."""
        self._prompts = PromptBook(max(1, min_tokens))
        self._flights: dict[int, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def n_waiting(self) -> int:
        """Requests that wait for what another one prefills."""
        return sum(len(flight.waiting) for flight in self._flights.values())

    def concerns(self, n_bytes: int) -> bool:
        """A body of this size may begin with something worth sharing, as far as its bytes can have so many tokens."""
        if self.min_tokens <= 0 or n_bytes < self._prompts.min_bytes:
            return False
        most = self.tokens_per_byte
        return most is None or DOUBT * most * n_bytes >= self.min_tokens

    def counted(self, n_bytes: int, n_tokens: int) -> None:
        """The engine said how many tokens a body had."""
        if n_bytes >= self._prompts.min_bytes:
            self.tokens_per_byte = max(self.tokens_per_byte or 0.0, n_tokens / n_bytes)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # One request ---------------------------------------------------------------------------------------------------

    def begins_alike(self, turn: Turn, path: str, body: Mapping[str, Any], n_bytes: int) -> bool:
        """Note how a request begins that asks for nothing. Gives whether it may be worth looking who begins so too."""
        if not self.concerns(n_bytes) or not self._is_possible():
            return False
        prompt = self._prompts.find(turn) or self._prompts.enter(turn, path, body, n_bytes)
        others = self._prompts.alike(prompt) if prompt is not None else []
        if prompt is None or not others:
            return False
        return not self._prompts.is_settled(prompt, alike_bytes(prompt, others[0]), self._comparer.version)

    async def join(self, request: AttachRequest) -> tuple[AttachRequest, float]:
        """Wait until what this request shares with others is a pool, if it will be one. Never fails.

        Gives the request, with its prompt rendered if that had to be done, and how long it waited in seconds.
        """
        if not self._is_concerned(request) or request.turn is None:
            return request, 0.0
        prompt = self._prompts.find(request.turn)
        if prompt is None:
            prompt = self._prompts.enter(request.turn, request.path, request.body, request.n_bytes)
        if prompt is None:
            return request, 0.0
        try:
            return await self._join(prompt, request)
        except Unpooled:
            # It cannot be rendered (``attach`` says why), and that goes for all that begin so.
            others = self._prompts.alike(prompt)
            if others:
                self._prompts.settle(prompt, alike_bytes(prompt, others[0]), self._comparer.version)
            self._prompts.leave_out(prompt)
            return request, 0.0

    def _is_concerned(self, request: AttachRequest) -> bool:
        asks = (request.pool_ref, request.explicit_p, request.legacy_slot)
        if any(asked is not None for asked in asks) or not request.shareable or request.has_media:
            return False
        return self.concerns(request.n_bytes) and self._is_possible()

    def _is_possible(self) -> bool:
        stats = self._watch.stats
        return stats is not None and stats.share == "ok" and self._may_change()

    async def _join(self, prompt: Prompt, request: AttachRequest) -> tuple[AttachRequest, float]:
        waited_s = 0.0
        for _ in range(MAX_ROUNDS):
            others = self._prompts.alike(prompt)
            n_alike = alike_bytes(prompt, others[0]) if others else 0
            version = self._comparer.version
            if not others or self._prompts.is_settled(prompt, n_alike, version):
                return request, waited_s
            if prompt.tokens is None:
                rendered = await self._comparer.render(request)
                if len(rendered) != 1:
                    return request, waited_s
                self._prompts.rendered(prompt, rendered[0])
                request = replace(request, prompts=tuple(rendered))
            flight, n_common = await self._choose(prompt, others)
            if flight is None:
                self._prompts.settle(prompt, n_alike, version)
                return request, waited_s
            if flight.leader is prompt or self._has_its_own(prompt):
                return request, waited_s
            began_s = self._clock()
            again = await self._wait(flight, prompt, n_common)
            waited_s += self._clock() - began_s
            if not again:
                break
        return request, waited_s

    async def _choose(self, prompt: Prompt, others: list[Prompt]) -> tuple[_Flight | None, int]:
        """The flight for this prompt, begun if there was none, and how many tokens it shares with its leader.

        None: nothing is gained by one.
        """
        tokens = _known(prompt)
        shared: list[tuple[int, Prompt]] = []
        for other in self._with_leaders(others, prompt):
            if other.tokens is not None or await self._render(other):
                shared.append((lcp_tokens(tokens, _known(other)), other))
        match = self._tree.match(tokens)
        n_pooled = match.prefix_n_tokens if match is not None else 0
        most = max((n for n, _ in shared), default=0)
        leading = [(n, other) for n, other in shared if n > most - MIN_GAIN_TOKENS and self._may_lead(other, prompt, n)]
        leading = [(n, other) for n, other in leading if not self._waits_for(other, prompt)]
        # Who has a slot is further than who waits for one, or for somebody else.
        first = min(leading, key=lambda one: (self._slot_of(one[1]) is None, one[1].number), default=(most, prompt))
        n_common, leader = first
        # The last token is left to the engine: it needs one to go on from.
        n_common = min(n_common, len(tokens) - 1)
        if n_common < self.min_tokens or n_common - n_pooled < MIN_GAIN_TOKENS:
            return None, 0
        leader.session.has_peers = prompt.session.has_peers = True
        flight = self._flights.get(leader.number)
        if flight is None:
            flight = self._begin(leader, n_common)
        return flight, n_common

    def follows(self, turn: Turn) -> bool:
        """Whether it is known how this request begins, so that it can be shared."""
        return self._prompts.find(turn) is not None

    async def share(self, turn: Turn, tokens: Tokens, n_tokens: int) -> bool:
        """Make a pool of how a request begins that is with the engine, when its slot holds that. Gives whether it is.

        ``tokens``: all of its prompt.
        """
        prompt = self._prompts.find(turn)
        if prompt is None:
            return False
        if prompt.tokens is None:
            self._prompts.rendered(prompt, tokens)
        while (flight := self._flights.get(prompt.number)) is not None and flight.task is not None:
            await asyncio.wait([flight.task])  # somebody else begins like it, and needs more or less of it
        flight = self._begin(prompt, n_tokens)
        assert flight.task is not None
        await asyncio.wait([flight.task])
        return flight.made

    def _begin(self, leader: Prompt, n_tokens: int) -> _Flight:
        flight = self._flights[leader.number] = _Flight(leader, _known(leader), [n_tokens])
        flight.task = asyncio.create_task(self._fly(flight), name="polykv-fan-out")
        self._tasks.add(flight.task)
        flight.task.add_done_callback(self._tasks.discard)
        return flight

    def _with_leaders(self, others: list[Prompt], prompt: Prompt) -> list[Prompt]:
        """Also those whom they wait for."""
        numbers = {other.number for other in others}
        leaders = [flight.leader for flight in self._flights.values() if not numbers.isdisjoint(flight.waiting)]
        return others + [one for one in leaders if one.turn is not prompt.turn and one.number not in numbers]

    async def _render(self, other: Prompt) -> bool:
        try:
            rendered = await self._comparer.render(AttachRequest(path=other.path, body=dict(other.body)))
        except Unpooled:
            rendered = []
        if len(rendered) != 1:
            self._prompts.leave_out(other)
            return False
        if other.tokens is None:
            self._prompts.rendered(other, rendered[0])
        return True

    def _may_lead(self, other: Prompt, prompt: Prompt, n_common: int) -> bool:
        """It holds the cells, or will do so before this one: of two that wait for a slot the later one follows, unless
        it was granted one sooner, which the other may be in line for.
        """
        if other.turn.slot_id is not None and other.runs:
            return True
        if other.runs:
            may_go = self._slots.serves(other.session.session_id) or not self._slots.serves(prompt.session.session_id)
            return may_go and other.number < prompt.number
        slot_id, n_held = self._slot_of(other), other.session.held_n_tokens
        if slot_id is not None and n_held is None:  # its last turn did not say
            slot = slot_in(self._watch.stats, slot_id)
            n_held = slot.n_tokens if slot is not None else None
        return slot_id is not None and n_held is not None and n_held >= n_common

    def _slot_of(self, prompt: Prompt) -> SlotId | None:
        """The slot that its turn runs in, or ran in if it still is its session's."""
        if prompt.runs:
            return prompt.turn.slot_id
        slot_id = prompt.session.slot_id
        known = self._sessions.get(prompt.session.session_id) is prompt.session
        if known and slot_id is not None and self._slots.owner_of(slot_id) == prompt.session.session_id:
            return slot_id
        return None

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

    def _has_its_own(self, prompt: Prompt) -> bool:
        """It goes on with what it said before, which the engine still has."""
        session = prompt.session
        if len(session.turns) > 1:
            return False  # that is where its other turn is
        return session.n_turns > 1 and (session.saved or self._slots.slot_of(session.session_id) is not None)

    async def _wait(self, flight: _Flight, prompt: Prompt, n_common: int) -> bool:
        """Wait for a flight. False: there is nothing more to wait for."""
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        flight.waiting[prompt.number] = _Waiter(prompt, n_common, told)
        try:
            await asyncio.wait([told], timeout=None if flight.leader.runs else TAKE_S)
            return told.done() and told.result()
        finally:
            flight.waiting.pop(prompt.number, None)

    # One flight ----------------------------------------------------------------------------------------------------

    async def _fly(self, flight: _Flight) -> None:
        try:
            flight.made = await self._make(flight)
        except PolyKVError as e:
            log.info("those who begin alike go on without a pool: %s", e.message)
        finally:
            self._flights.pop(flight.leader.number, None)
            for waiter in flight.waiting.values():
                _tell(waiter, flight.made)

    async def _make(self, flight: _Flight) -> bool:
        """Follow the leader until there is a pool. Gives whether there is. Raises UpstreamError and its heirs."""
        stats = self._watch.stats
        if stats is not None and stats.recurrent:
            return await self._pools.prefilled(flight.tokens[: flight.n_wanted])
        while True:
            slot = await self._look(flight)
            if slot is not None and self._holds_enough(flight, slot):
                if await self._share(flight, SlotId(slot.id)):
                    return True
            elif slot is not None and flight.leader.runs and slot.state == "generating":
                self._miss(flight, f"slot {slot.id} generates behind another prompt")
            elif not flight.leader.runs and (slot is None or slot.idle) and not self._hand_over(flight, slot):
                return False
            await asyncio.sleep(LOOK_S)

    async def _look(self, flight: _Flight) -> SlotStats | None:
        """The leader's slot as it is now; None while it has none."""
        leader = flight.leader
        if leader.runs or flight.slot_id is None:
            flight.slot_id = self._slot_of(leader)
        elif self._slots.owner_of(flight.slot_id) not in (leader.session.session_id, None):
            flight.slot_id = None
        if flight.slot_id is None:
            return None
        return slot_in(await self._watch.refresh(), flight.slot_id)

    def _holds_enough(self, flight: _Flight, slot: SlotStats) -> bool:
        if slot.n_tokens < flight.n_wanted:
            return False
        if flight.leader.runs:
            return slot.n_prompt == len(flight.tokens) and slot.state != "started"
        return slot.idle

    async def _share(self, flight: _Flight, slot_id: SlotId) -> bool:
        try:
            await self._pools.of_beginning(slot_id, flight.tokens[: flight.n_wanted])
        except (SessionNotResident, PrefixMismatch) as e:
            self._miss(flight, f"slot {slot_id} cannot be shared yet: {e.message}")
            if not flight.leader.runs:
                flight.slot_id = None  # another one's by now
            return False
        return True

    def _miss(self, flight: _Flight, why: str) -> None:
        """Raises:  SessionNotResident (409) after too many of them"""
        log.debug("%s", why)
        flight.n_misses += 1
        if flight.n_misses >= MAX_MISSES:
            raise SessionNotResident(why)

    def _hand_over(self, flight: _Flight, slot: SlotStats | None) -> bool:
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
        flight.leader, flight.tokens = heir.prompt, _known(heir.prompt)
        flight.slot_id, flight.wished = None, [heir.n_common]
        for waiter in list(flight.waiting.values()):
            waiter.n_common = lcp_tokens(flight.tokens, _known(waiter.prompt))
            if waiter.n_common < self.min_tokens:
                _tell(waiter, True)  # to look again
        return True

    def _pass_on(self, slot_id: SlotId, before: SessionId, to: SessionId) -> None:
        if self._slots.pass_on(slot_id, before, to):
            self._sessions.displaced(before)


def _tell(waiter: _Waiter, again: bool) -> None:
    if not waiter.told.done():
        waiter.told.set_result(again)


def _known(prompt: Prompt) -> Tokens:
    assert prompt.tokens is not None
    return prompt.tokens
