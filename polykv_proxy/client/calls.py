"""What is asked of the control plane, and the two routes of llama-server that make tokens. Pure; see ``asking``."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from polykv_proxy.client import results
from polykv_proxy.client.asking import Call, Messages, Pool, Steps, StreamCall, given, listed, step

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
    body = _source(tokens, prompt, messages, tools, chat_template_kwargs) | given(from_session=from_session)
    body |= given(name=name, pin=pin, ttl_s=ttl_s)
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
    body = _source(tokens, prompt, messages, tools, chat_template_kwargs) | given(from_session=from_session)
    body |= given(own_tokens=listed(own_tokens), branch_pos=branch_pos, name=name, pin=pin, ttl_s=ttl_s, exact=exact)
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
    return _on(pool_id, "evict", results.PoolEvicted, query=given(to=to))


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
    query = given(expected_tokens=expected_tokens, session_id=session_id)
    return _on(pool_id, "capacity", results.Capacity, method="GET", query=query)


# Rates, sessions, receipts -------------------------------------------------------------------------------------------


def tps() -> Call[results.TpsSample]:
    """Tokens per second of now."""
    return Call(method="GET", path="/polykv/tps", read=results.TpsSample.model_validate)


def stream_tps(*, interval_ms: int | None = None) -> StreamCall[results.TpsSample]:
    """The same again and again, until you stop or the proxy does. ``interval_ms``: 100 to 60000."""
    query = {"stream": "1", **given(interval_ms=interval_ms)}
    return StreamCall(method="GET", path="/polykv/tps", query=query, read=results.TpsSample.model_validate)


def sessions() -> Call[list[results.SessionInfo]]:
    """All that are open."""

    def each(body: Any) -> list[results.SessionInfo]:
        return [results.SessionInfo.model_validate(one) for one in body["sessions"]]

    return Call(method="GET", path="/polykv/sessions", read=each)


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
    body = _source(tokens, prompt, messages, tools, chat_template_kwargs) | given(pool_id=pool_id)
    return Call(method="POST", path="/polykv/match", body=body, read=results.Match.model_validate, pool_id=pool_id)


def requests(*, last: int | None = None, request_id: str | None = None) -> Call[list[results.RequestInfo]]:
    """Receipts of the last requests that the proxy read, newest first."""

    def each(body: Any) -> list[results.RequestInfo]:
        return [results.RequestInfo.model_validate(one) for one in body["requests"]]

    query = given(last=last, request_id=request_id)
    return Call(method="GET", path="/polykv/requests", query=query, read=each)


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
    body |= given(tools=listed(tools), chat_template_kwargs=chat_template_kwargs)

    def text(answer: Any) -> str:
        return str(answer["prompt"])

    prompt = yield from step(Call(method="POST", path="/apply-template", body=body, read=text, control=False))
    return (yield from step(tokenize(prompt, add_special=True)))


# Compaction --------------------------------------------------------------------------------------------------------


def compact_by_refork(
    *,
    ancestor: Pool,
    old_pool: Pool | None = None,
    compacted_tokens: Sequence[int] | None = None,
    messages: Messages | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    sessions: Sequence[str] | None = None,
    name: str | None = None,
    release_old: bool = True,
) -> Call[results.Compacted]:
    """Put a compacted context in the place of an old one: fork the stable ancestor, move sessions, pins and policy of
    ``old_pool`` to the new pool, release the old one and all below it. All of it or nothing.

    ``compacted_tokens`` or ``messages``: the new FULL prefix, which begins like the ancestor and is shorter than the
    pools or the conversations that it replaces. ``sessions``: who moves, with the next turn; all of the old pool and
    below unless given. ``release_old=False`` keeps it. Without ``old_pool`` it is only the fork, and sessions move when
    they name it.

    Raises:  InvalidRequestError when the old pool contains the ancestor, or the new prefix is no shorter;
             PoolConflictError when it does not begin with the ancestor; PoolBusyError
    """
    body = _source(compacted_tokens, None, messages, tools, chat_template_kwargs) | given(name=name)
    if old_pool is None:
        return _on(ancestor, "fork", results.Compacted, body=body)
    body |= given(ancestor=ancestor, sessions=listed(sessions)) | {"release_old": release_old}
    return _on(old_pool, "compact", results.Compacted, body=body)


R = TypeVar("R", bound=results.Result)


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
    return given(
        tokens=listed(tokens),
        prompt=listed(prompt),
        messages=listed(messages),
        tools=listed(tools),
        chat_template_kwargs=chat_template_kwargs,
    )
