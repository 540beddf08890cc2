"""Receipts of the last requests: what each was planned, held and given, for ``GET /polykv/requests``.

A record refers to what a request fills in on its way anyway, and is put into words when somebody asks. No text of a
prompt is in here but for the line where one left another (``diverged``).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from polykv_proxy.control.divergence import Place
from polykv_proxy.control.visits import Visit
from polykv_proxy.ids import PoolId, SlotId
from polykv_proxy.slots import Displaced
from polykv_proxy.turns import Turn, Usage

MAX_RECORDS = 1000


class Told(Protocol):
    """What the reply says about its prefix."""

    pool_id: PoolId | None
    prefix_n_tokens: int
    miss_reason: str | None
    hold_ms: int


@dataclass(slots=True, eq=False)
class Divergence:
    """Where a prompt left what it was expected to begin with. ``position``: the first other token, None = not known.

    ``against``: the last prompt of its ``session``, that with its ``answer``, one of its ``family``, or a ``pool``, of
    ``expected_n_tokens``.
    """

    against: str
    expected_n_tokens: int | None
    place: Place | None = None
    position: int | None = None

    def told(self, *, with_text: bool) -> dict[str, Any]:
        place = self.place
        span = place.span if place is not None else None
        return {
            "against": self.against,
            "expected_n_tokens": self.expected_n_tokens,
            "position": self.position,
            "field": place.field if place is not None else None,
            "message": place.message if place is not None else None,
            "role": place.role if place is not None else None,
            "part": place.part if place is not None else None,
            "key": place.key if place is not None else None,
            "span": None
            if span is None
            else {
                "start": span.start,
                "end": span.end,
                "differs_at": span.at,
                "text": span.text if with_text else None,
            },
        }


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. ``turn``, ``told``: None when it was refused before it was anybody's."""

    request_id: str
    path: str
    dialect: str
    received_s: float
    stream: bool | None = None
    turn: Turn | None = None
    told: Told | None = None
    usage: Usage | None = None
    slot_id: SlotId | None = None
    status: int | None = None
    ended_s: float | None = None
    error: str | None = None
    """The code that the proxy answered with; ``incomplete``: the client left, or the reply broke off;
    ``truncated``: the engine ended it before its limit, since the cache was full."""
    message: str | None = None
    """What was said with the code, where it tells what there was too little of."""
    held: dict[str, int] = field(default_factory=dict)
    """Why it waited, and how long in ms."""
    held_s: float = 0.0
    """All of that together."""
    displaced: tuple[Displaced, ...] = ()
    divergence: Divergence | None = None
    normalised: tuple[str, ...] = ()
    visit: Visit | None = None
    """None: nobody is gated."""

    def hold(self, why: str, seconds: float) -> int:
        """Count a wait. Gives it in ms."""
        ms = round(seconds * 1e3)
        if ms:
            self.held[why] = self.held.get(why, 0) + ms
            self.held_s += seconds
        return ms

    @property
    def decision(self) -> str | None:
        """None: it is waiting, or its client left while it was."""
        sent = self.turn is not None and self.turn.sent_s is not None
        if not sent:
            return "refused" if self.error is not None else None
        return "attached" if self.told is not None and self.told.pool_id is not None else "unpooled"


class RequestLog:
    """The last ``MAX_RECORDS``. ``unix_offset_s``: Unix time minus the clock of all *_s."""

    def __init__(self, unix_offset_s: float):
        self._unix_offset_s = unix_offset_s
        self._records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RequestRecord]:
        """Newest first."""
        return reversed(self._records)

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)

    def told(self, n_last: int, *, with_text: bool, request_id: str | None = None) -> dict[str, Any]:
        """The newest first. ``with_text``: the lines where prompts diverged, too."""
        told: list[dict[str, Any]] = []
        for record in self:
            if len(told) == n_last:
                break
            if request_id is None or record.request_id == request_id:
                told.append(self._told(record, with_text=with_text))
        return {"requests": told}

    def _told(self, record: RequestRecord, *, with_text: bool) -> dict[str, Any]:
        turn, told, usage = record.turn, record.told, record.usage or Usage()
        session = turn.session if turn is not None else None
        return {
            "request_id": record.request_id,
            "path": record.path,
            "dialect": record.dialect,
            "stream": record.stream,
            "received_ts": self._ts(record.received_s),
            "sent_ts": self._ts(turn.sent_s if turn is not None else None),
            "first_token_ts": self._ts(turn.first_s if turn is not None else None),
            "ended_ts": self._ts(record.ended_s),
            "status": record.status,
            "error": record.error,
            "message": record.message,
            "decision": record.decision,
            "session_id": session.session_id if session is not None else None,
            "parent_session_id": session.parent if session is not None else None,
            "pool_id": told.pool_id if told is not None else None,
            "prefix_n_tokens": told.prefix_n_tokens if told is not None else 0,
            "cached_n_tokens": usage.cache_n,
            "prompt_n": usage.prompt_n,
            "predicted_n": usage.predicted_n,
            "slot_id": record.slot_id,
            "displaced": [one.session for one in record.displaced],
            "hold_ms": told.hold_ms if told is not None else 0,
            "held_ms": dict(record.held),
            "miss_reason": told.miss_reason if told is not None else None,
            "divergence": record.divergence.told(with_text=with_text) if record.divergence is not None else None,
            "normalised": list(record.normalised),
            "admission": record.visit.told() if record.visit is not None else None,
        }

    def _ts(self, when_s: float | None) -> float | None:
        return None if when_s is None else when_s + self._unix_offset_s
