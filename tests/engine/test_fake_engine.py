"""The fake engine of the other tests beside the real one: the same orders about saved states, the same answers.

What one says of bytes and milliseconds the other cannot know; everything else is compared, the words of errors too.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine

from .conftest import Launcher

pytestmark = pytest.mark.engine

POOLS, ROOT, CHILD, SLOT, MORE = "/polykv/engine/pools", 5, 6, 1, 12
FIRST, SECOND, OTHER = [1] * 40 + [2] * 30, [1] * 40 + [3] * 50, [9] * 25
MIB = 1 << 20
Order = tuple[str, str, Any]


def do(**body: Any) -> Order:
    return "POST", POOLS, body


def save(tag: str, **more: Any) -> Order:
    return do(op="save", tag=tag, **more)


def load(tag: str, **more: Any) -> Order:
    return do(op="load", tag=tag, **more)


def free(seq: int) -> Order:
    return "DELETE", f"{POOLS}/{seq}", None


def forget(tag: str, query: str = "") -> Order:
    return "DELETE", f"/polykv/engine/saved/{tag}{query}", None


def make(tokens: list[int], **more: Any) -> Order:
    return do(op="materialize", tokens=tokens, tag="made", **more)


def run(tokens: list[int], slot: int, **more: Any) -> Order:
    return "POST", "/completion", {"prompt": tokens, "id_slot": slot, "n_predict": 0, **more}


LIST: Order = ("GET", POOLS, None)
STATS: Order = ("GET", "/polykv/engine/stats", None)
FURNISH = [
    make(FIRST),
    make(SECOND, parent_seq=ROOT, branch_pos=40),
    run([*SECOND, *OTHER], SLOT, shared_pool_slot=CHILD),
]

STORIES: dict[str, list[Order]] = {
    "pools leave and come back": [
        save("root", seq=ROOT),
        save("child", seq=CHILD, **{"from": 40}, to="both"),
        LIST,
        free(CHILD),
        free(ROOT),
        STATS,
        load("child"),
        load("root", seq=MORE),
        load("child", parent_seq=MORE, branch_pos=40),
        load("root"),
        load("root", seq=MORE),
        LIST,
        STATS,
    ],
    "a slot is parked": [
        save("chat", id_slot=SLOT, **{"from": 90}),
        run(OTHER, SLOT),
        STATS,
        load("chat", id_slot=2, parent_seq=CHILD),
        load("chat", id_slot=SLOT, parent_seq=ROOT),
        STATS,
        run([*SECOND, *OTHER, 4, 4], 2),
        load("chat", parent_seq=CHILD),
        LIST,
    ],
    "only a part": [
        save("part", seq=ROOT, n_tokens=30),
        save("part", seq=CHILD, **{"from": 10}, n_tokens=60, to="disk"),
        LIST,
        save("part", seq=ROOT, n_tokens=20),
        save("a/b", seq=ROOT),
        LIST,
        load("part"),
        free(ROOT + 2),
        forget("part"),
        forget("part"),
        load("part"),
        LIST,
    ],
    "behind a parent that has some of it": [
        save("whole", seq=CHILD),
        save("rest", seq=CHILD, **{"from": 20}),
        save("chat", id_slot=SLOT),
        free(CHILD),
        STATS,
        load("whole", parent_seq=ROOT, branch_pos=40),
        load("rest", parent_seq=ROOT, branch_pos=40),
        load("rest", parent_seq=ROOT, branch_pos=30, seq=MORE),
        do(op="cells"),
        load("chat", id_slot=2, parent_seq=CHILD, branch_pos=90),
        STATS,
        load("whole", parent_seq=ROOT, branch_pos=41),
        load("whole", parent_seq=ROOT, branch_pos=90),
        load("whole", parent_seq=ROOT, branch_pos=100),
        load("whole", branch_pos=40),
        load("whole", parent_seq=ROOT + 3, branch_pos=40),
        load("rest", parent_seq=ROOT, branch_pos=10),
        load("whole", parent_seq=ROOT, branch_pos=0),
        free(ROOT),
        LIST,
        STATS,
    ],
    "written later": [
        save("chat", id_slot=SLOT, **{"from": 90}),
        save("child", seq=CHILD, **{"from": 40}),
        run(OTHER, SLOT),
        save("chat", to="disk"),
        save("child", to="disk", seq=-1, id_slot=None, **{"from": 0}, n_tokens=-1),
        save("root", seq=ROOT, to="disk"),
        LIST,
        save("root", to="disk"),
        save("nobody", to="disk"),
        save("chat", to="both"),
        save("chat", to="disk", **{"from": 90}),
        save("chat", to="disk", n_tokens=115),
        forget("chat"),
        save("chat", to="disk"),
        LIST,
    ],
    "forgotten in one place": [
        save("a", seq=ROOT, to="both"),
        save("b", seq=CHILD, to="both"),
        save("c", seq=ROOT),
        save("d", seq=ROOT, to="disk"),
        forget("a", "?in=ram"),
        forget("b", "?in=disk"),
        forget("c", "?in=disk"),
        forget("d", "?in=ram"),
        forget("a", "?in=ram"),
        forget("a", "?in=tape"),
        forget("a", "?in="),
        LIST,
        load("a"),
        load("b"),
        forget("a", "?in=disk"),
        forget("b", "?in=ram"),
        forget("b"),
        LIST,
    ],
    "a slot is emptied": [
        do(op="clear", id_slot=SLOT),
        do(op="clear", id_slot=SLOT),
        do(op="clear"),
        STATS,
    ],
    "what sits low is filled first": [
        free(ROOT),
        make(OTHER),
        STATS,
        save("child", seq=CHILD),
        free(CHILD),
        STATS,
        load("child"),
        STATS,
    ],
    "wrong arguments": [
        save("", seq=ROOT),
        save("a"),
        save("a", seq=ROOT, id_slot=1),
        save("a", id_slot=4),
        save("a", seq=ROOT, n_tokens=0),
        save("a", seq=ROOT, to="tape"),
        save("a", seq=MORE),
        save("a", seq=ROOT, n_tokens=71),
        save("a", seq=ROOT, **{"from": 70}),
        save("a", id_slot=0),
        load(""),
        load("a", seq=ROOT, id_slot=1),
        load("a", id_slot=4),
        load("nobody"),
        save("a", seq=CHILD, **{"from": 40}),
        load("a", parent_seq=MORE),
        load("a", parent_seq=ROOT, branch_pos=39),
        load("a", parent_seq=ROOT, seq=CHILD),
        make(OTHER),
        load("a", parent_seq=ROOT + 2),
        do(op="drop"),
        forget("nobody"),
    ],
}

BUDGETS_MIB = {"no memory": (0, 64), "no disk": (64, 0), "nothing at all": (0, 0)}
for named in BUDGETS_MIB:
    STORIES[named] = [
        STATS,
        save("a", seq=ROOT),
        save("b", seq=ROOT, to="disk"),
        save("c", seq=ROOT, to="both"),
        save("a", to="disk"),
        load("a"),
        load("b"),
        LIST,
        forget("a", "?in=disk"),
        forget("a"),
        forget("b"),
    ]

UNKNOWABLE = {"epoch", "bytes", "t_ms", "t_copy_ms", "t_write_ms", "n_ckpt", "gen"}
SHOWN = {"cells", "saved"}
"""Of the stats, and of a slot there:"""
SLOT_SHOWN = {"id", "n_tokens", "n_pool_shared", "pool_seq"}
OF_A_RUN = {"cache_n", "prompt_n"}


def plain(given: Any) -> Any:
    """Without what only one of the two can know."""
    if isinstance(given, list):
        return [plain(item) for item in given]
    if not isinstance(given, dict):
        return given
    return {key: plain(value) for key, value in given.items() if key not in UNKNOWABLE}


def told(order: Order, status: int, answer: dict[str, Any]) -> Any:
    path = order[1]
    if path.endswith("/stats"):
        slots = [{key: slot[key] for key in SLOT_SHOWN} for slot in answer["slots"]]
        return plain({key: answer[key] for key in SHOWN}) | {"slots": slots}
    if path == "/completion":
        return {key: answer["timings"][key] for key in OF_A_RUN}
    if order == LIST:
        pools = [pool for pool in answer["pools"] if pool["state"] != "free"]
        return plain({"cells": answer["cells"], "saved": answer["saved"], "pools": pools})
    return status, plain(answer)


async def tell(client: httpx.AsyncClient, orders: list[Order]) -> list[Any]:
    seen = []
    for method, path, body in orders:
        answer = await client.request(method, path, json=body)
        seen.append(told((method, path, body), answer.status_code, answer.json()))
    return seen


@asynccontextmanager
async def fake(ram_mib: int, disk_mib: int) -> AsyncIterator[FakeEngine]:
    sizes: dict[str, Any] = {"n_slots": 4, "max_pools": 8, "n_cells": 8192}
    async with FakeEngine(**sizes, save_ram=ram_mib * MIB, save_disk=disk_mib * MIB) as engine:
        yield engine


@pytest.mark.parametrize("story", STORIES)
def test_the_same_orders_get_the_same_answers(launch: Launcher, tmp_path: Path, story: str) -> None:
    ram_mib, disk_mib = BUDGETS_MIB.get(story, (64, 64))
    flags = ("--polykv-save-ram", str(ram_mib), "--polykv-save-disk", str(disk_mib))
    real = launch.pooled("dense", *flags, "--polykv-save-path", str(tmp_path / "states"), "--no-cache-idle-slots")

    async def both() -> tuple[list[Any], list[Any]]:
        orders = [*FURNISH, *STORIES[story]]
        async with fake(ram_mib, disk_mib) as engine, httpx.AsyncClient(base_url=engine.url) as client:
            ours = await tell(client, orders)
        async with httpx.AsyncClient(base_url=real.server.url, timeout=60) as client:
            return ours, await tell(client, orders)

    ours, theirs = asyncio.run(both())
    for order, our, their in zip([*FURNISH, *STORIES[story]], ours, theirs, strict=True):
        assert our == their, f"{order}\nfake: {our}\nreal: {their}"
