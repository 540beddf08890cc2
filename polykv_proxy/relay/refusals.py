"""Errors as each dialect's clients expect them: as a body, and as the last event of a stream that had begun.

Pure. Chat, completions and Responses get OpenAI's shape with our ``code``; Messages gets Anthropic's.
"""

import math
from typing import Any

import orjson

from polykv_proxy.errors import AdmissionRefused, PolyKVError
from polykv_proxy.relay.dialects import Dialect

SRC = "polykv_proxy"

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def refusal(error: PolyKVError, dialect: Dialect | None) -> dict[str, Any]:
    """The body of an error reply."""
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    said: dict[str, Any] = {"message": error.message, "type": _OPENAI_TYPES.get(error.status, fallback)}
    said["code"] = error.code
    if error.param is not None:
        said["param"] = error.param
    said |= {key: value for key, value in error.extra.items() if value is not None}
    if dialect is Dialect.MESSAGES:
        fallback = "invalid_request_error" if error.status < 500 else "api_error"
        said["type"] = _ANTHROPIC_TYPES.get(error.status, fallback)
        return {"type": "error", "error": said, "src": SRC}
    return {"error": said, "src": SRC}


def refusal_headers(error: PolyKVError) -> dict[str, str]:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, min(60, math.ceil(error.retry_after_s))))
    if isinstance(error, AdmissionRefused):
        headers |= {"retry-after-ms": str(error.retry_after_ms), "x-polykv-reason": error.reason}
    return headers


def refusal_event(error: PolyKVError, dialect: Dialect | None) -> bytes:
    """The ``error`` event that ends a stream which cannot go on. No ``[DONE]`` follows it."""
    body = refusal(error, dialect)
    if dialect is Dialect.RESPONSES:
        body = {"type": "error", "code": error.code, "message": error.message, "param": error.param, **body}
    return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
