"""What the gate answers: to who asks (``Decision``, ``TurnDecision``), and to those who waited (``Wake``)."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from polykv_proxy.gate.settle import AdmitRecord
from polykv_proxy.gate.verdict import Capacity

MAX_RETRY_AFTER_S = 60
JITTER = 0.25

RefusalCode = Literal["pool_saturated", "queue_full", "queue_timeout", "upstream_unavailable"]


@dataclass(frozen=True, slots=True)
class Admitted:
    """Come in. ``capacity`` None: no policy, nothing was asked. ``warned``: only because the policy warns instead of
    refusing. ``sessions_remaining``: after this one, None when unknown. ``hold_ms``: how long it waited for this.
    """

    capacity: Capacity | None = None
    warned: bool = False
    sessions_remaining: int | None = None
    hold_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """Wait for the wake of this ticket; it comes at ``until_s`` at the latest. ``place`` 1 is the next one."""

    ticket_id: int
    capacity: Capacity
    until_s: float
    place: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Refused:
    """``retry_after_s``: when it is worth another try, before jitter (``retry_after``)."""

    capacity: Capacity
    status: Literal[429, 503]
    code: RefusalCode
    retry_after_s: float
    hold_ms: float = 0.0

    @property
    def reason(self) -> str:
        return self.capacity.reason


Decision = Admitted | Held | Refused


@dataclass(frozen=True, slots=True)
class Go:
    """Forward the turn. ``expired``: not because there is room, but because it was held for the longest allowed."""

    hold_ms: float = 0.0
    expired: bool = False


@dataclass(frozen=True, slots=True)
class TurnHeld:
    """Wait for the wake of this turn; it comes at ``until_s`` at the latest, and always is a ``Go``."""

    until_s: float
    place: int
    predicted_tps: float | None


TurnDecision = Go | TurnHeld


@dataclass(frozen=True, slots=True)
class SessionWake:
    """The one answer to a held session."""

    ticket_id: int
    decision: Admitted | Refused


@dataclass(frozen=True, slots=True)
class TurnWake:
    """The one answer to a held turn. It is running from here on: ``end_turn`` is owed."""

    turn_id: int
    go: Go


Wake = SessionWake | TurnWake


@dataclass(frozen=True, slots=True)
class Tick:
    """``records``: admissions that have settled, with what had been forecast."""

    wakes: tuple[Wake, ...] = ()
    records: tuple[AdmitRecord, ...] = ()


@dataclass(slots=True)
class Counts:
    """Since the start. ``refused`` by reason, without the clients' own retries, which are ``n_retries_refused``."""

    n_admitted: int = 0
    n_warned: int = 0
    n_overcommitted: int = 0
    n_guaranteed: int = 0
    n_held: int = 0
    n_turns_held: int = 0
    n_turns_expired: int = 0
    turn_hold_ms: float = 0.0
    n_retries_refused: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def retry_after(seconds: float, u: float) -> tuple[int, int]:
    """Give ``Retry-After`` in whole seconds and ``retry-after-ms``, spread by 25 % so that not all come back at once.

    ``u``: a random number from 0 to 1. Never less than 1 s nor more than 60 s.
    """
    spread = min(float(MAX_RETRY_AFTER_S), max(1.0, seconds * (1.0 + JITTER * (2.0 * u - 1.0))))
    n_ms = round(spread * 1e3)
    return min(MAX_RETRY_AFTER_S, -(-n_ms // 1000)), n_ms
