"""Everything that talks to llama-server, and nothing else does.

client    ``EngineClient``: the engine's hooks, and what else the proxy itself asks
relay     below it: one connection pool, and the raw streamed relay
short     the way of small POSTs, with less work than aiohttp's client makes of them
response  what the relay gives back: the head is read, the body is not yet
wire      what the hooks answer, read once at the border
plain     what a llama-server without hooks says of itself and its slots
headers   which headers may travel to the engine and back
errors    every foreign exception and every answer of the hooks becomes one of ours
"""

from polykv_proxy.upstream.client import EngineClient
from polykv_proxy.upstream.errors import map_client_error
from polykv_proxy.upstream.headers import forwardable
from polykv_proxy.upstream.response import UpstreamResponse
from polykv_proxy.upstream.wire import (
    CellMap,
    Cells,
    Cleared,
    DiskError,
    FinishedTask,
    Freed,
    LoadedSlot,
    Materialized,
    PoolList,
    PoolSequence,
    Rendered,
    Saved,
    SavedState,
    SavedUsage,
    SlotStats,
    Stats,
)

__all__ = [
    "CellMap",
    "Cells",
    "Cleared",
    "DiskError",
    "EngineClient",
    "FinishedTask",
    "Freed",
    "LoadedSlot",
    "Materialized",
    "PoolList",
    "PoolSequence",
    "Rendered",
    "Saved",
    "SavedState",
    "SavedUsage",
    "SlotStats",
    "Stats",
    "UpstreamResponse",
    "forwardable",
    "map_client_error",
]
