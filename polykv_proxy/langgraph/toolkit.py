"""Pools as tools: an agent that manages its own tree."""

from collections.abc import Callable, Coroutine
from typing import Any

from langchain_core.tools import BaseTool, BaseToolkit, StructuredTool, ToolException
from pydantic import BaseModel, ConfigDict, Field

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient, PolyKVError, calls
from polykv_proxy.client.asking import Call


class _CreatePool(BaseModel):
    prompt: str | None = Field(None, description="The text that requests begin with; for /completion, not for chats")
    system: str | None = Field(None, description="The system message that chats begin with; instead of prompt")
    name: str | None = Field(None, description="A unique name")
    pin: bool = Field(False, description="Keep it resident under pressure")


class _ForkPool(BaseModel):
    pool_id: int | str = Field(description="The parent")
    prompt: str | None = Field(None, description="The child's FULL text, its parent's part included")
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
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: PolyKVClient | None = None
    async_client: AsyncPolyKVClient | None = None
    releases: bool = False

    def get_tools(self) -> list[BaseTool]:
        made: list[BaseTool] = [
            self._tool("create_pool", "Prefill a shared prefix once, as a new root pool.", _CreatePool, _create),
            self._tool("fork_pool", "Make a child pool that begins like its parent.", _ForkPool, calls.fork_pool),
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

        def do(**given: Any) -> Any:
            if sdk is None:
                raise ToolException("PolyKVToolkit has no client: pass one, or await the agent with async_client")
            try:
                return _plain(sdk.call(make(**given)), given)
            except PolyKVError as error:
                raise _told(error) from error

        async def ado(**given: Any) -> Any:
            if async_sdk is None:
                raise ToolException("PolyKVToolkit has no async_client: pass one, or invoke the agent with client")
            try:
                return _plain(await async_sdk.call(make(**given)), given)
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


def _status(pool_id: int | str | None = None) -> Call[Any]:
    return calls.pools() if pool_id is None else calls.pool(pool_id)


def _tps(session_id: str | None = None) -> Call[Any]:
    return calls.tps()


def _plain(result: BaseModel, given: dict[str, Any]) -> dict[str, Any]:
    """What a model reads: no more than is known."""
    shown = result.model_dump(exclude_none=True)
    wanted = given.get("session_id")
    if wanted is not None and "sessions" in shown:
        shown["sessions"] = [each for each in shown["sessions"] if each.get("session_id") == wanted]
    return shown


def _told(error: PolyKVError) -> ToolException:
    return ToolException(f"{error.code or type(error).__name__}: {error.message}")
