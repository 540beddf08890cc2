"""What is decoded now, for ``GET /polykv/tps`` and whoever decides by it.

Whoever wants it fresh says so before every look (``fresh``): the stats are then read, for all of them together and at
most ten times a second. Who is slow, or left, does not ask, so nothing is read for him.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import orjson

from polykv_proxy.control.rates import Rates
from polykv_proxy.control.views import Views
from polykv_proxy.control.watch import EngineWatch
from polykv_proxy.errors import PolyKVError

log = logging.getLogger("polykv.rates")

READ_EVERY_S = 0.1
PATIENCE_S = 0.25
"""A tick does not wait longer for an engine that is slow to answer; it goes on with what is known."""


class RateFeed:
    """``ended``: no tick comes any more, the proxy is shutting down."""

    def __init__(
        self, watch: EngineWatch, rates: Rates, views: Views, clock: Callable[[], float], unix_offset_s: float
    ):
        self._watch, self._rates, self._views, self._clock = watch, rates, views, clock
        self._unix_offset_s = unix_offset_s
        self.ended = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._made: tuple[float, bytes] | None = None

    async def stop(self) -> None:
        self.ended.set()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def fresh(self) -> None:
        """Have the stats read, unless they just were. An engine that is away is the heartbeat's business."""
        if self._watch.state != "ready" or self._watch.hooks is not True:
            return
        if self._reading is None or self._reading.done():
            if time.monotonic() - self._watch.asked_s < READ_EVERY_S:
                self._rates.note()
                return
            self._reading = asyncio.create_task(self._read(), name="polykv-rates")
        await asyncio.wait([self._reading], timeout=PATIENCE_S)

    async def _read(self) -> None:
        try:
            await self._watch.refresh()
        except PolyKVError as e:
            log.debug("no rates from the engine: %s", e.message)
        self._rates.note()

    def sample(self) -> dict[str, Any]:
        """The contract's object, of what is known now.

        ``n_active`` sessions decode and have a rate; their mean is ``mean_active_tps``. ``n_warming`` are at the engine
        and have had none yet. All four numbers are None when it is not known what the engine does now.
        """
        sessions = self._views.rates()
        live = self._rates.is_live()
        decoding = [s["tps_ewma"] for s in sessions if s["state"] == "decoding" and s["tps_ewma"] is not None]
        warming = [s for s in sessions if s["state"] in ("prefilling", "decoding") and s["tps_ewma"] is None]
        return {
            "ts": self._clock() + self._unix_offset_s,
            "aggregate_tps": self._rates.aggregate_tps(),
            "mean_active_tps": sum(decoding) / len(decoding) if live and decoding else None,
            "n_active": len(decoding) if live else None,
            "n_warming": len(warming) if live else None,
            "sessions": sessions,
        }

    def sample_json(self) -> bytes:
        """The same as JSON, written once for all who want it at the same time."""
        now_s = self._clock()
        if self._made is None or now_s - self._made[0] >= READ_EVERY_S / 2:
            self._made = now_s, orjson.dumps(self.sample())
        return self._made[1]
