"""What an answer says about its prefix: the ``polykv`` object and the response headers of the contract.

Pure. ``None`` means unknown.
"""

from dataclasses import dataclass
from typing import Any

import orjson

from polykv_proxy.ids import PoolId, SessionId
from polykv_proxy.relay.fields import header_safe
from polykv_proxy.turns import Usage


def unread_headers(session_id: SessionId | None) -> list[tuple[str, str]]:
    """Headers of the reply to a request that was refused before it was understood, though it carried a field."""
    nothing = [("x-cached-prefix-tokens", "0")]
    return nothing if session_id is None else [("x-session-id", header_safe(session_id)), *nothing]


@dataclass(slots=True)
class Receipt:
    """Filled in while a request goes its way. ``hold_ms``: it waited so long for a slot, for cells, and at the gate.

    ``sessions_remaining``: how many more could be let in, where the policy warns.
    """

    session_id: SessionId
    pool_id: PoolId | None = None
    prefix_n_tokens: int = 0
    miss_reason: str | None = None
    ctx_total: int | None = None
    hold_ms: int = 0
    sessions_remaining: int | None = None

    def headers(self, session_tps: float | None) -> list[tuple[str, str]]:
        said = [("x-session-id", header_safe(self.session_id))]
        if self.pool_id is not None:
            said.append(("x-pool-id", str(self.pool_id)))
        said.append(("x-cached-prefix-tokens", str(self.prefix_n_tokens)))
        if session_tps is not None:
            said.append(("x-session-tps", f"{session_tps:.2f}"))
        if self.sessions_remaining is not None:
            said.append(("x-sessions-remaining", str(self.sessions_remaining)))
        return said

    def members(self, usage: Usage, session_tps: float | None) -> bytes:
        """``"polykv":{…}``, ready to be put into an object."""
        used, total = usage.ctx_used, self.ctx_total
        said: dict[str, Any] = {
            "pool_id": self.pool_id,
            "session_id": self.session_id,
            "prefix_n_tokens": self.prefix_n_tokens,
            "cached_n_tokens": usage.cache_n,
            "miss_reason": self.miss_reason,
            "session_tps": round(session_tps, 2) if session_tps is not None else None,
            "ctx_used": used,
            "ctx_total": total,
            "ctx_headroom_tokens": max(0, total - used) if total is not None and used is not None else None,
            "sessions_remaining": self.sessions_remaining,
            "hold_ms": self.hold_ms,
        }
        return b'"polykv":' + orjson.dumps(said)
