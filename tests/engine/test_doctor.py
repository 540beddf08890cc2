"""The doctor in front of the real engine: what it finds is what was started."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .noise import Noise
from .pooled_client import Client, client_of

pytestmark = pytest.mark.engine

KEPT_NOTHING = {"journal_in_memory": "warning"}
"""These stacks keep their pools in memory."""


def examined(url: str) -> tuple[int, dict[str, str]]:
    """Exit status of ``polykvctl doctor --json``, and id → severity."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLYKV_")}
    command = [sys.executable, "-m", "polykv_proxy.cli", "doctor", "--json", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, env=kept, timeout=60, check=False)
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {finding["id"]: finding["severity"] for finding in findings}


def log_of(client: Client) -> str:
    return client.stack.log_path.read_text()


def test_up_as_it_comes(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    with client_of(chat_model, tmp_path, noise) as client:
        assert examined(client.stack.url) == (0, KEPT_NOTHING)


def test_everything_that_costs(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    flags = (
        "-b",
        "2048",
        "--cache-idle-slots",
        "--context-shift",
        "--cache-reuse",
        "64",
        "--polykv-prefill-quota",
        "0",
    )
    flags += ("--sleep-idle-seconds", "600", "--host", "0.0.0.0")
    with client_of(chat_model, tmp_path, noise, *flags) as client:
        status, findings = examined(client.stack.url)
        assert status == 0
        assert findings == KEPT_NOTHING | {
            "batch_large": "warning",
            "idle_slots_cleared": "warning",
            "prefill_quota_off": "warning",
            "sleep_loses_pools": "warning",
            "engine_open": "warning",
            "cache_ram_unpooled_only": "info",
            "context_shift_not_for_pools": "warning",
            "cache_reuse_not_for_pools": "info",
        }
        assert "[batch_large]" in log_of(client), "the log has the warnings"
        assert "[cache_ram_unpooled_only]" not in log_of(client)


def test_a_sliding_window_that_cannot_share(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    with client_of(chat_model, tmp_path, noise, model_name="sliding") as client:
        status, findings = examined(client.stack.url)
        assert (status, findings["swa_without_full"]) == (1, "error")
        assert "--swa-full" in log_of(client)


def test_an_engine_without_pools(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    with client_of(chat_model, tmp_path, noise, "--polykv-max-pools", "0") as client:
        status, findings = examined(client.stack.url)
        assert (status, findings["engine_without_pools"]) == (1, "error")


def test_a_split_cache_is_told_with_its_streams(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    with client_of(chat_model, tmp_path, noise, "--no-kv-unified", "-c", "33792", "--polykv-max-pools", "6") as client:
        status, findings = examined(client.stack.url)
        assert status == 0
        assert findings["split_cache"] == "info"
        assert findings["split_context_small"] == "warning"
        assert any("INFO" in line and "every share is a copy" in line for line in log_of(client).splitlines())

        def streams() -> list[Any]:
            view = client.stack.http.get("/polykv/pools").json()
            return [view[key] for key in ("kv_streams_total", "kv_streams_free", "kv_cells_per_stream")]

        assert streams() == [12, 10, 2816]
        client.make_pool()
        assert streams() == [12, 9, 2816]
        client.complete(client.trunk + noise(2, 20), session_id="agent")
        assert streams() == [12, 8, 2816]


def test_a_unified_cache_has_no_streams(chat_model: Path, tmp_path: Path, noise: Noise) -> None:
    with client_of(chat_model, tmp_path, noise, model_name="recurrent") as client:
        view = client.stack.http.get("/polykv/pools").json()
        assert [view[key] for key in ("kv_streams_total", "kv_streams_free", "kv_cells_per_stream")] == [None] * 3
        assert examined(client.stack.url)[1]["recurrent_model"] == "info"


def test_up_refuses_sizes_that_the_engine_would_refuse(tmp_path: Path, chat_model: Path) -> None:
    for sizes, said in (
        (["--max-pools", "251"], "257 sequences"),
        (["--batch", "16"], "smaller than the 22 sequences"),
    ):
        command = [sys.executable, "-m", "polykv_proxy.cli", "up", "--model", str(chat_model), *sizes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
