"""A journal that was torn: the proxy starts with an empty tree, says so, keeps a copy, and works. It never crashes."""

import logging
import shutil
from pathlib import Path

import pytest

from tests.contract.conftest import made
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy, ProxyMaker
from tests.store.make import put, read

PAGE = 4096
ROOT = list(range(1, 256)) * 40


async def grow(proxy: Proxy) -> None:
    """A root over several pages of the file, a branch with a policy, a leaf and a pinned root."""
    await made(proxy, tokens=ROOT, name="root")
    await made(proxy, "/polykv/pools/root/fork", tokens=ROOT[:3000] + [7] * 500, name="branch")
    await made(proxy, "/polykv/pools/branch/fork", own_tokens=[9, 9], name="leaf")
    await made(proxy, tokens=[1, 2, 3], name="apart", pin=True)
    policy = {"target_tps_per_session": 12.5}
    assert (await proxy.client.post("/polykv/pools/branch/admission", json=policy)).status_code == 200


async def names(proxy: Proxy) -> list[str]:
    answer = await proxy.client.get("/polykv/pools")
    assert answer.status_code == 200, answer.text
    return [pool["name"] for pool in answer.json()["pools"]]


@pytest.fixture
async def whole(engine: FakeEngine, make_proxy: ProxyMaker, tmp_path: Path) -> Path:
    """A sound journal of a proxy that ended, and is read as one."""
    path = tmp_path / "whole" / "pools.db"
    async with make_proxy(engine.url, state=str(path)) as proxy:
        await grow(proxy)
    async with make_proxy(engine.url, state=str(path)) as proxy:
        assert await names(proxy) == ["root", "branch", "leaf", "apart"]
    assert path.stat().st_size > 10 * PAGE
    return path


async def test_truncated_at_every_page_it_starts_empty_with_a_warning_and_a_copy(
    engine: FakeEngine, make_proxy: ProxyMaker, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut there, and cut with zeros up to where it ended."""
    content = read(whole)
    for n in range(0, len(content), PAGE):
        for torn in (content[:n], content[:n] + bytes(len(content) - n)):
            state = whole.parent / f"torn-{n}-{len(torn)}.db"
            put(state, torn)
            caplog.clear()
            async with make_proxy(engine.url, state=str(state)) as proxy:
                assert await names(proxy) == []
                answer = await proxy.client.get("/polykv/health")
                copy = answer.json()["journal"]["saved_copy"]
                assert (answer.status_code, answer.json()["journal"]["state"]) == (200, "ok")
                assert read(copy) == torn
                said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
                assert [line for line in said if copy in line], said
                assert not [r for r in caplog.records if r.exc_info]
                await made(proxy, tokens=[5, 6, 7], name="new")
                assert len(engine.ready_pools()) == 1, "what nobody owns any more is freed"
    async with make_proxy(engine.url, state=str(state)) as proxy:
        assert await names(proxy) == ["new"]


async def test_torn_log_beside_it_costs_the_last_orders_at_most(
    engine: FakeEngine, make_proxy: ProxyMaker, tmp_path: Path
) -> None:
    """As after kill -9 and a disk that lost its end: what is there is a state that was acknowledged at some moment."""
    live = tmp_path / "live" / "pools.db"
    async with make_proxy(engine.url, state=str(live)) as proxy:
        await grow(proxy)
        shutil.copytree(live.parent, tmp_path / "killed")
    content = read(tmp_path / "killed" / "pools.db-wal")
    whole = ["root", "branch", "leaf", "apart"]
    for n in sorted({0, len(content) // 3, len(content) // 2, max(0, len(content) - 1), len(content)}):
        folder = tmp_path / f"log-{n}"
        shutil.copytree(tmp_path / "killed", folder)
        put(folder / "pools.db-wal", content[:n])
        async with make_proxy(engine.url, state=str(folder / "pools.db")) as proxy:
            found = await names(proxy)
            assert found == whole[: len(found)]
            assert (await proxy.client.get("/polykv/health")).json()["journal"]["saved_copy"] is None
