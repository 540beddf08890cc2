"""What a request is before it is sent. Pure.

``calls`` and ``generating`` make a ``Call``, a ``StreamCall``, or for what takes several requests ``Steps``: a
generator that yields calls, is sent their results (or has their errors thrown into it) and returns the result of the
whole. The clients turn each into a method that does it (``PolyKVClient``) or awaits it (``AsyncPolyKVClient``).
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Pool = int | str
"""A pool's id, or its name."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T_co]):
    """One request. ``read``: its parsed JSON → the result. ``control``: it takes the admin key, if there is one.

    ``also``: statuses that are an answer as well, not an error.
    """

    method: str
    path: str
    read: Callable[[Any], T_co]
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    control: bool = True
    pool_id: Pool | None = None
    also: tuple[int, ...] = ()

    @property
    def idempotent(self) -> bool:
        return self.method == "GET"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCall(Call[T_co]):
    """``read``: one event → one piece. ``ends``: whether this event is the last; None: it may end at any time."""

    ends: Callable[[Any], bool] | None = None


Steps = Generator[Call[Any], Any, T]


def step(call: Call[T]) -> Steps[T]:
    """One call within steps, with the type of its result: ``made = yield from step(create_pool(…))``."""
    result: T = yield call
    return result


def listed(value: Sequence[Any] | None) -> Any:
    return value if value is None or isinstance(value, str) else list(value)


def given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
