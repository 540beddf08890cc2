"""Where a setting comes from, and what a wrong one is told."""

import os
import re
from pathlib import Path

import pytest

from polykv_proxy.config import ConfigError, Settings, load_settings, unread_variables

ROOT = Path(__file__).parents[2]

DOCUMENTED = (
    "HOST PORT UPSTREAM_URL UPSTREAM_API_KEY API_KEY ADMIN_KEY MODE STATE GRACE_TTL_S WARM_AFTER_S WARM_RAM_BYTES "
    "WARM_DISK_BYTES SESSION_GAP_S SESSION_IDLE_S AUTO_POOL_MIN_TOKENS TPS_WINDOW_TOKENS TPS_WINDOW_MS "
    "PIN_MAX_FRACTION DEFAULT_TARGET_TPS DEFAULT_MODE METRICS_ALIASES REWRITE_TOOL_CHOICE NORMALISE MAX_BODY_BYTES "
    "CLIENT_HEAD_S CLIENT_BODY_IDLE_S CLIENT_STALL_S"
)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("POLYKV_"):
            monkeypatch.delenv(name)


def test_every_documented_setting_exists_with_a_sentence_about_it():
    assert {n.lower() for n in DOCUMENTED.split(" ")} == set(Settings.model_fields)
    assert all(f.description and f.description.endswith(".") for f in Settings.model_fields.values())


def test_flag_beats_environment_beats_file_beats_default(tmp_path, monkeypatch):
    file = tmp_path / "polykv.toml"
    file.write_text('port = 1\nmode = "explicit"\nhost = "0.0.0.0"\n')
    monkeypatch.setenv("POLYKV_PORT", "2")
    monkeypatch.setenv("POLYKV_MODE", "auto")
    s = load_settings(file, port=3)
    assert (s.port, s.mode, s.host, s.max_body_bytes) == (3, "auto", "0.0.0.0", 33554432)
    assert load_settings(file, port=None).port == 2


def test_keys_come_as_a_list_or_separated_by_commas(tmp_path, monkeypatch):
    file = tmp_path / "polykv.toml"
    file.write_text('api_key = ["a", "b"]\n')
    assert load_settings(file).data_keys == ("a", "b")
    monkeypatch.setenv("POLYKV_API_KEY", "x, y,")
    assert load_settings(file).data_keys == ("x", "y")
    assert "x" not in repr(load_settings(file).api_key)


def test_addresses_come_as_a_list_or_separated_by_commas(tmp_path, monkeypatch):
    file = tmp_path / "polykv.toml"
    file.write_text('host = ["127.0.0.1", "::1"]\n')
    assert load_settings().hosts == ("127.0.0.1",)
    assert load_settings(file).hosts == ("127.0.0.1", "::1")
    monkeypatch.setenv("POLYKV_HOST", " ::1,, 10.0.0.1,::1 ,")
    assert load_settings(file).hosts == ("::1", "10.0.0.1")
    assert load_settings(file, host="0.0.0.0").hosts == ("0.0.0.0",)


def test_empty_environment_variable_means_not_set(monkeypatch):
    for name in ("ADMIN_KEY", "DEFAULT_TARGET_TPS", "STATE", "API_KEY"):
        monkeypatch.setenv(f"POLYKV_{name}", "")
    s = load_settings()
    assert (s.admin_key, s.default_target_tps, s.state, s.data_keys) == (None, None, None, ())


def test_state_path_is_named_after_the_upstream():
    assert load_settings(upstream_url="http://[::1]:81/").state_path.endswith("/polykv/__1_81.db")
    assert load_settings(state=":memory:").state_path == ":memory:"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": "x"}, "--port: "),
        ({"host": " , "}, "--host: needs at least one address"),
        ({"host": "127.0.0.1,a.sock"}, "--host: a.sock: the proxy listens on IP addresses, not on UNIX sockets"),
        ({"host": 7}, "--host: "),
        ({"mode": "z"}, "--mode: Input should be 'auto' or 'explicit' (got 'z')"),
        ({"upstream_url": "localhost:8080"}, "--upstream: must be like http://127.0.0.1:8080"),
        ({"upstream_url": "http://x:99999"}, "--upstream: must be like"),
        ({"default_target_tps": "inf"}, "--default-target-tps: "),
        ({"default_target_tps": 0}, "--default-target-tps: "),
        ({"default_target_tps": 1000001}, "--default-target-tps: "),
        ({"default_mode": "strict"}, "--default-mode: "),
        ({"no_such": 1}, "--no-such: no such setting"),
        (
            {"warm_disk_bytes": "1GiB"},
            "--warm-disk-bytes: is a whole number of bytes, like 1073741824 for 1 GiB (got '1GiB')",
        ),
    ],
)
def test_wrong_flag_is_one_line_that_names_it(given, said):
    with pytest.raises(ConfigError) as e:
        load_settings(**given)
    assert str(e.value).startswith(said)
    assert "\n" not in str(e.value)


def test_wrong_environment_and_file_are_named_as_written(tmp_path, monkeypatch):
    file = tmp_path / "polykv.toml"
    file.write_text("prot = 1")
    with pytest.raises(ConfigError, match=r"^prot \(config file\): no such setting$"):
        load_settings(file)
    file.write_text("port = ")
    with pytest.raises(ConfigError, match="not TOML"):
        load_settings(file)
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(tmp_path / "none.toml")
    monkeypatch.setenv("POLYKV_GRACE_TTL_S", "soon")
    with pytest.raises(ConfigError, match=r"^POLYKV_GRACE_TTL_S: "):
        load_settings()


def test_a_wrong_key_is_not_repeated():
    with pytest.raises(ConfigError) as e:
        load_settings(api_key=["s3cret", {}])
    assert "s3cret" not in str(e.value)


def test_a_variable_that_nobody_reads_is_told_of_with_the_nearest_setting():
    given = {
        **{"POLYKV_WRAM": "3", "POLYKV_API_KEYS": "s3cret", "polykv_prot": "1", "POLYKV_FOO": "1"},
        **{"POLYKV_PORT": "1", "polykv_mode": "auto", "POLYKV_URL": "http://x", "POLYKV_GONE": "", "OTHER": "1"},
    }
    told = unread_variables(given)
    assert told == {
        "POLYKV_API_KEYS": "POLYKV_API_KEYS is in the environment, and there is no such setting: "
        "did you mean POLYKV_API_KEY?",
        "POLYKV_FOO": "POLYKV_FOO is in the environment, and there is no such setting: see the settings in docs/api.md",
        "POLYKV_WRAM": "POLYKV_WRAM is in the environment, and there is no such setting: "
        "did you mean POLYKV_WARM_RAM_BYTES?",
        "polykv_prot": "polykv_prot is in the environment, and there is no such setting: did you mean POLYKV_PORT?",
    }


def test_what_the_project_itself_reads_is_not_told_of():
    """Every variable that its own files look up."""
    looked_up = re.compile(r"""(?:environ(?:\.get\(|\[)|envvar=)\s*"(POLYKV_\w+)"|\$\{(POLYKV_\w+)""")
    files = [ROOT / "compose.yaml", ROOT / "deploy" / "env.example", ROOT / "deploy" / "check-containers"]
    for folder in ("polykv_proxy", "conformance", "benchmarks", "tests"):
        files += (ROOT / folder).rglob("*.py")
    names = {name for file in files for found in looked_up.findall(file.read_text()) for name in found if name}
    assert {"POLYKV_BASE_URL", "POLYKV_CACHE", "POLYKV_BATCH", "POLYKV_TEST_SEED", "POLYKV_ENGINE"} <= names
    assert unread_variables(dict.fromkeys(names, "1")) == {}
