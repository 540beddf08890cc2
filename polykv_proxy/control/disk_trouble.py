"""A disk that cannot be written to: said once per cause, and left alone for a while, longer each time."""

import logging
import re
import time
from collections.abc import Callable

log = logging.getLogger("polykv.saved")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0

_PATH = re.compile(r"\S*/\S*")


class DiskTrouble:
    """``why``: why the last file could not be written; empty when it could, or none was to be.

    ``may_try``: nothing is wrong, or the pause since the last attempt is over.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.why = ""
        self.first_pause_s, self.longest_pause_s = FIRST_PAUSE_S, LONGEST_PAUSE_S
        self._pause_s, self._n_bytes = 0.0, 0
        self._until_s = float("-inf")

    @property
    def may_try(self) -> bool:
        return self._clock() >= self._until_s

    def failed(self, why: str, n_bytes: int = 0) -> None:
        """A file of so many bytes could not be written. Of several at the same time one makes the pause longer."""
        self._n_bytes = max(self._n_bytes, n_bytes)
        if self.may_try:
            self._pause_s = min(max(2 * self._pause_s, self.first_pause_s), self.longest_pause_s)
            self._until_s = self._clock() + self._pause_s
        if _cause(why) != _cause(self.why):
            log.warning("states are not saved on disk, it is tried again from time to time: %s", why)
        self.why = why

    def worked(self, n_bytes: int) -> None:
        """A file was written. A smaller one than failed says little of a disk that is nearly full."""
        self._until_s = float("-inf")
        if n_bytes >= self._n_bytes:
            if self.why:
                log.info("states are saved on disk again")
            self.why, self._pause_s, self._n_bytes = "", 0.0, 0

    def end_pause(self) -> None:
        """It may be another disk now."""
        self._pause_s, self._n_bytes, self._until_s = 0.0, 0, float("-inf")


def _cause(why: str) -> str:
    """The same for all files, which have names of their own."""
    return _PATH.sub("", why)
