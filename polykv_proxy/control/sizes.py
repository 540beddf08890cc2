"""How many cells a request may take, as far as its body says. Pure.

A guess for who has not been rendered: seldom too few, so that a cache that has room by it needs no exact count.
"""

from collections.abc import Mapping
from typing import Any

import orjson

ANSWER_CELLS = 256
"""Room for so much of an answer is made if unused pools can give it; nobody waits for it."""

_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens")
TEMPLATE_TOKENS = 256
"""What a chat template adds to a body's text."""

MEDIUM_TOKENS = 1024
"""What a picture takes in most models, at most; a few take more for large ones."""

_A_TOKEN_EACH = bytes([*b"0123456789", *range(0x80, 0x100)])
"""Digits and bytes beyond ASCII may each be a token. Of other text it takes at least two bytes to make one."""


def guess_tokens(body: Mapping[str, Any]) -> int:
    """Tokens of all prompts of a body. Token arrays are counted."""
    n_tokens, prompt = 0, body.get("prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        n_tokens, body = len(prompt), {key: value for key, value in body.items() if key != "prompt"}
    raw = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    n_text = len(raw.translate(None, _A_TOKEN_EACH))
    return n_tokens + n_text // 2 + (len(raw) - n_text) + TEMPLATE_TOKENS


def guess_media_tokens(body: Mapping[str, Any]) -> int:
    """The same for a body of the completion routes whose prompts carry media beside their text."""
    prompt, n_media, texts = body.get("prompt"), 0, []
    for part in prompt if isinstance(prompt, list) else [prompt]:
        media = part.get("multimodal_data") if isinstance(part, dict) else None
        n_media += len(media) if isinstance(media, list) else 0
        texts.append(part.get("prompt_string") if isinstance(part, dict) else part)
    return guess_tokens({**body, "prompt": texts}) + MEDIUM_TOKENS * n_media


def n_choices(body: Mapping[str, Any]) -> int:
    n = body.get("n_cmpl", body.get("n"))
    return n if isinstance(n, int) and n > 1 else 1


def max_tokens(body: Mapping[str, Any]) -> int | None:
    """How long its answer may get; None when it does not say."""
    limits = (body.get(name) for name in _LIMITS)
    return min((n for n in limits if isinstance(n, int) and n >= 0), default=None)


def answer_cells(body: Mapping[str, Any]) -> int:
    """How much of its answer is worth making room for."""
    n_most = max_tokens(body)
    return ANSWER_CELLS if n_most is None else min(ANSWER_CELLS, n_most)
