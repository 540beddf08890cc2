"""LangChain and LangGraph on pools: ``pip install 'polykv-proxy[langgraph]'``, with agents ``'polykv-proxy[agents]'``.

chat         ``ChatPolyKV``: a chat model whose conversations are sessions of a pool
door         how one of its requests comes past the gate
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
    from polykv_proxy.langgraph.errors import ChatPoolSaturatedError as ChatPoolSaturatedError
    from polykv_proxy.langgraph.errors import IncompleteAnswerError as IncompleteAnswerError
    from polykv_proxy.langgraph.errors import PoolSaturatedError as PoolSaturatedError

_ROOMS = {
    "chat": ("ChatPolyKV", "OpencotiChatModel"),
    "errors": ("ChatPoolSaturatedError", "IncompleteAnswerError", "PoolSaturatedError"),
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
    "ChatPolyKV",
    "ChatPoolSaturatedError",
    "IncompleteAnswerError",
    "OpencotiChatModel",
    "PoolSaturatedError",
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
            f"{name} needs {error.name}, which is not installed: pip install 'polykv-proxy[{extra}]'", name=error.name
        ) from error


def __dir__() -> list[str]:
    return __all__
