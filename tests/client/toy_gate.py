"""A proxy with a gate that holds so many sessions, over httpx's mock transport: for those who wait for it."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient

_NUMBER = iter(range(10**6))


class ToyGate:
    """``room`` sessions at a time, by ``capacity`` and, ``enforced``, by what a chat is answered.

    A session is known from the moment its first chat is answered until ``leave``. ``settle_s``: so long after that
    nobody else is let in. ``refuse``: so many chats of new sessions are refused whatever ``capacity`` said.
    """

    def __init__(self, room: int, *, settle_s: float = 0.0, refuse: int = 0):
        self.room, self.settle_s, self.refuse = room, settle_s, refuse
        self.lock = threading.Lock()
        self.live: set[str] = set()
        self.order: list[str] = []
        self.most = 0
        self.n_capacity = 0
        self.settled_at_s = 0.0
        self.url = f"http://toy-{next(_NUMBER)}"
        self.on_chat: Callable[[str], Any] = lambda session_id: None
        self.on_capacity: Callable[[], Any] = lambda: None

    def sync(self) -> PolyKVClient:
        return PolyKVClient(self.url, transport=httpx.MockTransport(self._answer))

    def asynchronous(self) -> AsyncPolyKVClient:
        return AsyncPolyKVClient(self.url, transport=httpx.MockTransport(self._answer))

    def leave(self, session_id: str) -> None:
        with self.lock:
            self.live.remove(session_id)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/capacity"):
            return self._capacity(request.url.params.get("session_id"))
        return self._chat(json.loads(request.content))

    def _capacity(self, session_id: str | None) -> httpx.Response:
        self.on_capacity()
        with self.lock:
            self.n_capacity += 1
            known, left_s = session_id in self.live, self.settled_at_s - time.monotonic()
            if known:
                said: dict[str, Any] = {"can_admit": True, "reason": "continuation"}
            elif left_s > 0:
                said = {"can_admit": False, "reason": "measurement settling", "settling": True}
                said["settle_remaining_ms"] = 1e3 * left_s
            elif len(self.live) < self.room:
                said = {"can_admit": True, "reason": "ok"}
            else:
                said = {"can_admit": False, "reason": "projected mean tps below floor"}
            return httpx.Response(200, json={"target_tps_per_session": 10, "known_session": known, **said})

    def _chat(self, body: dict[str, Any]) -> httpx.Response:
        session_id = body["session_id"]
        self.on_chat(session_id)
        with self.lock:
            if session_id not in self.live:
                if self.refuse > 0 and not body.get("overcommit"):
                    self.refuse -= 1
                    error = {"message": "full", "code": "pool_saturated"}
                    headers = {"retry-after-ms": "20", "x-polykv-reason": "projected mean tps below floor"}
                    return httpx.Response(429, json={"error": error}, headers=headers)
                self.live.add(session_id)
                self.order.append(session_id)
                self.most = max(self.most, len(self.live))
                self.settled_at_s = time.monotonic() + self.settle_s
        choice = {"index": 0, "message": {"role": "assistant", "content": session_id}, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "polykv": {"session_id": session_id}})
