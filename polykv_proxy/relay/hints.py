"""Where a client says that a cache should end: ``cache_control`` and ``prompt_cache_breakpoint`` marks. Pure.

A mark stands on a tool, a block of the system prompt, a message, or a part of its content, and means all that a
template puts in front of its end. Marks are no text: llama-server neither refuses nor prints them, and they go on to it
as they are. One at the very end of the prompt says nothing that others could begin with.
"""

from collections.abc import Iterator
from typing import Any

from polykv_proxy.control.divergence import MARKS
from polykv_proxy.control.hints import Beginning
from polykv_proxy.relay.dialects import Call, Dialect

MAX_MARKS = 4
"""As many as the Messages API takes. Of more, the last ones."""

_IN_CHATS = frozenset({Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES})


def beginnings_in(call: Call) -> list[Beginning]:
    """What a request marks, the shortest first; nothing is looked for in a body without the words."""
    raw = call.raw
    if (b'"cache_control"' not in raw and b'"prompt_cache_breakpoint"' not in raw) or call.dialect not in _IN_CHATS:
        return []
    return list(_beginnings(call))[-MAX_MARKS:]


def _beginnings(call: Call) -> Iterator[Beginning]:
    body = call.body
    field = "input" if call.dialect is Dialect.RESPONSES else "messages"
    messages = body.get(field)
    if not isinstance(messages, list):
        return
    tools, system = body.get("tools"), body.get("system")
    front = {key: value for key, value in body.items() if key not in ("tools", "system", field)}
    for _, until in _marked(tools):
        yield Beginning({**front, "tools": until}, field, (), of_front=True)
    if tools is not None:
        front["tools"] = tools
    for _, until in _marked(system):
        yield Beginning({**front, "system": until}, field, (), of_front=True)
    if system is not None:
        front["system"] = system
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            return
        of_front = message.get("role") in ("system", "developer")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        is_last = i == len(messages) - 1
        for part, until in _marked(content):
            if part < len(parts) - 1 or not is_last:
                yield Beginning(front, field, (*messages[:i], {**message, "content": until}), of_front=of_front)
        if _is_marked(message) and not is_last and not _is_marked(parts[-1] if parts else None):
            yield Beginning(front, field, tuple(messages[: i + 1]), of_front=of_front)


def _marked(listed: Any) -> list[tuple[int, list[Any]]]:
    """Where marks are, and all up to there."""
    if not isinstance(listed, list):
        return []
    return [(i, listed[: i + 1]) for i, item in enumerate(listed) if _is_marked(item)]


def _is_marked(item: Any) -> bool:
    """OpenAI's tools may carry it beside their type or in their function."""
    if not isinstance(item, dict):
        return False
    function = item.get("function")
    return any(item.get(name) for name in MARKS) or (isinstance(function, dict) and _is_marked(function))
