"""Cells for one request before it goes out: counted as cheaply as the room that there is allows.

    1. A guess by the length of its body fits by what is known: go.
    2. It fits by fresh stats: go.
    3. Only now is it rendered, to be counted; with media in it, llama-server's own routes for that count it. A prompt
       that the engine refuses anyway is left to it.
    4. With its pool or without it: what nobody uses is evicted for it, or it waits (``room``).

What cannot be counted goes out uncounted, and the engine has the last word. For media in a prompt of the completion
routes, which nobody counts, what a guess needs is made free as far as unused pools can give it. How many tokens a
picture takes cannot be told from its bytes, so as long as it is not counted a body with media may fill the context.
"""

import logging
from dataclasses import replace

from polykv_proxy.control.compare import Comparer, Comparison
from polykv_proxy.control.forecast import FIRST_CELLS
from polykv_proxy.control.orders import AttachRequest
from polykv_proxy.control.residency import Residency
from polykv_proxy.control.room import Room
from polykv_proxy.control.sizes import (
    ANSWER_CELLS,
    TEMPLATE_TOKENS,
    answer_cells,
    guess_media_tokens,
    guess_tokens,
    n_choices,
)
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import UpstreamError
from polykv_proxy.ids import SessionId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.upstream.client import COUNTS

log = logging.getLogger("polykv.attach")


SMALL_BYTES = 2048


class Admission:
    def __init__(self, *, comparer: Comparer, watch: EngineWatch, residency: Residency, room: Room):
        self._comparer, self._watch, self._residency, self._room = comparer, watch, residency, room

    def lets_in(self, n_bytes: int, session: SessionId) -> bool:
        """Let a small request without a pool go if there is clearly room; False: it must be looked at (``admit``).

        Costs next to nothing, since most requests in front of most caches are of this kind.
        """
        n_cells = n_bytes + TEMPLATE_TOKENS  # a token has a byte at least
        if n_bytes > SMALL_BYTES or self._room.has_line or not self._room.fits(n_cells + ANSWER_CELLS):
            return False
        self._room.promise(n_cells, None, session)
        return True

    async def admit(self, request: AttachRequest, found: Comparison, pool: Pool | None) -> Pool | None:
        """See to it that there is room for the request with its pool. Gives None when it only fits without one.

        Raises:  KvExhaustedForRequest (503)
        """
        n_answer = answer_cells(request.body)
        n_wanted = self._n_cells(request, found, pool) + n_answer
        if self._room.has_line or not self._room.fits(n_wanted):
            try:
                if self._room.has_line or not await self._room.fits_now(n_wanted):
                    found, pool = await self._count_and_wait(request, found, pool, n_answer)
            except UpstreamError as e:
                log.info("cells not counted: %s", e.message)  # the request itself will show what is the matter
        asked = pool.pool_id if pool is not None else None
        n_cells = 0 if self._too_long(found) else self._n_private(request, found, pool)
        self._room.promise(n_cells, asked, request.session)
        return pool

    async def _count_and_wait(
        self, request: AttachRequest, found: Comparison, pool: Pool | None, n_answer: int
    ) -> tuple[Comparison, Pool | None]:
        if found.n_total is None:
            counted = await self._comparer.count(request)
            if counted is not None:
                found = replace(found, n_prompts=counted[0], n_total=counted[1])
            elif request.has_media:
                found = replace(found, n_total=0)  # nothing is known of it, and nothing kept for it
                if request.path not in COUNTS:
                    await self._room.make(0, self._at_most(guess_media_tokens(request.body), found) + n_answer)
        if not found.n_total or self._too_long(found):
            return found, pool
        options = [pool, None] if pool is not None else [None]
        n_first = min(FIRST_CELLS, n_answer)
        place = await self._room.wait_for(
            lambda: [self._n_cells(request, found, option) for option in options], n_first, n_answer - n_first
        )
        return found, options[place]

    def _too_long(self, found: Comparison) -> bool:
        """The engine will refuse it, in its own words."""
        n_ctx = self._watch.stats.n_ctx_slot if self._watch.stats is not None else None
        return n_ctx is not None and (found.n_total or 0) >= n_ctx * found.n_prompts

    def _at_most(self, n_tokens: int | None, found: Comparison) -> int:
        """No more than the contexts of its prompts, which is the guess when there is none."""
        n_ctx = self._watch.stats.n_ctx_slot if self._watch.stats is not None else None
        if n_ctx is None:
            return n_tokens or 0
        n_most = n_ctx * found.n_prompts
        return n_most if n_tokens is None else min(n_most, n_tokens)

    def _n_cells(self, request: AttachRequest, found: Comparison, pool: Pool | None) -> int:
        """Cells of the request, and of its pool if that is not resident."""
        missing = self._residency.n_missing(pool) if pool is not None else 0
        return self._n_private(request, found, pool) + missing

    def _n_choices(self, request: AttachRequest) -> int:
        """As many answers as the engine will give: it refuses more than it has slots, and Messages knows one only."""
        n, n_slots = n_choices(request.body), self._watch.stats.n_slots if self._watch.stats is not None else 0
        return 1 if n > n_slots or request.path == "/v1/messages" else n

    def _n_private(self, request: AttachRequest, found: Comparison, pool: Pool | None) -> int:
        """Cells of the prompts beyond what is shared, and one for each first token."""
        n_total = found.n_total
        if n_total is None:
            n_total = self._at_most(None if request.has_media else guess_tokens(request.body), found)
        n_shared = found.prefix_n_tokens * found.n_prompts if pool is not None else 0
        return max(0, n_total - n_shared) + self._n_choices(request) * found.n_prompts
