"""The client of the engine: what it repeats, what it never repeats, and what foreign errors become."""

import asyncio
import ssl
from array import array
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from polykv_proxy import errors
from polykv_proxy.upstream import EngineClient, forwardable, map_client_error
from polykv_proxy.upstream.errors import map_hook_answer
from polykv_proxy.upstream.headers import returnable
from tests.fake_engine import FakeEngine, delay, drop, reply


@pytest.fixture
async def client(engine):
    client = EngineClient(engine.url)
    yield client
    await client.close()


def tokens(text: str) -> array:
    return array("i", list(text.encode()))


AWAY, SLOW, BAD = errors.UpstreamUnavailable, errors.UpstreamTimeout, errors.UpstreamError
EXPECTED = {
    "ClientError": BAD,
    "ClientResponseError": BAD,
    "ContentTypeError": BAD,
    "WSServerHandshakeError": BAD,
    "ClientHttpProxyError": BAD,
    "TooManyRedirects": BAD,
    "ClientConnectionError": AWAY,
    "ClientConnectionResetError": AWAY,
    "ClientOSError": AWAY,
    "ClientConnectorError": errors.ConnectFailed,
    "ClientConnectorDNSError": errors.ConnectFailed,
    "ClientProxyConnectionError": errors.ConnectFailed,
    "UnixClientConnectorError": errors.ConnectFailed,
    "ClientSSLError": BAD,
    "ClientConnectorSSLError": BAD,
    "ClientConnectorCertificateError": BAD,
    "ServerConnectionError": AWAY,
    "ServerDisconnectedError": AWAY,
    "ServerTimeoutError": SLOW,
    "ConnectionTimeoutError": errors.ConnectFailed,
    "SocketTimeoutError": SLOW,
    "ServerFingerprintMismatch": BAD,
    "ClientPayloadError": AWAY,
    "UploadAbortedError": BAD,
    "InvalidURL": BAD,
    "InvalidUrlClientError": BAD,
    "InvalidUrlRedirectClientError": BAD,
    "RedirectClientError": BAD,
    "NonHttpUrlClientError": BAD,
    "NonHttpUrlRedirectClientError": BAD,
}


def every_class(root: type) -> set[type]:
    return {root}.union(*(every_class(s) for s in root.__subclasses__()))


def make(cls: type) -> BaseException:
    """An instance of any of aiohttp's exceptions, whatever its constructor wants."""
    key = ConnectionKey("h", 1, False, True, None, None, None)
    info = SimpleNamespace(real_url="http://h/")
    ways = [
        (key, OSError(1, "no")),
        (key, ssl.CertificateError("no")),
        ("/s", key, OSError(1, "no")),
        (b"", b"", "h", 1),
        (info, ()),
        ("http://h/",),
        (),
    ]
    for args in ways:
        try:
            made = cls(*args)
            str(made)
        except (TypeError, AttributeError):
            continue
        return made
    raise AssertionError(cls)


def test_every_exception_class_of_aiohttp_is_mapped():
    found = {c for c in every_class(aiohttp.ClientError) if c.__module__.startswith("aiohttp")}
    assert {c.__name__ for c in found} == set(EXPECTED)
    for cls in found:
        mapped = map_client_error(make(cls), "POST /x")
        assert type(mapped) is EXPECTED[cls.__name__], cls
        assert mapped.message.startswith("POST /x: ")


@pytest.mark.parametrize(
    ("exc", "ours"),
    [(TimeoutError(), SLOW), (OSError(9, "x"), AWAY), (ConnectionResetError(), AWAY), (KeyError(), BAD)],
)
def test_other_foreign_exceptions_are_mapped(exc, ours):
    assert type(map_client_error(exc, "GET /")) is ours


@pytest.mark.parametrize(
    ("status", "error", "ours"),
    [
        (400, {"type": "polykv_error", "message": "no"}, errors.RequestError),
        (400, {"type": "invalid_request_error"}, errors.EngineRefused),
        (401, {"message": "Invalid API Key"}, errors.EngineKeyRefused),
        (404, {"message": "File Not Found"}, errors.EngineUnpatched),
        (409, {"type": "polykv_error", "divergence_pos": 3}, errors.PrefixMismatch),
        (409, {"type": "polykv_error"}, errors.EngineRefused),
        (410, {"type": "polykv_error"}, errors.SequenceGone),
        (500, {"message": "boom"}, errors.EngineRefused),
        (501, {"type": "polykv_error", "message": "swa"}, errors.SharingUnsupported),
        (503, {"type": "polykv_error"}, errors.SeqIdsExhausted),
        (503, {"type": "unavailable_error", "message": "Loading model"}, errors.UpstreamLoading),
        (507, {"type": "polykv_error", "need": 10, "free": 3}, errors.KvExhausted),
    ],
)
def test_every_answer_of_a_hook_is_mapped(status, error, ours):
    mapped = map_hook_answer(status, {"error": error}, "materialize")
    assert type(mapped) is ours
    if status == 507:
        assert mapped.extra["cells_missing"] == 7
    if ours is errors.PrefixMismatch:
        assert mapped.divergence_pos == 3


UNKNOWN_OP = '"op" must be "materialize", "snapshot" or "cells"'


@pytest.mark.parametrize(
    ("op", "status", "error", "ours"),
    [
        ("save", 400, {"type": "polykv_error", "message": UNKNOWN_OP}, errors.SavingUnsupported),
        ("load", 400, {"type": "polykv_error", "message": UNKNOWN_OP}, errors.SavingUnsupported),
        ("save", 400, {"type": "polykv_error", "message": '"tag" must name what is saved'}, errors.RequestError),
        ("save", 404, {"message": "File Not Found"}, errors.SavingUnsupported),
        ("forget", 404, {"message": "File Not Found"}, errors.SavingUnsupported),
        ("save", 501, {"type": "polykv_error", "message": "no unified cache"}, errors.SavingUnsupported),
        ("save", 409, {"type": "polykv_error", "message": "[0, 9) is not in", "n_tokens": 8}, errors.SavingRefused),
        ("load", 409, {"type": "polykv_error", "message": "slot 1 is busy"}, errors.SavingRefused),
        ("load", 409, {"type": "polykv_error", "divergence_pos": 3}, errors.PrefixMismatch),
        ("save", 409, {"type": "polykv_error", "owner": "other", "ttl_ms": 5}, errors.EngineOwned),
        ("save", 410, {"type": "polykv_error", "message": "there is no pool in sequence 6"}, errors.SequenceGone),
        (
            "load",
            410,
            {"type": "polykv_error", "message": "there is no parent pool in sequence 6"},
            errors.SequenceGone,
        ),
        ("load", 410, {"type": "polykv_error", "message": "nothing is saved under 'a'"}, errors.SavedGone),
        ("load", 410, {"type": "polykv_error", "message": "the file of 'a' ends too early"}, errors.SavedGone),
        ("load", 503, {"type": "polykv_error", "message": "no free pool sequence"}, errors.SeqIdsExhausted),
        ("save", 503, {"type": "unavailable_error", "message": "Loading model"}, errors.UpstreamLoading),
        ("load", 507, {"type": "polykv_error", "need": 10, "free": 3}, errors.KvExhausted),
        ("save", 507, {"type": "polykv_error", "need": 10, "free": 3}, errors.SavedBudget),
        ("write", 507, {"type": "polykv_error", "need": 10, "free": 3}, errors.SavedBudget),
        ("write", 400, {"type": "polykv_error", "message": 'exactly one of "seq"'}, errors.SavingUnsupported),
        ("write", 410, {"type": "polykv_error", "message": "nothing is saved under 'a' in memory"}, errors.SavedGone),
        ("save", 410, {"type": "polykv_error", "message": "'a' was forgotten or saved again"}, errors.SavedGone),
    ],
)
def test_answers_about_saved_states_are_mapped(op, status, error, ours):
    mapped = map_hook_answer(status, {"error": error}, op)
    assert type(mapped) is ours
    if ours is errors.SavedBudget:
        assert (mapped.need, mapped.free, mapped.status) == (10, 3, 507)


def test_a_disk_that_failed_has_no_numbers():
    error = {"type": "polykv_error", "message": "cannot write /full/x.state: No space left on device"}
    mapped = map_hook_answer(507, {"error": error}, "save")
    assert (type(mapped), mapped.need, mapped.free) == (errors.SavedBudget, None, None)
    assert "No space left on device" in mapped.message


def listed_state(**fields):
    state = {"tag": "a", "from": 2, "n_tokens": 9, "tokens_hash": "ab", "n_ckpt": 0, "bytes": 70, "in": "ram"}
    return state | {"usable": True} | fields


async def test_what_is_saved_in_memory_and_on_disk_is_one_state(client, engine):
    saved = [
        listed_state(),
        listed_state(tag="b", n_tokens=3),
        listed_state(**{"in": "disk", "bytes": 90}),
        listed_state(**{"in": "disk", "bytes": 90, "usable": False}),
        listed_state(tag="b", n_tokens=8, **{"in": "disk"}),
    ]
    engine.on("list", "reply", reply(200, {"epoch": "e", "pools": [], "saved": saved}))
    found = (await client.list_pools()).saved
    assert [(s.tag, s.n_tokens, s.places, s.usable) for s in found] == [
        ("a", 9, ("ram", "disk"), True),
        ("b", 3, ("ram",), True),
        ("a", 9, ("disk",), False),
        ("b", 8, ("disk",), True),
    ]
    assert (found[0].start, found[0].tokens_hash, found[0].n_bytes) == (2, "ab", 70)


async def test_budgets_of_saved_states(client, engine):
    off = "the server was started without --polykv-save-disk"
    saved = {"ram": {"bytes": 5, "max": 100}, "disk": {"bytes": 0, "max": 0, "why_off": off}}
    cells = {"used": 10, "total": 100, "free": 90, "hi": 42, "n_stream": 1}
    engine.on("stats", "reply", reply(200, {"epoch": "e", "saved": saved, "cells": cells}))
    stats = await client.stats()
    assert (stats.saved.ram.n_bytes, stats.saved.ram.n_bytes_max, stats.cells.hi) == (5, 100, 42)
    assert (stats.saved.disk.n_bytes_max, stats.saved.disk.why_off) == (0, off)


async def test_an_engine_that_never_heard_of_saved_states(client, engine):
    """Its list and stats do not mention them, and the operations are unknown to it."""
    engine.on("list", "reply", reply(200, {"epoch": "e", "pools": []}))
    engine.on("stats", "reply", reply(200, {"epoch": "e"}))
    assert (await client.list_pools()).saved == ()
    saved = (await client.stats()).saved
    assert (saved.ram.n_bytes_max, saved.disk.n_bytes_max) == (0, 0)
    unknown = {"error": {"code": 400, "message": UNKNOWN_OP, "type": "polykv_error"}}
    for op in ("save", "load"):
        engine.on(op, "request", reply(400, unknown), times=2 if op == "load" else 1)
    for call in (
        client.save(seq=5, tag="a"),
        client.load_pool("a"),
        client.load_slot("a", id_slot=0),
    ):
        with pytest.raises(errors.SavingUnsupported):
            await call


@pytest.mark.parametrize("body", [None, [], {}, {"error": "text"}, {"error": {"code": "x"}}, "x"])
def test_strange_error_bodies_still_give_an_error_of_ours(body):
    assert isinstance(map_hook_answer(507, body, "x"), errors.KvExhausted)


async def test_hooks_round_trip(client, engine):
    made = await client.materialize(tokens("hello world"), tag="a")
    child = await client.materialize(tokens("hello there"), tag="b", parent_seq=made.seq, branch_pos=6)
    assert (child.branch_pos, child.n_processed, child.n_cached) == (6, 5, 6)
    listed = await client.list_pools()
    assert {p.tag: p.n_tokens for p in listed.pools if p.state == "ready"} == {"a": 11, "b": 11}
    assert (await client.free(made.seq)).seq == made.seq
    with pytest.raises(errors.SequenceGone):
        await client.free(made.seq)
    stats = await client.stats()
    assert (stats.epoch, stats.cells.used, stats.n_slots) == (engine.epoch, 11, 4)
    rendered = await client.render("/completion", {"prompt": "héllo"})
    assert (rendered.tokens, rendered.has_media, rendered.n_prompts) == (tokens("héllo"), False, 1)
    with pytest.raises(errors.RequestError, match="required"):
        await client.render("/completion", {})


async def test_reads_are_repeated_and_changes_never(client, engine):
    engine.on("stats", "request", drop(), times=2)
    assert (await client.stats()).epoch == engine.epoch
    assert len(engine.requests("/polykv/engine/stats")) == 3
    engine.on("materialize", "request", drop())
    with pytest.raises(errors.UpstreamUnavailable):
        await client.materialize(tokens("x"), tag="t")
    assert len(engine.requests("/polykv/engine/pools")) == 1


@pytest.mark.parametrize("phase", ["request", "reply", "chunk:0", "chunk:3"])
async def test_a_post_is_sent_once_whenever_it_breaks(client, engine, phase):
    engine.on("/completion", phase, drop())
    body = b'{"prompt":"x","stream":true}'
    with pytest.raises(errors.UpstreamUnavailable):
        async with await client.open("POST", "/completion", [], body) as response:
            await response.read()
    assert len(engine.requests("/completion")) == 1


async def test_a_refused_connection_is_tried_once_more(client, engine):
    await engine.kill()

    async def come_back() -> None:
        await asyncio.sleep(0.02)
        await engine.start()

    back = asyncio.ensure_future(come_back())
    response = await client.open("POST", "/completion", [], b'{"prompt":"x"}')
    assert response.status == 200
    response.close()
    await back
    await engine.kill()
    with pytest.raises(errors.ConnectFailed):
        await client.open("POST", "/completion", [], b'{"prompt":"x"}')


async def test_a_slow_read_is_a_timeout(client, engine, monkeypatch):
    monkeypatch.setattr("polykv_proxy.upstream.client.READ_S", 0.05)
    engine.on("stats", "request", delay(5))
    with pytest.raises(errors.UpstreamTimeout):
        await client.stats()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"epoch": 1}', b'{"epoch":"e","cells":{"used":"many"}}'])
async def test_an_unreadable_answer_is_an_upstream_error(client, engine, body):
    engine.on("stats", "request", reply(200, body))
    with pytest.raises(errors.UpstreamError) as e:
        await client.stats()
    assert e.value.status == 502


async def test_loading_and_unpatched_and_keys(engine):
    engine.loading = True
    client = EngineClient(engine.url)
    with pytest.raises(errors.UpstreamLoading):
        await client.health()
    with pytest.raises(errors.UpstreamLoading):
        await client.stats()
    await client.close()
    async with FakeEngine(hooks=False, api_key="k") as plain:
        client = EngineClient(plain.url, "k")
        with pytest.raises(errors.EngineUnpatched):
            await client.stats()
        assert (await client.props())["total_slots"] == 4
        await client.close()
        for key, said in (
            (None, "asks for a key, and POLYKV_UPSTREAM_API_KEY is not set"),
            ("x", "refuses the key of"),
        ):
            client = EngineClient(plain.url, key)
            with pytest.raises(errors.EngineKeyRefused, match=said) as e:
                await client.props()
            await client.close()
            assert (e.value.missing, e.value.status, e.value.code) == (key is None, 502, "upstream_error")


async def test_what_travels_to_the_engine_is_what_was_given(client, engine):
    given = [
        (b"X-Own", b"1"),
        (b"x-own", b"2"),
        (b"Authorization", b"Bearer client"),
        (b"X-Api-Key", b"client"),
        (b"Connection", b"close, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Host", b"evil"),
        (b"Content-Length", b"999"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Type", b"text/plain"),
    ]
    async with await client.open("POST", "/tokenize?a=%2F&b=%20", given, b'{"content":"x"}') as response:
        assert await response.read()
    got = engine.received[-1]
    assert (got.query, got.body) == ("a=/&b= ", b'{"content":"x"}')
    names = [k.decode().lower() for k, _ in got.raw_headers]
    assert names.count("x-own") == 2
    assert sorted(set(names)) == ["content-length", "content-type", "host", "x-own"]


async def test_a_closed_reply_stops_the_engine(client, engine):
    engine.token_s = 0.02
    body = b'{"prompt":"x","stream":true,"n_predict":1000}'
    response = await client.open("POST", "/completion", [], body)
    assert await response.read_piece()
    response.close()
    await engine.received[-1].ended(1)
    assert engine.received[-1].left


def test_headers_named_by_connection_are_dropped_both_ways():
    names = (b"A", b"b", b"C", b"Content-Length")
    given = [(b"Connection", b"a"), (b"connection", b"B , c"), *((name, b"1") for name in names)]
    assert forwardable(given) == []
    assert returnable(given) == [("Content-Length", "1")]


async def test_a_refused_connection_is_told_in_the_systems_words(engine):
    url = engine.url
    await engine.kill()
    client = EngineClient(url, None)
    try:
        with pytest.raises(errors.ConnectFailed) as refused:
            await client.stats()
    finally:
        await client.close()
    assert refused.value.message.endswith("cannot connect to the engine (Connection refused)")


async def test_what_is_in_memory_is_written_later_and_forgotten_in_one_place():
    async with FakeEngine(save_ram=1 << 20, save_disk=1 << 20) as engine:
        client = EngineClient(engine.url)
        made = await client.materialize(tokens("hello"), tag="t")
        await client.save(seq=made.seq, tag="a")
        written = await client.write_saved("a")
        assert (written.tag, written.start, written.n_tokens, written.places) == ("a", 0, 5, ("ram", "disk"))
        for place, left in (("ram", ("disk",)), ("ram", ("disk",)), ("disk", ())):
            await client.forget_saved("a", place)
            assert [at for state in (await client.list_pools()).saved for at in state.places] == [*left]
        with pytest.raises(errors.SavedGone):
            await client.write_saved("a")
        await client.close()
