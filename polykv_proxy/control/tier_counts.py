"""What the warm tier did since the proxy started: how often it helped, how often it could not, and how long it took."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from polykv_proxy.errors import PolyKVError, SavedBudget, SequenceGone


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """For views and metrics.

    ``n_loads``    states that came back, by place (``ram``, ``disk``): a prefill each that nobody waited for
    ``n_misses``   prefills of what had been saved once
    ``n_failures`` by the code of the error, or ``parent_gone`` (nothing to load behind), ``source_gone`` (nothing to
                   save), ``disk_failed``; none of them cost more than the prefill that was due without the tier
    ``n_forgotten`` what is nowhere any more
    ``load_ms``, ``save_ms``  in all, as the proxy waited for them
    """

    n_loads: Mapping[str, int]
    n_misses: int
    n_saves: int
    n_forgotten: int
    n_failures: Mapping[str, int]
    load_ms: float
    save_ms: float


@dataclass(slots=True)
class TierCounts:
    """Counts up. ``snapshot`` is what others see."""

    n_loads: Counter[str] = field(default_factory=Counter)
    n_failures: Counter[str] = field(default_factory=Counter)
    n_misses: int = 0
    n_saves: int = 0
    n_forgotten: int = 0
    load_ms: float = 0.0
    save_ms: float = 0.0

    def saved(self, took_s: float) -> None:
        self.n_saves += 1
        self.save_ms += took_s * 1e3

    def loaded(self, place: str, took_s: float) -> None:
        self.n_loads[place] += 1
        self.load_ms += took_s * 1e3

    def failed(self, error: PolyKVError, *, loading: bool) -> None:
        if isinstance(error, SequenceGone):
            self.n_failures["parent_gone" if loading else "source_gone"] += 1
        elif isinstance(error, SavedBudget) and error.need is None:
            self.n_failures["disk_failed"] += 1
        else:
            self.n_failures[error.code] += 1

    def snapshot(self) -> TierSnapshot:
        return TierSnapshot(
            n_loads=dict(self.n_loads),
            n_misses=self.n_misses,
            n_saves=self.n_saves,
            n_forgotten=self.n_forgotten,
            n_failures=dict(self.n_failures),
            load_ms=self.load_ms,
            save_ms=self.save_ms,
        )
