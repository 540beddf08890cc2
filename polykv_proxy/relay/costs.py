"""What the proxy itself takes of a request's time, and what made requests wait, for ``GET /metrics``. In memory.

before  from the body's last byte until the request goes out, without what it waited for; asking the engine to render
        it is in there
after   from the engine's last byte until the client has been given all of it and the books are closed
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from polykv_proxy.turns import Usage

BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)


class Histogram:
    """Of seconds, by ``BUCKETS_S`` (upper limits) and whatever is above the last."""

    def __init__(self) -> None:
        self.n = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.n[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class Costs:
    """One per proxy. ``n_holds``, ``held_s``: by reason. Tokens are those of all prompts whose replies told them."""

    before: Histogram = field(default_factory=Histogram)
    after: Histogram = field(default_factory=Histogram)
    n_holds: Counter[str] = field(default_factory=Counter)
    held_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    n_truncated: int = 0
    """Answers that a full cache cut short, as far as they told it."""

    def sent(self, seconds: float) -> None:
        self.before.add(max(0.0, seconds))

    def ended(self, held_ms: Mapping[str, int], usage: Usage) -> None:
        for why, ms in held_ms.items():
            self.n_holds[why] += 1
            self.held_s[why] += ms / 1e3
        if usage.cache_n is not None and usage.prompt_n is not None:
            self.n_prompt_tokens += usage.cache_n + usage.prompt_n
            self.n_cached_tokens += usage.cache_n
