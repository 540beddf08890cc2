"""What a reply says of itself beside its text, as ``response_metadata``.

``polykv``: the receipt, as in the reply. ``timings``: llama-server's. ``pool_id``, ``session_tps`` and ``backpressure``
repeat what graphs look at most. Numbers that come twice in a stream are added up when its pieces are merged, so these
are taken out of the pieces, and the last of each goes into the last piece.
"""

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk

PROVIDER = "polykv"
WHOLE = ("polykv", "timings")


def metadata_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Of the body of a reply, or of a piece of one: what is there."""
    found: dict[str, Any] = {name: body[name] for name in WHOLE if isinstance(body.get(name), dict)}
    receipt = found.get("polykv")
    if receipt is not None:
        found["pool_id"] = receipt.get("pool_id")
        found["session_tps"] = receipt.get("session_tps")
        found["backpressure"] = {
            "sessions_remaining": receipt.get("sessions_remaining"),
            "ctx_headroom_tokens": receipt.get("ctx_headroom_tokens"),
            "hold_ms": receipt.get("hold_ms"),
        }
    return found


def receipt_of(message: BaseMessage) -> dict[str, Any]:
    """The receipt of the turn that made this message; empty when there is none."""
    receipt = message.response_metadata.get("polykv")
    return receipt if isinstance(receipt, dict) else {}


class Pieces:
    """What was seen of a stream: ``take`` each piece, then ``last``."""

    def __init__(self) -> None:
        self.finished = False
        self._kept: dict[str, Any] = {}

    def take(self, piece: ChatGenerationChunk) -> ChatGenerationChunk:
        """The piece without what is for the last one."""
        metadata = piece.message.response_metadata
        for name in (*WHOLE, "pool_id", "session_tps", "backpressure"):
            if name in metadata:
                self._kept[name] = metadata.pop(name)
        self.finished = self.finished or bool((piece.generation_info or {}).get("finish_reason"))
        return piece

    def last(self) -> ChatGenerationChunk | None:
        """None: the server told nothing."""
        if not self._kept:
            return None
        metadata = {"model_provider": PROVIDER, **self._kept}
        return ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=metadata))
