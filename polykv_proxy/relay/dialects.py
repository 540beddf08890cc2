"""The four ways a request can be written, and what each says that matters here.

Pure. ``read_call`` turns path, headers and body into a ``Call``: the dialect, the fields of the contract (body beats
header), and everything that decides whether sharing a prefix is possible at all.
"""

import codecs
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from polykv_proxy.conversation import Conversation
from polykv_proxy.json_faults import invalid_json, is_only_too_deep
from polykv_proxy.json_levels import TOO_DEEP, TooDeep
from polykv_proxy.relay.fields import BODY_FIELDS, Fields, read_fields


class Dialect(Enum):
    NATIVE = "llama-server's own completion"
    COMPLETIONS = "OpenAI completions"
    CHAT = "OpenAI chat completions"
    MESSAGES = "Anthropic Messages"
    RESPONSES = "OpenAI Responses"


ATTACHABLE: dict[str, Dialect] = {
    "/completion": Dialect.NATIVE,
    "/completions": Dialect.NATIVE,
    "/v1/completions": Dialect.COMPLETIONS,
    "/chat/completions": Dialect.CHAT,
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/messages": Dialect.MESSAGES,
    "/v1/responses": Dialect.RESPONSES,
}
"""Paths of ``POST`` requests that can share a prefix. Every other path is relayed as it is."""

TAKES_A_SLOT = frozenset(
    {
        *("/infill", "/embedding", "/embeddings", "/v1/embeddings", "/rerank", "/reranking", "/v1/rerank"),
        *("/v1/reranking", "/responses", "/audio/transcriptions", "/v1/audio/transcriptions", *ATTACHABLE),
    }
)
"""Paths of ``POST`` requests that occupy a slot of the engine's own choice unless they are pinned."""

_NOTHING: frozenset[str] = frozenset()
_MARKERS = (b'"pool_id"', b'"session_id"', b'"shared_p', b'"overcommit"', b"\\u00")


@dataclass(slots=True)
class Call:
    """One attachable request, read once. ``body`` is without our fields; ``raw`` still has them."""

    path: str
    dialect: Dialect
    raw: bytes
    body: dict[str, Any]
    fields: Fields
    carried: frozenset[str]
    stream: bool = False
    n_choices: int = 1
    n_prompts: int = 1
    own_slot: int | None = None
    has_media: bool = False
    incompatible: bool = False
    replace: dict[str, bytes] = field(default_factory=dict)

    @property
    def explicit(self) -> bool:
        """Carries one of the fields of the contract."""
        return self.fields.given

    @property
    def n_finals(self) -> int:
        """How many choices end before the reply does."""
        return self.n_choices * self.n_prompts


def may_carry_fields(raw: bytes) -> bool:
    """Whether it is worth parsing a body to see if it carries one of our fields. Never wrongly False."""
    return any(marker in raw for marker in _MARKERS)


def parse_json(raw: bytes) -> Any:
    """What llama-server reads in a body: a byte order mark in front is nothing, and neither are NULs at the end.

    Raises:  InvalidJson (400); TooDeep (400), of which nothing is known but that llama-server may read it
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        bare = raw.removeprefix(codecs.BOM_UTF8).rstrip(b"\0")
        if len(bare) < len(raw):
            with suppress(orjson.JSONDecodeError):
                return orjson.loads(bare)
        raise (TooDeep(TOO_DEEP) if is_only_too_deep(e) else invalid_json(raw, e)) from e


def read_call(
    path: str, raw: bytes, body: dict[str, Any], headers: Mapping[str, str], *, rewrite_tool_choice: bool
) -> Call:
    """Read an attachable request. ``headers``: case-insensitive. Raises RequestError on a field of a wrong type."""
    dialect = ATTACHABLE[path]
    fields = read_fields(body, headers)
    carried = _NOTHING
    if not body.keys().isdisjoint(BODY_FIELDS):
        carried = frozenset(BODY_FIELDS & body.keys())
        body = {key: value for key, value in body.items() if key not in carried}
    call = Call(path, dialect, raw, body, fields, carried, stream=body.get("stream") is True)
    call.n_choices = _positive(body.get("n_cmpl", body.get("n"))) if dialect is not Dialect.MESSAGES else 1
    call.n_prompts = _n_prompts(body.get("prompt")) if dialect in (Dialect.NATIVE, Dialect.COMPLETIONS) else 1
    own_slot = body.get("id_slot")
    if isinstance(own_slot, int) and not isinstance(own_slot, bool) and own_slot >= 0:
        call.own_slot = own_slot
    call.has_media = _has_media(call)
    call.incompatible = (
        body.get("cache_prompt") is False or call.own_slot is not None or bool(body.get("lora")) or call.has_media
    )
    if rewrite_tool_choice and dialect in (Dialect.CHAT, Dialect.RESPONSES) and _names_a_tool(body.get("tool_choice")):
        # llama-server knows only auto, none and required; an object would silently mean auto.
        call.body = {**call.body, "tool_choice": "required"}
        call.replace["tool_choice"] = b'"required"'
    return call


def conversation_of(call: Call) -> Conversation | None:
    """What it says so far; None when that cannot be told (media, token arrays are told, lists of prompts are not)."""
    body, name = call.body, call.dialect.name
    if call.dialect in (Dialect.NATIVE, Dialect.COMPLETIONS):
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return Conversation.of_text(name, prompt.encode("utf-8", "surrogatepass"))
        if call.n_prompts == 1 and isinstance(prompt, list):
            return Conversation.of_text(name + "[]", orjson.dumps(prompt)[:-1] + b",")
        return None
    messages = body.get("input" if call.dialect is Dialect.RESPONSES else "messages")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        return None
    front = [name, body.get("model"), body.get("system"), body.get("instructions"), body.get("tools")]
    return Conversation.of_messages(front, messages)


def _positive(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else 1


def _n_prompts(prompt: Any) -> int:
    """A list of strings, lists or objects is several prompts; one with a number in it is a single mixed one."""
    if not isinstance(prompt, list) or not prompt or any(isinstance(p, int | float) for p in prompt):
        return 1
    return len(prompt)


def _names_a_tool(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "function"


_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "tool_use"})


def _has_media(call: Call) -> bool:
    prompt = call.body.get("prompt")
    if isinstance(prompt, dict | list) and call.dialect in (Dialect.NATIVE, Dialect.COMPLETIONS):
        prompts = prompt if isinstance(prompt, list) else [prompt]
        return any(isinstance(p, dict) and bool(p.get("multimodal_data")) for p in prompts)
    messages = call.body.get("input" if call.dialect is Dialect.RESPONSES else "messages")
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(_part_is_media(part) for part in content):
            return True
    return False


def _part_is_media(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    if kind == "tool_result":
        inner = part.get("content")
        return isinstance(inner, list) and any(_part_is_media(p) for p in inner)
    return isinstance(kind, str) and kind not in _TEXT_PARTS
