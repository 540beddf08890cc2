"""An engine that computes nothing and costs next to nothing, to measure what stands in front of it.

Chats get a fixed reply, at once or after a while, streams one event per 20 ms of their own, written straight to their
sockets by one clock. Its hooks know as much as a proxy needs to manage it and to keep a pool: a word is a token.

Every event says in ``t`` when it was due to go out (µs, the machine's monotonic clock), so that whoever reads it knows
how late it is.
"""

import asyncio
import contextlib
import json
import random
import time
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from polykv_proxy.tree.prefix import format_hash, hash_tokens, make_tokens

CHAT = "/v1/chat/completions"
HOOKS = "/polykv/engine"
EVENT_S = 0.02
MARK = b"~"
"""One in every event, and nowhere else: however pieces are cut, counting it counts events."""

N_BEATS = 16
"""Streams take turns within those 20 ms."""

N_CELLS = 1 << 20
LONG_BYTES = 4096
"""A chat of so many bytes is taken for one that attaches to the pool that was made last."""


TOOK = b'"took_us":"'
"""Before eight digits: how long the engine had a chat."""


def reply(**timings: float) -> bytes:
    """A chat's body in one piece that says nothing but how it came about."""
    said = {"cache_n": 1, "prompt_n": 9, "predicted_n": 3, "predicted_per_second": 50.0} | timings
    told = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": {}, "timings": said}).encode()
    return told[:-1] + b"," + TOOK + b'00000000"}'


def answer(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"~word"}}],"created":1,"t":"%016d"}\n\n'
END = chunk(b"data: %s\n\ndata: [DONE]\n\n" % reply()) + b"0\r\n\r\n"


class IdleEngine:
    """``said``: the reply to every chat in one piece. ``reply_s``: it takes so long, more or less."""

    def __init__(self, n_slots: int, said: bytes | None = None, reply_s: float = 0.0):
        self.n_slots, self.reply_s = n_slots, reply_s
        self.said = self.said_long = answer(said if said is not None else reply())
        self.n_emitted = 0
        self.pools: list[dict[str, Any]] = []
        self.streams: list[dict[Connection, int]] = [{} for _ in range(N_BEATS)]
        self._n_begun = 0

    def begin_stream(self, connection: "Connection", n_events: int) -> None:
        self._n_begun += 1
        connection.write(STREAM_HEAD)
        self.streams[self._n_begun % N_BEATS][connection] = n_events

    async def tick(self) -> None:
        """Write every stream's event when it is due; one that is late is written all the same, with its due time."""
        due_s, beat = time.monotonic(), 0
        while True:
            await asyncio.sleep(due_s - time.monotonic())
            event = chunk(EVENT % int(due_s * 1e6))
            streams = self.streams[beat]
            for connection, n_left in list(streams.items()):
                if connection.is_closing():
                    del streams[connection]
                elif n_left:
                    connection.write(event)
                    self.n_emitted += 1
                    streams[connection] = n_left - 1
                else:
                    del streams[connection]
                    connection.write(END)
            due_s, beat = due_s + EVENT_S / N_BEATS, (beat + 1) % N_BEATS

    # Hooks ---------------------------------------------------------------------------------------------------------

    def hook(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """The answer as an object; None: there is no such route."""
        if path == f"{HOOKS}/stats":
            return self._stats()
        if path == f"{HOOKS}/pools" and method == "GET":
            return {"epoch": "idle", "pools": self.pools}
        if path == f"{HOOKS}/pools" and body.get("op") == "cells":
            return {"epoch": "idle", "pools": [], "slots": [{"id": i, "runs": []} for i in range(self.n_slots)]}
        if path == f"{HOOKS}/pools" and body.get("op") == "materialize":
            return self._materialize(body["tokens"], body["tag"])
        if path == f"{HOOKS}/render":
            return {"tokens": tokens_of(body["body"]), "has_media": False, "n_prompts": 1}
        if path == f"{HOOKS}/owner":
            return body
        return {"emitted": self.n_emitted, "t": time.monotonic()} if path == "/emitted" else None

    def _stats(self) -> dict[str, Any]:
        used = sum(pool["n_tokens"] for pool in self.pools)
        return {
            "epoch": "idle",
            "n_slots": self.n_slots,
            "max_pools": 16,
            "n_ctx_slot": N_CELLS,
            "cells": {"used": used, "total": N_CELLS, "free": N_CELLS - used},
            "slots": [{"id": i, "state": "idle"} for i in range(self.n_slots)],
        }

    def _materialize(self, tokens: list[int], tag: str) -> dict[str, Any]:
        pool = {
            "seq": self.n_slots + 1 + len(self.pools),
            "state": "ready",
            "gen": 1,
            "tag": tag,
            "n_tokens": len(tokens),
            "tokens_hash": format_hash(hash_tokens(make_tokens(tokens))),
        }
        self.pools.append(pool)
        self.said_long = answer(reply(cache_n=len(tokens)))  # else every request would be looked into
        return pool


def tokens_of(body: dict[str, Any]) -> list[int]:
    """Each word of a chat and of the roles in it."""
    words = [word for m in body["messages"] for word in (m["role"], *str(m["content"]).split())]
    return [zlib.crc32(word.encode()) % 32_000 for word in (*words, "assistant")]


class Connection(asyncio.Protocol):
    """Reads requests with a length, one after the other."""

    def __init__(self, engine: IdleEngine):
        self._engine = engine
        self._came = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.write: Callable[[bytes], None] = wire.write
        self.is_closing = wire.is_closing

    def data_received(self, data: bytes) -> None:
        came = self._came + data if self._came else data
        while (end := came.find(b"\r\n\r\n")) >= 0:
            head = came[:end]
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(came) < end + 4 + length:
                break
            self._serve(head, came[end + 4 : end + 4 + length])
            came = came[end + 4 + length :]
        self._came = came

    def _serve(self, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        if path == CHAT.encode():
            if b'"stream":true' not in body:
                said = self._engine.said if len(body) < LONG_BYTES else self._engine.said_long
                if self._engine.reply_s:
                    wait_s = self._engine.reply_s * (0.5 + random.random())  # else all would come at the same time
                    asyncio.get_running_loop().call_later(wait_s, self._reply, said, time.monotonic())
                else:
                    self.write(said)
                return
            self._engine.begin_stream(self, json.loads(body).get("max_tokens", 1 << 40))
            return
        said = self._engine.hook(method.decode(), path.decode(), json.loads(body) if body else {})
        self.write(answer(json.dumps(said).encode()) if said is not None else answer(b"{}", "404 Not Found"))

    def _reply(self, said: bytes, since_s: float) -> None:
        at = said.index(TOOK) + len(TOOK)
        self.write(b"%s%08d%s" % (said[:at], (time.monotonic() - since_s) * 1e6, said[at + 8 :]))


@contextlib.asynccontextmanager
async def idle_engine(n_slots: int, said: bytes | None = None, reply_s: float = 0.0) -> AsyncIterator[str]:
    engine = IdleEngine(n_slots, said, reply_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", 0, backlog=1024)
    clock = asyncio.create_task(engine.tick())
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        clock.cancel()
        await asyncio.wait([clock])
        server.close()
