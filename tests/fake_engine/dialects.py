"""The bytes llama-server answers with, per dialect, streamed and not (shapes of server-task.cpp).

A ``Turn`` is one generated choice. ``whole`` makes the body of a reply; ``piece``, ``last`` and ``done`` the parts of a
stream; ``failed`` what an error in mid-stream looks like.
"""

import json
import time
from dataclasses import dataclass, field
from typing import Any

from tests.fake_engine.toy import CHAT_PATHS, COMPLETION_PATHS

MODEL = "toy"


def dump(obj: Any) -> bytes:
    return json.dumps(obj, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass
class Turn:
    id_slot: int
    n_prompt: int
    n_cached: int
    pool_n: int = 0
    index: int = 0
    pieces: list[str] = field(default_factory=list)
    t_start: float = field(default_factory=time.monotonic)
    t_first: float = 0.0
    stopped: str = "limit"
    truncated: bool = False
    reply_id: str = "toy-1"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def timings(self) -> dict[str, Any]:
        now = time.monotonic()
        prompt_s = max((self.t_first or now) - self.t_start, 1e-6)
        gen_s = max(now - (self.t_first or now), 1e-6)
        n, p = len(self.pieces), self.n_prompt - self.n_cached
        out = {
            "cache_n": self.n_cached,
            "prompt_n": p,
            "prompt_ms": prompt_s * 1e3,
            "prompt_per_token_ms": prompt_s * 1e3 / max(p, 1),
            "prompt_per_second": p / prompt_s,
            "predicted_n": n,
            "predicted_ms": gen_s * 1e3,
            "predicted_per_token_ms": gen_s * 1e3 / max(n, 1),
            "predicted_per_second": n / gen_s,
        }
        if self.pool_n:
            out["pool_n"] = self.pool_n
        return out

    @property
    def usage(self) -> dict[str, Any]:
        n = len(self.pieces)
        return {
            "completion_tokens": n,
            "prompt_tokens": self.n_prompt,
            "total_tokens": n + self.n_prompt,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
        }

    @property
    def finish(self) -> str:
        return "length" if self.stopped == "limit" else "stop"


class Dialect:
    """llama-server's own ``/completion``."""

    done = b""

    def __init__(self, body: dict[str, Any]):
        self.body = body

    def whole(self, turns: list[Turn]) -> Any:
        out = [self._final(t, t.text) for t in turns]
        return out[0] if len(out) == 1 else out

    def _final(self, t: Turn, content: str) -> dict[str, Any]:
        return {
            "index": t.index,
            "content": content,
            "tokens": [],
            "id_slot": t.id_slot,
            "stop": True,
            "model": MODEL,
            "tokens_predicted": len(t.pieces),
            "tokens_evaluated": t.n_prompt,
            "generation_settings": {},
            "truncated": t.truncated,
            "stop_type": t.stopped,
            "stopping_word": "",
            "tokens_cached": t.n_prompt + len(t.pieces) - 1,
            "timings": t.timings,
        }

    def piece(self, t: Turn, text: str) -> list[bytes]:
        return [
            _data(
                {
                    "index": t.index,
                    "content": text,
                    "tokens": [],
                    "stop": False,
                    "id_slot": t.id_slot,
                    "tokens_predicted": len(t.pieces),
                    "tokens_evaluated": t.n_prompt,
                }
            )
        ]

    def last(self, t: Turn) -> list[bytes]:
        return [_data(self._final(t, ""))]

    def failed(self, error: dict[str, Any]) -> bytes:
        return _data({"error": error})


class OaiCompletion(Dialect):
    done = b"data: [DONE]\n\n"

    def _object(self, t: Turn, text: str, finish: str | None) -> dict[str, Any]:
        return {
            "choices": [{"text": text, "index": t.index, "logprobs": None, "finish_reason": finish}],
            "created": int(time.time()),
            "model": MODEL,
            "system_fingerprint": "toy",
            "object": "text_completion",
            "id": t.reply_id,
        }

    def whole(self, turns: list[Turn]) -> Any:
        out = [self._object(t, t.text, t.finish) | {"usage": t.usage, "timings": t.timings} for t in turns]
        for other in out[1:]:
            out[0]["choices"] += other["choices"]
        return out[0]

    def piece(self, t: Turn, text: str) -> list[bytes]:
        return [_data(self._object(t, text, None))]

    def last(self, t: Turn) -> list[bytes]:
        return [_data(self._object(t, "", t.finish) | {"usage": t.usage, "timings": t.timings})]


class OaiChat(Dialect):
    done = b"data: [DONE]\n\n"

    def whole(self, turns: list[Turn]) -> Any:
        out = [
            {
                "choices": [
                    {
                        "finish_reason": t.finish,
                        "index": t.index,
                        "message": {"role": "assistant", "content": t.text},
                    }
                ],
                "created": int(time.time()),
                "model": MODEL,
                "system_fingerprint": "toy",
                "object": "chat.completion",
                "usage": t.usage,
                "id": t.reply_id,
                "timings": t.timings,
            }
            for t in turns
        ]
        for other in out[1:]:
            out[0]["choices"] += other["choices"]
        return out[0]

    def _chunk(self, t: Turn, delta: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        choices = [] if delta is None else [{"finish_reason": finish, "index": t.index, "delta": delta}]
        return {
            "choices": choices,
            "created": int(time.time()),
            "id": t.reply_id,
            "model": MODEL,
            "system_fingerprint": "toy",
            "object": "chat.completion.chunk",
        }

    def piece(self, t: Turn, text: str) -> list[bytes]:
        out = [_data(self._chunk(t, {"role": "assistant", "content": None}, None))] if len(t.pieces) == 1 else []
        return [*out, _data(self._chunk(t, {"content": text}, None))]

    def last(self, t: Turn) -> list[bytes]:
        deltas = [self._chunk(t, {}, t.finish)]
        if (self.body.get("stream_options") or {}).get("include_usage"):
            deltas.append(self._chunk(t, None, None) | {"usage": t.usage})
        deltas[-1]["timings"] = t.timings
        return [_data(d) for d in deltas]


class Anthropic(Dialect):
    def _stop(self, t: Turn) -> str:
        return "max_tokens" if t.stopped == "limit" else "end_turn"

    def _usage(self, t: Turn) -> dict[str, int]:
        return {"cache_read_input_tokens": t.n_cached, "input_tokens": t.n_prompt - t.n_cached}

    def whole(self, turns: list[Turn]) -> Any:
        t = turns[0]
        return {
            "id": t.reply_id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": t.text}],
            "model": MODEL,
            "stop_reason": self._stop(t),
            "stop_sequence": None,
            "usage": self._usage(t) | {"output_tokens": len(t.pieces)},
        }

    def piece(self, t: Turn, text: str) -> list[bytes]:
        out = []
        if len(t.pieces) == 1:
            message = {
                "id": t.reply_id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": MODEL,
                "stop_reason": None,
                "stop_sequence": None,
                "usage": self._usage(t) | {"output_tokens": 0},
            }
            out.append(_event({"type": "message_start", "message": message}))
            block = {"type": "text", "text": ""}
            out.append(_event({"type": "content_block_start", "index": 0, "content_block": block}))
        delta = {"type": "text_delta", "text": text}
        return [*out, _event({"type": "content_block_delta", "index": 0, "delta": delta})]

    def last(self, t: Turn) -> list[bytes]:
        delta = {"stop_reason": self._stop(t), "stop_sequence": None}
        return [
            _event({"type": "content_block_stop", "index": 0}),
            _event({"type": "message_delta", "delta": delta, "usage": {"output_tokens": len(t.pieces)}}),
            _event({"type": "message_stop"}),
        ]

    def failed(self, error: dict[str, Any]) -> bytes:
        return b"event: error\ndata: " + dump(error) + b"\n\n"


class Responses(Dialect):
    def _response(self, t: Turn) -> dict[str, Any]:
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": t.text}
        n = len(t.pieces)
        return {
            "id": t.reply_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed",
            "model": MODEL,
            "output": [
                {"type": "message", "status": "completed", "id": "msg_1", "content": [part], "role": "assistant"}
            ],
            "usage": {
                "input_tokens": t.n_prompt,
                "output_tokens": n,
                "total_tokens": n + t.n_prompt,
                "input_tokens_details": {"cached_tokens": t.n_cached},
            },
        }

    def whole(self, turns: list[Turn]) -> Any:
        return {"completed_at": int(time.time())} | self._response(turns[0])

    def piece(self, t: Turn, text: str) -> list[bytes]:
        out = []
        if len(t.pieces) == 1:
            begun = {"id": t.reply_id, "object": "response", "status": "in_progress"}
            item = {"content": [], "id": "msg_1", "role": "assistant", "status": "in_progress", "type": "message"}
            part = {"type": "output_text", "text": ""}
            out = [
                _event({"type": "response.created", "response": begun}),
                _event({"type": "response.in_progress", "response": begun}),
                _event({"type": "response.output_item.added", "item": item}),
                _event({"type": "response.content_part.added", "item_id": "msg_1", "part": part}),
            ]
        return [*out, _event({"type": "response.output_text.delta", "item_id": "msg_1", "delta": text})]

    def last(self, t: Turn) -> list[bytes]:
        done = {"type": "response.output_text.done", "item_id": "msg_1", "text": t.text}
        final = {"type": "response.completed", "response": self._response(t), "timings": t.timings}
        return [_event(done), _event(final)]


def dialect(path: str, body: dict[str, Any]) -> Dialect:
    if path in CHAT_PATHS:
        return OaiChat(body)
    if path == "/v1/messages":
        return Anthropic(body)
    if path == "/v1/responses":
        return Responses(body)
    if path in COMPLETION_PATHS and path.startswith("/v1/"):
        return OaiCompletion(body)
    return Dialect(body)


def _data(obj: Any) -> bytes:
    return b"data: " + dump(obj) + b"\n\n"


def _event(obj: dict[str, Any]) -> bytes:
    return b"event: " + obj["type"].encode() + b"\ndata: " + dump(obj) + b"\n\n"
