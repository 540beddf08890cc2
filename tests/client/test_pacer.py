"""The pacers as threads and tasks use them. What they decide is the business of ``test_line``."""

import asyncio
import threading
import time

import pytest

from polykv_proxy.client import AdmissionPacer, AsyncAdmissionPacer, AsyncPolyKVClient, PoolSaturatedError
from polykv_proxy.client.line import Line
from tests.client.toy_gate import ToyGate

SOON_S = 5.0


def wait_for(is_so: object) -> None:
    assert callable(is_so)
    end_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def n_waiting(gate: ToyGate, pool_id: str = "p") -> int:
    return len(Line.shared(gate.url, pool_id)._waiting)


def test_threads_are_let_in_one_by_one_in_their_order() -> None:
    gate = ToyGate(room=2)
    admitted: list[str] = []
    with gate.sync() as client:
        pacer = AdmissionPacer(client, "p", poll_interval=0.01)

        def work(name: str) -> None:
            with pacer.acquire(session_id=name):
                client.chat([], session_id=name, pool_id="p")
                admitted.append(name)

        threads = []
        for i in range(5):
            threads.append(threading.Thread(target=work, args=(f"s{i}",)))
            threads[-1].start()
            wait_for(lambda i=i: n_waiting(gate) + len(admitted) == i + 1)
        wait_for(lambda: len(admitted) == 2)
        for name in ("s0", "s1", "s2"):
            gate.leave(name)
            wait_for(lambda name=name: len(admitted) == int(name[1]) + 3)
        for thread in threads:
            thread.join(SOON_S)
    assert admitted == [f"s{i}" for i in range(5)]
    assert gate.most == 2


def test_several_pacers_of_one_pool_are_one_line() -> None:
    gate = ToyGate(room=9)
    with gate.sync() as one, gate.sync() as other:
        first = AdmissionPacer(one, "p").acquire()
        got = []
        waiting = threading.Thread(target=lambda: got.append(AdmissionPacer(other, "p", poll_interval=9).acquire()))
        waiting.start()
        wait_for(lambda: n_waiting(gate) == 1)
        elsewhere = AdmissionPacer(other, "q").acquire()
        assert got == []
        first.accepted()  # it does not wait for its next look
        waiting.join(SOON_S)
        assert len(got) == 1
        elsewhere.abandon()


async def test_tasks_are_let_in_one_by_one_in_their_order() -> None:
    gate = ToyGate(room=1)
    admitted: list[str] = []
    async with gate.asynchronous() as client:
        pacer = AsyncAdmissionPacer(client, "p", poll_interval=0.01)

        async def work(name: str) -> None:
            with await pacer.acquire(session_id=name):
                await client.chat([], session_id=name, pool_id="p")
                admitted.append(name)
            gate.leave(name)

        await asyncio.wait_for(asyncio.gather(*(work(f"s{i}") for i in range(6))), SOON_S)
    assert admitted == [f"s{i}" for i in range(6)]
    assert gate.most == 1


async def test_who_is_cancelled_leaves_the_line() -> None:
    gate = ToyGate(room=0)
    async with gate.asynchronous() as client:
        pacer = AsyncAdmissionPacer(client, "p", poll_interval=60)
        first, second, third = (asyncio.create_task(pacer.acquire()) for _ in range(3))
        async with asyncio.timeout(SOON_S):
            while n_waiting(gate) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        gate.room = 1
        first.cancel()  # the next one looks at once, not in a minute
        assert (await asyncio.wait_for(third, SOON_S)).reason == "ok"
        with pytest.raises(asyncio.CancelledError):
            await second
    assert n_waiting(gate) == 0


async def test_a_thread_may_accept_what_a_task_was_given() -> None:
    gate = ToyGate(room=9)
    async with gate.asynchronous() as client:
        pacer = AsyncAdmissionPacer(client, "p", poll_interval=60)
        admission = await pacer.acquire()
        waiting = asyncio.create_task(pacer.acquire())
        async with asyncio.timeout(SOON_S):
            while n_waiting(gate) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await asyncio.to_thread(admission.accepted)
        assert (await asyncio.wait_for(waiting, SOON_S)).capacity.can_admit


def test_threads_and_loops_stand_in_one_line() -> None:
    gate = ToyGate(room=9)
    with gate.sync() as client:
        held = AdmissionPacer(client, "p").acquire()
        got: list[str] = []

        async def wait() -> None:
            async with gate.asynchronous() as other:
                await AsyncAdmissionPacer(other, "p", poll_interval=60).acquire()
                got.append("in")

        loop = threading.Thread(target=asyncio.run, args=(wait(),))
        loop.start()
        wait_for(lambda: n_waiting(gate) == 1)
        assert got == []
        held.abandon()
        loop.join(SOON_S)
        assert got == ["in"]


def test_max_wait_and_penalty() -> None:
    gate = ToyGate(room=1)
    with gate.sync() as client:
        pacer = AdmissionPacer(client, "p", poll_interval=0.01, max_wait=0.05)
        pacer.penalize(30)
        with pytest.raises(PoolSaturatedError) as caught:
            pacer.acquire()
        assert (caught.value.reason, caught.value.capacity) == ("it was refused", None)
        assert caught.value.retry_after is not None
        assert 29 < caught.value.retry_after <= 37.5
        assert gate.n_capacity == 0
    assert n_waiting(gate) == 0


def test_who_looks_often_is_not_called_for_every_look() -> None:
    gate, n_wakers = ToyGate(room=0), list[int]()
    line = Line.shared(gate.url, "p")
    gate.on_capacity = lambda: n_wakers.append(len(line._wakers))
    with gate.sync() as client, pytest.raises(PoolSaturatedError):
        AdmissionPacer(client, "p", poll_interval=0.001, max_wait=0.05).acquire()
    assert len(n_wakers) > 2
    assert set(n_wakers) == {0}


async def test_an_unreachable_proxy_is_told_and_the_line_goes_on() -> None:
    async with AsyncPolyKVClient("http://127.0.0.1:9", max_retries=0) as client:
        pacer = AsyncAdmissionPacer(client, "p")
        found = await asyncio.gather(pacer.acquire(), pacer.acquire(), return_exceptions=True)
    assert [getattr(error, "code", None) for error in found] == ["unreachable"] * 2
