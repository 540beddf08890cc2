"""Which conversations were compared with the pools before, so that the engine need not render them again. Pure.

A rendered chat of n messages matched pool X for P tokens. Another chat that begins with the same n messages, the same
tools and the same of everything else that can change rendering, matches X for P tokens too, if the two part behind P:
what they have in common must reach beyond it. A rendering's last few tokens (the cue to answer) may not stay, so P has
to lie ``MARGIN_TOKENS`` before the end. And of a pool made from k messages it is known that every chat starting with
them starts with all its tokens; that decides alone while no deeper pool could match better.

What comes out is an upper estimate: a template may render old messages differently once new ones follow. That costs
time, never correctness, because the engine compares tokens itself.

What was compared with one certain pool stays true as long as that pool exists. What was found to be the deepest match
is only good for the version of the tree it was found in.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from polykv_proxy.ids import PoolId

MARGIN_TOKENS = 64
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


@dataclass(frozen=True, slots=True)
class Seen:
    """``pool_id`` None: matches no pool. ``exact``: of this very body, not of a beginning of it.

    ``whole_n_tokens``: tokens of the prompt that was rendered, None when not known.
    """

    pool_id: PoolId | None
    n_tokens: int
    version: int
    exact: bool = False
    whole_n_tokens: int | None = None


def chain_of(path: str, body: Mapping[str, Any]) -> list[int]:
    """Hashes of a chat's beginnings: element k covers the first k + 1 messages and all that comes before them.

    Empty when the body is no list of messages.
    """
    key = _MESSAGES_OF.get(path)
    messages = body.get(key) if key is not None else None
    if not isinstance(messages, list):
        return []
    digest = xxhash.xxh3_128(_KIND_OF.get(path, path).encode())
    digest.update(_front(body, key))
    chain = []
    for message in messages:
        raw = _canonical(message)
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
        chain.append(digest.intdigest())
    return chain


def whole_key(path: str, body: Mapping[str, Any]) -> int:
    """Hash of a body as far as it says what the prompt is."""
    digest = xxhash.xxh3_128(_KIND_OF.get(path, path).encode() + b"=")
    digest.update(_front(body, None))
    return digest.intdigest()


def _front(body: Mapping[str, Any], without: str | None) -> bytes:
    """All that can change the prompt. The order of keys inside stays: templates print tools as they come."""
    return _canonical([(k, body[k]) for k in sorted(body) if k != without and k not in _NOT_RENDERED])


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


class SeenBook:
    """A bounded memory, oldest use out first. ``target``: the pool that was compared with; None = the deepest match."""

    def __init__(self, max_entries: int = MAX_ENTRIES):
        self._max = max_entries
        self._entries: OrderedDict[tuple[int, PoolId | None], Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, key: int, target: PoolId | None, seen: Seen) -> None:
        self._entries[key, target] = seen
        self._entries.move_to_end((key, target))
        if len(self._entries) > self._max:
            self._entries.popitem(last=False)

    def find(self, keys: list[int], target: PoolId | None, version: int) -> Seen | None:
        """The entry of the longest beginning that is still good. ``keys``: shortest first."""
        for key in reversed(keys):
            seen = self._entries.get((key, target))
            if seen is None:
                continue
            if target is None and seen.version != version:
                del self._entries[key, target]
                continue
            self._entries.move_to_end((key, target))
            return seen
        return None
