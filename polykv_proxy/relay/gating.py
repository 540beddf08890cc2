"""One request's way past the gate: its session at the door of a pool, its turn just before it goes out.

Made only while somebody has an admission policy: all other requests know nothing of it.
"""

import hashlib
from collections.abc import Callable, Mapping

from polykv_proxy.control import AttachPlan, Control
from polykv_proxy.control.sizes import answer_cells
from polykv_proxy.control.visits import Visit
from polykv_proxy.relay.dialects import Call
from polykv_proxy.relay.receipt import Receipt
from polykv_proxy.tree.pool import Pool
from polykv_proxy.turns import Turn

BYTES_PER_TOKEN = 4
"""Of a prompt that nobody counted: it only tells a long one from a short one."""


class Gating:
    """``hold(why, seconds)`` counts a wait. ``step_back``: called when it has to wait at the door.

    Units:  tokens of its prompts where nothing else is said
    """

    def __init__(
        self,
        control: Control,
        call: Call,
        turn: Turn,
        receipt: Receipt,
        *,
        headers: Mapping[str, str],
        family: str | None,
        hold: Callable[[str, float], int],
        step_back: Callable[[], None],
    ):
        self._control, self._call, self._receipt, self._hold = control, call, receipt, hold
        self._n_total: int | None = None
        self.visit = Visit(
            turn,
            overcommit=call.fields.overcommit,
            n_bytes=len(call.raw),
            tenant=_tenant(headers, family),
            is_retry=_retries(headers) > 0,
            on_hold=step_back,
        )

    async def at_door(self, pool: Pool, n_shared: int, n_total: int | None) -> bool:
        """As ``AttachRequest.door``. Raises as ``Door.enter``."""
        self._n_total = n_total
        n_missing = self._control.residency.n_missing(pool)
        n_guess = n_total if n_total is not None else len(self._call.raw) // BYTES_PER_TOKEN
        n_uncached = max(0, n_guess - n_shared) + n_missing
        # What was not counted is not known, and the engine has the last word.
        n_expected = n_uncached + answer_cells(self._call.body) if n_total is not None else None
        began_s = self._control.clock()
        try:
            return await self._control.door.enter(
                self.visit, pool, expected_tokens=n_expected, uncached_tokens=n_uncached
            )
        finally:
            self._hold("admission", self._control.clock() - began_s)
            self._receipt.sessions_remaining = self.visit.sessions_remaining

    async def before_it_goes_out(
        self, plan: AttachPlan | None, *, own: bool, on_hold: Callable[[], None] = lambda: None
    ) -> bool:
        """Hold the turn while it would slow the others below the floor. Gives whether it was held.

        ``own``: its slot has what its session said before. ``on_hold``: called when it is.
        """
        if plan is None or plan.pool_id is None:
            return False
        session = self.visit.turn.session
        n_total = len(plan.tokens) if plan.tokens is not None else self._n_total
        if n_total is None:
            n_total = max(session.ctx_used or 0, plan.prefix_n_tokens, len(self._call.raw) // BYTES_PER_TOKEN)
        n_held = session.held_n_tokens or 0 if own else 0
        n_uncached = max(0, n_total - max(plan.prefix_n_tokens, n_held))
        began_s = self._control.clock()
        try:
            return await self._control.door.begin_turn(
                self.visit, plan.pool_id, ctx_tokens=n_total, uncached_tokens=n_uncached, on_hold=on_hold
            )
        finally:
            self._hold("turn", self._control.clock() - began_s)

    def over(self) -> None:
        """After the books of its session were brought up to date."""
        self._control.door.end_turn(self.visit)


def _tenant(headers: Mapping[str, str], family: str | None) -> str:
    """Whoever has a key of his own, and in there each family of agents."""
    shown = headers.get("Authorization") or headers.get("x-api-key") or ""
    key = hashlib.blake2b(shown.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest() if shown else ""
    return f"{key}/{family or ''}"


def _retries(headers: Mapping[str, str]) -> int:
    """How often the client's own library sent this before."""
    count = headers.get("x-stainless-retry-count", "")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0
