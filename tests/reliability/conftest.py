"""The proxy as it is served in front of the fake engine, as in the relay's tests, and what is counted afterwards."""

import asyncio
import resource
from typing import Any

import orjson

from tests.relay.conftest import Proxy, explicit, make_proxy, proxy
from tests.relay.raw import post

__all__ = ["explicit", "leave_nothing", "make_proxy", "many_files", "post_json", "proxy"]


def post_json(path: str, body: Any, headers: str = "") -> bytes:
    return post(path, orjson.dumps(body), "Content-Type: application/json\r\n" + headers)


def many_files(n: int) -> bool:
    """Let this process open so many files. False: it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < n <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
    return n <= hard


async def leave_nothing(proxy: Proxy, within_s: float = 20.0) -> None:
    """Everybody is gone: permits, slots, lines and what is counted of their bodies are at zero."""
    async with asyncio.timeout(within_s):
        while counted(proxy) or proxy.control.slots.unsure:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def counted(proxy: Proxy) -> dict[str, int]:
    """What is not zero."""
    control = proxy.control
    counts = proxy.at_rest() | {
        "waiting requests": proxy.relay.backlog.n_waiting,
        "their bytes": proxy.relay.backlog.n_bytes,
        "at a door": control.door.n_waiting,
        "held turns": control.door.n_held,
        "joined": control.fan_out.n_waiting,
        "in line for cells": int(control.room.has_line),
    }
    return {name: n for name, n in counts.items() if n}
