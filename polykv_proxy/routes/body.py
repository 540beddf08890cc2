"""Bodies of the control plane: strict, and a wrong one is told what is wrong with it and where.

``null`` is the same as absent. Unknown fields are refused by name: a misspelled ``branch_pos`` must not be ignored.
"""

from typing import Annotated, Any, TypeVar

import orjson
from aiohttp import web
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
)

from polykv_proxy.control import Source
from polykv_proxy.errors import ContextLengthExceeded, InvalidJson, RequestError
from polykv_proxy.gate.policy import CHOICES, INTEGERS, MAX_TPS, Policy, parse_policy
from polykv_proxy.ids import SessionId
from polykv_proxy.json_faults import invalid_json, is_only_too_deep
from polykv_proxy.json_levels import MAX_LEVELS, is_too_deep
from polykv_proxy.tree.pool import NAME_MAX
from polykv_proxy.tree.prefix import TOKEN_MAX

_LISTS = ("tokens", "own_tokens", "prompt")
_SOURCES = ("tokens", "own_tokens", "prompt", "messages", "from_session")
_WITH_MESSAGES = ("tools", "chat_template_kwargs")
MAX_TTL_S = 10 * 365 * 86400.0

# What is only checked further in (by ``make_tokens``, by ``check_name``, by the engine) is told here all the same.
_TOKEN = {"type": "integer", "minimum": 0, "maximum": TOKEN_MAX}
Tokens = Annotated[list[StrictInt], WithJsonSchema({"type": "array", "minItems": 1, "items": _TOKEN})]
Prompt = Annotated[
    StrictStr | list[StrictInt | StrictStr],
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"anyOf": [_TOKEN, {"type": "string"}]}},
            ]
        }
    ),
]
PoolName = Annotated[
    StrictStr,
    WithJsonSchema(
        {"type": "string", "maxLength": NAME_MAX, "pattern": "^(?!auto$)(?![0-9]+$)[A-Za-z0-9_][A-Za-z0-9_.:@+-]*$"}
    ),
]


Message = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}}),
]


def _exactly_one_source(schema: dict[str, Any]) -> None:
    """A source is given when it is there and not null. Only messages go with tools and the like."""
    given, absent = {"not": {"type": "null"}}, {"type": "null"}
    alone = dict.fromkeys(_WITH_MESSAGES, absent)
    schema["oneOf"] = [
        {"required": [name], "properties": {name: given} | ({} if name == "messages" else alone)}
        for name in _SOURCES
        if name in schema["properties"]
    ]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SourceFields(_Body):
    """Where tokens come from."""

    model_config = ConfigDict(json_schema_extra=_exactly_one_source)

    tokens: Tokens | None = None
    prompt: Prompt | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def source(self) -> Source:
        """The source as control wants it. Raises RequestError unless exactly one is there."""
        allowed = [name for name in _SOURCES if name in type(self).model_fields]
        given = [name for name in allowed if getattr(self, name) is not None]
        if len(given) != 1:
            listed = ", ".join(allowed)
            if not given:
                raise RequestError(f"one of {listed} is needed")
            raise RequestError(f"only one of {listed} can be given, not {' and '.join(given)}", param=given[1])
        if self.messages is None:
            for name in _WITH_MESSAGES:
                if getattr(self, name) is not None:
                    raise RequestError(f"{name} only go with messages", param=name)
        from_session: str | None = getattr(self, "from_session", None)
        return Source(
            tokens=self.tokens,
            own_tokens=getattr(self, "own_tokens", None),
            prompt=self.prompt,
            messages=self.messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            from_session=SessionId(from_session) if from_session is not None else None,
        )


class _Pool(SourceFields):
    from_session: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = None
    name: PoolName | None = None
    pin: StrictBool | None = None
    ttl_s: Annotated[float, Field(ge=0, le=MAX_TTL_S, strict=True)] | None = None


class CreateBody(_Pool):
    """``POST /polykv/pools``."""


class ForkBody(_Pool):
    """``POST /polykv/pools/{id}/fork``."""

    own_tokens: Tokens | None = None
    branch_pos: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    exact: StrictBool | None = None


class MatchBody(SourceFields):
    """``POST /polykv/match``. ``pool_id``: compare with this pool instead of looking for the deepest."""

    pool_id: StrictInt | Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = None


def _choice(name: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "string", "enum": list(CHOICES[name])}, {"type": "null"}]})


def _integer(name: str) -> WithJsonSchema:
    low, high = INTEGERS[name]
    return WithJsonSchema({"anyOf": [{"type": "integer", "minimum": low, "maximum": high}, {"type": "null"}]})


class AdmissionBody(_Body):
    """``POST /polykv/pools/{id}/admission``. The gate checks the values, so that they are what it takes."""

    model_config = ConfigDict(json_schema_extra={"required": ["target_tps_per_session"]})

    target_tps_per_session: Annotated[
        Any, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TPS})
    ] = None
    mode: Annotated[Any, _choice("mode")] = None
    on_saturation: Annotated[Any, _choice("on_saturation")] = None
    guarantee_min_sessions: Annotated[Any, _integer("guarantee_min_sessions")] = None
    settle_tokens: Annotated[Any, _integer("settle_tokens")] = None
    settle_max_ms: Annotated[Any, _integer("settle_max_ms")] = None
    estimator: Annotated[Any, _choice("estimator")] = None
    max_turn_hold_ms: Annotated[Any, _integer("max_turn_hold_ms")] = None
    max_queue: Annotated[Any, _integer("max_queue")] = None
    queue_timeout_ms: Annotated[Any, _integer("queue_timeout_ms")] = None

    def policy(self) -> Policy:
        """The policy, with the defaults of what is left out. Raises RequestError naming the field."""
        return parse_policy(self.model_dump())


Read = TypeVar("Read", bound=_Body)


async def read_body(request: web.Request, model: type[Read], n_ctx: int | None, n_ctx_train: int | None = None) -> Read:
    """Read and check a body. Lists longer than the context (``n_ctx`` tokens) are not looked at any further.

    ``n_ctx_train``: tokens of the model's own context, for what such a refusal says.

    Raises:  InvalidJson (400) with the position, RequestError (400) naming the field, ContextLengthExceeded (400),
             HTTPRequestEntityTooLarge
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestError("compressed bodies are not read here")
    n_bytes = request.content_length or 0
    if n_bytes > request.client_max_size > 0:  # told before it is uploaded in vain
        raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=n_bytes)
    raw = await request.read()
    if not raw.strip():
        raise InvalidJson("a JSON object is needed, the body is empty", position=0, line=1, column=1)
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        if is_only_too_deep(e):
            raise RequestError(f"the body has more than {MAX_LEVELS} levels") from e
        raise invalid_json(raw, e) from e
    if not isinstance(parsed, dict):
        raise RequestError("the body must be a JSON object")
    if is_too_deep(raw, parsed):
        raise RequestError(f"the body has more than {MAX_LEVELS} levels")
    for name in _LISTS if n_ctx is not None else ():
        given = parsed.get(name)
        if isinstance(given, list) and n_ctx is not None and len(given) > n_ctx:
            error = ContextLengthExceeded(n_prompt_tokens=len(given), n_ctx=n_ctx, n_ctx_train=n_ctx_train)
            error.param = name
            raise error
    try:
        return model.model_validate(parsed)
    except ValidationError as e:
        raise _named(e, model) from e


def _named(error: ValidationError, model: type[_Body]) -> RequestError:
    """The first thing that is wrong, with the field's path as a person would write it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        there = ", ".join(info.alias or name for name, info in model.model_fields.items())
        return RequestError(f"unknown field {field!r}; there are: {there}", param=field)
    if field in ("prompt", "pool_id"):
        wanted = {"prompt": "a string, or a list of token ids and strings", "pool_id": "a pool's id or its name"}
        return RequestError(f"{field} must be {wanted[field]}", param=field)
    path = str(field)
    for part in first["loc"][1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return RequestError(f"{path}: {first['msg']}", param=field)


def query_count(request: web.Request, name: str, most: int) -> int | None:
    """A number of the query string, 0 to ``most``; None: it is not there. Raises RequestError."""
    given = request.query.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(most)) and int(given) <= most):
        raise RequestError(f"{name} must be a whole number from 0 to {most}", param=name)
    return int(given)


def query_flag(request: web.Request, name: str) -> bool:
    """A flag of the query string. Raises RequestError."""
    value = request.query.get(name)
    if value is None or value.lower() in ("0", "false"):
        return False
    if value.lower() in ("", "1", "true"):
        return True
    raise RequestError(f"{name} must be true or false", param=name)
