"""A slot's context as a pool: sharing the cells that are there, and making sure whose they are.

The slot must still be the session's by the book, before and after the engine shared it. And it must hold about as many
tokens as the session's last answer said: a request that the engine placed by itself may have overwritten a slot that
the book thinks is idle, and nobody may ever get another's text into his pool.
"""

from collections.abc import Awaitable, Callable

from polykv_proxy.control.residency import Residency
from polykv_proxy.errors import (
    PrefixMismatch,
    SavedGone,
    SavingRefused,
    SavingUnsupported,
    SequenceGone,
    SessionNotFound,
    SessionNotResident,
    UpstreamError,
)
from polykv_proxy.ids import SeqId, SessionId, SlotId
from polykv_proxy.sessions import SessionBook
from polykv_proxy.slots import SlotBook
from polykv_proxy.tree.prefix import Tokens, make_tokens
from polykv_proxy.turns import Session
from polykv_proxy.upstream import Materialized


class Snapshots:
    """Whoever takes one adopts its sequence or gives it back. ``bring_back``: of a session that is parked."""

    def __init__(
        self,
        residency: Residency,
        sessions: SessionBook,
        slots: SlotBook,
        bring_back: Callable[[Session], Awaitable[None]],
    ):
        self._residency, self._sessions, self._slots = residency, sessions, slots
        self._bring_back = bring_back

    async def of_session(self, session_id: SessionId) -> tuple[Materialized, Tokens]:
        """Share all that a session's slot holds.

        Raises:  SessionNotFound (404), SessionNotResident (409), SeqIdsExhausted (503), UpstreamError and its heirs
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session {session_id!r}", param="from_session")
        if session.slot_id is None:
            try:
                await self._bring_back(session)
            except (PrefixMismatch, SavedGone, SavingRefused, SavingUnsupported, SequenceGone) as e:
                said = f"session {session_id!r} has no slot, and what was saved of it is not to be had: {e.message}"
                raise SessionNotResident(said, param="from_session") from e
        slot_id = self._own_slot(session)
        was_used = session.ctx_used if not session.turns else None
        made, tokens = await self.of_slot(slot_id, "session")
        try:
            if self._own_slot(session) != slot_id:
                raise SessionNotResident(f"session {session_id!r} moved meanwhile", param="from_session")
            # The last token decoded may not be in the cache yet.
            if was_used is not None and not -2 <= made.n_tokens - was_used <= 1:
                raise SessionNotResident(f"slot {slot_id} holds another context by now", param="from_session")
        except SessionNotResident:
            await self._residency.give_back(SeqId(made.seq))
            raise
        return made, tokens

    def _own_slot(self, session: Session) -> SlotId:
        slot_id = session.slot_id
        if slot_id is None or self._slots.owner_of(slot_id) != session.session_id:
            raise SessionNotResident(f"session {session.session_id!r} has no slot any more", param="from_session")
        return slot_id

    async def of_slot(self, slot_id: SlotId, what: str) -> tuple[Materialized, Tokens]:
        """Share all that a slot holds. ``what``: for the tag.

        Raises:  SessionNotResident (409) when it is empty, SeqIdsExhausted (503), UpstreamError and its heirs
        """
        made = await self._residency.snapshot(slot_id, what)
        if made.tokens is None or len(made.tokens) != made.n_tokens:
            await self._residency.give_back(SeqId(made.seq))
            raise UpstreamError("the engine did not say which tokens the slot holds")
        return made, make_tokens(list(made.tokens))
