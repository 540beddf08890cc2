"""The admission policy of a pool: its fields, their checks, and whose policy a pool inherits.

A policy holds for new sessions of its pool and of all pools below that have none of their own: the nearest ancestor
wins, and the default policy of the proxy comes last. The pool whose policy it is is called the *scope*: admissions
anywhere below it share one settle window and one forecast.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from polykv_proxy.errors import RequestError
from polykv_proxy.ids import PoolId

Mode = Literal["advisory", "enforced"]
OnSaturation = Literal["reject", "warn", "queue"]
Estimator = Literal["settled", "roofline"]

ROOFLINE_TURN_HOLD_MS = 30_000
MAX_TPS = 1e6
MAX_MS = 3_600_000

CHOICES: dict[str, tuple[str, ...]] = {
    "mode": get_args(Mode),
    "on_saturation": get_args(OnSaturation),
    "estimator": get_args(Estimator),
}
INTEGERS: dict[str, tuple[int, int]] = {
    "guarantee_min_sessions": (0, 10_000),
    "settle_tokens": (0, 1_000_000),
    "settle_max_ms": (0, MAX_MS),
    "max_turn_hold_ms": (0, MAX_MS),
    "max_queue": (0, 100_000),
    "queue_timeout_ms": (0, MAX_MS),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """``target_tps_per_session``: the floor, in accepted tokens per second and session."""

    target_tps_per_session: float
    mode: Mode = "advisory"
    on_saturation: OnSaturation = "reject"
    guarantee_min_sessions: int = 1
    settle_tokens: int = 48
    settle_max_ms: int = 5000
    estimator: Estimator = "settled"
    max_turn_hold_ms: int = 0
    max_queue: int = 64
    queue_timeout_ms: int = 30_000

    @property
    def enforced(self) -> bool:
        return self.mode == "enforced"

    @property
    def settle_max_s(self) -> float:
        return self.settle_max_ms / 1e3

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_policy(body: object) -> Policy:
    """Read the body of ``POST /polykv/pools/{id}/admission``: what it leaves out has its default.

    ``max_turn_hold_ms`` left out is 0 with the settled estimator, which never delays a continuation, and 30,000 with
    roofline, which is made of turn holds.

    Raises:  RequestError (400), naming the field
    """
    if not isinstance(body, Mapping):
        raise RequestError("the policy must be a JSON object with target_tps_per_session")
    known = [f.name for f in fields(Policy)]
    for name in body:
        if name not in known:
            raise RequestError(f"{name!r} is no field of a policy; there are: {', '.join(known)}", param=str(name))
    given = {name: value for name, value in body.items() if value is not None}
    checked: dict[str, Any] = {"target_tps_per_session": _rate(given.get("target_tps_per_session"))}
    for name, choices in CHOICES.items():
        if name in given:
            if given[name] not in choices:
                raise RequestError(f"{name} must be one of {', '.join(choices)}", param=name)
            checked[name] = given[name]
    for name, (low, high) in INTEGERS.items():
        if name in given:
            checked[name] = _integer(name, given[name], low, high)
    if checked.get("estimator") == "roofline":
        checked.setdefault("max_turn_hold_ms", ROOFLINE_TURN_HOLD_MS)
    return Policy(**checked)


def _rate(value: object) -> float:
    name = "target_tps_per_session"
    if value is None:
        raise RequestError(f"{name} is missing: the floor, in tokens per second and session", param=name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number", param=name)
    if not (math.isfinite(value) and 0 < value <= MAX_TPS):
        raise RequestError(f"{name} must be more than 0 and at most {MAX_TPS:,.0f}", param=name)
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be from {low} to {high}", param=name)
    return value


@dataclass(frozen=True, slots=True)
class Ruling:
    """What holds for a pool. ``scope``: whose books it is kept in. ``inherited_from``: the pool that has the policy,
    ``"default"``, or None when it is the pool's own or there is none.
    """

    policy: Policy | None
    scope: PoolId
    inherited_from: PoolId | Literal["default"] | None = None


class PolicyBook:
    """Who has a policy. Paths go from the pool itself up to its root."""

    def __init__(self, default: Policy | None = None):
        self.default = default
        self._own: dict[PoolId, Policy] = {}

    def __len__(self) -> int:
        return len(self._own)

    @property
    def is_empty(self) -> bool:
        """Nobody is gated: a request need not even be looked at."""
        return not self._own and self.default is None

    def own(self, pool_id: PoolId) -> Policy | None:
        return self._own.get(pool_id)

    def set(self, pool_id: PoolId, policy: Policy) -> None:
        self._own[pool_id] = policy

    def delete(self, pool_id: PoolId) -> Policy | None:
        """Also for a pool that was released. Gives what it had."""
        return self._own.pop(pool_id, None)

    def resolve(self, path: Sequence[PoolId]) -> Ruling:
        """``path``: the pool, its parent, … its root."""
        for pool_id in path:
            policy = self._own.get(pool_id)
            if policy is not None:
                return Ruling(policy, pool_id, None if pool_id == path[0] else pool_id)
        if self.default is not None:
            return Ruling(self.default, path[-1], "default")
        return Ruling(None, path[-1])
