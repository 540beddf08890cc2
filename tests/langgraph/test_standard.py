"""LangChain's own tests for chat models, without a model: see ``toy_server``."""

from typing import Any, ClassVar

import httpx
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from polykv_proxy.langgraph import ChatPolyKV
from tests.langgraph.toy_server import URL, ToyServer


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatPolyKV]:
        return ChatPolyKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "toy", "base_url": URL, "api_key": "k"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        env = {"POLYKV_API_KEY": "k", "POLYKV_BASE_URL": "http://there:1"}
        return env, {"model": "toy"}, {"openai_api_key": "k", "openai_api_base": "http://there:1/v1"}


class TestIntegration(ChatModelIntegrationTests):
    """Structured output by json_schema, the default."""

    method: ClassVar[dict[str, Any]] = {}

    @property
    def chat_model_class(self) -> type[ChatPolyKV]:
        return ChatPolyKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        transport = httpx.MockTransport(ToyServer().handle)
        return {
            "model": "toy",
            "base_url": URL,
            "http_client": httpx.Client(transport=transport),
            "http_async_client": httpx.AsyncClient(transport=transport),
        }

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return dict(self.method)

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:  # type: ignore[override]
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatPolyKV(**self.chat_model_params)
        if not stream:
            return model.invoke("hi")
        whole: AIMessageChunk | None = None
        for piece in model.stream("hi"):
            whole = piece if whole is None else whole + piece
        assert whole is not None
        return whole


class TestIntegrationByTools(TestIntegration):
    """The same by function_calling."""

    method: ClassVar[dict[str, Any]] = {"method": "function_calling"}
