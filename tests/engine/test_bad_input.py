"""Bad input gets a JSON error with the right status; nothing is half filled or lost, no other stream notices."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import Launcher
from .hooks import Engine, Running
from .noise import Noise

pytestmark = pytest.mark.engine

POOLS = "/polykv/engine/pools"
N_VOCAB = 49152
N_SLOTS = 4
OUT_OF_RANGE = [-2, 0, N_SLOTS, N_SLOTS + 9, 2**31, 2**40, 2**63, 2**64, -(2**70)]
NO_INTEGER = ["5", 1.5, True, [5], {}]


@pytest.fixture(scope="module")
def shared_engine(launch_shared: Launcher) -> Engine:
    return launch_shared.pooled("dense", "--no-cache-idle-slots")


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Whatever a test sent: afterwards the server answers, no sequence is taken and no cell is lost."""
    yield shared_engine
    shared_engine.server.assert_alive()
    shared_engine.free_all()
    for slot in range(N_SLOTS):
        shared_engine.erase(slot)
    assert shared_engine.cells_used() == 0
    assert shared_engine.stats()["service"]["state"] == "idle"


def refuses(engine: Engine, body: Any, status: int = 400) -> dict[str, Any]:
    """The request is refused with this status in our error shape, and changes nothing."""
    before = [pool | {"n_attach": 0} for pool in engine.pools()]
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = engine.http.post(POOLS, **sent)
    error = checked_error(response, status, str(body)[:200])
    assert [pool | {"n_attach": 0} for pool in engine.pools()] == before
    return error


def checked_error(response: httpx.Response, status: int, what: str = "") -> dict[str, Any]:
    assert response.status_code == status, f"{what}: {response.status_code} {response.text[:300]}"
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == status
    assert error["type"] == "polykv_error"
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"materialize"', b"\xff\xfe\x00", b'{"op": "materialize"', b"[" * 50_000, b"{}"],
    ids=lambda body: repr(body[:12]),
)
def test_body_that_is_no_operation(engine: Engine, body: bytes) -> None:
    refuses(engine, body)


@pytest.mark.parametrize("op", [None, "", "explode", 7, ["materialize"], {}])
def test_unknown_operation(engine: Engine, op: Any) -> None:
    refuses(engine, {"op": op, "tokens": [1, 2, 3]})


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        [],
        "abc",
        5,
        {},
        [[1]],
        [1, "a"],
        [1.5],
        [None],
        [True],
        [-1],
        [N_VOCAB],
        [2**31],
        [2**63],
        [2**64],
        [1e300],
    ],
    ids=str,
)
def test_tokens_that_are_none(engine: Engine, tokens: Any) -> None:
    refuses(engine, {"op": "materialize", "tokens": tokens})


def test_one_bad_token_at_the_end_takes_no_sequence(engine: Engine, noise: Noise) -> None:
    refuses(engine, {"op": "materialize", "tokens": [*noise(1, 300), N_VOCAB]})
    assert engine.materialize(noise(1, 300))["n_tokens"] == 300


@pytest.mark.parametrize("field", ["seq", "parent_seq"])
@pytest.mark.parametrize("value", OUT_OF_RANGE + NO_INTEGER, ids=str)
def test_sequence_that_is_no_pool_sequence(engine: Engine, noise: Noise, field: str, value: Any) -> None:
    refuses(engine, {"op": "materialize", "tokens": noise(1, 20), field: value})


@pytest.mark.parametrize("value", [-1, 20, 21, 2**31, 2**63, *NO_INTEGER], ids=str)
def test_branch_position_outside_of_the_prefix(engine: Engine, noise: Noise, value: Any) -> None:
    root = engine.materialize(noise(1, 40))
    body = {"op": "materialize", "tokens": noise(1, 40)[:20], "parent_seq": root["seq"], "branch_pos": value}
    refuses(engine, body)


def test_branch_position_without_parent(engine: Engine, noise: Noise) -> None:
    refuses(engine, {"op": "materialize", "tokens": noise(1, 20), "branch_pos": 10})


@pytest.mark.parametrize("tag", [7, ["a"], "x" * 300], ids=["int", "list", "long"])
def test_bad_tag(engine: Engine, noise: Noise, tag: Any) -> None:
    refuses(engine, {"op": "materialize", "tokens": noise(1, 20), "tag": tag})


def test_prefix_as_long_as_the_context(engine: Engine, noise: Noise) -> None:
    n_ctx = engine.stats()["n_ctx_slot"]
    error = refuses(engine, {"op": "materialize", "tokens": noise(1, n_ctx)})
    assert (error["n_tokens"], error["n_ctx"]) == (n_ctx, n_ctx)


def test_sequence_in_use(engine: Engine, noise: Noise) -> None:
    root = engine.materialize(noise(1, 50), tag="first")
    refuses(engine, {"op": "materialize", "tokens": noise(2, 50), "seq": root["seq"]}, 409)
    engine.warm(noise(2, 50), slot=0)
    refuses(engine, {"op": "snapshot", "id_slot": 0, "seq": root["seq"]}, 409)
    assert engine.pool(root["seq"])["tag"] == "first"


def test_tokens_that_differ_from_the_parent_below_the_branch(engine: Engine, noise: Noise) -> None:
    trunk = noise(1, 100)
    root = engine.materialize(trunk)
    wrong = trunk[:60] + noise(2, 60)
    body = {"op": "materialize", "tokens": wrong, "parent_seq": root["seq"], "branch_pos": 80}
    assert refuses(engine, body, 409)["divergence_pos"] == 60


def test_parent_that_is_free(engine: Engine, noise: Noise) -> None:
    free = engine.pools()[3]["seq"]
    refuses(engine, {"op": "materialize", "tokens": noise(1, 20), "parent_seq": free, "branch_pos": 10}, 410)


def test_no_free_sequence(engine: Engine, noise: Noise) -> None:
    for seed in range(8):
        engine.materialize(noise(seed, 20))
    refuses(engine, {"op": "materialize", "tokens": noise(9, 20)}, 503)
    engine.warm(noise(9, 20), slot=0)
    refuses(engine, {"op": "snapshot", "id_slot": 0}, 503)


@pytest.mark.parametrize("id_slot", [None, -1, N_SLOTS, 2**40, *NO_INTEGER], ids=str)
def test_snapshot_of_no_slot(engine: Engine, id_slot: Any) -> None:
    refuses(engine, {"op": "snapshot", "id_slot": id_slot})


@pytest.mark.parametrize("n_tokens", [0, -2, 2**63, *NO_INTEGER], ids=str)
def test_snapshot_of_no_number(engine: Engine, noise: Noise, n_tokens: Any) -> None:
    engine.warm(noise(1, 50), slot=0)
    refuses(engine, {"op": "snapshot", "id_slot": 0, "n_tokens": n_tokens})


def test_snapshot_of_more_than_there_is(engine: Engine, noise: Noise) -> None:
    refuses(engine, {"op": "snapshot", "id_slot": 0}, 409)
    engine.warm(noise(1, 50), slot=0)
    assert refuses(engine, {"op": "snapshot", "id_slot": 0, "n_tokens": 51}, 409)["n_tokens"] == 50


@pytest.mark.parametrize("seq", ["abc", "-1", "5x", "1.5", "99999999999999999999", "%20"])
def test_freeing_what_is_no_number(engine: Engine, seq: str) -> None:
    checked_error(engine.http.delete(f"{POOLS}/{seq}"), 400)


def test_freeing_what_is_not_there(engine: Engine, noise: Noise) -> None:
    root = engine.materialize(noise(1, 20))
    engine.free(root["seq"])
    checked_error(engine.http.delete(f"{POOLS}/{root['seq']}"), 410)
    for outside in (0, N_SLOTS, N_SLOTS + 9, 99999):
        response = engine.http.delete(f"{POOLS}/{outside}")
        assert response.status_code in {400, 410}, response.text


ATTACH_FIELDS = [
    *(("shared_pool_slot", value) for value in ["5", 1.5, [5], {}, 0, N_SLOTS, N_SLOTS + 9, 2**31, 2**40, 2**63, -2]),
    *(("shared_prefix_n_tokens", value) for value in ["5", 1.5, [5], 2**63, -2]),
    *(("shared_pool_gen", value) for value in ["5", 1.5, [5], -2]),
    *(("shared_pool_epoch", value) for value in [5, [5], {}]),
]


@pytest.mark.parametrize(("field", "value"), ATTACH_FIELDS, ids=str)
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_attach_fields_that_mean_nothing(engine: Engine, noise: Noise, path: str, field: str, value: Any) -> None:
    """400 on every dialect, never an attach to something else and never a 500."""
    root = engine.materialize(noise(1, 20))
    fields = {"shared_pool_slot": root["seq"], "shared_prefix_n_tokens": -1} | {field: value}
    response = engine.http.post(path, json=dialect_body(path) | fields)
    assert response.status_code == 400, response.text[:300]
    assert "error" in response.json()


def test_limit_beyond_everything_is_no_limit(engine: Engine, noise: Noise) -> None:
    root = engine.materialize(noise(1, 100))
    assert engine.ask(noise(1, 120), 1, slot=0, pool=root["seq"], limit=2**40).pool_n == 100


def dialect_body(path: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {
        "/completion": {"prompt": "hello", "n_predict": 1},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/v1/responses": {"input": "hello", "max_output_tokens": 1},
    }[path]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        {},
        {"path": "/completion"},
        {"path": 5, "body": {}},
        {"path": "/nope", "body": {"prompt": "x"}},
        {"path": "/completion", "body": []},
        {"path": "/completion", "body": {}},
        {"path": "/completion", "body": {"prompt": {"a": 1}}},
        {"path": "/completion", "body": {"prompt": [N_VOCAB + 7]}},
        {"path": "/v1/chat/completions", "body": {}},
        {"path": "/v1/chat/completions", "body": {"messages": "x"}},
        {"path": "/v1/responses", "body": {"input": 5}},
    ],
    ids=str,
)
def test_render_of_what_its_route_would_refuse(engine: Engine, body: Any) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = engine.http.post("/polykv/engine/render", **sent)
    assert response.status_code == 400, response.text[:300]
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        {},
        {"id": "a"},
        {"id": "", "ttl_s": 5},
        {"id": 5, "ttl_s": 5},
        *({"id": "a", "ttl_s": ttl_s} for ttl_s in (-1, "5", 1e300, None)),
    ],
    ids=str,
)
def test_lease_that_makes_no_sense(engine: Engine, body: Any) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    checked_error(engine.http.put("/polykv/engine/owner", **sent), 400)


def test_only_the_owner_changes_pools(engine: Engine, noise: Noise) -> None:
    owner = {"x-polykv-owner": "first"}
    try:
        assert engine.http.put("/polykv/engine/owner", json={"id": "first", "ttl_s": 60}).status_code == 200
        root = engine.http.post(POOLS, json={"op": "materialize", "tokens": noise(1, 20)}, headers=owner).json()
        second = engine.http.put("/polykv/engine/owner", json={"id": "second", "ttl_s": 60})
        assert checked_error(second, 409)["owner"] == "first"
        refuses(engine, {"op": "materialize", "tokens": noise(2, 20)}, 409)
        checked_error(engine.http.delete(f"{POOLS}/{root['seq']}"), 409)
        assert engine.stats()["slots"], "reading needs no lease"
    finally:
        engine.http.put("/polykv/engine/owner", json={"id": "first", "ttl_s": 0}, headers=owner)


def test_running_streams_notice_nothing(engine: Engine, noise: Noise) -> None:
    """A long answer while requests of every kind are refused is the answer of a quiet server."""
    trunk = noise(1, 200)
    root = engine.materialize(trunk)
    quiet = engine.ask(trunk + noise(2, 10), 600, slot=0, pool=root["seq"])
    engine.erase(0)
    with Running(engine, trunk + noise(2, 10), 600, id_slot=0, shared_pool_slot=root["seq"]) as agent:
        while agent.is_running():
            for body in (b"{", {"op": "explode"}, {"op": "materialize", "tokens": [N_VOCAB]}):
                refuses(engine, body)
            refuses(engine, {"op": "materialize", "tokens": noise(3, 10), "seq": root["seq"]}, 409)
            refuses(engine, {"op": "materialize", "tokens": noise(3, 8192)})
            checked_error(engine.http.delete(f"{POOLS}/abc"), 400)
            engine.http.post("/completion", json={"prompt": "x", "shared_pool_slot": "no"})
        assert agent.finished()["content"] == quiet.body["content"]


def test_missing_cells_are_named_and_cost_nobody_anything(launch: Launcher, noise: Noise) -> None:
    engine = launch.pooled("dense", "-c", "1024", "--no-cache-idle-slots")
    prompt = noise(1, 500)
    quiet = engine.ask(prompt, 300, slot=0)
    engine.erase(0)
    with Running(engine, prompt, 300, id_slot=0) as agent:
        error = refuses(engine, {"op": "materialize", "tokens": noise(2, 700)}, 507)
        assert error["need"] == 700
        assert error["free"] < 700
        assert agent.is_running()
        assert agent.finished()["content"] == quiet.body["content"]


def test_idle_slots_give_way_to_a_pool(launch: Launcher, noise: Noise) -> None:
    engine = launch.pooled("dense", "-c", "1024", "--no-cache-idle-slots")
    engine.warm(noise(1, 500), slot=0)
    root = engine.materialize(noise(2, 700))
    assert root["n_tokens"] == 700
    assert engine.ask(noise(2, 700) + noise(3, 20), 4, pool=root["seq"]).pool_n == 700
