"""Which conversations were compared with the pools before, so that the engine need not render them again. Pure.

A rendering is skipped where the result is known to be the same as far as it matters:

    1. The very same body, apart from fields that only say how to decode, matched pool X for P tokens.
    2. A conversation that begins with the messages a pool was made of (and has the same tools and everything else that
       can change rendering) starts with all of its tokens: the pool was cut where continuations of several kinds part.
    3. A conversation of n messages matched X for P tokens, and left it before its end. One that begins with the same n
       messages matches X for P tokens too, if more messages do not change how the first n are rendered. Templates do
       that: reasoning is dropped once another question follows, instructions move to the last question. So it must
       have been seen that growing in this way keeps what was there: ``Conversation.growth`` tells the ways apart, and
       each one is compared once, token for token by its hash, when a conversation that grew so is rendered anyway. One
       that ever failed is not trusted again. P has to lie ``MARGIN_TOKENS`` before the end of the shorter rendering,
       where the two may part.

What comes out of 2 and 3 goes to the engine as an upper limit, and the engine compares tokens itself: a template that
looks at something nobody thought of (the date, too) costs time, never an answer. What turned out to be wrong there is
forgotten (``doubt``), so that it costs it once.

What was compared with one certain pool stays true as long as that pool exists. What was found to be the deepest match
is only good for the version of the tree it was found in. All of it belongs to one start of the engine, because the
next one may have another template.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import xxhash

from polykv_proxy.ids import PoolId
from polykv_proxy.tree.prefix import Tokens, hash_tokens

Key = TypeVar("Key")
Value = TypeVar("Value")

MARGIN_TOKENS = 64
CUE_TOKENS = 16
"""A rendering ends with at most so many tokens (the cue to answer) that are gone when another message follows."""

MAX_ENTRIES = 4096

# Fields that say how to decode and answer, not what the prompt is. Everything else counts as part of the prompt.
_DECODING = (
    "stream stream_options max_tokens max_completion_tokens max_output_tokens n_predict n n_cmpl temperature "
    "top_p top_k min_p typical_p seed stop stop_sequences user metadata logprobs top_logprobs n_probs logit_bias "
    "presence_penalty frequency_penalty repeat_penalty repeat_last_n mirostat mirostat_tau mirostat_eta samplers "
    "id_slot cache_prompt timings_per_token return_tokens return_progress store service_tier safety_identifier "
    "prompt_cache_key ignore_eos t_max_predict_ms n_keep n_indent dry_multiplier dry_base dry_allowed_length "
    "xtc_probability xtc_threshold model"
)
_NOT_RENDERED = frozenset(_DECODING.split(" "))

_MESSAGES_OF = {
    "/chat/completions": "messages",
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
_KIND_OF = {"/chat/completions": "chat", "/v1/chat/completions": "chat"}

# What templates look for in the text of messages, to tell reasoning and tool results from answers and questions.
_MARKS = (b"think>", b"reasoning>", b"tool_response>", b"<|", b"[TOOL")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A body, as far as it says what the prompt is.

    ``whole``   hash of all of it
    ``chain``   hashes of its beginnings: element k covers the first k + 1 messages and all that comes before them
    ``shapes``  what a template can tell messages apart by, without their words
    ``front``   hash of all but the messages
    The lists are empty when the body is no list of messages.
    """

    whole: int
    front: int = 0
    chain: tuple[int, ...] = ()
    shapes: tuple[Hashable, ...] = ()

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any]) -> "Conversation":
        kind = _KIND_OF.get(path, path).encode()
        key = _MESSAGES_OF.get(path)
        messages = body.get(key) if key is not None else None
        if key is None or not isinstance(messages, list) or not messages:
            return cls(xxhash.xxh3_128(kind + b"=" + _front(body, None)).intdigest())
        digest = xxhash.xxh3_128(kind)
        digest.update(_front(body, key))
        front = digest.intdigest()
        chain, shapes = [], []
        for message in messages:
            raw = _canonical(message)
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
            chain.append(digest.intdigest())
            shapes.append(_shape(message, raw))
        return cls(~chain[-1], front, tuple(chain), tuple(shapes))

    def growth(self, n: int) -> Hashable:
        """In which way it grew from its first n messages: what kinds there were, what kinds came, the last ones."""
        old, new = self.shapes[:n], self.shapes[n:]
        return self.front, frozenset(old), old[-1], frozenset(new), new[-1]


def _shape(message: Any, raw: bytes) -> Hashable:
    if not isinstance(message, dict):
        return type(message).__name__
    content = message.get("content")
    kinds: Hashable = type(content).__name__
    if isinstance(content, list):
        kinds = frozenset(str(part.get("type")) if isinstance(part, dict) else "" for part in content)
    fields = frozenset(key for key, value in message.items() if value not in (None, "", [], {}))
    return str(message.get("role")), str(message.get("type")), fields, kinds, tuple(mark in raw for mark in _MARKS)


def _front(body: Mapping[str, Any], without: str | None) -> bytes:
    """All that can change the prompt. The order of keys inside stays: templates print tools as they come."""
    return _canonical([(k, body[k]) for k in sorted(body) if k != without and k not in _NOT_RENDERED])


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


@dataclass(frozen=True, slots=True)
class Seen:
    """``pool_id`` None: matches no pool. ``exact``: of this very body, not of a beginning of it.

    ``whole_n_tokens``: tokens of the prompt that was rendered, None when not known. ``for_all``: true of everything
    that begins so, however it goes on.
    """

    pool_id: PoolId | None
    n_tokens: int
    version: int
    exact: bool = False
    whole_n_tokens: int | None = None
    for_all: bool = False


@dataclass(frozen=True, slots=True)
class _Stem:
    """A rendering without its cue."""

    n_tokens: int
    tokens_hash: int


class SeenBook:
    """A bounded memory, oldest use out first. ``target``: the pool that was compared with; None = the deepest match."""

    def __init__(self, max_entries: int = MAX_ENTRIES):
        self._max = max_entries
        self._epoch: str | None = None
        self._entries: OrderedDict[tuple[int, PoolId | None], Seen] = OrderedDict()
        self._stems: OrderedDict[int, _Stem] = OrderedDict()
        self._keeps: OrderedDict[Hashable, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, epoch: str | None) -> None:
        """Start anew if the engine did."""
        if epoch != self._epoch:
            self._epoch = epoch
            for book in (self._entries, self._stems, self._keeps):
                book.clear()

    def remember(self, key: int, target: PoolId | None, seen: Seen) -> None:
        self._put(self._entries, (key, target), seen)

    def rendered(self, chat: Conversation, tokens: Tokens) -> None:
        """Learn from a rendering whether it still begins as the last one of its beginning did."""
        for n in range(len(chat.chain) - 1, 0, -1):
            stem = self._stems.get(chat.chain[n - 1])
            if stem is not None:
                growth = chat.growth(n)
                kept = len(tokens) >= stem.n_tokens and hash_tokens(tokens[: stem.n_tokens]) == stem.tokens_hash
                self._put(self._keeps, growth, kept and self._keeps.get(growth, True))
                break
        n_stem = len(tokens) - CUE_TOKENS
        if chat.chain and n_stem > 0:
            self._put(self._stems, chat.chain[-1], _Stem(n_stem, hash_tokens(tokens[:n_stem])))

    def doubt(self, seen: Seen) -> None:
        """Forget what the engine found to be otherwise."""
        for key in [key for key, known in self._entries.items() if known is seen]:
            del self._entries[key]

    def find(self, chat: Conversation, target: PoolId | None, version: int) -> Seen | None:
        """What is known of the body, else of the longest beginning that tells something about it."""
        seen = self._good(chat.whole, target, version)
        for n in range(len(chat.chain), 0, -1):
            if seen is not None:
                break
            seen = self._good(chat.chain[n - 1], target, version)
            if seen is not None and n < len(chat.chain) and not seen.for_all and not self._keeps.get(chat.growth(n)):
                seen = None
        return seen

    def _good(self, key: int, target: PoolId | None, version: int) -> Seen | None:
        seen = self._entries.get((key, target))
        if seen is None:
            return None
        if target is None and seen.version != version:
            del self._entries[key, target]
            return None
        self._entries.move_to_end((key, target))
        return seen

    def _put(self, book: OrderedDict[Key, Value], key: Key, value: Value) -> None:
        book[key] = value
        book.move_to_end(key)
        if len(book) > self._max:
            book.popitem(last=False)
