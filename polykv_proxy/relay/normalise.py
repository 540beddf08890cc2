"""Pins lines of system prompts that change by themselves, for those who asked for it (``POLYKV_NORMALISE``).

Such a line stands in front of all the rest, so nothing behind it can be reused or shared, whoever sends it. Pinned, it
reaches the engine as it was first seen:

    billing  the first line of a system prompt that begins with ``x-anthropic-billing-header``: for good
    date     lines like "Today's date is …" or "Current date: …" anywhere in a system prompt: until the day is over

Only a line that has a known shape to its end, with nothing free in it, and only by one that is the same but for
numbers, months, weekdays (``_VARIES``) or short versions and hashes (``_VALUE``): no word gets into another's prompt.

First seen is meant for those who belong together (``speakers``: the agents of a conversation, a ``prompt_cache_key``).
All who name nobody belong together, and their dates only in texts that are the same but for these lines. The model is
told what came first, not what the client wrote: that is why it is off unless somebody wants it. Only these lines are
replaced, in place; every other byte of the body stays.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from datetime import date
from typing import Any

import orjson
import xxhash

from polykv_proxy.relay.dialects import Call
from polykv_proxy.relay.json_bytes import value_at

BILLING, DATE = "billing", "date"
MAX_PINS = 4096
_PAIR = r"[A-Za-z0-9_.:-]{1,32}=[A-Za-z0-9_.:-]{1,64}"
_BILLING = re.compile(
    rf"x-anthropic-billing-header:[ \t]{{0,4}}{_PAIR}(?:;[ \t]{{0,4}}{_PAIR}){{0,7}};?[ \t]{{0,4}}(?=\r?(?:\n|\Z))"
)
# A version or a hash: the only values that differ between requests of one program.
_VALUE = re.compile(r"(?<==)(?:[0-9]{1,5}\.){0,3}[0-9a-f]{1,8}(?=[; \t]|\Z)")

MONTHS = (
    "january|february|march|april|may|june|july|august|september|october|november|december"
    "|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec"
)
WEEKDAYS = "monday|tuesday|wednesday|thursday|friday|saturday|sunday|mon|tue|tues|wed|thu|thur|thurs|fri|sat|sun"
ZONES = (
    "utc|gmt|z|wet|west|cet|cest|eet|eest|msk|bst|ist|est|edt|cst|cdt|mst|mdt|pst|pdt|akst|akdt|hst|jst|kst|sgt|hkt"
    "|aest|aedt|acst|acdt|awst|nzst|nzdt|sast|wat|cat|eat|art|brt"
)


def _words(words: str) -> str:
    return rf"(?<![a-z])(?:{words})(?![a-z])"


# Each of them ends where it has to: a text is read in one way only, so no line takes long to be turned down.
_NUMBER = r"(?<![0-9])[0-9]{1,10}(?![0-9])(?:(?:st|nd|rd|th)(?![a-z]))?"
_VARIES = re.compile(
    rf"(?P<number>{_NUMBER})|(?P<month>{_words(MONTHS)})|(?P<weekday>{_words(WEEKDAYS)})", re.ASCII | re.IGNORECASE
)
_STAYS = rf"[ \t,.:/()*+-]|(?<=[0-9])t(?=[0-9])|{_words(f'am|pm|at|{ZONES}')}"
_DATE = re.compile(
    r"^(?P<label>[ \t]{0,16}(?:[-*#>]{1,8}[ \t]{0,4})?"
    r"(?:(?:today['\u2019]s|(?:the[ \t]+)?current)[ \t]+(?:date(?:[ \t]*(?:and|&|/)[ \t]*time)?|time)|today)"
    r"(?:[ \t]*:|[ \t]+is\b:?))"
    r"(?=[^\n]{0,64}(?:[0-9]{4}|[0-9]{1,2}[:./-][0-9]{1,2}))(?=[^\r\n]{1,64}\r?$)"
    rf"(?P<value>(?:{_NUMBER}|{_words(f'{MONTHS}|{WEEKDAYS}')}|{_STAYS})+)(?=\r?$)",
    re.ASCII | re.IGNORECASE | re.MULTILINE,
)

_Path = tuple[str | int, ...]


def kind_of(line: str, *, is_first: bool) -> str | None:
    """Which kind of line it is, if it is one that can be pinned. ``is_first``: of its system prompt."""
    if is_first and (billing := _BILLING.match(line)) is not None and _VALUE.search(billing.group()) is not None:
        return BILLING
    return DATE if _DATE.match(line) is not None else None


class Normaliser:
    """``kinds``: which lines. ``today``: the day that dates are pinned for."""

    def __init__(self, kinds: Collection[str], today: Callable[[], date] = date.today):
        self._kinds, self._today = frozenset(kinds), today
        self._pins: OrderedDict[tuple[str, str, int], tuple[date | None, str]] = OrderedDict()

    def apply(self, call: Call, family: str | None) -> tuple[str, ...]:
        """Rewrite what the engine will get. Gives the kinds of lines that were replaced."""
        changed: list[tuple[_Path, str]] = []
        kinds: set[str] = set()
        seen: dict[str, int] = {}
        for n, (path, text) in enumerate(_system_texts(call.body)):
            pinned = text
            if BILLING in self._kinds and n == 0 and (line := _BILLING.match(text)) is not None:
                pinned = self._pin(family, _VALUE.sub("", line.group()), 0, None, line.group()) + text[line.end() :]
                kinds |= {BILLING} if pinned != text else set()
            if DATE in self._kinds:
                dated = self._pin_dates(family, pinned, seen)
                kinds |= {DATE} if dated != pinned else set()
                pinned = dated
            if pinned != text:
                changed.append((path, pinned))
        if changed:
            call.raw, call.body = _edited(call.raw, changed), _with(call.body, changed)
        return tuple(sorted(kinds))

    def _pin_dates(self, family: str | None, text: str, seen: dict[str, int]) -> str:
        """``seen``: how often each shape came up to here in this prompt."""
        if _DATE.search(text) is None:
            return text
        around = "" if family is not None else f"{xxhash.xxh3_64_hexdigest(_DATE.sub('', text).encode())} "

        def pinned(line: re.Match[str]) -> str:
            shape = line["label"] + _VARIES.sub(lambda varying: f"<{varying.lastgroup}>", line["value"])
            n = seen[shape] = seen.get(shape, -1) + 1
            return self._pin(family, around + shape, n, self._today(), line.group())

        return _DATE.sub(pinned, text)

    def _pin(self, family: str | None, shape: str, n: int, day: date | None, line: str) -> str:
        """``shape``: the line without what varies. Only lines of one shape stand in for each other."""
        key = (family or "", shape, n)
        known = self._pins.get(key)
        if known is None or known[0] != day:
            known = self._pins[key] = day, line
        self._pins.move_to_end(key)
        if len(self._pins) > MAX_PINS:
            self._pins.popitem(last=False)
        return known[1]


def _system_texts(body: dict[str, Any]) -> Iterator[tuple[_Path, str]]:
    """The texts of the system prompt, in their order, and where they are."""
    for field in ("system", "instructions"):
        yield from _texts((field,), body.get(field))
    field = "input" if "input" in body else "messages"
    messages = body.get(field)
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            return
        yield from _texts((field, i, "content"), message.get("content"))


def _texts(path: _Path, content: Any) -> Iterator[tuple[_Path, str]]:
    if isinstance(content, str):
        yield path, content
    elif isinstance(content, list):
        for i, part in enumerate(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield (*path, i, "text"), part["text"]


def _edited(raw: bytes, changed: list[tuple[_Path, str]]) -> bytes:
    spans = [(*value_at(raw, path), orjson.dumps(text)) for path, text in changed]
    for start, end, text in sorted(spans, reverse=True):
        raw = raw[:start] + text + raw[end:]
    return raw


def _with(body: dict[str, Any], changed: list[tuple[_Path, str]]) -> dict[str, Any]:
    """A copy with these texts; what is not on the way to them is shared."""
    for path, text in changed:
        body = _set(body, path, text)
    return body


def _set(value: Any, path: _Path, text: str) -> Any:
    if not path:
        return text
    copied = value.copy()
    copied[path[0]] = _set(value[path[0]], path[1:], text)
    return copied
