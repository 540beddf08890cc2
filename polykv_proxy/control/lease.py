"""One proxy per engine: the lease that says who may change pools.

Two proxies would free each other's sequences and hand out the same slots. So every proxy leases the engine under a
name of its own, renews it from the heartbeat, and changes nothing without it. A proxy that was killed stops renewing;
its successor waits for the rest of the lease and takes over. An engine that restarts knows no owner; the next renewal
tells it.

A lease that was taken, or that ran out before it was renewed (a proxy that was suspended, an engine that hung), is
lost: somebody else may have managed the engine meanwhile, so ``on_lost`` forgets all that was known of its sequences.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable

from polykv_proxy.errors import EngineOwned, EngineUnpatched
from polykv_proxy.upstream import EngineClient

log = logging.getLogger("polykv.lease")

TTL_S = 5.0


class Lease:
    """``taken_by``: who has it instead, as far as is known."""

    def __init__(self, engine: EngineClient, *, on_lost: Callable[[], None], ttl_s: float = TTL_S):
        self._engine, self._on_lost = engine, on_lost
        self._ttl_s = ttl_s
        self.owner_id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.taken_by: str | None = None
        self._ours = False
        self._renewed_s = float("-inf")
        self._due = True
        engine.owner = self.owner_id

    @property
    def held(self) -> bool:
        """It is ours, and has not run out by our clock."""
        return self._ours and time.monotonic() - self._renewed_s < self._ttl_s

    async def renew(self) -> None:
        """Take the lease, or keep it.

        Raises:  EngineOwned (503) naming the holder, UpstreamError and its heirs
        """
        asked_s = time.monotonic()
        try:
            await self._engine.lease(self.owner_id, self._ttl_s)
        except EngineOwned as e:
            if self._ours:
                self._lose(f"another proxy ({e.extra.get('owner')}) took over this engine")
            self.taken_by = str(e.extra.get("owner"))
            raise
        except EngineUnpatched:
            log.debug("this engine knows no owners")
        if self._ours and not self.held:
            self._lose("the lease of this engine ran out before it was renewed")
        if not self._ours:
            log.info("this proxy (%s) manages the engine's pools now", self.owner_id)
        self._ours, self._due, self._renewed_s, self.taken_by = True, False, asked_s, None

    def _lose(self, why: str) -> None:
        log.warning("%s; what it holds is not known any more", why)
        self._ours = False
        self._on_lost()

    async def renew_when_due(self) -> None:
        """Renew with a third of the lease gone. Raises as ``renew``."""
        if self._due or not self._ours or time.monotonic() - self._renewed_s >= self._ttl_s / 3:
            await self.renew()

    def forgotten(self) -> None:
        """The engine restarted and knows no owner, and nothing else that could be lost: renew at the next heartbeat."""
        self._due, self._renewed_s = True, time.monotonic()

    async def take_at_start(self) -> None:
        """Take the lease; wait for that of a predecessor that may be dead to run out.

        Raises:  EngineOwned when the holder is alive, UpstreamError and its heirs
        """
        try:
            await self.renew()
        except EngineOwned as e:
            left_s = e.left_s if e.left_s is not None else self._ttl_s
            log.warning("%s; waiting %.1f s to see if it is alive", e.message, left_s)
            await asyncio.sleep(left_s + 0.1)
            await self.renew()

    async def give_up(self) -> None:
        """Leave the engine to the next one."""
        if self._ours:
            self._ours = False
            await self._engine.lease(self.owner_id, 0)
