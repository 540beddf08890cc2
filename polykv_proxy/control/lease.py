"""One proxy per engine: the lease that says who may change pools.

Two proxies would free each other's sequences and hand out the same slots. So every proxy leases the engine under a
name of its own, renews it from the heartbeat, and changes nothing without it. A proxy that was killed stops renewing;
its successor waits for the rest of the lease and takes over. An engine that restarts knows no owner; the next renewal
tells it.
"""

import asyncio
import logging
import os
import secrets
import socket
import time

from polykv_proxy.errors import EngineOwned, EngineUnpatched
from polykv_proxy.upstream import EngineClient

log = logging.getLogger("polykv.lease")

TTL_S = 5.0


class Lease:
    def __init__(self, engine: EngineClient, *, ttl_s: float = TTL_S):
        self._engine = engine
        self._ttl_s = ttl_s
        self.owner_id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.held = False
        self._renewed_s = float("-inf")
        engine.owner = self.owner_id

    async def renew(self) -> None:
        """Take the lease, or keep it.

        Raises:  EngineOwned (503) naming the holder, UpstreamError and its heirs
        """
        try:
            await self._engine.lease(self.owner_id, self._ttl_s)
        except EngineOwned:
            if self.held:
                log.error("another proxy took over this engine")
            self.held = False
            raise
        except EngineUnpatched:
            log.debug("this engine knows no owners")
        if not self.held:
            log.info("this proxy (%s) manages the engine's pools now", self.owner_id)
        self.held, self._renewed_s = True, time.monotonic()

    async def renew_when_due(self) -> None:
        """Renew with a third of the lease gone. Raises as ``renew``."""
        if not self.held or time.monotonic() - self._renewed_s >= self._ttl_s / 3:
            await self.renew()

    def forgotten(self) -> None:
        """The engine restarted and knows no owner: renew at the next heartbeat."""
        self._renewed_s = float("-inf")

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
        if self.held:
            self.held = False
            await self._engine.lease(self.owner_id, 0)
