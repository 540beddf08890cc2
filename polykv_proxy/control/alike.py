"""Which recent prompts begin alike, told from their bodies before anybody has rendered them. Pure.

Two prompts can only share ``min_tokens`` tokens if their bodies share some beginning: that of their tools, or that of
system prompt and messages. So a body is filed under its tools and under beginnings of its text, each twice as long as
the one before, and only what meets another there is rendered and compared token by token. A prompt that is like
nobody's costs a few hashes.

Clients that send a ``prompt_cache_key`` say which requests belong together. Those are compared first, also where their
bodies do not begin alike: another order of tools, or parts instead of one text, may be the same tokens. It is a hint:
other keys keep nobody apart, and the same key makes nobody share what is not the same.

Two dialects write the same prompt with other bytes. Once a prompt was rendered it is filed under beginnings of its
tokens as well, and is found by whoever is rendered, too.

What was rendered in vain is remembered by the bytes that were alike (``settle``): the hundredth agent with one system
prompt is not compared again with the other ninety-nine.

Units:  bytes where nothing is said; ``n_tokens`` in tokens
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import xxhash

from polykv_proxy.ids import SessionId
from polykv_proxy.tree.prefix import Tokens
from polykv_proxy.turns import Session, Turn

MAX_PROMPTS = 256
MAX_BYTES = 64 << 20
"""Bodies are kept until they are rendered, prompts as tokens after that; the oldest go first."""

MAX_TEXT = 256 << 10
"""Beginnings are compared so far; what is alike to there counts as alike."""

MAX_ALIKE = 8
"""So many others are looked at: those that share the longest of these beginnings, the last ones first."""
MAX_FAMILY = MAX_ALIKE // 2
"""So many of them because they have the same key."""

MAX_SETTLED = 4096
GRAIN = 256
"""Beginnings that end within so many bytes are settled together."""

_SORTED = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


@dataclass(slots=True, eq=False)
class Prompt:
    """One request's. ``tokens``: None until it was rendered; then ``body`` is empty. ``is_lost``: it has ended, and
    what it left in the engine was looked for in vain.
    """

    number: int
    turn: Turn
    path: str
    body: Mapping[str, Any]
    n_bytes: int
    text: bytes
    tools_hash: int
    n_tools: int
    family: int | None = None
    keys: tuple[int, ...] = ()
    tokens: Tokens | None = None
    is_lost: bool = False
    shared: dict[int, int] = field(default_factory=dict)
    """Bytes in common with others, by their numbers, as far as that was asked."""

    @property
    def session(self) -> Session:
        return self.turn.session

    @property
    def runs(self) -> bool:
        """Its request has not ended."""
        return self.turn.turn_id in self.session.turns

    @property
    def weight(self) -> int:
        """Of memory, about."""
        return len(self.text) + (self.n_bytes if self.tokens is None else 4 * len(self.tokens))


@dataclass(slots=True)
class PromptBook:
    """``min_tokens``: beginnings that are shorter are nobody's business. ``to_the_byte``: beginnings that end in
    about the same place are not settled together.
    """

    min_tokens: int
    to_the_byte: Callable[[], bool] = lambda: False
    _prompts: OrderedDict[int, Prompt] = field(default_factory=OrderedDict)
    _by_beginning: dict[int, dict[int, Prompt]] = field(default_factory=lambda: defaultdict(dict))
    _of_session: dict[SessionId, dict[int, Prompt]] = field(default_factory=lambda: defaultdict(dict))
    _settled: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)
    _n_bytes: int = 0
    _n_entered: int = 0

    @property
    def min_bytes(self) -> int:
        """So much two bodies share whose prompts share ``min_tokens``: a token of text has a byte or more, most have
        four. Only a template that says more by itself than the bodies do would go unnoticed.
        """
        return max(1, self.min_tokens)

    def __len__(self) -> int:
        return len(self._prompts)

    def enter(self, turn: Turn, path: str, body: Mapping[str, Any], n_bytes: int) -> Prompt | None:
        """File a request's prompt in place of what its session said before; None: it is too short to matter."""
        text, tools = _beginning(path, body)
        if len(text) < self.min_bytes and len(tools) < self.min_bytes:
            return None
        for prompt in list(self._of_session.get(turn.session.session_id, {}).values()):
            if not prompt.runs or prompt.turn is turn:
                self.leave_out(prompt)
        self._n_entered += 1
        tools_hash = xxhash.xxh3_64_intdigest(tools)
        prompt = Prompt(self._n_entered, turn, path, body, n_bytes, text, tools_hash, len(tools), _family(body))
        prompt.keys = tuple(self._keys(prompt))
        self._prompts[prompt.number] = prompt
        self._of_session[turn.session.session_id][prompt.number] = prompt
        for key in prompt.keys:
            self._by_beginning[key][prompt.number] = prompt
        self._n_bytes += prompt.weight
        while len(self._prompts) > MAX_PROMPTS or (self._n_bytes > MAX_BYTES and len(self._prompts) > 1):
            self.leave_out(next(iter(self._prompts.values())))
        return prompt

    def rendered(self, prompt: Prompt, tokens: Tokens) -> None:
        """From here on the tokens tell what the body did."""
        is_filed = prompt.number in self._prompts
        before = prompt.weight
        prompt.tokens, prompt.body = tokens, {}
        if is_filed:
            self._n_bytes += prompt.weight - before
            token_keys = _keys_of(b"tokens", memoryview(tokens), self.min_tokens)
            for key in token_keys:
                self._by_beginning[key][prompt.number] = prompt
            n_first = 0 if prompt.family is None else 1
            prompt.keys = (*prompt.keys[:n_first], *token_keys, *prompt.keys[n_first:])

    def find(self, turn: Turn) -> Prompt | None:
        """What was entered for this turn."""
        prompts = self._of_session.get(turn.session.session_id, {})
        return next((prompt for prompt in prompts.values() if prompt.turn is turn), None)

    def alike(self, prompt: Prompt) -> list[Prompt]:
        """Others' that may begin alike, what shares most bytes first. A session's own count only while both run."""
        found: dict[int, Prompt] = {}
        for key in prompt.keys:
            most = MAX_FAMILY if key == prompt.family else MAX_ALIKE
            for number, other in reversed(self._by_beginning.get(key, {}).items()):
                if len(found) >= most:
                    break
                is_another = other.session is not prompt.session or (other.runs and prompt.runs)
                if other is not prompt and is_another:
                    found[number] = other
        return sorted(found.values(), key=lambda other: -alike_bytes(prompt, other))

    def leave_out(self, prompt: Prompt) -> None:
        """It is of no use any more."""
        if self._prompts.pop(prompt.number, None) is None:
            return
        self._n_bytes -= prompt.weight
        _discard(self._of_session, prompt.session.session_id, prompt.number)
        for key in prompt.keys:
            _discard(self._by_beginning, key, prompt.number)

    # What was compared before ---------------------------------------------------------------------------------------

    def is_settled(self, prompt: Prompt, others: Sequence[Prompt], version: int) -> bool:
        """Prompts that begin as this one and these ``others`` were compared, and no pool would have been worth it.

        Not those that only their tokens tell: to compare them takes no rendering.
        """
        if any(self._is_told_by_tokens(prompt, other) for other in others):
            return False
        return all(self._settled.get(key) == version for key in self._settled_keys(prompt, others))

    def settle(self, prompt: Prompt, others: Sequence[Prompt], version: int) -> None:
        """``version``: of what there was to attach to; when something of it is gone all is open again."""
        for key in self._settled_keys(prompt, others):
            self._settled[key] = version
            self._settled.move_to_end(key)
            if len(self._settled) > MAX_SETTLED:
                self._settled.popitem(last=False)

    def _is_told_by_tokens(self, prompt: Prompt, other: Prompt) -> bool:
        same_family = prompt.family is not None and prompt.family == other.family
        return not same_family and alike_bytes(prompt, other) < self.min_bytes

    def _settled_keys(self, prompt: Prompt, others: Sequence[Prompt]) -> list[tuple[int, int]]:
        """For the bytes that all who begin so share; and for the family, of which some may begin with other bytes."""
        keys, n_alike = [], [alike_bytes(prompt, other) for other in others]
        if (most := max(n_alike, default=0)) >= self.min_bytes:
            n_text = max(0, most - prompt.n_tools)
            grain = 1 if self.to_the_byte() else GRAIN
            keys.append((prompt.tools_hash, xxhash.xxh3_64_intdigest(prompt.text[: n_text // grain * grain])))
        if prompt.family is not None and min(n_alike, default=0) < self.min_bytes:
            keys.append((prompt.family, xxhash.xxh3_64_intdigest(prompt.text[: self.min_bytes])))
        return keys

    def _keys(self, prompt: Prompt) -> list[int]:
        """The family, then the longest beginning first."""
        keys = _keys_of(b"", memoryview(prompt.text), self.min_bytes)
        if prompt.n_tools >= self.min_bytes:
            keys.append(prompt.tools_hash)
        if prompt.family is not None:
            keys.insert(0, prompt.family)
        return keys


def _keys_of(kind: bytes, said: "memoryview[Any]", shortest: int) -> list[int]:
    """Of beginnings, each twice as long as the one before, the longest first."""
    keys, n, n_hashed = [], shortest, 0
    hasher = xxhash.xxh3_64(kind)
    while n <= len(said):
        hasher.update(said[n_hashed:n])
        keys.append(hasher.intdigest())
        n_hashed, n = n, n * 2
    return keys[::-1]


def alike_bytes(one: Prompt, other: Prompt) -> int:
    """How many bytes two bodies share at their beginning: the tools when they are the same, and text."""
    n_bytes = one.shared.get(other.number)
    if n_bytes is None:
        n_tools = one.n_tools if one.tools_hash == other.tools_hash else 0
        n_bytes = one.shared[other.number] = n_tools + _common(one.text, other.text)
    return n_bytes


def _family(body: Mapping[str, Any]) -> int | None:
    key = body.get("prompt_cache_key")
    if not isinstance(key, str) or not key:
        return None
    return xxhash.xxh3_64_intdigest(f"key {key}".encode("utf-8", "surrogatepass"))


def _beginning(path: str, body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """(text, tools), as bytes that are the same when they are."""
    tools = body.get("tools")
    tools_raw = orjson.dumps(tools, option=_SORTED) if tools else b""
    if "prompt" in body:
        prompt = body["prompt"]
        raw = prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else orjson.dumps(prompt)
        return raw[:MAX_TEXT], tools_raw
    front = [body[key] for key in ("system", "instructions") if body.get(key)]
    messages = body.get("input") if path.endswith("/responses") else body.get("messages")
    if isinstance(messages, str):
        messages = [messages]
    said = [*front, *messages] if isinstance(messages, list) else front
    return (orjson.dumps(said, option=_SORTED)[1:MAX_TEXT] if said else b""), tools_raw


def _common(one: bytes, other: bytes) -> int:
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


def _discard(book: Any, key: Any, number: int) -> None:
    filed = book.get(key)
    if filed is not None:
        filed.pop(number, None)
        if not filed:
            del book[key]
