"""What is asked of the model: chats and completions with pool and session, whole or streamed. Pure; see ``asking``."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from polykv_proxy.client import results
from polykv_proxy.client.asking import Call, Messages, Pool, StreamCall, given, listed

R = TypeVar("R", bound=results.Reply)


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
    asked = {"prompt": listed(prompt), **body, **_attach(pool_id, session_id, overcommit), "stream": False}
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
    asked = {"prompt": listed(prompt), **body, **_attach(pool_id, session_id, overcommit), "stream": True}
    return _stream("/completion", asked, results.CompletionReply, lambda event: bool(event and event.get("stop")))


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
    return given(pool_id=pool_id, session_id=session_id, overcommit=overcommit)
