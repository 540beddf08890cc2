"""How a task ends that nobody waits for: what it could not do is told, and a bug is not lost."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from polykv_proxy.errors import InvariantError, PolyKVError


def say_how_it_ended(log: logging.Logger, failed: str, bug: str) -> "Callable[[asyncio.Task[Any]], None]":
    """For ``add_done_callback``. ``failed``: what follows from it that the engine would not, ``bug``: that we broke."""

    def say(task: "asyncio.Task[Any]") -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PolyKVError) and not isinstance(error, InvariantError):
            log.info("%s: %s", failed, error.message)
        else:
            log.error("%s", bug, exc_info=error)

    return say
