"""Pictures, and chats with and without them."""

import base64
import struct
import zlib
from typing import Any

import numpy as np

from .tiny_models import IMAGE_SIZE

CHAT = "/v1/chat/completions"
N_ANSWER = 16
QUESTION = "What is in the picture?"
Json = dict[str, Any]


def picture(seed: int) -> str:
    """A PNG of coloured squares as a data URI; other seed, other picture."""
    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    pixels = np.kron(squares, np.ones((IMAGE_SIZE // 4, IMAGE_SIZE // 4, 1), np.uint8))
    header = struct.pack(">IIBBBBB", IMAGE_SIZE, IMAGE_SIZE, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def chat(system: str, *said: Any, **more: Any) -> Json:
    """A greedy chat; every second thing said is the assistant's."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(said)]
    body = {"messages": [{"role": "system", "content": system}, *turns], "max_tokens": N_ANSWER}
    return body | {"temperature": 0, "ignore_eos": True} | more


def seeing(seed: int, question: str = QUESTION) -> list[Json]:
    return [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": picture(seed)}}]


def text_of(reply: Json) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text
