"""A chat server by rules, over httpx's mock transport: it calls the first tool it is given, fills in any schema, and
says hello else. The replies are shaped as llama-server's behind the proxy.
"""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient
from polykv_proxy.langgraph import ChatPolyKV

URL = "http://toy"
RECEIPT = {
    "pool_id": 3,
    "session_id": "s",
    "prefix_n_tokens": 7,
    "cached_n_tokens": 7,
    "miss_reason": None,
    "session_tps": 12.5,
    "ctx_used": 30,
    "ctx_total": 100,
    "ctx_headroom_tokens": 70,
    "sessions_remaining": 2,
    "hold_ms": 1.5,
}
TIMINGS = {"cache_n": 7, "prompt_n": 3, "predicted_n": 2, "predicted_ms": 0.25}
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 2,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 7},
}


class ToyServer:
    """``bodies``: the chats that came. ``says``, ``thinks``: what it answers. ``answer``: asked first; None: as usual.

    ``cut``: a stream breaks off before its reason. ``often``: timings come with every piece, too.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[httpx.Request] = []
        self.says, self.thinks = ["hello", " world"], ""
        self.receipt: dict[str, Any] = dict(RECEIPT)
        self.answer: Callable[[httpx.Request], httpx.Response | None] = lambda request: None
        self.cut = self.often = False
        self.lock = threading.Lock()

    def model(self, **fields: Any) -> ChatPolyKV:
        transport = httpx.MockTransport(self.handle)
        ours = {
            "http_client": httpx.Client(transport=transport),
            "http_async_client": httpx.AsyncClient(transport=transport),
            "sdk": PolyKVClient(URL, transport=transport),
            "async_sdk": AsyncPolyKVClient(URL, transport=transport),
        }
        return ChatPolyKV(**{"base_url": URL, **ours, **fields})

    def handle(self, request: httpx.Request) -> httpx.Response:
        with self.lock:
            self.requests.append(request)
        answer = self.answer(request)
        if answer is not None:
            return answer
        assert request.url.path == "/v1/chat/completions"
        body = json.loads(request.content)
        with self.lock:
            self.bodies.append(body)
        text, calls = self._said(body)
        finish = "tool_calls" if calls else "stop"
        if not body.get("stream"):
            message: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
            if self.thinks:
                message["reasoning_content"] = self.thinks
            if calls:
                message["tool_calls"] = calls
            choice = {"index": 0, "message": message, "finish_reason": finish}
            whole = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
            extra = {"usage": USAGE, "timings": TIMINGS, "polykv": self.receipt}
            return httpx.Response(200, json={**whole, "choices": [choice], **extra})
        return httpx.Response(200, content=b"".join(self._events(body, text, calls, finish)))

    def _events(self, body: dict[str, Any], text: list[str], calls: list[Any], finish: str) -> Iterator[bytes]:
        base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
        deltas += [{"reasoning_content": self.thinks}] if self.thinks else []
        deltas += [{"content": piece} for piece in text]
        for i, call in enumerate(calls):
            arguments = call["function"]["arguments"]
            first = {"index": i, **call, "function": {"name": call["function"]["name"], "arguments": ""}}
            deltas.append({"tool_calls": [first]})
            half = len(arguments) // 2
            for part in (arguments[:half], arguments[half:]):
                deltas.append({"tool_calls": [{"index": i, "function": {"arguments": part}}]})
        for n, delta in enumerate(deltas):
            extra = {"timings": {**TIMINGS, "predicted_n": n, "predicted_ms": n / 8}} if self.often else {}
            yield _event({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **extra})
        if self.cut:
            return
        last = {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
        extra = {"timings": TIMINGS, "polykv": self.receipt}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield _event(last)
            yield _event({**base, "choices": [], "usage": USAGE, **extra})
        else:
            yield _event({**last, **extra})
        yield b"data: [DONE]\n\n"

    def _said(self, body: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
        heard = body["messages"][-1]
        tools, choice = body.get("tools") or [], body.get("tool_choice", "auto")
        if tools and choice != "none" and (heard["role"] != "tool" or choice == "required"):
            function = tools[0]["function"]
            arguments = json.dumps(filled(function.get("parameters") or {}, str(heard["content"])), ensure_ascii=False)
            return [], [
                {"id": "call_1", "type": "function", "function": {"name": function["name"], "arguments": arguments}}
            ]
        wanted = body.get("response_format")
        if wanted is not None and wanted["type"] == "json_schema":
            schema = wanted["json_schema"]["schema"]
        elif wanted is not None:
            schema = {"type": "object", "properties": {"setup": {"type": "string"}, "punchline": {"type": "string"}}}
        else:
            return self.says, []
        text = json.dumps(filled(schema, str(heard["content"])))
        return [text[:5], text[5:]], []


def filled(schema: dict[str, Any], heard: str) -> Any:
    """Something that fits a schema."""
    kind = schema.get("type", "string")
    if kind == "object" or "properties" in schema:
        return {name: filled(each, heard) for name, each in schema.get("properties", {}).items()}
    if kind == "integer":
        return 3
    if kind == "number":
        return 2.5
    if kind == "array":
        return []
    return heard


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
