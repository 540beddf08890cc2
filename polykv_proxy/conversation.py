"""What a request says so far, as hashes: enough to see that one conversation continues another, never the text itself.

Pure. ``slots`` uses it to find the place whose cache fits, ``sessions`` to recognise an unnamed client's next turn.
A wrong guess costs time only: the engine compares tokens before it reuses anything.
"""

from collections.abc import Iterable
from typing import NamedTuple

import xxhash


class Mark(NamedTuple):
    """Where a conversation stood. ``length``: messages of a chat, bytes of a plain prompt."""

    scope: int
    length: int
    digest: int
    is_text: bool


class Conversation:
    """The prompt of one request. ``scope``: everything in front of the first message (dialect, system, tools)."""

    __slots__ = ("_chain", "_roles", "_text", "scope")

    def __init__(
        self, scope: int, *, chain: list[int] | None = None, roles: list[str] | None = None, text: bytes = b""
    ) -> None:
        self.scope = scope
        self._chain = chain
        self._roles = roles or []
        self._text = text

    @classmethod
    def of_messages(cls, scope: bytes, messages: Iterable[tuple[str, bytes]]) -> "Conversation":
        """``messages``: (role, canonical bytes) each."""
        digest = xxhash.xxh64(scope)
        seed = digest.intdigest()
        chain, roles = [], []
        for role, raw in messages:
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
            chain.append(digest.intdigest())
            roles.append(role)
        return cls(seed, chain=chain, roles=roles)

    @classmethod
    def of_text(cls, scope: bytes, text: bytes) -> "Conversation":
        return cls(xxhash.xxh64_intdigest(scope), text=text)

    def __len__(self) -> int:
        return len(self._text) if self._chain is None else len(self._chain)

    @property
    def is_text(self) -> bool:
        return self._chain is None

    def mark(self) -> Mark | None:
        """Where it stands now; None when it says nothing."""
        return self.mark_at(len(self)) if len(self) else None

    def mark_at(self, length: int) -> Mark:
        if self._chain is None:
            return Mark(self.scope, length, xxhash.xxh64_intdigest(self._text[:length]), True)
        return Mark(self.scope, length, self._chain[length - 1], False)

    def covers(self, mark: Mark) -> bool:
        """Whether it begins with all that ``mark`` stands for."""
        if mark.scope != self.scope or mark.length > len(self) or mark.is_text is not self.is_text:
            return False
        if self._chain is not None:
            return self._chain[mark.length - 1] == mark.digest
        return self.mark_at(mark.length) == mark

    @property
    def has_answers(self) -> bool:
        """It can be the next turn of something."""
        return self._chain is None or "assistant" in self._roles

    def answered_at(self, length: int) -> bool:
        """Whether an assistant's answer follows the first ``length`` messages: a next turn, not a repeated one."""
        if self._chain is None:
            return len(self._text) > length
        return length < len(self._roles) and self._roles[length] == "assistant"
