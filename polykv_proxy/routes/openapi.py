"""``GET /polykv/openapi.json``: the control plane as OpenAPI 3.1.

The routes are those that the application has; what is said about each comes from ``OPERATIONS``: the model that parses
its body, the model of its answer, and the error classes that it may raise (with their status and code). A route of
``/polykv`` without an entry, and an entry without a route, fail a test.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import polykv_proxy
from polykv_proxy import errors
from polykv_proxy.control.receipts import MAX_RECORDS
from polykv_proxy.errors import PolyKVError
from polykv_proxy.routes import shapes, shapes_admission, shapes_sessions
from polykv_proxy.routes.admission import MAX_SESSION_ID, MAX_TOKENS
from polykv_proxy.routes.answers import answering, json_answer
from polykv_proxy.routes.body import AdmissionBody, CreateBody, ForkBody, MatchBody
from polykv_proxy.routes.compact import CompactBody, Compacted
from polykv_proxy.routes.requests import DEFAULT_LAST
from polykv_proxy.routes.tps import INTERVAL_MAX_MS, INTERVAL_MIN_MS, INTERVAL_MS

PATH = "/polykv/openapi.json"
_REFS = "#/components/schemas/{model}"

Errors = tuple[type[PolyKVError], ...]
ANY: Errors = (errors.RequestError, errors.KeyWrong, errors.Forbidden, errors.HeadersTooLarge, errors.InvariantError)
"""May come from every route."""

BODY: Errors = (errors.InvalidJson, errors.BodyTooLarge)
POOL: Errors = (errors.PoolNotFound, errors.RouteNotFound)
SESSION: Errors = (errors.SessionNotFound, errors.RouteNotFound)
ENGINE: Errors = (
    errors.EngineUnpatched,
    errors.UpstreamError,
    errors.EngineRefused,
    errors.UpstreamUnavailable,
    errors.UpstreamLoading,
    errors.UpstreamRestarted,
    errors.UpstreamTimeout,
)
CHANGE: Errors = (*ENGINE, errors.EngineOwned, errors.JournalFailed)
COME_BACK: Errors = (
    *CHANGE,
    errors.SharingUnsupported,
    errors.ContextLengthExceeded,
    errors.PrefixMismatch,
    errors.SeqIdsExhausted,
    errors.KvExhausted,
)
MAKE: Errors = (
    *COME_BACK,
    errors.Draining,
    errors.NameTaken,
    errors.PinBudget,
    errors.SessionNotFound,
    errors.SessionNotResident,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """``also``: other statuses that carry an answer, not an error. ``query``: name → (schema, meaning)."""

    summary: str
    answer: type[BaseModel]
    status: int = 200
    also: tuple[int, ...] = ()
    body: type[BaseModel] | None = None
    query: Mapping[str, tuple[dict[str, Any], str]] | None = None
    raises: Errors = ()
    location: bool = False
    streams: str | None = None
    """What is in an event's data, of an answer that also comes as a stream of events."""


_FLAG = {"type": "string", "enum": ["true", "false", "1", "0", ""]}
_PARAMETERS = {
    "ref": ({"type": "string", "minLength": 1}, "A pool's id or its name."),
    "sid": ({"type": "string", "minLength": 1}, "A session's id, escaped: a slash is %2F."),
}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/polykv/pools"): Operation(summary="Show the tree of pools", answer=shapes.PoolTreeShown, raises=ENGINE),
    ("POST", "/polykv/pools"): Operation(
        summary="Create a root pool",
        body=CreateBody,
        answer=shapes.PoolMade,
        status=201,
        location=True,
        raises=(*BODY, *MAKE),
    ),
    ("GET", "/polykv/pools/{ref}"): Operation(
        summary="Show a pool and what is below it", answer=shapes.PoolSubtreeShown, raises=(*POOL, *ENGINE)
    ),
    ("DELETE", "/polykv/pools/{ref}"): Operation(
        summary="Release a pool",
        answer=shapes.Released,
        query={"recursive": (_FLAG, "Everything below it too, leaves first.")},
        raises=(*POOL, errors.PoolHasChildren, errors.PoolInUse, *CHANGE),
    ),
    ("POST", "/polykv/pools/{ref}/fork"): Operation(
        summary="Fork a pool: extend it, or branch off before its end",
        body=ForkBody,
        answer=shapes.PoolMade,
        status=201,
        location=True,
        raises=(*BODY, *POOL, errors.BranchNotExact, *MAKE),
    ),
    ("POST", "/polykv/pools/{ref}/compact"): Operation(
        summary="Put a shorter pool in the place of this one, and move its sessions, pins and policy to it",
        body=CompactBody,
        answer=Compacted,
        status=201,
        location=True,
        raises=(*BODY, *POOL, errors.PoolInUse, *MAKE),
    ),
    ("POST", "/polykv/pools/{ref}/pin"): Operation(
        summary="Keep a pool resident under pressure",
        answer=shapes.PoolPinned,
        raises=(*POOL, errors.PinBudget, *COME_BACK),
    ),
    ("POST", "/polykv/pools/{ref}/unpin"): Operation(
        summary="Let a pool go under pressure again", answer=shapes.PoolPinned, raises=(*POOL, *CHANGE)
    ),
    ("POST", "/polykv/pools/{ref}/evict"): Operation(
        summary="Drop a pool's KV and keep the pool",
        answer=shapes.PoolEvicted,
        query={
            "to": ({"type": "string", "enum": ["warm", "cold"]}, "Where its state goes; default: warm if possible.")
        },
        raises=(*POOL, errors.PoolInUse, errors.WarmUnavailable, errors.SharingUnsupported, *CHANGE),
    ),
    ("POST", "/polykv/pools/{ref}/flush"): Operation(
        summary="Evict what nobody needs of a pool and everything below it",
        answer=shapes.Flushed,
        raises=(*POOL, errors.SharingUnsupported, *CHANGE),
    ),
    ("GET", "/polykv/pools/{ref}/admission"): Operation(
        summary="Show the admission policy that holds for a pool, and whose it is",
        answer=shapes_admission.AdmissionShown,
        raises=(*POOL, *ENGINE),
    ),
    ("POST", "/polykv/pools/{ref}/admission"): Operation(
        summary="Give a pool an admission policy of its own, in place of any that it had",
        body=AdmissionBody,
        answer=shapes_admission.AdmissionChanged,
        raises=(*BODY, *POOL, *CHANGE),
    ),
    ("DELETE", "/polykv/pools/{ref}/admission"): Operation(
        summary="Take a pool's own admission policy away",
        answer=shapes_admission.AdmissionChanged,
        raises=(*POOL, *CHANGE),
    ),
    ("GET", "/polykv/pools/{ref}/capacity"): Operation(
        summary="Say whether a pool has room for one more session, and how many more",
        answer=shapes_admission.CapacityShown,
        query={
            "expected_tokens": (
                {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS},
                "What the session would add to the cache: a prompt beyond the pool, and its answer.",
            ),
            "session_id": (
                {"type": "string", "minLength": 1, "maxLength": MAX_SESSION_ID},
                "Who asks: one that was served before goes on.",
            ),
        },
        raises=(*POOL, *ENGINE),
    ),
    ("POST", "/polykv/match"): Operation(
        summary="Say what a request would get, changing nothing",
        body=MatchBody,
        answer=shapes.Matched,
        raises=(*BODY, errors.PoolNotFound, errors.ContextLengthExceeded, *ENGINE),
    ),
    ("GET", "/polykv/sessions"): Operation(summary="Show the sessions", answer=shapes_sessions.SessionsShown),
    ("GET", "/polykv/sessions/{sid}"): Operation(
        summary="Show a session", answer=shapes_sessions.SessionShown, raises=SESSION
    ),
    ("DELETE", "/polykv/sessions/{sid}"): Operation(
        summary="Forget a session and give up its slot", answer=shapes_sessions.SessionDropped, raises=SESSION
    ),
    ("GET", "/polykv/requests"): Operation(
        summary="Show receipts of the last requests, the newest first",
        answer=shapes_sessions.RequestsShown,
        query={
            "last": (
                {"type": "integer", "minimum": 1, "maximum": MAX_RECORDS, "default": DEFAULT_LAST},
                "So many at most.",
            ),
            "request_id": ({"type": "string"}, "Only those with this id."),
        },
    ),
    ("GET", "/polykv/tps"): Operation(
        summary="Say how many tokens per second are decoded now, once or as a stream of events",
        answer=shapes_sessions.Rates,
        query={
            "stream": (_FLAG, "A stream of events; without it `Accept: text/event-stream` asks for one."),
            "interval_ms": (
                {"type": "integer", "minimum": INTERVAL_MIN_MS, "maximum": INTERVAL_MAX_MS, "default": INTERVAL_MS},
                "Time between two events.",
            ),
        },
        raises=(errors.Draining,),
        streams="One line `data: …` per tick, each with the same object as the answer in JSON.",
    ),
    ("GET", "/polykv/health"): Operation(summary="Say whether new work is served", answer=shapes.Health, also=(503,)),
    ("GET", "/polykv/doctor"): Operation(
        summary="Say what is wrong, dangerous or useless in the set-up", answer=shapes.Examined
    ),
    ("GET", PATH): Operation(summary="Give this page", answer=shapes.OpenApiDocument),
}


def openapi_routes() -> list[web.RouteDef]:
    made: dict[str, Any] = {}

    async def show(request: web.Request) -> web.Response:
        if not made:
            made.update(describe(request.app.router))
        return json_answer(made)

    return [web.get(PATH, answering(show))]


def control_routes(router: web.UrlDispatcher) -> list[tuple[str, str]]:
    """Verb and path of everything under ``/polykv``, in the order it was added."""
    return [
        (route.method, route.resource.canonical)
        for route in router.routes()
        if route.resource is not None
        and (route.resource.canonical == "/polykv" or route.resource.canonical.startswith("/polykv/"))
        and route.method != "HEAD"
    ]


def describe(router: web.UrlDispatcher) -> dict[str, Any]:
    """Write the document for the routes of an application."""
    models = _Models()
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for verb, path in control_routes(router):
        if (operation := OPERATIONS.get((verb, path))) is not None:
            paths[path][verb.lower()] = _operation(verb, path, operation, models)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "PolyKV control plane",
            "version": polykv_proxy.__version__,
            "description": "Shared-prefix KV pools for llama-server. Token ids are integers; `_ts` is Unix seconds, "
            "other times carry their unit in the name; null means unknown.",
        },
        "paths": dict(paths),
        # Without any key the control plane answers this machine; with one, it is needed in either form.
        "security": [{}, {"bearer": []}, {"apiKey": []}],
        "components": {
            "schemas": models.schemas(),
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "POLYKV_ADMIN_KEY; without one, a key of POLYKV_API_KEY.",
                },
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "The same keys."},
            },
        },
    }


class _Models:
    """Collects the models that are referred to. Bodies are described as they are read, answers as they are written."""

    def __init__(self) -> None:
        self._used: dict[tuple[type[BaseModel], Any], None] = {}

    def ref(self, model: type[BaseModel], mode: str) -> dict[str, str]:
        self._used[model, mode] = None
        return {"$ref": _REFS.format(model=model.__name__)}

    def schemas(self) -> dict[str, Any]:
        _, made = models_json_schema(list(self._used), ref_template=_REFS)
        found: dict[str, Any] = made["$defs"]
        return found


def _operation(verb: str, path: str, operation: Operation, models: _Models) -> dict[str, Any]:
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": _PARAMETERS[name][0],
            "description": _PARAMETERS[name][1],
        }
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": meaning}
        for name, (schema, meaning) in (operation.query or {}).items()
    ]
    answer = {"application/json": {"schema": models.ref(operation.answer, "serialization")}}
    answers = {
        str(status): {"description": operation.answer.__doc__ or "", "content": answer}
        for status in (operation.status, *operation.also)
    }
    if operation.streams is not None:
        shape = {"contentMediaType": "application/json", "contentSchema": models.ref(operation.answer, "serialization")}
        data = {"type": "string", "description": operation.streams, **shape}
        events = {"schema": {"type": "object", "required": ["data"], "properties": {"data": data}}}
        answers[str(operation.status)]["content"] = answer | {"text/event-stream": events}
    if operation.location:
        answers[str(operation.status)]["headers"] = {
            "Location": {"required": True, "schema": {"type": "string"}, "description": "The pool's own path."}
        }
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _operation_id(verb, path),
        "tags": [path.split("/")[2].removesuffix(".json")],
        "parameters": parameters,
        "responses": answers | _errors((*ANY, *operation.raises), models),
    }
    if operation.body is not None:
        body = {"application/json": {"schema": models.ref(operation.body, "validation")}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _errors(raised: Iterable[type[PolyKVError]], models: _Models) -> dict[str, Any]:
    """By status: the error's shape, and which codes it may have."""
    of_status: dict[int, set[str]] = defaultdict(set)
    waits: set[int] = set()
    for error in raised:
        of_status[error.status].add(error.code)
        if error.retry_after_s is not None:
            waits.add(error.status)
    answers: dict[str, Any] = {}
    for status, codes in sorted(of_status.items()):
        narrowed = {"properties": {"error": {"properties": {"code": {"enum": sorted(codes)}}}}}
        schema = {"allOf": [models.ref(shapes.Error, "serialization"), narrowed]}
        answers[str(status)] = {
            "description": ", ".join(sorted(codes)),
            "content": {"application/json": {"schema": schema}},
        }
        if headers := _error_headers(status, status in waits):
            answers[str(status)]["headers"] = headers
    return answers


def _error_headers(status: int, waits: bool) -> dict[str, Any]:
    headers: dict[str, Any] = {}
    if waits:
        seconds = {"type": "integer", "minimum": 1, "maximum": 60}
        headers["Retry-After"] = {"schema": seconds, "description": "Try again in so many seconds."}
    if status == 409:
        headers["x-should-retry"] = {"required": True, "schema": {"type": "string", "const": "false"}}
    if status == 401:
        headers["WWW-Authenticate"] = {"required": True, "schema": {"type": "string"}}
    return headers


def _operation_id(verb: str, path: str) -> str:
    """``POST /polykv/pools/{ref}/fork`` → ``post_pools_ref_fork``"""
    return "_".join([verb.lower(), *re.findall(r"\w+", path.removeprefix("/polykv").removesuffix(".json"))])
