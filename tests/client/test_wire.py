"""What goes over the wire, when it goes again, and what is made of the bytes that come back."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient, PolyKVError, PolyKVTimeoutError, PolyKVUnavailableError
from polykv_proxy.client.asking import Call, StreamCall
from polykv_proxy.client.calls import capacity, create_pool, pools
from polykv_proxy.client.errors import PoolSaturatedError
from polykv_proxy.client.wire import Events, Wire

URL = "http://10.1.2.3:8090"


class Scripted:
    """Answers with one after the other; an exception is raised. The last one goes on."""

    def __init__(self, *answers: httpx.Response | Exception):
        self._answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def client_of(script: Scripted, **options: Any) -> PolyKVClient:
    return PolyKVClient(URL, transport=httpx.MockTransport(script), **options)


def again(status: int, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers={"retry-after-ms": "1", **headers}, json={"error": {"message": "later"}})


def tree() -> httpx.Response:
    return httpx.Response(200, json={"pools": []})


# Where and with what -----------------------------------------------------------------------------------------------


def wire(base_url: str | None = None, **options: Any) -> Wire:
    options = {"api_key": None, "admin_key": None, "timeout": None, "max_retries": 2, **options}
    return Wire(base_url, **options)


def test_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYKV_BASE_URL", raising=False)
    monkeypatch.delenv("POLYKV_URL", raising=False)
    assert wire().base_url == "http://127.0.0.1:8090"
    monkeypatch.setenv("POLYKV_URL", "http://b:1/")
    assert wire().base_url == "http://b:1"
    monkeypatch.setenv("POLYKV_BASE_URL", "http://a:1/v1")
    assert wire().base_url == "http://a:1"
    assert wire("https://c/polykv/").base_url == "https://c/polykv"
    for wrong in ("ftp://a", "nonsense", "http://"):
        with pytest.raises(ValueError, match="base_url"):
            wire(wrong)


def test_a_proxy_below_a_path() -> None:
    script = Scripted(tree())
    with PolyKVClient("https://host/below/", transport=httpx.MockTransport(script)) as client:
        client.pools()
    assert str(script.requests[0].url) == "https://host/below/polykv/pools"


def test_whose_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYKV_ADMIN_KEY", raising=False)
    monkeypatch.delenv("POLYKV_API_KEY", raising=False)
    data: Call[Any] = Call(method="POST", path="/tokenize", read=str, control=False)

    def shown(call: Call[Any], **keys: str) -> str | None:
        found: str | None = wire(**keys).request(call)["headers"].get("authorization")
        return found

    assert shown(pools()) is None
    assert (shown(pools(), api_key="a"), shown(data, api_key="a")) == ("Bearer a", "Bearer a")
    both = {"api_key": "a", "admin_key": "b"}
    assert (shown(pools(), **both), shown(data, **both)) == ("Bearer b", "Bearer a")
    monkeypatch.setenv("POLYKV_API_KEY", " one, two")
    monkeypatch.setenv("POLYKV_ADMIN_KEY", "three")
    assert (shown(pools()), shown(data)) == ("Bearer three", "Bearer one")


def test_environment_proxies_are_not_for_loopback() -> None:
    assert [
        wire(url).options()["trust_env"] for url in ("http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1")
    ] == [False] * 3
    assert wire(URL).options()["trust_env"] is True


def test_names_and_sessions_stay_within_their_part_of_the_path() -> None:
    script = Scripted(httpx.Response(200, json={"can_admit": True}))
    with client_of(script) as client:
        client.call(capacity("a/../b?c", expected_tokens=5, session_id="x&y"))
    assert (
        script.requests[0].url.raw_path == b"/polykv/pools/a%2F..%2Fb%3Fc/capacity?expected_tokens=5&session_id=x%26y"
    )


# Again -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [again(429), again(502), again(503), again(504), httpx.ReadError("cut")])
def test_a_get_is_repeated(first: Any) -> None:
    script = Scripted(first, tree())
    with client_of(script) as client:
        assert client.pools().pools == []
    assert len(script.requests) == 2


async def test_a_get_is_repeated_by_the_other_client_too() -> None:
    script = Scripted(again(503), again(429), tree())
    async with AsyncPolyKVClient(URL, transport=httpx.MockTransport(script)) as client:
        assert (await client.pools()).pools == []
    assert len(script.requests) == 3


def test_no_more_often_than_it_should() -> None:
    script = Scripted(again(503))
    with client_of(script, max_retries=3) as client, pytest.raises(PolyKVUnavailableError):
        client.pools()
    assert len(script.requests) == 4


@pytest.mark.parametrize("answer", [again(503), again(429), httpx.ReadError("cut"), httpx.ReadTimeout("slow")])
def test_a_post_that_may_have_been_done_is_not_repeated(answer: Any) -> None:
    script = Scripted(answer)
    with client_of(script) as client, pytest.raises(PolyKVError):
        client.create_pool(tokens=[1])
    assert len(script.requests) == 1


@pytest.mark.parametrize("failure", [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow")])
def test_a_post_that_was_never_sent_is_repeated(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polykv_proxy.client.wire.FIRST_PAUSE_S", 0.001)
    script = Scripted(failure, httpx.Response(201, json={"pool_id": 3}))
    with client_of(script) as client:
        assert client.create_pool(tokens=[1]).pool_id == 3
    assert len(script.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500, 501, 507])
def test_what_will_not_change_is_not_repeated(status: int) -> None:
    script = Scripted(again(status))
    with client_of(script) as client, pytest.raises(PolyKVError):
        client.pools()
    assert len(script.requests) == 1


def test_how_long_until_then() -> None:
    for u in (0.0, 0.5, 1.0):
        made = wire(u=lambda u=u: u, max_retries=9)
        asked = httpx.Response(429, headers={"retry-after": "8"})
        assert made.pause_s(pools(), asked, 0) == 8 * (1 + 0.25 * u)  # never earlier than the server asked
        growing = [made.pause_s(pools(), httpx.Response(503), attempt) for attempt in range(8)]
        assert growing == [min(8, 0.25 * 2**attempt) * (0.75 + 0.5 * u) for attempt in range(8)]
    with pytest.raises(PoolSaturatedError) as caught:
        wire().pause_s(pools(), httpx.Response(429, headers={"retry-after": "61"}), 0)
    assert caught.value.retry_after == 61


def test_a_timeout_says_that_it_may_have_been_done() -> None:
    with client_of(Scripted(httpx.ReadTimeout(""))) as client, pytest.raises(PolyKVTimeoutError, match="may have been"):
        client.create_pool(tokens=[1])


# Answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"pools": [{"name": "no id"}]}),
        httpx.Response(200, content=b"\x1f", headers={"content-encoding": "gzip"}),
    ],
    ids=["html", "list", "no id", "not gzip"],
)
def test_an_answer_of_somebody_else(answer: httpx.Response) -> None:
    with client_of(Scripted(answer)) as client, pytest.raises(PolyKVError) as caught:
        client.pools()
    assert (type(caught.value), caught.value.code) == (PolyKVError, "unreadable")


def reader(ends: Callable[[Any], bool] | None = lambda event: event is None) -> Events[Any]:
    call: StreamCall[Any] = StreamCall(method="POST", path="/v1/x", read=lambda event: event, ends=ends, pool_id="p")
    return Events(call, httpx.Response(200, headers={"x-request-id": "r"}, request=httpx.Request("POST", URL)))


def pieces(events: Events[Any], *chunks: bytes) -> list[Any]:
    return [piece for chunk in chunks for piece in events.feed(chunk)]


def test_events_however_they_are_cut() -> None:
    said = "a\u2028b\u0085c\r"  # ends of lines for ``splitlines``, not for events
    whole = (
        f': hold\r\n\r\ndata: {json.dumps({"said": said}, ensure_ascii=False)}\n\ndata:{{"n":2}}\n\ndata: [DONE]\n\n'
    )
    raw = whole.encode()
    for size in (1, 2, 7, len(raw)):
        events = reader()
        cut = [raw[i : i + size] for i in range(0, len(raw), size)]
        assert pieces(events, *cut) == [{"said": said}, {"n": 2}]
        events.close()


def test_a_stream_without_an_end_is_no_answer() -> None:
    events = reader()
    assert pieces(events, b'data: {"n": 1}\n\n') == [{"n": 1}]
    with pytest.raises(PolyKVUnavailableError) as caught:
        events.close()
    assert (caught.value.code, caught.value.request_id) == ("incomplete", "r")
    endless = reader(ends=None)
    assert pieces(endless, b'data: {"n": 1}\n\n') == [{"n": 1}]
    endless.close()


@pytest.mark.parametrize(
    "raw",
    [
        b'data: {"error": {"message": "no", "code": "pool_saturated"}}\n\n',
        b'event: error\ndata: {"error": {"message": "no", "code": "pool_saturated"}, "src": "polykv_proxy"}\n\n',
        b'error: {"message": "no", "code": "pool_saturated"}\n\n',
    ],
)
def test_an_error_that_comes_as_an_event(raw: bytes) -> None:
    with pytest.raises(PoolSaturatedError) as caught:
        pieces(reader(), raw)
    assert (caught.value.message, caught.value.pool_id, caught.value.status_code) == ("no", "p", None)


def test_the_connection_of_a_stream_that_was_left_is_closed() -> None:
    closed: list[bool] = []

    class Body(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            while True:
                yield b'data: {"ts": 1}\n\n'

        def close(self) -> None:
            closed.append(True)

    with client_of(Scripted(httpx.Response(200, stream=Body()))) as client:
        samples = client.stream_tps()
        assert next(samples).ts == 1
        assert closed == []
        samples.close()
        assert closed == [True]


def test_bodies_leave_out_what_was_not_given() -> None:
    assert create_pool(tokens=(1, 2)).body == {"tokens": [1, 2]}
    assert create_pool(prompt="a", pin=False).body == {"prompt": "a", "pin": False}
