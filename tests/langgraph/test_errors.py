"""What ``ChatPolyKV`` raises, and what it waits for."""

import asyncio
import json
import pickle
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError, ModelError, ModelRateLimitError
from langchain_core.messages import HumanMessage

from polykv_proxy import client
from polykv_proxy.langgraph import ChatPolyKV, ChatPoolSaturatedError, IncompleteAnswerError, PoolSaturatedError
from tests.client.toy_gate import ToyGate
from tests.langgraph.toy_server import ToyServer
from tests.relay.raw import until

Answer = Callable[[httpx.Request], httpx.Response]


def refusing(status: int, code: str, headers: dict[str, str] | None = None, **error: Any) -> Answer:
    body = {"error": {"message": "it is so", "type": "t", "code": code, **error}, "src": "polykv_proxy"}
    return lambda request: httpx.Response(status, json=body, headers={"x-request-id": "r1", **(headers or {})})


def fails(asked: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        asked()
    return caught.value


async def failures(model: ChatPolyKV) -> list[BaseException]:
    """Of invoke, stream, ainvoke, astream."""
    found = [fails(lambda: model.invoke("hi")), fails(lambda: list(model.stream("hi")))]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await model.ainvoke("hi")
    found.append(caught.value)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        [piece async for piece in model.astream("hi")]
    return [*found, caught.value]


async def test_a_refusal_is_raised_at_once_as_everybodys_error(toy: ToyServer) -> None:
    toy.answer = refusing(429, "pool_saturated", {"retry-after": "9", "x-polykv-reason": "below floor"})
    found = await failures(toy.model(pool_id=3))
    assert len(toy.requests) == 4, "nothing is repeated"
    for error in found:
        assert isinstance(error, ChatPoolSaturatedError)
        for kind in (client.PoolSaturatedError, PoolSaturatedError, openai.RateLimitError, ModelRateLimitError):
            assert isinstance(error, kind)
        assert (error.retry_after, error.reason, error.pool_id) == (9.0, "below floor", 3)
        assert (error.status_code, error.code, error.request_id) == (429, "pool_saturated", "r1")
        assert error.is_retryable
        assert error.response.status_code == 429
        assert str(error) == "it is so"
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is ChatPoolSaturatedError
        assert (str(copy), copy.retry_after, copy.pool_id, copy.reason) == ("it is so", 9.0, 3, "below floor")


@pytest.mark.parametrize(
    ("status", "code", "kinds", "retryable"),
    [
        (400, "context_length_exceeded", (client.PolyKVContextOverflowError, ContextOverflowError), False),
        (400, "prefix_mismatch", (client.PoolConflictError, openai.BadRequestError), False),
        (400, "invalid", (client.InvalidRequestError, openai.BadRequestError), False),
        (401, "invalid_api_key", (client.AuthenticationError, openai.AuthenticationError), False),
        (404, "pool_not_found", (client.PoolNotFoundError, openai.NotFoundError), False),
        (429, "queue_timeout", (client.PoolSaturatedError, openai.RateLimitError), True),
        (500, "internal", (client.PolyKVError, openai.InternalServerError), True),
        (503, "kv_exhausted", (client.KvExhaustedError, openai.InternalServerError), True),
        (503, "upstream_unavailable", (client.PolyKVUnavailableError, openai.InternalServerError), True),
    ],
)
async def test_every_error_is_one_of_the_sdk_of_openai_and_of_langchain(
    toy: ToyServer, status: int, code: str, kinds: tuple[type, ...], retryable: bool
) -> None:
    toy.answer = refusing(status, code, n_prompt_tokens=9, n_ctx=8, divergence_pos=5)
    for error in await failures(toy.model()):
        assert isinstance(error, (client.PolyKVError,))
        assert isinstance(error, ModelError)
        assert all(isinstance(error, kind) for kind in kinds)
        assert (error.status_code, error.code, error.is_retryable) == (status, code, retryable)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.code) == (type(error), "it is so", code)


async def test_no_answer_is_an_unavailable_or_a_timeout_error(toy: ToyServer) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    def dawdle(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("too long", request=request)

    toy.answer = refuse
    for error in await failures(toy.model()):
        assert isinstance(error, client.PolyKVUnavailableError)
        assert isinstance(error, openai.APIConnectionError)
        assert "http://toy cannot be reached: connection refused" in str(error)
    toy.answer = dawdle
    for error in await failures(toy.model()):
        assert isinstance(error, client.PolyKVTimeoutError)
        assert isinstance(error, openai.APITimeoutError)
        assert type(pickle.loads(pickle.dumps(error))) is type(error)


async def test_a_stream_that_breaks_off_is_an_error_unless_it_may(toy: ToyServer) -> None:
    toy.cut = True
    strict, lax = toy.model(), toy.model(strict_stream=False)
    said: list[Any] = []
    with pytest.raises(IncompleteAnswerError, match="broke off"):
        said.extend(piece.content for piece in strict.stream("hi"))
    assert "".join(map(str, said)) == "hello world"
    with pytest.raises(client.PolyKVUnavailableError):
        [piece async for piece in strict.astream("hi")]
    assert "".join(str(piece.content) for piece in lax.stream("hi")) == "hello world"


async def test_an_error_in_a_stream_is_one_of_ours(toy: ToyServer) -> None:
    event = {"error": {"message": "the engine is gone", "type": "unavailable", "code": "upstream_unavailable"}}
    toy.answer = lambda request: httpx.Response(
        200, content=b"data: " + json.dumps(event).encode() + b"\n\n", headers={"content-type": "text/event-stream"}
    )
    for error in (await failures(toy.model()))[1::2]:
        assert isinstance(error, client.PolyKVUnavailableError)
        assert isinstance(error, openai.APIError)
        assert (error.code, str(error)) == ("upstream_unavailable", "the engine is gone")


# Waiting -----------------------------------------------------------------------------------------------------------


def waiting(gate: ToyGate, **fields: Any) -> ChatPolyKV:
    transport = httpx.MockTransport(gate._answer)
    ours: dict[str, Any] = {
        "base_url": gate.url,
        "http_client": httpx.Client(transport=transport),
        "http_async_client": httpx.AsyncClient(transport=transport),
        "sdk": gate.sync(),
        "async_sdk": gate.asynchronous(),
    }
    return ChatPolyKV(on_saturated="wait", pool_id="p", **ours, **fields)


async def test_waiting_sessions_come_in_one_by_one_as_there_is_room() -> None:
    gate = ToyGate(room=2)
    model = waiting(gate)

    async def work(name: str) -> None:
        answer = await model.ainvoke("hi", session_id=name)
        assert answer.content == name
        await asyncio.sleep(0.01)
        gate.leave(name)

    names = [f"s{i}" for i in range(6)]
    async with asyncio.timeout(60):
        await asyncio.gather(*map(work, names))
    assert sorted(gate.order) == names
    assert gate.most <= 2


async def test_a_refusal_is_waited_for_and_sent_again() -> None:
    gate = ToyGate(room=9, refuse=3)
    model = waiting(gate)
    assert (await model.ainvoke("hi", session_id="a")).content == "a"
    assert gate.order == ["a"]
    assert gate.refuse == 0
    gate.refuse = 2
    assert (await asyncio.to_thread(model.invoke, "hi", session_id="b")).content == "b"


async def test_who_is_known_goes_on_at_once_when_there_is_no_room() -> None:
    gate = ToyGate(room=1)
    model = waiting(gate, max_wait_s=0.0)
    await model.ainvoke("hi", session_id="a")
    await model.ainvoke("hi", session_id="a")
    with pytest.raises(PoolSaturatedError) as caught:
        await model.ainvoke("hi", session_id="b")
    assert isinstance(caught.value, ModelRateLimitError)
    assert (caught.value.code, caught.value.pool_id) == ("max_wait", "p")
    assert caught.value.capacity is not None
    assert type(pickle.loads(pickle.dumps(caught.value))) is PoolSaturatedError
    with pytest.raises(PoolSaturatedError):
        await asyncio.to_thread(model.invoke, "hi", session_id="c")
    assert gate.order == ["a"]


async def test_cancelled_while_it_waits_it_leaves_the_line() -> None:
    gate = ToyGate(room=1)
    model = waiting(gate)
    await model.ainvoke("hi", session_id="a")
    stuck = asyncio.create_task(model.ainvoke("hi", session_id="b"))
    behind = asyncio.create_task(model.ainvoke("hi", session_id="c"))
    n_seen = gate.n_capacity
    async with asyncio.timeout(60):
        await until(lambda: gate.n_capacity >= n_seen + 3)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        gate.leave("a")
        assert (await behind).content == "c"
    assert gate.order == ["a", "c"]


async def test_without_a_pool_it_waits_as_the_server_says(toy: ToyServer) -> None:
    left = [2]

    def answer(request: httpx.Request) -> httpx.Response | None:
        left[0] -= 1
        return refusing(429, "pool_saturated", {"retry-after-ms": "5"})(request) if left[0] >= 0 else None

    toy.answer = answer
    model = toy.model(on_saturated="wait")
    assert (await model.ainvoke("hi")).content == "hello world"
    left[0] = 2
    began_s = time.monotonic()
    assert "".join(str(piece.content) for piece in model.stream("hi")) == "hello world"
    assert time.monotonic() - began_s >= 0.01
    left[0] = 10**6
    with pytest.raises(PoolSaturatedError):
        await toy.model(on_saturated="wait", max_wait_s=0.02).ainvoke("hi")


async def test_a_stream_that_is_left_is_closed(toy: ToyServer) -> None:
    closed = asyncio.Event()

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            piece = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "a"}}]}
            while True:
                yield b"data: " + json.dumps(piece).encode() + b"\n\n"
                await asyncio.sleep(0)

        async def aclose(self) -> None:
            closed.set()

    toy.answer = lambda request: httpx.Response(200, stream=Endless(), headers={"content-type": "text/event-stream"})
    begun = asyncio.Event()

    async def read() -> None:
        async for piece in toy.model().astream("hi"):
            assert piece.content == "a"
            begun.set()

    task = asyncio.create_task(read())
    async with asyncio.timeout(30):
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed.wait()


async def test_a_stream_that_is_not_read_to_its_end_is_closed_with_it(toy: ToyServer) -> None:
    closed: list[str] = []

    class Both(httpx.SyncByteStream, httpx.AsyncByteStream):
        piece = b'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'

        def __iter__(self) -> Any:
            yield from [self.piece] * 9

        async def __aiter__(self) -> Any:
            for each in [self.piece] * 9:
                yield each

        def close(self) -> None:
            closed.append("sync")

        async def aclose(self) -> None:
            closed.append("async")

    toy.answer = lambda request: httpx.Response(200, stream=Both(), headers={"content-type": "text/event-stream"})
    stream: Any = toy.model()._stream([HumanMessage("hi")])
    next(stream)
    stream.close()
    assert closed == ["sync"]
    astream: Any = toy.model()._astream([HumanMessage("hi")])
    await anext(astream)
    await astream.aclose()
    assert closed == ["sync", "async"]
