"""``ChatPolyKV``: a LangChain chat model whose conversations are sessions of a pool.

What goes over the wire is what openai's client sends, plus ``pool_id``, ``session_id`` and ``overcommit``. Admission is
decided in one place: a refusal is raised at once (``max_retries`` 0), or waited for by the pacer of its pool.
"""

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, Literal, Self, cast

import openai
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage, BaseMessageChunk
from langchain_core.output_parsers import PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import BaseModel, Field, PrivateAttr, SecretStr, model_validator
from pydantic.v1 import BaseModel as BaseModelV1

from polykv_proxy import __version__
from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient
from polykv_proxy.client.asking import Call
from polykv_proxy.langgraph.connections import make_clients, make_sdks, root_url
from polykv_proxy.langgraph.door import AsyncDoor, Door
from polykv_proxy.langgraph.errors import IncompleteAnswerError, of_openai
from polykv_proxy.langgraph.metadata import PROVIDER, Pieces, metadata_of
from polykv_proxy.langgraph.structured import parsed, response_format_of, with_instructions

NO_KEY = "none"
"""openai's client insists on one."""
BODY_FIELDS = ("pool_id", "session_id", "overcommit")
"""Of an instance or of one call."""
CALL_FIELDS = (*BODY_FIELDS, "chat_template_kwargs")
INSTRUCTIONS = "format_instructions"


def _key() -> SecretStr:
    """The proxy's own setting of that name may list several."""
    return SecretStr(os.environ.get("POLYKV_API_KEY", "").split(",")[0].strip() or NO_KEY)


class ChatPolyKV(BaseChatOpenAI):
    """``ChatPolyKV(base_url="http://127.0.0.1:8090", pool_id="review").invoke("…", session_id="agent-7")``

    ``base_url``: else ``POLYKV_BASE_URL``, else ``POLYKV_URL``; with or without ``/v1``. ``api_key``:
    ``POLYKV_API_KEY``. No other variable of the environment is read, ``OPENAI_…`` and ``HTTP_PROXY`` neither: pass
    ``http_client`` and ``http_async_client`` to go another way.

    ``pool_id``, ``session_id``, ``overcommit``: of every call that does not give its own. ``session_id`` names one
    conversation: leave it out, or set it per call, for a model that several agents use.
    ``on_saturated``: ``raise`` PoolSaturatedError at once, or ``wait`` in the pacer's line, at most ``max_wait_s``;
    who stands first in it looks every ``poll_interval_s`` whether there is room.
    ``strict_stream``: raise when a streamed answer ends without a reason to.
    ``context_window``: tokens of one conversation, for ``profile``; ``from_server`` asks for it.
    ``include_format_instructions``: structured output adds its schema to the last message of the user; the model does
    not see it otherwise.

    Raises:  errors of ``polykv_proxy.langgraph.errors``
    """

    model_name: str = Field(default="default", alias="model")
    openai_api_key: SecretStr | None = Field(default_factory=_key, alias="api_key")
    max_retries: int | None = 0
    stream_usage: bool | None = True
    use_responses_api: bool | None = False
    stream_chunk_timeout: float | None = 600.0
    """Seconds; a long prompt is prefilled before the first piece comes."""

    pool_id: int | str | None = None
    session_id: str | None = None
    overcommit: bool | None = None
    on_saturated: Literal["raise", "wait"] = "raise"
    max_wait_s: float | None = None
    poll_interval_s: float = Field(default=1.0, gt=0)
    context_window: int | None = None
    strict_stream: bool = True
    include_format_instructions: bool = False

    sdk: PolyKVClient | None = Field(default=None, exclude=True)
    """Made of ``base_url`` and ``api_key`` unless given."""
    async_sdk: AsyncPolyKVClient | None = Field(default=None, exclude=True)

    _root_url: str = PrivateAttr()

    @classmethod
    def from_server(cls, **fields: Any) -> Self:
        """The same, after a look at what the server runs: ``model``, ``context_window`` and ``profile``."""
        model = cls(**fields)
        return cls(**_shown(model._sdk.call(_PROPS)) | fields)

    @classmethod
    async def afrom_server(cls, **fields: Any) -> Self:
        model = cls(**fields)
        return cls(**_shown(await model._async_sdk.call(_PROPS)) | fields)

    # What BaseChatOpenAI takes from the environment is replaced here, with its validator of this name.
    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        if self.n is not None and (self.n < 1 or (self.n > 1 and self.streaming)):
            raise ValueError("n must be at least 1, and 1 when streaming")
        key = (self.openai_api_key.get_secret_value() if self.openai_api_key else "") or NO_KEY
        known_key = key if key != NO_KEY else None
        self._root_url = root_url(self.openai_api_base)
        self.openai_api_base = f"{self._root_url}/v1"
        sync, asynchronous = make_clients(
            self._root_url,
            http=self.http_client,
            async_http=self.http_async_client,
            api_key=key,
            timeout=self.request_timeout,
            max_retries=self.max_retries or 0,
            default_headers=self.default_headers,
            default_query=self.default_query,
        )
        self.root_client, self.root_async_client = sync, asynchronous
        self.client, self.async_client = sync.chat.completions, asynchronous.chat.completions
        made, amade = make_sdks(self._root_url, known_key)
        self.sdk, self.async_sdk = self.sdk or made, self.async_sdk or amade
        return self

    @model_validator(mode="after")
    def _set_polykv_version(self) -> Self:
        self._add_version("polykv-proxy", __version__)
        return self

    # Who it is ------------------------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "polykv-chat"

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"openai_api_key": "POLYKV_API_KEY"}

    @property
    def _uses_gateway(self) -> bool:
        return False

    def _use_responses_api(self, payload: dict[str, Any]) -> bool:
        return False

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        """``structured_output`` False: agents then ask by a tool, and the list of tools stays what it is."""
        profile: ModelProfile = {"tool_calling": True, "structured_output": False}
        if self.context_window is not None:
            profile["max_input_tokens"] = self.context_window
        return profile

    def with_pool(
        self, pool_id: int | str | None, session_id: str | None = None, *, overcommit: bool | None = None
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model bound to a pool and, if given, a session."""
        fields = {"pool_id": pool_id, "session_id": session_id, "overcommit": overcommit}
        return self.bind(**{name: value for name, value in fields.items() if value is not None})

    # Tokens ---------------------------------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """By the server. Special tokens are text here."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._sdk.tokenize(text, parse_special=False)

    def get_num_tokens_from_messages(
        self,
        messages: Sequence[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
        *,
        allow_fetching_images: bool = True,
    ) -> int:
        """Tokens of the prompt that these messages make, by the server's template. Pictures are not counted."""
        payload = self._get_request_payload(list(messages))
        return len(
            self._sdk.render(
                payload["messages"],
                [convert_to_openai_tool(tool) for tool in tools] if tools else None,
                add_generation_prompt=True,
                chat_template_kwargs=payload.get("extra_body", {}).get("chat_template_kwargs"),
            )
        )

    # The request ----------------------------------------------------------------------------------------------------

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """What llama-server does not know by openai's client goes as ``extra_body``, that of the call over ours."""
        ours = {*CALL_FIELDS, INSTRUCTIONS, "extra_body"}
        theirs = {name: value for name, value in kwargs.items() if name not in ours}
        payload = super()._get_request_payload(input_, stop=stop, **theirs)
        payload["extra_body"] = self._extra(kwargs)
        if "response_format" in payload:
            # Out of sight of openai's helpers for schemas: with them a stream tells its metadata of the first piece
            # only, and an answer cut off at the limit of tokens is an error instead of a message that says so.
            payload["extra_body"]["response_format"] = response_format_of(payload.pop("response_format"))
        if isinstance(payload.get("tool_choice"), dict):
            # llama-server takes the object for "auto". Not fewer tools instead: they are part of the shared prefix.
            payload["tool_choice"] = "required"
        sent = payload["messages"]
        for message, made in zip(self._convert_input(input_).to_messages(), sent, strict=True):
            thought = message.additional_kwargs.get("reasoning_content") if isinstance(message, AIMessage) else None
            if thought:
                made["reasoning_content"] = thought  # else the next turn does not begin as this one ended
        if kwargs.get(INSTRUCTIONS) is not None:
            payload["messages"] = with_instructions(sent, kwargs[INSTRUCTIONS])
        return payload

    def _extra(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What this call sends beside openai's fields: the instance's, over it ``extra_body``, over it the call's."""
        of_instance = {name: getattr(self, name) for name in BODY_FIELDS}
        of_call = {name: kwargs[name] for name in CALL_FIELDS if name in kwargs}
        extra = {**of_instance, **(self.extra_body or {}), **(kwargs.get("extra_body") or {}), **of_call}
        return {name: value for name, value in extra.items() if value is not None}

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """As of ``BaseChatOpenAI``, by ``json_schema`` unless told otherwise: it leaves the prompt as it is, while a
        schema as a tool is a new list of tools, which no pool of the old one begins like.
        """
        if self.include_format_instructions and schema is not None and method != "function_calling":
            kwargs[INSTRUCTIONS] = convert_to_openai_tool(schema)["function"]["parameters"]
        # Those of pydantic.v1 too, which langchain-openai takes by a tool only.
        if method == "json_schema" and isinstance(schema, type) and issubclass(schema, BaseModel | BaseModelV1):
            kwargs["response_format"] = response_format_of(schema)
            kwargs["ls_structured_output_format"] = {
                "kwargs": {"method": method},
                "schema": convert_to_openai_tool(schema),
            }
            return parsed(self.bind(**kwargs), PydanticOutputParser(pydantic_object=schema), include_raw=include_raw)
        return super().with_structured_output(schema, method=method, include_raw=include_raw, strict=strict, **kwargs)

    # The answer -----------------------------------------------------------------------------------------------------

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        body = response if isinstance(response, dict) else response.model_dump(include={"choices"}, warnings=False)
        extra = response if isinstance(response, dict) else (response.model_extra or {})
        metadata = {**metadata_of(extra), "model_provider": PROVIDER}
        for generation, choice in zip(result.generations, body["choices"], strict=True):
            message = generation.message
            message.response_metadata.update(metadata)
            if thought := choice["message"].get("reasoning_content"):
                message.additional_kwargs["reasoning_content"] = thought
        result.llm_output = {**(result.llm_output or {}), "model_provider": PROVIDER}
        return result

    def _convert_chunk_to_generation_chunk(
        self,
        chunk: dict[str, Any],
        default_chunk_class: type[BaseMessageChunk],
        base_generation_info: dict[str, Any] | None,
    ) -> ChatGenerationChunk | None:
        piece = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if piece is None:
            return None
        piece.message.response_metadata.update(metadata_of(chunk))
        piece.message.response_metadata["model_provider"] = PROVIDER
        for choice in (chunk.get("choices") or [])[:1]:
            if thought := (choice.get("delta") or {}).get("reasoning_content"):
                piece.message.additional_kwargs["reasoning_content"] = thought
        return piece

    # The four ways to ask -------------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        door = self._door(Door, self._sdk, kwargs)
        while True:
            with door.enter():
                try:
                    return super()._generate(messages, stop, run_manager, **kwargs)
                except openai.APIError as error:
                    door.refused(self._error(error, kwargs), error)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        door = self._door(AsyncDoor, self._async_sdk, kwargs)
        while True:
            with await door.enter():
                try:
                    return await super()._agenerate(messages, stop, run_manager, **kwargs)
                except openai.APIError as error:
                    door.refused(self._error(error, kwargs), error)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        door, pieces = self._door(Door, self._sdk, kwargs), Pieces()
        done = False
        while not done:
            with door.enter() as admission:
                asked = cast(
                    Generator[ChatGenerationChunk, None, None], super()._stream(messages, stop, run_manager, **kwargs)
                )
                try:
                    with contextlib.closing(asked):  # who leaves ends the generation, at once
                        for piece in asked:
                            admission.accepted()
                            yield pieces.take(piece)
                    done = True
                except openai.APIError as error:
                    door.refused(self._error(error, kwargs), error)
        yield from self._ended(pieces)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        door, pieces = self._door(AsyncDoor, self._async_sdk, kwargs), Pieces()
        done = False
        while not done:
            with await door.enter() as admission:
                asked = cast(
                    AsyncGenerator[ChatGenerationChunk, None], super()._astream(messages, stop, run_manager, **kwargs)
                )
                try:
                    async with contextlib.aclosing(asked):
                        async for piece in asked:
                            admission.accepted()
                            yield pieces.take(piece)
                    done = True
                except openai.APIError as error:
                    door.refused(self._error(error, kwargs), error)
        for piece in self._ended(pieces):
            yield piece

    def _ended(self, pieces: Pieces) -> Iterator[ChatGenerationChunk]:
        if self.strict_stream and not pieces.finished:
            raise IncompleteAnswerError(
                f"the answer of {self._root_url} broke off before its end: no finish_reason came; ask again",
                code="incomplete",
            )
        last = pieces.last()
        if last is not None:
            yield last

    def _door(self, kind: Any, sdk: Any, kwargs: dict[str, Any]) -> Any:
        asked = self._extra(kwargs)
        return kind(
            sdk,
            pool_id=asked.get("pool_id"),
            session_id=asked.get("session_id"),
            overcommit=bool(asked.get("overcommit")),
            waits=self.on_saturated == "wait",
            max_wait_s=self.max_wait_s,
            poll_interval_s=self.poll_interval_s,
        )

    def _error(self, error: openai.APIError, kwargs: dict[str, Any]) -> BaseException:
        return of_openai(error, self._root_url, self._extra(kwargs).get("pool_id"))

    @property
    def _sdk(self) -> PolyKVClient:
        assert self.sdk is not None, "made with the model"
        return self.sdk

    @property
    def _async_sdk(self) -> AsyncPolyKVClient:
        assert self.async_sdk is not None, "made with the model"
        return self.async_sdk


def _shown(props: dict[str, Any]) -> dict[str, Any]:
    """Fields of a model, as the server shows itself in ``/props``."""
    n_ctx = (props.get("default_generation_settings") or {}).get("n_ctx")
    name = props.get("model_alias") or props.get("model_path") or ""
    if os.path.isabs(name):  # without an alias llama-server shows the path as one
        name = os.path.basename(name)
    seen = props.get("modalities") or {}
    caps = props.get("chat_template_caps") or {}
    profile: ModelProfile = {"tool_calling": bool(caps.get("supports_tool_calls", True)), "structured_output": False}
    if isinstance(n_ctx, int):
        profile["max_input_tokens"] = n_ctx
    if "vision" in seen:
        profile["image_inputs"] = bool(seen["vision"])
    if "audio" in seen:
        profile["audio_inputs"] = bool(seen["audio"])
    shown = {"model": name or None, "context_window": n_ctx, "profile": profile}
    return {field: value for field, value in shown.items() if value is not None}


_PROPS: Call[dict[str, Any]] = Call(method="GET", path="/props", read=dict, control=False)

OpencotiChatModel = ChatPolyKV
