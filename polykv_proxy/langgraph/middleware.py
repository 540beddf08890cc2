"""Middleware for ``langchain.agents.create_agent``: pool and session of the agent, the gate before it, compaction.

In this order: ``create_agent(model, tools, middleware=[CapacityGateMiddleware(), PolyKVPoolMiddleware(),
PolyKVCompactionMiddleware()])``. Each of them works for agents that are invoked and for those that are awaited.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, cast

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse, hook_config
from langchain.agents.middleware.types import ExtendedModelResponse
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.runnables import Runnable
from langgraph.config import get_config
from langgraph.runtime import Runtime
from langgraph.types import Command

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient
from polykv_proxy.langgraph.chat import ChatPolyKV
from polykv_proxy.langgraph.compaction import (
    QUIET,
    SUMMARISE,
    Compactor,
    Limits,
    Moved,
    Place,
    Refork,
    all_new,
    compacted_update,
    shortened,
    text_of,
)
from polykv_proxy.langgraph.gate import CapacityGate
from polykv_proxy.langgraph.metadata import receipt_of
from polykv_proxy.langgraph.state import PolyKVState

Asks = Callable[[ModelRequest[Any]], ModelResponse[Any]]
AsksAsync = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
Answered = ModelResponse[Any] | ExtendedModelResponse[Any]


class PolyKVAgentState(AgentState[Any], PolyKVState):
    """The state of an agent with the keys of ``PolyKVState``."""


class PolyKVPoolMiddleware(AgentMiddleware[PolyKVAgentState, Any, Any]):
    """Asks the model with pool and session of the state, and writes rate and room of the session back.

    ``pool_id``: where ``state["polykv"]`` names none. The session, where it names none, is the thread of the run: an
    agent that runs several times at once in one thread, as a tool or by ``Send``, needs ``{"polykv": {"session_id":
    …}}`` in its input, or all of them are one session.
    """

    state_schema = PolyKVAgentState

    def __init__(self, pool_id: int | str | None = None):
        super().__init__()
        self._pool_id = pool_id

    def wrap_model_call(self, request: ModelRequest[Any], handler: Asks) -> Answered:
        return self._told(handler(self._placed(request)))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: AsksAsync) -> Answered:
        return self._told(await handler(self._placed(request)))

    def _placed(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        at = place_of(request.state, self._pool_id)
        return request.override(model_settings={**at, **request.model_settings})

    def _told(self, response: ModelResponse[Any]) -> Answered:
        for message in reversed(response.result):
            receipt = receipt_of(message) if isinstance(message, AIMessage) else {}
            if receipt.get("session_id") is not None:
                shown = {name: receipt.get(name) for name in ("ctx_headroom_tokens", "pool_id")}
                session = {"tps": receipt.get("session_tps"), **shown, "ts": time.time()}
                update = {"polykv": {"sessions": {receipt["session_id"]: session}}}
                return ExtendedModelResponse(response, Command(update=update))
        return response


class CapacityGateMiddleware(AgentMiddleware[PolyKVAgentState, Any, Any]):
    """Before an agent starts: is there room for its session? One that the server knows goes on at once.

    While sessions settle it waits, ``max_wait`` seconds at most. When there is no room: ``wait`` looks again every
    ``poll_interval`` seconds, and raises PoolSaturatedError after ``max_wait``; ``raise`` raises it at once; ``end``
    ends the agent without an answer, with ``capacity_ok`` False.
    ``pool_id``, ``client``, ``async_client``: else those of state and ``PolyKVContext``.
    """

    state_schema = PolyKVAgentState

    def __init__(
        self,
        pool_id: int | str | None = None,
        *,
        client: PolyKVClient | None = None,
        async_client: AsyncPolyKVClient | None = None,
        expected_tokens: int | None = None,
        on_saturated: Literal["wait", "raise", "end"] = "wait",
        max_wait: float | None = 60.0,
        poll_interval: float = 1.0,
    ):
        super().__init__()
        self._pool_id, self._on_saturated = pool_id, on_saturated
        self._gate = CapacityGate(
            pool_id=pool_id,
            expected_tokens=expected_tokens,
            client=client,
            async_client=async_client,
            on_saturated="route" if on_saturated == "end" else on_saturated,
            after_wait="route" if on_saturated == "end" else "raise",
            session_of=lambda state: place_of(state, pool_id).get("session_id"),
            max_wait=max_wait,
            poll_interval=poll_interval,
        )

    @hook_config(can_jump_to=["end"])
    def before_agent(self, state: PolyKVAgentState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        return self._update(self._gate.invoke(state))

    @hook_config(can_jump_to=["end"])
    async def abefore_agent(self, state: PolyKVAgentState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        return self._update(await self._gate.ainvoke(state))

    def _update(self, command: Command[Any]) -> dict[str, Any]:
        update = cast(dict[str, Any], command.update)
        return update if update["capacity_ok"] else {**update, "jump_to": "end"}


class PolyKVCompactionMiddleware(AgentMiddleware[PolyKVAgentState, Any, Any]):
    """As ``CompactionNode``, for agents: before the model is asked, with the agent's own system message and tools.

    The pool that was left is released once the turn that follows succeeded; a turn that fails changes nothing.
    The model must be a ``ChatPolyKV``.
    """

    state_schema = PolyKVAgentState

    def __init__(
        self,
        client: PolyKVClient | None = None,
        *,
        async_client: AsyncPolyKVClient | None = None,
        pressure: float = 0.8,
        headroom_tokens: int | None = None,
        keep: int = 20,
        summary_prompt: str = SUMMARISE,
        summary_max_tokens: int | None = 1024,
        refork: Refork = "if_shared",
        ancestor: int | str | None = None,
    ):
        super().__init__()
        limits = Limits(pressure, headroom_tokens, keep, summary_prompt, summary_max_tokens)
        self._compactor = Compactor(client, async_client, limits, refork, ancestor)

    def wrap_model_call(self, request: ModelRequest[Any], handler: Asks) -> Answered:
        begun = self._begin(request)
        if begun is None:
            return handler(request)
        place, asked, question, kept = begun
        summary = text_of(asked.invoke(question, QUIET))
        if summary is None:
            return handler(request)
        new = shortened(summary, kept)
        moved = self._compactor.do(self._moving(request, place, new))
        response = handler(_after(request, new, moved))
        return _done(request, new, moved, response, self._compactor.let_go(moved.leaves))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: AsksAsync) -> Answered:
        begun = self._begin(request)
        if begun is None:
            return await handler(request)
        place, asked, question, kept = begun
        summary = text_of(await asked.ainvoke(question, QUIET))
        if summary is None:
            return await handler(request)
        new = shortened(summary, kept)
        moved = await self._compactor.ado(self._moving(request, place, new))
        response = await handler(_after(request, new, moved))
        return _done(request, new, moved, response, await self._compactor.alet_go(moved.leaves))

    def _begin(
        self, request: ModelRequest[Any]
    ) -> tuple[Place, Runnable[Any, AIMessage], list[AnyMessage], list[AnyMessage]] | None:
        """(where it is, who is asked for the summary, with what, what is kept); None: there is no need."""
        limits = self._compactor.limits
        if not limits.due(request.messages):
            return None
        head, old, kept = limits.split([*_system(request), *request.messages])
        if not old:
            return None
        model = _model(request)
        place = self._compactor.place(model, request.state, request.model_settings)
        settings = {**request.model_settings, **limits.settings(place)}
        asked = model.bind_tools(request.tools, **settings) if request.tools else model.bind(**settings)
        return place, asked, [*head, *old, limits.question()], kept

    def _moving(self, request: ModelRequest[Any], place: Place, new: Sequence[AnyMessage]) -> Any:
        whole = [*_system(request), *new]
        return self._compactor.moving(_model(request), place, whole, request.tools, request.model_settings)


def place_of(state: Mapping[str, Any], pool_id: int | str | None) -> dict[str, Any]:
    """Pool and session for the requests of an agent, those that are known."""
    at = state.get("polykv") or {}
    thread = get_config().get("configurable", {}).get("thread_id")
    found = {"pool_id": at.get("pool_id", pool_id), "session_id": at.get("session_id", thread)}
    return {name: value for name, value in found.items() if value is not None}


def _system(request: ModelRequest[Any]) -> list[AnyMessage]:
    return [request.system_message] if request.system_message is not None else []


def _model(request: ModelRequest[Any]) -> ChatPolyKV:
    if not isinstance(request.model, ChatPolyKV):
        raise TypeError(f"compaction needs a ChatPolyKV, and the agent's model is a {type(request.model).__name__}")
    return request.model


def _after(request: ModelRequest[Any], new: Sequence[AnyMessage], moved: Moved) -> ModelRequest[Any]:
    settings = {**request.model_settings, "pool_id": moved.pool_id}
    return request.override(messages=list(new), model_settings=settings)


def _done(
    request: ModelRequest[Any],
    new: Sequence[AnyMessage],
    moved: Moved,
    response: ModelResponse[Any],
    released: Sequence[int],
) -> Answered:
    """The answer again after the new messages: this update is applied after that of the answer."""
    update = {
        "messages": all_new([*new, *cast(list[AnyMessage], response.result)]),
        "polykv": compacted_update(request.state, moved, released),
    }
    return ExtendedModelResponse(response, Command(update=update))
