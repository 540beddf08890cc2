"""Streams that nobody would write: what is fed comes out, whatever it is, however it is cut, and the object once."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polykv_proxy.relay.dialects import Dialect
from polykv_proxy.relay.sse import SseReader

OBJECT = b'"polykv":{"pool_id":7}'
ENDS = [b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"]
FRAGMENTS = [
    *(
        b"data:",
        b"data: ",
        b"data",
        b"event: ",
        b"event:",
        b"id: 1",
        b"retry: 3",
        b":",
        b": ping",
        b"[DONE]",
        b" ",
        b"\t",
    ),
    *(b"message_start", b"message_delta", b"message_stop", b"response.completed", b"error", b"\xef\xbb\xbf", b"\0"),
    *(b"{", b"}", b"[", b"]", b",", b'"', b"\\", b"\xe6\x97", b"\xa5", b"\xff", b"null", b"1e999", b"-0"),
    *(
        b'"stop":true',
        b'"finish_reason":"stop"',
        b'"usage":{}',
        b'"timings":{',
        b'"choices":[',
        b'"response":{',
        b'"error":{',
    ),
]
EVENTS = [
    b'data: {"choices":[{"finish_reason":"stop"}],"timings":{"cache_n":0}}',
    b'data: {"choices":[],"usage":{"prompt_tokens":3}} \t',
    b'data:{"stop":true,"timings":{"cache_n":1,"prompt_n":2}}',
    b'event: message_start\ndata: {"message":{"usage":{"input_tokens":0}}}',
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":1}}',
    b"event: message_delta\n: a comment }\ndata: {}",
    b'event: response.completed\ndata: {"response":{"usage":{"output_tokens":1}},"x":{"response":{}}}',
    b'event: response.completed\ndata: {"response":null}',
    b'event: error\ndata: {"error":{"message":"x"}}',
    b"data: [DONE]",
    b'data: {"choices":[{"finish_reason":"stop"}],\ndata: "timings":{}}',
    b'data: {"choices":{"finish_reason":"stop"}}',
    b'data: [{"choices":[{"finish_reason":"stop"}]}]',
    b'data: {"choices":[null,7,{"finish_reason":"length"}],"usage":[],"timings":"x"}',
    b"event: message_delta\ndata: [1]",
    b'event: message_start\ndata: {"message":[]}',
]
pieces = st.sampled_from(EVENTS * 2 + FRAGMENTS) | st.binary(max_size=3)
streams = st.lists(st.tuples(pieces, st.sampled_from([*ENDS, b""])), max_size=12).map(
    lambda parts: b"".join(piece + end for piece, end in parts)
)
kinds = st.sampled_from(list(Dialect))


def reader_of(kind: Dialect, n_finals: int, include_usage: bool, *, receipt: bool) -> SseReader:
    object_of = (lambda _usage: OBJECT) if receipt else None
    return SseReader(kind, n_finals=n_finals, include_usage=include_usage, receipt=object_of)


def inserted(out: bytes, stream: bytes) -> int:
    """How often the object was put into it; everything else must be as it was."""
    n = out.count(OBJECT) - stream.count(OBJECT)
    assert n in (0, 1)
    if n:
        at = out.index(OBJECT)
        before = out[:at].removesuffix(b",") if not out[:at].endswith(b"{") else out[:at]
        assert before + out[at + len(OBJECT) :] == stream
    else:
        assert out == stream
    return n


def check(kind: Dialect, stream: bytes, cuts: set[int], n_finals: int, include_usage: bool) -> None:
    whole = reader_of(kind, n_finals, include_usage, receipt=True)
    expected = whole.feed(stream) + whole.finish()
    n = inserted(expected, stream)
    bounds = sorted(cut % (len(stream) + 1) for cut in cuts)
    for receipt in (True, False):
        reader = reader_of(kind, n_finals, include_usage, receipt=receipt)
        out = b""
        for a, b in zip([0, *bounds], [*bounds, len(stream)], strict=True):
            out += reader.feed(stream[a:b])
            if not receipt:
                assert out == stream[:b]
            elif OBJECT in out and OBJECT not in stream:
                assert len(out) == b + len(expected) - len(stream), "nothing waits any more"
            else:
                # What waits is of one line, which is not over.
                assert b"\n\n" not in stream[len(out) : b]
        out += reader.finish()
        assert out == (expected if receipt else stream)
        assert (reader.started, reader.ended, reader.failed) == (whole.started, whole.ended, whole.failed)
        if not n:
            assert reader.usage == whole.usage


ARGUMENTS = (kinds, streams, st.sets(st.integers(0, 2000), max_size=10), st.integers(1, 3), st.booleans())


@settings(max_examples=400, deadline=None)
@given(*ARGUMENTS)
def test_any_stream(kind: Dialect, stream: bytes, cuts: set[int], n_finals: int, include_usage: bool) -> None:
    check(kind, stream, cuts, n_finals, include_usage)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(*ARGUMENTS)
def test_any_stream_for_longer(
    kind: Dialect, stream: bytes, cuts: set[int], n_finals: int, include_usage: bool
) -> None:
    check(kind, stream, cuts, n_finals, include_usage)


@pytest.mark.parametrize("kind", list(Dialect))
def test_a_line_without_an_end_costs_its_length_once(kind: Dialect) -> None:
    """A reader that looked at the whole line again with every piece would take minutes for this."""
    reader = reader_of(kind, 1, False, receipt=True)
    line = b'data: {"content":"' + b"}" * (1 << 20)
    out = b"".join(reader.feed(line[at : at + 64]) for at in range(0, len(line), 64))
    assert out + reader.finish() == line
