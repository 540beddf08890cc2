"""LangChain and LangGraph on pools. In a clone: ``pip install -e '.[langgraph]'``, with agents ``'.[agents]'``.

chat         ``ChatPolyKV``: a chat model whose conversations are sessions of a pool
state        what graphs keep of pools: keys, reducers, ``PolyKVContext``
gate         ``CapacityGate``, and what graphs do with a refusal
couriers     ``CourierNode``: a list of jobs, one session for each
toolkit      ``PolyKVToolkit``: pools as tools
compaction   ``CompactionNode``: a conversation that fills its context goes on from a summary
middleware   pool, gate and compaction for ``langchain.agents``
door         how one request of the chat model comes past the gate
metadata     what a reply says of itself
structured   help for structured output
connections  HTTP that belongs to no event loop
errors       what it raises

It builds on ``polykv_proxy.client``. Names are loaded when they are used: LangChain takes seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polykv_proxy.langgraph.chat import ChatPolyKV as ChatPolyKV
    from polykv_proxy.langgraph.chat import OpencotiChatModel as OpencotiChatModel
    from polykv_proxy.langgraph.compaction import CompactionNode as CompactionNode
    from polykv_proxy.langgraph.couriers import CourierNode as CourierNode
    from polykv_proxy.langgraph.errors import ChatPoolSaturatedError as ChatPoolSaturatedError
    from polykv_proxy.langgraph.errors import IncompleteAnswerError as IncompleteAnswerError
    from polykv_proxy.langgraph.errors import PoolSaturatedError as PoolSaturatedError
    from polykv_proxy.langgraph.gate import CapacityGate as CapacityGate
    from polykv_proxy.langgraph.gate import polykv_retry_on as polykv_retry_on
    from polykv_proxy.langgraph.gate import route_on_capacity as route_on_capacity
    from polykv_proxy.langgraph.gate import saturated_handler as saturated_handler
    from polykv_proxy.langgraph.middleware import CapacityGateMiddleware as CapacityGateMiddleware
    from polykv_proxy.langgraph.middleware import PolyKVAgentState as PolyKVAgentState
    from polykv_proxy.langgraph.middleware import PolyKVCompactionMiddleware as PolyKVCompactionMiddleware
    from polykv_proxy.langgraph.middleware import PolyKVPoolMiddleware as PolyKVPoolMiddleware
    from polykv_proxy.langgraph.state import PolyKVContext as PolyKVContext
    from polykv_proxy.langgraph.state import PolyKVState as PolyKVState
    from polykv_proxy.langgraph.state import merge_polykv as merge_polykv
    from polykv_proxy.langgraph.state import polykv_update as polykv_update
    from polykv_proxy.langgraph.state import take_last as take_last
    from polykv_proxy.langgraph.toolkit import PolyKVToolkit as PolyKVToolkit

_ROOMS = {
    "middleware": (
        "CapacityGateMiddleware",
        "PolyKVAgentState",
        "PolyKVCompactionMiddleware",
        "PolyKVPoolMiddleware",
    ),
    "compaction": ("CompactionNode",),
    "chat": (
        "ChatPolyKV",
        "OpencotiChatModel",
    ),
    "couriers": ("CourierNode",),
    "errors": (
        "ChatPoolSaturatedError",
        "IncompleteAnswerError",
        "PoolSaturatedError",
    ),
    "gate": (
        "CapacityGate",
        "polykv_retry_on",
        "route_on_capacity",
        "saturated_handler",
    ),
    "state": (
        "PolyKVContext",
        "PolyKVState",
        "merge_polykv",
        "polykv_update",
        "take_last",
    ),
    "toolkit": ("PolyKVToolkit",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
_EXTRA_OF = {
    "langchain": "agents",
    "langchain_core": "langgraph",
    "langchain_openai": "langgraph",
    "langgraph": "langgraph",
    "openai": "langgraph",
}

__all__ = [
    "CapacityGate",
    "CapacityGateMiddleware",
    "ChatPolyKV",
    "ChatPoolSaturatedError",
    "CompactionNode",
    "CourierNode",
    "IncompleteAnswerError",
    "OpencotiChatModel",
    "PolyKVAgentState",
    "PolyKVCompactionMiddleware",
    "PolyKVContext",
    "PolyKVPoolMiddleware",
    "PolyKVState",
    "PolyKVToolkit",
    "PoolSaturatedError",
    "merge_polykv",
    "polykv_retry_on",
    "polykv_update",
    "route_on_capacity",
    "saturated_handler",
    "take_last",
]


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{room}"), name)
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise ImportError(
            f"{name} needs {error.name}, which is not installed: in a clone of PolyKV, pip install -e '.[{extra}]'",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return __all__
