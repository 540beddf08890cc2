"""The JSON of the pool tree."""

import json
from typing import Any

from polykv_proxy.ids import PoolId, SessionId, SlotId
from polykv_proxy.tree.accounting import Accounts, Gone
from polykv_proxy.tree.tree import PoolTree
from polykv_proxy.tree.view import EngineFacts, RetentionFacts, SessionFacts, TreePicture
from tests.tree.make import add_root, extend, settle, toks


def pools_view(*facts: Any, **more: Any) -> dict[str, Any]:
    return TreePicture(*facts, **more).whole()


def agent(pool_id: PoolId, shared: int, suffix: int) -> SessionFacts:
    return SessionFacts(
        session_id=SessionId("a1"),
        pool_id=pool_id,
        pool_n_tokens=shared,
        suffix_n_tokens=suffix,
        tps_ewma=12.5,
        ttft_ms=31.0,
        state="generating",
    )


def small_tree() -> tuple[PoolTree, list[PoolId]]:
    tree = PoolTree()
    root = add_root(tree, toks(range(100)), name="system")
    task = extend(tree, root.pool_id, toks(range(40)))
    deep = extend(tree, task.pool_id, toks(1, 2))
    settle(tree, root, "resident", 6)
    settle(tree, task, "resident", 7)
    return tree, [root.pool_id, task.pool_id, deep.pool_id]


def test_whole_tree_shows_design_fields() -> None:
    tree, (root, task, deep) = small_tree()
    facts = EngineFacts(bytes_per_token=10, seq_ids_used=8, seq_ids_max=22, kv_cells_used=145, kv_cells_total=16384)
    accounts = Accounts({root: 100, task: 40}, {PoolId(9): 7}, {SlotId(0): 5, SlotId(1): 11})
    gone = {PoolId(9): Gone(PoolId(9), "old", root, 100, 120)}
    retention = RetentionFacts(in_use={task}, grace_end_s=lambda pool: pool.last_use_s + 300)
    stray = SessionFacts(session_id=SessionId("a2"), pool_id=None, pool_n_tokens=0, suffix_n_tokens=8)
    view = pools_view(
        tree,
        [agent(task, 140, 5), stray],
        facts,
        accounts=accounts,
        gone=gone,
        retention=retention,
        unix_offset_s=1000.0,
    )
    assert json.loads(json.dumps(view)) == view
    assert {k: v for k, v in view.items() if k != "pools"} == {
        "tree_depth": 3,
        "seq_ids_used": 8,
        "seq_ids_max": 22,
        "kv_cells_used": 145,
        "kv_cells_total": 16384,
        "kv_bytes_per_token": 10,
        "released": [
            {
                "pool_id": 9,
                "name": "old",
                "parent": root,
                "branch_pos": 100,
                "prefix_len": 120,
                "own_kv_cells": 7,
                "own_kv_bytes": 70,
            }
        ],
        "unpooled": {
            "kv_cells": 11,
            "kv_bytes": 110,
            "sessions": [
                {
                    "session_id": "a2",
                    "prefix_n_tokens": 0,
                    "suffix_n_tokens": 8,
                    "marginal_kv_bytes": 80,
                    "tps_ewma": None,
                    "ttft_ms": None,
                    "state": None,
                    "warm_bytes": 0,
                }
            ],
        },
    }
    assert [pool["pool_id"] for pool in view["pools"]] == [root, task, deep]
    assert view["pools"][0] == {
        "pool_id": root,
        "name": "system",
        "parent": -1,
        "branch_pos": 0,
        "prefix_len": 100,
        "own_n_tokens": 100,
        "residency": "resident",
        "seq_id": 6,
        "pinned": False,
        "orphaned_pin": False,
        "in_use": False,
        "auto": False,
        "ttl_s": None,
        "expires_ts": 1300.0,
        "created_ts": 1000.0,
        "last_access_ts": 1000.0,
        "queries": 0,
        "hits": 0,
        "own_kv_cells": 100,
        "own_kv_bytes": 1000,
        "subtree_kv_cells": 145,
        "subtree_kv_bytes": 1450,
        "warm_bytes": 0,
        "children": [task],
        "sessions": [],
    }
    assert view["pools"][1]["sessions"] == [
        {
            "session_id": "a1",
            "prefix_n_tokens": 140,
            "suffix_n_tokens": 5,
            "marginal_kv_bytes": 50,
            "tps_ewma": 12.5,
            "ttft_ms": 31.0,
            "state": "generating",
            "warm_bytes": 0,
        }
    ]
    assert (view["pools"][2]["residency"], view["pools"][2]["own_kv_bytes"]) == ("cold", 0)
    assert [pool["expires_ts"] for pool in view["pools"]] == [1300.0, None, None]  # in use; cold
    assert [pool["in_use"] for pool in view["pools"]] == [False, True, False]


def test_a_pool_in_an_heirs_sequence_is_resident() -> None:
    tree, (root, _, _) = small_tree()
    tree.set_residency(root, "cold")
    pools = pools_view(tree, [], EngineFacts())["pools"]
    assert [(pool["residency"], pool["seq_id"]) for pool in pools] == [("resident", 7), ("resident", 7), ("cold", None)]


def test_subtree_shows_nothing_outside() -> None:
    tree, (root, task, deep) = small_tree()
    accounts = Accounts({root: 100, task: 40})
    view = pools_view(tree, [agent(root, 100, 9), agent(task, 140, 5)], EngineFacts(), accounts=accounts, top=task)
    assert [pool["pool_id"] for pool in view["pools"]] == [task, deep]
    assert view["tree_depth"] == 2
    assert view["pools"][0]["subtree_kv_cells"] == 45


def test_unknown_is_null() -> None:
    tree, _ = small_tree()
    view = pools_view(tree, [], EngineFacts())
    assert view["kv_cells_used"] is None
    assert view["pools"][0]["own_kv_bytes"] is None
    assert pools_view(PoolTree(), [], EngineFacts())["tree_depth"] == 0


def test_pinned_leaf_that_nobody_uses_is_an_orphaned_pin() -> None:
    tree, (root, _, deep) = small_tree()
    tree.get(root).pin = tree.get(deep).pin = True
    orphaned = {pool["pool_id"]: pool["orphaned_pin"] for pool in pools_view(tree, [], EngineFacts())["pools"]}
    assert orphaned[root] is False
    assert orphaned[deep] is True
    view = pools_view(tree, [agent(deep, 142, 1)], EngineFacts())
    assert view["pools"][2]["orphaned_pin"] is False


def test_a_warm_pool_holds_bytes_outside_the_cache_and_none_inside() -> None:
    tree, (root, task, deep) = small_tree()
    settle(tree, tree.get(task), "warm")
    view = pools_view(
        tree,
        [],
        EngineFacts(bytes_per_token=10),
        accounts=Accounts({root: 100}),
        saved_bytes=lambda pool: {root: 1100, task: 470}.get(pool.pool_id, 0),
    )
    shown = {pool["pool_id"]: (pool["residency"], pool["own_kv_bytes"], pool["warm_bytes"]) for pool in view["pools"]}
    assert shown == {root: ("resident", 1000, 1100), task: ("warm", 0, 470), deep: ("cold", 0, 0)}
    assert view["pools"][1]["seq_id"] is None
