"""Foreign exceptions and the hooks' error answers, mapped to our tree in this one place.

What the mapping decides: is the engine away (503, try again), did it take too long (504), or did it answer something
that is no answer (502). A test walks aiohttp's exception classes, so a new one cannot slip through unnoticed.
"""

import asyncio
import os
from typing import Any

import aiohttp

from polykv_proxy.errors import (
    ConnectFailed,
    ContextLengthExceeded,
    EngineKeyRefused,
    EngineOwned,
    EngineRefused,
    EngineUnpatched,
    KvExhausted,
    PolyKVError,
    PrefixMismatch,
    RequestError,
    SavedBudget,
    SavedGone,
    SavingRefused,
    SavingUnsupported,
    SeqIdsExhausted,
    SequenceGone,
    SessionNotResident,
    SharingUnsupported,
    UpstreamError,
    UpstreamLoading,
    UpstreamTimeout,
    UpstreamUnavailable,
)

# The first row that fits decides, so special ones come first.
_TABLE: tuple[tuple[type[BaseException], type[UpstreamError], str], ...] = (
    (aiohttp.ConnectionTimeoutError, ConnectFailed, "connecting took too long"),
    (aiohttp.ServerTimeoutError, UpstreamTimeout, "the engine took too long"),
    (aiohttp.ClientSSLError, UpstreamError, "TLS with the engine failed"),
    (aiohttp.ClientConnectorError, ConnectFailed, "cannot connect to the engine"),
    (aiohttp.ServerFingerprintMismatch, UpstreamError, "the engine shows another certificate"),
    (aiohttp.ClientConnectionError, UpstreamUnavailable, "the engine closed the connection"),
    (aiohttp.ClientPayloadError, UpstreamUnavailable, "the engine's reply broke off before its end; ask again"),
    (aiohttp.ClientResponseError, UpstreamError, "the engine's reply is not HTTP that can be read"),
    (aiohttp.InvalidURL, UpstreamError, "the engine's address is not a URL"),
    (aiohttp.ClientError, UpstreamError, "the engine's reply cannot be used"),
    (asyncio.TimeoutError, UpstreamTimeout, "the engine took too long"),
    (OSError, UpstreamUnavailable, "the engine closed the connection"),
)

FOREIGN = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""What ``except`` clauses around aiohttp name."""


def map_client_error(exc: BaseException, what: str) -> UpstreamError:
    """Turn an exception of aiohttp or the socket into ours. ``what``: the request, for the message."""
    for foreign, ours, said in _TABLE:
        if isinstance(exc, foreign):
            why = "" if foreign is aiohttp.ClientPayloadError else f" ({_in_short(exc)})"
            return ours(f"{what}: {said}{why}")
    return UpstreamError(f"{what}: {type(exc).__name__}: {exc}")


def _in_short(exc: BaseException) -> str:
    """What the system said, without the library's words around it."""
    if isinstance(exc, aiohttp.ClientConnectorError):
        exc = exc.os_error
    if isinstance(exc, OSError) and isinstance(exc.errno, int):
        return os.strerror(exc.errno)
    return type(exc).__name__


SAVING = ("save", "write", "load", "forget", "clear")
"""The hooks of saved states: newer than the others, so an engine that has those may lack these."""

_BUILD = "build it with `polykvctl engine build`"


def map_hook_answer(
    status: int, body: Any, op: str, *, has_key: bool = False, n_ctx_train: int | None = None
) -> PolyKVError:
    """Turn an error answer of a hook into ours.

    ``op``: the hook's name. ``has_key``: it was shown a key. ``n_ctx_train``: tokens of its model's own context.
    """
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    ours = error.get("type") == "polykv_error"
    message = str(error.get("message") or f"status {status}")
    if op in SAVING and (mapped := _map_saving(status, error, message, op)) is not None:
        return mapped
    if status == 404:
        return EngineUnpatched(
            "this llama-server has no PolyKV hooks, so it cannot hold pools: build one that can with `polykvctl engine "
            "build` and start it (`polykvctl engine path`) with --polykv-max-pools N, or both with `polykvctl up`"
        )
    if status in (401, 403):
        return EngineKeyRefused(missing=not has_key)
    if status == 503 and not ours:
        return UpstreamLoading(f"the engine is not ready: {message}")
    n_tokens, n_ctx = error.get("n_tokens"), error.get("n_ctx")
    if status == 400 and ours and isinstance(n_tokens, int) and isinstance(n_ctx, int):
        return ContextLengthExceeded(n_prompt_tokens=n_tokens, n_ctx=n_ctx, n_ctx_train=n_ctx_train)
    if (status == 400 and ours) or (op == "render" and status in (400, 500)):
        # A template that refuses its messages throws, which llama-server answers with 500.
        return RequestError(message)
    if status == 409 and isinstance(error.get("divergence_pos"), int):
        return PrefixMismatch(message, divergence_pos=error["divergence_pos"])
    if status == 409 and isinstance(error.get("owner"), str):
        left_ms = error.get("ttl_ms")
        return EngineOwned(
            f"another proxy ({error['owner']}) manages the pools of this engine: use its URL, or end it "
            "(its name is host:process id:…)",
            owner=error["owner"],
            left_s=left_ms / 1e3 if isinstance(left_ms, int | float) else None,
        )
    if status == 409 and op == "snapshot":
        return SessionNotResident(message)
    if status == 410:
        return SequenceGone(message)
    if status == 501:
        return SharingUnsupported(message)
    if status == 503:
        return SeqIdsExhausted(
            "all pool sequences of the engine are taken: release a pool, or start the engine with a larger "
            "--polykv-max-pools"
        )
    if status == 507:
        need, free = error.get("need"), error.get("free")
        missing = need - free if isinstance(need, int) and isinstance(free, int) else None
        return KvExhausted(message, cells_missing=missing)
    return EngineRefused(f"{op}: {message}", engine_status=status)


def _map_saving(status: int, error: dict[str, Any], message: str, op: str) -> PolyKVError | None:
    """What means something else here than of the other hooks; None = the same."""
    if status == 404 or (status == 400 and (op == "write" or message.startswith('"op" must be'))):
        return SavingUnsupported(f"this llama-server cannot save states of pools and sessions: {_BUILD}")
    if status == 501:
        return SavingUnsupported(f"{op}: {message}")
    if status == 410 and op == "load" and "parent pool" not in message:
        return SavedGone(f"{message}: prefill it again")
    if status == 410 and (op in ("forget", "write") or (op == "save" and "saved again" in message)):
        return SavedGone(message)
    if status == 507 and op in ("save", "write"):
        need, free = error.get("need"), error.get("free")
        if isinstance(need, int) and isinstance(free, int):
            return SavedBudget(f"{message}: forget other saved states, or raise the budget", need=need, free=free)
        return SavedBudget(f"{message}: make room on the disk of --polykv-save-path")
    if status == 409 and not isinstance(error.get("divergence_pos"), int) and not isinstance(error.get("owner"), str):
        return SavingRefused(f"{op}: {message}")
    return None
