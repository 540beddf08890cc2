"""The event reader: bytes untouched, nothing held back, the object in the right place, however the stream is cut."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.relay.dialects import Dialect
from polykv_proxy.relay.sse import SseReader
from polykv_proxy.turns import Usage
from tests.fake_engine.dialects import Dialect as FakeDialect
from tests.fake_engine.dialects import Turn, dialect

PATHS = {
    Dialect.NATIVE: "/completion",
    Dialect.COMPLETIONS: "/v1/completions",
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.MESSAGES: "/v1/messages",
    Dialect.RESPONSES: "/v1/responses",
}
OBJECT = b'"polykv":{"pool_id":7}'


def pieces_of(
    out: FakeDialect, n_choices: int = 1, texts: tuple[str, ...] = ("Hé", '}"{', "日本", "\r\n")
) -> list[bytes]:
    pieces: list[bytes] = []
    for index in range(n_choices):
        turn = Turn(id_slot=index, n_prompt=12, n_cached=10, pool_n=9, index=index)
        for text in texts:
            turn.pieces.append(text)
            pieces += out.piece(turn, text)
        pieces += out.last(turn)
    return [*pieces, out.done] if out.done else pieces


@cache
def stream_of(kind: Dialect) -> bytes:
    """Made once: timings differ between two runs."""
    return b"".join(pieces_of(dialect(PATHS[kind], {})))


def data_of(stream: bytes) -> list[Any]:
    lines = [line[5:].strip() for line in stream.splitlines() if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def without_object(stream: bytes) -> bytes:
    return stream.replace(b"," + OBJECT, b"")


def reader_of(kind: Dialect, **kw: Any) -> SseReader:
    return SseReader(kind, receipt=lambda _usage: OBJECT, **kw)


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("include_usage", [False, True])
def test_object_comes_once_in_the_last_chunk_with_usage_or_timings(kind: Dialect, include_usage: bool) -> None:
    body = {"stream_options": {"include_usage": include_usage}}
    stream = b"".join(pieces_of(dialect(PATHS[kind], body)))
    reader = reader_of(kind, include_usage=include_usage)
    out = reader.feed(stream) + reader.finish()
    assert out.count(OBJECT) == 1
    assert without_object(out) == stream
    carriers = [d for d in data_of(stream) if "usage" in d or "timings" in d or "usage" in d.get("response", {})]
    carried = [d for d in data_of(out) if "polykv" in d or "polykv" in d.get("response", {})]
    assert len(carried) == 1
    if kind is Dialect.RESPONSES:
        assert carried[0]["type"] == "response.completed"
        assert "polykv" in carried[0]["response"]
    elif kind is Dialect.MESSAGES:
        assert carried[0]["type"] == "message_delta"
    else:
        assert {k: v for k, v in carried[0].items() if k != "polykv"} == carriers[-1]
    assert reader.ended
    assert reader.usage.cache_n == 10
    assert reader.usage.prompt_n == 2
    assert reader.usage.predicted_n == 4


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@given(data=st.data())
def test_cuts_make_no_difference(kind: Dialect, line_end: bytes, data: st.DataObject) -> None:
    stream = stream_of(kind).replace(b"\n", line_end)
    whole = reader_of(kind)
    expected = whole.feed(stream) + whole.finish()
    assert without_object(expected) == stream
    assert expected.count(OBJECT) == 1
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    reader = reader_of(kind)
    out = b"".join(reader.feed(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True))
    assert out + reader.finish() == expected


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_one_byte_at_a_time_nothing_waits_but_a_closing_brace_or_the_carrier(kind: Dialect, line_end: bytes) -> None:
    stream = stream_of(kind).replace(b"\n", line_end)
    reader = reader_of(kind)
    out = b""
    for i in range(len(stream)):
        out += reader.feed(stream[i : i + 1])
        waiting = stream[: i + 1].removeprefix(without_object(out))
        carrier = {Dialect.MESSAGES: b"message_delta", Dialect.RESPONSES: b"response.completed"}.get(kind, b"")
        opening = b'data: {"type":"' + carrier
        assert waiting in (b"", b"}") or (carrier and (waiting.startswith(opening) or opening.startswith(waiting)))
    assert without_object(out + reader.finish()) == stream
    assert out.count(OBJECT) == 1


@pytest.mark.parametrize("kind", PATHS)
def test_without_a_receipt_every_byte_passes_at_once(kind: Dialect) -> None:
    stream = stream_of(kind)
    reader = SseReader(kind)
    for i in range(len(stream)):
        assert reader.feed(stream[i : i + 1]) == stream[i : i + 1]
    assert reader.ended
    assert reader.usage.ctx_used == 16


@pytest.mark.parametrize("kind", [Dialect.NATIVE, Dialect.COMPLETIONS, Dialect.CHAT])
def test_of_several_choices_the_last_to_end_carries_it(kind: Dialect) -> None:
    stream = b"".join(pieces_of(dialect(PATHS[kind], {}), n_choices=3))
    reader = reader_of(kind, n_finals=3)
    out = reader.feed(stream) + reader.finish()
    assert without_object(out) == stream
    carried = [d for d in data_of(out) if "polykv" in d]
    assert [d.get("index", d.get("choices", [{}])[0].get("index")) for d in carried] == [2]


def test_text_that_looks_like_a_carrier_is_none() -> None:
    text = '"finish_reason":"stop","usage":{"timings":{"stop":true}} data: [DONE]\n\nevent: message_delta\ndata: {}\n\n'
    for kind, path in PATHS.items():
        stream = b"".join(pieces_of(dialect(path, {}), texts=(text, text)))
        reader = reader_of(kind)
        out = b"".join(reader.feed(stream[i : i + 7]) for i in range(0, len(stream), 7)) + reader.finish()
        assert without_object(out) == stream
        assert out.count(OBJECT) == 1


def test_comments_pings_and_unknown_lines_pass() -> None:
    reader = reader_of(Dialect.CHAT)
    for line in (b":\n\n", b": ping\n\n", b"retry: 5\n\n", b"id: 1\ndata: not json}\n\n", b"data: [1}\n\n", b"\n\n\n"):
        assert reader.feed(line) == line
    assert not reader.ended


def test_an_error_event_is_noticed_and_carries_nothing() -> None:
    for kind in (Dialect.CHAT, Dialect.MESSAGES):
        reader = reader_of(kind)
        event = b'event: error\ndata: {"error":{"code":500,"message":"x","type":"server_error"}}\n\n'
        assert reader.feed(event) == event
        assert reader.failed


def test_progress_is_not_the_first_token() -> None:
    reader = SseReader(Dialect.CHAT)
    reader.feed(b'data: {"choices":[{"finish_reason":null}],"prompt_progress":{"total":9}}\n\n')
    assert not reader.started
    reader.feed(b'data: {"choices":[{"finish_reason":null,"delta":{"content":"a"}}]}\n\n')
    assert reader.started


PROGRESS = b'data: {"choices":[{"finish_reason":null}],"prompt_progress":{"total":9}}\n\n'
TOKEN = b'data: {"choices":[{"finish_reason":null,"delta":{"content":"a"}}]}\n\n'


@pytest.mark.parametrize(
    ("stream", "started"),
    [
        (PROGRESS + TOKEN, True),
        (b"\r" + TOKEN, True),
        (PROGRESS, False),
        (b": data: x\n\n", False),
        (b"xdata: {}\n\n", False),
    ],
)
def test_the_first_token_is_seen_wherever_pieces_are_cut(stream: bytes, started: bool) -> None:
    for size in (1, 7, len(stream)):
        reader = SseReader(Dialect.CHAT)
        for at in range(0, len(stream), size):
            reader.feed(stream[at : at + size])
        assert reader.started is started


def test_rate_and_pool_share_come_from_timings_and_zero_is_a_fact() -> None:
    reader = SseReader(Dialect.NATIVE)
    reader.feed(
        b'data: {"stop":true,"timings":{"cache_n":0,"prompt_n":5,"predicted_n":3,"predicted_per_second":21.5}}\n\n'
    )
    assert reader.usage == Usage(cache_n=0, prompt_n=5, predicted_n=3, pool_n=0, tps=21.5)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_pass_unchanged(chunks: list[bytes]) -> None:
    for kind in PATHS:
        reader = reader_of(kind)
        out = b"".join(reader.feed(c) for c in chunks) + reader.finish()
        assert without_object(out) == b"".join(chunks)
