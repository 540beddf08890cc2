"""What is shown of a large tree: one picture, and nobody waits for all of it."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from polykv_proxy.config import load_settings
from polykv_proxy.control import Control
from polykv_proxy.errors import PoolNotFound
from polykv_proxy.ids import PoolId, SeqId, SessionId, SlotId
from polykv_proxy.tree.view import SLICE
from polykv_proxy.upstream import Stats
from tests.tree.make import toks

N_POOLS = 8 * SLICE


@pytest_asyncio.fixture
async def control() -> AsyncIterator[Control]:
    """One that has seen an engine, with a root and so many pools on it, the first three of them resident."""
    control = Control(load_settings(upstream_url="http://127.0.0.1:1", state=":memory:"))
    tree = control.tree
    root = tree.commit(tree.plan_root(toks(range(100))), now_s=0.0).pool_id
    for i in range(N_POOLS - 1):
        tree.commit(tree.plan_fork_own(root, toks(1000 + i), name=f"pool-{i}"), now_s=0.0)
    for pool_id in (2, 3, 4):
        tree.set_residency(PoolId(pool_id), "resident", seq_id=SeqId(10 + pool_id), gen=1)
    session = control.sessions.name(SessionId("agent"), control.clock())
    session.pool_id, session.slot_id = PoolId(2), SlotId(0)
    slots = [{"id": 0, "state": "idle", "n_tokens": 151, "n_pool_shared": 101, "pool_seq": 12}]
    watch, cells = control.watch, {"used": 153, "total": 4096, "free": 3943}
    watch.state, watch.hooks, watch.epoch = "ready", True, "here"
    watch.stats = Stats.model_validate({"epoch": "here", "n_slots": 1, "max_pools": 9, "slots": slots, "cells": cells})
    yield control
    await control.engine.close()


async def test_others_have_their_turns_while_a_large_tree_is_written(control: Control) -> None:
    n_turns = 0

    async def other() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(other())
    body = await control.views.pools_json()
    counting.cancel()
    assert len(json.loads(body)["pools"]) == N_POOLS
    assert n_turns >= N_POOLS / SLICE


async def test_what_happens_meanwhile_is_not_in_the_picture(control: Control) -> None:
    """Every change there is to a tree, after the first slice: the answer is that of the moment it was asked for."""
    at_once = control.views.pools()
    assert at_once["pools"][0]["residency"] == "resident", "by a child"
    tree, views = control.tree, control.views
    writing = asyncio.create_task(views.pools_json())
    await asyncio.sleep(0)
    assert not writing.done()
    tree.set_residency(PoolId(2), "cold")
    tree.set_residency(PoolId(N_POOLS - 1), "resident", seq_id=SeqId(12), gen=2)
    tree.set_residency(PoolId(N_POOLS - 2), "warm")
    tree.release(PoolId(N_POOLS))
    tree.commit(tree.plan_fork_own(PoolId(5), toks(7)), now_s=1.0)
    for pool in tree:
        pool.pin, pool.last_access_s = True, 9.0
        pool.n_queries += 1
        pool.n_hits += 1
    control.sessions.drop(SessionId("agent"))
    assert control.watch.stats is not None
    control.watch.stats = control.watch.stats.model_copy(update={"slots": ()})
    assert json.loads(await writing) == at_once
    assert views.pools() != at_once


async def test_one_pool_and_what_is_below_it_as_bytes(control: Control) -> None:
    assert json.loads(await control.views.pools_json("pool-0")) == control.views.pools("pool-0")
    assert [pool["pool_id"] for pool in control.views.pools("2")["pools"]] == [2]
    with pytest.raises(PoolNotFound):
        await control.views.pools_json("nobody")
