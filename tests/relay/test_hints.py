"""Marks of where a cache should end: the beginning up to one is a pool after the first request that carries it."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from polykv_proxy.control.hints import MAX_UNUSED
from polykv_proxy.relay.dialects import read_call
from polykv_proxy.relay.hints import MAX_MARKS, beginnings_in
from tests.fake_engine import FakeEngine
from tests.fake_engine.faults import reply
from tests.relay.conftest import Proxy, ProxyMaker

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
RENDER = "/polykv/engine/render"
RULES = "Read before you write, and say plainly what you do not know. " * 5
FILE = "x = 1\ny = 2\n" * 30
MARK = {"cache_control": {"type": "ephemeral"}}
BREAK = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def text(said: str, mark: dict[str, Any] | None = None, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said, **(mark or {})}


def marked(path: str, ask: str, rules: str = RULES) -> dict[str, Any]:
    """A system prompt that ends in a mark, and a question."""
    user = {"role": "user", "content": ask}
    if path == MESSAGES:
        return {"system": [text(rules, MARK)], "messages": [user], "max_tokens": 2}
    if path == RESPONSES:
        system = {"role": "system", "content": [text(rules, BREAK, "input_text")]}
        return {"input": [system, user], "max_output_tokens": 2}
    return {"messages": [{"role": "system", "content": [text(rules, BREAK)]}, user], "max_tokens": 2}


async def post(proxy: Proxy, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = await proxy.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


async def settled(proxy: Proxy) -> list[Any]:
    """The pools, when nobody is at work on marks any more."""
    for _ in range(500):
        if not proxy.control.hints._tasks:
            return sorted(proxy.control.tree, key=lambda pool: pool.pool_id)
        await asyncio.sleep(0.01)
    raise AssertionError("marks are looked at without end")


def common(engine: FakeEngine, path: str, *bodies: dict[str, Any]) -> int:
    a, b = (engine.template.render(path, body)[0][0] for body in bodies)
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_request_makes_the_pool_and_the_second_attaches(
    engine: FakeEngine, proxy: Proxy, path: str, stream: bool
) -> None:
    await post(proxy, path, {**marked(path, "Apples?"), "stream": stream})
    (pool,) = await settled(proxy)
    assert pool.auto
    # Where another question would part, or an answer: at the role.
    others = [{"role": role, "content": "x"} for role in ("user", "assistant")]
    field = "input" if path == RESPONSES else "messages"
    bodies = [{**marked(path, ""), field: [*marked(path, "")[field][:-1], other]} for other in others]
    assert pool.prefix_len == common(engine, path, *bodies)
    assert RULES in engine.template.tokenizer.decode(list(proxy.control.tree.tokens(pool.pool_id)))
    await post(proxy, path, marked(path, "Zebras!"))
    (receipt,) = (await proxy.client.get("/polykv/requests", params={"last": 1})).json()["requests"]
    assert (receipt["pool_id"], receipt["miss_reason"]) == (pool.pool_id, None)
    assert receipt["cached_n_tokens"] >= pool.prefix_len
    assert len(await settled(proxy)) == 1


async def test_marks_go_on_to_the_engine_as_they_are(engine: FakeEngine, proxy: Proxy) -> None:
    body = marked(MESSAGES, "Apples?")
    await post(proxy, MESSAGES, body)
    await settled(proxy)
    (seen,) = engine.requests(MESSAGES)
    assert {key: value for key, value in seen.json().items() if key != "id_slot"} == body


async def test_a_marked_file_in_a_question_is_a_pool_of_its_own_below_the_system_prompt(
    engine: FakeEngine, proxy: Proxy
) -> None:
    def asked(question: str) -> dict[str, Any]:
        user = {"role": "user", "content": [text(FILE, MARK), text(question)]}
        return {"system": [text(RULES, MARK)], "messages": [user], "max_tokens": 2}

    await post(proxy, MESSAGES, asked("What is x?"))
    rules, file = await settled(proxy)
    assert (file.parent, rules.parent) == (rules.pool_id, -1)
    decoded = engine.template.tokenizer.decode(list(proxy.control.tree.tokens(file.pool_id)))
    assert decoded.endswith(FILE)
    await post(proxy, MESSAGES, asked("And y?"))
    (receipt,) = (await proxy.client.get("/polykv/requests", params={"last": 1})).json()["requests"]
    assert receipt["pool_id"] == file.pool_id


async def test_too_short_a_beginning_is_none_and_is_looked_at_once(engine: FakeEngine, proxy: Proxy) -> None:
    for ask in ("Apples?" * 30, "Zebras!" * 30):
        await post(proxy, MESSAGES, marked(MESSAGES, ask, rules="Be brief."))
        assert await settled(proxy) == []
    n_rendered = len(engine.requests(RENDER))
    assert n_rendered > 3
    await post(proxy, MESSAGES, marked(MESSAGES, "Cherries." * 30, rules="Be brief."))
    assert await settled(proxy) == []
    assert len(engine.requests(RENDER)) <= n_rendered + 1


async def test_a_request_that_names_its_pool_costs_no_rendering(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.pool([*b"shared"])
    await post(proxy, MESSAGES, {**marked(MESSAGES, "Apples?"), "pool_id": 1})
    assert [pool.pool_id for pool in await settled(proxy)] == [1]
    assert len(engine.requests(RENDER)) == 1  # to compare it with the pool


async def test_what_cannot_be_shared_is_tried_three_times(engine: FakeEngine, proxy: Proxy) -> None:
    engine.on("snapshot", "request", reply(503, {"error": {"code": 503, "message": "full"}}), times=None)
    n_rendered = []
    for n in range(5):
        await post(proxy, MESSAGES, {**marked(MESSAGES, f"q{n}"), "session_id": "s"})
        await settled(proxy)
        n_rendered.append(len(engine.requests(RENDER)))
    assert n_rendered[0] == 4  # the prompt, and three that go on in other ways
    assert n_rendered[2] - n_rendered[1] > 2
    assert n_rendered[4] - n_rendered[3] <= 1
    assert len(proxy.control.tree) == 0


async def test_without_automatic_pools_marks_mean_nothing(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, auto_pool_min_tokens=0) as proxy:
        await post(proxy, MESSAGES, marked(MESSAGES, "Apples?"))
        assert await settled(proxy) == []
    async with make_proxy(engine.url, mode="explicit") as proxy:
        await post(proxy, MESSAGES, {**marked(MESSAGES, "Apples?"), "session_id": "s"})
        assert await settled(proxy) == []


async def test_marks_that_move_on_with_a_conversation_make_no_pools(proxy: Proxy) -> None:
    said: list[dict[str, Any]] = []
    for n in range(3):
        said.append({"role": "user", "content": [text(f"{n}: {FILE}", MARK)]})
        body = {"system": [text(RULES, MARK)], "messages": said, "max_tokens": 2, "session_id": "s"}
        await post(proxy, MESSAGES, body)
        said = [*said, {"role": "assistant", "content": "yes"}]
    assert [pool.parent for pool in await settled(proxy)] == [-1]


async def test_a_line_that_changes_makes_no_pool_with_every_turn(proxy: Proxy) -> None:
    for n in range(4):
        await post(proxy, MESSAGES, {**marked(MESSAGES, f"q{n}", rules=f"It is {n}:00.\n{RULES}"), "session_id": "s"})
        await settled(proxy)
    assert len(proxy.control.tree) == 1


async def test_pools_that_nobody_came_to_use_are_few(proxy: Proxy) -> None:
    for n in range(MAX_UNUSED + 3):
        await post(proxy, MESSAGES, {**marked(MESSAGES, "q", rules=f"{n:05} {RULES}"), "session_id": f"s{n}"})
        await settled(proxy)
        proxy.control.drop_session(f"s{n}")  # type: ignore[arg-type]
    assert len(proxy.control.tree) <= MAX_UNUSED


async def test_a_pool_that_was_released_is_made_again(proxy: Proxy) -> None:
    await post(proxy, MESSAGES, marked(MESSAGES, "Apples?"))
    (pool,) = await settled(proxy)
    await proxy.client.delete(f"/polykv/pools/{pool.pool_id}")
    await post(proxy, MESSAGES, marked(MESSAGES, "Zebras!"))
    (again,) = await settled(proxy)
    assert again.prefix_len >= pool.prefix_len  # the two questions have a little more in common
    assert again.pool_id != pool.pool_id


# What is marked ------------------------------------------------------------------------------------------------------


def ends(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    call = read_call(path, orjson.dumps(body), body, {}, rewrite_tool_choice=True)
    return [one.continued(()) for one in beginnings_in(call)]


def test_tools_system_and_messages_in_their_order() -> None:
    tools = [{"name": "a"}, {"name": "b", **MARK}, {"name": "c"}]
    system = [text("one", MARK), text("two")]
    said = [{"role": "user", "content": [text("p", MARK), text("q")]}, {"role": "assistant", "content": "yes"}]
    body = {"tools": tools, "system": system, "messages": said, "max_tokens": 3}
    assert ends(MESSAGES, body) == [
        {"max_tokens": 3, "tools": tools[:2], "messages": []},
        {"max_tokens": 3, "tools": tools, "system": system[:1], "messages": []},
        {
            "max_tokens": 3,
            "tools": tools,
            "system": system,
            "messages": [{"role": "user", "content": [text("p", MARK)]}],
        },
    ]


@pytest.mark.parametrize("mark", [MARK, BREAK])
def test_a_message_may_carry_it_itself(mark: dict[str, Any]) -> None:
    said = [{"role": "system", "content": "Rules.", **mark}, {"role": "user", "content": "q"}]
    assert ends(CHAT, {"messages": said}) == [{"messages": said[:1]}]
    function = {"type": "function", "function": {"name": "f", **mark}}
    assert ends(CHAT, {"messages": said[1:], "tools": [function]}) == [{"tools": [function], "messages": []}]


def test_the_end_of_the_prompt_is_no_beginning() -> None:
    assert ends(CHAT, {"messages": [{"role": "user", "content": [text("q", MARK)]}]}) == []
    assert ends(CHAT, {"messages": [{"role": "user", "content": "q", **MARK}]}) == []
    assert len(ends(CHAT, {"messages": [{"role": "user", "content": [text("q", MARK), text("r")]}]})) == 1


def test_of_many_marks_the_last_count_and_null_is_none() -> None:
    said = [{"role": "user", "content": str(n), **MARK} for n in range(9)]
    found = ends(CHAT, {"messages": said})
    assert [len(one["messages"]) for one in found] == [5, 6, 7, 8]
    assert len(found) == MAX_MARKS
    assert ends(CHAT, {"messages": [{"role": "user", "content": "q", "cache_control": None}, said[0]]}) == []


@pytest.mark.parametrize(
    "odd", [None, 3, "x", [3], {"cache_control": 1}, [[MARK]], [{"role": 3, "content": [MARK, 3]}]]
)
def test_whatever_stands_there(odd: Any) -> None:
    for path in (CHAT, MESSAGES, RESPONSES, "/completion"):
        for body in ({"messages": odd}, {"input": odd}, {"messages": [], "tools": odd, "system": odd, "x": MARK}):
            ends(path, {**body, "y": MARK})
