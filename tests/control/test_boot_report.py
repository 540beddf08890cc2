"""What the log says about the engine that was found."""

import logging

import pytest

from polykv_proxy.control.diagnosis import boot_lines
from polykv_proxy.doctor import EngineFlagFacts, Facts
from tests.control.conftest import eventually, planes
from tests.fake_engine import FakeEngine


def said(**facts: object) -> list[tuple[int, str]]:
    known = {"hooks": True, "share": "ok", "n_slots": 4, "max_pools": 16, "kv_unified": True, "hosts": ("127.0.0.1",)}
    return boot_lines(Facts(**known | facts))  # type: ignore[arg-type]


def test_a_plain_llama_server_is_a_warning_that_says_what_to_do():
    [(level, line)] = said(hooks=False)
    assert level == logging.WARNING
    assert "pools are off" in line
    assert "polykvctl engine build" in line


def test_a_good_engine_is_one_line():
    assert said() == [(logging.INFO, "the engine is ready: 4 slots, up to 16 pools")]


def test_what_is_only_good_to_know_is_left_to_the_doctor():
    flags = EngineFlagFacts(cache_ram_mib=4096, cache_reuse=256, n_lora=1)
    assert len(said(flags=flags, warm_off="the engine keeps no state in memory")) == 1


def test_a_sliding_window_without_full_cache_names_the_flag():
    lines = said(share="the model has a sliding window", n_swa=1024, swa_full=False)
    assert [level for level, _ in lines] == [logging.INFO, logging.WARNING]
    assert "--swa-full" in lines[1][1]


def test_a_split_cache_is_told_as_copies():
    lines = said(kv_unified=False, n_ctx_slot=8192, n_streams=22)
    assert [level for level, _ in lines] == [logging.INFO, logging.INFO]
    assert "every share is a copy" in lines[1][1]
    assert "--kv-unified" in lines[1][1]


def test_a_dangerous_flag_is_a_warning():
    lines = said(flags=EngineFlagFacts(cache_idle_slots=True, n_batch=2048))
    assert [level for level, _ in lines] == [logging.INFO, logging.WARNING, logging.WARNING]


def test_a_shifting_context_beside_pools_is_a_warning():
    lines = said(flags=EngineFlagFacts(context_shift=True))
    assert [level for level, _ in lines] == [logging.INFO, logging.WARNING]
    assert "a pooled session ends at its context" in lines[1][1]


@pytest.mark.parametrize(
    ("key", "said"), [(None, "POLYKV_UPSTREAM_API_KEY is not set"), ("x", "refuses the key of POLYKV_UPSTREAM_API_KEY")]
)
async def test_an_engine_that_asks_for_a_key_is_one_warning(
    caplog: pytest.LogCaptureFixture, key: str | None, said: str
):
    caplog.set_level(logging.INFO, "polykv.engine")
    async with FakeEngine(api_key="k") as engine, planes(engine, upstream_api_key=key, heartbeat_s=0.01) as plane:
        n = len(engine.received)
        await eventually(lambda: len(engine.received) > n + 4)
        [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert said in record.message
        assert "POLYKV_API_KEY" in record.message
        assert plane.control.watch.state == "unknown"


async def test_an_engine_that_asks_for_a_key_since_it_was_restarted_is_a_warning_too(caplog: pytest.LogCaptureFixture):
    async with FakeEngine() as engine, planes(engine, heartbeat_s=0.01) as plane:
        caplog.set_level(logging.WARNING, "polykv.engine")
        engine.api_key = "k"
        await eventually(lambda: plane.control.watch.state == "unknown")
        assert not plane.control.health()[0]
        [line] = [record.message for record in caplog.records if "key" in record.message]
        assert "set it to the engine's --api-key" in line
        engine.api_key = None
        await eventually(lambda: plane.control.health()[0])


async def test_told_again_when_the_engine_comes_back_otherwise(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "polykv.engine")

    def told() -> list[str]:
        return [record.message for record in caplog.records if "the engine is ready" in record.message]

    async with FakeEngine() as engine, planes(engine):
        assert told() == ["the engine is ready: 4 slots, up to 16 pools"]
        engine.max_pools = 8
        await engine.restart()
        await eventually(lambda: told()[-1] == "the engine is ready: 4 slots, up to 8 pools")
