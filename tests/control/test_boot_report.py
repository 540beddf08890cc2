"""What the log says about the engine that was found."""

import logging

from polykv_proxy.control.watch import boot_report
from polykv_proxy.upstream import Stats


def said(hooks: bool, **facts: object) -> list[tuple[int, str]]:
    return boot_report(hooks, Stats.model_validate({"n_slots": 4, "max_pools": 16, "share": "ok", **facts}))


def test_a_plain_llama_server_is_a_warning_that_says_what_to_do():
    [(level, line)] = boot_report(False, None)
    assert level == logging.WARNING
    assert "pools are off" in line
    assert "polykvctl engine build" in line


def test_a_good_engine_is_one_line():
    assert said(True) == [(logging.INFO, "the engine is ready: 4 slots, up to 16 pools")]


def test_a_reason_against_sharing_and_a_split_cache_are_warnings():
    lines = said(True, share="start it with --swa-full", kv_unified=False)
    assert [level for level, _ in lines] == [logging.INFO, logging.WARNING, logging.WARNING]
    assert "--swa-full" in lines[1][1]
    assert "--kv-unified" in lines[2][1]
