"""What a reply says about itself, read from the shapes of the four dialects.

Pure. ``timings`` are exact and win; ``usage`` fills in what is missing. Absent means unknown, never 0, except that the
engine leaves ``pool_n`` out of ``timings`` when nothing is shared.
"""

from collections.abc import Mapping
from typing import Any

from polykv_proxy.control.sizes import max_tokens
from polykv_proxy.ids import SlotId
from polykv_proxy.turns import Usage
from polykv_proxy.upstream import Stats

_OTHER_LIMITS = ("t_max_predict_ms", "n_indent")


def add_timings(usage: Usage, timings: Any) -> None:
    if not isinstance(timings, dict):
        return
    usage.cache_n = _count(timings.get("cache_n"), usage.cache_n)
    usage.prompt_n = _count(timings.get("prompt_n"), usage.prompt_n)
    usage.predicted_n = _count(timings.get("predicted_n"), usage.predicted_n)
    usage.pool_n = _count(timings.get("pool_n"), 0)
    rate = timings.get("predicted_per_second")
    if isinstance(rate, int | float) and (usage.predicted_n or 0) > 1:
        usage.tps = float(rate)


def add_openai(usage: Usage, said: Any) -> None:
    """``usage`` of chat and completions (prompt_tokens, …) or of Responses (input_tokens, …): what timings left out."""
    if not isinstance(said, dict) or usage.ctx_used is not None:
        return
    n_prompt = _count(said.get("prompt_tokens", said.get("input_tokens")), None)
    details = said.get("prompt_tokens_details", said.get("input_tokens_details"))
    cached = _count(details.get("cached_tokens"), None) if isinstance(details, dict) else None
    if usage.cache_n is None and cached is not None:
        usage.cache_n = cached
        usage.prompt_n = n_prompt - cached if n_prompt is not None else None
    if usage.predicted_n is None:
        usage.predicted_n = _count(said.get("completion_tokens", said.get("output_tokens")), None)


def add_anthropic(usage: Usage, said: Any) -> None:
    """The prompt comes in ``message_start``, the final count of answered tokens in ``message_delta``."""
    if not isinstance(said, dict):
        return
    usage.cache_n = _count(said.get("cache_read_input_tokens"), usage.cache_n)
    usage.prompt_n = _count(said.get("input_tokens"), usage.prompt_n)
    usage.predicted_n = _count(said.get("output_tokens"), usage.predicted_n)


def add_end(usage: Usage, said: Any) -> None:
    """How a choice, a message or the object of a native reply says that it ended."""
    if isinstance(said, dict):
        ended = said.get("finish_reason") == "length" or said.get("stop_reason") == "max_tokens"
        usage.at_limit = usage.at_limit or ended or said.get("truncated") is True


def is_cut(usage: Usage, body: Mapping[str, Any], ctx_total: int | None) -> bool:
    """Whether a full cache ended a reply of one choice: a limit did, neither that of its body nor its context.

    False when it cannot be told.
    """
    if not usage.at_limit or usage.predicted_n is None or usage.ctx_used is None:
        return False
    n_most = max_tokens(body)
    if n_most is None:
        return False
    if ctx_total is None or any(body.get(name) for name in _OTHER_LIMITS):
        return False
    # The last token is told and takes no cell; where slots share, an answer ends one before the context does.
    return usage.predicted_n < n_most and usage.ctx_used < ctx_total - 1


def add_whole(usage: Usage, reply: Any) -> None:
    """The body of a reply that was not streamed; of several results the last."""
    if isinstance(reply, list) and reply:
        reply = reply[-1]
    if not isinstance(reply, dict):
        return
    add_timings(usage, reply.get("timings"))
    for ended in [reply, *choices] if isinstance(choices := reply.get("choices"), list) else [reply]:
        add_end(usage, ended)
    if reply.get("type") == "message":
        add_anthropic(usage, reply.get("usage"))
    else:
        add_openai(usage, reply.get("usage"))


def rate_in(stats: Stats, slot_id: SlotId, usage: Usage) -> float | None:
    """The rate of the reply that just came out of a slot, which is still kept for it; None when that is not certain."""
    slot = next((s for s in stats.slots if s.id == slot_id), None)
    if slot is None or not slot.tps_ewma or usage.predicted_n is None or usage.predicted_n < 2:
        return None
    n_prompt = (usage.cache_n or 0) + (usage.prompt_n or 0)
    if not slot.idle:  # the engine answers a moment before it closes the task
        return slot.tps_ewma if slot.n_prompt == n_prompt else None
    done = next((task for task in reversed(stats.finished) if task.id_slot == slot_id), None)
    if done is None or (done.n_prompt, done.n_decoded) != (n_prompt, usage.predicted_n):
        return None
    return slot.tps_ewma


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
