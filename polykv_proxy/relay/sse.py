"""Server-sent events read while they pass, and our object put into the last one that can carry it.

Pure: ``feed`` takes the bytes that came and gives those that may go, at once. Rules it keeps:

1. Bytes are never changed, dropped or reordered; the object is only inserted.
2. Nothing waits, except what the insertion may have to go in front of: the closing brace of a line that is not complete
   yet, or the data line of an event whose name says that it is the carrier. A complete event never waits.
3. It makes no difference where the pieces are cut: within a line end, a character, an escape.
4. The carrier is the n-th final chunk of n choices: known by counting, so nothing is held back to see what follows.

Without a ``receipt`` it only reads.
"""

import re
from collections.abc import Callable
from typing import Any

import orjson

from polykv_proxy.relay.dialects import Dialect
from polykv_proxy.relay.json_bytes import append_to_object, members
from polykv_proxy.relay.usage import add_anthropic, add_end, add_openai, add_timings
from polykv_proxy.turns import Usage

Receipt = Callable[[Usage], bytes]
"""Makes ``"polykv":{…}`` from what the reply said up to here."""

# A key cannot be imitated by text: inside a JSON string its quotes are escaped.
_TELLING = re.compile(
    rb'"finish_reason"\s*:\s*"|"stop"\s*:\s*true|"usage"\s*:\s*\{|"timings"\s*:\s*\{|"error"\s*:\s*\{'
    rb"|event: ?(?:message_start|message_delta|message_stop|response\.completed|error)|\[DONE\]"
)
_LINE_END = re.compile(rb"[\r\n]")
_TAIL = re.compile(rb"\}[ \t]*+\Z")
_MAX_LINE = 64 << 20

_CARRIERS = {Dialect.MESSAGES: b"message_delta", Dialect.RESPONSES: b"response.completed"}


class SseReader:
    """Reads the stream of one reply. ``started``: a token came; ``ended``: it said its end; ``failed``: an error."""

    def __init__(
        self, dialect: Dialect, *, n_finals: int = 1, include_usage: bool = False, receipt: Receipt | None = None
    ) -> None:
        self.usage = Usage()
        self.started = self.ended = self.failed = False
        self._dialect = dialect
        self._n_left = n_finals
        self._usage_chunks = include_usage and dialect is Dialect.CHAT
        self._receipt = receipt
        self._carrier = _CARRIERS.get(dialect)
        self._line = bytearray()
        self._n_sent = 0
        self._event = b""
        self._after_cr = False

    def feed(self, chunk: bytes) -> bytes:
        """Give what may go out now."""
        if not self._line and not self._event and chunk.endswith(b"\n\n") and _TELLING.search(chunk) is None:
            # Whole events, and none of them tells anything: the common case.
            self._after_cr = False
            if not self.started:
                self._note_start(chunk)
            return chunk
        out: list[bytes] = []
        pos, n = 0, len(chunk)
        if self._after_cr and chunk[:1] == b"\n":
            out.append(b"\n")
            pos = 1
        self._after_cr = chunk[-1:] == b"\r" if chunk else self._after_cr
        while pos < n:
            end = _line_end(chunk, pos)
            if end < 0:
                self._line += chunk[pos:]
                break
            self._line += chunk[pos:end]
            pos = end + (2 if chunk[end : end + 2] == b"\r\n" else 1)
            self._complete(out)
            out.append(chunk[end:pos])
        if len(self._line) > self._n_sent:
            keep = self._keep()
            out.append(bytes(self._line[self._n_sent : keep]))
            self._n_sent = max(self._n_sent, keep)
        return b"".join(out)

    def finish(self) -> bytes:
        """Give what is left at the end of the stream."""
        rest = bytes(self._line[self._n_sent :])
        self._line.clear()
        self._n_sent = 0
        return rest

    @property
    def mid_line(self) -> bool:
        """The client has seen the beginning of a line and not its end."""
        return self._n_sent > 0

    def _keep(self) -> int:
        """Up to where the incomplete line may go out."""
        line = self._line
        if self._receipt is None or len(line) > _MAX_LINE:
            return len(line)
        if self._carrier is not None:
            return 0 if self._event == self._carrier and not line.startswith(b":") else len(line)
        tail = _TAIL.search(line, self._n_sent)
        return tail.start() if tail else len(line)

    def _complete(self, out: list[bytes]) -> None:
        """The line has ended; its end itself is the caller's to add."""
        line = bytes(self._line)
        self._line.clear()
        n_sent, self._n_sent = self._n_sent, 0
        if not line:
            self._event = b""
        elif line.startswith(b"event:"):
            self._event = line[6:].strip()
            self.ended = self.ended or self._event == b"message_stop"
            self.failed = self.failed or self._event == b"error"
        elif line.startswith(b"data:"):
            if not self.started:
                self._note_start(line)
            close = self._read(line)
            if close is not None and self._receipt is not None and close >= n_sent:
                line = append_to_object(line, self._receipt(self.usage), close)
                self._receipt = None
        out.append(line[n_sent:])

    def _note_start(self, text: bytes) -> None:
        """One line or more; of several it takes one that tells of a token."""
        self.started = any(
            line.startswith(b"data:") and b'"prompt_progress"' not in line for line in _LINE_END.split(text)
        )

    def _read(self, line: bytes) -> int | None:
        """Learn from a data line. Gives where the object would be inserted if this is the carrier."""
        if line[5:].strip() == b"[DONE]":
            self.ended = True
            return None
        if self._carrier is None and _TELLING.search(line) is None:
            return None
        if self._carrier is not None and self._event not in (self._carrier, b"message_start"):
            return None
        try:
            obj = orjson.loads(line[5:])
        except orjson.JSONDecodeError:
            return None
        if not isinstance(obj, dict):
            return None
        if "error" in obj:
            self.failed = True
            return None
        return self._read_named(line, obj) if self._carrier is not None else self._read_chunk(line, obj)

    def _read_named(self, line: bytes, obj: dict[str, Any]) -> int | None:
        if self._dialect is Dialect.MESSAGES:
            message = obj.get("message")
            add_anthropic(self.usage, message.get("usage") if isinstance(message, dict) else obj.get("usage"))
            add_end(self.usage, obj.get("delta"))
            return line.rindex(b"}") if self._event == self._carrier else None
        response = obj.get("response")
        add_timings(self.usage, obj.get("timings"))
        if not isinstance(response, dict):
            return None
        add_openai(self.usage, response.get("usage"))
        self.ended = True
        if self._receipt is None:
            return None
        inner = next(m for m in reversed(members(line)[0]) if m.key == "response")
        return inner.end - 1

    def _read_chunk(self, line: bytes, obj: dict[str, Any]) -> int | None:
        add_timings(self.usage, obj.get("timings"))
        add_openai(self.usage, obj.get("usage"))
        if self._dialect is Dialect.NATIVE:
            final = obj.get("stop") is True
            add_end(self.usage, obj)
        else:
            choices = obj.get("choices")
            if not isinstance(choices, list):
                return None
            for choice in choices:
                add_end(self.usage, choice)
            if self._usage_chunks:
                final = not choices and "usage" in obj
            else:
                final = any(isinstance(c, dict) and c.get("finish_reason") is not None for c in choices)
        if not final:
            return None
        self._n_left -= 1
        if self._n_left:
            return None
        self.ended = self.ended or self._dialect is Dialect.NATIVE
        return line.rindex(b"}")


def _line_end(chunk: bytes, pos: int) -> int:
    lf, cr = chunk.find(b"\n", pos), chunk.find(b"\r", pos)
    return lf if cr < 0 else cr if lf < 0 else min(lf, cr)
