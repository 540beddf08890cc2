"""The servers and the model that tests and benchmarks run: the project's own, built and fetched on first use."""

import os
import sys
from pathlib import Path

from polykv_proxy.engine.build import ensure_engine
from polykv_proxy.engine.model import CHAT_MODEL, ensure_model

# Binaries of somebody who works on the patches and builds by hand.
OVERRIDE = {"patched": "POLYKV_TEST_ENGINE", "stock": "POLYKV_TEST_STOCK"}


class BuildLog:
    """What a build says, on stderr; a line for every tenth of the steps."""

    def __init__(self) -> None:
        self._tenth = 0

    def say(self, line: str) -> None:
        print(line, file=sys.stderr)

    def step(self, n_done: int, n_total: int, what: str) -> None:
        if n_total and (tenth := 10 * n_done // n_total) != self._tenth:
            self._tenth = tenth
            self.say(f"{what} {n_done}/{n_total}")


def binary_path(kind: str) -> Path:
    """``kind`` is patched or stock."""
    if named := os.environ.get(OVERRIDE[kind]):
        return Path(named)
    return ensure_engine(BuildLog(), stock=kind == "stock")


def chat_model_path() -> Path:
    return ensure_model(CHAT_MODEL, BuildLog().say)
