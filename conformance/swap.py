"""A pytest plugin for llama.cpp's tests: no downloads, one thread, a real port, patience with a busy machine.

Loaded with ``-p conformance.swap``; ``utils`` is the tests' own module.
"""

import contextlib
import os
import sys
import types
from typing import Any

import pytest
import requests

HUB = "https://huggingface.co/"
LARGE_MODEL = "needs a model of hundreds of MB and more from the hub"
START_TIMEOUT_S = 180


def _stand_in(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules.setdefault(name, module)


_stand_in("wget")
_stand_in("filelock", FileLock=lambda path: contextlib.nullcontext())

import utils  # type: ignore[import-not-found]  # noqa: E402

_start = utils.ServerProcess.start


def _start_here(self: Any, timeout_seconds: int = START_TIMEOUT_S) -> None:
    self.n_threads = self.n_threads or 1  # two wait for each other on a busy machine
    _start(self, max(timeout_seconds, START_TIMEOUT_S))


def _downloaded(url: str, output_file_path: str | None = None) -> str:
    return os.path.join(os.environ["CONFORMANCE_DOWNLOADS"], url.rpartition("/")[2])


_get = requests.get


def _get_here(url: str, *args: Any, **more: Any) -> requests.Response:
    """What the tests fetch themselves comes from the folder."""
    if not url.startswith(HUB):
        return _get(url, *args, **more)
    answer = requests.Response()
    with open(_downloaded(url), "rb") as file:
        answer.status_code, answer._content = 200, file.read()
    return answer


requests.get = _get_here
utils.ServerProcess.start = _start_here
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.download_file = _downloaded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They are not skipped by a mark of their own: whoever has the time runs them with the models."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=LARGE_MODEL))
