"""Scripted accidents, and the record of what the fake engine was asked.

A fault is armed for a place and a phase: ``engine.on("materialize", "reply", drop())``.

places   a path (``/v1/chat/completions``), ``*``, or a hook (``materialize snapshot save load forget clear free cells
         list stats render owner``)
phases   ``request`` nothing done yet · ``prefill`` slot taken, nothing decoded ·
         ``batch`` one of the prompt is being decoded: stats count it in the slot, and not in the used cells ·
         ``reply`` work done, nothing sent ·
         ``chunk:N`` before the N-th piece of a stream (0 = the first) ·
         ``write`` of ``save``: copied, in memory if asked for, and not yet in its file
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Action = Callable[[web.Request], Awaitable[web.Response | None]]


@dataclass
class Received:
    """One request as it came. ``left``: the client closed before the reply was complete."""

    method: str
    path: str
    query: str
    raw_headers: list[tuple[bytes, bytes]]
    body: bytes
    at_s: float = field(default_factory=time.monotonic)
    done: bool = False
    left: bool = False
    _ended: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def end(self, *, left: bool) -> None:
        self.left, self.done = left, not left
        self._ended.set()

    async def ended(self, timeout_s: float = 5) -> None:
        """Wait until the reply went out or the client left."""
        await asyncio.wait_for(self._ended.wait(), timeout_s)

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in self.raw_headers}

    def json(self) -> Any:
        return json.loads(self.body)


class Hold:
    """An action that stops there until ``release()``; ``await hold.reached()`` first, so no test sleeps."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._go = asyncio.Event()
        self.n = 0

    async def __call__(self, request: web.Request) -> None:
        self.n += 1
        self._reached.set()
        await self._go.wait()

    async def reached(self, timeout_s: float = 5) -> None:
        await asyncio.wait_for(self._reached.wait(), timeout_s)

    def release(self) -> None:
        self._go.set()


def delay(seconds: float) -> Action:
    async def action(request: web.Request) -> None:
        await asyncio.sleep(seconds)

    return action


def drop() -> Action:
    """The connection is gone, without a word."""

    async def action(request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()
        await asyncio.sleep(0)

    return action


def reply(status: int, body: Any = None, *, headers: dict[str, str] | None = None) -> Action:
    """Answer this instead (only before a stream began). ``body``: an object, or bytes as they are."""

    async def action(request: web.Request) -> web.Response:
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, headers=headers)
        return web.json_response(body or {}, status=status, headers=headers)

    return action


@dataclass
class Fault:
    place: str
    phase: str
    action: Action
    times: int | None


class Faults:
    def __init__(self) -> None:
        self.armed: list[Fault] = []

    def on(self, place: str, phase: str, action: Action, *, times: int | None = 1) -> None:
        """``times=None``: always."""
        self.armed.append(Fault(place, phase, action, times))

    async def at(self, place: str, phase: str, request: web.Request) -> web.Response | None:
        for fault in list(self.armed):
            if fault.place not in ("*", place, request.path) or fault.phase != phase:
                continue
            if fault.times is not None:
                fault.times -= 1
                if fault.times <= 0 and fault in self.armed:
                    self.armed.remove(fault)
            answer = await fault.action(request)
            if answer is not None:
                return answer
        return None
