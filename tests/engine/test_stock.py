"""The proxy in front of a stock llama-server: what it is worth there, and that it never gets in the way."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.stock_sessions import N_PREFIX, measure, report
from polykv_proxy.cli import app

from .binaries import binary_path
from .harness import EngineServer
from .noise import Noise
from .restarts import ProxyProcess, kill_engine
from .tiny_models import tiny_model_path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SLOTS = ("-c", "8192", "--parallel", "4", "--metrics")


class Stock:
    """A stock llama-server and a proxy beside it."""

    def __init__(self, engine: EngineServer, proxy: ProxyProcess, http: httpx.Client):
        self.engine, self.proxy, self.http = engine, proxy, http

    def ask(self, prompt: list[int], session: str, n: int = 8, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": n, "return_tokens": True, "ignore_eos": True, **fields}
        answer = self.http.post("/completion", json=body, headers={"x-session-affinity": session})
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    def slots_of_sessions(self) -> dict[str, int | None]:
        listed = self.http.get("/polykv/sessions").json()["sessions"]
        return {session["session_id"]: session["slot_id"] for session in listed}


StockMaker = Callable[..., Stock]


@contextmanager
def making_stock(chat_model: Path, dir_: Path) -> Iterator[StockMaker]:
    with ExitStack() as stack:

        def make(*flags: str, router: bool = False) -> Stock:
            engine = EngineServer(binary_path("stock"), tiny_model_path("dense", chat_model), *flags, log_dir=dir_)
            if router:
                at = engine.command.index("-m")
                del engine.command[at : at + 2]
            stack.enter_context(engine)
            proxy = ProxyProcess(engine.url, dir_ / "pools.db", dir_ / "proxy.log")
            stack.callback(proxy.kill)
            proxy.start()
            http = httpx.Client(base_url=proxy.url, timeout=60, limits=httpx.Limits(keepalive_expiry=1))
            return Stock(engine, proxy, stack.enter_context(http))

        yield make


@pytest.fixture
def make_stock(chat_model: Path, tmp_path: Path) -> Iterator[StockMaker]:
    with making_stock(chat_model, tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def stock(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    """One for several tests: each has sessions of its own."""
    with making_stock(chat_model, tmp_path_factory.mktemp("stock")) as make:
        yield make(*SLOTS)


def until(condition: Callable[[], object], within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def test_more_sessions_than_slots_find_more_of_what_they_said() -> None:
    found = measure("kept", 6)
    print(report([found]))
    assert found.ratio > 1.05
    assert found.of_prefilled < 0.9
    assert (found.alone.slots, found.proxy.slots) == (1, 4)


def test_where_slots_are_emptied_it_costs_one_prefix_to_find_out() -> None:
    found = measure("emptied", 2)
    print(report([found]))
    assert found.proxy.cached >= found.alone.cached - N_PREFIX


def test_sessions_keep_slots_and_the_control_plane_says_what_is_missing(stock: Stock, noise: Noise) -> None:
    said = {name: noise(number, 200) for number, name in enumerate("abcd")}
    for _ in range(2):
        for name, prompt in said.items():
            answer = stock.ask(prompt, name)
            prompt.extend([*answer["tokens"], *noise(len(prompt), 9)])
    timings = [stock.ask(prompt, name)["timings"] for name, prompt in said.items()]
    assert [t["prompt_n"] for t in timings] == [10] * 4, "the last token of an answer, and what is new"
    assert {stock.slots_of_sessions()[name] for name in said} == {0, 1, 2, 3}

    answer = stock.ask(said["a"], "a", pool_id="base")["polykv"]
    assert (answer["pool_id"], answer["session_id"]) == (None, "a")
    assert answer["cached_n_tokens"] > 200
    assert answer["ctx_total"] == 2048
    refused = stock.http.post("/polykv/pools", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (501, "engine_unpatched")
    for command in (["pools", "tree"], ["match", "--prompt", "x"]):
        result = CliRunner().invoke(app, [*command, "--url", stock.proxy.url])
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
        assert "polykvctl engine build" in result.stderr
    listed = CliRunner().invoke(app, ["sessions", "--url", stock.proxy.url])
    assert (listed.exit_code, "without PolyKV hooks" in listed.stderr) == (0, True)
    health = stock.http.get("/polykv/health")
    assert (health.status_code, health.json()["engine"]["hooks"], health.json()["status"]) == (200, False, "ok")
    metrics = stock.http.get("/metrics").text
    assert "llamacpp:tokens_predicted_total" in metrics
    assert 'opencoti_polykv:sessions{state="idle"}' in metrics


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_agents_are_pinned_where_the_dialect_can_name_a_slot(stock: Stock, noise: Noise, path: str) -> None:
    """Its converter of Messages drops the slot, so none is named there."""
    said: dict[str, list[dict[str, Any]]] = {f"{path} {name}": [] for name in "ab"}
    receipts: list[dict[str, Any]] = []
    for n_turn in range(2):
        for number, (name, messages) in enumerate(said.items()):
            messages.append({"role": "user", "content": noise.text(10 * n_turn + number, 60)})
            body: dict[str, Any] = {"max_tokens": 1, "model": "any"}
            if "responses" in path:
                body = {"max_output_tokens": 1, "instructions": noise.text(99, 60), "input": messages}
            elif "chat" in path:
                body["messages"] = [{"role": "system", "content": noise.text(99, 60)}, *messages]
            else:
                body |= {"system": noise.text(99, 60), "messages": messages}
            answer = stock.http.post(path, json=body, headers={"x-session-affinity": name})
            assert answer.status_code == 200, answer.text
            receipts += stock.http.get("/polykv/requests?last=1").json()["requests"]
    slots = [receipt["slot_id"] for receipt in receipts]
    if path == "/v1/messages":
        assert slots == [None] * 4
        return
    assert slots[0] != slots[1]
    assert slots[2:] == slots[:2]
    for first, second in zip(receipts[:2], receipts[2:], strict=True):
        # All of the first prompt but the opening of the answer, which the next one does not repeat.
        assert second["cached_n_tokens"] > first["cached_n_tokens"] + first["prompt_n"] - 12


def test_a_request_never_waits_behind_somebody_who_uses_the_engine_directly(stock: Stock, noise: Noise) -> None:
    prompt = noise(1, 100)
    stock.ask(prompt, "agent")
    slot_id = stock.slots_of_sessions()["agent"]
    begun, stop = threading.Event(), threading.Event()

    def hold_the_slot() -> None:
        body = {"prompt": noise(2, 20), "n_predict": 1900, "ignore_eos": True, "stream": True, "id_slot": slot_id}
        with httpx.stream("POST", stock.engine.url + "/completion", json=body, timeout=60) as stream:
            for _ in stream.iter_lines():
                begun.set()
                if stop.is_set():
                    return

    other = threading.Thread(target=hold_the_slot)
    other.start()
    try:
        assert begun.wait(20)
        answer = stock.ask(prompt, "agent", n=2)
        assert other.is_alive(), "the other one was at work all the time"
        assert answer["id_slot"] != slot_id
    finally:
        stop.set()
        other.join()


def test_another_start_of_the_engine(stock: Stock, noise: Noise) -> None:
    for number, name in enumerate(("first", "second")):
        stock.ask(noise(number, 100), name)
    kill_engine(stock.engine)
    stock.engine.start()
    until(lambda: set(stock.slots_of_sessions().values()) == {None})
    for number, name in enumerate(("second", "first")):
        stock.ask(noise(number, 100), name)
    there = stock.slots_of_sessions()
    assert (there["second"], there["first"]) == (0, 1)


def test_where_slots_are_emptied_another_start_of_the_proxy_costs_nothing(make_stock: StockMaker, noise: Noise) -> None:
    stock = make_stock("-c", "8192")
    said = {name: noise(number, 200) for number, name in enumerate("ab")}
    for name, prompt in said.items():
        prompt.extend(stock.ask(prompt, name)["tokens"])
    stock.proxy.kill()
    stock.proxy.start()
    timings = [stock.ask([*prompt, *noise(9, 5)], name)["timings"] for name, prompt in said.items()]
    assert [t["prompt_n"] for t in timings] == [6] * 2, "the last token of an answer, and what is new"


def test_one_that_hides_its_slots_chooses_them(make_stock: StockMaker, noise: Noise) -> None:
    stock = make_stock(*SLOTS, "--no-slots")
    stock.ask(noise(1, 50), "a", session_id="a")
    assert stock.slots_of_sessions() == {"a": None}
    findings = stock.http.get("/polykv/doctor").json()["findings"]
    assert "sessions_not_pinned" in [finding["id"] for finding in findings]


def test_it_may_sleep(make_stock: StockMaker, noise: Noise) -> None:
    stock = make_stock(*SLOTS, "--sleep-idle-seconds", "1")

    def sleeps() -> bool:
        return bool(stock.engine.http.get("/props").json()["is_sleeping"])

    stock.ask(noise(1, 50), "a")
    until(sleeps)
    time.sleep(1.5)  # a heartbeat or two, and somebody who looks
    stock.http.get("/polykv/sessions")
    stock.http.get("/metrics")
    assert sleeps()
    stock.ask(noise(1, 50), "a")
    assert not sleeps()


def test_router_mode_is_relayed(make_stock: StockMaker) -> None:
    stock = make_stock(router=True)
    assert stock.http.get("/models").json() == stock.engine.http.get("/models").json()
    asked = {"messages": [{"role": "user", "content": "x"}], "model": "none"}
    direct, through = (http.post("/v1/chat/completions", json=asked) for http in (stock.engine.http, stock.http))
    assert (through.status_code, through.content) == (direct.status_code, direct.content)
    assert stock.http.get("/polykv/pools").status_code == 501
    assert stock.http.get("/polykv/health").status_code == 200
