"""Every error the proxy answers with, on one page.

Each class carries the HTTP ``status`` and the stable ``code`` of its JSON body; ``extra`` are further fields of that
body (``divergence_pos``, ``cells_missing``, …). Only the routes and the relay turn them into HTTP; all others raise
them. Foreign exceptions (aiohttp, json) are mapped in ``upstream.errors`` and ``routes.body``.

PolyKVError
├── RequestError         the caller's doing               400 401 403 404 409 413 431
├── CapacityError        nothing free right now           429 503 507
├── UpstreamError        llama-server's doing             501 502 503 504
└── InvariantError       a bug of ours                    500
"""

from typing import Any, ClassVar


class PolyKVError(Exception):
    """Root of the tree; never raised itself."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None, **extra: Any):
        super().__init__(message)
        self.message = message
        self.param = param
        self.extra = extra
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


# The caller's doing ------------------------------------------------------------------------------------------------


class RequestError(PolyKVError):
    status = 400
    code = "invalid_request"


class InvalidJson(RequestError):
    code = "invalid_json"


class KeyWrong(RequestError):
    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """A key of the wrong kind, or without keys a peer, host or page that is not this machine."""

    status = 403
    code = "forbidden"


class PoolNotFound(RequestError):
    status = 404
    code = "pool_not_found"


class SessionNotFound(RequestError):
    status = 404
    code = "session_not_found"


class RouteNotFound(RequestError):
    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class PrefixMismatch(RequestError):
    """Tokens break the prefix contract. ``divergence_pos``: first position that differs."""

    status = 409
    code = "prefix_mismatch"

    def __init__(self, message: str, *, divergence_pos: int, **kw: Any):
        super().__init__(message, divergence_pos=divergence_pos, **kw)
        self.divergence_pos = divergence_pos


class ExplicitPrefixTooLong(PrefixMismatch):
    """``shared_prefix_n_tokens`` of a request is more than what matches. Never 409 on ``/v1/*``: clients retry it."""

    status = 400


class NameTaken(RequestError):
    status = 409
    code = "name_taken"


class PoolHasChildren(RequestError):
    status = 409
    code = "pool_has_children"


class PoolInUse(RequestError):
    status = 409
    code = "pool_in_use"


class PinBudget(RequestError):
    status = 409
    code = "pin_budget"


class WarmUnavailable(RequestError):
    """Nothing keeps saved state of pools."""

    status = 501
    code = "warm_unavailable"


class SessionNotResident(RequestError):
    status = 409
    code = "session_not_resident"


class BranchNotExact(RequestError):
    """The model keeps checkpoints instead of cells and ``exact`` was asked. ``branch_pos``: the one it could give."""

    status = 409
    code = "branch_not_exact"


class ContextLengthExceeded(RequestError):
    """llama-server's own shape: its type, ``n_prompt_tokens`` and ``n_ctx`` in the body."""

    code = "context_length_exceeded"

    def __init__(self, *, n_prompt_tokens: int, n_ctx: int, n_ctx_train: int | None = None):
        super().__init__(
            f"the prefix ({n_prompt_tokens} tokens) exceeds the available context size ({n_ctx} tokens): "
            + _way_out(n_ctx, n_ctx_train),
            type="exceed_context_size_error",
            n_prompt_tokens=n_prompt_tokens,
            n_ctx=n_ctx,
        )


class PromptTooLarge(ContextLengthExceeded):
    """So many bytes are never the tokens of one context: not even rendered."""

    def __init__(self, *, n_bytes: int, n_ctx: int, n_ctx_train: int | None = None):
        RequestError.__init__(
            self,
            f"the prompt ({n_bytes} bytes) is too large for the available context size ({n_ctx} tokens): "
            + _way_out(n_ctx, n_ctx_train),
            type="exceed_context_size_error",
            n_bytes=n_bytes,
            n_ctx=n_ctx,
        )


def _way_out(n_ctx: int, n_ctx_train: int | None) -> str:
    """llama-server gives no slot more context than its model was trained with, whatever its flags say."""
    if n_ctx_train is not None and n_ctx >= n_ctx_train:
        return (
            "shorten it, or start the engine with a model of a longer context; this one was trained with "
            f"{n_ctx_train} tokens, and a larger --ctx gives no more"
        )
    return "shorten it, or start the engine with a larger --ctx (llama-server: -c)"


class HeadTimeout(RequestError):
    status = 408
    code = "head_timeout"


class BodyTimeout(RequestError):
    status = 408
    code = "body_timeout"


class HeadersTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


# Nothing free right now --------------------------------------------------------------------------------------------


class CapacityError(PolyKVError):
    status = 503
    code = "unavailable"
    retry_after_s = 1.0


class SeqIdsExhausted(CapacityError):
    code = "seq_ids_exhausted"


class KvExhausted(CapacityError):
    """``cells_missing``: how many cells short."""

    status = 507
    code = "kv_exhausted"


class KvExhaustedForRequest(KvExhausted):
    """A data request that could not even go unpooled."""

    status = 503


class SavedBudget(CapacityError):
    """No room for one more saved state. ``need``, ``free``: bytes of the budget, None when the disk itself failed."""

    status = 507
    code = "saved_budget"

    def __init__(self, message: str, *, need: int | None = None, free: int | None = None):
        super().__init__(message, need=need, free=free)
        self.need, self.free = need, free


class Draining(CapacityError):
    code = "draining"


class AdmissionRefused(CapacityError):
    """The gate lets no new session in now. ``reason``: of its verdict. ``retry_after_ms``: jittered, as the seconds."""

    status = 429

    def __init__(self, message: str, *, reason: str, retry_after_s: int, retry_after_ms: int, **extra: Any):
        super().__init__(message, retry_after_s=retry_after_s, reason=reason, **extra)
        self.reason, self.retry_after_ms = reason, retry_after_ms


class PoolSaturated(AdmissionRefused):
    code = "pool_saturated"


class QueueFull(AdmissionRefused):
    code = "queue_full"


class QueueTimeout(AdmissionRefused):
    code = "queue_timeout"


class LoadUnknown(AdmissionRefused):
    """The engine was not measured for a while: under an enforced policy that is no free place."""

    status = 503
    code = "upstream_unavailable"


class JournalFailed(CapacityError):
    """What was ordered could not be written down, so it would not survive a restart."""

    code = "journal_failed"
    retry_after_s = 5.0


class JournalInUse(CapacityError):
    """Another process writes this journal: only met at the start."""

    code = "journal_in_use"


# llama-server's doing ----------------------------------------------------------------------------------------------


class UpstreamError(PolyKVError):
    status = 502
    code = "upstream_error"


class UpstreamUnavailable(UpstreamError):
    status = 503
    code = "upstream_unavailable"
    retry_after_s = 1.0


class ConnectFailed(UpstreamUnavailable):
    """No connection came about: the request certainly did not reach the engine."""


class UpstreamLoading(UpstreamError):
    status = 503
    code = "loading"
    retry_after_s = 1.0


class UpstreamTimeout(UpstreamError):
    status = 504
    code = "upstream_timeout"


class EngineHung(UpstreamTimeout):
    """It listens, and gets nowhere with what was ordered."""


class EngineKeyRefused(UpstreamError):
    """It asks for a key. ``missing``: this proxy has none; else the one it has is not taken."""

    def __init__(self, *, missing: bool):
        self.missing = missing
        happened = (
            "the engine asks for a key, and POLYKV_UPSTREAM_API_KEY is not set: set it to the engine's --api-key"
            if missing
            else "the engine refuses the key of POLYKV_UPSTREAM_API_KEY: set it to the engine's --api-key"
        )
        super().__init__(f"{happened}; a client's own key is never sent on, it has to be one of POLYKV_API_KEY")


class UpstreamRestarted(UpstreamError):
    status = 503
    code = "upstream_restarted"
    retry_after_s = 1.0


class SequenceGone(UpstreamRestarted):
    """The pool or parent that a hook named is not there any more: control materializes it again."""


class SavedGone(UpstreamError):
    """Nothing usable is saved under this tag: never saved, forgotten, or its file was missing, torn or damaged."""

    status = 410
    code = "saved_gone"


class SavingRefused(UpstreamError):
    """A state cannot be saved or loaded like this now, or never: the message says which. Nothing was changed.

    A busy slot, a sequence in use, lost cells, other adapters, another model, build or cache layout.
    """

    status = 409
    code = "saving_refused"


class SavingUnsupported(UpstreamError):
    """This engine does not save such states: too old, a split cache, media, a recurrent state, no memory or disk."""

    status = 501
    code = "saving_unsupported"


class EngineOwned(UpstreamError):
    """Another proxy manages this engine's pools. ``owner``: who; ``left_s``: how long its lease still runs."""

    status = 503
    code = "engine_owned"
    retry_after_s = 5.0

    def __init__(self, message: str, *, owner: str, left_s: float | None):
        super().__init__(message, owner=owner)
        self.left_s = left_s


class EngineUnpatched(UpstreamError):
    status = 501
    code = "engine_unpatched"


class EngineRefused(UpstreamError):
    """The engine answered a hook with an error that the proxy did not foresee. ``engine_status``, message."""

    code = "engine_refused"


class SharingUnsupported(UpstreamError):
    """This model or cache layout cannot share a prefix (a sliding window without ``--swa-full``, media)."""

    status = 501
    code = "sharing_unsupported"


# A bug of ours -----------------------------------------------------------------------------------------------------


class InvariantError(PolyKVError):
    status = 500
    code = "internal_error"
