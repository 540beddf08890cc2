"""What a pool is made from, as the command line gives it: exactly one of text, messages, token ids or a session.

A file named ``-`` is standard input.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from polykv_proxy.cli.client import WrongUsage

_MESSAGE_FIELDS = ("messages", "tools", "chat_template_kwargs")
_INTEGER = re.compile(r"\d{1,10}", re.ASCII)


def pool_source(
    *,
    prompt: str | None = None,
    prompt_file: str | None = None,
    messages: str | None = None,
    tokens: str | None = None,
    own_tokens: str | None = None,
    from_session: str | None = None,
    forking: bool = False,
    from_sessions: bool = True,
) -> dict[str, Any]:
    """Give the part of the request body that says what the pool is made from.

    Raises:  WrongUsage when it is none or more than one, or a file cannot be used
    """
    given = {
        "--prompt": prompt,
        "--prompt-file": prompt_file,
        "--messages": messages,
        "--tokens": tokens,
        "--own-tokens": own_tokens,
        "--from-session": from_session,
    }
    chosen = [flag for flag, value in given.items() if value is not None]
    if len(chosen) != 1:
        left_out = {"--own-tokens": not forking, "--from-session": not from_sessions}
        flags = ", ".join(flag for flag in given if not left_out.get(flag))
        raise WrongUsage(f"give exactly one of {flags}" + (f", not {' and '.join(chosen)}" if chosen else ""))
    if prompt is not None:
        return {"prompt": prompt}
    if prompt_file is not None:
        return {"prompt": _read(prompt_file)}
    if messages is not None:
        return _read_messages(messages)
    if tokens is not None:
        return {"tokens": _read_tokens(tokens)}
    if own_tokens is not None:
        return {"own_tokens": _read_tokens(own_tokens)}
    return {"from_session": from_session}


def _read(file: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        raise WrongUsage(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise WrongUsage(f"{file}: not UTF-8 at byte {error.start}") from None


def _read_messages(file: str) -> dict[str, Any]:
    """An array of messages, or an object with ``messages`` and perhaps ``tools``: a chat request as it is sent."""
    try:
        parsed = json.loads(_read(file))
    except ValueError as error:
        raise WrongUsage(f"{file}: not JSON: {error}") from None
    if isinstance(parsed, list):
        return {"messages": parsed}
    if isinstance(parsed, dict) and isinstance(parsed.get("messages"), list):
        return {field: parsed[field] for field in _MESSAGE_FIELDS if field in parsed}
    raise WrongUsage(f"{file}: neither an array of messages nor an object with messages")


def _read_tokens(file: str) -> list[int]:
    """A JSON array, an object with ``tokens`` (what /tokenize answers), or numbers between spaces, commas, newlines."""
    text = _read(file)
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        parsed = parsed.get("tokens")
    if isinstance(parsed, list):
        if not set(map(type, parsed)) <= {int}:
            raise WrongUsage(f"{file}: not all tokens are integers")
        return parsed
    words = text.replace(",", " ").split()
    for word in words:
        if not _INTEGER.fullmatch(word):
            raise WrongUsage(f"{file}: {word[:20]!r} is not a token id")
    return [int(word) for word in words]
