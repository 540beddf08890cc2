"""What a chat model raises: each is an error of the SDK, of openai and of LangChain at once.

So ``except PoolSaturatedError`` (the SDK's or this one), ``except openai.RateLimitError`` and
``ModelError.is_retryable`` all do what their users expect. All of them survive pickling, without the response.
"""

# Two trees of errors meet here, and both declare ``body``, ``param`` and ``status_code``, each a little differently.
# mypy: disable-error-code="misc,override"

from collections.abc import Mapping
from typing import Any, Self

import openai
from langchain_core.exceptions import ModelAPIError, ModelRateLimitError
from langchain_openai.chat_models.base import (
    OpenAIAPIError,
    OpenAIAuthenticationError,
    OpenAIConnectionError,
    OpenAIContextOverflowError,
    OpenAIInvalidRequestError,
    OpenAIModelNotFoundError,
    OpenAIRateLimitError,
    OpenAITimeoutError,
)

from polykv_proxy import client
from polykv_proxy.client.errors import error_of


class PoolSaturatedError(client.PoolSaturatedError, ModelRateLimitError):
    """The gate said no. ``retry_after``, ``reason``, ``pool_id`` and ``capacity`` as in the SDK."""

    @classmethod
    def of(cls, error: client.PoolSaturatedError) -> Self:
        """The same as one of these."""
        raised = cls(error.message)
        raised.__dict__.update(error.__dict__)
        return raised


class _Answered:
    """An error made of what the SDK knows of it and of openai's. Has openai's ``response`` and ``request``."""

    def __init__(self, known: client.PolyKVError, seen: openai.APIError):
        Exception.__init__(self, known.message)  # type: ignore[arg-type]  # it is mixed into exceptions only
        self.__dict__.update(seen.__dict__ | known.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("response", "request")}
        return _revive, (type(self), self.args, state)  # type: ignore[attr-defined]


class ChatPoolSaturatedError(_Answered, PoolSaturatedError, OpenAIRateLimitError):
    pass


class ChatContextOverflowError(_Answered, client.PolyKVContextOverflowError, OpenAIContextOverflowError):
    pass


class ChatAuthenticationError(_Answered, client.AuthenticationError, OpenAIAuthenticationError):
    pass


class ChatPoolNotFoundError(_Answered, client.PoolNotFoundError, OpenAIModelNotFoundError):
    pass


class ChatConflictError(_Answered, client.PoolConflictError, OpenAIInvalidRequestError):
    pass


class ChatInvalidRequestError(_Answered, client.InvalidRequestError, OpenAIInvalidRequestError):
    pass


class ChatKvExhaustedError(_Answered, client.KvExhaustedError, OpenAIAPIError):
    pass


class ChatUnavailableError(_Answered, client.PolyKVUnavailableError, OpenAIAPIError):
    pass


class ChatConnectionError(_Answered, client.PolyKVUnavailableError, OpenAIConnectionError):
    pass


class ChatTimeoutError(_Answered, client.PolyKVTimeoutError, OpenAITimeoutError):
    pass


class ChatServerError(_Answered, client.PolyKVError, OpenAIAPIError):
    """The server failed, and nobody said more."""


class ChatInterruptedError(_Answered, client.PolyKVUnavailableError, ModelAPIError, openai.APIError):
    """A streamed answer that failed after it had begun."""


class IncompleteAnswerError(client.PolyKVUnavailableError, ModelAPIError):
    """A streamed answer that ended without saying why: what came of it is not the whole."""


OF: Mapping[type[client.PolyKVError], type[_Answered]] = {
    client.PoolSaturatedError: ChatPoolSaturatedError,
    client.PolyKVContextOverflowError: ChatContextOverflowError,
    client.AuthenticationError: ChatAuthenticationError,
    client.PoolNotFoundError: ChatPoolNotFoundError,
    client.PoolConflictError: ChatConflictError,
    client.InvalidRequestError: ChatInvalidRequestError,
    client.KvExhaustedError: ChatKvExhaustedError,
    client.PolyKVUnavailableError: ChatUnavailableError,
}


def of_openai(seen: openai.APIError, base_url: str, pool_id: int | str | None) -> BaseException:
    """The error to raise for one of openai's, LangChain's flavours included."""
    if isinstance(seen, openai.APITimeoutError):
        said = f"no answer from {base_url} within the timeout; it may have been generated all the same"
        return _made(ChatTimeoutError, client.PolyKVTimeoutError(said, code="timeout"), seen)
    if isinstance(seen, openai.APIConnectionError):
        why = seen.__cause__ if not isinstance(seen.__cause__, openai.APIError) else seen.__cause__.__cause__
        said = (
            f"the proxy at {base_url} cannot be reached: {why or seen.message}; start it, or name another with "
            "base_url or POLYKV_BASE_URL"
        )
        return _made(ChatConnectionError, client.PolyKVUnavailableError(said, code="unreachable"), seen)
    if isinstance(seen, openai.APIStatusError):
        answer = seen.response
        known = error_of(answer.status_code, answer.headers, answer.content, pool_id=pool_id)
        return _made(OF.get(type(known), ChatServerError), known, seen)
    body = seen.body if isinstance(seen.body, Mapping) else {}
    code = str(body.get("code") or body.get("type") or "interrupted")
    return _made(ChatInterruptedError, client.PolyKVUnavailableError(seen.message, code=code, body=body), seen)


def _made(kind: type[_Answered], known: client.PolyKVError, seen: openai.APIError) -> BaseException:
    made = kind(known, seen)
    assert isinstance(made, BaseException)
    return made


def _revive(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
