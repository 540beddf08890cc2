"""docs/langgraph.md names everything there is, and what it shows works."""

import asyncio
import re
from pathlib import Path

import pytest

from polykv_proxy import langgraph
from polykv_proxy.langgraph import ChatPolyKV
from tests.fake_engine import FakeEngine
from tests.relay.conftest import ProxyMaker, make_proxy

__all__ = ["make_proxy"]

PAGE = (Path(__file__).parents[2] / "docs" / "langgraph.md").read_text(encoding="utf-8")


def test_every_name() -> None:
    assert {name for name in langgraph.__all__ if not re.search(rf"\b{name}\b", PAGE)} == set()


def test_every_field() -> None:
    own = set(ChatPolyKV.__annotations__) - {"model_name", "openai_api_key"}
    given = {name for name in own if not name.startswith("_") and name in ChatPolyKV.model_fields}
    later = {"stream_usage", "use_responses_api", "stream_chunk_timeout"}  # defaults of others' fields
    assert {name for name in given - later if f"`{name}`" not in PAGE} == set()


async def test_every_example(
    engine: FakeEngine, make_proxy: ProxyMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 7
    async with make_proxy(engine.url) as proxy:
        monkeypatch.setenv("POLYKV_BASE_URL", proxy.url)
        names: dict[str, object] = {}

        def run() -> None:
            """Twice: the second time its pool is there."""
            try:
                for block in [*blocks, *blocks]:
                    exec(compile(block, "docs/langgraph.md", "exec"), names)
            finally:
                names["polykv"].close()  # type: ignore[attr-defined]

        await asyncio.to_thread(run)
    printed = capsys.readouterr().out
    assert "[" in printed
    assert names["answer"].response_metadata["pool_id"] == names["pool"].pool_id  # type: ignore[attr-defined]
    assert len(names["state"]["messages"]) == 2  # type: ignore[index]
