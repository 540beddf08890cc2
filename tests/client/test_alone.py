"""The SDK by itself: what importing it brings along, and clients that outlive their event loops."""

import asyncio
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from polykv_proxy.client import AsyncPolyKVClient, PolyKVClient
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy

OURS = {"polykv_proxy", "polykv_proxy.client"}
PAGE = Path(__file__).parents[2] / "docs" / "sdk.md"
FOREIGN = ("aiohttp", "langchain_core", "langchain", "langgraph", "openai", "orjson", "pydantic_settings", "uvloop")


def test_it_brings_no_server_along() -> None:
    code = "import sys, polykv_proxy.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "httpx" in loaded
    assert [name for name in FOREIGN if name in loaded] == []
    rooms = {name for name in loaded if name.startswith("polykv_proxy")}
    assert {name for name in rooms if name not in OURS and not name.startswith("polykv_proxy.client.")} == set()


async def test_one_client_over_several_event_loops(proxy: Proxy) -> None:
    client = AsyncPolyKVClient(proxy.url)

    async def twice() -> int:
        async with client:
            await client.tokenize("a")
            return len(await client.tokenize("bc"))

    def one_after_the_other() -> list[int]:
        return [asyncio.run(twice()) for _ in range(3)]

    assert await asyncio.to_thread(one_after_the_other) == [2, 2, 2]
    assert await twice() == 2
    assert await twice() == 2  # closed, and used again


async def test_connections_of_a_loop_are_its_own(proxy: Proxy) -> None:
    client = AsyncPolyKVClient(proxy.url)

    async def in_another_loop() -> list[int]:
        async with client:
            return await client.tokenize("ab")

    async with client:
        await client.tokenize("a")  # this loop has a connection that is alive
        assert await asyncio.to_thread(asyncio.run, in_another_loop()) == [97, 98]
        assert await client.tokenize("c") == [99]


async def test_one_client_in_several_loops_at_once(proxy: Proxy) -> None:
    client = AsyncPolyKVClient(proxy.url)
    together = threading.Barrier(4, timeout=10)

    async def ask() -> list[int]:
        async with client:
            await asyncio.to_thread(together.wait)
            return await client.tokenize("abc")

    with ThreadPoolExecutor(4) as threads:
        loop = asyncio.get_running_loop()
        answers = await asyncio.gather(*(loop.run_in_executor(threads, asyncio.run, ask()) for _ in range(4)))
    assert answers == [[97, 98, 99]] * 4


async def test_threads_share_one_client(proxy: Proxy, engine: FakeEngine) -> None:
    with PolyKVClient(proxy.url) as client:

        def chat(i: int) -> str:
            messages = [{"role": "user", "content": f"number {i}"}]
            reply = client.chat(messages, session_id=f"s{i}", max_tokens=2)
            pieces = client.stream_chat(messages, session_id=f"s{i}", max_tokens=2)
            assert "".join(piece.text for piece in pieces) == reply.text
            assert reply.polykv is not None
            return str(reply.polykv.session_id)

        with ThreadPoolExecutor(8) as threads:
            loop = asyncio.get_running_loop()
            names = await asyncio.gather(*(loop.run_in_executor(threads, chat, i) for i in range(16)))
    assert names == [f"s{i}" for i in range(16)]


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
async def test_the_page_says_what_works(
    proxy: Proxy, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Each snippet by itself as it is printed, and a second time."""
    assert len(BLOCKS) == 3
    monkeypatch.setenv("POLYKV_BASE_URL", proxy.url)

    def follow() -> dict[str, Any]:
        names: dict[str, Any] = {}
        exec(compile(BLOCKS[number], f"{PAGE.name} {number}", "exec"), names)
        return names

    for _ in range(2):
        names = await asyncio.to_thread(follow)
        if number < 2:
            assert names["reply"].polykv.prefix_n_tokens == proxy.control.tree.get("review").prefix_len
        else:
            assert names["delivery"].result
    chats = [request.json() for request in engine.requests("/v1/chat/completions")]
    assert chats
    assert all(chat["max_tokens"] == 64 for chat in chats)


async def test_a_cancelled_chat_leaves_the_engine(proxy: Proxy, engine: FakeEngine) -> None:
    engine.token_s, engine.n_gen = 0.05, 400
    async with AsyncPolyKVClient(proxy.url) as client:
        async with asyncio.timeout(10):
            chatting = asyncio.create_task(client.chat([{"role": "user", "content": "x"}], session_id="s"))
            while not engine.requests("/v1/chat/completions"):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            chatting.cancel()
            await engine.requests("/v1/chat/completions")[0].ended()
            assert engine.requests("/v1/chat/completions")[0].left
            pieces = client.stream_chat([{"role": "user", "content": "x"}], session_id="t")
            await anext(pieces)
            await pieces.aclose()
            await engine.requests("/v1/chat/completions")[1].ended()
            assert engine.requests("/v1/chat/completions")[1].left
