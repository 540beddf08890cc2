"""Waiting for a slot: the rim around ``SlotBook``, where requests stand in line and can be cancelled.

The book decides; here are only futures, and a look at the engine when a slot may still be in use there (a client left
in mid-reply, or somebody uses the engine directly).
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection

from polykv_proxy.conversation import Conversation
from polykv_proxy.errors import PolyKVError, UpstreamError
from polykv_proxy.ids import SessionId, SlotId
from polykv_proxy.slots import Displaced, Grant, SlotBook, Ticket

LOOK_MIN_S, LOOK_MAX_S = 0.03, 1.3
"""Pauses between looks. An engine without our patch of its result queue notices that the client of a reply in one piece
has left only after a second in which nobody got a result, and a look is one: hence more than a second in the end."""

Look = Callable[[], Awaitable[Collection[SlotId]]]
"""Asks the engine which slots it is using now."""


class SlotDesk:
    def __init__(self, book: SlotBook, look: Look, clock: Callable[[], float]):
        self.book = book
        self._look = look
        self._clock = clock
        self._waiting: dict[int, asyncio.Future[Grant]] = {}
        self._numbers = itertools.count(1)
        self._looker: asyncio.Task[None] | None = None

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def take(self, session: SessionId | None, n: int, conversation: Conversation | None) -> Grant | None:
        """``n`` slots that are free now; None when there is a line to stand in."""
        return self.book.take(Ticket(next(self._numbers), session, n, conversation), self._clock())

    async def acquire(
        self,
        session: SessionId | None,
        n: int,
        conversation: Conversation | None,
        *,
        look_first: bool = False,
        on_wait: Callable[[], None] = lambda: None,
        within_s: float | None = None,
    ) -> Grant:
        """Wait for ``n`` slots, first come first served. Leaving (cancellation) gives up the place at once.

        ``on_wait`` is called when there is a line to stand in.

        Raises:  TimeoutError when its turn did not come ``within_s``
        """
        if look_first:
            self.deliver(self.book.observe(await self._seen(), self._clock()))
        ticket = Ticket(next(self._numbers), session, n, conversation)
        at_once = self.book.request(ticket, self._clock())
        if at_once:
            return at_once[0]
        on_wait()
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting[ticket.ticket_id] = future
        try:
            self._look_if_needed()
            async with asyncio.timeout(within_s):
                return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())  # granted in the very moment it left
            else:
                self.deliver(self.book.withdraw(ticket.ticket_id, self._clock()))
            raise
        finally:
            self._waiting.pop(ticket.ticket_id, None)

    def release(self, grant: Grant, *, unsure: bool = False) -> None:
        """``unsure``: the reply was not read to its end, so the engine may be at it for another moment."""
        self.deliver(self.book.release(grant.ticket.ticket_id, self._clock(), unsure=unsure))
        self._look_if_needed()

    def occupy(self, slot_id: SlotId) -> tuple[Displaced, ...]:
        return self.book.occupy(slot_id)

    def vacate(self, slot_id: SlotId, *, unsure: bool = False) -> None:
        self.deliver(self.book.vacate(slot_id, self._clock(), unsure=unsure))
        self._look_if_needed()

    def dismiss(self, error: PolyKVError) -> None:
        """Everybody in line gets ``error``."""
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        looker, self._looker = self._looker, None
        if looker is not None:
            looker.cancel()
            await asyncio.wait([looker])

    def deliver(self, grants: list[Grant]) -> None:
        """Tell those who wait. Also called with grants that follow from news of the engine."""
        for grant in grants:
            future = self._waiting.get(grant.ticket.ticket_id)
            if future is not None and not future.done():
                future.set_result(grant)
            else:
                # It left before its turn came and is on its way to say so.
                self.deliver(self.book.release(grant.ticket.ticket_id, self._clock()))

    async def _seen(self) -> Collection[SlotId]:
        """Busy slots; none when the engine cannot say, since then no request can be held up behind them either."""
        try:
            return await self._look()
        except UpstreamError:
            return ()

    def _look_if_needed(self) -> None:
        if self.book.unsure and (self._looker is None or self._looker.done()):
            self._looker = asyncio.create_task(self._look_until_sure(), name="polykv-slots-look")

    async def _look_until_sure(self) -> None:
        pause_s = LOOK_MIN_S
        while self.book.unsure:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LOOK_MAX_S)
            self.deliver(self.book.observe(await self._seen(), self._clock()))
