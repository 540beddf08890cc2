"""The settle window of a scope, and what each admission turned out to cost.

A rate measured right after an admission does not have that admission in it yet. So the scope is *settling* until the
new session decoded ``settle_tokens``, or ``settle_max_ms`` passed. What the mean rate fell by meanwhile is folded into
an average of the drop per admission (alpha 0.3): the forecast of the next one.

Admissions that come while it settles (guaranteed, overcommitted) join the window: it starts over, and the fall is
shared among all of them.
"""

from dataclasses import dataclass, field

from polykv_proxy.gate.facts import SessionFacts
from polykv_proxy.gate.policy import Policy
from polykv_proxy.ids import SessionId

DROP_ALPHA = 0.3
IDLE_FRESH_S = 30.0
"""So long the last settled mean says something about sessions that are all between turns."""


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The mean rate with one more session, by each way of telling; None: it cannot tell."""

    model: float | None = None
    measured: float | None = None
    roofline: float | None = None


@dataclass(frozen=True, slots=True)
class AdmitRecord:
    """How an admission went. ``mean_tps``: the mean once it had settled; None: nobody decoded then."""

    session_id: SessionId
    admitted_s: float
    settled_s: float
    n_admits: int
    forecasts: Forecasts
    mean_at_admit_tps: float | None
    mean_tps: float | None


@dataclass(slots=True)
class Window:
    session_id: SessionId
    admitted_s: float
    n_decoded_at_admit: int
    mean_at_admit: float | None
    forecasts: Forecasts
    admits: list[SessionId] = field(default_factory=list)


@dataclass(slots=True)
class Settling:
    """The books of one scope."""

    window: Window | None = None
    drop_tps: float | None = None
    settled_mean: float | None = None
    settled_s: float = float("-inf")
    n_samples: int = 0

    def admitted(
        self, session_id: SessionId, now_s: float, *, n_decoded: int, mean: float | None, forecasts: Forecasts
    ) -> None:
        """``mean``: the mean rate before it. ``n_decoded``: by that session so far."""
        if self.window is None:
            self.window = Window(session_id, now_s, n_decoded, mean, forecasts)
        else:
            window = self.window
            window.session_id, window.admitted_s, window.n_decoded_at_admit = session_id, now_s, n_decoded
            window.forecasts = forecasts
        self.window.admits.append(session_id)

    def left(self, session_id: SessionId) -> None:
        """It went away before it settled: an admission that did not take place. It leaves no trace."""
        window = self.window
        if window is not None and session_id in window.admits:
            window.admits.remove(session_id)
            if not window.admits:
                self.window = None

    def update(
        self, policy: Policy, session: SessionFacts | None, mean: float | None, measured_s: float, now_s: float
    ) -> AdmitRecord | None:
        """Close the window if it is time. ``session``: the admitted one as measured; ``mean``: the clear mean."""
        record = None
        window = self.window
        if window is not None and self._is_over(window, policy, session, now_s):
            # A mean from before the admission has nothing to say about it.
            mean_now = mean if measured_s > window.admitted_s else None
            if window.mean_at_admit is not None and mean_now is not None:
                self._fold(max(0.0, window.mean_at_admit - mean_now) / len(window.admits))
            record = AdmitRecord(
                window.session_id,
                window.admitted_s,
                now_s,
                len(window.admits),
                window.forecasts,
                window.mean_at_admit,
                mean_now,
            )
            self.window = None
        if self.window is None and mean is not None:
            self.settled_mean, self.settled_s = mean, measured_s
        return record

    def _is_over(self, window: Window, policy: Policy, session: SessionFacts | None, now_s: float) -> bool:
        if now_s >= window.admitted_s + policy.settle_max_s:
            return True
        n_decoded = session.n_decoded if session is not None else 0
        return n_decoded - window.n_decoded_at_admit >= policy.settle_tokens and session is not None

    def _fold(self, drop: float) -> None:
        self.drop_tps = drop if self.drop_tps is None else self.drop_tps + DROP_ALPHA * (drop - self.drop_tps)
        self.n_samples += 1

    def remaining_ms(self, policy: Policy, now_s: float) -> float | None:
        """Until it is settled at the latest; None: it is."""
        if self.window is None or now_s >= self.window.admitted_s + policy.settle_max_s:
            return None
        return (self.window.admitted_s + policy.settle_max_s - now_s) * 1e3

    def n_unsettled(self) -> int:
        return len(self.window.admits) if self.window is not None else 0


def project_model(mean: float | None, n: int, n_more: int = 1) -> float | None:
    """As if the machine were saturated: what there is, shared among more."""
    return mean * n / (n + n_more) if mean is not None and n > 0 else None


def project_measured(mean: float | None, drop: float | None, n_more: int = 1) -> float | None:
    """As each admission did before."""
    return max(0.0, mean - drop * n_more) if mean is not None and drop is not None else None
