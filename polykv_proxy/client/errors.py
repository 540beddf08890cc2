"""Everything that ``polykv_proxy.client`` raises, on one page, and how an answer becomes one of these.

PolyKVError                     anything; also what has no class of its own
├── InvalidRequestError         400 404 405 413 …  the request itself is wrong, the same one will never work
├── AuthenticationError         401 403            no key, or the wrong one
├── PoolNotFoundError           404                no such pool, or it was released
├── SessionNotFoundError        404
├── PoolConflictError           409 (data plane: 400)  prefix contract, name, pin budget, branch
├── PoolBusyError               409                children, or requests run on it
├── SeqBudgetExhaustedError     503                every sequence of the engine is taken
├── KvExhaustedError            503 507            not enough cells
├── PoolSaturatedError          429 (503: stale)   the admission gate said no: come back later
├── PolyKVContextOverflowError  400                longer than a slot's context
└── PolyKVUnavailableError      502 503 504        nobody can serve now, nobody answers, or an answer broke off
    └── PolyKVTimeoutError                         no answer in ``timeout``: whether it was done is not known

The class follows from ``code`` first, the status second. All of them survive pickling.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from polykv_proxy.client.results import Capacity

Raised = TypeVar("Raised", bound="PolyKVError")

OVERFLOW_TYPE = "exceed_context_size_error"
"""llama-server's own word for it; its ``code`` is the status."""
STALE = "measurement stale"


class PolyKVError(Exception):
    """``code``: stable, snake_case; of llama-server's own errors their ``type``. None: nobody said.

    ``status_code`` None: it was no HTTP answer. ``request_id``: find it with ``requests(request_id=…)`` or in the log.
    ``retry_after``: seconds that the server asked to wait. ``reason``: the gate's, as in ``Capacity.reason``.
    ``body``: the error object of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status_code: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        reason: str | None = None,
        body: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.code = code
        self.request_id = request_id
        self.retry_after = retry_after
        self.reason = reason
        self.body = dict(body or {})

    @property
    def param(self) -> str | None:
        """The field of the request that is wrong."""
        return _text(self.body.get("param"))

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.args, self.__dict__)


class InvalidRequestError(PolyKVError):
    pass


class AuthenticationError(PolyKVError):
    pass


class PoolNotFoundError(PolyKVError):
    pass


class SessionNotFoundError(PolyKVError):
    pass


class PoolConflictError(PolyKVError):
    @property
    def matched_len(self) -> int | None:
        """``prefix_mismatch``: so many tokens agree, the next one does not."""
        return _count(self.body.get("divergence_pos"))


class PoolBusyError(PolyKVError):
    pass


class SeqBudgetExhaustedError(PolyKVError):
    pass


class KvExhaustedError(PolyKVError):
    @property
    def cells_missing(self) -> int | None:
        return _count(self.body.get("cells_missing"))


class PoolSaturatedError(PolyKVError):
    """``pool_id``: the one that was asked for. ``capacity``: what the verdict rests on, if it is known."""

    def __init__(
        self, message: str, *, pool_id: int | str | None = None, capacity: Capacity | None = None, **known: Any
    ):
        super().__init__(message, **known)
        self.pool_id = pool_id
        self.capacity = capacity


class PolyKVContextOverflowError(PolyKVError):
    @property
    def n_prompt_tokens(self) -> int | None:
        """None: so many bytes that they were not tokenized."""
        return _count(self.body.get("n_prompt_tokens"))

    @property
    def n_ctx(self) -> int | None:
        return _count(self.body.get("n_ctx"))


class PolyKVUnavailableError(PolyKVError):
    pass


class PolyKVTimeoutError(PolyKVUnavailableError):
    pass


BY_CODE: Mapping[str, type[PolyKVError]] = {
    "pool_not_found": PoolNotFoundError,
    "session_not_found": SessionNotFoundError,
    "prefix_mismatch": PoolConflictError,
    "name_taken": PoolConflictError,
    "pin_budget": PoolConflictError,
    "branch_not_exact": PoolConflictError,
    "session_not_resident": PoolConflictError,
    "saving_refused": PoolConflictError,
    "pool_has_children": PoolBusyError,
    "pool_in_use": PoolBusyError,
    "seq_ids_exhausted": SeqBudgetExhaustedError,
    "kv_exhausted": KvExhaustedError,
    "pool_saturated": PoolSaturatedError,
    "queue_full": PoolSaturatedError,
    "queue_timeout": PoolSaturatedError,
    "context_length_exceeded": PolyKVContextOverflowError,
    OVERFLOW_TYPE: PolyKVContextOverflowError,
}

BY_STATUS: Mapping[int, type[PolyKVError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    409: PoolConflictError,
    429: PoolSaturatedError,
    502: PolyKVUnavailableError,
    503: PolyKVUnavailableError,
    504: PolyKVUnavailableError,
}


def error_of(
    status: int | None, headers: Mapping[str, str], content: bytes, *, pool_id: int | str | None = None
) -> PolyKVError:
    """Make the error of an answer that is none: the proxy's, llama-server's, or of something in between.

    ``status`` None: it came as an event of a stream whose head had said 200.
    """
    body = _error_object(content)
    reason = headers.get("x-polykv-reason") or _text(body.get("reason"))
    code = _text(body.get("code")) or _text(body.get("type"))
    message = _text(body.get("message")) or _no_reason(status, content)
    known: dict[str, Any] = {
        "status_code": status,
        "code": code,
        "request_id": headers.get("x-request-id"),
        "retry_after": retry_after_of(headers),
        "reason": reason,
        "body": body,
    }
    kind = BY_CODE.get(code or "") or (BY_STATUS.get(status) if status is not None else PolyKVUnavailableError)
    if body.get("type") == OVERFLOW_TYPE:
        kind = PolyKVContextOverflowError
    if kind is None:
        kind = InvalidRequestError if status is not None and status < 500 else PolyKVError
    if kind is PolyKVUnavailableError and reason == STALE:
        kind = PoolSaturatedError  # a gate that cannot see refuses, with a 503
    if issubclass(kind, PoolSaturatedError):
        return kind(message, pool_id=pool_id, **known)
    return kind(message, **known)


def retry_after_of(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait; the more exact header beats the whole seconds. Dates are not read: the proxy sends none."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * scale
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None


def _error_object(content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except ValueError:
        return {}
    found = parsed.get("error") if isinstance(parsed, dict) else None
    return found if isinstance(found, dict) else {}


def _no_reason(status: int | None, content: bytes) -> str:
    said = content[:200].decode("utf-8", "replace").strip()
    return f"HTTP {status} without a reason: {said!r}; is this the proxy?"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _revive(kind: type[Raised], args: tuple[Any, ...], state: dict[str, Any]) -> Raised:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
