"""§2: the table of settings, and those of them that a client can see."""

import pytest
from pydantic import SecretStr

from polykv_proxy.config import Settings, load_settings
from tests.contract.conftest import ask, made, refused
from tests.fake_engine import FakeEngine, reply
from tests.relay.conftest import Proxy, ProxyMaker

TABLE = {
    "POLYKV_HOST": ("127.0.0.1", "0.0.0.0", "0.0.0.0"),
    "POLYKV_PORT": (8090, "9", 9),
    "POLYKV_UPSTREAM_URL": ("http://127.0.0.1:8080", "http://x:1", "http://x:1"),
    "POLYKV_UPSTREAM_API_KEY": (None, "k", SecretStr("k")),
    "POLYKV_API_KEY": ((), "a,b", (SecretStr("a"), SecretStr("b"))),
    "POLYKV_ADMIN_KEY": (None, "k", SecretStr("k")),
    "POLYKV_MODE": ("auto", "explicit", "explicit"),
    "POLYKV_STATE": (None, ":memory:", ":memory:"),
    "POLYKV_GRACE_TTL_S": (300, "1", 1),
    "POLYKV_WARM_AFTER_S": (20, "0", 0),
    "POLYKV_WARM_RAM_BYTES": (2 * 1024**3, "5", 5),
    "POLYKV_WARM_DISK_BYTES": (0, "5", 5),
    "POLYKV_SESSION_GAP_S": (60, "1", 1),
    "POLYKV_SESSION_IDLE_S": (900, "1", 1),
    "POLYKV_AUTO_POOL_MIN_TOKENS": (256, "0", 0),
    "POLYKV_TPS_WINDOW_TOKENS": (128, "1", 1),
    "POLYKV_TPS_WINDOW_MS": (2000, "1", 1),
    "POLYKV_PIN_MAX_FRACTION": (0.5, "1", 1),
    "POLYKV_DEFAULT_TARGET_TPS": (None, "7.5", 7.5),
    "POLYKV_DEFAULT_MODE": (None, "enforced", "enforced"),
    "POLYKV_METRICS_ALIASES": (None, "vllm", "vllm"),
    "POLYKV_REWRITE_TOOL_CHOICE": (True, "off", False),
    "POLYKV_NORMALISE": ((), "billing, date,billing", ("billing", "date")),
    "POLYKV_MAX_BODY_BYTES": (33554432, "2048", 2048),
    "POLYKV_CLIENT_HEAD_S": (10, "2.5", 2.5),
    "POLYKV_CLIENT_BODY_IDLE_S": (30, "2.5", 2.5),
    "POLYKV_CLIENT_STALL_S": (60, "2.5", 2.5),
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TABLE:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", TABLE)
def test_default_and_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default, text, value = TABLE[name]
    field = name.removeprefix("POLYKV_").lower()
    assert getattr(load_settings(), field) == default
    monkeypatch.setenv(name, text)
    assert getattr(load_settings(), field) == value


def test_the_table_is_complete() -> None:
    assert {f"POLYKV_{field.upper()}" for field in Settings.model_fields} == TABLE.keys()


def test_state_is_named_after_the_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    path = load_settings(upstream_url="http://10.0.0.1:8081").state_path
    assert path.startswith("/home/x/.local/state/polykv/")
    assert path.endswith(".db")
    assert "10.0.0.1" in path
    assert path != load_settings(upstream_url="http://10.0.0.1:8082").state_path


async def test_a_clients_key_is_replaced_by_the_upstream_key(make_proxy: ProxyMaker) -> None:
    async with (
        FakeEngine(api_key="engine-key") as engine,
        make_proxy(engine.url, upstream_api_key="engine-key", api_key="data-key") as proxy,
    ):
        proxy.client.headers["Authorization"] = "Bearer data-key"
        await made(proxy, prompt="You are one of many.")  # without an admin key, data keys manage pools
        await ask(proxy, "You are one of many. Go.", pool_id=1)
        assert (await proxy.client.get("/v1/models")).status_code == 200
        for received in engine.received:
            assert received.headers["authorization"] == "Bearer engine-key"
            assert not any(b"data-key" in value for _, value in received.raw_headers)


@pytest.mark.parametrize(("header", "scheme"), [("Authorization", "Bearer "), ("Authorization", ""), ("X-Api-Key", "")])
async def test_keys_of_both_planes(engine: FakeEngine, make_proxy: ProxyMaker, header: str, scheme: str) -> None:
    async with make_proxy(engine.url, api_key="one,two", admin_key="boss") as proxy:

        async def status(path: str, key: str) -> int:
            return (await proxy.client.get(path, headers={header: scheme + key})).status_code

        for key in ("one", "two", "boss"):
            assert await status("/v1/models", key) == 200
        for key in ("three", "Basic one"):
            assert await status("/v1/models", key) == 401
        for path in ("/polykv/pools", "/polykv/sessions", "/slots"):
            assert await status(path, "boss") == 200
            assert await status(path, "one") == 403
            assert await status(path, "three") == 401
        assert await refused(proxy, "POST", "/polykv/pools", {"prompt": "x"}) == (401, "invalid_api_key")


PAGE = ("/", "/index.html", "/sw.js", "/manifest.webmanifest", "/favicon-dark.svg", "/_app/immutable/chunks/a-1.b_2.js")
NOT_PAGE = (
    *("/v1/models", "/props", "/_app", "/_app/", "/_app/..%2fprops", "/_app/%2e%2e/props", "/favicon/x.svg", "/x.js"),
    *("/index.html/x", "/sw.js%0a", "/_app/%C3%A9.js"),
)


async def test_the_web_page_comes_without_a_key(make_proxy: ProxyMaker) -> None:
    """As at llama-server: it is the page that asks for the key. Nothing else is fetched by its names."""
    async with (
        FakeEngine(api_key="engine-key") as engine,
        make_proxy(engine.url, upstream_api_key="engine-key", api_key="data-key") as proxy,
    ):
        for path in PAGE:
            engine.on(path, "request", reply(200, b"page"))
            answer = await proxy.client.get(path)
            assert (answer.status_code, answer.content) == (200, b"page"), path
            assert (await proxy.client.post(path)).status_code == 401, path
        n_before = len(engine.received)
        for path in NOT_PAGE:
            assert (await proxy.client.get(path)).status_code == 401, path
        assert [received.path for received in engine.received[n_before:] if "polykv" not in received.path] == []


async def test_too_large_a_body_is_a_413_on_both_planes(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, max_body_bytes=2048) as proxy:
        big = {"prompt": "x" * 3000}
        for path in ("/polykv/pools", "/polykv/match", "/completion", "/v1/completions"):
            assert await refused(proxy, "POST", path, big) == (413, "body_too_large")
        # What is not parsed has no limit here.
        answer = await proxy.client.post("/tokenize", json={"content": "x" * 3000})
        assert len(answer.json()["tokens"]) == 3000


TOOLS = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}


@pytest.mark.parametrize(("on", "seen"), [(True, "required"), (False, TOOLS["tool_choice"])])
async def test_rewriting_of_a_named_tool_choice_can_be_switched_off(
    engine: FakeEngine, make_proxy: ProxyMaker, on: bool, seen: object
) -> None:
    async with make_proxy(engine.url, rewrite_tool_choice=on) as proxy:
        await proxy.client.post("/v1/chat/completions", json={**TOOLS, "session_id": "s"})
    assert engine.requests("/v1/chat/completions")[-1].json()["tool_choice"] == seen


async def test_a_session_is_closed_after_its_idle_time_and_known_when_it_comes_back(
    engine: FakeEngine, make_proxy: ProxyMaker
) -> None:
    async with make_proxy(engine.url, session_idle_s=0.001) as proxy:
        await ask(proxy, "hello", session_id="s")
        proxy.control.sessions.sweep(proxy.control.clock() + 1)
        assert (await proxy.client.get("/polykv/sessions")).json() == {"sessions": []}
        assert (await proxy.client.get("/polykv/sessions/s")).json()["state"] == "closed"
        await ask(proxy, "hello", session_id="s")
        (session,) = (await proxy.client.get("/polykv/sessions")).json()["sessions"]
        assert (session["session_id"], session["n_turns"]) == ("s", 2)


async def test_health_of_a_proxy_without_keys_answers_this_machine(proxy: Proxy) -> None:
    assert (await proxy.client.get("/polykv/health")).status_code == 200
    answer = await proxy.client.get("/polykv/health", headers={"X-Forwarded-For": "10.0.0.1"})
    assert answer.status_code == 403
