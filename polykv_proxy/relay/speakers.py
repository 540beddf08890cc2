"""Who is speaking, by the headers that agents send of themselves: the session, its parent, and the family of both.

Pure. What the contract's own field says beats all of it (``fields``).

    Claude Code   ``x-claude-code-session-id`` of a conversation, ``-agent-id`` of a sub-agent in it, and
                  ``-parent-agent-id`` of one that a sub-agent started
    Codex         ``thread-id`` of a conversation or sub-agent, ``session-id`` of the tree it belongs to
                  (``session_id``, ``conversation_id`` in older ones), ``x-codex-parent-thread-id``
    OpenCode      ``x-session-affinity`` and ``x-session-id``, both the session's; ``x-parent-session-id``
    others        ``x-conversation-id`` (llama-server's own web page)

``prompt_cache_key`` in the body names a family and nobody in it: agents of one kind share it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from polykv_proxy.ids import SessionId
from polykv_proxy.relay.dialects import Call
from polykv_proxy.relay.fields import can_be_session_id

_SESSION = ("x-session-affinity", "session-id", "session_id", "conversation_id", "x-conversation-id")


@dataclass(frozen=True, slots=True)
class Speaker:
    """None: it does not say."""

    session: SessionId | None = None
    parent: SessionId | None = None
    family: str | None = None


_NOBODY = Speaker()


def speaker_in(call: Call, headers: Mapping[str, str]) -> Speaker:
    """``headers``: case-insensitive."""
    speaker = _named(headers)
    key = call.body.get("prompt_cache_key")
    if isinstance(key, str) and key:
        return Speaker(speaker.session, speaker.parent, f"key:{key}")
    return speaker


def _named(headers: Mapping[str, str]) -> Speaker:
    if claude := headers.get("x-claude-code-session-id"):
        agent = headers.get("x-claude-code-agent-id")
        if not agent:
            return _speaker(claude, None, claude)
        above = headers.get("x-claude-code-parent-agent-id")
        return _speaker(f"{claude}/{agent}", f"{claude}/{above}" if above else claude, claude)
    parent = headers.get("x-parent-session-id")
    for name in _SESSION:
        if session := headers.get(name):
            thread = headers.get("thread-id") if name in ("session-id", "session_id") else None
            if thread and thread != session:
                return _speaker(thread, headers.get("x-codex-parent-thread-id") or session, session)
            return _speaker(session, headers.get("x-codex-parent-thread-id") or parent, parent or session)
    return _speaker(None, parent, parent) if parent else _NOBODY


def _speaker(session: str | None, parent: str | None, family: str | None) -> Speaker:
    if not can_be_session_id(session):
        session = None
    if parent == session or not can_be_session_id(parent):
        parent = None
    return Speaker(
        SessionId(session) if session is not None else None, SessionId(parent) if parent is not None else None, family
    )
