"""``GET /metrics``: the engine's own page and ours behind it, with the right numbers, whatever the engine does."""

import asyncio
import itertools
import logging

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from polykv_proxy.control.readings import forecast_errors
from polykv_proxy.errors import UpstreamUnavailable
from polykv_proxy.gate.policy import Policy
from polykv_proxy.gate.settle import AdmitRecord, Forecasts
from polykv_proxy.gate.verdict import FLOOR, REFUSALS
from polykv_proxy.ids import SessionId
from polykv_proxy.relay.costs import BUCKETS_S, Histogram
from tests.fake_engine import FakeEngine
from tests.fake_engine.faults import Hold, reply
from tests.relay.conftest import Proxy, ProxyMaker
from tests.relay.raw import until

OURS = "opencoti_polykv:"
PREFIX = list(range(100, 140))


async def scrape(proxy: Proxy) -> dict[str, dict[tuple[str, ...], float]]:
    """Our samples by name and label values. The page must be one that a scraper takes."""
    answer = await proxy.client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(answer)


def samples(answer: httpx.Response) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return {name.removeprefix(OURS): values for name, values in found.items() if name.startswith(OURS)}


async def ask(proxy: Proxy, prompt: list[int], **fields: object) -> None:
    body = {"prompt": prompt, "n_predict": 4, **fields}
    (await proxy.client.post("/completion", json=body)).raise_for_status()


async def test_the_engines_page_comes_first_and_as_it_is(engine: FakeEngine, proxy: Proxy) -> None:
    own = (await proxy.client.get(f"{engine.url}/metrics")).text
    assert own.strip()
    page = (await proxy.client.get("/metrics")).text
    assert page.startswith(own.rstrip("\n") + "\n# HELP opencoti_polykv:")


async def test_what_a_pool_did(proxy: Proxy) -> None:
    desk = await proxy.pool(PREFIX, "desk")
    child = await proxy.fork(desk["pool_id"], [*PREFIX, 7, 8, 9])
    for session in ("a", "b"):
        await ask(proxy, [*PREFIX, 1, 2], pool_id="desk", session_id=session)
    shown = await scrape(proxy)
    label, other = ("desk",), (str(child["pool_id"]),)
    assert shown["queries_total"] == {label: 2, other: 0}
    assert shown["prefix_cache_hits_total"] == {label: 2, other: 0}
    assert shown["queries_tokens_total"][label] == 2 * (len(PREFIX) + 2)
    assert shown["prefix_cache_hits_tokens_total"][label] == 2 * len(PREFIX)
    assert shown["pool_sessions"] == {label: 2, other: 0}
    assert shown["gen_throughput_tps"] == {label: 0, other: 0}
    per_token = (await proxy.client.get("/polykv/pools")).json()["kv_bytes_per_token"]
    assert shown["pool_kv_bytes"] == {label: len(PREFIX) * per_token, other: 3 * per_token}
    assert shown["pools"] == {("resident",): 2, ("cold",): 0, ("warm",): 0, ("materializing",): 0}
    assert shown["sessions"] == {("idle",): 2}
    assert (shown["seq_ids_used"], shown["seq_ids_max"]) == ({(): 2}, {(): 16})


async def test_cells_are_those_that_the_engine_told_last(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.pool(PREFIX, "desk")
    await proxy.control.refresh()
    cells = (await proxy.client.get(f"{engine.url}/polykv/engine/stats")).json()["cells"]
    shown = await scrape(proxy)
    assert shown["kv_cells_used"] == {(): cells["used"]}
    assert shown["kv_cells_used"][()] >= len(PREFIX)
    assert shown["kv_cells_max"] == {(): cells["total"]}
    assert shown["kv_cells_high"] == {(): cells["hi"]}


async def test_a_pool_that_was_released_is_gone_and_a_cold_one_is_not_named(proxy: Proxy) -> None:
    await proxy.pool(PREFIX, "one")
    await proxy.pool(PREFIX[::-1], "two")
    assert set((await scrape(proxy))["queries_total"]) == {("one",), ("two",)}
    (await proxy.client.delete("/polykv/pools/one")).raise_for_status()
    (await proxy.client.post("/polykv/pools/two/evict?to=cold")).raise_for_status()
    shown = await scrape(proxy)
    assert "queries_total" not in shown
    assert shown["pools"][("cold",)] == 1


async def test_automatic_pools_are_one_series(proxy: Proxy) -> None:
    made = [await proxy.pool(tokens) for tokens in (PREFIX, PREFIX[::-1])]
    for pool in proxy.control.tree:
        pool.auto = True
    await ask(proxy, [*PREFIX, 1], pool_id=made[0]["pool_id"], session_id="a")
    shown = await scrape(proxy)
    assert shown["queries_total"] == {("auto",): 1}
    assert shown["pool_sessions"] == {("auto",): 1}


async def test_an_engine_without_metrics_or_gone_leaves_ours(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.pool(PREFIX, "desk")
    engine.on("/metrics", "request", reply(501))
    answer = await proxy.client.get("/metrics")
    assert answer.text.startswith("# HELP opencoti_polykv:")
    assert samples(answer)["engine_up"] == {(): 1}
    await engine.kill()
    with pytest.raises(UpstreamUnavailable):
        await proxy.control.refresh()
    shown = await scrape(proxy)
    assert shown["engine_up"] == {(): 0}
    assert not {"kv_cells_used", "pools", "gen_throughput_tps", "aggregate_tps", "mean_active_tps"} & shown.keys()


async def test_an_engine_that_does_not_answer_in_time_leaves_ours(
    engine: FakeEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "polykv.metrics")
    monkeypatch.setattr("polykv_proxy.relay.metrics.ENGINE_PATIENCE_S", 0.05)
    hold = Hold()
    engine.on("/metrics", "request", hold)
    shown = await scrape(proxy)
    assert hold.n == 1
    assert shown["engine_up"] == {(): 1}
    assert [record.message for record in caplog.records] == ["no metrics from the engine: no answer within 0.05 s"]


async def test_an_engine_that_sleeps_tells_what_it_counted_and_sleeps_on(engine: FakeEngine, proxy: Proxy) -> None:
    engine.sleep()
    await proxy.control.refresh()
    own = (await proxy.client.get(f"{engine.url}/metrics")).text
    answer = await proxy.client.get("/metrics")
    assert own.startswith("llamacpp:tokens_predicted_total")
    assert answer.text.startswith(own)
    assert samples(answer)["engine_up"] == {(): 1}
    assert engine.sleeping


async def test_the_page_of_an_engine_that_sleeps_is_that_of_an_idle_one(engine: FakeEngine, proxy: Proxy) -> None:
    awake = (await proxy.client.get("/metrics")).text
    assert {"engine_epoch_info", "kv_cells_used", "kv_cells_max", "kv_cells_high"} <= (await scrape(proxy)).keys()
    engine.sleep()
    await proxy.control.refresh()
    assert (await proxy.client.get("/metrics")).text == awake


async def test_an_engine_that_sleeps_has_given_its_cells_back(engine: FakeEngine, proxy: Proxy) -> None:
    await ask(proxy, PREFIX)
    await proxy.control.refresh()
    awake = await scrape(proxy)
    assert awake["kv_cells_used"][()] >= len(PREFIX)
    engine.sleep()
    await proxy.control.refresh()
    asleep = await scrape(proxy)
    assert (asleep["kv_cells_used"], asleep["kv_cells_high"]) == ({(): 0}, {(): 0})
    assert asleep["kv_cells_max"] == awake["kv_cells_max"]
    assert asleep["engine_epoch_info"] == awake["engine_epoch_info"]
    await ask(proxy, PREFIX)
    await proxy.control.refresh()
    woken = await scrape(proxy)
    assert woken["kv_cells_used"][()] >= len(PREFIX)
    assert woken["engine_epoch_info"] != awake["engine_epoch_info"]
    await engine.kill()
    with pytest.raises(UpstreamUnavailable):
        await proxy.control.refresh()
    assert not {"kv_cells_used", "kv_cells_max", "kv_cells_high"} & (await scrape(proxy)).keys()


async def test_the_engines_headers_go_with_its_page(engine: FakeEngine, proxy: Proxy) -> None:
    """Its start in Unix seconds, which it tells nowhere else."""
    direct = await proxy.client.get(f"{engine.url}/metrics")
    answer = await proxy.client.get("/metrics")
    assert direct.headers["Process-Start-Time-Unix"] == answer.headers["Process-Start-Time-Unix"] != ""
    assert int(answer.headers["Content-Length"]) == len(answer.content) > len(direct.content)
    assert answer.headers.get_list("content-type") == ["text/plain; version=0.0.4; charset=utf-8"]


@pytest.mark.parametrize("mode", ["auto", "explicit"])
async def test_keys_are_those_of_the_data_plane(engine: FakeEngine, make_proxy: ProxyMaker, mode: str) -> None:
    async with make_proxy(engine.url, mode=mode, api_key="data", admin_key="admin") as proxy:
        assert (await proxy.client.get("/metrics")).status_code == 401
        for key in ("data", "admin"):
            answer = await proxy.client.get("/metrics", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            assert samples(answer)["engine_up"] == {(): 1}


async def test_what_is_saved_outside_the_cache(make_proxy: ProxyMaker) -> None:
    async with FakeEngine(save_ram=1 << 20) as engine, make_proxy(engine.url) as proxy:
        empty = await scrape(proxy)
        assert empty["warm_bytes"] == {("ram",): 0, ("disk",): 0}
        assert empty["warm_max_bytes"] == {("ram",): 1 << 20, ("disk",): 0}
        assert empty["warm_hits_total"] == {("ram",): 0, ("disk",): 0}
        assert "warm_failures_total" not in empty
        await proxy.pool(PREFIX, "desk")
        evicted = (await proxy.client.post("/polykv/pools/desk/evict?to=warm")).raise_for_status().json()
        assert evicted["residency"] == "warm"
        shown = await scrape(proxy)
        assert shown["pools"][("warm",)] == 1
        assert shown["warm_bytes"][("ram",)] == engine.saved.usage()["ram"]["bytes"] > 0
        assert (shown["warm_saves_total"], shown["warm_misses_total"]) == ({(): 1}, {(): 0})
        await ask(proxy, [*PREFIX, 1], pool_id="desk", session_id="a")
        back = await scrape(proxy)
        assert back["warm_hits_total"] == {("ram",): 1, ("disk",): 0}
        assert back["pools"][("resident",)] == 1
        assert back["warm_load_seconds_total"][()] > 0


async def test_what_is_decoded_now(engine: FakeEngine, proxy: Proxy) -> None:
    await proxy.pool(PREFIX, "desk")
    engine.token_s = 0.01
    names = [("a", "desk"), ("b", "desk"), ("c", None)]
    tasks = [
        asyncio.create_task(ask(proxy, [*PREFIX, i] if pool else [i], n_predict=4000, session_id=name, pool_id=pool))
        for i, (name, pool) in enumerate(names)
    ]
    await until(lambda: sum(slot.n_decoded > 2 and slot.state == "generating" for slot in engine.slots) == 3)
    for name, rate in (("a", 30.0), ("b", 10.0), ("c", 5.0)):
        session = proxy.control.sessions.get(name)  # type: ignore[arg-type]
        assert session is not None
        engine.slots[session.slot_id].tps_ewma = rate
    await proxy.control.refresh()
    shown = await scrape(proxy)
    assert shown["gen_throughput_tps"] == {("desk",): 40.0}
    assert shown["mean_active_tps"] == {(): 15.0}
    assert shown["sessions"] == {("decoding",): 3}
    await until(proxy.control.rates.aggregate_tps)
    assert 0 < (await scrape(proxy))["aggregate_tps"][()] <= 300
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await proxy.control.refresh()
    assert (await scrape(proxy))["gen_throughput_tps"] == {("desk",): 0.0}


async def test_what_the_proxy_takes_of_a_request(engine: FakeEngine, proxy: Proxy) -> None:
    for stream in (False, True):
        for fields in ({}, {"session_id": "a"}):
            await ask(proxy, [1, 2, 3], stream=stream, **fields)
    shown = await scrape(proxy)
    for phase in ("before", "after"):
        assert shown["proxy_overhead_seconds_count"][phase,] == 4
        buckets = [n for labels, n in shown["proxy_overhead_seconds_bucket"].items() if phase in labels]
        assert (buckets, buckets[-1], len(buckets)) == (sorted(buckets), 4, len(BUCKETS_S) + 1)
        assert 0 < shown["proxy_overhead_seconds_sum"][phase,] < 4
    assert "holds_total" not in shown


async def test_a_request_that_waits_is_held_not_slow(engine: FakeEngine, proxy: Proxy) -> None:
    hold = Hold()
    engine.on("/completion", "prefill", hold, times=None)
    tasks = [asyncio.create_task(ask(proxy, [9 * i], session_id=f"s{i}")) for i in range(5)]
    await until(lambda: hold.n == 4 and proxy.relay.desk.n_waiting == 1)
    await asyncio.sleep(0.3)
    waiting = await scrape(proxy)
    assert waiting["sessions"] == {("prefilling",): 4, ("waiting",): 1}
    hold.release()
    await asyncio.gather(*tasks)
    shown = await scrape(proxy)
    assert shown["holds_total"] == {("slot",): 1}
    assert shown["hold_seconds_total"]["slot",] >= 0.3
    assert shown["proxy_overhead_seconds_count"]["before",] == 5
    assert shown["proxy_overhead_seconds_sum"]["before",] < shown["hold_seconds_total"]["slot",]


async def test_the_gate_before_anybody_was_there(proxy: Proxy) -> None:
    """Whoever takes rates of them needs them from the start."""
    await proxy.pool(PREFIX, "desk")
    shown = await scrape(proxy)
    assert shown["admissions_total"] == dict.fromkeys(
        [("admitted",), ("guaranteed",), ("overcommitted",), ("warned",)], 0
    )
    assert shown["admission_refusals_total"] == {(reason,): 0 for reason in REFUSALS}
    alone = [
        *("admission_policies", "admission_waiting", "turns_held", "admission_retries_refused_total"),
        *("admission_holds_total", "turn_holds_total", "turn_holds_expired_total", "turn_hold_seconds_total"),
    ]
    assert [shown[name] for name in alone] == [{(): 0}] * len(alone)
    assert "pool_target_tps" not in shown
    assert "admission_forecast_error_tps" not in shown


def test_how_good_the_forecasts_were() -> None:
    def record(mean: float | None, *forecasts: float | None, n_admits: int = 1) -> AdmitRecord:
        return AdmitRecord(SessionId("s"), 0.0, 1.0, n_admits, Forecasts(*forecasts), 20.0, mean)

    records = [
        record(10.0, 12.0, 9.0, None),
        record(10.0, 6.0, None, None),
        record(None, 1.0, 1.0, 1.0),  # nobody decoded: nothing to hold it against
        record(1.0, 9.0, 9.0, 9.0, n_admits=2),  # not what was forecast
    ]
    assert forecast_errors(records) == {"model": 3.0, "measured": 1.0}
    assert forecast_errors([]) == {}


async def test_forecasts_are_held_against_what_came(engine: FakeEngine, proxy: Proxy) -> None:
    engine.token_s = 0.01
    await proxy.pool(PREFIX, "desk")
    await proxy.control.set_policy("desk", Policy(1, settle_tokens=5))
    body = {"n_predict": 2000, "stream": True, "pool_id": "desk"}
    door = proxy.control.door
    turns = []
    for session in "ab":
        turns.append(asyncio.create_task(ask(proxy, [*PREFIX, ord(session)], session_id=session, **body)))
        await until(lambda: (rate := door.rate_of(session)) is not None and rate.tps)  # type: ignore[arg-type]  # noqa: B023
    await until(lambda: any(record.session_id == "b" and record.mean_tps for record in door.records))
    shown = await scrape(proxy)
    assert shown["admission_forecast_error_tps"].keys() == {("model",)}, "nothing was measured before"
    assert shown["admission_forecast_error_tps"]["model",] > 0
    for turn in turns:
        turn.cancel()
    await asyncio.wait(turns)


async def test_what_the_gate_did(engine: FakeEngine, proxy: Proxy) -> None:
    engine.token_s = 0.01
    await proxy.pool(PREFIX, "desk")
    await proxy.pool([7] * 40, "free")
    await proxy.control.set_policy("desk", Policy(1e6, mode="enforced", settle_max_ms=0))
    desk = {"n_predict": 2000, "stream": True, "pool_id": "desk"}
    first = asyncio.create_task(ask(proxy, [*PREFIX, 1], session_id="a", **desk))
    await until(lambda: (rate := proxy.control.door.rate_of("a")) is not None and rate.tps)  # type: ignore[arg-type]
    for fields in ({}, {"headers": {"x-stainless-retry-count": "1"}}):
        body = {"prompt": [*PREFIX, 2], "n_predict": 2, "session_id": "b"}
        refused = await proxy.client.post("/completion", json=body, **fields)
        assert refused.status_code == 429
    await ask(proxy, [*PREFIX, 3], session_id="c", overcommit=True)
    await ask(proxy, [7] * 41, session_id="d")  # no policy: nobody asks the gate
    await proxy.control.set_policy("desk", Policy(1e6, mode="enforced", on_saturation="warn", settle_max_ms=0))
    await ask(proxy, [*PREFIX, 4], session_id="e")
    await proxy.control.set_policy("desk", Policy(1e6, mode="enforced", on_saturation="queue", settle_max_ms=0))
    waiting = asyncio.create_task(ask(proxy, [*PREFIX, 5], session_id="f"))
    await until(lambda: proxy.control.door.n_waiting == 1)
    shown = await scrape(proxy)
    assert shown["admission_waiting"] == {(): 1}
    assert shown["admission_holds_total"] == {(): 1}
    assert shown["admissions_total"] == {
        ("admitted",): 0,
        ("guaranteed",): 1,
        ("overcommitted",): 1,
        ("warned",): 1,
    }
    assert shown["admission_refusals_total"] == {(reason,): int(reason == FLOOR) for reason in REFUSALS}
    assert shown["admission_retries_refused_total"] == {(): 1}
    assert shown["admission_policies"] == {(): 1}
    assert shown["pool_target_tps"] == {("desk",): 1e6}
    await proxy.control.drop_policy("desk")  # then nothing is waited for
    await waiting
    shown = await scrape(proxy)
    assert shown["admission_waiting"] == {(): 0}
    assert shown["hold_seconds_total"]["admission",] > 0
    assert shown["admissions_total"]["admitted",] == 1
    first.cancel()
    await asyncio.wait([first])


def test_a_limit_belongs_to_its_bucket() -> None:
    histogram = Histogram()
    for seconds in (0.0, 0.0001, 0.00011, 2.5, 99.0):
        histogram.add(seconds)
    assert (histogram.n[0], histogram.n[1], histogram.n[-2], histogram.n[-1]) == (2, 1, 1, 1)
    assert histogram.sum_s == pytest.approx(101.50021)


async def test_names_that_dashboards_of_vllm_know(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    async with make_proxy(engine.url, metrics_aliases="vllm") as proxy:
        await ask(proxy, PREFIX, session_id="a")
        await ask(proxy, [*PREFIX, 1, 2], session_id="a")
        hold = Hold()
        engine.on("/completion", "prefill", hold, times=None)
        tasks = [asyncio.create_task(ask(proxy, [9 * i], session_id=f"s{i}")) for i in range(6)]
        await until(lambda: hold.n == 4 and proxy.relay.desk.n_waiting == 2)
        await proxy.control.refresh()
        page = (await proxy.client.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(page)}
        told = {name: families[f"vllm:{name}"].samples[0] for name in ("num_requests_running", "num_requests_waiting")}
        assert {name: sample.value for name, sample in told.items()} == {
            "num_requests_running": 4,
            "num_requests_waiting": 2,
        }
        assert told["num_requests_running"].labels == {"model_name": "toy.gguf", "engine": "0"}
        assert families["vllm:prefix_cache_queries"].samples[0].value == 2 * len(PREFIX) + 2
        assert families["vllm:prefix_cache_hits"].samples[0].value == len(PREFIX)
        assert "vllm:prefix_cache_hits_total{" in page
        hold.release()
        await asyncio.gather(*tasks)
        stats = await proxy.control.refresh()
        assert stats is not None
        assert stats.cells is not None
        page = (await proxy.client.get("/metrics")).text
        told_usage = [line for line in page.splitlines() if line.startswith("vllm:kv_cache_usage_perc{")]
        assert [float(line.split()[-1]) for line in told_usage] == [stats.cells.used / stats.cells.total]
        assert stats.cells.used


async def test_without_being_asked_for_there_are_none(proxy: Proxy) -> None:
    assert "vllm:" not in (await proxy.client.get("/metrics")).text


async def test_the_page_is_one_that_promtool_likes(engine: FakeEngine, make_proxy: ProxyMaker) -> None:
    """Its rules: a help text and a type once for each name, counters end in _total and nothing else does, no sample
    twice, and a family's samples in one place."""
    async with make_proxy(engine.url, metrics_aliases="vllm") as proxy:
        await proxy.pool(PREFIX, "desk")
        await ask(proxy, [*PREFIX, 1], pool_id="desk", session_id="a")
        page = (await proxy.client.get("/metrics")).text
    ours = page[page.index("# HELP opencoti_polykv:") :]
    assert ours.endswith("\n")
    lines = ours.splitlines()
    helps = [line.split()[2] for line in lines if line.startswith("# HELP ")]
    types = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE ")}
    assert sorted(helps) == sorted(set(helps)) == sorted(types)
    assert all(len(line.split(maxsplit=3)) == 4 for line in lines if line.startswith("# HELP "))
    for name, kind in types.items():
        assert (kind == "counter") == name.endswith("_total"), name
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    order = [family for family, _ in itertools.groupby(sample.partition("{")[0] for sample in samples)]
    plain = [name for name in order if not name.startswith("opencoti_polykv:proxy_overhead_seconds")]
    assert len(plain) == len(set(plain))
    assert list(text_string_to_metric_families(page))
