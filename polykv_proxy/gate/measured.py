"""What is known of the engine: the last reading, the rates, the fit, and what follows for one more of something."""

from collections.abc import Callable, Iterable

from polykv_proxy.gate.facts import EngineFacts, SessionFacts, TurnRequest
from polykv_proxy.gate.policy import Policy
from polykv_proxy.gate.rate import RateBook, Rates
from polykv_proxy.gate.roofline import Duty, Roofline, demand
from polykv_proxy.gate.settle import project_measured, project_model

STALE_AFTER_S = 3.0
"""A reading is not believed for longer; at 2 readings per second 5 were missed then."""
PREFILL_HORIZON_S = 10.0
"""A prompt's prefill counts as if it were spread over so long: about the length of the turn that it begins."""
USUAL_ALPHA = 0.05
QUANTILE_Z = 1.0
"""One standard deviation above the mean number of decoders: five times out of six there are fewer."""
HELD_Z = -0.5
"""Where turns are held the floor is kept by that, and a session is refused only when the machine has no quiet moments
left that it could fill: half a standard deviation below the mean. What this costs is told as holds."""


class Measured:
    def __init__(self, rates: RateBook, roofline: Roofline):
        self.rates_book, self.roofline = rates, roofline
        self.facts: EngineFacts | None = None
        self.rates = Rates()
        self._duty = Duty()
        self._usual_uncached: float | None = None

    @property
    def sessions(self) -> tuple[SessionFacts, ...]:
        return tuple(self.facts.sessions) if self.facts is not None else ()

    def find(self, session_id: str) -> SessionFacts | None:
        return next((s for s in self.sessions if s.session_id == session_id), None)

    def is_fresh(self, now_s: float) -> bool:
        facts = self.facts
        return facts is not None and now_s - facts.measured_s + facts.still_s <= STALE_AFTER_S

    def observe(self, facts: EngineFacts) -> None:
        self.rates_book.update(facts)
        self.roofline.update(facts)
        self.facts = facts
        self.rates = self.rates_book.read(facts)

    def saw_wanting(self, n_wanting: int, n_live: int, now_s: float) -> None:
        """So many of the live sessions have a turn running or held."""
        self._duty.update(n_wanting, n_live, now_s)

    def saw_turn(self, uncached_tokens: int) -> None:
        usual = self._usual_uncached if self._usual_uncached is not None else float(uncached_tokens)
        self._usual_uncached = usual + USUAL_ALPHA * (uncached_tokens - usual)

    def project_sessions(
        self, policy: Policy | None, n_live: int, uncached_tokens: int
    ) -> Callable[[int], float | None] | None:
        """The rate with k more than ``n_live`` sessions, by the fit; None: it is not ready."""
        if not self.roofline.ready:
            return None
        z = HELD_Z if policy is not None and policy.max_turn_hold_ms > 0 else QUANTILE_Z
        sessions = self.sessions
        ctx = sum(s.ctx_used for s in sessions) / len(sessions) if sessions else 0.0
        extra, usual, duty = self._extra(uncached_tokens), self.roofline.prefill_tokens_per_s, self._duty.value

        def tps(n_more: int) -> float | None:
            n = max(1.0, demand(n_live + n_more, duty, z))
            load = usual * (n_live + n_more) / n_live if n_live else usual
            return self.roofline.tps(n, ctx * n, load + extra)

        return tps

    def predict_turn(
        self, turn: TurnRequest, n: int, running: Iterable[TurnRequest], drop_tps: float | None, now_s: float
    ) -> float | None:
        """The rate with this turn as the n-th decoder; None: unknown, which is not the same as free.

        ``drop_tps``: what an admission into its scope costs, for as long as there is no fit.
        """
        policy = turn.ruling.policy
        if policy is None or not self.is_fresh(now_s):
            return None
        if policy.estimator == "roofline" and self.roofline.ready:
            ours = {t.session_id: t.ctx_tokens for t in running}
            others = (s.ctx_used for s in self.sessions if s.processing and s.session_id not in ours)
            n_kv = turn.ctx_tokens + sum(ours.values()) + sum(others)
            return self.roofline.tps(n, n_kv, self.roofline.prefill_tokens_per_s + self._extra(turn.uncached_tokens))
        mean, n_active = self.rates.mean_clear_tps, self.rates.n_active
        n_more = max(1, n - n_active)
        measured = project_measured(mean, drop_tps, n_more)
        return measured if measured is not None else project_model(mean, n_active, n_more)

    def _extra(self, uncached_tokens: int) -> float:
        """Tokens per second that a prompt adds to the usual prefill, of which an ordinary one is a part already."""
        return max(0.0, uncached_tokens - (self._usual_uncached or 0.0)) / PREFILL_HORIZON_S
