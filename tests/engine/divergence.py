"""How far two next-token distributions are apart, from the log-probabilities llama-server reports.

The server lists the N most likely tokens. Tokens that both lists name are compared one by one, all others together as
one remainder: a Kullback-Leibler divergence of the same distributions on a coarser alphabet, a lower bound that is
tight when the lists hold nearly all the probability.
"""

import math
from collections.abc import Sequence
from statistics import fmean

Distribution = dict[int, float]
"""Token id → natural logarithm of its probability."""

FLOOR_NATS = 1e-6
"""Divergences below this are rounding: probabilities arrive as f32 (relative error 6e-8), and two exact copies of one
distribution may differ by that much per token. A ratio of two such numbers says nothing, so bounds never go below."""

_TINIEST = 1e-12


def divergence(p: Distribution, q: Distribution) -> float:
    """KL(p ‖ q) in nats."""
    shared = p.keys() & q.keys()
    total = sum(math.exp(p[token]) * (p[token] - q[token]) for token in shared)
    rest_p = max(_TINIEST, 1 - sum(math.exp(p[token]) for token in shared))
    rest_q = max(_TINIEST, 1 - sum(math.exp(q[token]) for token in shared))
    return max(0.0, total + rest_p * math.log(rest_p / rest_q))


def mean_divergence(p: Sequence[Distribution], q: Sequence[Distribution]) -> float:
    """The mean over positions; both sides must have the same positions."""
    assert len(p) == len(q)
    return fmean(divergence(at_p, at_q) for at_p, at_q in zip(p, q, strict=True))


def bound(stock_divergence: float, ratio: float = 1.25) -> float:
    """What the pooled path may show when stock's own cached path shows ``stock_divergence``."""
    return max(ratio * stock_divergence, FLOOR_NATS)
