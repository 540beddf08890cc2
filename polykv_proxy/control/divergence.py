"""Where a prompt leaves another one that it was expected to begin with: which message, which line of it. Pure.

Bodies are compared as templates read them: system prompt, tools, then message by message; marks of where a cache should
end are no text. A prompt that only goes on, or stops earlier, leaves nothing.

Units:  offsets in characters of the text in question
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

MAX_SHOWN = 80
"""So much of a line is shown at most."""

MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
_FRONT = ("system", "instructions")
_SYSTEM_ROLES = frozenset({"system", "developer"})
_TEXT_KINDS = frozenset({"text", "input_text", "output_text"})


@dataclass(frozen=True, slots=True)
class Span:
    """The line that differs, ``[start, end)`` of the text, cut to what can be shown. ``at``: its first other character.

    ``text``: of the prompt that diverged.
    """

    start: int
    end: int
    at: int
    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """``field``: of the body. ``message``: counted from 0 in there; a system prompt of its own is message 0.

    ``part``: of its content, if that is a list. ``key``: of the message, when it is not its content that differs.
    """

    field: str
    message: int | None = None
    role: str | None = None
    part: int | None = None
    key: str | None = None
    span: Span | None = None

    @property
    def of_system(self) -> bool:
        return self.role in _SYSTEM_ROLES


@dataclass(frozen=True, slots=True)
class _Section:
    field: str
    message: int | None
    role: str | None
    said: Mapping[str, Any]

    @property
    def place(self) -> Place:
        return Place(self.field, self.message, self.role)


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> Place | None:
    """The first place of ``new`` that is not as in ``old``; None when one of them begins with the other."""
    prompts = old.get("prompt"), new.get("prompt")
    if all(isinstance(prompt, str) for prompt in prompts):
        span = _span(*prompts)
        return Place("prompt", span=span) if span is not None else None
    if _listed(old.get("tools")) != _listed(new.get("tools")):
        in_front = next(_differing(old, new, _is_system), None)
        return in_front if in_front is not None else Place("tools")
    return next(_differing(old, new, lambda _: True), None)


def first_addition(old: Mapping[str, Any], new: Mapping[str, Any]) -> Place | None:
    """The first message of ``new`` that comes after those of ``old``, which it begins with; None when there is none."""
    if first_difference(old, new) is not None:
        return None
    added = list(_sections(new))[len(list(_sections(old))) :]
    return added[0].place if added else None


def volatile_place(old: Mapping[str, Any], new: Mapping[str, Any]) -> Place | None:
    """The first line of a system prompt that is otherwise the same as another one's: one that changes by itself."""
    place = next(_differing(old, new, _is_system), None)
    if place is None or place.span is None:
        return None
    texts = [system_text(body) for body in (old, new)]
    n_before = common_length(*texts)
    n_after = common_length(*(text[n_before:][::-1] for text in texts))
    return place if 2 * (n_before + n_after) >= max(map(len, texts)) else None


def system_text(body: Mapping[str, Any]) -> str:
    """All of a body's system prompt."""
    return "\n".join(text for s in _sections(body) if _is_system(s) for text in _texts(s.said.get("content")))


def common_length(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], of_interest: Any) -> Iterator[Place]:
    """Places where both have something, and not the same."""
    old_sections = (section for section in _sections(old) if of_interest(section))
    new_sections = (section for section in _sections(new) if of_interest(section))
    for before, after in zip_longest(old_sections, new_sections):
        if before is None or after is None:
            return
        if (place := _compare(before, after)) is not None:
            yield place


def _compare(before: _Section, after: _Section) -> Place | None:
    if before.said == after.said and before.role == after.role:
        return None
    place = after.place
    if _role(before.role) != _role(after.role):
        return place
    old_parts, new_parts = (_parts(section.said.get("content")) for section in (before, after))
    is_list = isinstance(after.said.get("content"), list)
    for i, (old_part, new_part) in enumerate(zip_longest(old_parts, new_parts)):
        if old_part == new_part:
            continue
        texts = _text_of(old_part or {}), _text_of(new_part or {})
        span = _span(*texts, whole=True) if texts[1] is not None else None
        part = min(i, len(new_parts) - 1) if is_list and new_parts else None
        return Place(place.field, place.message, place.role, part, None, span)
    for key in dict.fromkeys((*after.said, *before.said)):
        values = before.said.get(key), after.said.get(key)
        if key not in ("content", "role", *MARKS) and (values[0] or None) != (values[1] or None):
            texts = (values[0] or "", values[1] or "") if isinstance(values[1] or values[0], str) else (None, None)
            span = _span(*texts, whole=True) if all(isinstance(text, str) for text in texts) else None
            return Place(place.field, place.message, place.role, None, key, span)
    return None


def _span(old: str | None, new: str | None, *, whole: bool = False) -> Span | None:
    """``whole``: a text that stops earlier, or goes on, differs too."""
    old, new = old or "", new or ""
    at = common_length(old, new)
    if at == len(new) == len(old) or (not whole and at in (len(old), len(new))):
        return None
    start = new.rfind("\n", 0, at) + 1
    if at - start > MAX_SHOWN - 20:
        start = at - 20  # the line is long: what differs must be seen
    end = new.find("\n", at)
    end = min(len(new) if end < 0 else end, start + MAX_SHOWN)
    return Span(start, max(end, start), at, new[start:end])


def _sections(body: Mapping[str, Any]) -> Iterator[_Section]:
    for field in _FRONT:
        if body.get(field):
            yield _Section(field, 0, "system", {"content": body[field]})
    field = "input" if "input" in body else "messages"
    messages = body.get(field)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, Mapping):
            role = message.get("role")
            yield _Section(field, i, role if isinstance(role, str) else None, message)


def _is_system(section: _Section) -> bool:
    return section.role in _SYSTEM_ROLES


def _role(role: str | None) -> str | None:
    return "system" if role in _SYSTEM_ROLES else role


def _parts(content: Any) -> list[Mapping[str, Any]]:
    """A text is a list of one part; marks are left out, kinds of text are one."""
    listed = content if isinstance(content, list) else [content] if content else []
    parts: list[Mapping[str, Any]] = []
    for part in listed:
        if isinstance(part, Mapping):
            kept = {key: value for key, value in part.items() if key not in MARKS}
            text = _text_of(kept)
            parts.append({"type": "text", "text": text} if text is not None else kept)
        else:
            parts.append({"type": "text", "text": part} if isinstance(part, str) else {"": part})
    return parts


def _text_of(part: Mapping[str, Any]) -> str | None:
    text = part.get("text")
    return text if isinstance(text, str) and part.get("type", "text") in _TEXT_KINDS else None


def _texts(content: Any) -> list[str]:
    return [text for part in _parts(content) if (text := _text_of(part)) is not None]


def _listed(tools: Any) -> list[Any]:
    """Without marks: of tools they stand beside the rest."""
    listed = tools if isinstance(tools, list) else []
    return [{k: v for k, v in t.items() if k not in MARKS} if isinstance(t, Mapping) else t for t in listed]
