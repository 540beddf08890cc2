"""How the control plane answers: JSON, and errors in the one shape of the contract."""

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from polykv_proxy.errors import BodyTooLarge, InvariantError, PolyKVError

log = logging.getLogger("polykv.routes")

SRC = "polykv_proxy"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    501: "not_supported_error",
    503: "unavailable_error",
    507: "capacity_error",
}

REQUEST_ID = web.RequestKey("polykv_request_id", str)
"""What a reply that is not sent in one piece says about its request."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_answer(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", headers=headers)


def json_bytes_answer(body: bytes) -> web.Response:
    """An answer that is JSON already."""
    return web.Response(body=body, content_type="application/json")


def error_body(error: PolyKVError) -> dict[str, Any]:
    said: dict[str, Any] = {
        "message": error.message,
        "type": _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error"),
        "code": error.code,
    }
    if error.param is not None:
        said["param"] = error.param
    said |= {key: value for key, value in error.extra.items() if value is not None}
    return {"error": said, "src": SRC}


def error_answer(error: PolyKVError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, min(60, math.ceil(error.retry_after_s))))
    if error.status == 409:
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_answer(error_body(error), status=error.status, headers=headers)


def answering(handler: Handler) -> Handler:
    """Turn what a handler raises into an answer. What nobody foresaw is our bug, logged, and a 500 that says so."""

    async def answered(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except PolyKVError as e:
            if isinstance(e, InvariantError):
                log.exception("bug in %s %s", request.method, request.path)
            return error_answer(e)
        except web.HTTPRequestEntityTooLarge:
            return error_answer(BodyTooLarge("the body is larger than POLYKV_MAX_BODY_BYTES"))
        except web.HTTPException:
            raise
        except Exception:
            log.exception("bug in %s %s", request.method, request.path)
            return error_answer(InvariantError("an internal error; the proxy's log has it"))

    return answered
