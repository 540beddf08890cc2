"""Help for structured output."""

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import BaseOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModelV1


def response_format_of(wanted: dict[str, Any] | type[BaseModel | BaseModelV1]) -> dict[str, Any]:
    """As it goes over the wire."""
    if isinstance(wanted, Mapping):
        return dict(wanted)
    function = convert_to_openai_tool(wanted)["function"]
    return {"type": "json_schema", "json_schema": {"name": function["name"], "schema": function["parameters"]}}


def parsed(model: Runnable[Any, Any], parser: BaseOutputParser[Any], *, include_raw: bool) -> Runnable[Any, Any]:
    """The model and the parser; ``include_raw``: {raw, parsed, parsing_error}, as everywhere in LangChain."""
    if not include_raw:
        return model | parser
    works = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    fails: Runnable[Any, Any] = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | works.with_fallbacks([fails], exception_key="parsing_error")


def with_instructions(messages: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages, the last of the user's with the schema at its end. Nothing before it changes, so what is shared
    stays shared.
    """
    text = f"\n\nAnswer with JSON that fits this schema:\n{json.dumps(schema, ensure_ascii=False)}"
    out = [dict(message) for message in messages]
    for message in reversed(out):
        if message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, list):
                message["content"] = [*content, {"type": "text", "text": text}]
            else:
                message["content"] = f"{content or ''}{text}"
            break
    return out
