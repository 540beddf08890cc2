"""One session, one of its turns, and what a reply said about itself. ``sessions`` keeps the books of them. Pure."""

from dataclasses import dataclass, field
from typing import Literal

from polykv_proxy.conversation import Mark
from polykv_proxy.ids import PoolId, SessionId, SlotId

State = Literal["idle", "waiting", "prefilling", "decoding", "closed"]


@dataclass(slots=True)
class Usage:
    """What one reply said about itself. None: it did not say."""

    cache_n: int | None = None
    prompt_n: int | None = None
    predicted_n: int | None = None
    pool_n: int | None = None
    tps: float | None = None
    at_limit: bool = False
    """It ended by a limit: of tokens, of the context, or of the cache."""

    @property
    def ctx_used(self) -> int | None:
        if self.cache_n is None or self.prompt_n is None or self.predicted_n is None:
            return None
        return self.cache_n + self.prompt_n + self.predicted_n


@dataclass(slots=True)
class Session:
    session_id: SessionId
    named: bool
    created_s: float
    last_s: float
    parent: SessionId | None = None
    pool_id: PoolId | None = None
    slot_id: SlotId | None = None
    closed: bool = False
    n_turns: int = 0
    n_decoded: int = 0
    n_first_turns: int = 0
    """Of these those with ``Turn.number`` 1, and below what they decoded: one conversation, one after the other."""
    n_first_decoded: int = 0
    first_decoding_s: float = 0.0
    """How long that took."""
    ctx_used: int | None = None
    ttft_ms: float | None = None
    tps: float | None = None
    mark: Mark | None = None
    continues: bool = False
    """Its last prompt held answers: it goes on with something, and may go on further."""
    has_peers: bool = False
    """Others began like it: one of several agents."""
    held_n_tokens: int | None = None
    """What its slot should hold since its last turn; None when that did not say, or something else happened to it."""
    held_s: float = float("-inf")
    n_sent: int = 0
    saved_at: int | None = None
    """How many turns had been sent when its state was saved; None: the engine keeps none, as far as is known."""
    turns: "dict[int, Turn]" = field(default_factory=dict)

    @property
    def saved(self) -> bool:
        return self.saved_at is not None

    @property
    def is_sent(self) -> bool:
        """The engine is at one of its turns."""
        return bool(self.turns) and any(turn.sent_s is not None for turn in self.turns.values())

    @property
    def may_return(self) -> bool:
        """Whether it is worth keeping what it said: most prompts of clients that name no session are all there is.

        Not those of agents, which begin like others or with a pool; and what an agent has beyond its pool is little.
        """
        return self.named or self.continues or self.n_turns > 1 or self.has_peers or self.pool_id is not None

    @property
    def running_in(self) -> PoolId | None:
        """The pool of what runs now, else the session's: a reply in one piece tells at its end that it was accepted."""
        running = [turn.pool_id for turn in self.turns.values() if turn.pool_id is not None]
        return running[-1] if running else self.pool_id

    def move(self, pool_id: PoolId) -> None:
        """Its next turn goes on with this pool; what is under way does not take that back."""
        self.pool_id = pool_id
        for turn in self.turns.values():
            turn.moved = True

    @property
    def state(self) -> State:
        if self.turns:
            states = {t.state for t in self.turns.values()}
            return "decoding" if "decoding" in states else "prefilling" if "prefilling" in states else "waiting"
        return "closed" if self.closed else "idle"


@dataclass(slots=True)
class Turn:
    """One running request of a session. ``number``: 1, unless others of its session run already.

    ``held``: the gate lets it wait. ``entered``: the gate let it in, or there was nothing to ask.
    """

    turn_id: int
    session: Session
    begun_s: float
    number: int = 1
    held: bool = False
    entered: bool = False
    state: State = "waiting"
    sent_s: float | None = None
    first_s: float | None = None
    decoding_since_s: float | None = None
    slot_id: SlotId | None = None
    pool_id: PoolId | None = None
    moved: bool = False
    """Its session was moved to another pool meanwhile."""
    id_task: int | None = None
    """The engine's task that its stats showed in the slot. The next three: what they told of it."""
    n_decoded: int = 0
    n_decoded_before: int = 0
    ctx_used: int | None = None

    def sent(self, now_s: float, slot_id: SlotId | None, pool_id: PoolId | None = None) -> None:
        """The engine has it from here on. ``pool_id``: what it attaches to; the session moves when it is accepted."""
        self.state, self.sent_s, self.slot_id, self.pool_id = "prefilling", now_s, slot_id, pool_id
        self.session.n_sent += 1
        if slot_id is not None:
            self.session.slot_id = slot_id

    def accepted(self, pool_id: PoolId) -> None:
        """The engine answers what was attached to this pool: the session is on it from here on."""
        if not self.moved:
            self.session.pool_id = pool_id

    def decodes(self, now_s: float) -> None:
        """Its prompt is done, as far as can be told from outside."""
        self.state = "decoding"
        if self.decoding_since_s is None:
            self.decoding_since_s = now_s

    def decoding_s(self, now_s: float) -> float:
        """So far, as far as can be told from outside."""
        return max(0.0, now_s - self.decoding_since_s) if self.decoding_since_s is not None else 0.0

    def first_token(self, now_s: float) -> None:
        self.first_s = now_s
        self.decodes(now_s)
        self.session.ttft_ms = (now_s - self.begun_s) * 1e3
