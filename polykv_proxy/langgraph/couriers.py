"""The courier of the SDK as a node: a list in the state, one session of the pool for each of its items."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig

from polykv_proxy.client import (
    AdmissionPacer,
    AsyncAdmissionPacer,
    AsyncPolyKVClient,
    Courier,
    Delivery,
    Job,
    PaceEvent,
    PolyKVClient,
)
from polykv_proxy.langgraph.state import pool_of, running_context

Worker = Runnable[Any, Any] | Callable[[Job[Any]], Any] | Callable[[Job[Any]], Awaitable[Any]]


class CourierNode(Runnable[Any, dict[str, Any]]):
    """``graph.add_node("review", CourierNode(worker, items="files", results="reviews"))``

    Works off ``state[items]`` as the pool has room, and writes ``state[results]``: for each item, in their order, a
    dictionary {item, session_id, result, error, attempts}; ``error`` is None or what the worker raised, as text.

    ``worker``: a function of a ``Job``; or a Runnable (a chain, a compiled graph), which gets the item with ``polykv``:
    {pool_id, session_id}, in an item that is a dictionary, else as {item, polykv}. Its requests carry both.
    ``session_key(item, index)``: names the session of an item within its thread; it should be the same when a graph is
    resumed, which then goes on with the same sessions.
    ``on_event``: is told of every start and hold. ``poll_interval``: seconds between looks while there is no room.
    ``max_workers``, ``max_attempts``: as in the SDK.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        items: str = "items",
        results: str = "results",
        pool_id: int | str | None = None,
        session_key: Callable[[Any, int], str] | None = None,
        max_workers: int | None = None,
        max_attempts: int = 100,
        poll_interval: float = 1.0,
        on_event: Callable[[PaceEvent], Any] | None = None,
        client: PolyKVClient | None = None,
        async_client: AsyncPolyKVClient | None = None,
    ):
        self._worker, self._items, self._results, self._pool_id = worker, items, results, pool_id
        self._session_key = session_key or (lambda item, index: str(index))
        self._poll_interval, self._on_event = poll_interval, on_event
        self._max_workers, self._max_attempts = max_workers, max_attempts
        self._client, self._async_client = client, async_client

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        courier = self._courier(self._client or running_context().client, "client", input, config, self._do(config))
        return {self._results: _told(courier.run(input[self._items]))}

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        sdk = self._async_client or running_context().async_client
        courier = self._courier(sdk, "async_client", input, config, self._ado(config))
        return {self._results: _told(await courier.arun(input[self._items]))}

    def _courier(
        self,
        sdk: PolyKVClient | AsyncPolyKVClient | None,
        name: str,
        state: Mapping[str, Any],
        config: RunnableConfig | None,
        worker: Callable[[Job[Any]], Any],
    ) -> Courier[Any, Any]:
        if sdk is None:
            raise ValueError(f"CourierNode has no {name}: pass it, or PolyKVContext({name}=…) as the context")
        pool_id = self._pool_id if self._pool_id is not None else pool_of(state)
        if pool_id is None:
            raise ValueError('CourierNode knows no pool: pass pool_id, or put {"polykv": {"pool_id": …}} in the state')
        pacer = (
            AdmissionPacer(sdk, pool_id, poll_interval=self._poll_interval)
            if isinstance(sdk, PolyKVClient)
            else AsyncAdmissionPacer(sdk, pool_id, poll_interval=self._poll_interval)
        )
        thread = (config or {}).get("configurable", {}).get("thread_id") or secrets.token_hex(4)
        return Courier(
            sdk,
            pool_id,
            worker,
            pacer=pacer,
            session_key=lambda item, index: f"{thread}:{self._session_key(item, index)}",
            max_workers=self._max_workers,
            max_attempts=self._max_attempts,
            on_event=self._on_event,
        )

    def _do(self, config: RunnableConfig | None) -> Callable[[Job[Any]], Any]:
        worker = self._worker
        if not isinstance(worker, Runnable):
            return worker
        return lambda job: worker.invoke(_input(job), _config(config, job))

    def _ado(self, config: RunnableConfig | None) -> Callable[[Job[Any]], Any]:
        worker = self._worker
        if not isinstance(worker, Runnable):
            return worker

        async def work(job: Job[Any]) -> Any:
            return await worker.ainvoke(_input(job), _config(config, job))

        return work


def _input(job: Job[Any]) -> dict[str, Any]:
    item = job.item if isinstance(job.item, Mapping) else {"item": job.item}
    return {**item, "polykv": {"pool_id": job.pool_id, "session_id": job.session_id}}


def _config(config: RunnableConfig | None, job: Job[Any]) -> RunnableConfig:
    """Who listens goes on listening; the thread of a worker is its session's, and its checkpoints are its own."""
    given = config or {}
    own: RunnableConfig = {"configurable": {"thread_id": job.session_id}, "tags": list(given.get("tags") or [])}
    own["metadata"] = dict(given.get("metadata") or {})
    own["callbacks"] = given.get("callbacks")
    return own


def _told(deliveries: Sequence[Delivery[Any, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "item": each.item,
            "session_id": each.session_id,
            "result": each.result if each.error is None else None,
            "error": None if each.error is None else f"{type(each.error).__name__}: {each.error}",
            "attempts": each.attempts,
        }
        for each in deliveries
    ]
