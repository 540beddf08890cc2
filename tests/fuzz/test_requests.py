"""Whatever clients send: no bug of ours answers, nobody hangs, nothing is left, and off path the bytes are theirs."""

import json
import re
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polykv_proxy.relay.fields import BODY_FIELDS, ENGINE_FIELDS
from tests.fuzz.stage import Stage
from tests.relay.dialect_cases import PATHS

FIELDS = sorted(BODY_FIELDS | ENGINE_FIELDS)
SRC = b'"src":"polykv_proxy"'
ADDED = re.compile(rb',?"(?:id_slot|shared_(?:pool_slot|prefix_n_tokens|pool_gen|pool_epoch))":(?:-?\d+|"[^"]*")')
KNOWN = [
    *("messages", "prompt", "system", "instructions", "input", "model"),
    *("tools", "tool_choice", "n", "n_cmpl", "id_slot", "cache_prompt"),
    *("lora", "stream_options", "prompt_cache_key", "chat_template_kwargs", "cache_control", "metadata"),
    *("temperature", "seed", "thinking", "response_format", "n_probs"),
]
OTHER_PATHS = [
    "/v1/models",
    "/tokenize",
    "/apply-template",
    "/v1/embeddings",
    "/infill",
    "/props",
    "/slots",
    "/metrics",
]
HEADER_NAMES = [
    *("x-session-id", "x-pool-id", "x-polykv-overcommit", "x-polykv-strict", "x-request-id"),
    *("x-session-affinity", "session-id", "thread-id", "x-claude-code-session-id", "x-claude-code-agent-id"),
    *("x-conversation-id", "x-parent-session-id", "x-stainless-retry-count", "authorization", "x-api-key"),
    *("content-type", "accept-encoding", "origin", "cookie"),
    *("x-other"),
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from([2**31, -(2**63), 2**64, 1e308, -0.0, 1e-7])
    | st.text(max_size=12)
    | st.sampled_from(
        ["base", "auto", "user", "system", "You are many.", "\ud800", "\0", "é" * 300, "x" * 900, "1", "-1"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "image_url", "tool_use", "tool_result", "thinking", 7, None])},
    optional={"text": scalars, "content": values, "cache_control": values, "prompt_cache_breakpoint": values},
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "", 3, None])},
    optional={
        "content": scalars | st.lists(parts | scalars, max_size=3),
        "tool_calls": values,
        "cache_control": values,
    },
)
likely = {
    "messages": st.lists(messages, max_size=4) | values,
    "prompt": scalars | st.lists(st.integers(-2, 400) | st.text(max_size=4), max_size=8) | st.lists(values, max_size=3),
    "input": st.lists(messages, max_size=3) | values,
    "system": scalars | st.lists(parts, max_size=2),
    "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": values}), max_size=2) | values,
    "tool_choice": st.sampled_from(["auto", {"type": "function", "function": {"name": "f"}}, {"type": "tool"}])
    | values,
    "session_id": st.sampled_from(["s", "t"]) | scalars,
    "pool_id": st.sampled_from(["base", 1, 99]) | scalars,
}
members = st.fixed_dictionaries(
    {"max_tokens": st.just(2), "n_predict": st.just(2), "max_output_tokens": st.just(2)},
    optional={name: likely.get(name, values) for name in (*KNOWN, *FIELDS)} | {"stream": st.booleans() | scalars},
)
layouts = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Mostly JSON objects of a known shape; some cut, some with bytes in between, some nothing of the kind."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=60))
    written = json.dumps(draw(values if kind == 1 else members), **draw(layouts)).encode("utf-8", "surrogatepass")
    if kind == 2:
        return written[: draw(st.integers(0, len(written)))]
    if kind == 3:
        at = draw(st.integers(0, len(written)))
        return written[:at] + draw(st.binary(min_size=1, max_size=3)) + written[at:]
    if kind == 4:  # every member twice
        return b"{" + written.strip(b"{}\n") + b"," + written.strip(b"{}\n") + b"}"
    if kind == 5:
        return b"\xef\xbb\xbf" + written + b"\0" * draw(st.integers(0, 2))
    return written


header_values = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20) | (
    st.sampled_from(["s", "base", "1", "0", "true", "gzip", "Bearer k", "application/json", "x" * 300])
)
headers = st.lists(st.tuples(st.sampled_from(HEADER_NAMES), header_values), max_size=4)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, str, bytes]:
    """Give it as it is sent, its path and its body."""
    path = draw(st.sampled_from(PATHS * 3 + OTHER_PATHS))
    body, lines = draw(bodies()), draw(headers)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    head += b"".join(name.encode() + b": " + value.encode("latin-1") + b"\r\n" for name, value in lines)
    if draw(st.booleans()):
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, path, body
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(body) - 1)), max_size=4)) if len(body) > 1 else [])
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if a < b]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + framed, path, body


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    stage.start()
    yield stage
    stage.stop()


def carries_a_field(body: bytes) -> bool:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return True  # nobody knows
    return isinstance(parsed, dict) and not BODY_FIELDS.isdisjoint(parsed)


def could_be_rewritten(body: bytes) -> bool:
    """What it says of slots is the proxy's to replace, and so is a tool that it names."""
    parsed = orjson.loads(body)
    return isinstance(parsed, dict) and not {"id_slot", "tool_choice", *ENGINE_FIELDS}.isdisjoint(parsed)


ONCE = (b"content-type", b"user-agent")
"""Of the headers that are tried here those that may come once only."""


def play(stage: Stage, mode: str, sent: list[tuple[bytes, str, bytes]]) -> None:
    stage.errors.clear()
    replies = stage.do(stage.play(mode, [request for request, _, _ in sent]))
    assert stage.errors == []
    for (request, _, _), (head, body) in zip(sent, replies, strict=True):
        status = int(head.split(b" ")[1])
        assert b"internal_error" not in body, request
        assert status < 500 or SRC not in body or b'"code":"kv_exhausted"' in body, (request, body)
        assert b"x-request-id: " in head.lower()
    arrived = [r.body for r in stage.engines[mode].received if r.method == "POST"]
    if mode == "auto":
        arrived = [ADDED.sub(b"", body) for body in arrived]
    for (request, path, body), (head, said) in zip(sent, replies, strict=True):
        names = [line.partition(b":")[0].lower() for line in request.partition(b"\r\n\r\n")[0].split(b"\r\n")]
        if any(names.count(name) > 1 for name in ONCE):
            assert head.startswith(b"HTTP/1.1 400 "), request
            continue
        if path.startswith("/slots") and b'"code":"forbidden"' in said:
            continue  # of a foreign page, by its Origin: it would read what others asked
        named = any(name in request.lower() for name in (b"x-session-id:", b"x-pool-id:", b"x-polykv-"))
        if named or carries_a_field(body) or (mode == "auto" and (SRC in said or could_be_rewritten(body))):
            continue
        assert body in arrived, request


QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@settings(max_examples=40, **QUICK)
@given(sent=st.lists(requests(), min_size=1, max_size=4))
def test_whatever_is_sent(stage: Stage, mode: str, sent: list[tuple[bytes, str, bytes]]) -> None:
    play(stage, mode, sent)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@settings(max_examples=800, **QUICK)
@given(sent=st.lists(requests(), min_size=1, max_size=6))
def test_whatever_is_sent_for_long(stage: Stage, mode: str, sent: list[tuple[bytes, str, bytes]]) -> None:
    play(stage, mode, sent)
