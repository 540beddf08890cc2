"""Pools as tools: an agent that manages its own tree.

What a tool finds out or does is in its answer, which the model reads; in a graph it is in the state too, which nodes
read: see ``update_of``.
"""

import json
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, BaseToolkit, StructuredTool, ToolException
from langgraph.prebuilt import ToolRuntime
from langgraph.types import Command
from pydantic import BaseModel, ConfigDict, Field

from polykv_proxy.client import (
    AsyncPolyKVClient,
    Capacity,
    PolyKVClient,
    PolyKVError,
    PoolCreated,
    Released,
    TpsSample,
    calls,
)
from polykv_proxy.client.asking import Call
from polykv_proxy.langgraph.state import capacity_update


class _CreatePool(BaseModel):
    prompt: str | None = Field(None, description="The text that requests begin with; for /completion, not for chats")
    system: str | None = Field(None, description="The system message that chats begin with; instead of prompt")
    name: str | None = Field(None, description="A unique name")
    pin: bool = Field(False, description="Keep it resident under pressure")


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class _ForkPool(BaseModel):
    pool_id: int | str = Field(description="The parent")
    prompt: str | None = Field(None, description="The child's FULL text, its parent's part included; not for chats")
    messages: list[_Message] | None = Field(
        None, description="Or the FULL list of messages that chats begin with, the parent's included"
    )
    from_session: str | None = Field(None, description="Or the session whose context the child is made of")
    name: str | None = Field(None, description="A unique name")


class _Pool(BaseModel):
    pool_id: int | str = Field(description="Id or name of the pool")


class _PoolStatus(BaseModel):
    pool_id: int | str | None = Field(None, description="Id or name of one pool; without it all")


class _Session(BaseModel):
    session_id: str | None = Field(None, description="One session; without it all")


class _Capacity(_Pool):
    expected_tokens: int | None = Field(None, description="Tokens that the session will hold beyond the pool")


class PolyKVToolkit(BaseToolkit):
    """``create_agent(model, tools=PolyKVToolkit(client=PolyKVClient(admin_key=…)).get_tools())``

    ``client`` for agents that are invoked, ``async_client`` for those that are awaited; both need the admin key where
    the proxy has one. ``releases``: with ``release_pool``. What the proxy refuses is the tool's answer, marked as an
    error: the agent reads it and goes on.

    In a graph the tools also write what nodes go by, where its state has the keys of ``PolyKVState``: pools that were
    made and released, room, rates. The pool that the agent itself is on stays what it is.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: PolyKVClient | None = None
    async_client: AsyncPolyKVClient | None = None
    releases: bool = False

    def get_tools(self) -> list[BaseTool]:
        made: list[BaseTool] = [
            self._tool("create_pool", "Prefill a shared prefix once, as a new root pool.", _CreatePool, _create),
            self._tool("fork_pool", "Make a child pool that begins like its parent.", _ForkPool, _fork),
            self._tool("pool_status", "Show pools: size, residency, sessions, use.", _PoolStatus, _status),
            self._tool("session_tps", "Show tokens per second and room of the running sessions.", _Session, _tps),
            self._tool("capacity", "Ask whether one more session of a pool may start.", _Capacity, calls.capacity),
        ]
        if self.releases:
            made.append(self._tool("release_pool", "Take a pool off the tree.", _Pool, calls.release))
        return made

    def _tool(
        self, name: str, description: str, fields: type[BaseModel], make: Callable[..., Call[Any]]
    ) -> StructuredTool:
        sdk, async_sdk = self.client, self.async_client

        # Optional in truth, but LangChain knows the runtime by this very annotation; it gives none outside of a graph.
        def do(runtime: ToolRuntime[Any, Any] = None, **given: Any) -> Any:  # type: ignore[assignment]
            if sdk is None:
                raise ToolException("PolyKVToolkit has no client: pass one, or await the agent with async_client")
            try:
                return _answer(name, sdk.call(make(**given)), given, runtime)
            except PolyKVError as error:
                raise _told(error) from error

        async def ado(runtime: ToolRuntime[Any, Any] = None, **given: Any) -> Any:  # type: ignore[assignment]
            if async_sdk is None:
                raise ToolException("PolyKVToolkit has no async_client: pass one, or invoke the agent with client")
            try:
                return _answer(name, await async_sdk.call(make(**given)), given, runtime)
            except PolyKVError as error:
                raise _told(error) from error

        coroutine: Callable[..., Coroutine[Any, Any, Any]] = ado
        return StructuredTool(
            name=name,
            description=description,
            args_schema=fields,
            func=do,
            coroutine=coroutine,
            handle_tool_error=True,
        )


def _create(prompt: str | None = None, system: str | None = None, **given: Any) -> Call[Any]:
    if (prompt is None) == (system is None):
        raise ToolException("give either prompt or system")
    messages = [{"role": "system", "content": system}] if system is not None else None
    return calls.create_pool(prompt=prompt, messages=messages, **given)


def _fork(pool_id: int | str, messages: list[_Message] | None = None, **given: Any) -> Call[Any]:
    chat = None if messages is None else [each.model_dump() for each in messages]
    return calls.fork_pool(pool_id, messages=chat, **given)


def _status(pool_id: int | str | None = None) -> Call[Any]:
    return calls.pools() if pool_id is None else calls.pool(pool_id)


def _tps(session_id: str | None = None) -> Call[Any]:
    return calls.tps()


def _answer(name: str, found: BaseModel, given: dict[str, Any], runtime: ToolRuntime[Any, Any] | None) -> Any:
    """What the model reads, and in a graph that has messages the update of its state with it."""
    shown, update = _plain(found, given), update_of(found, given)
    state = runtime.state if runtime is not None else None
    if runtime is None or not update or not isinstance(state, Mapping) or "messages" not in state:
        return shown
    told = ToolMessage(json.dumps(shown, ensure_ascii=False), name=name, tool_call_id=runtime.tool_call_id or "")
    return Command(update={**update, "messages": [told]})


def update_of(found: BaseModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """The update of ``PolyKVState``: ``polykv.pools`` of a pool that was made, ``polykv.retired`` of those released, as
    of the gate after a look at the capacity, ``mean_active_tps`` and the session that was asked about; else nothing.
    """
    if isinstance(found, PoolCreated):
        made = {"name": found.name, "parent": found.parent, "prefix_len": found.prefix_len}
        return {"polykv": {"pools": {str(found.pool_id): made}}}
    if isinstance(found, Released):
        return {"polykv": {"retired": list(found.released)}}
    if isinstance(found, Capacity):
        return capacity_update(found, ok=found.can_admit)
    if isinstance(found, TpsSample):
        sessions = {
            each.session_id: {
                "tps": each.tps_ewma,
                "ctx_headroom_tokens": each.ctx_headroom_tokens,
                "pool_id": each.pool_id,
                "ts": time.time(),
            }
            for each in found.sessions
            if each.session_id == given.get("session_id")
        }
        return {"mean_active_tps": found.mean_active_tps, **({"polykv": {"sessions": sessions}} if sessions else {})}
    return {}


def _plain(result: BaseModel, given: dict[str, Any]) -> dict[str, Any]:
    """What a model reads: no more than is known."""
    shown = result.model_dump(exclude_none=True)
    wanted = given.get("session_id")
    if wanted is not None and "sessions" in shown:
        shown["sessions"] = [each for each in shown["sessions"] if each.get("session_id") == wanted]
    return shown


def _told(error: PolyKVError) -> ToolException:
    return ToolException(f"{error.code or type(error).__name__}: {error.message}")
