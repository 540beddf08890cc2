"""What must be so before the engine may be changed, or asked about its pools: patched, able to share, and ours."""

import logging

from polykv_proxy.control.lease import Lease
from polykv_proxy.control.residency import Residency
from polykv_proxy.control.restore import Restorer
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import EngineOwned, UpstreamError
from polykv_proxy.upstream import EngineClient

log = logging.getLogger("polykv.control")


class Permission:
    """Asks, and raises when it is not so."""

    def __init__(
        self, *, engine: EngineClient, watch: EngineWatch, lease: Lease, restorer: Restorer, residency: Residency
    ):
        self._engine, self._watch, self._lease = engine, watch, lease
        self._restorer, self._residency = restorer, residency

    async def require_sharing(self) -> None:
        """A patched engine that can share, and that is ours to change.

        Raises:  EngineUnpatched, SharingUnsupported (501), EngineOwned (503), UpstreamError and its heirs
        """
        await self._watch.require_sharing()
        if self._watch.sleeping and not self._restorer.is_bound:
            # Of which model the pools are is only known of one that is awake: this wakes it.
            await self._engine.render("/completion", {"prompt": [0]})
            await self._watch.require_sharing()
        await self.require_owned()

    async def require_owned(self) -> None:
        """Raises EngineOwned (503) naming the holder, JournalFailed (503), UpstreamError and its heirs."""
        await self._restorer.require_bound()
        if not self._lease.held:
            await self._lease.renew()
        if not self._residency.compared:
            await self._residency.reconcile()

    async def seek(self) -> None:
        """See to what is missing, as the next heartbeat would. Unless another proxy has the engine: that it asks.

        Raises:  as ``require_owned``
        """
        if self._lease.taken_by is not None:
            return
        if self._watch.hooks is None or self._watch.state != "ready":
            await self._watch.refresh()
        if self._watch.hooks:
            await self.require_owned()

    async def require_not_taken(self) -> None:
        """Raises EngineOwned (503) when another proxy manages the engine. An engine that is away is no reason."""
        if self._watch.hooks and self._watch.state == "ready":
            try:
                await self.require_owned()
            except EngineOwned:
                raise
            except UpstreamError as e:
                log.info("not asked who manages the engine: %s", e.message)

    async def require_patched(self) -> None:
        """Raises EngineUnpatched (501) in front of a plain llama-server. An engine that is away is no reason."""
        if self._watch.hooks is False:
            await self._watch.require_patched()
