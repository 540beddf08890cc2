"""Every method, by both clients, against the proxy: what it asks is understood, what comes back is what happened."""

import inspect

import pytest
from pydantic import BaseModel

from polykv_proxy.client import (
    AsyncPolyKVClient,
    InvalidRequestError,
    PolyKVClient,
    calls,
    generating,
    results,
)
from polykv_proxy.client.calls import Call, StreamCall
from polykv_proxy.routes import shapes, shapes_admission, shapes_sessions
from polykv_proxy.routes.compact import Compacted
from tests.client.conftest import Asked
from tests.fake_engine import FakeEngine
from tests.relay.conftest import ProxyMaker

A = [65] * 20
AB = [65] * 20 + [66] * 10
CHAT = [{"role": "system", "content": "You are one of several."}, {"role": "user", "content": "Hi"}]


async def test_pools_are_made_shown_and_released(asked: Asked) -> None:
    root = await asked("create_pool", tokens=A, name="root", ttl_s=5)
    assert (root.parent, root.branch_pos, root.prefix_len, root.residency) == (-1, 0, 20, "resident")
    child = await asked("fork_pool", "root", tokens=AB)
    assert (child.parent, child.branch_pos, child.own_n_tokens) == (root.pool_id, 20, 10)
    other = await asked("fork_pool", root.pool_id, branch_pos=5, own_tokens=[67, 68], pin=True)
    assert (other.branch_pos, other.prefix_len) == (5, 7)
    tree = await asked("pools")
    assert [p.pool_id for p in tree.pools] == [root.pool_id, child.pool_id, other.pool_id]
    assert (tree.tree_depth, tree.find("root").children) == (2, [child.pool_id, other.pool_id])
    assert tree.find("nobody") is None
    assert [p.pool_id for p in (await asked("subtree", child.pool_id)).pools] == [child.pool_id]
    shown = await asked("pool", "root")
    assert (shown.pool_id, shown.ttl_s, shown.pinned) == (root.pool_id, 5, False)
    gone = await asked("release", "root", recursive=True)
    assert gone.released[-1] == root.pool_id
    assert set(gone.released) == {root.pool_id, child.pool_id, other.pool_id}
    assert (await asked("pools")).pools == []


async def test_pools_from_a_prompt_messages_and_a_session(asked: Asked) -> None:
    prompt = await asked("create_pool", prompt="abcdef")
    assert prompt.prefix_len == 6
    messages = await asked("create_pool", messages=CHAT[:1], tools=[{"type": "function", "function": {"name": "f"}}])
    assert messages.prefix_len > len(CHAT[0]["content"])
    await asked("complete", A, n_predict=1, session_id="s")
    session = await asked("create_pool", from_session="s", name="of-s")
    assert session.prefix_len >= 20


async def test_keeping_and_letting_go(asked: Asked) -> None:
    await asked("create_pool", tokens=A, name="root")
    pinned = await asked("pin", "root")
    assert (pinned.pinned, pinned.changed, pinned.pinned_cells) == (True, True, 20)
    assert (await asked("unpin", "root")).changed is True
    evicted = await asked("evict", "root", to="cold")
    assert (evicted.was, evicted.residency, evicted.freed.kv_cells) == ("resident", "cold", 20)
    await asked("pin", "root")
    flushed = await asked("flush", "root")
    assert (flushed.evicted, flushed.kept[0].reason) == ([], "pinned")


async def test_admission_policies(asked: Asked) -> None:
    made = await asked("create_pool", tokens=A, name="root")
    child = await asked("fork_pool", "root", tokens=AB)
    assert (await asked("admission", "root")).target_tps_per_session is None
    given = results.AdmissionPolicy(target_tps_per_session=15, mode="enforced", settle_tokens=32)
    said = await asked("set_admission", "root", given)
    assert (said.target_tps_per_session, said.mode, said.settle_tokens, said.on_saturation) == (
        15,
        "enforced",
        32,
        "reject",
    )
    inherited = await asked("admission", child.pool_id)
    assert (inherited.source, inherited.inherited_from) == ("inherited", made.pool_id)
    await asked("set_admission", "root", {"target_tps_per_session": 3})
    assert (await asked("admission", "root")).target_tps_per_session == 3
    await asked("drop_admission", "root")
    assert (await asked("admission", child.pool_id)).source == "none"


async def test_chats_carry_the_fields_and_bring_the_receipt(asked: Asked, engine: FakeEngine) -> None:
    pool = await asked("create_pool", messages=CHAT[:1], name="team")
    reply = await asked(
        "chat", CHAT, pool_id="team", session_id="agent-1", overcommit=True, max_tokens=3, temperature=0
    )
    assert reply.polykv.pool_id == pool.pool_id
    assert (reply.polykv.session_id, reply.polykv.prefix_n_tokens) == ("agent-1", pool.prefix_len)
    assert reply.polykv.cached_n_tokens >= pool.prefix_len
    assert reply.text == reply.choices[0]["message"]["content"] != ""
    assert reply.finish_reason == "length"
    sent = engine.requests("/v1/chat/completions")[-1].json()
    assert (sent["max_tokens"], sent["temperature"], sent["stream"]) == (3, 0, False)
    pieces = await asked("stream_chat", CHAT, pool_id="team", session_id="agent-1", max_tokens=3, temperature=0)
    assert "".join(piece.text for piece in pieces) == reply.text
    assert pieces[-1].polykv.session_id == "agent-1"
    assert [piece.polykv for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


async def test_completions_of_tokens(asked: Asked) -> None:
    reply = await asked("complete", A, n_predict=4, return_tokens=True, session_id="s")
    assert (len(reply.text), reply.timings["predicted_n"]) == (4, 4)
    assert reply.polykv.miss_reason == "no_pool"
    pieces = await asked("stream_complete", A, n_predict=4, session_id="s")
    assert "".join(piece.text for piece in pieces) == reply.text
    assert [piece.stop for piece in pieces][-1] is True
    assert pieces[-1].polykv.session_id == "s"


async def test_rates_once_and_as_a_stream(asked: Asked) -> None:
    await asked("complete", A, n_predict=1, session_id="s")
    sample = await asked("tps")
    assert [s.session_id for s in sample.sessions] == ["s"]
    first, second = await asked("stream_tps", interval_ms=100, most=2)
    assert first.ts < second.ts
    assert first.sessions[0].session_id == "s"


async def test_sessions(asked: Asked) -> None:
    pool = await asked("create_pool", tokens=A)
    await asked("complete", AB, n_predict=1, session_id="a/ü b", pool_id=pool.pool_id)
    (shown,) = await asked("sessions")
    assert (shown.session_id, shown.pool_id, shown.n_turns, shown.state) == ("a/ü b", pool.pool_id, 1, "idle")
    assert (await asked("session", "a/ü b")).n_turns == 1
    assert (await asked("drop_session", "a/ü b")).detached_from == pool.pool_id
    assert await asked("sessions") == []


async def test_match_and_receipts(asked: Asked) -> None:
    pool = await asked("create_pool", tokens=A, name="root")
    found = await asked("match", tokens=[*A[:5], 90], pool_id="root")
    assert (found.pool_id, found.prefix_n_tokens, found.miss_reason) == (pool.pool_id, 5, "diverged")
    assert found.divergence["pos"] == 5
    assert (await asked("match", prompt="A" * 25)).miss_reason is None
    await asked("complete", AB, n_predict=2, session_id="s", pool_id="root")
    await asked("complete", AB, n_predict=2, session_id="t", pool_id="root")
    newest, older = await asked("requests", last=2)
    assert [(r.session_id, r.pool_id, r.decision) for r in (newest, older)] == [
        ("t", pool.pool_id, "attached"),
        ("s", pool.pool_id, "attached"),
    ]
    assert [r.session_id for r in await asked("requests", request_id=older.request_id)] == ["s"]


async def test_tokens_of_texts_and_chats(asked: Asked, engine: FakeEngine) -> None:
    assert await asked("tokenize", "AB<|im_end|>") == [65, 66, 257]
    tokens = await asked("render", CHAT, add_generation_prompt=True)
    (expected,), _ = engine.template.render("/v1/chat/completions", {"messages": CHAT})
    assert tokens == expected
    shorter = await asked("render", CHAT)
    assert tokens[: len(shorter)] == shorter
    assert len(shorter) < len(tokens)


async def test_health_is_an_answer_also_when_it_is_bad(asked: Asked, make_proxy: ProxyMaker) -> None:
    assert (await asked("health")).status == "ok"
    async with make_proxy("http://127.0.0.1:9") as proxy, AsyncPolyKVClient(proxy.url) as client:
        health = await client.health()
    assert (health.status, health.engine["reachable"]) == ("upstream_unavailable", False)


async def test_a_compaction_takes_the_place_of_what_was_there(asked: Asked) -> None:
    root = await asked("create_pool", tokens=A, name="system")
    old = await asked("fork_pool", "system", tokens=AB, name="working")
    below = await asked("fork_pool", "working", tokens=[*AB, 67])
    for session_id in ("s", "t"):
        await asked("complete", [*AB, 67, 68], n_predict=1, session_id=session_id, pool_id=below.pool_id)
    done = await asked(
        "compact_by_refork", ancestor="system", old_pool="working", compacted_tokens=[*A, 90, 91], sessions=["s"]
    )
    assert (done.parent, done.branch_pos, done.prefix_len, done.name) == (root.pool_id, 20, 22, "working")
    assert [(moved.session_id, moved.from_pool_id) for moved in done.moved] == [("s", below.pool_id)]
    assert done.released == [below.pool_id, old.pool_id]
    assert (await asked("session", "s")).pool_id == done.pool_id
    moved = await asked("complete", [*A, 90, 91, 92], n_predict=1, session_id="s")
    assert (moved.polykv.pool_id, moved.polykv.prefix_n_tokens) == (done.pool_id, 22)


async def test_a_compaction_may_leave_what_was_there(asked: Asked) -> None:
    await asked("create_pool", tokens=A, name="system")
    old = await asked("fork_pool", "system", tokens=AB)
    kept = await asked(
        "compact_by_refork", ancestor="system", old_pool=old.pool_id, compacted_tokens=[*A, 9], release_old=False
    )
    assert kept.released == []
    alone = await asked("compact_by_refork", ancestor="system", compacted_tokens=[*A, 8], name="alone")
    assert (alone.name, alone.branch_pos, alone.moved) == ("alone", 20, [])
    assert {p.pool_id for p in (await asked("pools")).pools} >= {old.pool_id, kept.pool_id, alone.pool_id}


async def test_a_compaction_never_releases_its_own_ancestor(asked: Asked) -> None:
    await asked("create_pool", tokens=A, name="system")
    child = await asked("fork_pool", "system", tokens=AB)
    with pytest.raises(InvalidRequestError):
        await asked("compact_by_refork", ancestor=child.pool_id, old_pool="system", compacted_tokens=[*AB, 1])
    assert len((await asked("pools")).pools) == 2


def test_both_clients_have_every_call_with_its_signature() -> None:
    made = {
        name: function
        for module in (calls, generating)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }
    kinds = (Call.__name__, StreamCall.__name__, "Generator")
    assert all(any(kind in str(inspect.signature(f).return_annotation) for kind in kinds) for f in made.values())
    for client in (PolyKVClient, AsyncPolyKVClient):
        for name, function in made.items():
            method = getattr(client, name)
            own = list(inspect.signature(method).parameters.values())[1:]
            assert own == list(inspect.signature(function).parameters.values()), name
            assert method.__doc__ == function.__doc__


SHOWN = {
    results.PoolCreated: shapes.PoolMade,
    results.PoolPinned: shapes.PoolPinned,
    results.PoolEvicted: shapes.PoolEvicted,
    results.Flushed: shapes.Flushed,
    results.Released: shapes.Released,
    results.Compacted: Compacted,
    results.PoolInfo: shapes.PoolShown,
    results.PoolSession: shapes.PoolSession,
    results.PoolTree: shapes.PoolTreeShown,
    results.SessionInfo: shapes_sessions.SessionShown,
    results.SessionDropped: shapes_sessions.SessionDropped,
    results.SessionRate: shapes_sessions.SessionRate,
    results.TpsSample: shapes_sessions.Rates,
    results.Match: shapes.Matched,
    results.RequestInfo: shapes_sessions.RequestShown,
    results.Health: shapes.Health,
    results.AdmissionInfo: shapes_admission.AdmissionChanged,
    results.Capacity: shapes_admission.CapacityShown,
}


@pytest.mark.parametrize("ours", SHOWN, ids=lambda kind: kind.__name__)
def test_results_have_all_fields_that_the_proxy_answers(ours: type[BaseModel]) -> None:
    assert set(SHOWN[ours].model_fields) - set(ours.model_fields) == set()


def test_what_is_unknown_or_new_is_no_error() -> None:
    bare = results.SessionInfo.model_validate({"session_id": "s", "invented_since": {"deep": 1}})
    assert bare.tps_ewma is None
    assert bare.model_extra == {"invented_since": {"deep": 1}}
    assert results.PoolTree.model_validate({"pools": []}).kv_cells_used is None
    assert results.Released.model_validate({"freed_now": None, "released": None}) == results.Released()
