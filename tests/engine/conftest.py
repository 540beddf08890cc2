"""Fixtures of the tests that run a real llama-server: binaries, models, and servers started on demand.

A tiny model serves a third of a second after its start, so a test that needs flags of its own starts its own server.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .binaries import binary_path, chat_model_path
from .harness import EngineServer
from .hooks import Engine
from .noise import Noise
from .tiny_models import tiny_model_path

POOLS = ("--polykv-max-pools", "8")
SMALL = ("-c", "8192", "--parallel", "4", "--kv-unified")


class Launcher:
    """Starts servers; every one is stopped, and proved alive until then, when the owning fixture ends."""

    def __init__(self, stack: ExitStack, dir_: Path, chat_model: Path) -> None:
        self._stack = stack
        self._dir = dir_
        self._chat_model = chat_model

    def __call__(self, binary: str, model: str, *flags: str) -> Engine:
        """``binary`` is patched or stock, ``model`` a tiny model's name or chat."""
        path = self._chat_model if model == "chat" else tiny_model_path(model, self._chat_model)
        saved = self._dir / "saved"
        saved.mkdir(exist_ok=True)
        flags = (*flags, "--slot-save-path", str(saved))
        server = EngineServer(binary_path(binary), path, *flags, log_dir=self._dir, name=f"{binary}-{model}")
        return Engine(self._stack.enter_context(server))

    def own(self, server: EngineServer) -> Engine:
        """A server that the test has made itself."""
        return Engine(self._stack.enter_context(server))

    def pooled(self, model: str, *flags: str) -> Engine:
        """The patched server as most tests want it: four slots, unified cache, eight pools."""
        return self("patched", model, *SMALL, *POOLS, *layout_flags(model), *flags)

    def stock(self, model: str, *flags: str) -> Engine:
        """The unpatched server with the same flags."""
        return self("stock", model, *SMALL, *layout_flags(model), *flags)


def layout_flags(model: str) -> tuple[str, ...]:
    return ("--swa-full",) if model == "sliding" else ()


@pytest.fixture(scope="session")
def chat_model() -> Path:
    """The tests' chat model, fetched on first use."""
    return chat_model_path()


@pytest.fixture(scope="session")
def noise(chat_model: Path) -> Noise:
    return Noise(chat_model)


@pytest.fixture
def dense_path(chat_model: Path) -> Path:
    return tiny_model_path("dense", chat_model)


@pytest.fixture
def launch(chat_model: Path, tmp_path: Path) -> Iterator[Launcher]:
    """Servers that live as long as one test."""
    with ExitStack() as stack:
        yield Launcher(stack, tmp_path, chat_model)


@pytest.fixture(scope="module")
def launch_shared(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Servers that live as long as the tests of one module."""
    with ExitStack() as stack:
        yield Launcher(stack, tmp_path_factory.mktemp("engine"), chat_model)
