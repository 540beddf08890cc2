"""The gate of a pool as a node, and what graphs do with a refusal.

The node asks; it takes no place. To start many sessions at once let each of them stand in the pacer's line
(``ChatPolyKV(on_saturated="wait")``, ``PolyKVContext.async_pacer``, ``CourierNode``): as many as there was room for a
moment ago are too many together.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.errors import NodeError
from langgraph.types import Command, RetryPolicy, interrupt

from polykv_proxy import client
from polykv_proxy.client import AsyncPolyKVClient, Capacity, PolyKVClient
from polykv_proxy.client.asking import Call
from polykv_proxy.client.calls import capacity
from polykv_proxy.client.line import Go, decide
from polykv_proxy.langgraph.errors import PoolSaturatedError
from polykv_proxy.langgraph.state import capacity_update, pool_of, running_context

Asking = Generator[Call[Capacity] | float, Capacity | None, Command[Any]]
"""Yields what is to be asked, and is sent the answer, or seconds to wait."""


class CapacityGate(Runnable[Any, Command[Any]]):
    """``graph.add_node("gate", gate := CapacityGate(), destinations=gate.destinations)``

    Goes to ``spawn`` when one more session of the pool may start, with ``capacity_ok``, ``headroom_sessions`` and
    ``mean_active_tps`` in the state. While sessions settle or warm up nobody knows, so it waits, ``max_wait`` at most.
    When there is no room: ``route`` goes to ``hold``; ``wait`` looks every ``poll_interval`` and goes to ``hold`` after
    ``max_wait``, or raises with ``after_wait="raise"``; ``interrupt`` interrupts the graph, and looks again when it is
    resumed; ``raise`` raises PoolSaturatedError.

    ``pool_id``: else that of the state. ``session_of(state)``: whose session it is; one that the server knows goes on.
    ``expected_tokens``: what the session will hold beyond the pool.
    ``client``, ``async_client``: else those of ``PolyKVContext``. Seconds.
    """

    def __init__(
        self,
        *,
        pool_id: int | str | None = None,
        expected_tokens: int | None = None,
        spawn: str = "spawn",
        hold: str = "hold",
        on_saturated: Literal["route", "wait", "interrupt", "raise"] = "route",
        max_wait: float | None = 60.0,
        poll_interval: float = 1.0,
        after_wait: Literal["route", "raise"] = "route",
        session_of: Callable[[Mapping[str, Any]], str | None] | None = None,
        client: PolyKVClient | None = None,
        async_client: AsyncPolyKVClient | None = None,
    ):
        self._pool_id, self._expected_tokens = pool_id, expected_tokens
        self._spawn, self._hold, self._on_saturated = spawn, hold, on_saturated
        self._max_wait, self._poll_interval, self._after_wait = max_wait, poll_interval, after_wait
        self._session_of = session_of
        self._client, self._async_client = client, async_client

    @property
    def destinations(self) -> tuple[str, str]:
        return (self._spawn, self._hold)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Command[Any]:
        sdk = self._client or running_context().client
        if sdk is None:
            raise ValueError("CapacityGate has no client: pass client, or PolyKVContext(client=…) as the context")
        asking, answer = self._ask(input), None
        try:
            while True:
                wanted = asking.send(answer)
                answer = None
                if isinstance(wanted, Call):
                    answer = sdk.call(wanted)
                else:
                    time.sleep(wanted)
        except StopIteration as done:
            command: Command[Any] = done.value
            return command

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Command[Any]:
        sdk = self._async_client or running_context().async_client
        if sdk is None:
            raise ValueError(
                "CapacityGate has no async_client: pass one, or PolyKVContext(async_client=…) as the context"
            )
        asking, answer = self._ask(input), None
        try:
            while True:
                wanted = asking.send(answer)
                answer = None
                if isinstance(wanted, Call):
                    answer = await sdk.call(wanted)
                else:
                    await asyncio.sleep(wanted)
        except StopIteration as done:
            command: Command[Any] = done.value
            return command

    def _ask(self, state: Mapping[str, Any]) -> Asking:
        pool_id = self._pool_id if self._pool_id is not None else pool_of(state)
        if pool_id is None:
            raise ValueError('CapacityGate knows no pool: pass pool_id, or put {"polykv": {"pool_id": …}} in the state')
        session_id = self._session_of(state) if self._session_of is not None else None
        began_s = time.monotonic()
        while True:
            found = yield capacity(pool_id, expected_tokens=self._expected_tokens, session_id=session_id)
            assert found is not None, "who drives this sends what was asked for"
            decision = Go(None, found.reason) if found.known_session else decide(found)
            if isinstance(decision, Go):
                return Command(update=capacity_update(found, ok=True), goto=self._spawn)
            if decision.kind == "saturated" and self._on_saturated == "interrupt":
                interrupt({"reason": decision.reason, "pool_id": pool_id, "capacity": found.model_dump()})
                began_s = time.monotonic()
                continue  # somebody resumed it: is there room now?
            left_s = None if self._max_wait is None else began_s + self._max_wait - time.monotonic()
            waits = decision.kind == "settle" or self._on_saturated == "wait"
            if waits and (left_s is None or left_s > 0):
                pause_s = decision.seconds if decision.seconds is not None else self._poll_interval
                yield pause_s if left_s is None else min(pause_s, left_s)
                continue
            if self._on_saturated == "raise" or self._after_wait == "raise":
                raise PoolSaturatedError(
                    f"no room on pool {pool_id}: {decision.reason}",
                    code="pool_saturated",
                    reason=decision.reason,
                    pool_id=pool_id,
                    capacity=found,
                )
            return Command(update=capacity_update(found, ok=False), goto=self._hold)


def route_on_capacity(state: Mapping[str, Any]) -> Literal["spawn", "hold"]:
    """For conditional edges: whether there was room at the last look."""
    return "spawn" if state.get("capacity_ok") else "hold"


def saturated_handler(state: Any, error: NodeError) -> Command[Any]:
    """``add_node(…, error_handler=saturated_handler)``: a refusal goes to ``hold``; anything else is raised again."""
    if not isinstance(error.error, client.PoolSaturatedError):
        raise error.error
    return Command(update=capacity_update(error.error.capacity, ok=False), goto="hold")


def polykv_retry_on(error: BaseException) -> bool:
    """``RetryPolicy(retry_on=polykv_retry_on)``: again when nobody could serve it, not when the gate said no.

    A refusal says when to come back, and a RetryPolicy does not read that: who comes back too early is refused again.
    Errors that are no one's of the SDK are as LangGraph has them.
    """
    if isinstance(error, client.PoolSaturatedError):
        return False
    if isinstance(error, client.PolyKVUnavailableError | client.KvExhaustedError):
        return not isinstance(error, client.PolyKVTimeoutError)  # it may be still at work on it
    if isinstance(error, client.PolyKVError):
        return error.status_code is not None and error.status_code >= 500
    usual = RetryPolicy().retry_on
    return isinstance(error, Exception) and callable(usual) and bool(usual(error))
