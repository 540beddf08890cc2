"""Single flight: requests that begin alike prefill what they share once, and share the cells of who came first.

A request whose prompt shares a long beginning with another session's does one of three things, for what is beyond the
deepest pool there is:

    wait     while the other one is at work: until its slot holds the beginning, also while it still prefills the rest,
             decodes, or streams. Then the beginning is a pool (``automatic``), made of that slot's cells
    take     when the other one's slot holds it already: the same, at once. Also when its session is over and the slot
             is nobody's since, and when it is parked: then it is loaded first
    lead     when nobody holds it any more: it prefills it itself, and the pool is made of its own slot

The pool is cut at the exact token where those who are known by then part. Who waits goes on as soon as there is a pool,
or none is to be had: nobody ever waits for more than somebody else's prefill of his own tokens.

When a leader is gone before its slot held all of it, the first who waits is the next one, and is given that slot with
what was prefilled in it.

A memory that is one state instead of cells (recurrent and hybrid models) cannot be cut where a beginning ends. The
engine keeps such states on the way through a prompt, so the pool is prefilled from the last one before its end on:
mostly less than a batch, at worst once more the whole beginning, however many wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polykv_proxy.control.alike import Prompt, PromptBook
from polykv_proxy.control.automatic import AutomaticPools
from polykv_proxy.control.compare import MIN_GAIN_TOKENS, Comparer, Unpooled
from polykv_proxy.control.flights import Flight, Flights, known
from polykv_proxy.control.orders import AttachRequest
from polykv_proxy.control.slot_states import slot_in
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import SlotBook
from polykv_proxy.tree.pool import Match
from polykv_proxy.tree.prefix import Tokens, lcp_tokens
from polykv_proxy.turns import Session, Turn

log = logging.getLogger("polykv.fan_out")

MAX_ROUNDS = 16
"""So often at most a request looks for somebody to wait for: leaders leave, and pools may go as soon as they came."""

DOUBT = 2
"""A body may have so many times more tokens for its bytes than any before. Most requests are too small for a pool then,
and are not even looked at."""


class FanOut(Flights):
    """``may_change``: the engine is ours. ``min_tokens``: of a beginning that is worth it; 0 = never."""

    def __init__(
        self,
        *,
        sessions: SessionBook,
        slots: SlotBook,
        watch: EngineWatch,
        comparer: Comparer,
        pools: AutomaticPools,
        fetch: Callable[[Session], Awaitable[None]],
        may_change: Callable[[], bool],
        clock: Callable[[], float],
        min_tokens: int,
    ):
        super().__init__(sessions=sessions, slots=slots, watch=watch, pools=pools, fetch=fetch, min_tokens=min_tokens)
        self._comparer, self._may_change, self._clock = comparer, may_change, clock
        self.tokens_per_byte: float | None = None
        """The most that a body had until now; None before the first."""
        # A pool that ends a few tokens later is as good, but not where there is one state, at its end.
        self._prompts = PromptBook(max(1, min_tokens), lambda: not comparer.can_cut)

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

    # One request ---------------------------------------------------------------------------------------------------

    def begins_alike(self, turn: Turn, path: str, body: Mapping[str, Any], n_bytes: int) -> bool:
        """Note how a request begins that asks for nothing. Gives whether it may be worth looking who begins so too."""
        if not self.concerns(n_bytes) or not self._is_possible():
            return False
        prompt = self._prompts.find(turn) or self._prompts.enter(turn, path, body, n_bytes)
        if prompt is None:
            return False
        others = self._prompts.alike(prompt)
        if not others:
            return self._may_follow(prompt)
        return not self._prompts.is_settled(prompt, others, self._comparer.version)

    async def join(self, request: AttachRequest) -> AttachRequest:
        """Wait until what this request shares with others is a pool, if it will be one. Never fails.

        Gives the request, with its prompt rendered if that had to be done.
        """
        if not self._is_concerned(request) or request.turn is None:
            return request
        prompt = self._prompts.find(request.turn)
        if prompt is None:
            prompt = self._prompts.enter(request.turn, request.path, request.body, request.n_bytes)
        if prompt is None:
            return request
        try:
            return await self._join(prompt, request)
        except Unpooled:
            # It cannot be rendered (``attach`` says why), and that goes for all that begin so.
            self._prompts.settle(prompt, self._prompts.alike(prompt), self._comparer.version)
            self._prompts.leave_out(prompt)
            return request

    def _is_concerned(self, request: AttachRequest) -> bool:
        asks = (request.pool_ref, request.explicit_p, request.legacy_slot)
        if any(asked is not None for asked in asks) or not request.shareable or request.has_media:
            return False
        return self.concerns(request.n_bytes) and self._is_possible()

    def _is_possible(self) -> bool:
        stats = self._watch.stats
        return stats is not None and stats.share == "ok" and self._may_change()

    async def _join(self, prompt: Prompt, request: AttachRequest) -> AttachRequest:
        for _ in range(MAX_ROUNDS):
            others = self._prompts.alike(prompt)
            version = self._comparer.version
            if prompt.tokens is None:
                if not self._is_worth_rendering(prompt, others, version, request):
                    return request
                rendered = await self._comparer.render(request)
                if len(rendered) != 1:
                    return request
                self._prompts.rendered(prompt, rendered[0])
                request = replace(request, prompts=tuple(rendered))
                by_tokens = [one for one in self._prompts.alike(prompt) if one.tokens is not None]
                others += [one for one in by_tokens if one not in others]
            if not others or self._prompts.is_settled(prompt, others, version):
                return request
            flight, n_common = await self._choose(prompt, others)
            if flight is None:
                self._prompts.settle(prompt, others, version)
                return request
            if flight.leader is prompt or self._has_its_own(prompt):
                return request
            began_s = self._clock()
            try:
                again = await self._wait(flight, prompt, n_common)
            finally:
                request.waits.joined_s += self._clock() - began_s
            if not again:
                break
        return request

    def _is_worth_rendering(
        self, prompt: Prompt, others: Sequence[Prompt], version: int, request: AttachRequest
    ) -> bool:
        """Others' bodies begin so; or it must be rendered anyway, which tells whose tokens do, whatever the dialect."""
        if others and not self._prompts.is_settled(prompt, others, version):
            return True
        return self._may_follow(prompt) or (not self._has_its_own(prompt) and self._comparer.needs_rendering(request))

    def _may_follow(self, prompt: Prompt) -> bool:
        """A pool is being made, maybe of what it begins with, written in another dialect: soon it would match."""
        return bool(self._flights) and not self._has_its_own(prompt)

    async def _choose(self, prompt: Prompt, others: list[Prompt]) -> tuple[Flight | None, int]:
        """The flight for this prompt, begun if there was none, and how many tokens it shares with its leader.

        None: nothing is gained by one.
        """
        tokens = known(prompt)
        shared: list[tuple[int, Prompt]] = []
        for other in self._with_leaders(others, prompt):
            if other.tokens is not None or await self._render(other):
                shared.append((lcp_tokens(tokens, known(other)), other))
        match = self.sure_match(tokens)
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

    def sure_match(self, tokens: Tokens) -> Match | None:
        """As ``Comparer``."""
        return self._comparer.sure_match(tokens)

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
        if other.turn.held:
            return False  # by the gate
        if other.turn.slot_id is not None and other.runs:
            return True
        if other.runs:
            may_go = self._slots.serves(other.session.session_id) or not self._slots.serves(prompt.session.session_id)
            return may_go and other.number < prompt.number
        slot_id = self._slot_of(other)
        if other.is_lost:
            return False
        if slot_id is None:
            return self._is_parked(other) and self._comparer.can_cut
        n_held = other.session.held_n_tokens if not self._is_over(other) else None
        if n_held is None:  # its last turn did not say, or that is forgotten
            slot = slot_in(self._watch.stats, slot_id)
            n_held = slot.n_tokens if slot is not None else None
        return n_held is not None and n_held >= n_common

    def _has_its_own(self, prompt: Prompt) -> bool:
        """It goes on with what it said before, which the engine still has."""
        session = prompt.session
        if len(session.turns) > 1:
            return False  # that is where its other turn is
        return session.n_turns > 1 and (session.saved or self._slots.slot_of(session.session_id) is not None)
