"""One request at the gate: what it asks for, and for its receipt how it fares.

A visit goes through the door once (its session is let in, waits, or is turned away; it comes to another one when the
pool is released meanwhile), and then through the hold of its turn, once, just before the engine gets it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from polykv_proxy.gate.outcome import Admitted, Refused
from polykv_proxy.gate.queue import Standing
from polykv_proxy.gate.settle import AdmitRecord, Forecasts
from polykv_proxy.gate.verdict import CONTINUATION, OVERCOMMIT, Capacity
from polykv_proxy.ids import PoolId
from polykv_proxy.turns import Turn

Fate = Literal["queued", "admitted", "guaranteed", "overcommitted", "warned", "continuation", "refused"]
Place = Callable[[], Standing]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Visit:
    """``n_bytes``: of its body. ``tenant``: who it is fair to. ``is_retry``: the client's own, of a refusal.

    ``on_hold``: called when it has to wait at the door, before anything is awaited. ``decision`` None: nothing was
    asked, since no policy holds for its pool. ``waits_for``, ``place``: while it does. ``verdict``: why it is not let
    in now, None = it is not known, or was. ``since_s``: when it
    first had to.
    """

    turn: Turn
    overcommit: bool = False
    n_bytes: int = 0
    tenant: str = ""
    is_retry: bool = False
    on_hold: Callable[[], None] = lambda: None
    decision: Fate | None = None
    reason: str | None = None
    scope: PoolId | None = None
    sessions_remaining: int | None = None
    forecasts: Forecasts = field(default_factory=Forecasts)
    waits_for: Literal["admission", "turn"] | None = None
    place: Place | None = None
    verdict: Callable[[], Capacity | None] | None = None
    since_s: float | None = None
    record: AdmitRecord | None = None

    def queued(self, now_s: float, capacity: Capacity, place: Place, verdict: Callable[[], Capacity | None]) -> None:
        self._rests_on(capacity)
        self.verdict = verdict
        self.since_s = now_s if self.since_s is None else self.since_s
        self.decision, self.waits_for, self.place = "queued", "admission", place

    def held(self, place: Place) -> None:
        self.waits_for, self.place = "turn", place

    def goes_on(self) -> None:
        """It does not wait any longer."""
        self.waits_for = self.place = self.verdict = None

    def sent_away(self) -> None:
        """The pool was released at whose door it waited: nothing was decided."""
        self.decision = self.reason = self.scope = None
        self.forecasts = Forecasts()

    def answered(self, decision: Admitted | Refused) -> None:
        if decision.capacity is not None:
            self._rests_on(decision.capacity)
        if isinstance(decision, Refused):
            self.decision = "refused"
        else:
            self.decision, self.sessions_remaining = _fate(decision), decision.sessions_remaining

    def _rests_on(self, capacity: Capacity) -> None:
        self.reason, self.forecasts = capacity.reason, capacity.forecasts

    def look_again(self) -> None:
        """The verdict that it was held by may be an old one: that another is measured, say, which it is by now."""
        capacity = self.verdict() if self.verdict is not None else None
        if capacity is not None:
            self._rests_on(capacity)

    def told(self) -> dict[str, Any] | None:
        """For ``GET /polykv/requests``."""
        if self.decision is None:
            return None
        self.look_again()
        standing = self.place() if self.place is not None else None
        eta_s = standing.eta_s if standing is not None else None
        left_s = standing.left_s if standing is not None else None
        return {
            "decision": self.decision,
            "reason": self.reason,
            "scope": self.scope,
            "waits_for": self.waits_for,
            "place": standing.place if standing is not None else None,
            "eta_ms": round(eta_s * 1e3) if eta_s is not None else None,
            "left_ms": round(left_s * 1e3) if left_s is not None else None,
            "ends_first": standing.ends_first if standing is not None else None,
            "sessions_remaining": self.sessions_remaining,
            "projected_mean_tps_model": _rounded(self.forecasts.model),
            "projected_mean_tps_measured": _rounded(self.forecasts.measured),
            "projected_mean_tps_roofline": _rounded(self.forecasts.roofline),
            "settled_mean_tps": _rounded(self.record.mean_tps) if self.record is not None else None,
        }


def _fate(decision: Admitted) -> Fate:
    capacity = decision.capacity
    if decision.warned:
        return "warned"
    if capacity is None:
        return "admitted"
    if capacity.guaranteed:
        return "guaranteed"
    return {CONTINUATION: "continuation", OVERCOMMIT: "overcommitted"}.get(capacity.reason, "admitted")  # type: ignore[return-value]


def _rounded(value: float | None) -> float | None:
    return round(value, 3) if value is not None else None
