"""Everything that talks to llama-server, and nothing else does.

client   ``EngineClient``: one connection pool, the engine's hooks, and the raw streamed relay
wire     what the hooks answer, read once at the border
headers  which headers may travel to the engine and back
errors   every foreign exception and every answer of the hooks becomes one of ours
"""

from polykv_proxy.upstream.client import EngineClient, UpstreamResponse
from polykv_proxy.upstream.errors import map_client_error
from polykv_proxy.upstream.headers import forwardable
from polykv_proxy.upstream.wire import (
    CellMap,
    Cells,
    FinishedTask,
    Freed,
    Materialized,
    PoolList,
    PoolSequence,
    Rendered,
    SlotStats,
    Stats,
)

__all__ = [
    "CellMap",
    "Cells",
    "EngineClient",
    "FinishedTask",
    "Freed",
    "Materialized",
    "PoolList",
    "PoolSequence",
    "Rendered",
    "SlotStats",
    "Stats",
    "UpstreamResponse",
    "forwardable",
    "map_client_error",
]
