"""The SDK: pools, admission and generation of a PolyKV proxy from Python, sync and async.

clients     ``PolyKVClient`` and ``AsyncPolyKVClient``: one method per route, typed results
calls       what these methods ask, and how the answers are read; pure, and shared by both
generating  the same for chats and completions
asking      what a request is before it is sent
results     the types of the answers
errors      what they raise
wire        HTTP apart from sending: keys, retries, events
line        who starts next; pure
pacer       ``AdmissionPacer``, ``AsyncAdmissionPacer``: let in one by one, as the gate has room
courier     ``Courier``: many jobs, as many at once as the pool has room for

It needs httpx and pydantic, and no other part of this package.
"""

from polykv_proxy.client.clients import AsyncPolyKVClient, PolyKVClient
from polykv_proxy.client.courier import Courier, Delivery, Job
from polykv_proxy.client.errors import (
    AuthenticationError,
    InvalidRequestError,
    KvExhaustedError,
    PolyKVContextOverflowError,
    PolyKVError,
    PolyKVTimeoutError,
    PolyKVUnavailableError,
    PoolBusyError,
    PoolConflictError,
    PoolNotFoundError,
    PoolSaturatedError,
    SeqBudgetExhaustedError,
    SessionNotFoundError,
)
from polykv_proxy.client.line import Admission, PaceEvent
from polykv_proxy.client.pacer import AdmissionPacer, AsyncAdmissionPacer
from polykv_proxy.client.results import (
    AdmissionInfo,
    AdmissionPolicy,
    Capacity,
    ChatReply,
    Compacted,
    CompletionReply,
    Flushed,
    Health,
    Match,
    PoolCreated,
    PoolEvicted,
    PoolInfo,
    PoolPinned,
    PoolTree,
    Receipt,
    Released,
    RequestInfo,
    SessionDropped,
    SessionInfo,
    TpsSample,
)

__all__ = [
    "Admission",
    "AdmissionInfo",
    "AdmissionPacer",
    "AdmissionPolicy",
    "AsyncAdmissionPacer",
    "AsyncPolyKVClient",
    "AuthenticationError",
    "Capacity",
    "ChatReply",
    "Compacted",
    "CompletionReply",
    "Courier",
    "Delivery",
    "Flushed",
    "Health",
    "InvalidRequestError",
    "Job",
    "KvExhaustedError",
    "Match",
    "PaceEvent",
    "PolyKVClient",
    "PolyKVContextOverflowError",
    "PolyKVError",
    "PolyKVTimeoutError",
    "PolyKVUnavailableError",
    "PoolBusyError",
    "PoolConflictError",
    "PoolCreated",
    "PoolEvicted",
    "PoolInfo",
    "PoolNotFoundError",
    "PoolPinned",
    "PoolSaturatedError",
    "PoolTree",
    "Receipt",
    "Released",
    "RequestInfo",
    "SeqBudgetExhaustedError",
    "SessionDropped",
    "SessionInfo",
    "SessionNotFoundError",
    "TpsSample",
]
