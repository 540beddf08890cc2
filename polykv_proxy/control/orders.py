"""What control can be asked, as plain values: the routes and the relay build them, control carries them out."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from polykv_proxy.control.seen import Seen
from polykv_proxy.errors import InvariantError
from polykv_proxy.ids import PoolId, SeqId, SessionId
from polykv_proxy.tree.pool import Pool
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.turns import Turn

_KINDS = ("tokens", "own_tokens", "prompt", "messages", "from_session")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a pool's tokens come from: exactly one of the five.

    ``own_tokens`` are [D, L) of a fork; all others give the full prefix [0, L).
    """

    tokens: list[int] | None = None
    own_tokens: list[int] | None = None
    prompt: str | list[int | str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    from_session: SessionId | None = None

    def __post_init__(self) -> None:
        if sum(getattr(self, kind) is not None for kind in _KINDS) != 1:
            raise InvariantError("a source has exactly one of its five kinds")

    @property
    def kind(self) -> str:
        """The field that was given."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePool:
    source: Source
    name: str | None = None
    pin: bool = False
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPool:
    """``branch_pos`` None: where it diverges (``own_tokens``: at the parent's end). ``exact``: refuse another one."""

    source: Source
    branch_pos: int | None = None
    exact: bool = False
    name: str | None = None
    pin: bool = False
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """What takes a pool's place: ``source`` as a fork of ``ancestor``. ``sessions`` None: all that are on the old pool
    or below it. ``name`` None: that of the old pool, when it is released."""

    ancestor: int | str
    source: Source
    sessions: tuple[SessionId, ...] | None = None
    release_old: bool = True
    name: str | None = None


@dataclass(slots=True)
class Waits:
    """How long a request waited until it was decided, in seconds. Filled in on its way: also who is refused, or leaves,
    has waited.

    ``joined_s``  for another request's prefill
    ``made_s``    until its pool was resident
    ``cells_s``   for cells
    """

    joined_s: float = 0.0
    made_s: float = 0.0
    cells_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """One attachable request. ``explicit``: it carried a field of the contract; ``strict``: no such pool is a 404.

    ``shareable`` False: its own fields forbid sharing (``incompatible``), so only its cells matter.
    ``has_media``: only the engine can say how many tokens it has.
    ``takes_a_slot`` False: it stands in no line of ours for one.
    ``turn``, ``n_bytes``: what the book of sessions calls it, and the length of its body: with them it can wait for
    others that begin alike. ``prompts``: its tokens, when it was rendered for that.
    ``door(pool, n_shared, n_total)``: lets it into the pool that was found, or has it wait; gives whether it waited.
    ``n_total``: tokens of its prompts, None = not counted. None: nobody is gated.
    """

    path: str
    body: dict[str, Any]
    pool_ref: int | str | None = None
    explicit_p: int | None = None
    legacy_slot: int | None = None
    session: SessionId | None = None
    explicit: bool = False
    strict: bool = False
    shareable: bool = True
    has_media: bool = False
    takes_a_slot: bool = True
    turn: Turn | None = None
    n_bytes: int = 0
    prompts: tuple[Tokens, ...] | None = field(default=None, repr=False)
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)
    door: Callable[[Pool, int, int | None], Awaitable[bool]] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachPlan:
    """What to tell the engine. ``pool_id`` None: unpooled, and ``miss_reason`` says why.

    ``prefix_n_tokens``     the P expected. ``exact``: the prompt was rendered and compared, so P is also the limit to
                            send; else it is an upper estimate and the engine is left to compare (-1)
    ``seq_id, gen, epoch``  which sequence, and for which content and which start of the engine this was meant
    ``miss_reason``         also set on a partial hit (``diverged``)
    """

    pool_id: PoolId | None = None
    prefix_n_tokens: int = 0
    exact: bool = True
    miss_reason: str | None = None
    seq_id: SeqId | None = None
    gen: int | None = None
    epoch: str | None = None
    asked: PoolId | None = None
    """The pool this was about, also when nothing came of it."""
    seen: Seen | None = field(default=None, compare=False, repr=False)
    """What was remembered of the prompt, if it was not rendered."""
    tokens: Tokens | None = field(default=None, compare=False, repr=False)
    """The prompt, if it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended, as far as its reply told; None = it did not say."""

    status: int | None = None
    cache_n: int | None = None
    prompt_n: int | None = None
    predicted_n: int | None = None
    pool_n: int | None = None
    tps: float | None = None
