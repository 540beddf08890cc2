"""What is known about the engine: reachable, patched, which start of it, what its stats said last.

One place reads the stats. Whoever needs fresh ones asks ``refresh``; questions at the same time share one answer. A
slow heartbeat asks too, so that a restart or a death is noticed when nobody is talking. A new epoch is told to
everybody who keeps books about sequences and slots, before anything else is done with the answer; and again with the
next answer, as long as somebody fails at it. Until all have taken it in nothing is known of the engine.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from polykv_proxy.control.progress import HUNG_AFTER_S, Progress
from polykv_proxy.errors import (
    EngineKeyRefused,
    EngineUnpatched,
    PolyKVError,
    SharingUnsupported,
    UpstreamLoading,
    UpstreamRestarted,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from polykv_proxy.upstream import EngineClient, Stats
from polykv_proxy.upstream.plain import PlainProps

log = logging.getLogger("polykv.engine")

State = Literal["unknown", "ready", "loading", "away"]

HEARTBEAT_S = 1.0

ASLEEP, AWAY, PLAIN = "(asleep)", "(away)", "(plain)"


class EngineWatch:
    """``on_restart(stats)``: a new epoch was seen. ``on_plain(props)``: an engine without hooks was seen.
    ``on_lost()``: it went to sleep, and its context with it; the next order wakes it up to a new epoch.
    All three can be told the same again.

    ``beat``: called once per heartbeat while the engine is ready. ``report``: level and line for the log,
    asked when an engine was found.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        on_restart: Callable[[Stats], None],
        on_lost: Callable[[], None],
        on_plain: Callable[[PlainProps], None],
        beat: Callable[[], Awaitable[None]],
        report: Callable[[], list[tuple[int, str]]],
        heartbeat_s: float = HEARTBEAT_S,
    ):
        self.engine = engine
        self.state: State = "unknown"
        self.hooks: bool | None = None
        self.sleeping = False
        self.woke_up = False
        """This start of the engine is one out of its sleep, as far as is known: what was saved in memory is there."""
        self.epoch: str | None = None
        self.stats: Stats | None = None
        self.asked_s = float("-inf")
        """When the question went out that ``stats`` answer: what happened later they need not show."""
        self.failure: PolyKVError | None = None
        self.progress = Progress()
        self._hung = False
        self._on_restart, self._on_lost, self._on_plain, self._beat = on_restart, on_lost, on_plain, beat
        self._report = report
        self._taken_in: str | None = None
        """What everybody who keeps books has been told last: an epoch, or one of the three above. None: nothing yet."""
        self._plain: PlainProps | None = None
        self._bug: str | None = None
        self._told: tuple[State, bool | None, str | None] | None = None
        self._reported: list[tuple[int, str]] = []
        self._heartbeat_s = heartbeat_s
        self._asking: asyncio.Task[Stats | None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def hangs(self) -> bool:
        """It answers, and gets nowhere with what it has to do."""
        return self.state == "ready" and not self.sleeping and self.progress.hangs(time.monotonic())

    async def start(self) -> None:
        """Ask once and go on asking. An engine that is not there yet is no reason not to start."""
        await self._try_refresh()
        self._task = asyncio.create_task(self._run(), name="polykv-heartbeat")

    async def stop(self) -> None:
        tasks = [t for t in (self._task, self._asking) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh(self) -> Stats | None:
        """Fresh stats; None for an engine without hooks. A question that is already out is shared only before it left.

        Raises:  UpstreamUnavailable, UpstreamLoading, UpstreamTimeout, UpstreamError
        """
        if self._asking is not None and not self._asking.done():
            # Its answer may be older than this question: wait for it, then ask again together with the others.
            await asyncio.wait([self._asking])
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name="polykv-stats")
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._asking)

    async def require_patched(self) -> Stats:
        """Fresh stats of an engine that can hold pools.

        Raises:  EngineUnpatched (501), and as ``refresh``
        """
        stats = await self.refresh()
        if stats is None:
            raise self.failure or EngineUnpatched("this llama-server has no PolyKV hooks")
        return stats

    async def require_sharing(self) -> Stats:
        """As ``require_patched``, and the model and its cache layout can share.

        Raises:  SharingUnsupported (501)
        """
        stats = await self.require_patched()
        if not stats.sleeping and stats.share != "ok":
            raise SharingUnsupported(f"pools cannot be shared here: {stats.share}")
        return stats

    # ---------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self._try_refresh()
                if self.state == "ready":
                    await self._beat()
            except PolyKVError as e:
                log.warning("heartbeat: %s", e.message)
            except Exception:
                log.exception("a bug in the heartbeat; it goes on")

    async def _try_refresh(self) -> None:
        try:
            await self.refresh()
        except PolyKVError as e:
            if self._told is None or (self.state, self.hooks) != self._told[:2]:
                log.warning("engine %s: %s", self.state, e.message)
            self._told = (self.state, self.hooks, self.epoch)
            return
        now = (self.state, self.hooks, self.epoch)
        if now != self._told:
            lines = self._report()
            # A restart with the same flags says nothing new.
            if self._told is None or now[:2] != self._told[:2] or lines != self._reported:
                for level, line in lines:
                    log.log(level, line)
            self._told, self._reported = now, lines

    async def _ask(self) -> Stats | None:
        asked_s = time.monotonic()
        try:
            stats = await self.engine.stats()
        except EngineUnpatched as e:
            self.failure = e
            await self._ask_plain()
            return None
        except PolyKVError as e:
            self._failed(e)
            raise
        self.failure, self.state, self.hooks, self.sleeping = None, "ready", True, stats.sleeping
        if stats.sleeping:
            if self._taken_in not in (None, ASLEEP):
                if self.epoch is not None:
                    log.info("the engine sleeps; its pools are gone")
                self.epoch = None
                self._take_in(ASLEEP, self._on_lost)
            return stats
        self.stats, self.asked_s = stats, asked_s
        self.progress.note(stats, asked_s)
        self._say_if_hung()
        self.engine.n_ctx, self.engine.n_ctx_train = stats.n_ctx_slot, stats.model.n_ctx_train
        if stats.epoch != self._taken_in:
            if self.epoch is not None:
                log.warning("the engine was restarted (epoch %s, was %s)", stats.epoch, self.epoch)
            self.epoch, self.woke_up = stats.epoch, self._taken_in == ASLEEP
            self._take_in(stats.epoch, lambda: self._on_restart(stats))
        return stats

    def _say_if_hung(self) -> None:
        hangs, before = self.hangs, self._hung
        self._hung = hangs
        if hangs and not before:
            log.warning(
                "the engine answers, and has done nothing for %.0f s though requests run: see its log, and restart it "
                "if it does not go on",
                HUNG_AFTER_S,
            )
        elif before and not hangs:
            log.warning("the engine goes on")

    async def _ask_plain(self) -> None:
        """A llama-server without hooks. Another start of it shows by what it makes up then, or by its absence."""
        try:
            props = PlainProps.read(await self.engine.props())
        except PolyKVError as e:
            self._failed(e)
            raise
        new = self._taken_in != PLAIN or self.state != "ready" or props != self._plain
        self.hooks, self.state, self.stats, self.epoch, self.sleeping = False, "ready", None, None, props.sleeping
        if new:
            self._take_in(PLAIN, lambda: self._on_plain(props))
            self._plain = props

    def _take_in(self, what: str, tell: Callable[[], None]) -> None:
        """Tell everybody who keeps books. Half done is not done: then nothing is known, and all are told again.

        Raises:  UpstreamRestarted (503)
        """
        try:
            tell()
        except Exception as e:
            self.epoch = None
            error = UpstreamRestarted(
                f"a bug keeps the proxy from taking in that the engine is another one now ({type(e).__name__}: {e}); "
                "it tries again"
            )
            if self._bug != error.message:
                self._bug = error.message
                log.exception("%s", error.message)
            self._failed(error)
            self.state = "unknown"
            raise error from e
        self._taken_in, self._bug = what, None

    def _failed(self, error: PolyKVError) -> None:
        self.failure = error
        if self._taken_in == ASLEEP and isinstance(error, UpstreamLoading | UpstreamUnavailable):
            self._taken_in = AWAY
        if isinstance(error, UpstreamLoading):
            self.state = "loading"
        elif isinstance(error, UpstreamUnavailable | UpstreamTimeout):
            self.state = "away"  # nobody there, or there and not answering
        elif isinstance(error, EngineKeyRefused):
            self.state = "unknown"  # whoever it is now: nothing of it can be seen
