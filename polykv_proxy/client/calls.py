"""What is asked: every method of the clients as a request and how its answer is read. Pure.

A function here gives a ``Call``, a ``StreamCall``, or for what takes several requests ``Steps``: a generator that
yields calls, is sent their results (or has their errors thrown into it) and returns the result of the whole. The
clients turn each of them into a method that does it (``PolyKVClient``) or awaits it (``AsyncPolyKVClient``).
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from polykv_proxy.client import results
from polykv_proxy.client.errors import PolyKVError

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


# Pools -------------------------------------------------------------------------------------------------------------


def create_pool(
    *,
    tokens: Sequence[int] | None = None,
    prompt: str | Sequence[int | str] | None = None,
    messages: Messages | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    from_session: str | None = None,
    name: str | None = None,
    pin: bool | None = None,
    ttl_s: float | None = None,
) -> Call[results.PoolCreated]:
    """Make a root pool from exactly one of ``tokens``, ``prompt``, ``messages`` (with ``tools``) or ``from_session``.

    Returns when it is prefilled. Not repeated once it was sent: after a PolyKVTimeoutError look at ``pools()``.
    """
    body = _source(tokens, prompt, messages, tools, chat_template_kwargs) | _given(from_session=from_session)
    body |= _given(name=name, pin=pin, ttl_s=ttl_s)
    return Call(method="POST", path="/polykv/pools", body=body, read=results.PoolCreated.model_validate)


def fork_pool(
    pool_id: Pool,
    *,
    branch_pos: int | None = None,
    tokens: Sequence[int] | None = None,
    own_tokens: Sequence[int] | None = None,
    prompt: str | Sequence[int | str] | None = None,
    messages: Messages | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    from_session: str | None = None,
    name: str | None = None,
    pin: bool | None = None,
    ttl_s: float | None = None,
    exact: bool | None = None,
) -> Call[results.PoolCreated]:
    """Make a child of a pool. ``tokens``, ``prompt`` and ``messages`` give the child's FULL prefix ``[0, L)``, its
    parent's part included; ``own_tokens`` only what follows ``branch_pos``.

    ``branch_pos``: where it leaves its parent; without it where the two diverge.

    Raises:  PoolConflictError, with ``matched_len``, when the child does not begin like its parent
    """
    body = _source(tokens, prompt, messages, tools, chat_template_kwargs) | _given(from_session=from_session)
    body |= _given(own_tokens=_listed(own_tokens), branch_pos=branch_pos, name=name, pin=pin, ttl_s=ttl_s, exact=exact)
    return _on(pool_id, "fork", results.PoolCreated, body=body)


def pools() -> Call[results.PoolTree]:
    """The tree, parents before children, as it was at one moment."""
    return Call(method="GET", path="/polykv/pools", read=results.PoolTree.model_validate)


def subtree(pool_id: Pool) -> Call[results.PoolTree]:
    """A pool and everything below it."""
    return Call(method="GET", path=_path(pool_id), read=results.PoolTree.model_validate, pool_id=pool_id)


def pool(pool_id: Pool) -> Call[results.PoolInfo]:
    """One pool."""

    def first(body: Any) -> results.PoolInfo:
        return results.PoolInfo.model_validate(body["pools"][0])

    return Call(method="GET", path=_path(pool_id), read=first, pool_id=pool_id)


def pin(pool_id: Pool) -> Call[results.PoolPinned]:
    """Keep it resident under pressure; a cold one is brought back first."""
    return _on(pool_id, "pin", results.PoolPinned)


def unpin(pool_id: Pool) -> Call[results.PoolPinned]:
    """Let it go under pressure again."""
    return _on(pool_id, "unpin", results.PoolPinned)


def evict(pool_id: Pool, *, to: str | None = None) -> Call[results.PoolEvicted]:
    """Drop its cells and keep the pool. ``to``: ``warm`` insists that its state is saved, ``cold`` that it is not."""
    return _on(pool_id, "evict", results.PoolEvicted, query=_given(to=to))


def flush(pool_id: Pool) -> Call[results.Flushed]:
    """Evict, of a pool and everything below it, what is neither pinned nor at work."""
    return _on(pool_id, "flush", results.Flushed)


def release(pool_id: Pool, *, recursive: bool = False) -> Call[results.Released]:
    """Take it off the tree. Running turns go on; its sessions match anew at their next turn.

    Raises:  PoolBusyError when it has children and not ``recursive``
    """
    query = {"recursive": "true"} if recursive else {}
    path = _path(pool_id)
    return Call(method="DELETE", path=path, query=query, read=results.Released.model_validate, pool_id=pool_id)


# Admission ---------------------------------------------------------------------------------------------------------


def set_admission(pool_id: Pool, policy: results.AdmissionPolicy | Mapping[str, Any]) -> Call[results.AdmissionInfo]:
    """Give a pool its policy; pools below it without one of their own inherit it."""
    body = policy if isinstance(policy, Mapping) else policy.model_dump(exclude_none=True)
    return _on(pool_id, "admission", results.AdmissionInfo, body=dict(body))


def admission(pool_id: Pool) -> Call[results.AdmissionInfo]:
    """The policy that holds for new sessions of a pool, and whose it is."""
    return _on(pool_id, "admission", results.AdmissionInfo, method="GET")


def drop_admission(pool_id: Pool) -> Call[results.AdmissionInfo]:
    """Take a pool's own policy away; what it inherits holds again."""
    return _on(pool_id, "admission", results.AdmissionInfo, method="DELETE")


def capacity(
    pool_id: Pool, *, expected_tokens: int | None = None, session_id: str | None = None
) -> Call[results.Capacity]:
    """May one more session come in? ``session_id``: may this one; a known one always may. Changes nothing."""
    query = _given(expected_tokens=expected_tokens, session_id=session_id)
    return _on(pool_id, "capacity", results.Capacity, method="GET", query=query)


# Rates, sessions, receipts -------------------------------------------------------------------------------------------


def tps() -> Call[results.TpsSample]:
    """Tokens per second of now."""
    return Call(method="GET", path="/polykv/tps", read=results.TpsSample.model_validate)


def stream_tps(*, interval_ms: int | None = None) -> StreamCall[results.TpsSample]:
    """The same again and again, until you stop or the proxy does. ``interval_ms``: 100 to 60000."""
    query = {"stream": "1", **_given(interval_ms=interval_ms)}
    return StreamCall(method="GET", path="/polykv/tps", query=query, read=results.TpsSample.model_validate)


def sessions() -> Call[list[results.SessionInfo]]:
    """All that are open."""

    def listed(body: Any) -> list[results.SessionInfo]:
        return [results.SessionInfo.model_validate(each) for each in body["sessions"]]

    return Call(method="GET", path="/polykv/sessions", read=listed)


def session(session_id: str) -> Call[results.SessionInfo]:
    """One session."""
    return Call(method="GET", path=_session_path(session_id), read=results.SessionInfo.model_validate)


def drop_session(session_id: str) -> Call[results.SessionDropped]:
    """Forget a session: its slot and what is saved of it are free; what it has running ends by itself."""
    return Call(method="DELETE", path=_session_path(session_id), read=results.SessionDropped.model_validate)


def match(
    *,
    tokens: Sequence[int] | None = None,
    prompt: str | Sequence[int | str] | None = None,
    messages: Messages | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    pool_id: Pool | None = None,
) -> Call[results.Match]:
    """What would a request get? Changes nothing. ``pool_id``: compared with this pool."""
    body = _source(tokens, prompt, messages, tools, chat_template_kwargs) | _given(pool_id=pool_id)
    return Call(method="POST", path="/polykv/match", body=body, read=results.Match.model_validate, pool_id=pool_id)


def requests(*, last: int | None = None, request_id: str | None = None) -> Call[list[results.RequestInfo]]:
    """Receipts of the last requests that the proxy read, newest first."""

    def listed(body: Any) -> list[results.RequestInfo]:
        return [results.RequestInfo.model_validate(each) for each in body["requests"]]

    query = _given(last=last, request_id=request_id)
    return Call(method="GET", path="/polykv/requests", query=query, read=listed)


def health() -> Call[results.Health]:
    """Whether new work is served; also when it is not. Never repeated."""
    return Call(method="GET", path="/polykv/health", read=results.Health.model_validate, also=(503,))


# Tokens ------------------------------------------------------------------------------------------------------------


def tokenize(text: str, *, add_special: bool = False, parse_special: bool = True) -> Call[list[int]]:
    """Tokens of a text, by the engine. ``parse_special``: words like ``<|im_end|>`` are special tokens."""

    def ids(body: Any) -> list[int]:
        return [int(token) for token in body["tokens"]]

    body = {"content": text, "add_special": add_special, "parse_special": parse_special}
    return Call(method="POST", path="/tokenize", body=body, read=ids, control=False)


def render(
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Steps[list[int]]:
    """Tokens of a chat by the model's template, in two requests.

    With ``add_generation_prompt`` the prompt of that chat. Without it not necessarily what longer chats begin with:
    some templates look ahead. What they begin with is what ``create_pool(messages=…)`` makes a pool of.
    """
    body = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    body |= _given(tools=_listed(tools), chat_template_kwargs=chat_template_kwargs)

    def text(answer: Any) -> str:
        return str(answer["prompt"])

    prompt = yield from step(Call(method="POST", path="/apply-template", body=body, read=text, control=False))
    return (yield from step(tokenize(prompt, add_special=True)))


# Compaction --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refork:
    """What became of a compaction.

    ``pool``: the new one. ``sessions``: those of the old subtree. The server moves none of them: each moves with its
    next turn, if that begins like the new pool (name it: ``pool_id``). ``released``: None if nothing was to be
    released, or it failed with ``release_error``; the new pool is there all the same, so release the old one later.
    """

    pool: results.PoolCreated
    sessions: tuple[str, ...]
    released: results.Released | None
    release_error: PolyKVError | None = None


def compact_by_refork(
    *,
    ancestor: Pool,
    old_pool: Pool | None = None,
    compacted_tokens: Sequence[int] | None = None,
    messages: Messages | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    pin: bool | None = None,
    release_old: bool = True,
) -> Steps[Refork]:
    """Put a compacted context beside the old one: fork the stable ancestor, then release the old pool and all below.

    ``compacted_tokens`` or ``messages``: the new FULL prefix, which begins like the ancestor. Several requests, not
    one: who attaches to the old subtree in between matches anew at its next turn, and running turns go on. Nothing is
    released unless the fork came about. ``release_old=False``: do it yourself, when the first turn on the new pool
    succeeded.

    Raises:  ValueError, before anything is changed, when the old subtree contains the ancestor
    """
    old = (yield from step(subtree(old_pool))) if old_pool is not None else None
    if old is not None:
        kept = yield from step(pool(ancestor))
        if old.find(kept.pool_id) is not None:
            raise ValueError(f"pool {ancestor} is in the subtree of {old_pool}: the new pool would be released with it")
    made = yield from step(
        fork_pool(
            ancestor,
            tokens=compacted_tokens,
            messages=messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            name=name,
            pin=pin,
        )
    )
    if old is None:
        return Refork(made, (), None)
    names = tuple(each.session_id for shown in old.pools for each in shown.sessions)
    if not release_old:
        return Refork(made, names, None)
    try:
        gone = yield from step(release(old.pools[0].pool_id, recursive=True))
    except PolyKVError as error:
        return Refork(made, names, None, error)
    return Refork(made, names, gone)


# Generation --------------------------------------------------------------------------------------------------------


def chat(
    messages: Messages,
    *,
    pool_id: Pool | None = None,
    session_id: str | None = None,
    overcommit: bool | None = None,
    **body: Any,
) -> Call[results.ChatReply]:
    """One chat completion. ``session_id``: whose turn it is; ``overcommit``: past the floor of the gate.

    ``body``: every other field of the request (``tools``, ``max_tokens``, ``temperature``, …).

    Raises:  PoolSaturatedError, with ``retry_after``; it is never repeated by itself
    """
    asked = {"messages": list(messages), **body, **_attach(pool_id, session_id, overcommit), "stream": False}
    return _generate("/v1/chat/completions", asked, results.ChatReply)


def stream_chat(
    messages: Messages,
    *,
    pool_id: Pool | None = None,
    session_id: str | None = None,
    overcommit: bool | None = None,
    **body: Any,
) -> StreamCall[results.ChatReply]:
    """The same piece by piece; the last ones carry ``finish_reason``, ``timings`` and ``polykv``.

    Raises:  PolyKVUnavailableError when it ends before its end
    """
    asked = {"messages": list(messages), **body, **_attach(pool_id, session_id, overcommit), "stream": True}
    return _stream("/v1/chat/completions", asked, results.ChatReply, lambda event: event is None)


def complete(
    prompt: str | Sequence[int | str],
    *,
    pool_id: Pool | None = None,
    session_id: str | None = None,
    overcommit: bool | None = None,
    **body: Any,
) -> Call[results.CompletionReply]:
    """One native completion (``/completion``) of a text or of tokens; ``n_predict`` and the like in ``body``."""
    asked = {"prompt": _listed(prompt), **body, **_attach(pool_id, session_id, overcommit), "stream": False}
    return _generate("/completion", asked, results.CompletionReply)


def stream_complete(
    prompt: str | Sequence[int | str],
    *,
    pool_id: Pool | None = None,
    session_id: str | None = None,
    overcommit: bool | None = None,
    **body: Any,
) -> StreamCall[results.CompletionReply]:
    """The same piece by piece; the last one has ``stop``, ``timings`` and ``polykv``."""
    asked = {"prompt": _listed(prompt), **body, **_attach(pool_id, session_id, overcommit), "stream": True}
    return _stream("/completion", asked, results.CompletionReply, lambda event: bool(event and event.get("stop")))


R = TypeVar("R", bound=results.Result)


def _generate(path: str, body: dict[str, Any], kind: type[R]) -> Call[R]:
    return Call(
        method="POST", path=path, body=body, read=kind.model_validate, control=False, pool_id=body.get("pool_id")
    )


def _stream(path: str, body: dict[str, Any], kind: type[R], ends: Callable[[Any], bool]) -> StreamCall[R]:
    pool_id = body.get("pool_id")
    return StreamCall(
        method="POST", path=path, body=body, read=kind.model_validate, control=False, pool_id=pool_id, ends=ends
    )


def _attach(pool_id: Pool | None, session_id: str | None, overcommit: bool | None) -> dict[str, Any]:
    return _given(pool_id=pool_id, session_id=session_id, overcommit=overcommit)


def _on(
    pool_id: Pool,
    what: str,
    kind: type[R],
    *,
    method: str = "POST",
    body: Mapping[str, Any] | None = None,
    query: Mapping[str, Any] | None = None,
) -> Call[R]:
    path = f"{_path(pool_id)}/{what}"
    return Call(method=method, path=path, body=body, query=query or {}, read=kind.model_validate, pool_id=pool_id)


def _path(pool_id: Pool) -> str:
    return f"/polykv/pools/{quote(str(pool_id), safe='')}"


def _session_path(session_id: str) -> str:
    return f"/polykv/sessions/{quote(session_id, safe='')}"


def _source(
    tokens: Sequence[int] | None,
    prompt: str | Sequence[int | str] | None,
    messages: Messages | None,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return _given(
        tokens=_listed(tokens),
        prompt=_listed(prompt),
        messages=_listed(messages),
        tools=_listed(tools),
        chat_template_kwargs=chat_template_kwargs,
    )


def _listed(value: Sequence[Any] | None) -> Any:
    return value if value is None or isinstance(value, str) else list(value)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
