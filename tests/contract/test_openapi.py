"""The control plane keeps what its own page says: schemathesis plays clients, good ones and bad ones."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks

from polykv_proxy.app import CONTROL, make_app, serving
from polykv_proxy.config import load_settings
from polykv_proxy.control import Control, CreatePool, ForkPool, Source
from polykv_proxy.errors import NameTaken
from polykv_proxy.routes.openapi import OPERATIONS, PATH, control_routes, describe
from tests.fake_engine import FakeEngine
from tests.relay.conftest import Proxy

ROUTER = make_app(load_settings(state=":memory:", upstream_url="http://127.0.0.1:1")).router
PAGE = describe(ROUTER)
N_EXAMPLES = 10

load_all_checks()
LEFT_OUT = {
    "not_a_server_error",  # 501, 503 and 507 are answers; a 500 is looked for below
    "positive_data_acceptance",  # a token id that the model does not have is well-formed and a 400
    "ignored_auth",  # from this machine no key is needed
}
ALL_CHECKS = [CHECKS.get_one(name) for name in CHECKS.get_all_names() if name not in LEFT_OUT]


class Served:
    """The proxy in front of the fake engine on a loop of its own, with something in it."""

    def __init__(self) -> None:
        self.url = ""
        self._control: Control | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._serving = self._serve()
        self.url, self._control = self.do(self._serving.__aenter__())

    def stop(self) -> None:
        self.do(self._serving.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def furnish(self) -> None:
        """Two pools and a session, whatever was done to them; nothing else, so that sequences last."""
        self.do(self._furnish())

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[tuple[str, Control]]:
        async with (
            FakeEngine() as engine,
            serving(load_settings(upstream_url=engine.url, state=":memory:", port=0)) as (url, app),
        ):
            yield url, app[CONTROL]

    async def _furnish(self) -> None:
        control = self._control
        assert control is not None
        for pool in list(control.tree):
            if pool.name not in ("base", "child") and pool.pool_id in control.tree:
                await control.release_pool(pool.pool_id, recursive=True)
        with suppress(NameTaken):
            await control.create_pool(CreatePool(source=Source(tokens=list(range(40))), name="base"))
        with suppress(NameTaken):
            await control.fork_pool("base", ForkPool(source=Source(own_tokens=[7, 8, 9]), name="child"))
        if control.sessions.get("agent") is None:
            async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
                turn = {"prompt": list(range(60)), "n_predict": 2, "session_id": "agent"}
                (await client.post("/completion", json=turn)).raise_for_status()
                await client.post("/completion", content=b"{")
                for text in ("look at the parser", "look at the lexer, the lexer"):  # a receipt with all there is
                    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
                    chat = {"messages": messages, "max_tokens": 2, "session_id": "agent"}
                    (await client.post("/v1/chat/completions", json=chat)).raise_for_status()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    served.start()
    yield served
    served.stop()


def test_every_route_of_the_control_plane_has_an_entry_and_every_entry_a_route() -> None:
    assert set(control_routes(ROUTER)) == OPERATIONS.keys()
    described = {(verb.upper(), path) for path, verbs in PAGE["paths"].items() for verb in verbs}
    assert described == OPERATIONS.keys()


def test_the_page_is_openapi_3_1_and_refers_to_nothing_that_is_not_there() -> None:
    schemathesis.openapi.from_dict(PAGE).validate()
    assert PAGE["openapi"] == "3.1.0"
    referred = {part.split('"')[0] for part in str(PAGE).replace("'", '"').split("#/components/schemas/")[1:]}
    assert referred <= PAGE["components"]["schemas"].keys()
    ids = [operation["operationId"] for verbs in PAGE["paths"].values() for operation in verbs.values()]
    assert len(ids) == len(set(ids)) == len(OPERATIONS)


def test_every_error_says_its_shape_and_its_codes() -> None:
    for verbs in PAGE["paths"].values():
        for operation in verbs.values():
            answers = operation["responses"]
            assert {"400", "401", "403", "431", "500"} <= answers.keys()
            for status, answer in answers.items():
                schema = answer["content"]["application/json"]["schema"]
                if "allOf" in schema:
                    shape, narrowed = schema["allOf"]
                    assert shape == {"$ref": "#/components/schemas/Error"}
                    assert narrowed["properties"]["error"]["properties"]["code"]["enum"]
                else:
                    assert status in ("200", "201", "503")


def test_bodies_are_described_by_the_models_that_read_them() -> None:
    for (_verb, path), operation in OPERATIONS.items():
        if operation.body is not None:
            schema = PAGE["components"]["schemas"][operation.body.__name__]
            assert schema["properties"].keys() == operation.body.model_fields.keys(), path
            assert schema["additionalProperties"] is False
    sources = [branch["required"][0] for branch in PAGE["components"]["schemas"]["ForkBody"]["oneOf"]]
    assert sources == ["tokens", "own_tokens", "prompt", "messages", "from_session"]


async def test_the_page_is_served_behind_the_key(proxy: Proxy, make_proxy: Any) -> None:
    answer = await proxy.client.get(PATH)
    assert (answer.status_code, answer.json()) == (200, PAGE)
    async with FakeEngine() as engine, make_proxy(engine.url, admin_key="secret") as guarded:
        refused = await guarded.client.get(PATH)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        for header in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "secret"}):
            assert (await guarded.client.get(PATH, headers=header)).status_code == 200


schema = schemathesis.openapi.from_dict(PAGE)
schema.config.seed = 1

SOME = {
    "POST /polykv/pools": {"tokens": [1]},
    "POST /polykv/match": {"prompt": "x"},
    "POST /polykv/pools/{ref}/compact": {"ancestor": 1, "tokens": [1]},
    "POST /polykv/pools/{ref}/admission": {"target_tps_per_session": 5},
}


async def say_all(proxy: Proxy, **kw: Any) -> set[tuple[int, str]]:
    """Ask every route something plain. What comes back is what the page says; (status, code) of the errors."""
    refused = set()
    for verb, path in OPERATIONS:
        body = SOME.get(f"{verb} {path}", {"own_tokens": [1]} if path.endswith("/fork") else None)
        url = path.replace("{ref}", "1").replace("{sid}", "agent")
        answer = await proxy.client.request(verb, url, json=body, **kw)
        schema[path][verb].validate_response(answer)
        if answer.status_code >= 400 and path != "/polykv/health":
            refused.add((answer.status_code, answer.json()["error"]["code"]))
    return refused


async def test_what_is_said_without_a_fitting_engine_is_on_the_page_too(make_proxy: Any) -> None:
    async with FakeEngine(hooks=False) as engine, make_proxy(engine.url) as proxy:
        assert await say_all(proxy) == {(501, "engine_unpatched"), (404, "session_not_found")}
    async with FakeEngine(share="swa") as engine, make_proxy(engine.url) as proxy:
        assert (501, "sharing_unsupported") in await say_all(proxy)
    async with make_proxy("http://127.0.0.1:1") as proxy:
        assert (503, "upstream_unavailable") in await say_all(proxy)
    async with FakeEngine() as engine, make_proxy(engine.url) as proxy:
        await proxy.pool([1, 2])
        engine.loading = True
        assert (503, "loading") in await say_all(proxy)


async def test_what_is_said_without_a_key_is_on_the_page_too(make_proxy: Any) -> None:
    async with FakeEngine() as engine, make_proxy(engine.url, admin_key="a", api_key="d") as proxy:
        assert await say_all(proxy) == {(401, "invalid_api_key")}
        assert await say_all(proxy, headers={"Authorization": "Bearer d"}) == {(403, "forbidden")}


@schema.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Half of the pools and sessions asked for are there."""
    there = {"ref": ["base", "child", "1"], "sid": ["agent"]}
    for name, known in there.items():
        value = str((path_parameters or {}).get(name, ""))
        if len(value) % 2:
            path_parameters[name] = known[len(value) // 2 % len(known)]
    return path_parameters


@schema.parametrize()
@settings(max_examples=N_EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_answered_is_what_the_page_says(case: schemathesis.Case, served: Served) -> None:
    served.furnish()
    if str((case.query or {}).get("stream", "0")).lower() in ("", "1", "true"):
        case.query["stream"] = "0"  # a stream has no end to wait for
    response = case.call_and_validate(base_url=served.url, checks=ALL_CHECKS)
    assert response.status_code != 500, response.text
