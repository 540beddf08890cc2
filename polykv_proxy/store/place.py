"""Where the journal lies: a folder and a file of our own, one proxy at a time, damaged ones set aside.

Tokens are prompts, so the file is readable by its owner only (0600), and the folder is made with 0700; a folder that
exists is left as it is. A symbolic link is followed only if it is ours or root's: in a folder that others may write to,
somebody could have put it there to have us write elsewhere. What is no regular file (a device, a pipe, a folder) is
never touched: to rename a device as root takes it from everybody.

The lock is a file beside the journal (``<file>.lock``), locked by the kernel: it ends with the process, however that
ends. It says who has it, for a person. Who has it removes the file when it is done, still locked; who waited for that
one then finds that it is not the file of that name any more, and begins anew. One that was killed leaves it, until
somebody takes it or tidies up.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from pathlib import Path

LOCK_WAIT_S, LOCK_LOOK_S = 5.0, 0.05
"""A predecessor that was told to stop may need a moment."""

_HOLDER = re.compile(rb"process [0-9]+\n")

COMPANIONS = ("-wal", "-shm", "-journal")
"""Files that SQLite keeps beside a database."""


class Taken(Exception):
    """Another process has the lock; the message says which."""


class Unusable(Exception):
    """No journal can be kept here; the message says why."""


def prepare(path: Path) -> Path:
    """Make the folder, follow a link that may be followed. Gives the real path, of a regular file or of nothing yet.

    Raises:  Unusable
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.is_symlink():
            if path.lstat().st_uid not in (os.geteuid(), 0):
                raise Unusable(f"{path} is a symbolic link of another user")
            path = path.resolve()
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (kind := _other_kind(path)) is not None:
            raise Unusable(f"{path} is {kind}, no file: name a file, or ':memory:' to keep nothing")
        return path.absolute()
    except (OSError, RuntimeError) as e:  # RuntimeError: a link that leads to itself, before Python 3.13
        raise Unusable(f"{path}: {_why(e)}") from e


def lock(path: Path, wait_s: float = LOCK_WAIT_S) -> int:
    """Lock the journal for this process; gives the descriptor that holds the lock until it is closed.

    Raises:  Taken, Unusable
    """
    name, end_s = path.with_name(f"{path.name}.lock"), time.monotonic() + wait_s
    fd = _locked(name, end_s)
    while not _is_at(fd, name):
        os.close(fd)
        fd = _locked(name, end_s)
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, it only cannot say whose it is
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
    return fd


def _locked(name: Path, end_s: float) -> int:
    """Open and lock what lies there; gives the descriptor. Raises Taken, Unusable."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        raise Unusable(f"{name}: {_why(e)}") from e
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError as e:
            if time.monotonic() < end_s:
                time.sleep(LOCK_LOOK_S)
                continue
            holder = os.pread(fd, 100, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise Taken(holder or "an unknown process") from e
        except OSError as e:
            os.close(fd)
            raise Unusable(f"{name} cannot be locked: {_why(e)}") from e


def _is_at(fd: int, name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), name.lstat())
    except FileNotFoundError:
        return False
    except OSError as e:
        os.close(fd)
        raise Unusable(f"{name}: {_why(e)}") from e


def unlock(fd: int, path: Path) -> None:
    """Give back the lock of the journal at ``path``."""
    name = path.with_name(f"{path.name}.lock")
    with contextlib.suppress(OSError):  # a folder that may not be written to any more: it stays, and locks nobody out
        if os.path.samestat(os.fstat(fd), name.lstat()):
            name.unlink()
    os.close(fd)


def remove_left_locks(folder: Path) -> None:
    """Remove the locks of journals, of any name, in a folder of ours whose holders were killed."""
    for name in folder.glob("*.db.lock"):
        try:
            fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            if _HOLDER.fullmatch(os.pread(fd, 100, 0)):  # else it is just being made, or no lock of ours
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), name.lstat()):
                    name.unlink()
        except OSError:
            continue  # somebody has it, or was quicker
        finally:
            os.close(fd)


def close_to_others(path: Path) -> bool:
    """See to it that nobody else may read the journal. Gives whether somebody could until now.

    Raises:  Unusable when it cannot be changed
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o777 == 0o600:
            return False
        path.chmod(0o600)
    except OSError as e:
        raise Unusable(f"{path} can be read by others and its mode cannot be changed: {_why(e)}") from e
    return bool(mode & 0o077)


def is_there(path: Path) -> bool:
    """Whether anything lies there: also only what belongs to a journal that is gone, which a new one would swallow."""
    return any(os.path.lexists(path.with_name(path.name + end)) for end in ("", *COMPANIONS))


def set_aside(path: Path) -> Path:
    """Rename the file at ``path`` and what belongs to it. Gives the copy's path.

    Raises:  Unusable, also when something else than a file lies there: it was named by mistake and is not ours to move
    """
    try:
        if (kind := _other_kind(path)) is not None:
            raise Unusable(f"{path} is {kind}, no file, and is not set aside")
        copy = _free_name(path)
        if os.path.lexists(path):
            path.rename(copy)
        for end in COMPANIONS:
            beside = path.with_name(path.name + end)
            if beside.exists():
                beside.rename(copy.with_name(copy.name + end))
    except OSError as e:
        raise Unusable(f"{path} cannot be set aside: {_why(e)}") from e
    return copy


def _free_name(path: Path) -> Path:
    stem = f"{path.name}.corrupt-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    copy, n = path.with_name(stem), 1
    while os.path.lexists(copy):
        copy, n = path.with_name(f"{stem}-{n}"), n + 1
    return copy


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a symbolic link"),
)


def _other_kind(path: Path) -> str | None:
    """What lies there when it is no regular file; None for a file and for nothing at all. Raises OSError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "something else")


def _why(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
