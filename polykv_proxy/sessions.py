"""Who talks to us: the sessions, what they are attached to and what they last used.

Pure: every method takes ``now_s`` (monotonic). Three windows, each counted from the end of the last turn: *live*
(``gap_s``: holds its slot and its place in forecasts), *open* (``idle_s``, or ``anonymous_idle_s`` for one that the
client did not name: its books are kept), *known* (``known_s``: only the name is kept, so that it can come back). One
that the client did not name stays open like one that it named while the engine keeps its state (``saved``): it is only
recognised as long as it is open.

Soft state by design: a session that is forgotten attaches again and prefills its own suffix.
"""

import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from polykv_proxy.conversation import Conversation, Mark
from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.turns import Session, Turn, Usage


@dataclass(slots=True)
class SessionBook:
    gap_s: float = 60.0
    idle_s: float = 900.0
    anonymous_idle_s: float = 30.0
    known_s: float = 86_400.0
    max_known: int = 100_000
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    """Of this start of the proxy: names made up by an earlier one must not come up again."""
    on_forgotten: Callable[[Session], None] = lambda _: None
    """Called with a session of which nothing is known any more, not even its name."""
    running: dict[int, Turn] = field(default_factory=dict)
    """Every turn under way, by its id."""
    _sessions: dict[SessionId, Session] = field(default_factory=dict)
    _marks: dict[Mark, list[SessionId]] = field(default_factory=lambda: defaultdict(list))
    _text_lengths: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    # Those without a turn, the longest idle first: a sweep looks at nobody whose time has not come.
    _idle_named: OrderedDict[SessionId, Session] = field(default_factory=OrderedDict)
    _idle_anonymous: OrderedDict[SessionId, Session] = field(default_factory=OrderedDict)
    _idle_closed: OrderedDict[SessionId, Session] = field(default_factory=OrderedDict)
    _n_turns: int = 0
    _n_made: int = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self) -> Iterator[Session]:
        """Those with a turn under way, also when they were dropped, and those that are idle and not closed."""
        yield from {turn.session.session_id: turn.session for turn in self.running.values()}.values()
        yield from self._idle_named.values()
        yield from self._idle_anonymous.values()

    @property
    def n_running(self) -> int:
        return sum(len(s.turns) for s in self._sessions.values())

    def get(self, session_id: SessionId) -> Session | None:
        return self._sessions.get(session_id)

    def name(self, session_id: SessionId, now_s: float, *, parent: SessionId | None = None) -> Session:
        """The session the client named; new, known or reopened."""
        session = self._sessions.get(session_id)
        if session is None:
            session = Session(session_id, True, now_s, now_s, parent=parent)
            self._sessions[session_id] = session
            self._rest(session)
        elif session.closed:
            self._rouse(session)
            session.closed = False
            self._rest(session)
        if session.parent is None:
            session.parent = parent
        return session

    def recognise(self, conversation: Conversation | None, now_s: float) -> Session | None:
        """The idle unnamed session that this conversation continues: its messages, an assistant's answer, new ones.

        The longest match wins, and of several that said the same one of which something is left, in a slot or saved. It
        is claimed by being run: a running session is never recognised again.
        """
        if conversation is None or not self._marks or not conversation.has_answers:
            return None
        lengths = sorted(self._text_lengths, reverse=True) if conversation.is_text else range(len(conversation), 0, -1)
        for length in lengths:
            if length > len(conversation) or not conversation.answered_at(length):
                continue
            said_so = (self._sessions[one] for one in self._marks.get(conversation.mark_at(length), ()))
            idle = [session for session in said_so if not session.turns and self.is_open(session, now_s)]
            if idle:
                return max(idle, key=lambda session: (session.slot_id is not None, session.saved))
        return None

    def make(self, now_s: float) -> Session:
        """A session for a client that named none and was not recognised. Its first turn has to ``begin`` now."""
        self._n_made += 1
        session = Session(SessionId(f"anon-{self.run}-{self._n_made}"), False, now_s, now_s)
        self._sessions[session.session_id] = session
        return session

    def begin(self, session: Session, now_s: float) -> Turn:
        if not session.turns and (session.n_turns or session.named):
            self._rouse(session)
        self._n_turns += 1
        number = 1
        if session.turns:
            taken = {turn.number for turn in session.turns.values()}
            number = next(n for n in range(1, len(taken) + 2) if n not in taken)
        turn = Turn(self._n_turns, session, now_s, number)
        session.n_first_turns += number == 1
        session.turns[turn.turn_id] = self.running[turn.turn_id] = turn
        session.n_turns += 1
        session.last_s = now_s
        self._forget_mark(session)
        return turn

    def end(self, turn: Turn, usage: Usage, now_s: float, *, said: Conversation | None = None) -> None:
        """``said``: the prompt of a turn that the engine answered."""
        session = turn.session
        if session.turns.pop(turn.turn_id, None) is None:
            return
        del self.running[turn.turn_id]
        session.last_s = now_s
        ctx_used = usage.ctx_used
        if turn.sent_s is not None:
            session.held_n_tokens, session.held_s = ctx_used, now_s
        if ctx_used is not None:
            session.ctx_used = ctx_used
        elif turn.ctx_used is not None:
            session.ctx_used = turn.ctx_used  # the reply broke off, or did not say it
        if usage.tps is not None:
            session.tps = usage.tps
        n_decoded = usage.predicted_n if usage.predicted_n is not None else turn.n_decoded
        session.n_decoded += n_decoded
        if turn.number == 1:
            session.n_first_decoded += n_decoded
            session.first_decoding_s += n_decoded / usage.tps if usage.tps else turn.decoding_s(now_s)
        if self._sessions.get(session.session_id) is not session:
            return  # dropped meanwhile
        if said is not None:
            session.continues = not said.is_text and said.has_answers
        if not session.turns:
            self._rest(session)
        mark = said.mark() if said is not None and not session.named else None
        if mark is not None:
            session.mark = mark
            self._marks[mark].append(session.session_id)
            if mark.is_text:
                self._text_lengths[mark.length] += 1

    def displaced(self, session_id: SessionId) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            session.slot_id = None

    def set_saved(self, session: Session, n_sent: int | None) -> None:
        """The engine keeps its state as it was after so many turns; None: it does not keep any."""
        waits = not session.named and not session.turns and self._sessions.get(session.session_id) is session
        if waits:
            self._rouse(session)
        session.saved_at = n_sent
        if waits:
            self._rest(session)

    def is_live(self, session_id: SessionId, now_s: float) -> bool:
        session = self._sessions.get(session_id)
        return session is not None and (bool(session.turns) or now_s - session.last_s <= self.gap_s)

    def is_open(self, session: Session, now_s: float) -> bool:
        idle_s = self.idle_s if session.named or session.saved else self.anonymous_idle_s
        return not session.closed and (bool(session.turns) or now_s - session.last_s <= idle_s)

    def live_in(self, pool_id: PoolId, now_s: float) -> list[Session]:
        return [s for s in self if s.pool_id == pool_id and self.is_live(s.session_id, now_s)]

    def released(self, pool_id: PoolId) -> None:
        """The pool is off the tree: its sessions match anew at their next turn."""
        for session in self._sessions.values():
            if session.pool_id == pool_id:
                session.pool_id = None

    def engine_restarted(self) -> None:
        for session in self._sessions.values():
            session.slot_id = None

    def drop(self, session_id: SessionId) -> Session | None:
        """DELETE: nothing is known of it any more. A running turn ends by itself."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._rouse(session)
            self._forget_mark(session)
            self.on_forgotten(session)
        return session

    def take_back(self, session: Session) -> bool:
        """Of one whose turns all ended before the engine had one nothing is told: it was not let in, or left before.
        What the engine may keep of it, from before this start of the proxy, stays. Gives whether it was such a one.
        """
        if session.n_sent or session.turns or self._sessions.get(session.session_id) is not session:
            return False
        del self._sessions[session.session_id]
        self._rouse(session)
        return True

    def sweep(self, now_s: float) -> list[SessionId]:
        """Close the books of those that were idle too long; forget the oldest names. Returns who was closed now."""
        closed = []
        for idle, idle_s in ((self._idle_named, self.idle_s), (self._idle_anonymous, self.anonymous_idle_s)):
            for session in _due(idle, now_s - idle_s):
                closed.append(session.session_id)
                self._close(session)
        for session in _due(self._idle_closed, now_s - self.known_s):
            self._forget(session)
        while self._idle_closed and len(self._sessions) > self.max_known:
            _, session = self._idle_closed.popitem(last=False)
            self._forget(session)
        return closed

    def _forget(self, session: Session) -> None:
        del self._sessions[session.session_id]
        self.on_forgotten(session)

    def _close(self, session: Session) -> None:
        """Of one that the client did not name nothing is left; of another its name."""
        self._forget_mark(session)
        session.closed, session.slot_id, session.pool_id = True, None, None
        session.ctx_used = session.held_n_tokens = session.tps = session.ttft_ms = None
        if session.named:
            self._idle_closed[session.session_id] = session
        else:
            self._forget(session)

    def _rest(self, session: Session) -> None:
        """It has nothing running now: last in line to be closed."""
        line = self._idle_named if session.named or session.saved else self._idle_anonymous
        line[session.session_id] = session

    def _rouse(self, session: Session) -> None:
        for line in (self._idle_named, self._idle_anonymous, self._idle_closed):
            if line.pop(session.session_id, None) is not None:
                return

    def _forget_mark(self, session: Session) -> None:
        mark, session.mark = session.mark, None
        if mark is None:
            return
        owners = self._marks[mark]
        owners.remove(session.session_id)
        if not owners:
            del self._marks[mark]
        if mark.is_text:
            self._text_lengths[mark.length] -= 1
            if self._text_lengths[mark.length] <= 0:
                del self._text_lengths[mark.length]


def _due(line: OrderedDict[SessionId, Session], until_s: float) -> Iterator[Session]:
    """Take those out of a line, oldest first, that were last used before ``until_s``."""
    while line:
        session = next(iter(line.values()))
        if session.last_s >= until_s:
            return
        del line[session.session_id]
        yield session
