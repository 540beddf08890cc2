"""Proxies from one process that has imported everything: a test that starts a server waits for no import.

The launcher that stands in the place of the server binary hands its arguments, environment, folder and output over a
UNIX socket; the process forks, and the child is the server (``server.main``) until the launcher goes or is told to end.
"""

import array
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

LAUNCHER = """
import array, json, os, signal, socket, sys
at, here = socket.socket(socket.AF_UNIX), os.getcwd()
os.chdir(os.path.dirname(sys.argv[1]))  # addresses of sockets are short
at.connect(os.path.basename(sys.argv[1]))
os.chdir(here)
signal.signal(signal.SIGTERM, lambda *_: at.send(b"T"))
signal.signal(signal.SIGINT, lambda *_: at.send(b"T"))
asked = json.dumps({"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}).encode()
at.sendmsg([len(asked).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))])
at.sendall(asked)
status = at.recv(1)
sys.exit(status[0] if status else 1)
"""

Become = Callable[[Sequence[str], Callable[[], bool]], int]

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Should the process that made this one be killed, this one ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Forked:
    """A child that runs a function; the part of ``subprocess.Popen`` that is needed."""

    def __init__(self, run: Callable[[], None]):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            end_with_parent()
            _exit_after(run)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _exit_after(run: Callable[[], None]) -> None:
    status = 1
    try:
        run()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def nurse(at: Path, become: Become) -> None:
    """Listen at this path for launchers, for ever; each gets a child that runs ``become`` with its arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the launchers wait for them
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(at.parent):  # addresses of sockets are short
            listener.bind(at.name)
        listener.listen()
        print("ready", flush=True)
        while True:
            launcher, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _exit_after(lambda launcher=launcher: _serve(launcher, become))
            launcher.close()


def _serve(launcher: socket.socket, become: Become) -> None:
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = array.array("i")
    head, ancillary, _, _ = launcher.recvmsg(4, socket.CMSG_SPACE(2 * output.itemsize))
    output.frombytes(ancillary[0][2])
    n_bytes, said = int.from_bytes(head, "big"), b""
    while len(said) < n_bytes and (piece := launcher.recv(n_bytes - len(said))):
        said += piece
    asked = json.loads(said)
    for source, target in zip(output, (1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])

    def is_ended() -> bool:
        return bool(select.select([launcher], [], [], 0)[0])  # a byte of it, or it is gone

    status = 1
    try:
        status = become(asked["arguments"], is_ended)
    finally:
        with contextlib.suppress(OSError):
            launcher.send(bytes([min(status, 255)]))


def main() -> None:
    """``python -m conformance.nursery PATH``"""
    import polykv_proxy.app
    import polykv_proxy.cli.serve  # noqa: F401
    from conformance import server

    nurse(Path(sys.argv[1]), server.main)


if __name__ == "__main__":
    main()
