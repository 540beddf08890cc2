"""Logs that earlier runs of ``polykvctl up`` left.

A log is locked, shared, by the engine that writes to it and by who supervises that engine; the kernel ends the lock
with the last of them, however they end. So a log that can be locked alone is of a run that is over. One that cannot be
told (no locks on that file system) is not.
"""

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path

N_KEPT = 5
"""Of logs of runs that are over, the last ones: on any free port, and on chosen ports."""

KEPT_S = 7 * 24 * 3600.0

_LOG = re.compile(r"engine-(?:any-)?\d{1,5}\.log(?:\.1)?")


def mark_in_use(log: int) -> None:
    """Lock an open log for as long as anybody has this descriptor, or one that a child inherits of it."""
    with contextlib.suppress(OSError):  # no locks there: it works without, and nobody can tell that it is over
        fcntl.flock(log, fcntl.LOCK_SH)


def tidy_logs(fresh: Path, *, is_ours: bool) -> None:
    """Remove logs of runs that are over but for the last ones, where ``fresh`` is about to be written.

    ``is_ours``: nobody else writes to that folder. Elsewhere a name with a chosen port may be somebody's own: such a
    log goes only when it is a week old.
    """
    found: dict[bool, list[tuple[float, Path]]] = {True: [], False: []}
    for log in fresh.parent.glob("engine-*.log*"):
        if _LOG.fullmatch(log.name) and not log.name.startswith(fresh.name):
            with contextlib.suppress(FileNotFoundError):  # another ``up`` may tidy here too
                found[_is_any(log)].append((log.stat().st_mtime, log))
    too_old_s = time.time() - KEPT_S
    for is_any, logs in found.items():
        n_kept = N_KEPT - (is_any == _is_any(fresh))
        for place, (written_s, log) in enumerate(sorted(logs, reverse=True)):
            if written_s < too_old_s or (place >= n_kept and (is_any or is_ours)):
                _remove_if_over(log)


def _is_any(log: Path) -> bool:
    return log.name.startswith("engine-any-")


def _remove_if_over(log: Path) -> None:
    try:
        fd = os.open(log, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # gone, or not ours to read
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.unlink(missing_ok=True)
    except OSError:
        return  # in use, or it cannot be told
    finally:
        os.close(fd)
