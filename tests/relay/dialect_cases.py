"""The same question in the four dialects, and how to read the answers."""

import json
from typing import Any

SYSTEM = "You are one of many agents. " * 12
PATHS = ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]


def body_of(path: str, text: str = "What is 2+2?", *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A body that begins with SYSTEM."""
    body: dict[str, Any] = {"stream": stream} if stream else {}
    if "messages" in path:
        body |= {"system": SYSTEM, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    elif "chat" in path:
        system, user = {"role": "system", "content": SYSTEM}, {"role": "user", "content": text}
        body |= {"messages": [system, user], "max_tokens": 4}
    elif "responses" in path:
        body |= {"instructions": SYSTEM, "input": [{"role": "user", "content": text}], "max_output_tokens": 4}
    else:
        body |= {"prompt": SYSTEM + text, "n_predict": 4, "max_tokens": 4}
    return body | fields


def events_of(stream: bytes) -> list[dict[str, Any]]:
    lines = [line[5:].strip() for line in stream.split(b"\n") if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def receipts_in(value: Any) -> list[dict[str, Any]]:
    """Every ``polykv`` object, wherever it is."""
    if isinstance(value, list):
        return [r for v in value for r in receipts_in(v)]
    if not isinstance(value, dict):
        return []
    own = [value["polykv"]] if "polykv" in value else []
    return own + [r for k, v in value.items() if k != "polykv" for r in receipts_in(v)]


def receipt_at(path: str, reply: bytes, *, stream: bool) -> dict[str, Any]:
    """The one ``polykv`` object, from exactly the place that the contract names."""
    if not stream:
        whole = json.loads(reply)
        assert len(receipts_in(whole)) == 1
        return (whole[-1] if isinstance(whole, list) else whole)["polykv"]
    events = events_of(reply)
    assert len(receipts_in(events)) == 1
    if "responses" in path:
        (event,) = [e for e in events if e["type"] == "response.completed"]
        return event["response"]["polykv"]
    if "messages" in path:
        (event,) = [e for e in events if e["type"] == "message_delta"]
        return event["polykv"]
    carriers = [e for e in events if "usage" in e or "timings" in e]
    return carriers[-1]["polykv"]
