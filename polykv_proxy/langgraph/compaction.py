"""Compaction: a conversation that fills its context goes on from a summary of its older part.

The summary is asked for in the session itself: its prompt begins like the conversation, so only the question is
prefilled, and a session that is known is never gated. What is shared stays shared: system message and tools are not
touched. The new context attaches to the stable ancestor, or to a pool of its own forked off it (``refork``).
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient, PolyKVError, PoolBusyError, PoolNotFoundError
from polykv_proxy.client.asking import Call
from polykv_proxy.client.calls import compact_by_refork, pool, release
from polykv_proxy.langgraph.chat import ChatPolyKV
from polykv_proxy.langgraph.metadata import receipt_of
from polykv_proxy.langgraph.state import polykv_update, running_context

log = logging.getLogger("polykv.langgraph")

SUMMARISE = (
    "Our conversation is about to be cut: only your answer to this message will be left of it. Write down everything "
    "that is needed to go on: the task, what was decided, what was found out and done, names, numbers and paths as "
    "they are, and what is open. Do not call a tool, and do not address me."
)
SUMMARY = "This is what came before, in your own words:\n\n"
Tools = Sequence[BaseTool | dict[str, Any] | Callable[..., Any] | type]
Refork = Literal["if_shared", "always", "never"]


@dataclass(frozen=True, slots=True)
class Limits:
    """When to compact, and what to keep.

    ``pressure``: from this part of the context on. ``headroom_tokens``: or when so few tokens are left, if given.
    ``keep``: messages at the end that stay as they are; more, where a call of a tool belongs to its answer.
    ``summary_max_tokens``: of the summary; None: as many as the model may say anywhere.
    """

    pressure: float = 0.8
    headroom_tokens: int | None = None
    keep: int = 20
    summary_prompt: str = SUMMARISE
    summary_max_tokens: int | None = 1024

    def due(self, messages: Sequence[BaseMessage]) -> bool:
        """Whether the last answer says that the context runs out."""
        for message in reversed(messages):
            receipt = receipt_of(message) if isinstance(message, AIMessage) else {}
            if not receipt:
                continue
            used, total, left = (receipt.get(name) for name in ("ctx_used", "ctx_total", "ctx_headroom_tokens"))
            if used is not None and total and used / total >= self.pressure:
                return True
            return self.headroom_tokens is not None and left is not None and left < self.headroom_tokens
        return False

    def split(self, messages: Sequence[AnyMessage]) -> tuple[list[AnyMessage], list[AnyMessage], list[AnyMessage]]:
        """(system messages at the start, what gives way to a summary, what is kept); nothing gives way: it is empty."""
        n_head = next((i for i, each in enumerate(messages) if not isinstance(each, SystemMessage)), len(messages))
        cut = safe_cut(messages, max(n_head, len(messages) - self.keep))
        old = list(messages[n_head:cut])
        if len(old) < 2:  # a summary would be no shorter
            return list(messages[:n_head]), [], list(messages[n_head:])
        return list(messages[:n_head]), old, list(messages[cut:])

    def question(self) -> HumanMessage:
        return HumanMessage(self.summary_prompt)

    def settings(self, place: "Place") -> dict[str, Any]:
        """Of the request for the summary: in the session that it is about."""
        at = {"pool_id": place.pool_id, "session_id": place.session_id}
        return at if self.summary_max_tokens is None else {**at, "max_tokens": self.summary_max_tokens}


def safe_cut(messages: Sequence[BaseMessage], cut: int) -> int:
    """Where to cut at ``cut`` or before, so that no answer of a tool is parted from its call."""
    while 0 < cut < len(messages) and isinstance(messages[cut], ToolMessage):
        cut -= 1
    return cut


def shortened(summary: str, kept: Sequence[AnyMessage]) -> list[AnyMessage]:
    """The messages after a compaction. Receipts of old turns go: they tell of a context that is no more."""
    out: list[AnyMessage] = [HumanMessage(SUMMARY + summary)]
    for message in kept:
        metadata = {name: value for name, value in message.response_metadata.items() if name != "polykv"}
        out.append(message.model_copy(update={"response_metadata": metadata}))
    return out


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session is, and where it may go back to."""

    pool_id: int | str | None
    session_id: str | None
    ancestor: int | str | None


@dataclass(frozen=True, slots=True)
class Moved:
    """``pool_id``: what its next turns name. ``leaves``: the pool that nobody needs then; None: there is none."""

    pool_id: int | str | None
    leaves: int | str | None


Asking = Generator[Call[Any], Any, Moved]


def move(
    place: Place,
    refork: Refork,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Asking:
    """Yields what to ask, and is sent the answers. ``messages``: the whole compacted chat as it will be sent."""
    if place.ancestor is None:
        return Moved(place.pool_id, None)
    shared, alone = False, False
    if place.pool_id is not None and str(place.pool_id) != str(place.ancestor):
        there = yield pool(place.pool_id)
        if str(place.ancestor) in (str(there.pool_id), there.name):
            return Moved(place.pool_id, None)  # the same by its name
        others = [each for each in there.sessions if each.session_id != place.session_id]
        shared = bool(others)
        alone = not others and not there.children
    leaves = place.pool_id if alone else None
    if refork == "never" or (refork == "if_shared" and not shared):
        return Moved(place.ancestor, leaves)
    made = yield compact_by_refork(
        ancestor=place.ancestor, messages=messages, tools=tools, chat_template_kwargs=chat_template_kwargs
    )
    return Moved(made.pool_id, leaves)


class Compactor:
    """Both ways to do it; see ``CompactionNode`` and ``PolyKVCompactionMiddleware``."""

    def __init__(
        self,
        client: PolyKVClient | None,
        async_client: AsyncPolyKVClient | None,
        limits: Limits,
        refork: Refork,
        ancestor: int | str | None,
    ):
        self._client, self._async_client = client, async_client
        self.limits, self.refork, self.ancestor = limits, refork, ancestor

    def place(self, model: ChatPolyKV, state: Mapping[str, Any], settings: Mapping[str, Any]) -> Place:
        at = state.get("polykv") or {}
        pool_id = settings.get("pool_id", at.get("pool_id", model.pool_id))
        session_id = settings.get("session_id", at.get("session_id", model.session_id))
        ancestor = self.ancestor if self.ancestor is not None else at.get("ancestor_pool_id")
        return Place(pool_id, session_id, ancestor)

    def moving(
        self,
        model: ChatPolyKV,
        place: Place,
        messages: Sequence[BaseMessage],
        tools: Tools,
        settings: Mapping[str, Any],
    ) -> Asking:
        payload = model._get_request_payload(list(messages), **settings)
        made = [convert_to_openai_tool(each) for each in tools] or None
        return move(place, self.refork, payload["messages"], made, payload["extra_body"].get("chat_template_kwargs"))

    def do(self, asking: Asking) -> Moved:
        answer = None
        try:
            while True:
                wanted = asking.send(answer)
                answer = self._sdk().call(wanted)
        except StopIteration as done:
            moved: Moved = done.value
            return moved

    async def ado(self, asking: Asking) -> Moved:
        answer = None
        try:
            while True:
                wanted = asking.send(answer)
                answer = await self._async_sdk().call(wanted)
        except StopIteration as done:
            moved: Moved = done.value
            return moved

    def let_go(self, pool_id: int | str | None) -> list[int]:
        """Release a pool that was left. Gives what is off the tree."""
        if pool_id is None:
            return []
        try:
            return self._sdk().call(release(pool_id)).released
        except PolyKVError as error:
            return _kept(pool_id, error)

    async def alet_go(self, pool_id: int | str | None) -> list[int]:
        if pool_id is None:
            return []
        try:
            return (await self._async_sdk().call(release(pool_id))).released
        except PolyKVError as error:
            return _kept(pool_id, error)

    def _sdk(self) -> PolyKVClient:
        sdk = self._client or running_context().client
        if sdk is None:
            raise ValueError("compaction has no client: pass client, or PolyKVContext(client=…) as the context")
        return sdk

    def _async_sdk(self) -> AsyncPolyKVClient:
        sdk = self._async_client or running_context().async_client
        if sdk is None:
            raise ValueError("compaction has no async_client: pass it, or PolyKVContext(async_client=…) as the context")
        return sdk


def _kept(pool_id: int | str, error: PolyKVError) -> list[int]:
    """It stays, which costs room and nothing else: the turn that it would have failed is done."""
    if not isinstance(error, PoolBusyError | PoolNotFoundError):
        log.warning("pool %s was left after a compaction, and could not be released: %s", pool_id, error)
    return []


def text_of(answer: BaseMessage) -> str | None:
    """The summary; None, and a warning, when it is none."""
    text = answer.text.strip()
    if not text or (isinstance(answer, AIMessage) and answer.tool_calls):
        log.warning("asked for a summary the model called a tool or said nothing: the conversation stays as it is")
        return None
    if answer.response_metadata.get("finish_reason") == "length":
        log.warning(
            "the summary of a conversation was cut off at its limit of tokens: give it more (summary_max_tokens)"
        )
    return text


def compacted_update(state: Mapping[str, Any], moved: Moved, released: Sequence[int], **more: Any) -> dict[str, Any]:
    """The update of ``polykv``."""
    n = ((state.get("polykv") or {}).get("compactions") or 0) + 1
    return polykv_update(pool_id=moved.pool_id, compactions=n, retired=list(released), **more)


def all_new(messages: Sequence[AnyMessage]) -> list[AnyMessage | RemoveMessage]:
    """The update of ``messages`` that replaces them."""
    return [RemoveMessage(id=REMOVE_ALL_MESSAGES), *messages]


QUIET: RunnableConfig = {"tags": ["nostream"], "run_name": "compaction"}


class CompactionNode(Runnable[Any, dict[str, Any]]):
    """``graph.add_node("compact", CompactionNode(model))`` before the node that asks the model.

    Looks at the last answer in ``state["messages"]``. When the context runs out, the older messages give way to a
    summary, and ``state["polykv"]["pool_id"]`` is where the conversation goes on. System messages at the start stay.

    ``tools``: those that are bound to the model where it is asked; else its prompt begins otherwise.
    ``ancestor``: the pool that ends with system message and tools; else ``state["polykv"]["ancestor_pool_id"]``;
    without one the pool stays what it is. ``refork``: a pool of its own for the new context ``always``, ``never``, or
    ``if_shared``: when other sessions are on the old one. ``client``, ``async_client``: else of ``PolyKVContext``.
    A pool that nobody is on any more is released the next time that this node runs: after the next turn.
    """

    def __init__(
        self,
        model: ChatPolyKV,
        client: PolyKVClient | None = None,
        *,
        async_client: AsyncPolyKVClient | None = None,
        tools: Tools = (),
        pressure: float = 0.8,
        headroom_tokens: int | None = None,
        keep: int = 20,
        summary_prompt: str = SUMMARISE,
        summary_max_tokens: int | None = 1024,
        refork: Refork = "if_shared",
        ancestor: int | str | None = None,
    ):
        self._model, self._tools = model, tools
        limits = Limits(pressure, headroom_tokens, keep, summary_prompt, summary_max_tokens)
        self._compactor = Compactor(client, async_client, limits, refork, ancestor)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        left = (input.get("polykv") or {}).get("leaving")
        update: dict[str, Any] = _after(left, self._compactor.let_go(left))
        head, old, kept = self._old(input["messages"])
        if not old:
            return update
        place, asked = self._place(input)
        summary = text_of(asked.invoke([*head, *old, self._compactor.limits.question()], QUIET))
        if summary is None:
            return update
        new = [*head, *shortened(summary, kept)]
        moved = self._compactor.do(self._compactor.moving(self._model, place, new, self._tools, {}))
        return self._update(input, update, new, moved)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        left = (input.get("polykv") or {}).get("leaving")
        update: dict[str, Any] = _after(left, await self._compactor.alet_go(left))
        head, old, kept = self._old(input["messages"])
        if not old:
            return update
        place, asked = self._place(input)
        summary = text_of(await asked.ainvoke([*head, *old, self._compactor.limits.question()], QUIET))
        if summary is None:
            return update
        new = [*head, *shortened(summary, kept)]
        moved = await self._compactor.ado(self._compactor.moving(self._model, place, new, self._tools, {}))
        return self._update(input, update, new, moved)

    def _old(self, messages: Sequence[AnyMessage]) -> tuple[list[AnyMessage], list[AnyMessage], list[AnyMessage]]:
        limits = self._compactor.limits
        return limits.split(messages) if limits.due(messages) else ([], [], [])

    def _place(self, state: Mapping[str, Any]) -> tuple[Place, Runnable[Any, AIMessage]]:
        place = self._compactor.place(self._model, state, {})
        at = self._compactor.limits.settings(place)
        return place, self._model.bind_tools(self._tools, **at) if self._tools else self._model.bind(**at)

    def _update(
        self, state: Mapping[str, Any], update: dict[str, Any], new: Sequence[AnyMessage], moved: Moved
    ) -> dict[str, Any]:
        released = update.get("polykv", {}).get("retired", ())
        polykv = compacted_update(state, moved, released, leaving=moved.leaves)
        return {"messages": all_new(new), "polykv": polykv}


def _after(left: int | str | None, released: Sequence[int]) -> dict[str, Any]:
    return {} if left is None else {"polykv": polykv_update(leaving=None, retired=list(released))}
