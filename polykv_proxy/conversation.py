"""What a request says so far, as hashes: enough to see that one conversation continues another, never the text itself.

Pure. ``slots`` uses it to find the place whose cache fits, ``sessions`` to recognise an unnamed client's next turn.
A wrong guess costs time only: the engine compares tokens before it reuses anything.
"""

import secrets
from typing import Any, NamedTuple

import orjson
import xxhash


class Mark(NamedTuple):
    """Where a conversation stood. ``length``: messages of a chat, bytes of a plain prompt."""

    scope: int
    length: int
    digest: int
    is_text: bool


class Conversation:
    """The prompt of one request. ``scope``: everything in front of the first message (dialect, system, tools).

    Hashed when somebody asks, which is mostly when its reply is there: what is given must stay as it is until then.
    """

    __slots__ = ("_answers", "_digests", "_front", "_mark", "_messages", "_text")

    def __init__(self, front: Any, *, messages: list[Any] | None = None, text: bytes = b"") -> None:
        self._front, self._messages, self._text = front, messages, text
        self._digests: list[int] = []
        self._mark: Mark | None = None
        self._answers: bool | None = None

    @classmethod
    def of_messages(cls, front: Any, messages: list[Any]) -> "Conversation":
        """A chat. ``front``, ``messages``: as they were parsed from JSON."""
        return cls(front, messages=messages)

    @classmethod
    def of_text(cls, front: Any, text: bytes) -> "Conversation":
        return cls(front, text=text)

    def __len__(self) -> int:
        return len(self._text) if self._messages is None else len(self._messages)

    @property
    def is_text(self) -> bool:
        return self._messages is None

    @property
    def scope(self) -> int:
        return self._hashed()[0]

    def mark(self) -> Mark | None:
        """Where it stands now; None when it says nothing."""
        if self._mark is None and (length := len(self)):
            self._mark = self.mark_at(length)
        return self._mark

    def mark_at(self, length: int) -> Mark:
        digests, is_text = self._digests or self._hashed(), self._messages is None
        digest = xxhash.xxh64_intdigest(self._text[:length]) if is_text else digests[length]
        return Mark(digests[0], length, digest, is_text)

    def covers(self, mark: Mark) -> bool:
        """Whether it begins with all that ``mark`` stands for."""
        if mark.is_text is not self.is_text or mark.length > len(self) or mark.scope != self.scope:
            return False
        return self.mark_at(mark.length) == mark

    def _hashed(self) -> list[int]:
        """Of what is in front; of that and the first message, and so on."""
        if not self._digests:
            digest = xxhash.xxh64(_canonical(self._front))
            self._digests.append(digest.intdigest())
            for message in self._messages or ():
                raw = _canonical(message)
                digest.update(len(raw).to_bytes(8, "little"))
                digest.update(raw)
                self._digests.append(digest.intdigest())
        return self._digests

    @property
    def has_answers(self) -> bool:
        """It can be the next turn of something."""
        if self._answers is None:
            self._answers = self._messages is None or any(map(_is_answer, self._messages))
        return self._answers

    def answered_at(self, length: int) -> bool:
        """Whether an assistant's answer follows the first ``length`` messages: a next turn, not a repeated one."""
        if self._messages is None:
            return len(self._text) > length
        return length < len(self._messages) and _is_answer(self._messages[length])


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _canonical(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return secrets.token_bytes(16)  # nested deeper than it can be written: like nothing else
